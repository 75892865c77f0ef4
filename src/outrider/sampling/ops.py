"""Sampling for one array library and device: the two calls the engine makes of it, `draft` and `judge`.

This is the array-API reference, for numpy and torch. A backend may bring a fused twin of these two methods.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeVar

from array_api_compat import is_numpy_array, is_numpy_namespace, is_torch_array

from outrider.errors import OutriderError
from outrider.sampling.accept import Layout, Ruling, build_layout, match, reject
from outrider.sampling.branch import DraftRows
from outrider.sampling.noise import Noise, Stream
from outrider.sampling.tree import TreeLayout, build_tree_layout, match_tree, path_to, reject_tree
from outrider.sampling.warp import Controls, History, Shaped, build_controls, shape, softmax
from outrider.types import Array, Drafts, Job, Scores, Verdicts, Watch

T = TypeVar("T")
REMEMBERED = 64  # batch shapes whose index arrays and settings are kept: a steady batch has one or two


class Drawn(NamedTuple):
    """One drafted token per job [B], the rows they were drawn from [B, V] (None: all one-hot), faults by job."""

    tokens: Array
    probs: Array | None
    faults: dict[int, OutriderError]


class Drawing(Protocol):
    """Tokens of a draft that feeds itself."""

    def step(self, logits: Array) -> Array:
        """The tokens to be fed next, from a row of each job. [B, V] -> [B]"""

    @property
    def watch(self) -> Watch | None: ...

    @property
    def drawn(self) -> Array:
        """What was drawn so far, and room for the rest. [B, steps]"""

    def result(self, counts: Sequence[int]) -> tuple[Array, Array | None]:
        """The first counts[b] tokens of job b, job after job, and the rows they were drawn from. [N], [N, V]

        Once all are drawn.
        """


class _Kind(NamedTuple):
    """How a job is judged."""

    is_matching: bool  # by the target's own token (`coupled`, greedy), or by rejection
    is_tree: bool


class SamplingOps:
    """Draws draft tokens and judges drafts, for jobs with different settings, rules and draft lengths in one call."""

    def __init__(self, xp: Any, device: Any = None) -> None:
        self.xp = xp
        self.device = device = xp.asarray(0, device=device).device  # named, so that what comes from elsewhere is moved
        self.noise = Noise(xp, device)
        self.nothing = xp.asarray([], dtype=xp.int64, device=device)  # most rounds ask for no tokens
        self._layouts: dict[Hashable, Layout] = {}
        self._trees: dict[Hashable, TreeLayout] = {}
        self._controls: dict[Hashable, Controls] = {}

    @property
    def queues(self) -> bool:
        """Whether passes of plain rounds run before anybody asks for them."""
        return False

    def integers(self, values: Sequence[int]) -> Array:
        return self.xp.asarray(values, dtype=self.xp.int64, device=self.device)

    def fed(self, tokens: Sequence[int]) -> Array:
        """Tokens for a pass of the model this belongs to."""
        return self.integers(tokens)

    def one_hot(self, tokens: Array, vocab_size: int) -> Array:
        """Rows that are certain of their token. [N] -> [N, V]"""
        ids = self.xp.arange(vocab_size, device=self.device)
        return self.xp.astype(tokens[:, None] == ids, self.xp.float32)

    def are_distributions(self, probs: Array) -> list[bool]:
        """Whether each row is one: nothing negative, no NaN, a sum of 1. [N, V]"""
        least, total = self.xp.min(probs, axis=-1), self.xp.sum(probs, axis=-1)
        good: list[bool] = ((least >= 0) & (self.xp.abs(total - 1.0) < 1e-3)).tolist()
        return good

    def adopt(self, drafts: Drafts) -> Drafts:
        """Drafts of another array library or device as this one's. Converted once a round; a no-op when alike."""
        if is_numpy_namespace(self.xp) and not is_numpy_array(drafts.tokens) and is_torch_array(drafts.tokens):
            drafts.tokens = drafts.tokens.cpu()
            drafts.probs = None if drafts.probs is None else drafts.probs.detach().cpu()
        drafts.tokens = self.integers(drafts.tokens)
        if drafts.probs is not None:
            drafts.probs = self.xp.asarray(drafts.probs, dtype=self.xp.float32, device=self.device)
        return drafts

    def defers(self, drafts: Drafts) -> bool:
        """Whether drafts that were drawn here may stay on the device until they are judged."""
        return False

    def drawing(self, jobs: Sequence[Job], steps: int, further: Array | None = None) -> Drawing | None:
        """Draws `steps` tokens for each job without a look of the host in between; None where that cannot be.

        further: tokens that each job will have more than the host knows of. [B]
        """
        return None

    def draft(self, jobs: Sequence[Job], drafted: Sequence[Sequence[int]], logits: Array) -> Drawn:
        """Draw each job's next draft token from a draft model's row. drafted: the tokens drafted before it, per job.

        Under `coupled` the draft uses the target's own noise, so that it guesses what the target will say; under
        `rejection` it has a stream of its own, independent of everything the judge looks at.
        """
        xp = self.xp
        controls = self._controls_of(jobs, [1] * len(jobs))
        shaped = shape(xp, logits, controls, lambda row: (jobs[row], drafted[row]))
        if controls.all_greedy:
            return Drawn(shaped.logits.argmax(-1), None, shaped.faults)
        weighed = controls.weighed
        positions = self._int32([len(job.tokens) + len(d) for job, d in zip(jobs, drafted, strict=True)])
        tokens = self.noise.draw(shaped.logits, controls.words, positions, controls.draft_stream, controls.sampled)
        if not any(weighed):
            return Drawn(tokens, None, shaped.faults)
        probs = softmax(xp, shaped.logits)
        if not all(weighed):
            sampled = xp.asarray(weighed, device=self.device)
            probs = xp.where(sampled[:, None], probs, self.one_hot(tokens, logits.shape[1]))
        return Drawn(tokens, probs, shaped.faults)

    def draft_rows(self, jobs: Sequence[Job], drafted: Sequence[Sequence[int]], logits: Array) -> DraftRows:
        """The same for trees: row r is one of job `jobs[r]`'s, after the drafted tokens `drafted[r]`."""
        controls = self._controls_of(jobs, [1] * len(jobs))
        shaped = self._shape(jobs, logits, controls, lambda row: (jobs[row], drafted[row]))
        positions = self._int32([len(job.tokens) + len(d) for job, d in zip(jobs, drafted, strict=True)])
        by_rank = [job.rule == "coupled" and job.params.temperature > 0.0 for job in jobs]
        return DraftRows(self.xp, self.noise, shaped, controls, positions, by_rank)

    def _shape(self, jobs: Sequence[Job], logits: Array, controls: Controls, history: History) -> Shaped:
        """Rows as their requests ask, row r being one of job `jobs[r]`'s."""
        return shape(self.xp, logits, controls, history)

    def judge(self, jobs: Sequence[Job], drafts: Drafts, scores: Scores) -> Verdicts:
        """Decide every job's round: how many drafts stay and which token follows. One call for the whole batch."""
        kinds = [
            _Kind(job.rule == "coupled" or job.params.temperature == 0.0, index in drafts.parents)
            for index, job in enumerate(jobs)
        ]
        if len(set(kinds)) == 1:
            return self._judge_alike(kinds[0], jobs, drafts, scores)
        whole = Verdicts(self.integers([0] * len(jobs)), self.integers([0] * len(jobs)))
        for kind in sorted(set(kinds)):
            chosen = [index for index, other in enumerate(kinds) if other == kind]
            some = [jobs[index] for index in chosen]
            part = self._judge_alike(kind, some, self._take_drafts(drafts, chosen), self._take_scores(scores, chosen))
            whole.accepted[self.integers(chosen)] = part.accepted
            whole.next[self.integers(chosen)] = part.next
            whole.faults.update({chosen[index]: fault for index, fault in part.faults.items()})
            whole.paths.update({chosen[index]: path for index, path in part.paths.items()})
        return whole

    def _judge_alike(self, kind: _Kind, jobs: Sequence[Job], drafts: Drafts, scores: Scores) -> Verdicts:
        if kind.is_tree:
            return self._judge_trees(kind.is_matching, jobs, drafts, scores)
        return self._judge(self._match if kind.is_matching else self._reject, jobs, drafts, scores)

    def _judge(self, rule: Callable[..., Ruling], jobs: Sequence[Job], drafts: Drafts, scores: Scores) -> Verdicts:
        """All jobs under one rule."""
        layout = self.layout(drafts.counts, scores.counts)
        controls = self._controls_of(jobs, scores.counts)
        positions = self._int32([len(job.tokens) for job in jobs])
        if layout.num_drafts:
            positions = positions[layout.owner] + layout.depth
        shaped = shape(self.xp, scores.logits, controls, self._history(jobs, drafts, scores))
        accepted, following = rule(shaped.logits, drafts, layout, controls, positions)
        faults = {}
        for row, fault in shaped.faults.items():
            job = int(layout.owner[row])
            if int(layout.depth[row]) <= int(accepted[job]):  # rows after a refusal are of a text that never was
                faults[job] = fault
        return Verdicts(accepted, following, faults)

    def _judge_trees(self, is_matching: bool, jobs: Sequence[Job], drafts: Drafts, scores: Scores) -> Verdicts:
        """All jobs under one rule, their drafts trees."""
        xp, layout = self.xp, self.tree_layout([drafts.parents[index] for index in range(len(jobs))])
        controls = self._controls_of(jobs, scores.counts)
        positions = self._int32([len(job.tokens) for job in jobs])[layout.owner] + layout.depth
        shaped = shape(xp, scores.logits, controls, self._history(jobs, drafts, scores))
        if is_matching:
            ruling = match_tree(xp, self._choose(shaped.logits, controls, positions), drafts.tokens, layout)
        else:
            ruling = reject_tree(
                xp, shaped.logits, drafts.tokens, drafts.probs, layout, self.noise, controls.words, positions
            )
        ends, roots = ruling.rows.tolist(), layout.first.tolist()
        paths = [path_to(layout, end, root) for end, root in zip(ends, roots, strict=True)]
        faults = {}
        for row, fault in shaped.faults.items():
            job = int(layout.owner[row])
            if row == roots[job] or row - roots[job] - 1 in paths[job]:  # the others are of a text that never was
                faults[job] = fault
        return Verdicts(self.integers([len(path) for path in paths]), ruling.next, faults, dict(enumerate(paths)))

    def _choose(self, x: Array, controls: Controls, positions: Array) -> Array:
        """The target's own token in every row."""
        if controls.all_greedy:
            return x.argmax(-1)
        return self.noise.draw(x, controls.words, positions, Stream.TARGET, controls.sampled)

    def _match(self, x: Array, drafts: Drafts, layout: Layout, controls: Controls, positions: Array) -> Ruling:
        return match(self.xp, self._choose(x, controls, positions), drafts.tokens, layout)

    def _reject(self, x: Array, drafts: Drafts, layout: Layout, controls: Controls, positions: Array) -> Ruling:
        return reject(self.xp, x, drafts.tokens, drafts.probs, layout, self.noise, controls.words, positions)

    def _history(self, jobs: Sequence[Job], drafts: Drafts, scores: Scores) -> History:
        """Row -> its job and the drafts it comes after. Token values come to the host only when a row asks."""
        rows: list[tuple[Job, list[int]]] = []

        def history(row: int) -> tuple[Job, list[int]]:
            if not rows:
                for index, (job, num_rows) in enumerate(zip(jobs, scores.counts, strict=True)):
                    rows.extend((job, before) for before in drafts.ancestors(index)[:num_rows])
            return rows[row]

        return history

    def _take_drafts(self, drafts: Drafts, chosen: Sequence[int]) -> Drafts:
        at = self.integers(_members(drafts.counts, chosen))
        probs = None if drafts.probs is None else drafts.probs[at, ...]
        parents = {place: drafts.parents[index] for place, index in enumerate(chosen) if index in drafts.parents}
        return Drafts([drafts.counts[index] for index in chosen], drafts.tokens[at], probs, parents)

    def _take_scores(self, scores: Scores, chosen: Sequence[int]) -> Scores:
        at = self.integers(_members(scores.counts, chosen))
        return Scores([scores.counts[index] for index in chosen], scores.logits[at, ...])

    def tree_layout(self, parents: Sequence[Sequence[int]]) -> TreeLayout:
        key = ("tree", *map(tuple, parents))
        return remember(self._trees, key, lambda: build_tree_layout(self.xp, self.device, parents))

    def layout(self, drafted: Sequence[int], rows: Sequence[int]) -> Layout:
        key = (tuple(drafted), tuple(rows))
        return remember(self._layouts, key, lambda: build_layout(self.xp, self.device, drafted, rows))

    def _controls_of(self, jobs: Sequence[Job], rows: Sequence[int]) -> Controls:
        key = (tuple([job.id for job in jobs]), tuple(rows))
        return remember(self._controls, key, lambda: build_controls(self.xp, self.device, jobs, rows))

    def _int32(self, values: Sequence[int]) -> Array:
        return self.xp.asarray(values, dtype=self.xp.int32, device=self.device)


def _members(counts: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """Flat indices of the entries that belong to the chosen jobs."""
    ends = list(accumulate(counts))
    return [at for index in chosen for at in range(ends[index] - counts[index], ends[index])]


def remember(known: dict[Hashable, T], key: Hashable, build: Callable[[], T]) -> T:
    """The value for `key`, built when it is new; the oldest is dropped when there are too many."""
    value = known.get(key)
    if value is None:
        if len(known) >= REMEMBERED:
            del known[next(iter(known))]
        value = known[key] = build()
    return value
