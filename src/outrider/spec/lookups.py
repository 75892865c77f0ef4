"""Text that is looked up (ngram, suffix): how much of a proposal is worth its rows, and who need not be asked.

Asking costs next to nothing, but each proposed token costs a row of the target's pass. How often such tokens are kept
depends above all on how much of the text before them matches the place that was found: one token proves little, twenty
nearly everything. So that is learned, by the length of the match and the place in the proposal, and a proposal is cut
where the rows that follow cost more than they promise.

What is cut off goes on teaching: the target's own next token tells for nothing whether it would have been kept.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from typing import NamedTuple

from outrider.metrics import Outcome, PassTimes
from outrider.spec.choice import PassSeconds
from outrider.types import Ask, Drafts, Job

LENGTHS = (2, 3, 4, 6, 8, 12, 16)  # of matches, where a class begins; the first has all below
FIRST_GUESSES = (0.25, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 0.95)  # how often a first token is kept, by class
PLACES = 4  # of a proposal that are told apart; later ones are like the last of them
# Who was right up to a later place is likelier to go on to be
GUESSES = [[1.0 - (1.0 - guess) / (1 + place) for place in range(PLACES)] for guess in FIRST_GUESSES]
GUESS_WEIGHT = 6.0  # judged tokens a guess counts for
WHOLE_WEIGHT = 8.0  # the same, of all classes together
MEMORY = 200.0  # judged tokens that a class remembers
FIRST_GAIN = 0.2  # tokens that asking is thought to bring, at first
FIRST_COST = 0.02  # of a pass: what asking is thought to cost, at first
FOLLOW = 0.1  # how quickly means follow
NAP = 12  # rounds that a request is left alone when asking does not pay


class Trust:
    """How often looked-up tokens are kept, by the length of the match and the place of the token.

    A class of which little is known is thought to be as much better or worse than the first guess as all of them are.
    """

    def __init__(self) -> None:
        self._tallies = [[[0.0, 0.0] for _ in range(PLACES)] for _ in FIRST_GUESSES]  # [kept, judged]
        self._whole = [0.0, 0.0, 0.0]  # kept, judged, and what the guesses had expected of those
        self._factor = 1.0  # odds of being kept, over those of the guesses

    def chances(self, matched: int, count: int) -> list[float]:
        """For each of `count` tokens the probability that a proposal is kept up to there."""
        length, chance, chances = bisect_right(LENGTHS, matched), 1.0, []
        tallies = self._tallies[length]
        for place in range(count):
            place = min(place, PLACES - 1)
            odds = self._factor * GUESSES[length][place] / (1.0 - GUESSES[length][place])
            kept, judged = tallies[place]
            chance *= (kept + GUESS_WEIGHT * odds / (1.0 + odds)) / (judged + GUESS_WEIGHT)
            chances.append(chance)
        return chances

    def add(self, matched: int, proposal: Sequence[int], emitted: Sequence[int]) -> None:
        """What the target said where this was proposed, fed or not. A place counts if all before it were right."""
        length = bisect_right(LENGTHS, matched)
        for place, (token, said) in enumerate(zip(proposal, emitted, strict=False)):
            place = min(place, PLACES - 1)
            for tally in (self._tallies[length][place], self._whole):
                tally[0] += token == said
                tally[1] += 1.0
            self._whole[2] += GUESSES[length][place]
            if token != said:
                break
        for tally in (*self._tallies[length], self._whole):
            if tally[1] > MEMORY:
                tally[:] = [0.5 * count for count in tally]
        kept, judged, expected = self._whole
        if not judged:
            return
        usual = expected / judged
        own = (kept + WHOLE_WEIGHT * usual) / (judged + WHOLE_WEIGHT)
        self._factor = own * (1.0 - usual) / (usual * (1.0 - own))


def worthwhile(chances: Sequence[float], rows: int, pass_s: PassSeconds, rate: float) -> tuple[int, float]:
    """How many tokens of a proposal to judge in a pass of so many rows without them, and what they gain in tokens.

    rate: tokens per second otherwise. Tokens less the rate's share of the time: at the best rate that there is, what
    makes the most of it makes the rate.
    """
    best, most, promised, before_s = 0, 0.0, 0.0, pass_s(rows)
    for count, chance in enumerate(chances, 1):
        promised += chance
        gain = promised - (pass_s(rows + count) - before_s) * rate
        if gain > most:
            best, most = count, gain
    return best, most


class Found(NamedTuple):
    """What was looked up for a job, before it was cut."""

    job: Job
    trust: Trust
    matched: int
    proposal: Sequence[int]


class Lookups:
    """Decides for drafters that look text up, of requests that leave the width to the engine."""

    def __init__(self, names: Collection[str], pass_s: PassSeconds) -> None:
        self.names = names
        self._pass_s = pass_s  # by rows, as it is learned
        self._trust: dict[tuple[str, bool], Trust] = {}  # for greedy and for sampled answers
        self._found: list[Found] = []  # in this round
        self._is_asked = False  # any of them, in this round
        self._rows = 0  # of this round's pass, without drafts
        self._plain_rate = 0.0  # tokens per second of such a pass
        self._speed = 1.0  # of late, over plain decoding
        self._cost_s: dict[str, float] = {}  # of asking, by drafter
        self._gains: dict[int, float] = {}  # job -> tokens that asking gained on average
        self._naps: dict[int, int] = {}  # job -> rounds it is left alone

    def choose(self, jobs: Sequence[Job], rooms: Sequence[tuple[Ask, ...]], rows: int) -> list[tuple[Ask, ...]]:
        """What of each room to ask for: all of it, or nothing. rows: of the pass, without drafts."""
        self._found, self._rows = [], rows
        self._plain_rate = len(jobs) / self._pass_s(rows)
        asked = [room if room and self._is_awake(job) else () for job, room in zip(jobs, rooms, strict=True)]
        self._is_asked = any(asked)
        return asked

    def _is_awake(self, job: Job) -> bool:
        left = self._naps.get(job.id, 0)
        if left:
            self._naps[job.id] = left - 1
        return not left

    def worth(self, drafter: str, jobs: Sequence[Job], drafts: Drafts) -> list[int]:
        """How many tokens of each proposal to judge."""
        counts = list(drafts.counts)
        if not self._plain_rate:  # all widths are fixed
            return counts
        cost = self._cost_s.get(drafter, FIRST_COST / self._plain_rate) * self._plain_rate / len(jobs)
        for index, (job, proposal) in enumerate(zip(jobs, drafts.proposals(), strict=True)):
            matched, gain = drafts.matched[index], 0.0
            if matched and index not in drafts.faults:
                trust = self._trust.setdefault((drafter, job.params.temperature > 0.0), Trust())
                self._found.append(Found(job, trust, matched, proposal))
                if job.width is None:
                    chances, rate = trust.chances(matched, len(proposal)), self._speed * self._plain_rate
                    counts[index], gain = worthwhile(chances, self._rows, self._pass_s, rate)
            if job.width is None and index not in drafts.parents:
                self._note(job, gain, cost)
            self._rows += counts[index]
        return counts

    def _note(self, job: Job, gain: float, cost: float) -> None:
        """Asking cost something and gained something, in tokens; where that does not pay, the job is left alone."""
        mean = self._gains.get(job.id, FIRST_GAIN)
        mean += FOLLOW * (gain - mean)
        self._gains[job.id] = mean
        if mean < cost:
            self._naps[job.id] = NAP

    def learn(self, times: PassTimes, outcomes: Sequence[tuple[Job, Outcome]]) -> None:
        if not self._is_asked and not self._found:
            return
        emitted = {job.id: outcome.emitted for job, outcome in outcomes}
        for job, trust, matched, proposal in self._found:
            if job.id in emitted:
                trust.add(matched, proposal, job.tokens[len(job.tokens) - emitted[job.id] :])
        self._found, self._is_asked = [], False
        for name, seconds in times.drafters.items():
            if name in self.names:
                mean = self._cost_s.setdefault(name, seconds)
                self._cost_s[name] += FOLLOW * (min(seconds, 2.0 * mean) - mean)
        if times.steady and emitted:
            seconds = times.draft_s + times.score_s + times.judge_s
            speed = sum(emitted.values()) / len(emitted) * self._pass_s(len(emitted)) / seconds
            self._speed = max(1.0, self._speed + FOLLOW * (speed - self._speed))

    def forget(self, job: Job) -> None:
        self._gains.pop(job.id, None)
        self._naps.pop(job.id, None)
