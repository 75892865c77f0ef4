"""The loop. One step is: schedule, choose widths, draft, score, verify, commit.

`Loop.step` is that sentence; plain decoding is the same loop with width 0. The loop owns the jobs from the moment they
are received until they end, and brings every cache back to the emitted tokens after each round. It knows nothing of
threads, prompts or callers: that is `engine.Engine`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple

from outrider.backends.base import Backend
from outrider.clock import Clock
from outrider.config import SchedulerConfig
from outrider.engine.commit import take
from outrider.errors import BackendError, DeviceLostError, OutriderError, PolicyError
from outrider.metrics import Outcome, RoundTimes, Statistics
from outrider.sampling.logprobs import token_logprobs
from outrider.sched.scheduler import Scheduler, interruption
from outrider.serving import ServingMetrics
from outrider.spec.controller import WidthController
from outrider.spec.round import emitted, keep, publish, score, slot_of, verify
from outrider.spec.router import Router
from outrider.types import (
    Array,
    Asks,
    Batch,
    Drafts,
    Event,
    FinishReason,
    Job,
    Result,
    Scores,
    Slot,
    TokenLogprob,
    Verdicts,
)

log = logging.getLogger("outrider")

CONTROLLER_FAILED = "the width controller failed"

JobKey = tuple[str, str]  # tenant and request id


class Emission(NamedTuple):
    """What comes of a round for one job: tokens went out (`outcome`), the answer ends (`reason`), or it failed."""

    job: Job
    event: Event
    outcome: Outcome | None = None
    reason: FinishReason | None = None
    error: BaseException | None = None
    path: list[int] | None = None  # places of the drafts that stay in the cache, where they do not follow one another


class Round(NamedTuple):
    """A batch that was scored and verified. After a failure a batch becomes several."""

    batch: Batch
    drafts: Drafts
    scores: Scores
    verdicts: Verdicts
    times: RoundTimes


class Loop:
    """Moves jobs forward, one pass at a time."""

    def __init__(
        self,
        target: Backend,
        router: Router,
        scheduling: SchedulerConfig,
        clock: Clock,
        controller: WidthController,
        max_width: int,
    ) -> None:
        self.target = target
        self.router = router
        self.controller = controller
        self.scheduler = Scheduler(scheduling, target, router, clock, max_width)
        self.clock = clock
        self.statistics = Statistics()
        self.metrics = ServingMetrics()
        self.inbox: SimpleQueue[Job | Callable[[], None] | None] = SimpleQueue()  # jobs and calls from any thread
        self.jobs: dict[JobKey, Job] = {}  # from `submit` to the end
        self.has_cancelled = False  # set from any thread after a job's `cancelled`
        self.error: BaseException | None = None  # why no request can be served any more
        self._begun = 0.0  # when the step began

    def submit(self, job: Job) -> None:
        """From any thread: the job is queued before the next step."""
        self.jobs[job.request.tenant, job.request_id] = job  # from here on it can be cancelled
        self.inbox.put(job)

    def receive(self, wait: bool = False) -> None:
        """Take in what came from other threads. wait: until there is something."""
        try:
            while True:
                item = self.inbox.get() if wait else self.inbox.get_nowait()
                wait = False
                if isinstance(item, Job):
                    self._queue(item)
                elif item is not None:
                    item()
        except Empty:
            pass

    def _queue(self, job: Job) -> None:
        self.metrics.arrived(job.arrival)
        try:
            if self.error is not None:
                raise DeviceLostError(f"the engine cannot serve any more: {self.error}")
            self.scheduler.add(job)
        except (DeviceLostError, PolicyError) as error:
            self._fail(job, error)

    def step(self) -> list[Event]:
        """Move every running job one round forward: 1 to width + 1 tokens each, or a chunk of its prompt.

        Everything that can raise is inside: a policy, drafter, processor, callback or backend that fails ends the
        requests at fault, and the others go on.
        """
        self.receive()
        self._begun = self.clock.now()
        batch, events = Batch([], [], [], []), list[Event]()
        try:
            batch = self.scheduler.next_batch(may_cancel=self._take_cancelled())
            events += self._settle(batch)
            if not batch.jobs:
                return events
            widths = self._choose(batch) if any(batch.room) else [()] * len(batch.decode)
            drafts = self.router.propose(self.target, batch, widths, self.controller.trim)
            for part in self._score_and_verify(batch, drafts):
                events += self._commit(part)
            return events
        except BaseException as error:
            self._fail_step(batch, error)
            if not isinstance(error, Exception):
                raise
            return events

    def _take_cancelled(self) -> bool:
        has_cancelled, self.has_cancelled = self.has_cancelled, False  # before looking: a later cancel sets it again
        return has_cancelled

    def _settle(self, batch: Batch) -> list[Event]:
        """Jobs that ended without a pass, that were preempted, and that were admitted."""
        events = []
        for job, reason, error in batch.ended:
            if error is not None:
                self._fail(job, error)
            elif reason is not None:
                events.append(self.end(job, reason))
        for job, kind in batch.preempted:
            job.statistics.preemptions += 1
            self.statistics.preemptions += 1
            self.metrics.preempted(kind)
        for job in batch.admitted:
            if job.started is None:
                job.started = self._begun
                self.metrics.started(job.started - job.arrival, job.num_prompt, job.cached)
        return events

    def _choose(self, batch: Batch) -> list[Asks]:
        """Widths within the batch's room. A controller that fails costs speed, never an answer."""
        try:
            return self.controller.choose(batch)
        except Exception:
            log.exception(CONTROLLER_FAILED)
            batch.fallbacks += [(job, CONTROLLER_FAILED) for job in batch.decode if job.width is None]
            return self.controller.fixed(batch)

    def _score_and_verify(self, batch: Batch, drafts: Drafts) -> list[Round]:
        """ONE target pass: prefill chunks, decode tokens and drafts alike.

        When it fails, caches are rewound and the batch is tried again in halves with the same drafts: a job that fails
        alone is at fault.
        """
        hints = self._hints(batch, drafts)
        started = self.clock.now()
        try:
            scores = score(self.target, batch, drafts, self.router.hidden, hints)
            scored = self.clock.now()
            verdicts = verify(self.target, batch, drafts, scores)
        except DeviceLostError:
            raise
        except BackendError as error:
            return self._in_halves(batch, drafts, error)
        score_s, judge_s = scored - started, self.clock.now() - scored
        num_fed = sum(scores.fed)
        steady = num_fed == sum(scores.counts) and not batch.prefill  # a row for every token: no prompt
        draft_s = sum(self.router.seconds.values())
        times = RoundTimes(draft_s, score_s, judge_s, drafts.steps, num_fed, steady, skip=verdicts.is_first)
        times.missed_prelaunch, times.device_s = verdicts.missed_prelaunch, verdicts.seconds
        return [Round(batch, drafts, scores, verdicts, times)]

    def _hints(self, batch: Batch, drafts: Drafts) -> list[int]:
        """Decode jobs (by index) that most likely go on as they do now, for a device that is given passes ahead."""
        if not self.target.info.prelaunch or batch.prefill or not self.controller.repeats(batch):
            drafts.device.follow = None
            return []
        if any(drafts.counts):
            return list(range(len(batch.decode)))
        return [index for index, job in enumerate(batch.decode) if len(job.tokens) + 1 < job.limit]

    def _in_halves(self, batch: Batch, drafts: Drafts, error: BackendError) -> list[Round]:
        jobs = [job for job in batch.jobs if self._take_back(job)]
        if len(batch.jobs) == 1:
            self._fail_jobs(jobs, error)
            return []
        parts: list[Round] = []
        for half in (jobs[: len(jobs) // 2], jobs[len(jobs) // 2 :]):
            if half:
                members = [index for index, job in enumerate(batch.decode) if job in half]
                some = drafts.select(members, self.target.ops.integers)
                parts += self._score_and_verify(batch.select(half), some)
        for part in parts:
            part.times.skip = True
        return parts

    def _take_back(self, job: Job) -> bool:
        """The target forgets what a failed pass fed of the job. False: it cannot, and the job ends."""
        slot = slot_of(job)
        try:
            if self.target.length(slot) != job.cached:
                self.target.rewind(slot, job.cached)
            return True
        except Exception as error:
            self._fail(job, _caused(BackendError, "the target failed to rewind", error))
            return False

    def end(self, job: Job, reason: FinishReason, event: Event | None = None) -> Event:
        """The job is over; `event` becomes its last and carries the result."""
        event = event or Event(job.request_id, [], "", [], 0)
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
        self._release(job, reason)
        if job.sink is not None:
            job.sink(event)
        job.finish_reason = reason
        if job.on_done is not None:
            job.on_done()
        return event

    def reap(self) -> None:
        """End cancelled jobs without a pass; for calls between steps."""
        self.receive()
        for job in list(self.jobs.values()):
            if job.cancelled and not job.done:
                self.end(job, FinishReason.CANCELLED)

    def check(self) -> None:
        """Assert that caches and tokens agree; for calls between steps."""
        for job in self.scheduler.running:
            assert job.slot is not None, f"{job.request_id} runs without a slot"
            held = self.target.length(job.slot)
            assert held == job.cached < len(job.tokens), f"{job.request_id}: {held} held, {job.cached} cached"

    def _commit(self, part: Round) -> list[Event]:
        """Emit what the verdicts say, bring every cache to the emitted tokens, count, and deliver the events."""
        batch, drafts, scores, verdicts, times = part
        for job, rows in scores.read:
            self._score_prompt(job, rows)
        for job, chunk in zip(batch.prefill, batch.chunks, strict=True):
            job.cached += chunk
        emissions = self._emit(batch, drafts, scores, verdicts)
        sound = [emission for emission in emissions if emission.error is None]
        # The draft first: what it holds ahead under the target's page ids would go with the target's pages.
        self._observe(batch, [one.job for one in sound if one.reason is None], scores, verdicts, times)
        if any(drafts.counts):  # without drafts there is nothing to take back
            self._keep([emission for emission in sound if not emission.job.done])
        self._publish(batch, sound)
        self._count(batch, drafts, times, emissions)
        for job, event, _, reason, error, _ in emissions:
            if job.done:  # its cache or its drafter failed on the way: it has its error
                continue
            if error is not None:
                self._fail(job, error)
            elif reason is not None:
                self.end(job, reason, event)
            elif job.sink is not None:
                job.sink(event)
        return [emission.event for emission in emissions if emission.job.error is None]

    def _score_prompt(self, job: Job, rows: Array) -> None:
        """Logprobs of the prompt's tokens that follow these rows, of which the first is at `cached`."""
        assert job.prompt_logprobs is not None, f"{job} did not ask for its prompt"
        begin = job.cached + 1
        following = job.tokens[begin : min(begin + rows.shape[0], job.num_prompt)]
        scored = token_logprobs(self.target.ops.xp, rows[: len(following), ...], following, job.request.logprobs or 0)
        job.prompt_logprobs[begin : begin + len(scored)] = scored

    def _emit(self, batch: Batch, drafts: Drafts, scores: Scores, verdicts: Verdicts) -> list[Emission]:
        """Every decode job takes its tokens until something stops the answer."""
        now = self.clock.now()
        accepted = verdicts.accepted.tolist()
        emissions = []
        for index, (job, drafted, tokens) in enumerate(
            zip(batch.decode, drafts.proposals(), emitted(drafts, scores, verdicts), strict=True)
        ):
            parents = drafts.parents.get(index)
            event = Event(job.request_id, tokens, "", drafted, accepted[index], parents)
            if index in drafts.borrowed:  # rejected text of another request is not this caller's to see
                event.drafts, event.parents = [drafted[node] for node in verdicts.kept(index)], None
            if index in verdicts.faults:
                emissions.append(Emission(job, event, error=verdicts.faults[index]))
                continue
            reason = interruption(job, now)
            if reason is not None:  # the round came too late: nothing of it is emitted
                emissions.append(Emission(job, Event(job.request_id, [], "", [], 0), reason=reason))
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

    def _observe(self, batch: Batch, going: list[Job], scores: Scores, verdicts: Verdicts, times: RoundTimes) -> None:
        """Drafters rewind, catch up and learn; the time it takes is drafting time."""
        steps, faults = self.router.observe(batch, scores, verdicts)
        times.draft_steps += steps
        for name, error in faults.items():
            self._fail_jobs([job for job in batch.prefill + going if name in job.drafters], error)

    def _keep(self, sound: list[Emission]) -> None:
        """The target's cache returns to what was emitted. When the call for all fails, each job is tried by itself."""
        paths: dict[Slot, list[int]] = {slot_of(one.job): one.path for one in sound if one.path}
        jobs = [emission.job for emission in sound]
        try:
            keep(self.target, jobs, paths)
            return
        except DeviceLostError:
            raise
        except BackendError:
            pass
        for job in jobs:
            try:
                if self.target.length(slot_of(job)) != job.cached:
                    keep(self.target, [job], paths)
            except Exception as error:
                self._fail(job, _caused(BackendError, "the target failed while rewinding", error))

    def _publish(self, batch: Batch, sound: list[Emission]) -> None:
        """Later requests may start with what was prefilled or answered: once a prompt is read, and when an answer ends.

        Only now: the pass is verified and the caches hold what was kept.
        """
        ready = batch.prefill + [
            job
            for job, _, outcome, reason, _, _ in sound
            if reason is not None or (outcome is not None and len(job.tokens) - outcome.emitted == job.num_prompt)
        ]
        for job in ready:
            if not job.done:
                try:
                    publish(self.target, job)
                except BackendError as error:
                    self._fail(job, error)

    def _count(self, batch: Batch, drafts: Drafts, times: RoundTimes, emissions: list[Emission]) -> None:
        """Statistics of the pass, for every job in it and for the loop."""
        now = self.clock.now()
        times.end(now - self._begun, self.router.seconds, {maker for maker in drafts.makers if maker})
        pass_s = times.pass_s
        self.scheduler.pass_s = min(pass_s, 0.9 * self.scheduler.pass_s + 0.1 * pass_s)
        num_jobs, num_emitted = len(batch.decode), 0
        for job in batch.prefill:
            job.statistics.add_pass(times, num_jobs, False, 0)
        outcomes: dict[Outcome, int] = {}
        for job, _, outcome, _, _, _ in emissions:
            if outcome is not None:
                num_emitted += outcome.emitted
                outcomes[outcome] = outcomes.get(outcome, 0) + 1
                job.statistics.add_round(outcome)
                if outcome.drafted and job.width is not None:
                    job.statistics.fixed_rounds += 1
                    self.statistics.fixed_rounds += 1
                job.statistics.add_pass(times, num_jobs, outcome.drafted > 0, outcome.emitted)
        for outcome, jobs in outcomes.items():
            self.statistics.add_round(outcome, times=jobs)
        self.statistics.add_pass(times, num_jobs, any(drafts.counts), num_emitted)
        if not times.skip:
            self.statistics.costs.add(times.num_fed, times.score_s)
        self.metrics.step(now, num_jobs, times.num_fed, self.scheduler.config.budget, num_emitted)
        stale = self.router.take_stale()
        if stale:
            self.metrics.went_stale(stale)
        for job, reason in batch.fallbacks + drafts.fallbacks:
            job.statistics.add_fallback(reason)
            self.statistics.add_fallback(reason)
        self._teach(batch, drafts, times, emissions)

    def _teach(self, batch: Batch, drafts: Drafts, times: RoundTimes, emissions: list[Emission]) -> None:
        """The controller learns from the jobs that go on or ended well; it keeps nothing of those that failed."""
        if not any(job.drafters for job in batch.decode):
            return
        try:
            outcomes = [(one.job, one.outcome) for one in emissions if one.outcome and not one.job.done]
            choices = self.controller.observe(batch, drafts, times, outcomes)
            for (width, reason), requests in choices.items():
                self.statistics.add_choice(width, reason, requests)
        except Exception:
            log.exception(CONTROLLER_FAILED)

    def _fail(self, job: Job, error: BaseException) -> None:
        """The job is over; its caller gets the error."""
        if self.jobs.get((job.request.tenant, job.request_id)) is job:
            self._release(job, "error")
            job.error = error
            if job.on_done is not None:
                job.on_done()

    def _fail_jobs(self, jobs: Sequence[Job], error: OutriderError) -> None:
        """The same fault for several jobs: an exception of its own for each."""
        for job in jobs:
            self._fail(job, error.copy())

    def _fail_step(self, batch: Batch, error: BaseException) -> None:
        """A step broke off where no single job is at fault. Caches may hold half of it, so every job in it ends."""
        jobs: Sequence[Job] = batch.jobs or list(self.scheduler.running) or list(self.jobs.values())
        if not isinstance(error, Exception):  # an interrupt belongs to the thread it hit, the others get an error
            error = BackendError(f"the pass was interrupted ({type(error).__name__}); ask again")
        elif isinstance(error, DeviceLostError):
            self.error, jobs = error, list(self.jobs.values())
        elif not isinstance(error, OutriderError):
            log.exception("a step failed")
            error = _caused(OutriderError, "the engine failed", error)
        self._fail_jobs(jobs, error)

    def _release(self, job: Job, reason: str) -> None:
        """Give back everything the job held, before its caller learns that it is over."""
        del self.jobs[job.request.tenant, job.request_id]
        self.scheduler.remove(job)
        job.saved = None
        try:
            self.controller.forget(job)
        except Exception:
            log.exception(CONTROLLER_FAILED)
        now, num_tokens, per_token_s = self.clock.now(), len(job.tokens) - job.num_prompt, None
        if job.first_token is not None and num_tokens > 1:
            per_token_s = (now - job.first_token) / (num_tokens - 1)
        self.metrics.finished(reason, now - job.arrival, num_tokens, per_token_s)


def _caused(kind: type[OutriderError], what: str, cause: Exception) -> OutriderError:
    error = kind(f"{what}: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
