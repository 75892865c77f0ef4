"""Run-ahead: the draft works on the next proposal while the target judges the present one, on a thread of its own.

    round n     target   [ score and judge d1 d2 d3        ]  emits d1 d2 d3 and b
                draft    [ g   p1   p2   p3 ]                 behind d3, as if all were kept
    round n+1   if b is g, p1 p2 p3 are the proposal already; else they are stale, dropped and never judged

It is another order of the same verbs. A proposal carries a tag: the job, the length of its tokens and the epoch that it
was made for. A job's epoch changes whenever a round does not end as a draft had assumed. What is drafted ahead is what
would be drafted afterwards, token by token, so answers do not change.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from array_api_compat import is_torch_namespace

from outrider.backends.base import Backend, Paged
from outrider.draft.base import RunningAhead
from outrider.draft.join import Part
from outrider.errors import ConfigError, DraftError
from outrider.spec.blame import blaming
from outrider.spec.round import slot_of
from outrider.spec.router import Router, checked
from outrider.types import Array, Drafts, Job, Plan


class Tag(NamedTuple):
    """What a proposal was made for."""

    job: int
    length: int  # of the tokens it follows
    epoch: int

    @classmethod
    def of(cls, job: Job) -> Tag:
        return cls(job.id, len(job.tokens), job.epoch)


class Ready(NamedTuple):
    """A proposal that was drafted ahead."""

    tag: Tag
    drafter: str
    tokens: list[int]
    probs: Array | None  # [tokens, V]


@dataclass(slots=True)
class Flight:
    """What one drafter is working on."""

    drafter: str
    jobs: list[Job]
    copies: list[Job]  # as if their drafts were emitted
    tags: list[Tag]
    widths: list[int]
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
        """A round with drafts, from beginning to end."""
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


class Landing(NamedTuple):
    """What came of the flights of a round."""

    waited_s: float
    steps: int
    faults: list[tuple[Job, DraftError]] = []  # noqa: RUF012 - a NamedTuple's default is never changed


class Sharing:
    """Who computes where while target and draft work beside one another, with torch.

    On a CPU each thread has its helpers: the draft gets one core, the target the others (with more helpers than cores
    they would wait for one another). On a GPU the draft has a stream of its own, so that kernels overlap.
    """

    def __init__(self, draft_device: Any) -> None:
        import torch

        self._torch = torch
        self._all = torch.get_num_threads()
        self._stream: Any = None
        if torch.cuda.is_available():
            where = draft_device if getattr(draft_device, "type", "") == "cuda" else None
            self._stream = torch.cuda.Stream(where)  # type: ignore[no-untyped-call]
        self._begun = torch.cuda.Event() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]

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
        assert self._begun is not None
        with self._torch.cuda.stream(self._stream):
            self._stream.wait_event(self._begun)  # pages may have been copied
            try:
                yield
            finally:
                self._stream.synchronize()  # what was drafted is read on the target's stream


class RunAhead:
    """Drafts ahead for one engine."""

    def __init__(self, router: Router, target: Backend, payoff: Payoff | None = None) -> None:
        self.router = router
        self.target = target
        self.payoff = payoff or Payoff()
        self.overlap = Overlap()
        self._names = [name for name, drafter in self.router.drafters.items() if getattr(drafter, "runs_ahead", False)]
        if not self._names:
            raise ConfigError(
                f"run_ahead needs a draft model; {self.router.method} does not draft ahead, leave run_ahead out",
                param="run_ahead",
            )
        self._paged = cast(Paged, self.target) if hasattr(self.target, "reserve") else None
        backends = [getattr(self.router.drafters[name], "backend", None) for name in self._names]
        self._cores = None
        if is_torch_namespace(target.ops.xp):
            self._cores = Sharing(next((getattr(backend, "device", None) for backend in backends), None))
        self._pool = ThreadPoolExecutor(1, "outrider-draft")
        self._flights: list[Flight] = []
        self._ready: dict[int, Ready] = {}  # by job id

    def take(self, plan: Plan) -> list[Part]:
        """Proposals that are still good, for the jobs of a round (by drafter)."""
        chosen: dict[str, list[tuple[int, Ready]]] = {}
        for index, (job, asks) in enumerate(zip(plan.deciding, plan.asks, strict=True)):
            ready = self._ready.pop(job.id, None)
            if ready is None:
                continue
            if not self.is_fresh(ready, job):
                self.overlap.stale += 1
            elif asks and asks[0].drafter == ready.drafter and asks[0].width >= len(ready.tokens) and not asks[0].tree:
                self.overlap.fresh += 1
                chosen.setdefault(ready.drafter, []).append((index, ready))
        return [self._part(name, entries) for name, entries in chosen.items()]

    def is_fresh(self, ready: Ready, job: Job) -> bool:
        return ready.tag == Tag.of(job)

    def _part(self, name: str, entries: Sequence[tuple[int, Ready]]) -> Part:
        ops = self.target.ops
        drafts = Drafts(
            counts=[len(ready.tokens) for _, ready in entries],
            tokens=ops.integers([token for _, ready in entries for token in ready.tokens]),
            makers=[name] * len(entries),
        )
        rows = [ready.probs for _, ready in entries]
        if any(row is not None for row in rows):
            size = self.target.info.vocab_size
            drafts.probs = ops.xp.concat(
                [
                    ops.one_hot(ops.integers(ready.tokens), size) if ready.probs is None else ready.probs
                    for _, ready in entries
                ]
            )
        return Part([index for index, _ in entries], drafts)

    def start(self, plan: Plan, drafts: Drafts) -> None:
        """The drafters go on behind the drafts of a round that the target is about to judge."""
        if not drafts.makers or not self.payoff.is_on:
            return
        for name in self._names:
            flight, widths = Flight(name, [], [], [], [], Future()), dict[int, int]()
            for index, (job, proposal) in enumerate(zip(plan.deciding, drafts.proposals(), strict=True)):
                if drafts.makers[index] != name or index in drafts.parents or index in drafts.faults:
                    continue
                if job.grammar is not None:  # it stands at one place of the text, and the judge needs it there
                    continue
                length = len(job.tokens) + len(proposal) + 1
                width = min(len(proposal), plan.asks[index][0].width, job.limit - length - 1)
                if width >= 1:
                    widths[index] = width
            for index, width in widths.items():
                job, proposal = plan.deciding[index], drafts.proposals()[index]
                length = len(job.tokens) + len(proposal) + 1
                if not self._has_room(job, length + max(widths.values())):  # all may go as far as the widest
                    continue
                flight.jobs.append(job)
                flight.copies.append(_assuming(job, proposal))
                flight.tags.append(Tag(job.id, length, job.epoch))
                flight.widths.append(width + 1)  # the first is a guess of the target's own token
            if flight.jobs:
                drafts.follow = None  # the draft is on its way already
                drafter = cast(RunningAhead, self.router.drafters[name])
                assumed = [len(b.tokens) - len(a.tokens) for a, b in zip(flight.jobs, flight.copies, strict=True)]
                if self._cores is not None and not self._flights:
                    self._cores.split()
                flight.future = self._pool.submit(self._draft, drafter, flight.copies, assumed, flight.widths)
                self._flights.append(flight)

    def _draft(
        self, drafter: RunningAhead, jobs: list[Job], assumed: list[int], widths: list[int]
    ) -> tuple[Drafts, float]:
        """On the draft's thread."""
        started = time.perf_counter()
        if self._cores is None:
            drafts = drafter.propose_ahead(jobs, assumed, widths)
        else:
            with self._cores.beside():
                drafts = drafter.propose_ahead(jobs, assumed, widths)
        return drafts, time.perf_counter() - started

    def _has_room(self, job: Job, length: int) -> bool:
        """Taken here: while both threads work, nobody takes pages."""
        return self._paged is None or self._paged.reserve(slot_of(job), length)

    def finish(self) -> Landing:
        """The round is judged and its tokens are emitted: stop what is stale, and keep what was drafted ahead."""
        flights, self._flights = self._flights, []
        if not flights:
            return Landing(0.0, 0)
        started, steps, faults = time.perf_counter(), 0, []
        for flight in flights:
            for job, assumed in zip(flight.jobs, flight.copies, strict=True):
                if job.done or job.tokens[:-1] != assumed.tokens:
                    assumed.cancelled = True  # the draft stops within one step
            try:
                with blaming(DraftError, f"the {flight.drafter} draft failed"):
                    drafts, seconds = flight.future.result()
                    chains = [False] * len(flight.jobs)
                    drafts = checked(flight.drafter, self.target, flight.widths, chains, drafts)
            except DraftError as error:
                faults += [(job, error.copy()) for job in flight.jobs]
                continue
            self.overlap.worked_s += seconds
            steps += drafts.steps
            faults += [(flight.jobs[index], _draft_error(fault)) for index, fault in drafts.faults.items()]
            self._keep(flight, drafts)
        if self._cores is not None:
            self._cores.rejoin()
        waited = time.perf_counter() - started
        self.overlap.waited_s += waited
        return Landing(waited, steps, faults)

    def _keep(self, flight: Flight, drafts: Drafts) -> None:
        at = 0
        for job, assumed, tag, tokens in zip(flight.jobs, flight.copies, flight.tags, drafts.proposals(), strict=True):
            if not tokens or job.tokens != [*assumed.tokens, tokens[0]]:
                job.epoch += 1
            if not job.done and len(tokens) > 1:
                probs = None if drafts.probs is None else drafts.probs[at + 1 : at + len(tokens)]
                self._ready[job.id] = Ready(tag, flight.drafter, tokens[1:], probs)
            at += len(tokens)

    def abandon(self) -> None:
        """The round broke off: wait for the draft, and use nothing of it."""
        flights, self._flights = self._flights, []
        for flight in flights:
            for assumed in flight.copies:
                assumed.cancelled = True
            flight.future.exception()
            for job in flight.jobs:
                job.epoch += 1
        if flights and self._cores is not None:
            self._cores.rejoin()

    def forget(self, job: Job) -> None:
        self._ready.pop(job.id, None)

    def close(self) -> None:
        self.abandon()
        self._pool.shutdown()


def _assuming(job: Job, proposal: Sequence[int]) -> Job:
    """The job as it will be if its whole proposal is kept."""
    twin = copy.copy(job)
    twin.tokens = [*job.tokens, *proposal]
    if job.counts is not None:
        twin.counts = dict(job.counts)
        for token in proposal:
            twin.counts[token] = twin.counts.get(token, 0) + 1
    return twin


def _draft_error(fault: Exception) -> DraftError:
    return fault if isinstance(fault, DraftError) else DraftError(str(fault))
