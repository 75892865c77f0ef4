"""Which drafter proposes for which job: one batch may mix drafters, and a job may try several in turn.

What drafters return is checked here, and what they raise becomes the error of the jobs they drafted for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache

from outrider.backends.base import Backend, ModelInfo
from outrider.clock import Clock
from outrider.draft.base import Drafter
from outrider.draft.join import Part, join
from outrider.errors import ConfigError, DraftError, wrap_errors
from outrider.types import Ask, Asks, Batch, Drafts, Grammar, Job, Scores, Verdicts

log = logging.getLogger("outrider")

READING = "the draft is still reading the prompt"

# (drafter, jobs, their lookup proposals) -> how many tokens of each are worth a row; the others are not verified
Trim = Callable[[str, Sequence[Job], Drafts], Sequence[int]]


class Router:
    """The drafters of an engine. `method` is what a request gets that names none: one of them, or a list of them with
    commas, of which the first that has something to propose drafts."""

    def __init__(
        self, drafters: Sequence[Drafter], target: ModelInfo, clock: Clock, inner: Sequence[Drafter] = ()
    ) -> None:
        """inner: drafters that no request names; the engine itself puts them before others."""
        for drafter in [*drafters, *inner]:
            _check_drafter(drafter, target)
        self.drafters = {drafter.name: drafter for drafter in drafters}
        if len(self.drafters) < len(drafters):
            names = [drafter.name for drafter in drafters]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"the draft names {twice} twice; leave one out", param="draft")
        self.method = ",".join(self.drafters) or "none"
        self.methods = ("none", *self.drafters)  # what requests may ask for, by itself or several with commas
        for drafter in inner:
            if drafter.name in self.drafters:
                raise ConfigError(f"a drafter cannot be called {drafter.name}; choose another name", param="draft")
            self.drafters[drafter.name] = drafter
        self._wraps = {name: wrap_errors(DraftError, f"the {name} draft failed") for name in self.drafters}
        self._ahead = [drafter for drafter in self.drafters.values() if drafter.info.run_ahead]
        self.hidden = tuple(sorted({layer for drafter in drafters for layer in drafter.info.hidden_layers}))
        self.seconds: dict[str, float] = {}  # that each drafter took in this round
        self._clock = clock

    def propose(self, target: Backend, batch: Batch, asks: Sequence[Asks], trim: Trim) -> Drafts:
        """The drafts of a round in the target's arrays. A drafter's failure is a fault of the jobs it drafted for."""
        self.seconds = {}
        fallbacks: list[tuple[Job, str]] = []
        faults: dict[int, DraftError] = {}
        pending: dict[int, Asks] = {}
        for index, (job, wanted) in enumerate(zip(batch.decode, asks, strict=True)):
            job.wanted = tuple([ask.drafter for ask in wanted])
            if wanted:
                pending[index] = self._ready(index, job, wanted, fallbacks, faults)
        if not pending and not faults:
            return Drafts([0] * len(batch.decode), target.ops.nothing, fallbacks=fallbacks)
        parts: list[Part] = []
        while pending := {index: wanted for index, wanted in pending.items() if wanted}:
            for name in self.drafters:
                members = [index for index, wanted in pending.items() if wanted and wanted[0].drafter == name]
                if members:
                    first = [pending[index][0] for index in members]
                    part = Part(
                        members, self._ask(name, target, [batch.decode[index] for index in members], first, trim)
                    )
                    parts.append(part)
                    for index, count in zip(members, part.drafts.counts, strict=True):
                        pending[index] = () if count else pending[index][1:]
        drafts = join(target.ops, len(batch.decode), parts)
        drafts.fallbacks += fallbacks
        drafts.faults.update(faults)
        return drafts

    def _ready(
        self, index: int, job: Job, asks: Asks, fallbacks: list[tuple[Job, str]], faults: dict[int, DraftError]
    ) -> Asks:
        """The asks whose drafters have read enough of the job."""
        ready = []
        for ask in asks:
            try:
                with self._wraps[ask.drafter]:
                    lag = self.drafters[ask.drafter].lag(job)
                    if not isinstance(lag, int):
                        raise DraftError(
                            f"the {ask.drafter} draft failed: lag() must return a whole number, got {lag!r}"
                        )
            except DraftError as error:
                faults[index] = error
                return ()
            if lag <= 0:
                ready.append(ask)
            elif len(job.tokens) - job.cached == 1:  # else the target is still reading the prompt, too
                fallbacks.append((job, READING))
        return tuple(ready)

    def _ask(self, name: str, target: Backend, jobs: Sequence[Job], asks: Sequence[Ask], trim: Trim) -> Drafts:
        drafter = self.drafters[name]
        widths, trees = [ask.width for ask in asks], [ask.tree for ask in asks]
        started = self._clock.now()
        try:
            with self._wraps[name]:
                drafts = drafter.propose(jobs, widths, trees)
                _check_shapes(name, target.info, widths, trees, drafts)
                if drafter.info.lookup and drafts.matched and drafts.probs is None:  # sampled tokens must be verified
                    _cut(target, drafts, trim(name, jobs, drafts))
                drafts = _adopted(name, target, drafts)
        except DraftError as error:
            drafts = Drafts([0] * len(jobs), target.ops.nothing)
            drafts.faults = {index: error.copy() for index in range(len(jobs))}
        if drafts.probs is None and any(job.grammar is not None for job in jobs):
            _cut(target, drafts, _allowed(jobs, drafts))
        drafts.makers = [name if count else "" for count in drafts.counts]
        self._charge(name, started)
        return drafts

    def observe(self, batch: Batch, scores: Scores, verdicts: Verdicts) -> tuple[int, dict[str, DraftError]]:
        """The drafters see what came of their proposals. Returns the passes that took, and which failed."""
        total, faults = 0, {}
        names = {name for job in batch.jobs for name in job.drafters}
        for name, drafter in self.drafters.items():
            if name not in names:
                continue
            started = self._clock.now()
            try:
                with self._wraps[name]:
                    steps = drafter.observe(batch, scores, verdicts)
                    if not isinstance(steps, int):
                        raise DraftError(
                            f"observe() must return the number of passes it made, got {steps!r}; return 0 for none"
                        )
                total += steps
            except DraftError as error:
                faults[name] = error
            self._charge(name, started)
        return total, faults

    def pause(self, job: Job) -> None:
        """The job was preempted."""
        for drafter in self.drafters.values():
            with self._wraps[drafter.name]:
                drafter.pause(job)

    def forget(self, job: Job) -> None:
        """The job is over. A drafter that fails to let go is logged, and does not stop the others."""
        for drafter in self.drafters.values():
            try:
                drafter.forget(job)
            except Exception:
                log.exception("the %s draft could not free what %s held", drafter.name, job.request_id)

    def take_stale(self) -> int:
        """Proposals that drafters dropped unverified in this round."""
        return sum([drafter.take_stale() for drafter in self._ahead])

    def _charge(self, name: str, started: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + self._clock.now() - started


def _cut(target: Backend, drafts: Drafts, counts: Sequence[int]) -> None:
    """The first `counts[b]` tokens of each proposal. Only of chains that are certain: a sampled token must be judged,
    whatever it is."""
    if list(counts) == drafts.counts:
        return
    kept = [proposal[:count] for proposal, count in zip(drafts.proposals(), counts, strict=True)]
    drafts.tokens = target.ops.integers([token for proposal in kept for token in proposal])
    drafts.counts, drafts._proposals = list(counts), kept


def _allowed(jobs: Sequence[Job], drafts: Drafts) -> list[int]:
    """Up to the first token that a job's constraint forbids: it would be refused."""
    counts = list(drafts.counts)
    for index, (job, proposal) in enumerate(zip(jobs, drafts.proposals(), strict=True)):
        if job.grammar is not None and index not in drafts.parents and index not in drafts.faults:
            counts[index] = next(_forbidden(job.grammar, proposal), len(proposal))
    return counts


def _forbidden(grammar: Grammar, proposal: Sequence[int]) -> Iterator[int]:
    for place, token in enumerate(proposal):
        mask = grammar.allowed(proposal[:place])
        if mask is None or not mask[token]:
            yield place


def _check_drafter(drafter: Drafter, target: ModelInfo) -> None:
    """A drafter of the caller's own has what will be used of it."""
    if not isinstance(drafter, Drafter):
        raise ConfigError(f"a drafter is a subclass of Drafter, got {type(drafter).__name__}", param="draft")
    hidden = drafter.info.hidden_layers
    if not all(0 <= layer < target.num_hidden for layer in hidden):
        raise ConfigError(
            f"the drafter {drafter.name} wants hidden states {hidden} of {target.name}, which offers "
            f"{target.num_hidden}; choose another draft",
            param="draft",
        )


def checked(name: str, target: Backend, widths: Sequence[int], trees: Sequence[bool], drafts: Drafts) -> Drafts:
    """What a drafter handed over, in the target's arrays."""
    _check_shapes(name, target.info, widths, trees, drafts)
    return _adopted(name, target, drafts)


def _adopted(name: str, target: Backend, drafts: Drafts) -> Drafts:
    drafts.device.is_deferred = drafts.device.drawn_from == target.info.vocab_size and target.ops.defers(drafts)
    drafts = target.ops.adopt(drafts)
    if not drafts.device.is_deferred:
        drafts.device.follow = drafts.device.watch = None  # those are for a draft on the target's own device
        _check_values(name, target, drafts)
    return drafts


def _check_shapes(name: str, info: ModelInfo, widths: Sequence[int], trees: Sequence[bool], drafts: Drafts) -> None:
    """Drafts come from plug-ins too: they must fit what was asked for."""
    counts = drafts.counts
    fit = len(counts) == len(widths) and isinstance(drafts.steps, int)
    for count, width in zip(counts, widths, strict=False):
        fit = fit and isinstance(count, int) and 0 <= count <= width
    if not fit:
        raise DraftError(f"the {name} draft proposed {counts} tokens where {list(widths)} were allowed")
    total, shape = sum(counts), tuple(drafts.tokens.shape)
    if shape != (total,) or not _is_whole(drafts.tokens.dtype):
        raise DraftError(
            f"the {name} draft gave {drafts.tokens.dtype} tokens of shape {shape} for {total} whole numbers"
        )
    if drafts.probs is not None and tuple(drafts.probs.shape) != (total, info.vocab_size):
        given, wanted = tuple(drafts.probs.shape), (total, info.vocab_size)
        raise DraftError(f"the {name} draft gave rows of shape {given}, wanted {wanted}", param="probs")
    for index, parents in drafts.parents.items():
        if not 0 <= index < len(counts) or not trees[index]:
            raise DraftError(f"the {name} draft gave a tree for job {index}, which asked for a chain", param="parents")
        if not parents or len(parents) != counts[index] or not all(_follows(*pair) for pair in enumerate(parents)):
            raise DraftError(
                f"the {name} draft gave parents {parents} for {counts[index]} tokens; each must come after its parent",
                param="parents",
            )
    if drafts.matched and len(drafts.matched) != len(counts):
        raise DraftError(f"the {name} draft told {len(drafts.matched)} lengths of matches for {len(counts)} proposals")
    for job, reason in drafts.fallbacks:
        if not isinstance(job, Job) or not isinstance(reason, str):
            raise DraftError(f"the {name} draft gave fallbacks that are not (job, reason) pairs")


@lru_cache(maxsize=32)  # names of types take longer than all else here
def _is_whole(dtype: Hashable) -> bool:
    return "int" in str(dtype)


def _follows(node: int, parent: object) -> bool:
    return isinstance(parent, int) and -1 <= parent < node


def _check_values(name: str, target: Backend, drafts: Drafts) -> None:
    """Tokens must be in the vocabulary and rows be distributions, or the law would break without a word.

    A job whose proposal is wrong fails alone; zeros stand in for what is no token until it is dropped.
    """
    if not any(drafts.counts):
        return
    size, tokens, start = target.info.vocab_size, drafts.tokens.tolist(), 0
    sound = [True] * len(tokens) if drafts.probs is None else target.ops.are_distributions(drafts.probs)
    if all(sound) and min(tokens) >= 0 and max(tokens) < size:
        return
    for index, count in enumerate(drafts.counts):
        wrong = [token for token in tokens[start : start + count] if not 0 <= token < size]
        if wrong:
            message = f"the {name} draft proposed token {wrong[0]}; ids run from 0 to {size - 1}"
            drafts.faults[index] = DraftError(message, param="draft")
        elif not all(sound[start : start + count]):
            message = f"the {name} draft gave rows that are no distributions; they must be >= 0 and sum to 1"
            drafts.faults[index] = DraftError(message, param="probs")
        start += count
    drafts.tokens = target.ops.integers([token if 0 <= token < size else 0 for token in tokens])
