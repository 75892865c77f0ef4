"""A server process: listen, answer, and leave in order.

On SIGTERM or Ctrl-C no new request is taken. With a snapshot folder, what runs is written there and goes on at the next
start; without one, what runs is finished first (`drain_s`). A second signal ends it at once. Exit codes: 0 after a
signal, 1 when the engine died.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from outrider.engine.engine import Engine
from outrider.engine.snapshot import Snapshot
from outrider.errors import ConfigError
from outrider.server import memory
from outrider.server.app import create_app
from outrider.server.settings import ServerSettings
from outrider.server.worker import Worker

log = logging.getLogger("outrider.server")
FILE = "requests.snapshot"
SWITCH_S = 0.001  # after which a step's Python lets the event loop in; 5 ms is Python's own choice
FAREWELL_S = 5.0  # for connections to take their last bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a server listens, and how it leaves."""

    host: str = "127.0.0.1"
    port: int = 8000
    snapshot_dir: Path | None = None
    drain_s: float = 30.0


def serve(engine: Engine, settings: ServerSettings, place: Place, announce: Callable[[str], None]) -> int:
    """Run until a signal comes or the engine dies; the exit code."""
    listener = _listen(place)
    host, port = listener.getsockname()[:2]
    settings = memory.at_address(settings, host)
    if memory.is_off(settings):
        log.warning(memory.OFF)
    shown = f"[{host}]" if ":" in host else host
    process = Process(engine, settings, place, functools.partial(announce, f"http://{shown}:{port}"))
    return asyncio.run(process.run(listener))


def _listen(place: Place) -> socket.socket:
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    # The protocol is named, or asyncio would not switch Nagle's delay off: 40 ms on every call of a kept connection
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((place.host, place.port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(
            f"cannot listen at {place.host}:{place.port} ({error}); choose another --port or --host", param="port"
        ) from error
    return listener


class Process:
    """One run of a server. `announce` is called when it answers."""

    def __init__(self, engine: Engine, settings: ServerSettings, place: Place, announce: Callable[[], None]) -> None:
        self._place = place
        self._announce = announce
        self._worker = Worker(engine, keep_s=settings.keep_s)
        self._worker.on_death = self._died
        config = uvicorn.Config(
            create_app(self._worker, settings),
            log_level="warning",
            access_log=False,
            lifespan="on",
            ws="none",
            timeout_graceful_shutdown=int(FAREWELL_S),
            server_header=False,
        )
        self._server = _Listening(config, self._signalled)
        self._leaving: asyncio.Task[None] | None = None
        self._exit_code = 0

    async def run(self, listener: socket.socket) -> int:
        sys.setswitchinterval(SWITCH_S)
        gc.collect()
        gc.freeze()  # the model and the modules stay: collections need not walk them again and again
        self._worker.start()
        await self._go_on()
        self._server.when_up = self._announce
        await self._server.serve([listener])
        if self._leaving is not None:
            with suppress(asyncio.CancelledError):
                await self._leaving
        await self._worker.close()
        return self._exit_code

    @property
    def _file(self) -> Path | None:
        return None if self._place.snapshot_dir is None else self._place.snapshot_dir / FILE

    async def _go_on(self) -> None:
        """With the requests of the last run. The file stays until the next is written: a crash loses nothing."""
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot use {self._file.parent}: {error}; choose another --snapshot-dir") from error
        if not self._file.exists():
            return
        taken = Snapshot.read(self._file)
        tickets = await self._worker.resume(functools.partial(self._worker.engine.resume, taken))
        self._worker.kept.restore(taken.notes.get("records", []), {ticket.request_id: ticket for ticket in tickets})
        log.info("%d requests of %s go on", len(tickets), self._file)

    def _signalled(self) -> None:
        """On the event loop."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._leave())
        else:
            self._leaving.cancel()
            self._server.should_exit = self._server.force_exit = True

    async def _leave(self) -> None:
        try:
            self._worker.refuse()
            if self._file is not None:
                await self._save(self._file)
            elif not await self._worker.drained(self._place.drain_s):
                log.warning("%d requests were still running", self._worker.engine.num_requests)
                await self._worker.pause()
                self._worker.suspend()
        except Exception:
            log.exception("what was running could not be saved")
            self._exit_code = 1
            await self._worker.pause()
            self._worker.suspend()
        finally:
            self._server.should_exit = True

    async def _save(self, path: Path) -> None:
        """Everything in flight, and what clients may still ask for."""
        await self._worker.pause()
        if self._worker.error is not None:
            return
        engine, records = self._worker.engine, self._worker.kept.notes()
        known = {choice for record in records for choice in record["choices"] if isinstance(choice, str)}
        jobs = engine.loop.jobs.values()
        open_now = {job.request_id for job in jobs if job.request_id in known and not job.cancelled}
        # In one go, before the event loop serves a client: what a client ends or asks now is in both or in neither
        engine.snapshot(path, sorted(open_now), notes={"records": records})
        log.info("%d requests were saved to %s", len(open_now), path)
        self._worker.suspend(open_now)

    def _died(self) -> None:
        self._exit_code = 1
        self._server.should_exit = True


class _Listening(uvicorn.Server):
    """Uvicorn's server with signals of our own: it ends when we say so, and not by the signal."""

    def __init__(self, config: uvicorn.Config, signalled: Callable[[], None]) -> None:
        super().__init__(config)
        self._signalled = signalled
        self._loop: asyncio.AbstractEventLoop | None = None
        self.when_up: Callable[[], None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started and self.when_up is not None:
            self.when_up()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        assert self._loop is not None, f"{signal.Signals(sig).name} came before the start"
        self._loop.call_soon_threadsafe(self._signalled)
