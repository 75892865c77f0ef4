"""Text that is looked up (ngram, suffix): how much of a proposal is worth its rows, and who need not be asked.

Asking costs next to nothing, but each proposed token costs a row of the target's pass. How often such tokens are kept
depends above all on how much of the text before them matches the place that was found: one token proves little, twenty
nearly everything. So that is learned, by the length of the match and the place in the proposal, and a proposal is cut
where the rows that follow cost more than they promise.

What is cut off goes on teaching: the target's own next token tells for nothing whether it would have been kept.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from outrider.metrics import Outcome, PassTimes
from outrider.spec.choice import PassSeconds
from outrider.types import Ask, Drafts, Job

LENGTHS = (2, 3, 4, 6, 8, 12, 16)  # of matches, where a class begins; the first has all below
# How often a first token is kept, by class. Low: what is better than that shows for nothing, what is worse costs rows
FIRST_GUESSES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.9)
PLACES = 4  # of a proposal that are told apart; later ones are like the last of them
# Who was right up to a later place is likelier to go on to be
GUESSES = [[1.0 - (1.0 - guess) / (1 + place) for place in range(PLACES)] for guess in FIRST_GUESSES]
GUESS_WEIGHT = 6.0  # judged tokens a guess counts for
ODDS_WEIGHT = 8.0  # the same, of all classes together, and of one request beside the others
MEMORY = 200.0  # judged tokens that a class remembers
FIRST_GAIN = 0.1  # tokens that asking is thought to bring, at first
FIRST_COST = 0.02  # of a pass: what asking is thought to cost, at first
FOLLOW = 0.1  # how quickly means follow
QUICKLY = 0.3  # the same, of whether something is found
SELDOM = 0.3  # of the times that it is asked for: it is thought that nothing will be found then
SLOWLY = 0.02  # and that of all requests
AROUND = 2.0  # asking costs so many times what the drafter takes: choosing, cutting and learning come with it
NAP = 12  # rounds that a request is left alone when asking does not pay; again and again, twice as many each time,
BEARABLE = 0.005  # until asking costs no more than this share of the time


class Odds:
    """How much better or worse something does than was expected of it, as a factor of the odds."""

    __slots__ = ("_expected", "_judged", "_kept", "factor")

    def __init__(self) -> None:
        self._kept = self._judged = self._expected = 0.0
        self.factor = 1.0

    def add(self, kept: int, judged: int, expected: float) -> None:
        self._kept += kept
        self._judged += judged
        self._expected += expected
        if self._judged > MEMORY:
            self._kept, self._judged, self._expected = 0.5 * self._kept, 0.5 * self._judged, 0.5 * self._expected
        usual = self._expected / self._judged
        own = (self._kept + ODDS_WEIGHT * usual) / (self._judged + ODDS_WEIGHT)
        self.factor = own * (1.0 - usual) / (usual * (1.0 - own))


class Trust:
    """How often looked-up tokens are kept, by the length of the match and the place of the token.

    A class of which little is known is thought to be as much better or worse than the first guess as all of them are.
    """

    def __init__(self) -> None:
        self._tallies = [[[0.0, 0.0] for _ in range(PLACES)] for _ in FIRST_GUESSES]  # [kept, judged]
        self._whole = Odds()

    def shares(self, matched: int, count: int, factor: float = 1.0) -> list[float]:
        """For each of `count` tokens the probability that it is kept if those before it are. factor: of the odds."""
        length, shares = bisect_right(LENGTHS, matched), []
        for place in range(min(count, PLACES)):
            kept, judged = self._tallies[length][place]
            guess = _shifted(GUESSES[length][place], self._whole.factor)
            shares.append(_shifted((kept + GUESS_WEIGHT * guess) / (judged + GUESS_WEIGHT), factor))
        return shares + shares[-1:] * (count - len(shares))

    def add(self, matched: int, hits: Sequence[bool]) -> None:
        """Whether the tokens of a proposal were right, in order up to the first that was not."""
        length, expected = bisect_right(LENGTHS, matched), 0.0
        for place, hit in enumerate(hits):
            place = min(place, PLACES - 1)
            tally = self._tallies[length][place]
            tally[0] += hit
            tally[1] += 1.0
            if tally[1] > MEMORY:
                tally[:] = 0.5 * tally[0], 0.5 * tally[1]
            expected += GUESSES[length][place]
        self._whole.add(sum(hits), len(hits), expected)


def _shifted(share: float, factor: float) -> float:
    """The probability whose odds are `factor` times those of `share`."""
    return share * factor / (1.0 - share + share * factor)


def hits_of(proposal: Sequence[int], emitted: Sequence[int]) -> list[bool]:
    """Whether proposed tokens are what the target said there, fed or not, up to the first that is not."""
    hits: list[bool] = []
    for token, said in zip(proposal, emitted, strict=False):
        hits.append(token == said)
        if token != said:
            break
    return hits


def worthwhile(shares: Sequence[float], rows: int, pass_s: PassSeconds, rate: float) -> tuple[int, float]:
    """How many tokens of a proposal to judge in a pass of so many rows without them, and what they gain in tokens.

    shares: for each token the probability that it is kept if those before it are. rate: tokens per second otherwise;
    a row must bring more than passes at that rate bring in its time.
    """
    best, most, promised, chance, before_s = 0, 0.0, 0.0, 1.0, pass_s(rows)
    for count, share in enumerate(shares, 1):
        chance *= share
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
    shares: Sequence[float]


class Account:
    """What lookups did for one job."""

    __slots__ = ("found", "gain", "nap", "naps", "odds")

    def __init__(self, gain: float) -> None:
        self.odds = Odds()  # of what is found for it, beside others
        self.gain = gain  # tokens that asking brings on average, rows paid
        self.found = 0.0  # how often something was found that is worth its rows
        self.nap = 0  # rounds it is left alone
        self.naps = 0  # one after another


class Lookups:
    """Decides for drafters that look text up, of requests that leave the width to the engine."""

    def __init__(
        self, names: Collection[str], pass_s: PassSeconds, turn_s: Callable[[int], float] = lambda num_jobs: 0.0
    ) -> None:
        self.names = names
        self._pass_s = pass_s  # by rows, as it is learned
        self._turn_s = turn_s  # by jobs: what a round costs that is not what a GPU was told to go on with
        self._trust: dict[tuple[str, bool], Trust] = {}  # for greedy and for sampled answers
        self._found: list[Found] = []  # in this round
        self._is_asked = False  # any of them, in this round
        self._rows = 0  # of this round's pass, without drafts
        self._plain_rate = 0.0  # tokens per second without drafts, when nobody reads a prompt
        self._speed = 1.0  # of late, over plain decoding
        self._cost_s: dict[str, float] = {}  # of asking, by drafter
        self._round_s: dict[bool, float] = {}  # of rounds without drafts, by whether somebody was asked
        self._accounts: dict[int, Account] = {}  # by job
        self.rivals: dict[int, float] = {}  # by job: tokens that who is asked where these are silent gains for it
        self._gain = FIRST_GAIN  # of all of them: what a new one is thought to be like
        self._parts: dict[tuple[Ask, ...], tuple[tuple[Ask, ...], tuple[Ask, ...]]] = {}  # of rooms: there are few

    def split(self, room: tuple[Ask, ...]) -> tuple[tuple[Ask, ...], tuple[Ask, ...]]:
        """A room as what is for these drafters, in chains, and the rest. Asked for in every round, so it is kept."""
        parts = self._parts.get(room)
        if parts is None:
            own = tuple(ask._replace(tree=False) for ask in room if ask.drafter in self.names)
            parts = self._parts[room] = own, tuple(ask for ask in room if ask.drafter not in self.names)
        return parts

    def choose(self, jobs: Sequence[Job], rooms: Sequence[tuple[Ask, ...]], rows: int) -> list[tuple[Ask, ...]]:
        """What of each room to ask for: all of it, or nothing. rows: of the pass, without drafts."""
        self._found, self._rows = [], rows
        self._plain_rate = len(jobs) / self._pass_s(len(jobs))
        asked = [room if room and self._is_awake(job) else () for job, room in zip(jobs, rooms, strict=True)]
        self._is_asked = any(asked)
        return asked

    def _is_awake(self, job: Job) -> bool:
        account = self._accounts.get(job.id)
        if account is None:
            account = self._accounts[job.id] = Account(self._gain)
        if account.nap:
            account.nap -= 1
            return False
        return True

    def nap(self, jobs: Sequence[Job]) -> bool:
        """A round in which all of these are left alone; False, and nothing was done, where one of them is not."""
        accounts = [self._accounts.get(job.id) for job in jobs]
        if not all(account is not None and account.nap for account in accounts):
            return False
        for account in accounts:
            assert account is not None
            account.nap -= 1
        self._is_asked = False
        return True

    def worth(self, drafter: str, jobs: Sequence[Job], drafts: Drafts) -> list[int]:
        """How many tokens of each proposal to judge."""
        counts = list(drafts.counts)
        if not self._plain_rate:  # all widths are fixed
            return counts
        seconds = AROUND * self._cost_s.get(drafter, FIRST_COST / self._plain_rate)
        if len(self._round_s) == 2:  # a GPU that is not told what comes next waits for it: that costs, too
            seconds = max(seconds, self._round_s[True] - self._round_s[False])
        cost = seconds * self._plain_rate / len(jobs)
        turn = self._turn_s(len(jobs)) * self._plain_rate / len(jobs)
        for index, (job, proposal) in enumerate(zip(jobs, drafts.proposals(), strict=True)):
            account = self._accounts.get(job.id)
            if account is not None and job.width is None and index not in drafts.parents:
                counts[index], gain = self._weigh(drafter, job, account, drafts.matched[index], proposal)
                # where one proposal follows another, the next round would not have gone on plainly, either
                gain = max(0.0, gain - (turn if account.found < SELDOM else 0.5 * turn))
                if not gain or gain < self.rivals.get(job.id, 0.0):
                    counts[index] = 0
                account.found += QUICKLY * ((counts[index] > 0) - account.found)
                account.gain += FOLLOW * (gain - account.gain)
                self._gain += SLOWLY * (gain - self._gain)
                self._lay_down(account, cost)
            self._rows += counts[index]
        return counts

    def _lay_down(self, account: Account, cost: float) -> None:
        """Who does not gain what asking costs is left alone: for long, where that is dear and was so before."""
        if account.gain >= cost:
            account.nap = account.naps = 0
            return
        account.nap = min(NAP << account.naps, max(NAP, int(cost / BEARABLE)))
        account.naps = min(account.naps + 1, 8)

    def rests(self, job: Job) -> bool:
        """Whether the job will most likely get nothing in the next round: it is left alone, or little was found. A GPU
        goes on as if so; if something is found after all, one small pass was for nothing."""
        account = self._accounts.get(job.id)
        return account is not None and (account.nap > 0 or account.found < SELDOM)

    def _weigh(
        self, drafter: str, job: Job, account: Account, matched: int, proposal: Sequence[int]
    ) -> tuple[int, float]:
        if not proposal:
            return 0, 0.0
        trust = self._trust.setdefault((drafter, job.params.temperature > 0.0), Trust())
        shares = trust.shares(matched, len(proposal), account.odds.factor)
        self._found.append(Found(job, trust, matched, proposal, shares))
        return worthwhile(shares, self._rows, self._pass_s, self._speed * self._plain_rate)

    def learn(self, times: PassTimes, outcomes: Sequence[tuple[Job, Outcome]]) -> None:
        is_steady = times.steady and not times.is_odd
        if is_steady and len(outcomes) == times.num_fed == 1:
            seconds = times.draft_s + times.pass_s
            mean = self._round_s.setdefault(self._is_asked, seconds)
            self._round_s[self._is_asked] += FOLLOW * (min(seconds, 2.0 * mean) - mean)
        if not self._is_asked:
            return
        emitted = {job.id: outcome.emitted for job, outcome in outcomes}
        for job, trust, matched, proposal, shares in self._found:
            account = self._accounts.get(job.id)
            if account is not None and emitted.get(job.id):  # else it has failed
                hits = hits_of(proposal, job.tokens[-emitted[job.id] :])
                trust.add(matched, hits)
                account.odds.add(sum(hits), len(hits), sum(shares[: len(hits)]))
        self._found, self._is_asked = [], False
        for name, seconds in times.drafters.items():
            if name in self.names:
                mean = self._cost_s.setdefault(name, seconds)
                self._cost_s[name] += FOLLOW * (min(seconds, 2.0 * mean) - mean)
        if is_steady and emitted:
            seconds = times.draft_s + times.pass_s
            speed = sum(emitted.values()) / len(emitted) * self._pass_s(len(emitted)) / seconds
            self._speed = max(1.0, self._speed + FOLLOW * (speed - self._speed))

    def forget(self, job: Job) -> None:
        self._accounts.pop(job.id, None)
