"""Who runs, and what the next pass is made of. Plans integers only; jobs join and leave between any two passes.

A pass has a budget of tokens. Every running job that decodes gets its one token, then prompts are read in the order of
the policy, at most a chunk of them, and drafts get what is left. So neither waits for the other: a job decodes in
every pass, and of the prompt that is first in order every pass reads `min(prefill_chunk, budget - max_batch)` tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

from outrider.config import SchedulerConfig
from outrider.sched.policies import Order, Policy, checked_order, find_policy
from outrider.types import Ask, Job, Plan

OVER_BUDGET = "the step's token budget is full"


class WidthChoice(Protocol):
    """What `plan` needs of a width chooser's answer."""

    @property
    def asks(self) -> tuple[Ask, ...]: ...

    @property
    def fallback(self) -> str | None: ...


# The jobs that decide in a pass, and the tokens others are fed in it -> a choice for each
Choose = Callable[[Sequence[Job], int], Sequence[WidthChoice]]


class Scheduler:
    """`waiting` have no slot, `running` do."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.policy: Policy = find_policy(config.policy)
        self._budget = config.budget
        self._waiting: dict[int, Job] = {}  # by id
        self._line: list[tuple[Order, int, int]] = []  # heap of (order, number of entry, job id); some may have left
        self._num_entries = 0
        self._running: dict[int, Job] = {}  # by id: leaving costs the same in any batch
        self._in_flight = 0  # tokens that the running may come to
        self._is_opening = False  # some begin together, just now

    @property
    def running(self) -> Collection[Job]:
        return self._running.values()

    @property
    def waiting(self) -> Collection[Job]:
        return self._waiting.values()

    def add(self, job: Job) -> None:
        """The job joins the line. A policy that fails on it raises here, before the job is in line."""
        order = checked_order(self.policy, job)
        self._waiting[job.id] = job
        self._num_entries += 1
        heappush(self._line, (order, self._num_entries, job.id))

    def next_in_line(self) -> Job | None:
        """The job that may start next, if the batch has room for it. Nobody overtakes it."""
        while self._line and self._line[0][2] not in self._waiting:
            heappop(self._line)
        free = self.config.max_batch - len(self._running)
        if not self._line or free <= 0:
            self._is_opening = False
            return None
        self._is_opening |= not self._running or free >= min(self.config.together, len(self._waiting))
        if not self._is_opening:
            return None
        job, most = self._waiting[self._line[0][2]], self.config.max_in_flight
        if most is not None and self._running and self._in_flight + job.limit > most:
            return None
        return job

    def start(self, job: Job) -> None:
        """The job, next in line, has its slot."""
        assert self._line[0][2] == job.id, f"{job} is not next in line"
        heappop(self._line)
        del self._waiting[job.id]
        self._running[job.id] = job
        self._in_flight += job.limit

    def give_way(self, job: Job) -> None:
        """A running job lost its slot: it waits again."""
        self._stop(job)
        self.add(job)

    def remove(self, job: Job) -> None:
        if job.id in self._running:
            self._stop(job)
        else:
            self._waiting.pop(job.id, None)  # a job that the policy failed on was never in line
            if len(self._line) > 2 * len(self._waiting) + 64:
                self._line = [entry for entry in self._line if entry[2] in self._waiting]
                heapify(self._line)

    def _stop(self, job: Job) -> None:
        del self._running[job.id]
        self._in_flight -= job.limit

    def plan(self, choose: Choose) -> Plan:
        """The next pass."""
        plan = Plan([], [], [], [])
        shares = self._shares()
        for job in self._running.values():
            unread = len(job.tokens) - job.cached
            share = 1 if unread == 1 else shares.get(job.id, 0)
            if share == unread:
                plan.deciding.append(job)
            elif share:
                plan.reading.append(job)
                plan.chunks.append(share)
        choices = choose(plan.deciding, sum(plan.chunks))
        for job, choice in zip(plan.deciding, choices, strict=True):
            plan.asks.append(choice.asks)
            if choice.fallback is not None:
                plan.fallbacks.append((job, choice.fallback))
        self._fit_drafts(plan)
        return plan

    def _shares(self) -> dict[int, int]:
        """How much each job that has more than one token to read gets of this pass (by id), first in order first."""
        readers = [job for job in self._running.values() if len(job.tokens) - job.cached > 1]
        if not readers:
            return {}
        left = min(self.config.prefill_chunk, self._budget - (len(self._running) - len(readers)))
        if len(readers) > 1:
            readers.sort(key=self.policy.order)
        shares = {}
        for job in readers:
            shares[job.id] = min(left, len(job.tokens) - job.cached)
            left -= shares[job.id]
        return shares

    def _fit_drafts(self, plan: Plan) -> None:
        """Drafts take what the budget leaves; where it is too little, the widest give most."""
        widths = plan.widths
        wanted = sum(widths)
        if not wanted:
            return
        left = self._budget - sum(plan.chunks) - sum([len(job.tokens) - job.cached for job in plan.deciding])
        if wanted <= left:
            return
        cap = _level(widths, left)
        for index, (job, asks, width) in enumerate(zip(plan.deciding, plan.asks, widths, strict=True)):
            if width > cap:
                plan.asks[index] = tuple(ask._replace(width=min(ask.width, cap)) for ask in asks) if cap else ()
                plan.fallbacks.append((job, OVER_BUDGET))


def _level(widths: Sequence[int], left: int) -> int:
    """The largest cap on all widths with which their sum is at most `left`."""
    cap = max(widths)
    while cap and sum([min(width, cap) for width in widths]) > left:
        cap -= 1
    return cap
