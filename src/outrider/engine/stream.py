"""The reader's end of a streaming request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from outrider.types import Event, Job, Result, Rule


class Driver(Protocol):
    """What a stream needs of the engine."""

    def next_event(self, job: Job) -> Event | None: ...

    def retire(self, job: Job) -> None: ...

    def interrupt(self, job: Job) -> None: ...

    def poll(self, job: Job) -> tuple[Event | None, bool]: ...


class Stream:
    """Events of one request, one per round; the last carries the result. Leaving early ends the request."""

    def __init__(self, engine: Driver, job: Job) -> None:
        self._engine = engine
        self._job = job
        self.request_id = job.request_id

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Event:
        event = self._engine.next_event(self._job)
        if event is None:
            raise StopIteration
        return event

    def poll(self) -> tuple[Event | None, bool]:
        """For readers that must not wait: the event that is there, if any, and whether none will follow."""
        return self._engine.poll(self._job)

    def notify(self, wake: Callable[[], None]) -> None:
        """`wake` is called, on any thread, whenever there is something to `poll`. Poll once after this."""
        self._job.wake = wake

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
        """Whether it was let in; before, and after it had to give way, it waits in line."""
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
        self._engine.interrupt(self._job)

    def close(self) -> None:
        """The reader is done: a request that has not ended is ended, and what it held is free."""
        self._engine.retire(self._job)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.cancel()  # nobody can read on
