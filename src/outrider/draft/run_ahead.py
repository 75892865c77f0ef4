"""Run-ahead: a drafter that wraps another one and drafts the next proposal while the target verifies the present one.

    round n     target   [ score and verify d1 d2 d3       ]  emits d1 d2 d3 and b
                draft    [ g   p1   p2   p3 ]                 behind d3, as if all were kept
    round n+1   if b is g, p1 p2 p3 are the proposal already; else they are stale, dropped and never verified

A proposal carries what it was made for: the job, the length of its tokens, and the tokens that had to follow. What is
drafted ahead is what would be drafted afterwards, token by token, so answers do not change. The engine knows nothing of
this: it calls `propose` and `observe` as of any drafter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from outrider.draft.base import Drafter
from outrider.draft.join import Part, join
from outrider.errors import ConfigError, DraftError, wrap_errors
from outrider.sampling.ops import SamplingOps
from outrider.types import Array, Batch, Drafts, Job, Scores, Verdicts


class Ready(NamedTuple):
    """A proposal that was drafted ahead: it holds if the job's tokens from `start` on are `expected`."""

    start: int
    expected: list[int]
    tokens: list[int]
    probs: Array | None  # [tokens, V]

    def is_fresh(self, job: Job) -> bool:
        return job.tokens[self.start :] == self.expected


@dataclass(slots=True)
class Flight:
    """What is drafted beside the target's pass."""

    jobs: list[Job]
    copies: list[Job]  # as if their drafts were emitted
    starts: list[int]
    future: Future[tuple[Drafts, float]]


@dataclass(slots=True)
class Overlap:
    """What run-ahead did: seconds the draft worked beside the target, and those the target still had to wait."""

    fresh: int = 0
    stale: int = 0
    worked_s: float = 0.0
    waited_s: float = 0.0


class Payoff:
    """Whether running ahead pays: the order that did better is used, and the other one tried now and then."""

    TRY, STAY, LONGEST = 8, 120, 960  # rounds: of a try, until the first next one, between two at most

    def __init__(self, *, always: bool = False) -> None:
        self.is_on = always
        self._always = always
        self._is_better = always  # to run ahead, as far as is known
        self._rates: dict[bool, float] = {}  # tokens per second of each order
        self._left, self._stay = self.TRY, self.STAY // 2
        self._is_new = True  # the order: its first round still has the other one's draft, or none
        self._tokens = self._seconds = 0.0

    @property
    def is_trying(self) -> bool:
        """Whether this order is not the usual one."""
        return self.is_on != self._is_better

    def add(self, tokens: int, seconds: float) -> None:
        """A round with drafts, from one proposal to the next."""
        if self._always:
            return
        if not self._is_new:
            self._tokens += tokens
            self._seconds += seconds
        self._is_new = False
        self._left -= 1
        if self._left > 0:
            return
        self._rates[self.is_on] = self._tokens / max(self._seconds, 1e-9)
        self._tokens = self._seconds = 0.0
        if not self.is_trying:
            self.is_on, self._left = not self.is_on, self.TRY
        else:
            if self._rates[self.is_on] > self._rates[not self.is_on]:
                self._is_better, self._stay = self.is_on, self.STAY
            else:
                self._stay = min(2 * self._stay, self.LONGEST)
            self.is_on, self._left = self._is_better, self._stay
        self._is_new = True


class Cores:
    """Where target and draft compute while they work beside one another, with torch.

    On a CPU the draft gets one core, the target the others: with more threads than cores they would wait for one
    another. On a GPU the draft has a stream of its own, so that kernels overlap.
    """

    def __init__(self, device: Any) -> None:
        import torch

        self._torch = torch
        self._all = torch.get_num_threads()
        self._stream: Any = None
        self._begun: Any = None
        if torch.cuda.is_available():
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._begun = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def split(self) -> None:
        """For the target's thread."""
        self._torch.set_num_threads(max(1, self._all - 1))
        if self._begun is not None:
            self._begun.record()

    def rejoin(self) -> None:
        self._torch.set_num_threads(self._all)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """For the draft's thread."""
        self._torch.set_num_threads(1)
        if self._stream is None:
            yield
            return
        with self._torch.cuda.stream(self._stream):
            self._stream.wait_event(self._begun)  # pages may have been copied
            try:
                yield
            finally:
                self._stream.synchronize()  # the target's stream reads what was drafted


class RunAheadDrafter(Drafter):
    """Wraps a drafter whose info says `run_ahead`. `ops` are the target's; `cores` is None where nothing is shared."""

    def __init__(
        self,
        inner: Drafter,
        ops: SamplingOps,
        *,
        always: bool = False,
        cores: Cores | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not inner.info.run_ahead:
            raise ConfigError(
                f"run_ahead needs a draft model; {inner.name} does not draft ahead, leave run_ahead out",
                param="run_ahead",
            )
        self.inner = inner
        self.info = inner.info
        self.overlap = Overlap()
        self.payoff = Payoff(always=always)
        self._ops = ops
        self._cores = cores
        self._now = now
        self._pool = ThreadPoolExecutor(1, "outrider-draft")
        self._flight: Flight | None = None
        self._ready: dict[int, Ready] = {}  # by job id
        self._stale = 0
        self._round: tuple[float, dict[int, int]] | None = None  # when it proposed, and the lengths of jobs then

    def lag(self, job: Job) -> int:
        return self.inner.lag(job)

    def propose(self, jobs: Sequence[Job], widths: Sequence[int], trees: Sequence[bool]) -> Drafts:
        self._measure(jobs)
        parts, rest = [], list[int]()
        for index, (job, width, tree) in enumerate(zip(jobs, widths, trees, strict=True)):
            ready = self._take(job, width, tree)
            if ready is None:
                rest.append(index)
            else:
                count, tokens = len(ready.tokens), self._ops.integers(ready.tokens)
                parts.append(Part([index], Drafts([count], tokens, ready.probs)))
        if rest:
            some = [[values[index] for index in rest] for values in (jobs, widths, trees)]
            parts.append(Part(rest, self.inner.propose(*some)))  # type: ignore[arg-type]
        drafts = parts[0].drafts if len(rest) == len(jobs) else join(self._ops, len(jobs), parts)
        if self.payoff.is_on:
            self._start(jobs, drafts)
        return drafts

    def _take(self, job: Job, width: int, tree: bool) -> Ready | None:
        """The proposal that was drafted ahead for the job, if it still holds and is what is wanted."""
        ready = self._ready.pop(job.id, None)
        if ready is None or width == 0:
            return None
        if not ready.is_fresh(job):
            self.overlap.stale += 1
            self._stale += 1
            return None
        if tree or len(ready.tokens) > width:
            return None
        self.overlap.fresh += 1
        return ready

    def _measure(self, jobs: Sequence[Job]) -> None:
        """Tokens and seconds since the last proposal, for the same jobs."""
        now, lengths = self._now(), {job.id: len(job.tokens) for job in jobs}
        if self._round is not None and self._round[1].keys() == lengths.keys():
            started, before = self._round
            self.payoff.add(sum([lengths[one] - before[one] for one in lengths]), now - started)
        self._round = (now, lengths)

    def _start(self, jobs: Sequence[Job], drafts: Drafts) -> None:
        """Go on behind these drafts, on the draft's thread, while the target verifies them."""
        flight, widths = Flight([], [], [], Future()), list[int]()
        proposals = drafts.proposals()
        chosen = [
            (job, proposal, min(len(proposal), job.limit - len(job.tokens) - len(proposal) - 2))
            for index, (job, proposal) in enumerate(zip(jobs, proposals, strict=True))
            # a grammar stands at one place of the text, and verification needs it there
            if proposal and index not in drafts.parents and index not in drafts.faults and job.grammar is None
        ]
        widest = max([width for _, _, width in chosen], default=0)
        for job, proposal, width in chosen:
            length = len(job.tokens) + len(proposal) + 1
            if width >= 1 and self.inner.reserve_ahead(job, length + widest):  # all may go as far as the widest
                flight.jobs.append(job)
                flight.copies.append(job.with_tokens([*job.tokens, *proposal]))
                flight.starts.append(len(job.tokens))
                widths.append(width + 1)  # the first is a guess of the target's own token
        if flight.jobs:
            drafts.device.follow = None  # the draft is under way already
            assumed = [len(b.tokens) - len(a.tokens) for a, b in zip(flight.jobs, flight.copies, strict=True)]
            if self._cores is not None:
                self._cores.split()
            flight.future = self._pool.submit(self._draft, flight.copies, assumed, widths)
            self._flight = flight

    def _draft(self, jobs: list[Job], assumed: list[int], widths: list[int]) -> tuple[Drafts, float]:
        """On the draft's thread."""
        started = time.perf_counter()
        beside: AbstractContextManager[None] = nullcontext() if self._cores is None else self._cores.beside()
        with beside:
            drafts = self.inner.propose_ahead(jobs, assumed, widths)
        return drafts, time.perf_counter() - started

    def observe(self, batch: Batch, scores: Scores, verdicts: Verdicts) -> int:
        steps = self._land()
        return steps + self.inner.observe(batch, scores, verdicts)

    def _land(self) -> int:
        """Stop what is stale, and keep what was drafted ahead. Returns the passes of that."""
        flight, self._flight = self._flight, None
        if flight is None:
            return 0
        started = time.perf_counter()
        for job, assumed in zip(flight.jobs, flight.copies, strict=True):
            if job.done or job.tokens[:-1] != assumed.tokens:
                assumed.cancelled = True  # the draft stops within one step
        try:
            with wrap_errors(DraftError, "drafting ahead failed"):
                drafts, seconds = flight.future.result()
        finally:
            if self._cores is not None:
                self._cores.rejoin()
            self.overlap.waited_s += time.perf_counter() - started
        if drafts.faults:
            raise next(iter(drafts.faults.values()))
        self.overlap.worked_s += seconds
        at = 0
        for job, assumed, start, tokens in zip(
            flight.jobs, flight.copies, flight.starts, drafts.proposals(), strict=True
        ):
            if not job.done and len(tokens) > 1:
                probs = None if drafts.probs is None else drafts.probs[at + 1 : at + len(tokens)]
                expected = [*assumed.tokens[start:], tokens[0]]
                self._ready[job.id] = Ready(start, expected, tokens[1:], probs)
            at += len(tokens)
        return drafts.steps

    def forget(self, job: Job) -> None:
        self._drop(job)
        self.inner.forget(job)

    def pause(self, job: Job) -> None:
        self._drop(job)
        self.inner.pause(job)

    def _drop(self, job: Job) -> None:
        self._ready.pop(job.id, None)
        if self._flight is not None and job in self._flight.jobs:
            for copied in self._flight.copies:
                copied.cancelled = True
            self._flight.future.exception()  # the caches that it writes to are about to be freed
            self._flight = None
            if self._cores is not None:
                self._cores.rejoin()

    def take_stale(self) -> int:
        stale, self._stale = self._stale, 0
        return stale

    def close(self) -> None:
        if self._flight is not None:
            self._drop(self._flight.jobs[0])
        self._pool.shutdown()
        self.inner.close()
