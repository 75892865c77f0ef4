"""The loop. One step of the engine is: plan, draft, score, judge, commit.

`Engine.step` is that sentence. Plain decoding is the same loop with width 0. Whoever waits for an answer drives the
loop; a lock makes one step at a time, and the jobs of other callers move along in the same passes.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, overload

from outrider.backends.base import Backend
from outrider.clock import Clock, SystemClock
from outrider.config import NgramConfig, SchedulerConfig, SpeculationConfig
from outrider.draft.base import Drafter
from outrider.engine.commit import take
from outrider.engine.intake import Intake, is_one_prompt
from outrider.engine.stream import Stream
from outrider.errors import NotReadyError, OutriderError, RequestError
from outrider.metrics import PassTimes, Statistics
from outrider.sched.scheduler import Scheduler
from outrider.spec.round import emitted, judge, propose, score
from outrider.spec.width import FixedWidth
from outrider.tokenizer import Tokenizer
from outrider.types import Drafts, Event, FinishReason, Job, Plan, Prompt, Request, Result, Scores, Slot, Verdicts


class Engine:
    """Generates with a target model and a draft. `Engine.load` builds one from names or backends."""

    def __init__(
        self,
        target: Backend,
        drafter: Drafter,
        *,
        tokenizer: Tokenizer | None = None,
        scheduling: SchedulerConfig | None = None,
        speculation: SpeculationConfig | None = None,
        defaults: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
    ) -> None:
        scheduling = scheduling or SchedulerConfig()
        self.target = target
        self.drafter = drafter
        self.scheduler = Scheduler(scheduling)
        self.width = FixedWidth(target.info, drafter, scheduling.prefill_chunk)
        self.clock = clock or SystemClock()
        self.statistics = Statistics()
        self._intake = Intake(target.info, tokenizer, drafter.name, (speculation or SpeculationConfig()).width)
        self._defaults = dict(defaults or {})  # settings of a prompt that does not bring its own
        self._jobs: dict[str, Job] = {}
        self._num_requests = 0
        self._num_deadlines = 0  # jobs that have one
        self._look_at_queue = False  # set when a job is cancelled, from any thread
        self._lock = threading.RLock()  # held for one step at a time
        self._is_open = True

    @classmethod
    def load(
        cls,
        target: str | Backend,
        *,
        draft: str | Backend | Drafter | None = None,
        method: str | None = None,
        width: int | None = None,
        tokenizer: Tokenizer | None = None,
        max_batch: int = 64,
        prefill_chunk: int = 512,
        ngram: NgramConfig | None = None,
        clock: Clock | None = None,
    ) -> Engine:
        """An engine for a preset name or a backend.

        `draft` is "ngram", "none", a preset name, a backend of the same vocabulary, or a drafter of your own;
        `method` ("model", "ngram", "none") is only needed to insist on one.
        """
        from outrider.engine.build import build_engine

        return build_engine(
            target,
            draft=draft,
            method=method,
            width=width,
            tokenizer=tokenizer,
            scheduling=SchedulerConfig(max_batch=max_batch, prefill_chunk=prefill_chunk),
            ngram=ngram or NgramConfig(),
            clock=clock,
        )

    def step(self) -> list[Event]:
        """Move every running job one round forward: 1 to width + 1 tokens each, or a chunk of its prompt."""
        with self._lock:
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
                times = PassTimes(
                    drafted - started, scored - drafted, now() - scored, drafts.steps, _steady(plan, scores)
                )
                events += self._commit(plan, drafts, scores, verdicts, times)
            except BaseException as error:
                self._fail_all(plan, error)
                if not isinstance(error, Exception):
                    raise
            return events

    def _admit(self) -> list[Event]:
        """End what was cancelled or is late, and let waiting jobs in."""
        now = self.clock.now()
        watched = list(self.scheduler.running)
        if self._look_at_queue or self._num_deadlines:  # a long queue is only walked when something may have happened
            self._look_at_queue = False
            watched += self.scheduler.waiting
        events = []
        for job in watched:
            reason = _interruption(job, now)
            if reason is not None:
                events.append(self._finish(job, reason, _silence(job)))
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
        accepted, proposals = verdicts.accepted.tolist(), drafts.tokens.tolist()
        batch, start = len(plan.deciding), 0
        outcomes: dict[tuple[int, int, int], int] = {}  # (drafted, accepted, emitted) -> jobs
        events: list[Event] = []
        ended: list[tuple[Job, FinishReason, Event]] = []
        slots: list[Slot] = []
        lengths: list[int] = []
        for index, (job, tokens) in enumerate(zip(plan.deciding, emitted(drafts, scores, verdicts), strict=True)):
            drafted = drafts.counts[index]
            event = Event(job.request_id, tokens, "", proposals[start : start + drafted], accepted[index])
            start += drafted
            reason = _interruption(job, now)
            if index in verdicts.faults:
                self._fail(job, verdicts.faults[index])
                continue
            if reason is not None:  # the round came too late: nothing of it is emitted
                events.append(self._finish(job, reason, _silence(job)))
                continue
            try:
                num_taken, event.text, reason = take(job, tokens)
            except Exception as error:  # the caller's own callback
                self._fail(job, error)
                continue
            if num_taken < len(tokens):
                event.tokens, event.accepted = tokens[:num_taken], min(accepted[index], num_taken)
            assert job.slot is not None
            job.cached = len(job.tokens) - 1
            slots.append(job.slot)
            lengths.append(job.cached)
            outcome = (drafted, accepted[index], num_taken)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
            job.statistics.add_round(*outcome)
            job.statistics.add_pass(times, batch, drafted > 0, num_taken)
            events.append(event)
            if reason is not None:
                ended.append((job, reason, event))
            elif job.outbox is not None:
                job.outbox.append(event)
        self.target.keep(slots, lengths)
        self.drafter.observe(plan, scores, verdicts)
        self._count(plan, drafts, scores, times, outcomes)
        for job, reason, event in ended:
            self._finish(job, reason, event)
        return events

    def _count(
        self,
        plan: Plan,
        drafts: Drafts,
        scores: Scores,
        times: PassTimes,
        outcomes: Mapping[tuple[int, int, int], int],
    ) -> None:
        """The engine's own statistics of a pass."""
        statistics = self.statistics
        for outcome, jobs in outcomes.items():
            statistics.add_round(*outcome, times=jobs)
        num_emitted = sum(emitted * jobs for (_, _, emitted), jobs in outcomes.items())
        statistics.add_pass(times, len(plan.deciding), any(drafts.counts), num_emitted)
        statistics.costs.add(scores.num_fed, times.score_s)
        for job, reason in plan.fallbacks + drafts.fallbacks:
            job.statistics.add_fallback(reason)
            statistics.add_fallback(reason)

    def _finish(self, job: Job, reason: FinishReason, event: Event) -> Event:
        """The job is over; `event` becomes its last and carries the result."""
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

    def _fail(self, job: Job, error: BaseException) -> None:
        """The job is over; whoever waits for it gets the error."""
        self._release(job)
        job.error = error

    def _fail_all(self, plan: Plan, error: BaseException) -> None:
        """A pass broke off. Caches may hold half of it, so every job in it ends; the engine serves the next."""
        for job in plan.jobs:
            if not job.done:
                self._fail(job, error)

    def _release(self, job: Job) -> None:
        self.scheduler.remove(job)
        del self._jobs[job.request_id]
        self._num_deadlines -= job.deadline is not None
        self.drafter.forget(job)
        if job.slot is not None:
            self.target.close(job.slot)
            job.slot = None

    @overload
    def generate(self, prompt: str | Request | Sequence[int], **settings: Any) -> Result: ...

    @overload
    def generate(self, prompt: Sequence[Prompt | Request], **settings: Any) -> list[Result]: ...

    def generate(self, prompt: Any, **settings: Any) -> Result | list[Result]:
        """The answer to a prompt (text, token ids or a Request), or to each of a list of them.

        Settings are the fields of `Request` and `SamplingParams`: max_tokens=50, temperature=0.7, stop=["\n"], ...
        """
        one = is_one_prompt(prompt)
        jobs = self._submit([prompt] if one else prompt, settings, streaming=False)
        try:
            for job in jobs:
                while not job.done:
                    self.step()
        finally:
            self._retire(jobs)
        for job in jobs:
            if job.error is not None:
                if isinstance(job.error, OutriderError):
                    job.error.results = [other.result for other in jobs]
                raise job.error
        results = [job.result for job in jobs if job.result is not None]
        return results[0] if one else results

    def stream(self, prompt: Prompt | Request, **settings: Any) -> Stream:
        """The answer as it is made: an iterator of events, one per round."""
        return Stream(self, self._submit([prompt], settings, streaming=True)[0])

    async def astream(self, prompt: Prompt | Request, **settings: Any) -> AsyncIterator[Event]:
        """`stream` for asyncio: passes run on a worker thread, so the event loop stays free."""
        stream = await asyncio.to_thread(lambda: self.stream(prompt, **settings))
        try:
            while (event := await asyncio.to_thread(next, stream, None)) is not None:
                yield event
        finally:
            await asyncio.to_thread(stream.close)

    def cancel(self, request_id: str) -> bool:
        """End a request from any thread, within the present round. False when there is no such request."""
        job = self._jobs.get(request_id)
        if job is None:
            return False
        job.cancelled = True
        self._look_at_queue = True
        return True

    def next_event(self, job: Job) -> Event | None:
        """The next event of a streaming job, driving the loop as long as nobody else does; None after the last."""
        assert job.outbox is not None, f"job {job.id} is not streaming"
        while True:
            if job.outbox:
                return job.outbox.popleft()
            if job.error is not None:
                raise job.error
            if job.done:
                return None
            # Another caller may be driving: look at the outbox again soon, its steps serve this job too.
            if self._lock.acquire(timeout=0.002):
                try:
                    if not job.outbox and not job.done:
                        self.step()
                finally:
                    self._lock.release()

    def retire(self, job: Job) -> None:
        """Its reader is gone: end the job now, if it has not ended."""
        self._retire([job])

    def _retire(self, jobs: Sequence[Job]) -> None:
        with self._lock:
            for job in jobs:
                if not job.done:
                    self._finish(job, FinishReason.CANCELLED, _silence(job))

    def _submit(
        self, prompts: Sequence[Prompt | Request], settings: Mapping[str, Any], *, streaming: bool
    ) -> list[Job]:
        """Jobs for all prompts, in line; nothing is started when one of them is wrong."""
        with self._lock:
            if not self._is_open:
                raise NotReadyError("the engine is closed; build a new one with Engine.load")
            jobs = []
            for index, prompt in enumerate(prompts):
                try:
                    jobs.append(self._job(prompt, settings))
                except RequestError as error:
                    if len(prompts) == 1:
                        raise
                    raise type(error)(f"prompt {index}: {error.message}", param=error.param) from None
            names = set(self._jobs)
            for job in jobs:
                if job.request_id in names:
                    raise RequestError(f"request_id {job.request_id!r} is in use; choose another", param="request_id")
                names.add(job.request_id)
            for job in jobs:
                job.outbox = deque() if streaming else None
                self._jobs[job.request_id] = job
                self._num_deadlines += job.deadline is not None
                self.scheduler.add(job)
            return jobs

    def _job(self, prompt: Prompt | Request, settings: Mapping[str, Any]) -> Job:
        if not isinstance(prompt, Request) and "sampling" not in settings:
            settings = {**self._defaults, **settings}
        request = Request.of(prompt, settings)
        self._num_requests += 1
        job = self._intake.job(request, request.request_id or f"request-{self._num_requests}", self.clock.now())
        job.statistics.costs = self.statistics.costs
        return job

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self._is_open

    @property
    def num_requests(self) -> int:
        """Requests waiting or running."""
        return len(self._jobs)

    def reset_statistics(self) -> None:
        """Start counting anew. Requests in flight keep their own counts."""
        with self._lock:
            self.statistics = Statistics()

    def check(self) -> None:
        """Assert that caches and tokens agree; call between steps."""
        with self._lock:
            for job in self.scheduler.running:
                assert job.slot is not None, f"{job.request_id} runs without a slot"
                held = self.target.length(job.slot)
                assert held == job.cached < len(job.tokens), f"{job.request_id}: {held} held, {job.cached} cached"

    def close(self) -> None:
        """End everything that runs and take no more requests."""
        with self._lock:
            self._is_open = False
            self._retire(list(self._jobs.values()))

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


def _silence(job: Job) -> Event:
    """An event without tokens."""
    return Event(job.request_id, [], "", [], 0)
