"""The loop. One step is: plan, draft, score, judge, commit.

`Loop.step` is that sentence; plain decoding is the same loop with width 0. The loop owns the jobs from the moment they
are added until they end, and brings every cache back to the emitted tokens after each round. It knows nothing of
threads, prompts or callers: that is `engine.Engine`.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from outrider.backends.base import Backend
from outrider.clock import Clock
from outrider.config import SchedulerConfig
from outrider.draft.base import Drafter
from outrider.engine.commit import take
from outrider.errors import BackendError
from outrider.metrics import PassTimes, Statistics
from outrider.sched.scheduler import Scheduler
from outrider.spec.round import emitted, judge, keep, observe, propose, score
from outrider.spec.width import FixedWidth
from outrider.types import Drafts, Event, FinishReason, Job, Plan, Result, Scores, Verdicts


class Outcome(NamedTuple):
    """What a round did for one job."""

    drafted: int
    accepted: int
    emitted: int


class Loop:
    """Moves jobs forward, one pass at a time."""

    def __init__(self, target: Backend, drafter: Drafter, scheduling: SchedulerConfig, clock: Clock) -> None:
        self.target = target
        self.drafter = drafter
        self.scheduler = Scheduler(scheduling)
        self.width = FixedWidth(target.info, drafter, scheduling.prefill_chunk)
        self.clock = clock
        self.statistics = Statistics()
        self.jobs: dict[str, Job] = {}  # by request id, from `add` to the end
        self.look_at_queue = False  # set from any thread when a waiting job was cancelled
        self._num_deadlines = 0

    def add(self, job: Job) -> None:
        self.jobs[job.request_id] = job
        self._num_deadlines += job.deadline is not None
        self.scheduler.add(job)

    def step(self) -> list[Event]:
        """Move every running job one round forward: 1 to width + 1 tokens each, or a chunk of its prompt."""
        events = self._admit()
        plan = self.scheduler.plan(self.width.choose)
        if not plan.reading and not plan.deciding:
            return events
        now = self.clock.now
        try:
            started = now()
            drafts = propose(self.drafter, self.target, plan)
            drafted = now()
            scores = score(self.target, plan, drafts)  # ONE pass: prompt chunks, pending tokens and drafts alike
            scored = now()
            verdicts = judge(self.target, plan, drafts, scores)
            judged = now()
            times = PassTimes(drafted - started, scored - drafted, judged - scored, drafts.steps, _steady(plan, scores))
            return events + self._commit(plan, drafts, scores, verdicts, times)
        except BaseException as error:
            self._fail_all(plan, error)
            if not isinstance(error, Exception):
                raise
            return events

    def end(self, job: Job, reason: FinishReason, event: Event | None = None) -> Event:
        """The job is over; `event` becomes its last and carries the result."""
        event = event or Event(job.request_id, [], "", [], 0)
        if job.text is not None:
            event.text += job.text.finish()
        self._release(job)
        job.finish_reason = reason
        event.result = job.result = Result(
            request_id=job.request_id,
            text="" if job.text is None else job.text.text,
            token_ids=job.output,
            finish_reason=reason,
            num_prompt_tokens=job.num_prompt,
            seed=job.seed,
            rule=job.rule,
            statistics=job.statistics,
        )
        if job.outbox is not None:
            job.outbox.append(event)
        return event

    def check(self) -> None:
        """Assert that caches and tokens agree; for calls between steps."""
        for job in self.scheduler.running:
            assert job.slot is not None, f"{job.request_id} runs without a slot"
            held = self.target.length(job.slot)
            assert held == job.cached < len(job.tokens), f"{job.request_id}: {held} held, {job.cached} cached"

    def _admit(self) -> list[Event]:
        """End what was cancelled or is late, and let waiting jobs in."""
        now = self.clock.now()
        watched = list(self.scheduler.running)
        if self.look_at_queue or self._num_deadlines:  # a long queue is walked only when something may have happened
            self.look_at_queue = False
            watched += self.scheduler.waiting
        interrupted = [(job, reason) for job in watched if (reason := _interruption(job, now)) is not None]
        events = [self.end(job, reason) for job, reason in interrupted]
        self.scheduler.admit(self._seat)
        return events

    def _seat(self, job: Job) -> bool:
        job.slot = self.target.open()
        return job.slot is not None

    def _commit(self, plan: Plan, drafts: Drafts, scores: Scores, verdicts: Verdicts, times: PassTimes) -> list[Event]:
        """Emit what the verdicts say until something stops an answer, and bring every cache to the emitted tokens."""
        for job, chunk in zip(plan.reading, plan.chunks, strict=True):
            job.cached += chunk
        now = self.clock.now()
        accepted, proposals, start = verdicts.accepted.tolist(), drafts.tokens.tolist(), 0
        kept: list[Job] = []
        ended: list[tuple[Job, FinishReason, Event]] = []
        outcomes: Counter[Outcome] = Counter()
        events: list[Event] = []
        for index, (job, tokens) in enumerate(zip(plan.deciding, emitted(drafts, scores, verdicts), strict=True)):
            drafted = drafts.counts[index]
            event = Event(job.request_id, tokens, "", proposals[start : start + drafted], accepted[index])
            start += drafted
            if index in verdicts.faults:
                self._fail(job, verdicts.faults[index])
                continue
            reason = _interruption(job, now)
            if reason is not None:  # the round came too late: nothing of it is emitted
                events.append(self.end(job, reason))
                continue
            try:
                num_taken, event.text, reason = take(job, tokens)
            except Exception as error:  # the caller's own callback
                self._fail(job, error)
                continue
            if num_taken < len(tokens):
                event.tokens, event.accepted = tokens[:num_taken], min(accepted[index], num_taken)
            job.cached = len(job.tokens) - 1
            kept.append(job)
            outcome = Outcome(drafted, accepted[index], num_taken)
            outcomes[outcome] += 1
            job.statistics.add_round(*outcome)
            job.statistics.add_pass(times, len(plan.deciding), drafted > 0, num_taken)
            events.append(event)
            if reason is not None:
                ended.append((job, reason, event))
            elif job.outbox is not None:
                job.outbox.append(event)
        keep(self.target, kept)
        observe(self.drafter, plan, scores, verdicts)
        self._count(plan, drafts, scores, times, outcomes)
        for job, reason, event in ended:
            self.end(job, reason, event)
        return events

    def _count(self, plan: Plan, drafts: Drafts, scores: Scores, times: PassTimes, outcomes: Counter[Outcome]) -> None:
        """The loop's own statistics of a pass."""
        for outcome, jobs in outcomes.items():
            self.statistics.add_round(*outcome, times=jobs)
        num_emitted = sum(outcome.emitted * jobs for outcome, jobs in outcomes.items())
        self.statistics.add_pass(times, len(plan.deciding), any(drafts.counts), num_emitted)
        self.statistics.costs.add(scores.num_fed, times.score_s)
        for job, reason in plan.fallbacks + drafts.fallbacks:
            job.statistics.add_fallback(reason)
            self.statistics.add_fallback(reason)

    def _fail(self, job: Job, error: BaseException) -> None:
        """The job is over; whoever waits for it gets the error."""
        self._release(job)
        job.error = error

    def _fail_all(self, plan: Plan, error: BaseException) -> None:
        """A pass broke off. Caches may hold half of it, so every job in it ends; the next ones are served."""
        if not isinstance(error, Exception):  # an interrupt belongs to the thread it hit, the others get an error
            error = BackendError(f"the pass was interrupted ({type(error).__name__}); ask again")
        for job in plan.jobs:
            if not job.done:
                self._fail(job, error)

    def _release(self, job: Job) -> None:
        """Give back everything the job held."""
        del self.jobs[job.request_id]
        self._num_deadlines -= job.deadline is not None
        self.scheduler.remove(job)
        self.drafter.forget(job)
        if job.slot is not None:
            self.target.close(job.slot)
            job.slot = None


def _interruption(job: Job, now: float) -> FinishReason | None:
    """Why a job must end without another token."""
    if job.cancelled:
        return FinishReason.CANCELLED
    if job.deadline is not None and now > job.deadline:
        return FinishReason.DEADLINE
    return None


def _steady(plan: Plan, scores: Scores) -> bool:
    """Whether every job was fed one pending token and its drafts: a row each, and no prompt."""
    return scores.num_fed == sum(scores.counts) and not plan.reading
