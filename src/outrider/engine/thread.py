"""The engine's one thread: it takes in what other threads send, and steps while there is work."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from outrider.engine.loop import Loop

log = logging.getLogger("outrider")
Value = TypeVar("Value")

LOOK_S = 0.2  # after which a caller looks whether the thread is still there


_threads: weakref.WeakSet[EngineThread] = weakref.WeakSet()


class EngineThread:
    """Drives a loop. It knows the loop only, so that an engine that is no longer used can be freed and end it."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_stopping = False
        _threads.add(self)
        self.on_death: Callable[[BaseException], None] | None = None

    @property
    def is_mine(self) -> bool:
        """Whether the caller runs on this thread, as callbacks do."""
        return self._thread is threading.current_thread()

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start it, unless it runs already. One that is ending is waited for: what was sent meanwhile is served."""
        with self._lock:
            if self._is_stopping and self._thread is not None and not self.is_mine:
                self._thread.join()
            if not self.is_running:
                self._is_stopping = False
                self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)
                self._thread.start()

    def call(self, function: Callable[[], Value]) -> Value:
        """What a function returns that runs between two steps."""
        future: Future[Value] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)

        if self.is_mine:
            run()
            return future.result()
        self._loop.inbox.put(run)
        while not future.done():
            with self._lock:
                if not self.is_running and future.cancel():  # it ended meanwhile: there is no step to wait for
                    return function()
            with contextlib.suppress(TimeoutError):
                return future.result(timeout=LOOK_S)
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
                if loop.jobs:
                    loop.step()
                else:
                    loop.receive(wait=True)
            except BaseException:  # the step has ended the requests that it hit, with their errors
                log.exception("a step was interrupted")
            if loop.error is not None and self.on_death is not None:
                on_death, self.on_death = self.on_death, None
                on_death(loop.error)
        loop.receive()  # calls that came while it was ending


@atexit.register
def _stop_all() -> None:
    """The interpreter must not end while a thread is inside of a library."""
    for thread in list(_threads):
        thread.stop()
