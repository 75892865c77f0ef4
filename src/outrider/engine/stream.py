"""The caller's end of a request: events come out of a queue, a cancel flag goes in."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

from outrider.types import Event, Job, Result, Rule


class Driver(Protocol):
    """What a stream needs of the engine."""

    def advance(self, job: Job) -> bool:
        """Make a step, where the caller drives. False: the engine's thread does."""

    def cancel_job(self, job: Job) -> None:
        """Set the flag that ends the job within one round."""

    def close_jobs(self, jobs: list[Job]) -> None:
        """End jobs and wait until what they held is free."""


class Mailbox:
    """What the engine's thread writes to. It does not know its stream: a stream that is dropped can be freed."""

    __slots__ = ("events", "wake")

    def __init__(self) -> None:
        self.events: SimpleQueue[Event | None] = SimpleQueue()  # None: the job is over
        self.wake: Callable[[], None] | None = None

    def put(self, event: Event | None = None) -> None:
        self.events.put(event)
        if self.wake is not None:
            self.wake()


class Stream:
    """Events of one request, one per round; the last carries the result. Leaving early ends the request."""

    def __init__(self, engine: Driver, job: Job) -> None:
        self._engine = engine
        self._job = job
        self._mailbox = Mailbox()
        self.request_id = job.request_id
        job.sink = job.on_done = self._mailbox.put

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Event:
        events, job = self._mailbox.events, self._job
        while True:
            if job.done or not events.empty():
                event, is_over = self.poll()
                if is_over:
                    raise StopIteration
            elif self._engine.advance(job):
                continue
            else:
                event = events.get()
            if event is not None:
                return event

    def poll(self) -> tuple[Event | None, bool]:
        """The event that can be read now, if any, and whether none will follow. Raises the request's error after its
        events."""
        is_over = self._job.done  # before looking: a job that is done has its last event in the queue
        try:
            while True:
                event = self._mailbox.events.get_nowait()
                if event is not None:
                    return event, False
        except Empty:
            pass
        if is_over and self._job.error is not None:
            raise self._job.error
        return None, is_over

    def notify(self, wake: Callable[[], None]) -> None:
        """`wake` is called on the engine's thread whenever there is something to `poll`. Poll once after this."""
        self._mailbox.wake = wake

    @property
    def tenant(self) -> str:
        return self._job.request.tenant

    @property
    def tokens(self) -> list[int]:
        """Emitted so far."""
        return self._job.output

    @property
    def text(self) -> str:
        """Of the tokens so far, as far as it may be shown."""
        return "" if self._job.text is None else self._job.text.text

    @property
    def is_over(self) -> bool:
        return self._job.done

    @property
    def is_running(self) -> bool:
        """Whether it was admitted; before, and while it is preempted, it waits."""
        return self._job.slot is not None

    @property
    def result(self) -> Result | None:
        """The answer, when it is over."""
        return self._job.result

    @property
    def error(self) -> BaseException | None:
        """Why there is no answer."""
        return self._job.error

    @property
    def seed(self) -> int:
        return self._job.seed

    @property
    def rule(self) -> Rule:
        return self._job.rule

    def cancel(self) -> None:
        """From any thread: the request ends within the present round, and the last event says so."""
        self._engine.cancel_job(self._job)

    def close(self) -> None:
        """The reader is done: a request that has not ended is ended, and what it held is free."""
        self._engine.close_jobs([self._job])

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._engine.cancel_job(self._job)  # flags only: a destructor may run on any thread, inside any call
