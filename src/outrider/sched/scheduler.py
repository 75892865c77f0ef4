"""The next batch: which jobs run, what the pass is made of, which pages it takes. Integers only, never an array.

A pass has a token budget. Every running job that decodes gets its one token, then prompts are prefilled in the order of
the policy, at most a chunk of them, and drafts get what is left. So neither waits for the other: a job decodes in
every pass, and of the prompt that is first in order every pass reads `min(prefill_chunk, budget - max_batch)` tokens.

A batch is final when `next_batch` returns it: admission, preemption and pages are settled, no other part changes it.
Drafts never preempt: they take pages that are free.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush

from outrider.backends.base import Backend
from outrider.clock import Clock
from outrider.config import SchedulerConfig
from outrider.errors import BackendError, OutriderError, PolicyError
from outrider.sched.policies import Order, Policy, checked_order, find_policy
from outrider.sched.sequences import Sequences
from outrider.spec.router import Router
from outrider.types import Batch, Ended, FinishReason, Job

OVER_BUDGET = "the step's token budget is full"
NO_PAGES = "no free pages for drafts"
CHAINS_ONLY = "the target reads chains only"
NO_REWIND = "the target cannot rewind, so drafting saves no pass"
ONE_DRAFT = "the target cannot rewind: one draft a round, verified before it is fed"


class Scheduler:
    """`waiting` have no slot, `running` do."""

    def __init__(self, config: SchedulerConfig, target: Backend, router: Router, clock: Clock, max_width: int) -> None:
        self.config = config
        self.policy: Policy = find_policy(config.policy)
        self.sequences = Sequences(target, router, config.swap_tokens if config.preempt == "swap" else 0)
        self.pass_s = 0.0  # the least that another pass takes, for policies that drop late jobs
        self._info = target.info
        self._clock = clock
        self._max_width = max_width
        self._budget = config.budget
        self._waiting: dict[int, Job] = {}  # by id
        self._queue: list[tuple[Order, int, int]] = []  # heap of (order, number of entry, job id); some may have left
        self._orders: dict[int, Order] = {}  # of every job, as the policy gave it when the job was queued
        self._num_entries = 0
        self._running: dict[int, Job] = {}  # by id: leaving costs the same in any batch
        self._in_flight = 0  # tokens that the running jobs may come to
        self._num_deadlines = 0
        self._is_opening = False  # several jobs start together, just now

    @property
    def running(self) -> Collection[Job]:
        return self._running.values()

    @property
    def waiting(self) -> Collection[Job]:
        return self._waiting.values()

    def add(self, job: Job) -> None:
        """Queue the job. A policy that fails on it raises a PolicyError, and the job is not queued."""
        order = checked_order(self.policy, job)
        self._waiting[job.id], self._orders[job.id] = job, order
        self._num_deadlines += job.deadline is not None
        self._num_entries += 1
        heappush(self._queue, (order, self._num_entries, job.id))

    def remove(self, job: Job) -> None:
        """The job is over: it leaves the batch or the queue, and its slot is closed."""
        if self._orders.pop(job.id, None) is None:
            return  # it was never queued
        self._num_deadlines -= job.deadline is not None
        self.sequences.forget(job)
        self.sequences.close(job)
        if self._running.pop(job.id, None) is not None:
            self._in_flight -= job.limit
        else:
            self._waiting.pop(job.id, None)
            if len(self._queue) > 2 * len(self._waiting) + 64:
                self._queue = [entry for entry in self._queue if entry[2] in self._waiting]
                heapify(self._queue)

    def next_batch(self, *, may_cancel: bool = True) -> Batch:
        """The next pass, final. may_cancel: whether a waiting job may have been cancelled since the last call."""
        batch = Batch([], [], [], [])
        self.sequences.close_again()
        self._reap(batch, may_cancel)
        self._admit(batch)
        self._select(batch)
        if self._info.pages:
            self._fit_pages(batch)
        self._grant_drafts(batch)
        return batch

    def _reap(self, batch: Batch, may_cancel: bool) -> None:
        """Jobs that were cancelled, or whose deadline passes before another pass can end."""
        now = self._clock.now() + (self.pass_s if self.policy.drops_late else 0.0)
        watched = list(self._running.values())
        if may_cancel or self._num_deadlines:  # a long queue is walked only when something may have happened
            watched += self._waiting.values()
        for job in watched:
            reason = interruption(job, now)
            if reason is not None:
                batch.ended.append(Ended(job, reason))

    def _admit(self, batch: Batch) -> None:
        """Start waiting jobs, as far as the batch and the cache have room. No job overtakes the first in line."""
        over = {ended.job.id for ended in batch.ended}
        while (job := self._next_in_line(over)) is not None:
            try:
                has_room = self.sequences.open(job, self.policy)
                if not has_room and not self._running:
                    raise BackendError("the target has no room for a single sequence; give it more, or close others")
            except OutriderError as error:
                self._leave(batch, job, error)
                over.add(job.id)
                continue
            if not has_room:
                return  # a running job will leave
            heappop(self._queue)
            del self._waiting[job.id]
            self._running[job.id] = job
            self._in_flight += job.limit
            batch.admitted.append(job)

    def _next_in_line(self, over: Collection[int]) -> Job | None:
        """The job that may start next, if the batch has room for it."""
        while self._queue and (self._queue[0][2] not in self._waiting or self._queue[0][2] in over):
            heappop(self._queue)
        free = self.config.max_batch - len(self._running)
        if not self._queue or free <= 0:
            self._is_opening = False
            return None
        self._is_opening |= not self._running or free >= min(self.config.together, len(self._waiting))
        if not self._is_opening:
            return None
        job, most = self._waiting[self._queue[0][2]], self.config.max_in_flight
        if most is not None and self._running and self._in_flight + job.limit > most:
            return None
        return job

    def _select(self, batch: Batch) -> None:
        """Decode tokens first, then prefill chunks."""
        over = {ended.job.id for ended in batch.ended}
        chunks = self._chunks()
        for job in self._running.values():
            if job.id in over:
                continue
            unread = len(job.tokens) - job.cached
            chunk = 1 if unread == 1 else chunks.get(job.id, 0)
            if chunk == unread:
                batch.decode.append(job)
            elif chunk:
                batch.prefill.append(job)
                batch.chunks.append(chunk)

    def _chunks(self) -> dict[int, int]:
        """How many tokens each job with more than one to read is fed (by id), first in order first."""
        readers = [job for job in self._running.values() if len(job.tokens) - job.cached > 1]
        if not readers:
            return {}
        left = min(self.config.prefill_chunk, self._budget - (len(self._running) - len(readers)))
        if len(readers) > 1:
            readers.sort(key=lambda job: self._orders[job.id])
        chunks = {}
        for job in readers:
            chunks[job.id] = min(left, len(job.tokens) - job.cached)
            left -= chunks[job.id]
        return chunks

    def _fit_pages(self, batch: Batch) -> None:
        """Pages for every token that must be fed. Where they run out, the policy names jobs that are preempted."""
        lengths = {job.id: job.cached + chunk for job, chunk in zip(batch.prefill, batch.chunks, strict=True)}
        jobs = batch.jobs
        if len(jobs) > 1:
            jobs.sort(key=lambda job: (self._orders[job.id], job.id))
        needed = [(job, lengths.get(job.id, len(job.tokens))) for job in jobs]
        if not all(self._reserve(batch, job, length) for job, length in needed):
            for job in self._running.values():
                self._reserve(batch, job, None)  # pages that earlier drafts left unused come first
            for job, length in needed:
                while not self._reserve(batch, job, length):
                    self._make_way(batch, job)
        self._drop_ended(batch)

    def _drop_ended(self, batch: Batch) -> None:
        """Only jobs that still have a slot take part."""
        if all(job.slot is not None for job in batch.jobs):
            return
        room = batch.room or [0] * len(batch.decode)
        reading = [(job, n) for job, n in zip(batch.prefill, batch.chunks, strict=True) if job.slot is not None]
        decoding = [(job, n) for job, n in zip(batch.decode, room, strict=True) if job.slot is not None]
        batch.prefill, batch.chunks = [job for job, _ in reading], [chunk for _, chunk in reading]
        batch.decode, batch.room = [job for job, _ in decoding], [room for _, room in decoding]

    def _reserve(self, batch: Batch, job: Job, length: int | None) -> bool:
        """Pages for `length` tokens, or give back what is not used (None). False is shortage; a job without a slot or
        whose backend fails needs none."""
        if job.slot is None:
            return True
        try:
            return self.sequences.trim(job) if length is None else self.sequences.reserve(job, length)
        except OutriderError as error:
            self._leave(batch, job, error)
            return True

    def _make_way(self, batch: Batch, job: Job) -> None:
        """Preempt a job, so that another one can go on. If the policy or the backend fails, the job in need ends."""
        try:
            victim = self._victim(batch, job) or job
        except PolicyError as error:
            self._leave(batch, job, error)
            return
        if victim.slot is not None:
            self._preempt(batch, victim)

    def _victim(self, batch: Batch, job: Job) -> Job | None:
        """The job that is preempted so that another one can go on: one whose pages are really freed by that.

        Where that would be the job itself, those who only share pages go first, if the policy puts them behind it: what
        none of them frees alone, they free together.
        """
        freeing = []
        for one in self._running.values():
            try:
                if one.slot is not None and (one is job or self.sequences.frees_pages(one)):
                    freeing.append(one)
            except OutriderError as error:
                self._leave(batch, one, error)
        chosen = self._choose_victim(freeing)
        if chosen is not job:
            return chosen
        return self._choose_victim([one for one in self._running.values() if one.slot is not None])

    def _choose_victim(self, candidates: Sequence[Job]) -> Job | None:
        try:
            victim = self.policy.victim(candidates)
        except Exception as error:
            name = self.policy.name
            raise PolicyError(f"the policy {name} failed to choose: {type(error).__name__}: {error}") from error
        if victim is not None and victim not in candidates:
            raise PolicyError(f"the policy {self.policy.name} chose {victim!r}, which is no running job")
        return victim

    def _preempt(self, batch: Batch, job: Job) -> None:
        """A running job loses its slot and is queued again. If that fails, that job ends."""
        try:
            kind = self.sequences.preempt(job)
            order = checked_order(self.policy, job)
        except OutriderError as error:
            self._leave(batch, job, error)
            return
        del self._running[job.id]
        self._in_flight -= job.limit
        self._waiting[job.id], self._orders[job.id] = job, order
        self._num_entries += 1
        heappush(self._queue, (order, self._num_entries, job.id))
        batch.preempted.append((job, kind))

    def _leave(self, batch: Batch, job: Job, error: OutriderError) -> None:
        """The job ends with an error. Its pages are free at once, for others in this batch."""
        batch.ended.append(Ended(job, error=error))
        self.sequences.close(job)

    def _grant_drafts(self, batch: Batch) -> None:
        """Room for drafts in what the budget and the pages leave; where the budget is short, the widest give most."""
        batch.room = [self._wanted(batch, job) for job in batch.decode]
        wanted = sum(batch.room)
        if not wanted:
            return
        left = self._budget - sum(batch.chunks) - sum([len(job.tokens) - job.cached for job in batch.decode])
        if wanted > left:
            most = _level(batch.room, left)
            batch.fallbacks += [
                (job, OVER_BUDGET) for job, room in zip(batch.decode, batch.room, strict=True) if room > most
            ]
            batch.room = [min(room, most) for room in batch.room]
        if self._info.pages:
            for index, (job, room) in enumerate(zip(batch.decode, batch.room, strict=True)):
                while room and not self._reserve(batch, job, len(job.tokens) + room):
                    room //= 2
                if room < batch.room[index]:
                    batch.room[index] = room
                    batch.fallbacks.append((job, NO_PAGES))
            self._drop_ended(batch)

    def _wanted(self, batch: Batch, job: Job) -> int:
        """Drafts that the answer and the target allow."""
        if job.width == 0 or not job.drafters:
            return 0
        most = self._max_width if job.max_width is None else min(job.max_width, self._max_width)
        width = min(most if job.width is None else job.width, job.limit - len(job.tokens) - 1)
        if width > 0 and job.tree and not self._info.trees:
            batch.fallbacks.append((job, CHAINS_ONLY))
        max_rewind = self._info.max_rewind
        if width <= 0 or max_rewind is None or width <= max_rewind:
            return max(0, width)  # the round adds one token of the target's own
        if max_rewind > 0:
            batch.fallbacks.append((job, f"the target can rewind only {max_rewind} tokens"))
            return max_rewind
        batch.fallbacks.append((job, NO_REWIND if job.width is None else ONE_DRAFT))
        return 0 if job.width is None else 1


def interruption(job: Job, now: float) -> FinishReason | None:
    """Why a job must end without another token."""
    if job.cancelled:
        return FinishReason.CANCELLED
    if job.deadline is not None and now > job.deadline:
        return FinishReason.DEADLINE
    return None


def _level(widths: Sequence[int], left: int) -> int:
    """The largest cap on all widths with which their sum is at most `left`."""
    cap = max(widths)
    while cap and sum([min(width, cap) for width in widths]) > left:
        cap -= 1
    return cap
