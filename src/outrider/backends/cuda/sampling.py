"""Sampling where the model computes: the device draws and judges, the host is told a few numbers per request.

A round is a handful of kernels (`choosing`, `judging`) and one small copy, whatever rules and shapes its requests mix.
Controls that need a row as a whole or its history (top-k, top-p, penalties, constraints, ...) are the reference's, on
the device; the kernels take over from there. Drafts that were drawn here stay here until the verdict: nobody waits for
them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from outrider.backends.cuda import novelty
from outrider.backends.cuda.choosing import choose, spread
from outrider.backends.cuda.graphs import Graphs
from outrider.backends.cuda.judged_chains import JudgedChains, Kind
from outrider.backends.cuda.judging import JOB, OUT, ROW, rule
from outrider.backends.torch_common import on, sent
from outrider.errors import DraftError, OutriderError
from outrider.sampling.noise import Stream
from outrider.sampling.ops import SamplingOps, remember
from outrider.sampling.tree import build_tree_layout
from outrider.sampling.warp import is_simple, shape
from outrider.types import Array, Drafts, Job, Scores, Verdicts, Watch

log = logging.getLogger("outrider")
MOST_ROWS, MOST_KINDS = 64, 16  # of verdicts that are graphs: each kind holds its rows
Ints = np.ndarray[Any, np.dtype[np.int32]]


class Verdict(NamedTuple):
    """What the device knows before the host: the token that follows in each job; and where there were drafts, how many
    of them stay and what was drawn to come next. [B], [B], [B, steps]"""

    following: torch.Tensor
    accepted: torch.Tensor | None = None
    drawn: torch.Tensor | None = None


class Known(NamedTuple):
    """The same on the host. `key` is the device's `following`."""

    key: torch.Tensor | None
    following: Array
    accepted: Array


class Settings(NamedTuple):
    """What does not change while the batch is the same."""

    warmth: torch.Tensor  # [R, 2] temperature and log of min_p of each row, on the device
    words: Ints  # [R, 2] of seeds
    weighs: list[bool]  # jobs whose drafts the judge weighs: `rejection`, not greedy
    is_simple: bool  # nothing but temperature and min_p
    is_greedy: bool


class Form(NamedTuple):
    """What rounds of one form have in common, on the host: rows and jobs as `judging` takes them, but for numbers that
    belong to requests."""

    rows: Ints  # [R, ROW]
    jobs: Ints  # [B, JOB]
    owner: Array  # [R] the job of each row
    depth: Ints  # [R] drafts on the way to it
    parent: list[int]  # [R] the row it comes from, where there are trees
    there: dict[Hashable, torch.Tensor]  # what of it is on the device already


class DeviceSampling(SamplingOps):
    """`SamplingOps` for torch on a GPU."""

    def __init__(self, device: torch.device) -> None:
        import array_api_compat.torch as xp

        super().__init__(xp, device)
        self.may_defer = False  # whether the model can be fed tokens that only the device knows
        self.foresee: Callable[[Verdict], None] | None = None  # told of a verdict before the host knows it
        self.known: Known | None = None  # the last one, since the host knows it
        self._arrived = torch.empty(1024, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.follows = False  # whether the pass to be judged was queued behind the last verdict
        self.waits = False  # whether it comes behind one that was queued for nothing
        self._arrivals: list[Any] = []  # of the last verdict and of this one
        if device.type == "cuda":
            self._arrivals = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        self.waited_s = 0.0  # for the device, all in all
        self._followed: torch.Tensor | None = None  # what the draft and the target went on behind, last
        self._built = 0  # how much had been when the last verdict was due
        self._is_first = False  # whether something was built for this one
        self._settings: dict[Hashable, Settings] = {}
        self._nothings: dict[Hashable, torch.Tensor] = {}
        self._forms: dict[Hashable, Form] = {}
        self._judged_chains: dict[Kind, JudgedChains] = {}
        self._recording: Graphs | None = None

    @property
    def queues(self) -> bool:
        return self.foresee is not None

    def integers(self, values: Sequence[int]) -> Array:
        if len(values) == 0:
            return self.nothing  # no copy
        return super().integers(values) if isinstance(values, torch.Tensor) else sent(values, np.int64, self.device)

    def fed(self, tokens: Sequence[int]) -> Array:
        """On the host: they travel with everything else a pass is told."""
        return np.asarray(tokens, dtype=np.int64)

    def defers(self, drafts: Drafts) -> bool:
        tokens = drafts.tokens
        return self.may_defer and isinstance(tokens, torch.Tensor) and tokens.device == self.device

    def adopt(self, drafts: Drafts) -> Drafts:
        if not drafts.device.is_deferred:
            drafts._proposals = drafts.proposals()  # looked at by the host several times in a round, copied once
        return super().adopt(drafts)

    def drawing(self, jobs: Sequence[Job], steps: int, further: Array | None = None) -> Drawing | None:
        with on(self.device):
            return self._drawing(jobs, steps, further)

    def _drawing(self, jobs: Sequence[Job], steps: int, further: Array | None) -> Drawing | None:
        settings = self._settings_of(jobs, [1] * len(jobs))
        if not settings.is_simple:
            return None
        if settings.is_greedy:
            key = ("greedy", len(jobs), steps)
            nothing = remember(
                self._nothings, key, lambda: torch.zeros(steps, len(jobs), 3, dtype=torch.int32, device=self.device)
            )
            return Drawing(nothing, settings.warmth, False, None, self.device)
        starts = np.asarray([len(job.tokens) for job in jobs], dtype=np.int32)
        streams = [Stream.DRAFT if weighed else Stream.TARGET for weighed in settings.weighs]
        asked = np.empty((steps, len(jobs), 3), dtype=np.int32)
        asked[:, :, :2] = settings.words
        asked[:, :, 2] = 4 * (starts + np.arange(steps, dtype=np.int32)[:, None]) + np.asarray(streams, dtype=np.int32)
        certain = None
        is_weighed = any(settings.weighs)
        if is_weighed and not all(settings.weighs):  # rows of drafts that are not weighed are one-hot
            certain = sent(settings.weighs, np.float32, self.device)
        there = sent(asked, np.int32, self.device)
        if further is not None:
            there[:, :, 2] += 4 * further
        return Drawing(there, settings.warmth, is_weighed, certain, self.device)

    def judge(self, jobs: Sequence[Job], drafts: Drafts, scores: Scores) -> Verdicts:
        if not jobs or scores.counts != [count + 1 for count in drafts.counts]:  # no row behind the last draft
            return super().judge(jobs, drafts, scores)
        with on(self.device):
            verdicts, settings = None, self._settings_of(jobs, scores.counts)
            if settings.is_simple:
                verdicts = self._judged(jobs, drafts, torch.as_tensor(scores.logits), scores.hidden, {})
            if verdicts is None:  # or a row cannot be used: the reference says why
                self.follows = self.follows and not settings.is_simple  # else this is a second look
                controls = self._controls_of(jobs, scores.counts)
                shaped = shape(self.xp, scores.logits, controls, self._history(jobs, drafts, scores))
                verdicts = self._judged(jobs, drafts, shaped.logits, scores.hidden, shaped.faults, is_shaped=True)
            assert verdicts is not None, "shaped rows can always be used"
            return verdicts

    def _judged(
        self,
        jobs: Sequence[Job],
        drafts: Drafts,
        logits: torch.Tensor,
        states: Mapping[int, Array],
        faults: dict[int, OutriderError],
        *,
        is_shaped: bool = False,
    ) -> Verdicts | None:
        """None where a row cannot be used. faults: of rows, which count for those whose job came there."""
        logits = logits.float()
        if logits.stride(1) != 1:  # a backend of somebody else's may lay its rows out as it likes
            logits = logits.contiguous()
        form = self._form(drafts)
        counts = [count + 1 for count in drafts.counts]
        settings = self._settings_of(jobs, counts, is_shaped=is_shaped)
        asked = self._asked(form, jobs, settings)
        if not any(drafts.counts):
            chosen = choose(logits, asked, settings.warmth).tokens
            verdict = Verdict(chosen)
            following = self._told(chosen, None if self.foresee is None else partial(self.foresee, verdict))
            ends, bad = form.jobs[:, 0], following < 0
            self.known = Known(chosen, following, np.zeros_like(following))
        else:
            there = remember(form.there, tuple(settings.weighs), lambda: self._about(form, settings))
            numbers, follow = self._ruled(logits, drafts, asked, there, settings), drafts.device.follow
            out, meanwhile = numbers[: there.shape[0] * OUT.value].view(-1, OUT.value), None
            if follow is not None:
                meanwhile = partial(self._go_on, follow, out[:, 0] - there[:, 0], out[:, 1], states)
            told = self._told(numbers, meanwhile)
            found = told[: out.numel()].reshape(out.shape)
            ends, following, bad = found[:, 0], found[:, 1], found[:, 2] > 0
            self.known = Known(self._followed, following, ends - form.jobs[:, 0])
            if drafts._proposals is None:
                _arrive(drafts, told[out.numel() :].tolist())
        if bad.any() and not is_shaped:
            return None
        verdicts = _verdicts(form, drafts, ends, following, faults)
        verdicts.is_first = self._is_first
        verdicts.seconds = self._seconds(drafts.device.watch)
        can_be = drafts.device.may_be_queued or not any(drafts.counts)
        verdicts.missed_prelaunch = self.queues and not self.follows and (can_be or self.waits)
        return verdicts

    def _seconds(self, watch: Watch | None) -> tuple[float, float] | None:
        """The device's own seconds of drafting, and of the rest of the time since the last verdict. None if the pass
        was not prelaunched: the device waited for the host, and that time would count."""
        if not self.follows or not self._arrivals:
            return None
        round_s: float = self._arrivals[0].elapsed_time(self._arrivals[1]) / 1e3
        draft_s = 0.0 if watch is None else watch.seconds()
        return draft_s, max(0.0, round_s - draft_s)

    def _ruled(
        self, logits: torch.Tensor, drafts: Drafts, asked: torch.Tensor, there: torch.Tensor, settings: Settings
    ) -> torch.Tensor:
        """What `rule` says, and behind it the drafts that the host has not seen yet. [n] int32"""
        tokens, rejects, branches = torch.as_tensor(drafts.tokens), any(settings.weighs), bool(drafts.parents)
        is_unseen = drafts._proposals is None
        if is_unseen and not rejects and not branches and len(logits) <= MOST_ROWS:
            kind = Kind(logits.shape[0], logits.shape[1], len(tokens), len(there))
            chains = self._judged_chains.get(kind)
            if chains is None:
                if len(self._judged_chains) == MOST_KINDS:
                    del self._judged_chains[next(iter(self._judged_chains))]
                chains = self._judged_chains[kind] = JudgedChains(kind, (asked, there), self._graphs())
            return chains.run(logits, tokens, asked, there, settings.warmth)
        judged = tokens.clamp(min=0) if drafts.device.is_deferred else tokens
        out, _ = rule(logits, judged, drafts.probs, asked, there, settings.warmth, rejects=rejects, branches=branches)
        return torch.cat([out.flatten(), tokens.int()]) if is_unseen else out.flatten()

    def _graphs(self) -> Graphs | None:
        if self.device.type == "cuda" and self._recording is None:
            self._recording = Graphs(self.device)
        return self._recording

    def _asked(self, form: Form, jobs: Sequence[Job], settings: Settings) -> torch.Tensor:
        """Rows as `judging` takes them."""
        if settings.is_greedy:  # nobody's luck is asked for: the same again and again
            return remember(form.there, "greedy", lambda: sent(form.rows, np.int32, self.device))
        rows = form.rows.copy()
        rows[:, :2] = settings.words
        rows[:, 2] = 4 * (np.asarray([len(job.tokens) for job in jobs], dtype=np.int32)[form.owner] + form.depth)
        return sent(rows, np.int32, self.device)

    def _about(self, form: Form, settings: Settings) -> torch.Tensor:
        """Jobs as `judging` takes them."""
        about = form.jobs.copy()
        about[:, 1] = settings.weighs
        return sent(about, np.int32, self.device)

    def _go_on(
        self, follow: Callable[..., Any], accepted: torch.Tensor, following: torch.Tensor, states: Mapping[int, Array]
    ) -> None:
        """The draft goes on behind the verdict, and the target behind the draft."""
        drawn = follow(accepted, following, states)
        if drawn is not None and self.foresee is not None:
            self._followed = following
            self.foresee(Verdict(following, accepted, drawn))

    def _form(self, drafts: Drafts) -> Form:
        key = (tuple(drafts.counts), tuple((index, tuple(line)) for index, line in drafts.parents.items()))
        return remember(self._forms, key, lambda: _build_form(drafts.counts, drafts.parents))

    def _told(self, numbers: torch.Tensor, meanwhile: Callable[[], None] | None = None) -> Any:
        """Some integers of the device on the host. What comes next is queued before anybody waits. [n] int64"""
        if len(numbers) > len(self._arrived):
            self._arrived = torch.empty(2 * len(numbers), dtype=torch.int32, pin_memory=numbers.is_cuda)
        arrived = self._arrived[: len(numbers)]
        arrived.copy_(numbers, non_blocking=True)
        if self._arrivals:
            self._arrivals.reverse()
            self._arrivals[1].record()
        self._built, before = novelty.count(), self._built  # what is built below delays this round and the next
        if meanwhile is not None:
            try:
                meanwhile()
            except Exception:  # it was for nothing, then: nobody has asked for it yet
                log.warning("what comes next could not be queued", exc_info=True)
        self._is_first = novelty.count() != before
        if self._arrivals:
            started = time.perf_counter()
            self._arrivals[1].synchronize()
            self.waited_s += time.perf_counter() - started
        return arrived.numpy().astype(np.int64)

    def _settings_of(self, jobs: Sequence[Job], counts: Sequence[int], *, is_shaped: bool = False) -> Settings:
        """For so many rows of each job. Rows that were shaped have temperature and min_p behind them."""

        def build() -> Settings:
            values = []
            for job in jobs:
                temperature, min_p = job.params.temperature, job.params.min_p
                floor = math.log(min_p) if min_p > 0.0 and not is_shaped else -math.inf
                # a denormal would become 0 in float32, and 0 / 0 is no number
                warm = 1.0 if is_shaped else max(temperature, 1e-30)
                values.append((0.0 if temperature == 0.0 else warm, floor))
            settings = np.repeat(np.asarray(values, dtype=np.float32), counts, axis=0)
            words = np.repeat(np.asarray([job.words for job in jobs], dtype=np.int32), counts, axis=0)
            weighs = [job.rule == "rejection" and job.params.temperature > 0.0 for job in jobs]
            is_greedy = not any(job.params.temperature for job in jobs)
            warmth = sent(settings, np.float32, self.device)
            return Settings(warmth, words, weighs, all(map(is_simple, jobs)), is_greedy)

        return remember(self._settings, (tuple([job.id for job in jobs]), tuple(counts), is_shaped), build)


class StopWatch:
    """Events in the device's queue: drafting began, drafting ended."""

    def __init__(self) -> None:
        self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]

    def mark(self, number: int) -> None:
        self._marks[number].record()

    def seconds(self) -> float:
        began, ended = self._marks
        return float(began.elapsed_time(ended)) / 1e3


class Drawing:
    """Draws tokens of a draft, step after step, without a look of the host: one token for each job from its row."""

    def __init__(
        self, asked: torch.Tensor, settings: torch.Tensor, is_weighed: bool, weights: torch.Tensor | None,
        device: torch.device,
    ) -> None:  # fmt: skip
        """asked: [steps, B, 3]. weights: [B] 0 for jobs whose draft is certain where others' is weighed."""
        self._asked, self._settings, self._weights = asked, settings, weights
        self._device = device
        self._step, self._is_weighed = 0, is_weighed
        self._tokens = torch.empty(asked.shape[1], asked.shape[0], dtype=torch.int32, device=device)
        self._probs: torch.Tensor | None = None
        self.watch = StopWatch() if device.type == "cuda" else None
        if self.watch is not None:
            self.watch.mark(0)

    @property
    def drawn(self) -> torch.Tensor:
        return self._tokens

    @property
    def plainly(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What `choose` is to be asked, step by step, where nothing but tokens is wanted: somebody may draw them all
        in a graph of their own and say so (`take`). None where rows are kept, too."""
        return None if self._is_weighed else (self._asked, self._settings)

    def take(self, tokens: torch.Tensor) -> None:
        """All steps were drawn elsewhere. [B, steps]"""
        self._tokens, self._step = tokens, len(self._asked)
        if self.watch is not None:
            self.watch.mark(1)

    def step(self, logits: Array) -> torch.Tensor:
        """The tokens to be fed next. [B, V] -> [B] int32"""
        with on(self._device):
            logits, number = torch.as_tensor(logits), self._step
            self._step += 1
            chosen = choose(logits, self._asked[number], self._settings)
            self._tokens[:, number] = chosen.tokens
            if self._is_weighed:
                self._keep(logits, chosen, number)
            if self.watch is not None and self._step == len(self._asked):
                self.watch.mark(1)
            return chosen.tokens.clamp(min=0)  # -1: a row that cannot be used; the host will see

    def _keep(self, logits: torch.Tensor, chosen: Any, number: int) -> None:
        """The row that the tokens were drawn from."""
        if self._probs is None:
            self._probs = torch.empty(*self._tokens.shape, logits.shape[1], device=self._device)
        settings = self._settings
        if self._weights is not None:
            settings = torch.stack([settings[:, 0] * self._weights, settings[:, 1]], dim=1)
        spread(logits, chosen, settings, self._probs[:, number])

    def result(self, counts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The first counts[b] tokens of job b, job after job, and their rows. [N], [N, V]"""
        steps = self._tokens.shape[1]
        tokens, probs = self._tokens.flatten(), None if self._probs is None else self._probs.flatten(0, 1)
        if any(count != steps for count in counts):
            chosen = [job * steps + step for job, count in enumerate(counts) for step in range(count)]
            at = sent(chosen, np.int64, self._device)
            tokens, probs = tokens[at], None if probs is None else probs[at]
        return tokens, probs


def _build_form(counts: Sequence[int], parents: dict[int, list[int]]) -> Form:
    if not parents:
        return _build_chains(np.asarray(counts, dtype=np.int32))
    lines = [parents.get(index, range(-1, count - 1)) for index, count in enumerate(counts)]
    tree = build_tree_layout(np, None, [list(line) for line in lines])
    rows = np.zeros((len(tree.owner), ROW.value), dtype=np.int32)
    for place, column in enumerate((tree.draft, tree.child, tree.sibling, tree.rank), start=3):
        rows[:, place] = column
    jobs = np.zeros((len(counts), JOB.value), dtype=np.int32)
    jobs[:, 0] = tree.first
    return Form(rows, jobs, tree.owner, np.asarray(tree.depth, dtype=np.int32), tree.parent, {})


def _build_chains(counts: Ints) -> Form:
    """The same where everybody has at most one child, for batches whose counts change from round to round."""
    sizes = counts + 1
    first = np.cumsum(sizes, dtype=np.int32) - sizes
    owner = np.repeat(np.arange(len(counts)), sizes)
    row = np.arange(len(owner), dtype=np.int32)
    depth = row - first[owner]
    rows = np.zeros((len(owner), ROW.value), dtype=np.int32)
    rows[:, 3] = np.where(depth > 0, row - owner - 1, 0)
    rows[:, 4] = np.where(depth < counts[owner], row + 1, -1)
    rows[:, 5] = -1
    jobs = np.zeros((len(counts), JOB.value), dtype=np.int32)
    jobs[:, 0] = first
    return Form(rows, jobs, owner, depth, [], {})


def _verdicts(form: Form, drafts: Drafts, ends: Any, following: Any, faults: dict[int, OutriderError]) -> Verdicts:
    """From the rows where jobs ended."""
    accepted = form.depth[ends].astype(np.int64)
    paths = {}
    for index in drafts.parents:
        row, root, path = int(ends[index]), int(form.jobs[index, 0]), list[int]()
        while row != root:
            path.append(row - root - 1)
            row = form.parent[row]
        paths[index] = path[::-1]
    whose: dict[int, OutriderError] = {}
    for row, fault in faults.items():
        job = int(form.owner[row])
        at = row - int(form.jobs[job, 0])  # within its job: 0 is the root, i + 1 comes after draft i
        if at == 0 or (at - 1 in paths[job] if job in paths else at <= accepted[job]):
            whose[job] = fault  # the others are of a text that never was
    for index, proposal in enumerate(drafts.proposals()) if drafts.device.is_deferred else ():
        if min(proposal, default=0) < 0:
            whose[index] = DraftError(
                "the draft failed: its rows hold no finite logits; check its weights and number format", param="draft"
            )
    return Verdicts(accepted, following, whose, paths)


def _arrive(drafts: Drafts, tokens: list[int]) -> None:
    """The host knows now what was drafted."""
    drafts._proposals, start = [], 0
    for count in drafts.counts:
        drafts._proposals.append(tokens[start : start + count])
        start += count
