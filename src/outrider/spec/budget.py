"""What finding out may cost: a share of the time so far, and of the answers that were asked for.

Both what tries were expected to lose against the best choice and what was really lost against plain decoding must stay
below that.
"""

from __future__ import annotations

from collections.abc import Callable

ANSWER = 0.017  # share of an answer that may be spent on it up front
LONGEST = 1000  # tokens of an answer that count for that
SHARED = 0.25  # requests learn from one another: each of n at a time adds 1 / (1 + n / 4) of its share
UNSURE = 32.0  # judged tokens after which half of that is enough
MARGIN = 1.03  # drafting must be better than plain by so much: requests that drift apart share fewer passes
SPACING = 0.009  # share of the time that tries take in the long run


class Budget:
    """Seconds that may be lost by trying."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._elapsed = 0.0
        self._answers = 0.0  # tokens' worth of time that answers bring along
        self._spent = 0.0  # expected losses of tries
        self._balance = 0.0  # seconds gained over plain decoding, as far as is known
        self._drafted = 0.0  # the part of it that comes of rounds which were to pay
        # Not yet in the balance: (jobs, whether it was to pay) -> [seconds, plain passes for that]
        self._open: dict[tuple[int, bool], list[float]] = {}
        self._gap = 1.0  # passes until the next try
        self._next_try = 0.0

    def welcome(self, num_tokens: int, num_others: int) -> None:
        """An answer of so many tokens begins beside others."""
        self._answers += ANSWER * min(LONGEST, num_tokens) / (1.0 + SHARED * num_others)

    def count(self, num_jobs: int, seconds: float, lost_s: float, passes: float, invested_s: float | None) -> None:
        """A round took `lost_s` of its seconds for what plain decoding does in so many passes.

        invested_s: seconds of that for later rounds, where drafting was to pay; else None.
        """
        self._elapsed += seconds
        pays = invested_s is not None
        if invested_s:
            self._drafted += invested_s
        sums = self._open.get((num_jobs, pays))
        if sums is None:
            sums = self._open[num_jobs, pays] = [0.0, 0.0]
        sums[0] += lost_s
        sums[1] += passes

    def settle(self, plain_s: Callable[[float], float]) -> None:
        """Plain passes by the number of jobs are known: what was counted goes into the balance."""
        for (num_jobs, pays), (lost_s, passes) in self._open.items():
            gained = passes * plain_s(num_jobs) - lost_s
            self._balance += gained
            if pays:
                self._drafted += gained
        self._open.clear()

    def allowed(self, rate: float, plain_rate: float, num_judged: float) -> float:
        """Seconds that a try may lose now, for a drafter of which `num_judged` tokens were judged.

        rate, plain_rate: tokens per second of the best drafting and of plain decoding; where they are near to one
        another, there is something to find out.
        """
        nearness = (rate / plain_rate - 0.5) / 0.3
        answers = self._answers * max(UNSURE / (UNSURE + num_judged), min(1.0, nearness))
        share = self._share * self._elapsed
        best_rate = max(rate, plain_rate)
        return min(share + answers / best_rate - self._spent, share + answers / plain_rate + self._balance)

    def margin(self, plain_rate: float) -> float:
        """By how much drafting must be better than plain decoding: more when it lost where it was to pay."""
        whole = max(self._elapsed, self._answers / (ANSWER * plain_rate))
        return MARGIN + 2.0 * max(0.0, -self._drafted) / whole if whole else MARGIN

    @property
    def is_due(self) -> bool:
        """Whether it is time to try again what lost."""
        return self._elapsed >= self._next_try

    def spend(self, seconds: float) -> None:
        self._spent += max(0.0, seconds)

    def wait(self, seconds: float, pass_s: float) -> None:
        """What lost was tried for so many seconds: the next time comes later, and later again."""
        self.spend(seconds)
        self._next_try = self._elapsed + self._gap * pass_s
        self._gap = max(1.0, min(2.0 * self._gap, seconds / (SPACING * pass_s)))

    def encourage(self) -> None:
        """A try did better than expected: try again soon."""
        self._gap, self._next_try = 1.0, 0.0
