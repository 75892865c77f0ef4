"""The loop. One step is: plan, draft, score, judge, commit.

`Loop.step` is that sentence; plain decoding is the same loop with width 0. The loop owns the jobs from the moment they
are added until they end, and brings every cache back to the emitted tokens after each round. It knows nothing of
threads, prompts or callers: that is `engine.Engine`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from outrider.backends.base import Backend
from outrider.clock import Clock
from outrider.config import SchedulerConfig
from outrider.engine.ahead import RunAhead
from outrider.engine.commit import take
from outrider.engine.room import Room
from outrider.engine.timing import RoundTimer
from outrider.errors import BackendError, OutriderError, PolicyError
from outrider.metrics import Outcome, PassTimes, Statistics
from outrider.sampling.logprobs import token_logprobs
from outrider.sched.scheduler import Scheduler
from outrider.serving import ServingMetrics
from outrider.spec.round import emitted, judge, keep, publish, score, slot_of
from outrider.spec.router import Router
from outrider.spec.width import Choice, Controller, WidthChooser
from outrider.types import (
    Array,
    Drafts,
    Event,
    FinishReason,
    Job,
    Plan,
    Result,
    Scores,
    Slot,
    TokenLogprob,
    Verdicts,
)

log = logging.getLogger("outrider")


class Emission(NamedTuple):
    """What comes of a round for one job: tokens went out (`outcome`), the answer ends (`reason`), or it failed."""

    job: Job
    event: Event
    outcome: Outcome | None = None
    reason: FinishReason | None = None
    error: BaseException | None = None
    path: list[int] | None = None  # places of the drafts that stay in the cache, where they do not follow one another


class Loop:
    """Moves jobs forward, one pass at a time."""

    def __init__(
        self,
        target: Backend,
        router: Router,
        scheduling: SchedulerConfig,
        clock: Clock,
        controller: Controller,
        max_width: int,
        ahead: RunAhead | None = None,
    ) -> None:
        self.ahead = ahead
        self.target = target
        self.router = router
        self.scheduler = Scheduler(scheduling)
        self.room = Room(target, self.scheduler, router, self._preempted)
        self.width = WidthChooser(target.info, router, controller, max_width)
        self.clock = clock
        self.statistics = Statistics()
        self.metrics = ServingMetrics()
        self.jobs: dict[str, Job] = {}  # by request id, from `add` to the end
        self.has_cancelled = False  # set from any thread after a job's `cancelled`
        self._arrivals: deque[Job] = deque()
        self._num_deadlines = 0
        self._pass_s = 0.0  # the least that another step takes
        self.timer = RoundTimer(clock)

    def add(self, job: Job) -> None:
        """From any thread, also while a step is under way: the job joins the line before the next."""
        self._arrivals.append(job)
        self.jobs[job.request_id] = job  # from here on it can be cancelled

    def _receive(self) -> None:
        while self._arrivals:
            job = self._arrivals.popleft()
            self._num_deadlines += job.deadline is not None
            self.metrics.arrived(job.arrival)
            try:
                self.scheduler.add(job)
            except PolicyError as error:
                self._fail(job, error)

    def step(self) -> list[Event]:
        """Move every running job one round forward: 1 to width + 1 tokens each, or a chunk of its prompt."""
        timer = self.timer
        timer.begin()
        events = self.reap()
        self._admit()
        plan = self._plan()
        try:
            self.room.fit(plan)
            if not plan.jobs:
                return events
            timer.planned()
            ready = self.ahead.take(plan) if self.ahead is not None else ()
            drafts = self.router.propose(self.target, plan, ready, self.width.controller.worth)
            draft_s = timer.lap()
            if self.ahead is not None:
                self.ahead.start(plan, drafts)
            if not self.width.stands(plan):
                drafts.follow = None  # what is asked for next may be something else
            # ONE pass: prompt chunks, pending tokens and drafts alike
            scores = score(self.target, plan, drafts, self.router.hidden, self.width.goes_on(plan, drafts))
            score_s = timer.lap()
            verdicts = judge(self.target, plan, drafts, scores)
            num_fed = sum(scores.fed)
            steady = num_fed == sum(scores.counts) and not plan.reading  # a row for every token: no prompt
            times = PassTimes(draft_s, score_s, timer.lap(), drafts.steps, num_fed, steady)
            timer.take(times, verdicts, queues=self.target.ops.queues)
            told = self._commit(plan, drafts, scores, verdicts, times)
            seconds = timer.end()
            if self.ahead is not None and steady and any(drafts.counts) and not verdicts.is_first:
                self.ahead.payoff.add(sum([len(event.tokens) for event in told]), seconds)
            return events + told
        except BaseException as error:
            if self.ahead is not None:
                self.ahead.abandon()
            self._fail_pass(plan, error)
            if not isinstance(error, Exception):
                raise
            return events

    def reap(self) -> list[Event]:
        """End what was cancelled or is late."""
        has_cancelled, self.has_cancelled = self.has_cancelled, False  # before looking: a later cancel sets it again
        self._receive()
        now = self.clock.now() + (self._pass_s if self.scheduler.policy.drops_late else 0.0)
        watched = list(self.scheduler.running)
        if has_cancelled or self._num_deadlines:  # a long queue is walked only when something may have happened
            watched += self.scheduler.waiting
        interrupted = [(job, reason) for job in watched if (reason := _interruption(job, now)) is not None]
        return [self.end(job, reason) for job, reason in interrupted]

    def end(self, job: Job, reason: FinishReason, event: Event | None = None) -> Event:
        """The job is over; `event` becomes its last and carries the result."""
        event = event or _silence(job)
        if job.text is not None:
            rest = job.text.finish()
            event.text += rest
            if event.pieces:
                event.pieces[-1] += rest
        job.statistics.costs = job.statistics.costs.copy()  # the engine's go on changing
        event.result = job.result = Result(
            request_id=job.request_id,
            text="" if job.text is None else job.text.text,
            token_ids=job.output,
            finish_reason=reason,
            num_prompt_tokens=job.num_prompt,
            seed=job.seed,
            rule=job.rule,
            statistics=job.statistics,
            logprobs=job.logprobs,
            prompt_logprobs=job.prompt_logprobs,
        )
        self._deliver(job, event)  # before it counts as done: a reader that sees "done" finds the last event
        job.finish_reason = reason
        self._release(job)
        self._finished(job, reason)
        _wake(job)
        return event

    def _finished(self, job: Job, reason: str) -> None:
        now, num_tokens, per_token_s = self.clock.now(), len(job.tokens) - job.num_prompt, None
        if job.first_token is not None and num_tokens > 1:
            per_token_s = (now - job.first_token) / (num_tokens - 1)
        self.metrics.finished(reason, now - job.arrival, num_tokens, per_token_s)

    def check(self) -> None:
        """Assert that caches and tokens agree; for calls between steps."""
        for job in self.scheduler.running:
            assert job.slot is not None, f"{job.request_id} runs without a slot"
            held = self.target.length(job.slot)
            assert held == job.cached < len(job.tokens), f"{job.request_id}: {held} held, {job.cached} cached"

    def _admit(self) -> None:
        """Let waiting jobs in, as far as there is room."""
        while (job := self.scheduler.next_in_line()) is not None:
            try:
                job.slot = self.room.open(job)
                if job.slot is not None:
                    job.cached = self.target.length(job.slot)  # more than 0 where the beginning was known already
            except Exception as error:
                self._fail(job, _blamed(BackendError, "the target failed to open a sequence", error))
                continue
            if job.slot is not None:
                job.saved = None
                self.scheduler.start(job)
                if job.started is None:
                    job.started = self.clock.now()
                    self.metrics.started(job.started - job.arrival, job.num_prompt, job.cached)
            elif self.scheduler.running:
                return  # somebody will leave
            else:
                self._fail(
                    job, BackendError("the target has no room for a single sequence; give it more, or close others")
                )

    def _preempted(self, job: Job, kind: str) -> None:
        job.statistics.preemptions += 1
        self.statistics.preemptions += 1
        self.metrics.preempted(kind)

    def _plan(self) -> Plan:
        """The next pass. A drafter that fails to say how far it is fails that job, and the others are planned again."""
        failed: list[tuple[Job, OutriderError]] = []

        def choose(jobs: Sequence[Job], rows: int) -> list[Choice]:
            choices = self.width.choose(jobs, rows)
            failed.extend((job, c.error) for job, c in zip(jobs, choices, strict=True) if c.error is not None)
            return choices

        plan = self.scheduler.plan(choose)
        if not failed:
            return plan
        for job, error in failed:
            self._fail(job, error)
        return self._plan()

    def _commit(self, plan: Plan, drafts: Drafts, scores: Scores, verdicts: Verdicts, times: PassTimes) -> list[Event]:
        """Emit what the verdicts say, bring every cache to the emitted tokens, count, and tell the callers."""
        for job, rows in scores.read:
            self._score_prompt(job, rows)
        for job, chunk in zip(plan.reading, plan.chunks, strict=True):
            job.cached += chunk
        emissions = self._emit(plan, drafts, scores, verdicts)
        sound = [emission for emission in emissions if emission.error is None]
        going = [emission.job for emission in sound if emission.reason is None]
        if self.ahead is not None:
            self._land(self.ahead, times)
        # The draft first: what it holds ahead under the target's page ids would go with the target's pages.
        self._observe(plan, going, scores, verdicts, times)
        if any(drafts.counts):  # without drafts there is nothing to take back
            self._keep([emission for emission in sound if not emission.job.done])
        self._publish(plan, sound)
        self._count(plan, drafts, times, emissions)
        for job, event, _, reason, error, _ in emissions:
            if job.done:  # its cache failed on the way: it has its error
                continue
            if error is not None:
                self._fail(job, error)
            elif reason is not None:
                self.end(job, reason, event)
            else:
                self._deliver(job, event)
        return [emission.event for emission in emissions if emission.job.error is None]

    def _score_prompt(self, job: Job, rows: Array) -> None:
        """What the target thought of the prompt's tokens that follow these rows, of which the first is at `cached`."""
        assert job.prompt_logprobs is not None, f"{job} did not ask for its prompt"
        begin = job.cached + 1
        following = job.tokens[begin : min(begin + rows.shape[0], job.num_prompt)]
        told = token_logprobs(self.target.ops.xp, rows[: len(following), ...], following, job.request.logprobs or 0)
        job.prompt_logprobs[begin : begin + len(told)] = told

    def _land(self, ahead: RunAhead, times: PassTimes) -> None:
        """What was drafted ahead is known; who waited for a draft that failed has its error."""
        waited_s, steps, faults = ahead.finish()
        times.draft_s += waited_s
        times.draft_steps += steps
        for job, error in faults:
            if not job.done:
                self._fail(job, error)

    def _emit(self, plan: Plan, drafts: Drafts, scores: Scores, verdicts: Verdicts) -> list[Emission]:
        """Every deciding job takes its tokens until something stops the answer."""
        now = self.clock.now()
        accepted = verdicts.accepted.tolist()
        emissions = []
        for index, (job, drafted, tokens) in enumerate(
            zip(plan.deciding, drafts.proposals(), emitted(drafts, scores, verdicts), strict=True)
        ):
            parents = drafts.parents.get(index)
            event = Event(job.request_id, tokens, "", drafted, accepted[index], parents)
            if index in drafts.borrowed:  # refused text of another request is not this caller's to see
                event.drafts, event.parents = [drafted[node] for node in verdicts.kept(index)], None
            if index in verdicts.faults:
                emissions.append(Emission(job, event, error=verdicts.faults[index]))
                continue
            reason = _interruption(job, now)
            if reason is not None:  # the round came too late: nothing of it is emitted
                emissions.append(Emission(job, _silence(job), reason=reason))
                continue
            try:
                event.pieces, reason = take(job, tokens)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # of the caller's own callback (sys.exit included), or of the tokenizer
                emissions.append(Emission(job, event, error=error))
                continue
            event.text, num_taken = "".join(event.pieces), len(event.pieces)
            if num_taken < len(tokens):
                event.tokens, event.accepted = tokens[:num_taken], min(accepted[index], num_taken)
            if job.logprobs is not None:
                event.logprobs = self._logprobs(job, event.tokens, index, scores, verdicts)
                job.logprobs += event.logprobs
            job.cached = len(job.tokens) - 1
            if job.first_token is None:
                job.first_token = now
                self.metrics.first_token(now - job.arrival)
            maker, path = drafts.makers[index] if drafts.makers else "", None
            if parents is None:
                outcome = Outcome.of_chain(len(drafted), accepted[index], num_taken, maker)
            else:
                kept = verdicts.paths[index]
                outcome = Outcome.of_tree(parents, kept, num_taken, maker)
                first = len(job.tokens) - num_taken  # the place of the first draft; the last token is not kept
                path = [first + node for node in kept[: num_taken - 1]]
            emissions.append(Emission(job, event, outcome, reason, path=path))
        return emissions

    def _logprobs(
        self, job: Job, tokens: list[int], index: int, scores: Scores, verdicts: Verdicts
    ) -> list[TokenLogprob]:
        """Of a round's tokens: each was decided by the row after the draft before it."""
        first, xp = sum(scores.counts[:index]), self.target.ops.xp
        rows = [first, *(first + node + 1 for node in verdicts.kept(index))][: len(tokens)]
        return token_logprobs(xp, scores.logits[self.target.ops.integers(rows), ...], tokens, job.request.logprobs or 0)

    def _keep(self, sound: list[Emission]) -> None:
        """The target's cache returns to what was emitted."""
        jobs = [emission.job for emission in sound]
        paths: dict[Slot, list[int]] = {slot_of(one.job): one.path for one in sound if one.path}
        try:
            keep(self.target, jobs, paths)
        except BackendError as error:
            self._fail_jobs(jobs, error)

    def _publish(self, plan: Plan, sound: list[Emission]) -> None:
        """What was read or said may help later requests: told once a prompt is read, and when an answer ends.

        Only now: the pass is judged and the caches hold what was kept.
        """
        told = plan.reading + [
            job
            for job, _, outcome, reason, _, _ in sound
            if reason is not None or (outcome is not None and len(job.tokens) - outcome.emitted == job.num_prompt)
        ]
        for job in told:
            if not job.done:
                try:
                    publish(self.target, job)
                except BackendError as error:
                    self._fail(job, error)

    def _observe(self, plan: Plan, going: list[Job], scores: Scores, verdicts: Verdicts, times: PassTimes) -> None:
        """The drafter rewinds, catches up and learns; the time it takes is drafting time."""
        started = self.clock.now()
        steps, faults = self.router.observe(plan, scores, verdicts)
        times.draft_steps += steps
        for name, error in faults.items():
            self._fail_jobs([job for job in plan.reading + going if name in job.drafters], error)
        times.draft_s += self.clock.now() - started
        times.drafters = self.router.seconds

    def _count(self, plan: Plan, drafts: Drafts, times: PassTimes, emissions: list[Emission]) -> None:
        """Statistics of the pass, for every job in it and for the loop."""
        self.timer.charge(times, drafts)
        if self.ahead is not None and self.ahead.payoff.is_trying and any(drafts.counts):
            times.is_odd = True  # plain rounds are the same in either order
        pass_s = times.pass_s
        self._pass_s = min(pass_s, 0.9 * self._pass_s + 0.1 * pass_s)
        batch, num_emitted = len(plan.deciding), 0
        for job in plan.reading:
            job.statistics.add_pass(times, batch, False, 0)
        outcomes: dict[Outcome, int] = {}
        self.width.controller.learn(plan, drafts, times, [(one.job, one.outcome) for one in emissions if one.outcome])
        for job, _, outcome, _, _, _ in emissions:
            if outcome is not None:
                num_emitted += outcome.emitted
                outcomes[outcome] = outcomes.get(outcome, 0) + 1
                job.statistics.add_round(outcome)
                job.statistics.add_pass(times, batch, outcome.drafted > 0, outcome.emitted)
        for outcome, jobs in outcomes.items():
            self.statistics.add_round(outcome, times=jobs)
        self.statistics.add_pass(times, batch, any(drafts.counts), num_emitted)
        if not times.is_odd:
            self.statistics.costs.add(times.num_fed, times.score_s)
        self.metrics.step(self.clock.now(), batch, times.num_fed, self.scheduler.config.budget, num_emitted)
        for job, reason in plan.fallbacks + drafts.fallbacks:
            job.statistics.add_fallback(reason)
            self.statistics.add_fallback(reason)

    def _deliver(self, job: Job, event: Event) -> None:
        if job.outbox is not None:
            job.outbox.append(event)
            _wake(job)

    def _fail(self, job: Job, error: BaseException) -> None:
        """The job is over; whoever waits for it gets the error."""
        job.error = error
        self._release(job)
        self._finished(job, "error")
        _wake(job)

    def _fail_jobs(self, jobs: list[Job], error: OutriderError) -> None:
        """The same fault for several jobs: an exception of its own for each."""
        for job in jobs:
            if not job.done:
                self._fail(job, error.copy())

    def _fail_pass(self, plan: Plan, error: BaseException) -> None:
        """A pass broke off. Caches may hold half of it, so every job in it ends; the next ones are served."""
        if not isinstance(error, Exception):  # an interrupt belongs to the thread it hit, the others get an error
            error = BackendError(f"the pass was interrupted ({type(error).__name__}); ask again")
        elif not isinstance(error, OutriderError):
            error = _blamed(OutriderError, "the engine failed", error)
        self._fail_jobs(plan.jobs, error)

    def _release(self, job: Job) -> None:
        """Give back everything the job held. A plug-in that fails to let go is reported and does not stop the rest."""
        self._receive()
        self.jobs.pop(job.request_id, None)
        self._num_deadlines -= job.deadline is not None
        self.scheduler.remove(job)
        self.room.forget(job)
        if self.ahead is not None:
            self.ahead.forget(job)
        slot, job.slot, job.saved = job.slot, None, None
        givings: list[Callable[[], None]] = [
            *(partial(drafter.forget, job) for drafter in self.router.drafters.values()),
            lambda: self.width.controller.forget(job),
        ]
        if slot is not None:
            givings.append(lambda: self.target.close(slot))
        for give_back in givings:
            try:
                give_back()
            except Exception:
                log.exception("could not free what %s held", job.request_id)


def _interruption(job: Job, now: float) -> FinishReason | None:
    """Why a job must end without another token."""
    if job.cancelled:
        return FinishReason.CANCELLED
    if job.deadline is not None and now > job.deadline:
        return FinishReason.DEADLINE
    return None


def _silence(job: Job) -> Event:
    """An event without tokens."""
    return Event(job.request_id, [], "", [], 0)


def _blamed(kind: type[OutriderError], what: str, cause: Exception) -> OutriderError:
    error = kind(f"{what}: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def _wake(job: Job) -> None:
    if job.wake is not None:
        job.wake()
