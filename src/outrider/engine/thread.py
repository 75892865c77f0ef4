"""The engine's one thread: it takes in what other threads send, and steps while there is work."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from outrider.engine.loop import Loop
from outrider.errors import BackendError

log = logging.getLogger("outrider")
Value = TypeVar("Value")


class EngineThread:
    """Drives a loop. It knows the loop only, so that an engine that is no longer used can be freed and end it."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_stopping = False
        self.on_death: Callable[[BaseException], None] | None = None

    @property
    def is_mine(self) -> bool:
        """Whether the caller runs on this thread, as callbacks do."""
        return self._thread is threading.current_thread()

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start it, unless it runs already."""
        with self._lock:
            if not self.is_running:
                self._is_stopping = False
                self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)
                self._thread.start()

    def call(self, function: Callable[[], Value]) -> Value:
        """What a function returns that runs between two steps."""
        if self.is_mine or not self.is_running:
            return function()
        future: Future[Value] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._loop.inbox.put(run)
        return future.result()

    def signal_stop(self) -> None:
        """Ask it to end after the present step. Safe in a destructor: a flag, and a queue that may be re-entered."""
        self._is_stopping = True
        self._loop.inbox.put(None)

    def stop(self) -> None:
        """End it after the present step, and wait for that. Jobs stay as they are."""
        self.signal_stop()
        if self._thread is not None and not self.is_mine:
            self._thread.join()

    def _run(self) -> None:
        loop = self._loop
        while not self._is_stopping:
            try:
                if loop.jobs and loop.error is None:
                    loop.step()
                else:
                    loop.receive(wait=True)  # with an error, later requests get it, one by one
            except BaseException as error:  # an interrupt that a callback raised: its job has it
                log.exception("a step was interrupted")
                if loop.error is None and not isinstance(error, (KeyboardInterrupt, SystemExit)):
                    loop.error = BackendError(f"the engine's thread failed: {error}")
            if loop.error is not None and self.on_death is not None:
                self.on_death(loop.error)
                self.on_death = None
