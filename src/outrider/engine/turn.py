"""Whose turn it is to drive the engine: a lock that knows how deep its holder is in."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Turn:
    """Entered by one thread at a time, by that thread again and again. `with turn:` waits, `try_enter` need not.

    `after` is called each time the lock has become free. Whoever found it taken may leave a note and go: the holder
    looks for notes after letting go, so none is overlooked.
    """

    def __init__(self, after: Callable[[], None]) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._after = after

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        is_free = self._depth == 0
        self._lock.release()
        if is_free:
            self._after()

    def try_enter(self, timeout: float = 0.0) -> bool:
        """Enter if that is possible within `timeout` seconds; leave with `__exit__`."""
        entered = self._lock.acquire(timeout=timeout) if timeout else self._lock.acquire(blocking=False)
        if entered:
            self._depth += 1
        return entered

    @property
    def is_nested(self) -> bool:
        """Whether the holder was inside already, as a callback is."""
        return self._depth > 1
