"""First come, first served: jobs wait in line, run together in one batch, and read long prompts in chunks.

Plans integers only. Jobs join and leave between any two passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from outrider.config import SchedulerConfig
from outrider.types import Ask, Job, Plan


class WidthChoice(Protocol):
    """What `plan` needs of a width chooser's answer."""

    @property
    def asks(self) -> tuple[Ask, ...]: ...

    @property
    def fallback(self) -> str | None: ...


# The jobs that decide in a pass, and the tokens others are fed in it -> a choice for each
Choose = Callable[[Sequence[Job], int], Sequence[WidthChoice]]


class Scheduler:
    """`waiting` have no slot yet, `running` do."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}  # by id, in order of arrival: leaving costs the same in any batch

    @property
    def running(self) -> Collection[Job]:
        return self._running.values()

    def add(self, job: Job) -> None:
        self.waiting.append(job)

    def next_in_line(self) -> Job | None:
        """The job that may start next, if the batch has room for it."""
        return self.waiting[0] if self.waiting and len(self._running) < self.config.max_batch else None

    def start(self, job: Job) -> None:
        """The job, first in line, has its slot."""
        self.waiting.popleft()
        self._running[job.id] = job

    def remove(self, job: Job) -> None:
        if self._running.pop(job.id, None) is None:
            self.waiting.remove(job)

    def plan(self, choose: Choose) -> Plan:
        """The next pass: every running job takes part."""
        plan = Plan([], [], [], [])
        for job in self._running.values():
            if len(job.tokens) - job.cached > self.config.prefill_chunk:
                plan.reading.append(job)
                plan.chunks.append(self.config.prefill_chunk)
            else:
                plan.deciding.append(job)
        for job, choice in zip(plan.deciding, choose(plan.deciding, sum(plan.chunks)), strict=True):
            plan.asks.append(choice.asks)
            if choice.fallback is not None:
                plan.fallbacks.append((job, choice.fallback))
        return plan
