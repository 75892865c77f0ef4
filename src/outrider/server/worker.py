"""Requests as the event loop sees them. The steps are made by the engine's own thread.

    event loop        submit ..... Ticket: async for event in ticket ..... cancel
    engine's thread   step, step, step: after each, ONE call wakes the event loop for all tickets that can be read

The event loop never waits for a step.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from outrider.engine.engine import Engine
from outrider.engine.stream import Stream
from outrider.errors import ConfigError, NotReadyError
from outrider.server.kept import Kept
from outrider.server.ticket import Ticket
from outrider.types import Request

log = logging.getLogger("outrider.server")


class Worker:
    """An engine behind an event loop. `on_death` is called there when the engine cannot serve any more."""

    def __init__(self, engine: Engine, *, keep_s: float = 600.0) -> None:
        if engine.thread is None:
            raise ConfigError("a server needs the engine's thread; load the engine without threaded=False")
        self.engine = engine
        self.kept = Kept(keep_s)
        self.on_death: Callable[[], None] | None = None
        self._is_open = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: set[asyncio.Future[list[Stream]]] = set()
        self._ready: list[Ticket] = []  # of the engine's thread
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="outrider-compiler")

    @property
    def error(self) -> BaseException | None:
        """Why the engine cannot serve any more."""
        return self.engine.loop.error

    @property
    def is_ready(self) -> bool:
        return self._is_open and self.error is None

    def start(self) -> None:
        """From the running event loop."""
        assert self.engine.thread is not None, "checked at the start"
        self.engine.thread.on_death = self._died
        self._loop = asyncio.get_running_loop()
        self._is_open = True

    async def submit(self, requests: Sequence[Request], *, at_once: bool = False) -> list[Ticket]:
        """Tickets for all of them, or an error and none. Checking and tokenizing happen on another thread, unless they
        are known to take no time (`at_once`)."""
        self._check_open()
        constraints = {request.constraint for request in requests if request.constraint is not None}
        if constraints:  # a large one may take seconds: it holds up others of its kind only
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._compiler, self.engine.prepare, constraints)
            self._check_open()
        if at_once:
            return self._tickets(self.engine.open_streams(requests))
        return await self.resume(functools.partial(self.engine.open_streams, requests))

    async def resume(self, open_streams: Callable[[], list[Stream]]) -> list[Ticket]:
        """Tickets for streams that another thread opens, such as those of a snapshot."""
        opening = asyncio.get_running_loop().run_in_executor(None, open_streams)
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        try:
            streams = await asyncio.shield(opening)
        except asyncio.CancelledError:  # its client left meanwhile: what was opened has no reader
            opening.add_done_callback(_cancel_all)
            raise
        return self._tickets(streams)

    def _tickets(self, streams: Sequence[Stream]) -> list[Ticket]:
        tickets = [Ticket(stream) for stream in streams]
        for ticket in tickets:
            ticket.stream.notify(functools.partial(self._notice, ticket))
        return tickets

    def _check_open(self) -> None:
        if self.error is not None:
            raise NotReadyError("the engine has died; the server must be started again")
        if not self._is_open:
            raise NotReadyError("the server is shutting down; ask another one, or try again in a moment")

    def refuse(self) -> None:
        """Take no more requests; those that run go on."""
        self._is_open = False

    async def drained(self, timeout_s: float) -> bool:
        """Whether all requests ended within the time."""
        until = asyncio.get_running_loop().time() + timeout_s
        while self.engine.num_requests and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.02)
        return self.engine.num_requests == 0

    async def pause(self) -> None:
        """Take no more requests and stop stepping after the present step. What is in flight stays as it is."""
        self._is_open = False
        if self._opening:  # they would start the thread again
            await asyncio.wait(self._opening)
        await asyncio.to_thread(self.engine.pause)
        self._flush()

    def suspend(self, saved: Collection[str] = ()) -> None:
        """After `pause`: every reader gets an error, which says where the answer will be if it was saved.

        saved: requests in a snapshot, by the id that the engine knows them by.
        """
        names = self.kept.names
        for job in list(self.engine.loop.jobs.values()):
            job.error = NotReadyError(
                "the server goes down and has saved this request; when it is back, GET "
                f"/v1/requests/{names[job.request_id]} has its tokens"
                if job.request_id in saved
                else "the server went down before this answer was finished; ask again"
            )
            if job.on_done is not None:
                job.on_done()
        self._flush()

    async def close(self) -> None:
        """End everything that runs and stop."""
        await self.pause()
        await asyncio.to_thread(self.engine.close)
        self._flush()
        self._compiler.shutdown(wait=False, cancel_futures=True)

    def _notice(self, ticket: Ticket) -> None:
        """On the engine's thread: the ticket can be read. Readers are woken before the next step."""
        if not self._ready:
            self.engine.loop.inbox.put(self._flush)
        self._ready.append(ticket)

    def _flush(self) -> None:
        """On the engine's thread, or while that is stopped."""
        ready, self._ready = self._ready, []
        if ready:
            self._call_soon(_wake, ready)

    def _died(self, error: BaseException) -> None:
        """On the engine's thread, once all requests have their error."""
        log.error("the engine died", exc_info=error)
        if self.on_death is not None:
            self._call_soon(self.on_death)

    def _call_soon(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None, "the worker was not started"
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            log.debug("the event loop is closed: there are no readers any more")


def _wake(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        ticket.wake()


def _cancel_all(opening: asyncio.Future[list[Stream]]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        for stream in opening.result():
            stream.cancel()
