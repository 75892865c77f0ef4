"""The engine on a thread of its own, and requests as the event loop sees them.

    event loop   submit ..... Ticket: async for event in ticket ..... cancel
    worker       step, step, step: after each, ONE call wakes the loop for all tickets that have something to read

The event loop never waits for a step. An engine that dies tells every waiter, and whoever set `on_death`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from outrider.engine.engine import Engine
from outrider.engine.stream import Stream
from outrider.errors import BackendError, NotReadyError, OutriderError
from outrider.server.kept import Kept
from outrider.server.ticket import Ticket
from outrider.types import Job, Request

log = logging.getLogger("outrider.server")


class Worker:
    """Steps the engine as long as there is work. Everything but `_run` belongs to the event loop."""

    def __init__(self, engine: Engine, *, keep_s: float = 600.0) -> None:
        self.engine = engine
        self.kept = Kept(keep_s)
        self.error: BaseException | None = None
        self.on_death: Callable[[], None] | None = None
        self._is_open = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)
        self._work = threading.Event()  # set when there may be something to do
        self._is_stopping = False
        self._ready: deque[Ticket] = deque()
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="outrider-compiler")

    @property
    def is_ready(self) -> bool:
        return self._is_open and self.error is None

    def start(self) -> None:
        """From the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        self._thread.start()

    async def submit(self, requests: Sequence[Request], *, at_once: bool = False) -> list[Ticket]:
        """Tickets for all of them, or an error and none. Checking and tokenizing happen on another thread, unless they
        are known to take no time (`at_once`)."""
        self._check_open()
        constraints = {request.constraint for request in requests if request.constraint is not None}
        if constraints:  # a large one may take seconds: it holds up others of its kind only
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._compiler, self.engine.prepare, constraints)
        if at_once:
            return self._tickets(self.engine.open_streams(requests))
        return await self._elsewhere(lambda: self.engine.open_streams(requests))

    async def resume(self, open_streams: Callable[[], list[Stream]]) -> list[Ticket]:
        """Tickets for requests that come from elsewhere, such as a snapshot."""
        return await self._elsewhere(open_streams)

    async def _elsewhere(self, open_streams: Callable[[], list[Stream]]) -> list[Ticket]:
        assert self._loop is not None, "the worker was not started"
        opening = self._loop.run_in_executor(None, open_streams)
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
        self._work.set()
        if self.error is not None:  # it died meanwhile
            self._tell_everybody(self._epitaph)
        return tickets

    def cancel(self, request_id: str, owner: str) -> bool:
        """End a client's request by the id it knows; False when it has none of that id."""
        return self.kept.cancel(request_id, owner)

    def _check_open(self) -> None:
        if self.error is not None:
            raise NotReadyError("the engine has died; the server must be started again")
        if not self._is_open:
            raise NotReadyError("the server is shutting down; ask another one, or try again in a moment")

    def suspend(self, saved: Collection[str] = ()) -> None:
        """After `pause`: whoever waits is told that nothing follows here, and where the answer will be if it was saved.

        saved: requests in a snapshot, by the id that the engine knows them by.
        """
        names = self.kept.names
        self.error = NotReadyError("the server is going down")

        def say(job: Job) -> OutriderError:
            if job.request_id not in saved:
                return NotReadyError("the server went down before this answer was finished; ask again")
            return NotReadyError(
                "the server goes down and has saved this request; when it is back, GET "
                f"/v1/requests/{names[job.request_id]} has its tokens"
            )

        self._tell_everybody(say)

    def refuse(self) -> None:
        """Take no more requests; those that run go on."""
        self._is_open = False

    async def drained(self, timeout_s: float) -> bool:
        """Whether all requests ended within the time."""
        until = asyncio.get_running_loop().time() + timeout_s
        while self.engine.num_requests and self.error is None and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.02)
        return self.engine.num_requests == 0

    async def pause(self) -> None:
        """Stop stepping after the present step. What is in flight stays as it is."""
        self._is_open = False
        self._is_stopping = True
        self._work.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    async def close(self) -> None:
        """End everything that runs and stop."""
        await self.pause()
        if self.error is None:
            await asyncio.to_thread(self.engine.close)
            self._flush()
        self._compiler.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        """The engine's thread."""
        while not self._is_stopping:
            if self.engine.num_requests == 0:
                self._work.wait()
                self._work.clear()
                continue
            try:
                self.engine.step()
            except BaseException as error:
                log.exception("the engine died")
                self.error = error
                self._tell_everybody(self._epitaph)
                if self.on_death is not None and self._loop is not None:
                    self._loop.call_soon_threadsafe(self.on_death)
                return
            self._flush()

    def _notice(self, ticket: Ticket) -> None:
        """A ticket has something to read. During a step they are collected; else whoever calls wakes the reader."""
        self._ready.append(ticket)
        if threading.current_thread() is not self._thread:
            self._flush()

    def _flush(self) -> None:
        if not self._ready or self._loop is None:
            return
        ready: dict[int, Ticket] = {}
        while self._ready:
            ticket = self._ready.popleft()
            ready[id(ticket)] = ticket
        try:
            self._loop.call_soon_threadsafe(_wake, list(ready.values()))
        except RuntimeError:  # the event loop is closed: nobody reads any more
            log.debug("%d events came after the end", len(ready))

    def _epitaph(self, _: Job) -> OutriderError:
        return BackendError("the engine died; the server's log says why")

    def _tell_everybody(self, say: Callable[[Job], OutriderError]) -> None:
        """Every open request ends with an error, also those that joined just now."""
        for job in list(self.engine.loop.jobs.values()):
            if not job.done:
                job.error = say(job)
                if job.wake is not None:
                    job.wake()
        self._flush()


def _wake(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        ticket.wake()


def _cancel_all(opening: asyncio.Future[list[Stream]]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        for stream in opening.result():
            stream.cancel()
