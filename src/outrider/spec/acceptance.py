"""What becomes of drafts, learned while serving: how often a drafter answers, how long its proposals are, and how many
of their tokens are kept, by place; over all requests, and for one request in comparison to that.

Of a tree, a place is a level: it is kept when one of its nodes is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from outrider.metrics import Outcome

FIRST_GUESS = 0.7  # acceptance of a drafter that nothing is known about
GUESS_WEIGHT = 4.0  # judged tokens it counts for
PROMISE_WEIGHT = 32.0  # proposals that a promise counts for
PLACE_WEIGHT = 16.0  # a place differs from the one before it only as far as judged tokens say
MEMORY = 600.0  # judged tokens a drafter's record remembers
JOB_WEIGHT = 64.0  # judged tokens after which a request speaks for itself
OWN_WEIGHT = 12.0  # and after it has changed
HALF_LIFE = 96.0  # emitted tokens after which a request's record counts for half
RESTING = 16  # emitted tokens without a draft after which that is looked at
CHANGE = 8.0  # factor between the odds of two states
OFFSET_WEIGHT = 16.0  # judged tokens after which a request's first guess counts for a quarter
APART = 0.5  # in log odds: less is chance
REQUESTS = 8.0  # that a drafter's mean over requests remembers
ENOUGH = 8.0  # judged tokens of a request that tell something of it
BEGINNING = 32.0  # judged tokens of one: later it may say the same again and again, as others do not from the start
EVIDENCE = 6.0  # of a change, in log likelihood, for a request
ALL_EVIDENCE = 8.0  # for a drafter, whose requests differ
CLASSES = 4  # of requests, per unit of log odds
SPREAD = 0.6  # of requests' log odds around those of all


class Tally(NamedTuple):
    """Judged places: those kept, all, and those expected to be kept."""

    kept: float = 0.0
    judged: float = 0.0
    expected: float = 0.0

    def plus(self, other: Tally) -> Tally:
        return Tally(self.kept + other.kept, self.judged + other.judged, self.expected + other.expected)

    def times(self, share: float) -> Tally:
        return Tally(self.kept * share, self.judged * share, self.expected * share)


class Watch:
    """Notices that acceptance has changed: evidence for other odds than expected piles up (Page's CUSUM)."""

    __slots__ = ("_evidence", "_since")

    def __init__(self) -> None:
        self._evidence = [0.0, 0.0]  # that it has risen, that it has fallen, in log likelihood
        self._since = [Tally(), Tally()]  # what was judged meanwhile

    def changed(self, new: Tally, mean: float, enough: float) -> Tally | None:
        """What was judged since the change, if there was one; `mean` of the places were expected to be kept."""
        mean = min(max(mean, 0.005), 0.995)
        for side, factor in enumerate((CHANGE, 1.0 / CHANGE)):
            other = mean * factor / (1.0 - mean + mean * factor)
            evidence = self._evidence[side] + new.kept * math.log(other / mean)
            evidence += (new.judged - new.kept) * math.log((1.0 - other) / (1.0 - mean))
            if evidence <= 0.0:
                self._evidence[side], self._since[side] = 0.0, Tally()
                continue
            since = self._since[side].plus(new)
            if evidence > enough:
                self._evidence, self._since = [0.0, 0.0], [Tally(), Tally()]
                return since
            self._evidence[side], self._since[side] = evidence, since
        return None


class DrafterRecord:
    """One drafter over all requests, drafting chains or trees. `look` takes in what was added."""

    __slots__ = (
        "_answered",
        "_asked",
        "_by_depth",
        "_by_judged",
        "_by_kept",
        "_by_room",
        "_guess",
        "_new",
        "_num_requests",
        "_odds",
        "_outlooks",
        "_request_mean",
        "_share",
        "_sums",
        "_watch",
        "nodes",
        "num_judged",
    )

    def __init__(self, guess: float = FIRST_GUESS, nodes: float = 1.0) -> None:
        self._guess = guess
        self._by_judged: list[float] = [0.0]  # rounds by places judged, and so on
        self._by_kept: list[float] = [0.0]
        self._by_depth: list[float] = [0.0]
        self._by_room: list[float] = [0.0]
        self._asked = self._answered = 0.0
        self._new = [0.0, 0.0, 0.0]  # a tally that grows
        self._watch = Watch()
        self.num_judged = 0.0
        self.nodes = nodes  # tokens of a place: more than one in a tree
        self._odds: list[float] = []  # of keeping each place, given those before it
        self._sums: list[float] = []  # expected to be kept of that many judged
        self._outlooks: dict[int, list[float]] = {}
        self._share = guess  # of all tokens that are judged, those kept: first places count most
        self._num_requests = self._request_mean = 0.0  # requests that are over, and the mean of what they kept
        self.look()

    def believe(self, kept: Sequence[float]) -> None:
        """What was measured elsewhere: the share of proposals that are kept up to each place. It counts like a few that
        were judged here, and is forgotten as they are."""
        places, shares = len(kept), [1.0, *kept, 0.0]
        for counts in (self._by_judged, self._by_kept, self._by_depth, self._by_room):
            counts += [0.0] * (places + 1 - len(counts))
        for place in range(places + 1):
            proposals = PROMISE_WEIGHT * (shares[place] - shares[place + 1])  # that end there
            self._by_kept[place] += proposals
            self._by_judged[min(place + 1, places)] += proposals
            self.num_judged += min(place + 1, places) * proposals
        self._by_depth[places] += PROMISE_WEIGHT
        self._by_room[places] += PROMISE_WEIGHT
        self._sums = []
        self.look()

    def add_silence(self) -> None:
        self._asked += 1.0

    def add(self, width: int, outcome: Outcome, judged: int, times: int = 1, expected: float | None = None) -> None:
        """Proposals where `width` tokens were asked for, of which `judged` places were judged. expected: to be kept of
        them all, by what is known of the requests: what one of them explains is no change of the drafter."""
        if outcome.drafted > outcome.depth or self.nodes > 1.0:
            self.nodes += 0.2 * (outcome.drafted / outcome.depth - self.nodes)
        room = max(outcome.depth, round(width / self.nodes))
        if room >= len(self._by_room):
            for counts in (self._by_judged, self._by_kept, self._by_depth, self._by_room):
                counts += [0.0] * (room + 1 - len(counts))
        self._by_judged[judged] += times
        self._by_kept[outcome.accepted] += times
        self._by_depth[outcome.depth] += times
        self._by_room[room] += times
        self._asked += times
        self._answered += times
        self.num_judged += judged * times
        new = self._new
        new[0] += outcome.accepted * times
        new[1] += judged * times
        new[2] += self.expected(judged) * times if expected is None else expected

    def look(self) -> None:
        """Settle what the record says, and forget most of the past when it no longer holds."""
        if self._sums and not self._new[1]:  # nothing is new
            return
        if self._new[1]:
            new, self._new = Tally(*self._new), [0.0, 0.0, 0.0]
            since = self._watch.changed(new, new.expected / new.judged, ALL_EVIDENCE)
            if since is not None:
                self._restart(since)
        if self.num_judged > MEMORY:
            self._fade(0.5)
        judged, kept = _at_least(self._by_judged), _at_least(self._by_kept)
        share = (sum(kept[1:]) + GUESS_WEIGHT * self._guess) / (sum(judged[1:]) + GUESS_WEIGHT)
        means = [share]
        for reached, passed in zip(judged[1:], kept[1:], strict=True):
            share = (passed + PLACE_WEIGHT * share) / (reached + PLACE_WEIGHT)
            means.append(share)
        means = means[1:] or means
        self._odds = [mean / (1.0 - mean) if mean < 0.999 else 999.0 for mean in means]
        self._sums = [0.0, *accumulate(means)]
        self._outlooks = {}
        total = sum([places * rounds for places, rounds in enumerate(self._by_judged)])
        likely = sum([self.expected(places) * rounds for places, rounds in enumerate(self._by_judged)])
        self._share = likely / total if total else self.mean

    def ended(self, record: JobRecord) -> None:
        """A request is over: each counts alike, however long it was, and by its beginning: so begins the next."""
        if record.judged >= ENOUGH:
            self._num_requests = min(self._num_requests + 1.0, REQUESTS)
            self._request_mean += (record.first_share - self._request_mean) / self._num_requests

    @property
    def offset(self) -> float:
        """Log odds of a request that nothing is known of, against those of all tokens of late."""
        offset = _log_odds(self._request_mean) - _log_odds(self._share) if self._num_requests >= 2.0 else 0.0
        return offset if abs(offset) > APART else 0.0

    @property
    def answers(self) -> float:
        """How often it has something to say."""
        return (self._answered + 1.0) / (self._asked + 1.0)

    @property
    def mean(self) -> float:
        """The share of judged places that are kept."""
        return self._sums[-1] / (len(self._sums) - 1)

    def expected(self, judged: int) -> float:
        """Places kept of the first `judged` ones of a proposal, if each is judged."""
        sums = self._sums
        return sums[judged] if judged < len(sums) else sums[-1] * judged / (len(sums) - 1)

    def outlook(self, shift: int, places: int) -> list[float]:
        """For each place the probability that a proposal is kept up to there, for requests of a class (see `shift`)."""
        known = self._outlooks.get(shift, [])
        if len(known) < places:
            factor = math.exp(shift / CLASSES)
            odds = [odd * factor for odd in self._odds]
            odds += odds[-1:] * (places - len(odds))
            known = list(accumulate((odd / (1.0 + odd) for odd in odds), lambda chance, share: chance * share))
            self._outlooks[shift] = known
        return known[:places]

    def reach(self, places: int) -> list[float]:
        """For each place how often a proposal goes that far when it may, silence included."""
        answers, room, depth = self.answers, _at_least(self._by_room), _at_least(self._by_depth)
        shares = [answers * (deep + 1.0) / (wide + 1.0) for deep, wide in zip(depth, room, strict=True)][1:] or [
            answers
        ]
        return (shares + shares[-1:] * (places - len(shares)))[:places]

    def _restart(self, since: Tally) -> None:
        """Only what was judged since a change counts, as if it had been first places."""
        for counts in (self._by_judged, self._by_kept):
            counts[:] = [0.0] * max(2, len(counts))
        self._by_judged[1] = self.num_judged = since.judged
        self._by_kept[1] = since.kept
        for counts in (self._by_depth, self._by_room):
            counts += [0.0] * (len(self._by_judged) - len(counts))

    def _fade(self, share: float) -> None:
        for counts in (self._by_judged, self._by_kept, self._by_depth, self._by_room):
            counts[:] = [count * share for count in counts]
        self._asked *= share
        self._answered *= share
        self.num_judged *= share


class JobRecord:
    """One drafter for one request, as what was kept beside what the drafter's record made expect."""

    __slots__ = (
        "_first_judged",
        "_first_kept",
        "_new",
        "_offset",
        "_past",
        "_watch",
        "_weight",
        "at",
        "judged",
        "read",
        "shift",
    )

    def __init__(self, at: int, offset: float = 0.0) -> None:
        self._new = [0.0, 0.0, 0.0]  # a tally that grows
        self._past = Tally()
        self._watch = Watch()
        self._weight = JOB_WEIGHT
        self.at = at  # the request's length at the last look
        self.read = 0  # and when the drafter was last asked: it has read as far as that
        self._offset = offset  # of the log odds, as long as it has not spoken for itself
        self.judged = 0.0  # all in all
        self._first_kept, self._first_judged = 0.0, 0.0  # at its beginning
        self.shift = self._shift()  # of the log odds against all requests, in classes

    @property
    def first_share(self) -> float:
        """Of the first tokens that were judged, those kept."""
        return self._first_kept / self._first_judged

    @property
    def doubt(self) -> int:
        """By how many classes it may well be better than it seems so far."""
        return round(CLASSES / math.sqrt(SPREAD**-2 + 0.25 * (self._past.judged + self._new[1])))

    def expects(self, judged: int, usual: float) -> float:
        """Places kept of `judged` ones, where of all requests `usual` would be."""
        factor = math.exp(self.shift / CLASSES)
        return judged * usual * factor / max(1e-9, judged - usual + usual * factor)

    def add(self, kept: int, judged: int, expected: float) -> None:
        new = self._new
        if self.judged < BEGINNING:
            self._first_kept += kept
            self._first_judged += judged
        self.judged += judged
        new[0] += kept
        new[1] += judged
        new[2] += expected

    def look(self, length: int) -> bool:
        """Take in what is new at a length of the request. True when it has changed."""
        if not self._new[1] and length - self.at < RESTING:
            return False
        self._past = self._past.times(0.5 ** ((length - self.at) / HALF_LIFE))
        self.at = length
        new, since = Tally(*self._new), None
        if new.judged:
            self._new = [0.0, 0.0, 0.0]
            factor, usual = self._factor(), new.expected / new.judged
            since = self._watch.changed(new, usual * factor / (1.0 - usual + usual * factor), EVIDENCE)
            if since is None:
                self._past = self._past.plus(new)
            else:
                self._past, self._weight = since, OWN_WEIGHT
                self._offset = 0.0
        self.shift = self._shift()
        return since is not None

    def _shift(self) -> int:
        return max(-24, min(24, round(CLASSES * math.log(self._factor()))))

    def _factor(self) -> float:
        """Odds of this request over those of all."""
        kept, judged, expected = self._past
        first = math.exp(self._offset * (OFFSET_WEIGHT / (OFFSET_WEIGHT + self.judged)) ** 2)
        if not judged:
            return first
        usual = min(0.995, expected / judged)
        usual = usual * first / (1.0 - usual + usual * first)
        own = min(0.995, (kept + self._weight * usual) / (judged + self._weight))
        return first * own * (1.0 - usual) / (usual * (1.0 - own))


def _log_odds(share: float) -> float:
    share = min(max(share, 0.001), 0.999)
    return math.log(share / (1.0 - share))


def _at_least(histogram: list[float]) -> list[float]:
    """Rounds with at least as many, for every count."""
    return list(accumulate(reversed(histogram)))[::-1]
