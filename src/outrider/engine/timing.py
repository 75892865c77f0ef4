"""How long the verbs of a round take, and whom that is charged to."""

from __future__ import annotations

from outrider.clock import Clock
from outrider.metrics import PassTimes
from outrider.types import Drafts, Verdicts


class RoundTimer:
    """Of one loop. On a device that is given work ahead, a round is more than its verbs: there the host's work costs
    something only where the device has nothing to do meanwhile."""

    def __init__(self, clock: Clock) -> None:
        self._now = clock.now
        self._begun = self._last = self._plan_s = 0.0
        self._counted = self._tail_s = 0.0  # when the last round's times were taken, and how long it went on after that

    def begin(self) -> None:
        self._begun = self._last = self._now()

    def planned(self) -> None:
        """The round is planned. That costs it nothing: a decision takes long, and stands for many rounds like it."""
        self._last = self._now()
        self._plan_s = self._last - self._begun

    def lap(self) -> float:
        """Seconds since the last call."""
        last, self._last = self._last, self._now()
        return self._last - last

    def end(self) -> float:
        """Seconds of the whole round."""
        now = self._now()
        self._tail_s = now - self._counted
        return now - self._begun

    def take(self, times: PassTimes, verdicts: Verdicts, *, queues: bool) -> None:
        """What the device says of the pass. queues: it is given work ahead."""
        if verdicts.seconds is not None:
            times.draft_s, times.score_s, times.judge_s = *verdicts.seconds, 0.0
        times.is_odd, times.is_late, times.queues = verdicts.is_first, verdicts.is_late, queues

    def charge(self, times: PassTimes, drafts: Drafts) -> None:
        """The round's times are to be taken. What passes that were queued do not cost, rounds with drafts pay for."""
        self._counted, tail_s, self._tail_s = self._now(), self._tail_s, 0.0
        rest = max(0.0, self._counted - self._begun + tail_s - times.score_s - times.judge_s)
        if not times.queues:
            times.host_s = max(0.0, rest - times.draft_s - self._plan_s)
            return
        makers = {maker for maker in drafts.makers if maker}
        if makers:
            times.draft_s = rest = max(rest, times.draft_s)
        elif times.is_late:
            times.judge_s += rest
        for name in makers:
            times.drafters[name] = rest / len(makers)
