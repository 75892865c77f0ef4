"""Whose turn it is to drive the engine: a fair lock that knows its holder."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Turn:
    """Entered by one thread at a time, by that thread again and again; the others are served in order of arrival.

    Fair on purpose: a thread that steps in a loop would take an ordinary lock back before anybody else wakes up.
    `after` is called each time the turn was given up. Whoever found it taken may leave a note and go: the holder looks
    for notes afterwards, so none is overlooked.
    """

    def __init__(self, after: Callable[[], None]) -> None:
        self._guard = threading.Lock()
        self._is_taken = False
        self._holder: int | None = None
        self._depth = 0
        self._line: deque[threading.Lock] = deque()  # one closed gate for each thread that waits
        self._after = after

    @property
    def is_mine(self) -> bool:
        """Whether this thread has the turn."""
        return self._holder == threading.get_ident()

    @property
    def is_nested(self) -> bool:
        """Whether the holder was inside already, as a callback is."""
        return self._depth > 1

    def __enter__(self) -> None:
        self._enter(None)

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._holder = None
        self._hand_over()
        self._after()

    def try_enter(self, timeout: float = 0.0) -> bool:
        """Enter if that is possible within `timeout` seconds; leave with `__exit__`."""
        return self._enter(timeout)

    def _enter(self, timeout: float | None) -> bool:
        if self.is_mine:
            self._depth += 1
            return True
        with self._guard:
            if not self._is_taken:
                self._is_taken = True
                gate = None
            elif timeout == 0.0:
                return False
            else:
                gate = threading.Lock()
                gate.acquire()
                self._line.append(gate)
        if gate is not None and not self._wait(gate, timeout):
            return False
        self._holder = threading.get_ident()
        self._depth = 1
        return True

    def _wait(self, gate: threading.Lock, timeout: float | None) -> bool:
        """Whether the turn was handed over in time."""
        try:
            if gate.acquire(timeout=-1 if timeout is None else timeout):
                return True
        except BaseException:  # an interrupt while waiting must not leave a dead thread in line
            if not self._leave_line(gate):
                self._hand_over()
            raise
        return not self._leave_line(gate)

    def _leave_line(self, gate: threading.Lock) -> bool:
        """False when it is too late: the turn was handed over just now."""
        with self._guard:
            if gate not in self._line:
                return False
            self._line.remove(gate)
            return True

    def _hand_over(self) -> None:
        with self._guard:
            if self._line:
                self._line.popleft().release()  # it stays taken
            else:
                self._is_taken = False
