"""The reader's end of a streaming request."""

from __future__ import annotations

from typing import Protocol

from outrider.types import Event, Job


class Driver(Protocol):
    """What a stream needs of the engine."""

    def next_event(self, job: Job) -> Event | None: ...

    def retire(self, job: Job) -> None: ...

    def interrupt(self, job: Job) -> None: ...


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
