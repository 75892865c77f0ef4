"""What becomes of drafts, learned while serving: how often a drafter answers, how long its proposals are, and how many
of their tokens are kept, by place; over all requests, and for one request in comparison to that."""

from __future__ import annotations

from itertools import accumulate

from outrider.metrics import Outcome

FIRST_GUESS = 0.7  # acceptance of a drafter that nothing is known about
GUESS_WEIGHT = 4.0  # judged tokens it counts for
PLACE_WEIGHT = 16.0  # a place differs from the one before it only as far as judged tokens say
MEMORY = 600.0  # judged tokens a drafter's record remembers
JOB_WEIGHT = 64.0  # judged tokens after which a request speaks for itself
OWN_WEIGHT = 12.0  # and after it was a surprise
HALF_LIFE = 96.0  # emitted tokens after which a request's record counts for half
RECENT = 0.88  # share of the recent that stays per judged token
SURPRISE = 3.2  # standard deviations between the recent and the past that mean a change
STEPS = 4  # classes of requests per unit of log odds


class DrafterRecord:
    """One drafter over all requests."""

    __slots__ = (
        "_answered",
        "_asked",
        "_by_drafted",
        "_by_judged",
        "_by_kept",
        "_by_room",
        "_deviation",
        "_odds",
        "_outlooks",
        "_recent",
        "_sums",
        "num_judged",
    )

    def __init__(self) -> None:
        self._by_judged: list[float] = [0.0]  # rounds by tokens judged, and so on
        self._by_kept: list[float] = [0.0]
        self._by_room: list[float] = [0.0]
        self._by_drafted: list[float] = [0.0]
        self._asked = self._answered = 0.0
        self._deviation = self._recent = 0.0
        self.num_judged = 0.0
        self._odds: list[float] = []  # of keeping the token at each place, given those before it
        self._sums: list[float] = []
        self._outlooks: dict[int, list[float]] = {}

    def add_silence(self) -> None:
        self._asked += 1.0

    def add(self, room: int, outcome: Outcome, times: int = 1) -> None:
        """A chain was proposed where `room` tokens were asked for."""
        judged = outcome.accepted + outcome.refused
        most = max(room, outcome.drafted)
        if most >= len(self._by_room):
            for counts in (self._by_judged, self._by_kept, self._by_room, self._by_drafted):
                counts += [0.0] * (most + 1 - len(counts))
        self._by_judged[judged] += times
        self._by_kept[outcome.accepted] += times
        self._by_room[room] += times
        self._by_drafted[outcome.drafted] += times
        self._asked += times
        self._answered += times
        self.num_judged += judged * times
        self._deviation += (outcome.accepted - self.expected(judged)) * times
        self._recent += judged * times

    def look(self) -> None:
        """Forget most of the past when it no longer holds."""
        if self._recent:
            mean = min(0.99, self.expected(1))
            if self._deviation**2 > SURPRISE**2 * (self._recent * mean * (1.0 - mean) + 0.5):
                self._fade(min(1.0, self._recent / self.num_judged))
                self._deviation = self._recent = 0.0
            elif self._recent > 32.0:
                self._deviation *= 0.5
                self._recent *= 0.5
        if self.num_judged > MEMORY:
            self._fade(0.5)
        self._odds = []

    def _fade(self, share: float) -> None:
        for counts in (self._by_judged, self._by_kept, self._by_room, self._by_drafted):
            counts[:] = [count * share for count in counts]
        self._asked *= share
        self._answered *= share
        self.num_judged *= share

    @property
    def answers(self) -> float:
        """How often it has something to say."""
        return (self._answered + 1.0) / (self._asked + 1.0)

    def expected(self, judged: int) -> float:
        """Tokens kept of the first `judged` ones of a proposal, if each is judged."""
        if not self._odds:
            self._settle()
        sums = self._sums
        return sums[judged] if judged < len(sums) else sums[-1] + (judged + 1 - len(sums)) * self._mean(-1)

    def outlook(self, shift: int, places: int) -> list[float]:
        """For each place the probability that a proposal is kept up to there, for requests of a class (see `shift`)."""
        if not self._odds:
            self._settle()
        known = self._outlooks.get(shift)
        if known is None or len(known) < places:
            factor = 2.718281828 ** (shift / STEPS)
            odds = [odd * factor for odd in self._odds]
            odds += odds[-1:] * (places - len(odds))
            known = self._outlooks[shift] = list(accumulate((odd / (1.0 + odd) for odd in odds), lambda p, a: p * a))
        return known

    def lengths(self, places: int) -> list[float]:
        """For each place how often a proposal goes that far when it may."""
        room, drafted = _beyond(self._by_room), _beyond(self._by_drafted)
        shares = [(d + 1.0) / (r + 1.0) for d, r in zip(drafted, room, strict=True)][1:]
        return shares + (shares[-1:] or [1.0]) * (places - len(shares))

    def _mean(self, place: int) -> float:
        odd = self._odds[place]
        return odd / (1.0 + odd)

    def _settle(self) -> None:
        judged, kept = _beyond(self._by_judged), _beyond(self._by_kept)
        share = (sum(kept[1:]) + GUESS_WEIGHT * FIRST_GUESS) / (sum(judged[1:]) + GUESS_WEIGHT)
        means = []
        for reached, passed in zip(judged[1:], kept[1:], strict=True):
            share = (passed + PLACE_WEIGHT * share) / (reached + PLACE_WEIGHT)
            means.append(share)
        means = means or [share]
        self._odds = [mean / (1.0 - mean) if mean < 0.999 else 999.0 for mean in means]
        self._sums = [0.0, *accumulate(means)]
        self._outlooks = {}


class JobRecord:
    """One drafter for one request, as what was kept beside what the drafter's record made expect."""

    __slots__ = (
        "_expected",
        "_judged",
        "_kept",
        "_new",
        "_recent",
        "_weight",
        "at",
        "due",
        "gap",
        "is_probed",
        "read",
        "shift",
    )

    def __init__(self) -> None:
        self._kept = self._judged = self._expected = 0.0
        self._new = [0.0, 0.0, 0.0]  # kept, judged, expected since it was last looked at
        self._recent = [0.0, 0.0, 0.0]
        self._weight = JOB_WEIGHT
        self.due = 0  # the length at which it may be tried again
        self.gap = 2
        self.is_probed = False
        self.at = 0  # the request's length then
        self.read = 0  # and when the drafter was last asked: it has read as far as that
        self.shift = 0  # of the log odds against all requests, in steps

    def add(self, kept: int, judged: int, expected: float) -> None:
        new = self._new
        new[0] += kept
        new[1] += judged
        new[2] += expected

    def look(self, length: int) -> bool:
        """Take in what is new at a length of the request. True when that was a surprise."""
        fading = 0.5 ** ((length - self.at) / HALF_LIFE)
        self.at = length
        self._kept *= fading
        self._judged *= fading
        self._expected *= fading
        kept, judged, expected = self._new
        surprised = False
        if judged:
            staying = RECENT**judged
            recent = self._recent = [old * staying + new for old, new in zip(self._recent, self._new, strict=True)]
            self._new = [0.0, 0.0, 0.0]
            mean = _shifted(recent[2] / recent[1], self._factor())
            deviation = recent[0] - recent[1] * mean
            surprised = deviation**2 > SURPRISE**2 * (recent[1] * mean * (1.0 - mean) + 0.5)
            if surprised:
                self._kept, self._judged, self._expected = recent
                self._weight = OWN_WEIGHT
                self.gap = 2
                self.due = length
            else:
                self._kept += kept
                self._judged += judged
                self._expected += expected
        self.shift = _class_of(self._factor())
        return surprised

    def _factor(self) -> float:
        """Odds of this request over those of all."""
        if not self._judged:
            return 1.0
        usual = min(0.995, self._expected / self._judged)
        own = min(0.995, (self._kept + self._weight * usual) / (self._judged + self._weight))
        return own * (1.0 - usual) / (usual * (1.0 - own))


def _shifted(mean: float, factor: float) -> float:
    return mean * factor / (1.0 - mean + mean * factor)


def _class_of(factor: float) -> int:
    from math import log

    return max(-16, min(16, round(STEPS * log(factor))))


def _beyond(histogram: list[float]) -> list[float]:
    """Rounds with at least as many, for every count."""
    return list(accumulate(reversed(histogram)))[::-1]
