"""Time as an argument. Everything that waits or measures takes a `Clock`, so tests can drive time by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that only go forward."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's monotonic clock."""

    now = staticmethod(time.perf_counter)  # asked a dozen times a round: no call of our own around it

    def sleep(self, seconds: float) -> None:
        # time.sleep overshoots by about 60 us, as much as a small pass costs: sleep the bulk, spin the rest.
        end = time.perf_counter() + seconds
        if seconds > 0.001:
            time.sleep(seconds - 0.001)
        while time.perf_counter() < end:
            pass


class VirtualClock:
    """A clock that moves only when somebody sleeps."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds
