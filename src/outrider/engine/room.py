"""Room in the target's cache: who gets in, and who gives way when it runs out while sequences grow.

A sequence begins with room for what the policy wants to be sure of; the rest is taken as it is needed. When a pass does
not fit, drafts are dropped first. Then the policy names somebody who gives way: its pages are freed, and it waits in
line again with all its tokens. Later they are read again ("recompute"), or come back from host memory ("swap").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from outrider.backends.base import Backend, Paged, State
from outrider.errors import BackendError
from outrider.sched.scheduler import Scheduler
from outrider.spec.blame import blaming
from outrider.spec.round import publish, slot_of
from outrider.spec.router import Router
from outrider.types import Job, Plan, Slot

NO_ROOM = "there is no room in the cache for drafts"


class Room:
    """`told` hears of every job that gave way, and how."""

    def __init__(self, target: Backend, scheduler: Scheduler, router: Router, told: Callable[[Job, str], None]) -> None:
        self._target = target
        self._paged = cast(Paged, target) if hasattr(target, "reserve") else None
        self._scheduler = scheduler
        self._router = router
        self._told = told
        self._swapped: dict[int, State] = {}  # by job id
        self._sizes: dict[int, int] = {}  # tokens of each

    @property
    def num_swapped(self) -> int:
        """Tokens in host memory."""
        return sum(self._sizes.values())

    def open(self, job: Job) -> Slot | None:
        """A slot for a job that is let in, with whatever is known of its tokens."""
        tenant = job.request.tenant
        limit = job.limit if self._paged is None else self._scheduler.policy.reserve(job)
        if job.prompt_logprobs is not None and None in job.prompt_logprobs[1:]:
            # Of a prompt that is to be scored nothing may be known already: only what is read has rows.
            self.forget(job)
            return self._target.open((), limit, tenant)
        state = job.saved or self._swapped.get(job.id)
        if state is None:
            return self._target.open(job.tokens, limit, tenant)
        if self._paged is None:
            return self._target.load(state)  # None is for want of room, as of `open`
        slot = self._paged.swap_in(state, job.tokens, limit, tenant)
        if slot is not None:
            self.forget(job)
        return slot

    def forget(self, job: Job) -> None:
        """Nothing is kept in host memory for the job any more."""
        self._swapped.pop(job.id, None)
        self._sizes.pop(job.id, None)

    def fit(self, plan: Plan) -> None:
        """Make room for everything the pass feeds; who has to give way leaves the plan."""
        if self._paged is None:
            return
        lengths = {job.id: job.cached + chunk for job, chunk in zip(plan.reading, plan.chunks, strict=True)}
        places = {job.id: place for place, job in enumerate(plan.deciding)}
        jobs, widths, order = plan.jobs, plan.widths, self._scheduler.policy.order
        if len(jobs) > 1:
            jobs = sorted(jobs, key=lambda job: (order(job), job.id))
        wanted = [lengths.get(job.id, len(job.tokens)) for job in jobs]
        drafts = [widths[places[job.id]] if job.id in places else 0 for job in jobs]
        done = self._reserve_all(self._paged, jobs, list(map(int.__add__, wanted, drafts)))
        for job, length, width in zip(jobs[done:], wanted[done:], drafts[done:], strict=True):
            if job.slot is None:  # it gave way to another
                continue
            if width:
                if self._reserve(self._paged, job, length + width):
                    continue
                plan.asks[places[job.id]] = ()
                plan.fallbacks.append((job, NO_ROOM))
            while job.slot is not None and not self._reserve(self._paged, job, length):
                self._preempt(self._paged, self._victim(self._paged, job) or job)
        if any(job.slot is None for job in jobs):
            _leave(plan)

    def _reserve_all(self, paged: Paged, jobs: list[Job], lengths: list[int]) -> int:
        """Mostly there is room for everybody. How many got it, before the first who did not."""
        with blaming(BackendError, "the target failed to make room"):
            for number, (job, length) in enumerate(zip(jobs, lengths, strict=True)):
                if not paged.reserve(slot_of(job), length):
                    return number
        return len(jobs)

    def _reserve(self, paged: Paged, job: Job, length: int) -> bool:
        with blaming(BackendError, "the target failed to make room"):
            return bool(paged.reserve(slot_of(job), length))

    def _victim(self, paged: Paged, job: Job) -> Job | None:
        """Who gives way so that a job can go on: somebody whose pages are really freed by that.

        Where that would be the job itself, those who only share pages go first, if the policy puts them behind it: what
        none of them frees alone, they free together.
        """
        running, victim = list(self._scheduler.running), self._scheduler.policy.victim
        chosen = victim([one for one in running if one is job or paged.would_free(slot_of(one)) > 0])
        return victim(running) if chosen is job else chosen

    def _preempt(self, paged: Paged, job: Job) -> None:
        slot, kind, config = slot_of(job), "recompute", self._scheduler.config
        publish(self._target, job)  # what nobody needs meanwhile is found again
        if config.preempt == "swap" and self.num_swapped + job.cached <= config.swap_tokens:
            kind = "swap"
            self._swapped[job.id], self._sizes[job.id] = paged.swap_out(slot), job.cached
        self._router.pause(job)
        self._target.close(slot)
        job.slot, job.cached = None, 0
        self._scheduler.give_way(job)
        self._told(job, kind)


def _leave(plan: Plan) -> None:
    """Only who has a slot takes part."""
    stay = [index for index, job in enumerate(plan.reading) if job.slot is not None]
    plan.reading, plan.chunks = [plan.reading[index] for index in stay], [plan.chunks[index] for index in stay]
    stay = [index for index, job in enumerate(plan.deciding) if job.slot is not None]
    plan.deciding, plan.asks = [plan.deciding[index] for index in stay], [plan.asks[index] for index in stay]
