"""All that was measured while serving: what passes and drafts cost, what becomes of drafts, what was gained by them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from outrider.metrics import Outcome, PassTimes
from outrider.spec.acceptance import DrafterRecord, JobRecord
from outrider.spec.budget import Budget
from outrider.spec.costs import CostCurve, DraftCosts, jobs_class
from outrider.spec.width import Prices
from outrider.types import Ask, Drafts, Job, Plan

FIRST_STEP = 0.1  # a draft step as a share of a target pass, before one was measured
FIRST_NODES = 3.0  # tokens of a tree's level, before there was one
BRANCHING = 1.5  # a tree may miss as seldom as this power of a chain's misses
SOON_OVER = 64  # an answer with fewer tokens to come is not worth a measurement
NEAR = 1.1  # passes whose rows differ by less cost about the same
ENOUGH_ROUNDS = 6  # to compare trees with chains
LUCK = 1.5  # standard deviations that more was kept than expected
LATEST = 2.0  # plain passes that a round is late by at most, the first time
CAUGHT_UP = 8  # unread tokens that cost nothing extra


class Gain:
    """Tokens that rounds of a kind brought, beside those of plain decoding in the same time; the latest count most."""

    __slots__ = ("_plain", "_tokens", "num_rounds")

    def __init__(self) -> None:
        self._tokens = self._plain = 0.0
        self.num_rounds = 0

    def add(self, tokens: float, plain: float) -> None:
        self._tokens = 0.9 * self._tokens + tokens
        self._plain = 0.9 * self._plain + plain
        self.num_rounds += 1

    def over(self, other: Gain) -> float | None:
        """How much better; None while that is unknown."""
        if min(self.num_rounds, other.num_rounds) < ENOUGH_ROUNDS or not self._plain or not other._tokens:
            return None
        return self._tokens * other._plain / (self._plain * other._tokens)


class Surprise:
    """Whether probes keep more than expected, and more than by luck: some of many are always lucky."""

    __slots__ = ("_more", "_variance")

    def __init__(self) -> None:
        self._more = self._variance = 0.0  # tokens, since the last time that it was less

    def add(self, kept: float, judged: int, expected: float) -> None:
        self._more += kept - expected
        self._variance += expected * (1.0 - min(0.99, expected / judged)) if judged else 0.0

    def is_real(self) -> bool:
        """Asked once a round."""
        found = self._more > LUCK * math.sqrt(self._variance)
        if found or self._more <= 0.0:
            self._more = self._variance = 0.0
        return found


class Knowledge:
    """Learns from every round."""

    def __init__(self, probing: float, promised: Mapping[str, Sequence[float]] | None = None) -> None:
        """promised: by drafter, the share of proposals that are kept up to each place, measured elsewhere."""
        self.budget = Budget(probing)
        self.passes = CostCurve()
        self._plain = CostCurve()  # of rounds without drafts alone, which may be queued where others are not
        self.num_rounds = 0
        self.plain_round = 0  # when a pass without drafts was last measured
        self.knows_plain = False  # what a pass without drafts costs
        self.queues = False  # see `PassTimes`
        # (class of job counts, whether with drafts) -> seconds that a round takes longer which was not queued
        self._late_s: dict[tuple[int, bool], float] = {}
        self.is_surely_slower = False  # plain decoding of a batch, whatever such a pass costs
        self.chains_only: set[str] = set()  # drafters that do not branch
        self.longest: Mapping[str, int] = {}  # see `Prices`; who is in here has no trees that were built
        self._priced: frozenset[str] = frozenset()  # drafters
        self.chains, self.trees = Gain(), Gain()
        self._surprise = Surprise()
        self.tree_round = 0  # when there was a tree
        self._costs: dict[str, DraftCosts] = {}
        self._drafters: dict[tuple[str, bool], DrafterRecord] = {}  # by name, and whether for trees
        for name, kept in (promised or {}).items():
            self.drafter(name).believe(kept)
        self._jobs: dict[int, dict[str, JobRecord]] = {}
        self._step_s = FIRST_STEP  # of drafters that were not measured
        self._told: dict[tuple[str, float, float], float] = {}  # by `draft_s` of late: it is asked often

    def expect(self, prices: Prices) -> None:
        """Samples that were taken beforehand."""
        self.queues, self.longest, self._priced = True, prices.longest, frozenset(prices.drafts)
        for rows, seconds in prices.passes.items():
            self.passes.expect(rows, seconds)
            self._plain.expect(rows, seconds)
        for name, measured in prices.drafts.items():
            costs = self._costs.setdefault(name, DraftCosts())
            for (jobs, steps), seconds in measured.items():
                costs.expect(seconds, steps, jobs)
            if name in prices.reads:
                costs.expect_reading(prices.reads[name])

    def look(self, jobs: Sequence[Job]) -> None:
        """Take in what was learned, for a decision about these jobs."""
        passes, num_jobs = self.passes, len(jobs)
        if num_jobs > 1:
            self.knows_plain = self.knows_plain or passes.knows(0, 2.2 * num_jobs)
        else:  # a single row may be a case of its own
            ends = all(job.limit - len(job.tokens) < SOON_OVER for job in jobs)
            self.knows_plain = passes.knows(0, 1) or (passes.is_known and ends)
        if self.knows_plain:
            self.budget.settle(self.plain_s)
        self._step_s = FIRST_STEP * passes.seconds(num_jobs)
        self._told.clear()
        for drafter in self._drafters.values():
            drafter.look()

    def learn(
        self,
        plan: Plan,
        drafts: Drafts,
        times: PassTimes,
        outcomes: Sequence[tuple[Job, Outcome]],
        probed: Sequence[tuple[int, str]],
        pays: bool,
        lookups: Collection[str] = (),
    ) -> None:
        """A round. probed: (job, drafter) where drafting was only tried; pays: whether drafting was to pay; lookups:
        drafters of which others learn."""
        pass_s, num_jobs = times.pass_s, len(plan.deciding)
        self.num_rounds += 1
        self.queues = times.queues
        is_whole = self._is_whole(drafts, times)
        if not times.is_odd and not is_whole:
            self._learn_pass(times, pass_s, num_jobs)
        reading_s = 0.0
        if any(plan.asks):
            reading_s = self._learn_drafts(plan, drafts, times, outcomes, probed, lookups, is_whole=is_whole)
            if (drafts.parents or self.tree_round) and not times.is_odd:
                self._compare(drafts, times, outcomes)
        if num_jobs and not times.is_odd:
            passes, seconds = sum([outcome.emitted for _, outcome in outcomes]) / num_jobs, pass_s + times.draft_s
            invested_s = reading_s if pays else None
            if not any(plan.asks):  # plain itself, however long it took this time: nothing is lost, nothing won
                self.budget.count(num_jobs, seconds, 0.0, 0.0, invested_s)
            elif times.steady:
                self.budget.count(num_jobs, seconds, seconds, passes, invested_s)
            else:  # reading the prompt is nobody's loss
                self.budget.count(num_jobs, seconds, times.draft_s, passes - 1.0, invested_s)

    def _is_whole(self, drafts: Drafts, times: PassTimes) -> bool:
        """A round whose parts cannot be told apart, since all of it was queued. Then those without drafts, and prices,
        say what its pass took, and the rest was drafting."""
        makers = {maker for maker in drafts.makers if maker}
        if not times.queues or not times.steady or len(makers) != 1 or not makers <= self._priced:
            return False
        return self.passes.knows(times.num_fed / NEAR, times.num_fed * NEAR)

    def _learn_pass(self, times: PassTimes, pass_s: float, num_jobs: int) -> None:
        if times.steady:
            if times.num_fed == num_jobs:
                self.plain_round = self.num_rounds
            if times.is_late and times.num_fed == num_jobs and self.plain_samples(num_jobs):
                self._learn_late(num_jobs, pass_s - self.plain_s(num_jobs), drafts=False)
            if times.queues and times.num_fed == num_jobs:
                self._plain.add(num_jobs, pass_s, at_most=times.is_late)
            self.passes.add(times.num_fed, pass_s, at_most=times.is_late)
        elif times.num_fed:
            self.passes.hint(times.num_fed, pass_s)

    def _learn_late(self, num_jobs: int, late_s: float, *, drafts: bool) -> None:
        """Clipped, like the seconds of a pass: a round that something disturbed says little."""
        key, late_s = (jobs_class(num_jobs), drafts), max(0.0, late_s)
        before = self._late_s.get(key)
        most = LATEST * self.plain_s(num_jobs) if before is None else 2.0 * before
        late_s = min(late_s, max(most, 0.5 * self.plain_s(num_jobs)))
        self._late_s[key] = late_s if before is None else 0.5 * (late_s + before)

    def _compare(self, drafts: Drafts, times: PassTimes, outcomes: Sequence[tuple[Job, Outcome]]) -> None:
        """Rounds with trees beside those with chains."""
        if drafts.parents:
            self.tree_round = self.num_rounds
        if times.steady and outcomes and any(drafts.counts):
            plain = len(outcomes) * (times.pass_s + times.draft_s) / self.plain_s(len(outcomes))
            kind = self.trees if drafts.parents else self.chains
            kind.add(sum(outcome.emitted for _, outcome in outcomes), plain)

    def _learn_drafts(
        self,
        plan: Plan,
        drafts: Drafts,
        times: PassTimes,
        outcomes: Sequence[tuple[Job, Outcome]],
        probed: Sequence[tuple[int, str]],
        lookups: Collection[str],
        *,
        is_whole: bool,
    ) -> float:
        """Returns the seconds that went into prompts."""
        places: Sequence[int] = range(len(plan.deciding))
        if len(outcomes) < len(plan.deciding):  # some failed
            place_of = {job.id: place for place, job in enumerate(plan.deciding)}
            places = [place_of[job.id] for job, _ in outcomes]
        excused = {job.id for job, _ in drafts.fallbacks}
        work: dict[str, list[int]] = {}  # drafter -> steps, tokens drafted, tokens read before, by newcomers of those
        rounds: dict[tuple[Ask, bool, Outcome], tuple[int, float]] = {}  # -> how many, expected to be kept of them
        for place, (job, outcome) in zip(places, outcomes, strict=True):
            before = len(job.tokens) - outcome.emitted
            for ask in plan.asks[place]:
                name = ask[0]
                if name in lookups:
                    if outcome.maker == name:
                        break
                    continue
                record = self.record(job, name)
                unread, is_new, record.read = before - record.read, not record.read, before
                if outcome.maker != name:
                    if job.id not in excused:
                        self.drafter(name).add_silence()
                    continue
                branches = place in drafts.parents
                kept, judged = outcome.accepted, _judged(outcome)
                expected = self.drafter(name, branches).expected(judged)
                key = (ask, branches, outcome)
                count, explained = rounds.get(key, (0, 0.0))
                rounds[key] = count + 1, explained + record.expects(judged, expected)
                record.add(kept, judged, expected)
                record.read += kept
                if probed and (job.id, name) in probed:
                    self._surprise.add(kept, judged, expected)
                did = work.get(name)
                if did is None:
                    did = work[name] = [0, 0, 0, 0]
                if outcome.depth > did[0]:
                    did[0] = outcome.depth
                did[1] += outcome.drafted
                did[2] += unread
                if is_new:
                    did[3] += unread
                break
        if probed and self._surprise.is_real():
            self.budget.encourage()
        for (ask, branches, outcome), (count, explained) in rounds.items():
            self.drafter(ask.drafter, branches).add(ask.width, outcome, _judged(outcome), count, explained)
            if ask.tree and not branches:
                self.chains_only.add(ask.drafter)
        if times.is_odd:
            return 0.0
        if times.is_late and times.steady and all(self.knows_steps(name) for name in work):
            expected_s = sum(self.draft_s(name, did[0], did[1] / did[0]) for name, did in work.items())
            expected_s += self.passes.seconds(times.num_fed) + sum(
                self._costs[name].reading_s(did[2]) for name, did in work.items() if did[2] > CAUGHT_UP
            )
            spent_s = times.pass_s + times.draft_s
            self._learn_late(len(plan.deciding), spent_s - expected_s, drafts=True)
        if is_whole:
            spent_s = max(0.0, times.pass_s + times.draft_s - self.passes.seconds(times.num_fed))
            return self._learn_costs(times, work, dict.fromkeys(work, spent_s))
        return self._learn_costs(times, work, times.drafters)

    def _learn_costs(self, times: PassTimes, work: dict[str, list[int]], spent: Mapping[str, float]) -> float:
        reading_s = 0.0
        self._told.clear()
        for name, (steps, drafted, unread, first) in work.items():
            costs = self._costs.setdefault(name, DraftCosts())
            seconds = spent.get(name, 0.0)
            costs.add(seconds, steps, drafted / steps, unread, self.passes, at_most=times.is_late)
            reading_s += min(times.draft_s, costs.reading_s(first))
        return reading_s

    def forget(self, job: Job) -> None:
        for name, record in self._jobs.pop(job.id, {}).items():
            self.drafter(name).ended(record)

    def drafter(self, name: str, branches: bool = False) -> DrafterRecord:
        record = self._drafters.get((name, branches))
        if record is None:
            record = DrafterRecord()
            if branches:
                misses = 1.0 - self.drafter(name).mean
                record = DrafterRecord(1.0 - misses**BRANCHING, FIRST_NODES)
            self._drafters[name, branches] = record
        return record

    def record(self, job: Job, name: str) -> JobRecord:
        """What one drafter did for one job."""
        records = self._jobs.get(job.id)
        if records is None:
            self.budget.welcome(job.limit - len(job.tokens), len(self._jobs))
            records = self._jobs[job.id] = {}
        record = records.get(name)
        if record is None:
            record = records[name] = JobRecord(len(job.tokens), self.drafter(name).offset)
        return record

    def knows_drafter(self, name: str) -> bool:
        """Whether something is known about its costs."""
        return name in self._costs

    def knows_steps(self, name: str) -> bool:
        """Whether its costs are known apart from reading."""
        return name in self._costs and self._costs[name].is_known

    def draft_s(self, name: str, depth: float, jobs: float) -> float:
        """Seconds of drafting `depth` tokens for each of `jobs` on average."""
        key = name, depth, jobs
        seconds = self._told.get(key)
        if seconds is None:
            costs = self._costs.get(name)
            if costs is None or not costs.is_known:
                seconds = self._step_s * depth
            else:
                seconds = costs.seconds(depth, jobs, self.passes)
            self._told[key] = seconds
        return seconds

    def hopeful_draft_s(self, name: str, depth: float, jobs: float) -> float:
        costs = self._costs.get(name)
        return (1.0 if costs is None else costs.hope) * self.draft_s(name, depth, jobs)

    @property
    def is_sure_of_drafts(self) -> bool:
        """Whether all that is known of drafters' costs is what they take at their best."""
        return all(costs.is_sure or not costs.is_known for costs in self._costs.values())

    def plain_s(self, rows: float) -> float:
        """Seconds of a pass without drafts."""
        is_known = self.queues and self._plain.samples(rows / NEAR, rows * NEAR)
        return self._plain.seconds(rows) if is_known else self.passes.seconds(rows)

    def turn_s(self, num_jobs: int) -> float:
        """Seconds that it costs to do something else for a round: neither that nor what follows can be queued."""
        plain = self._late_by(num_jobs, drafts=False)
        return plain + max(plain, self._late_by(num_jobs, drafts=True))

    def _late_by(self, num_jobs: int, *, drafts: bool) -> float:
        """Of so many jobs; where that is unknown, as for the nearest number, and more for more of them."""
        known = [key for key, with_drafts in self._late_s if with_drafts == drafts]
        if not known:
            return 0.0
        wanted = jobs_class(num_jobs)
        nearest = min(known, key=lambda key: abs(key - wanted))
        return self._late_s[nearest, drafts] * max(1.0, math.sqrt(2.0) ** (wanted - nearest))

    def read_s(self, job: Job, name: str) -> float:
        """Seconds the drafter needs to catch up with a job."""
        costs = self._costs.get(name)
        unread = self.unread(job, name)
        return costs.reading_s(unread) if costs is not None and unread > CAUGHT_UP else 0.0

    def unread(self, job: Job, name: str) -> int:
        return len(job.tokens) - self.record(job, name).read

    def plain_samples(self, num_jobs: int) -> float:
        """How often a pass without drafts was measured."""
        return self.passes.samples(num_jobs / NEAR, num_jobs * NEAR)


def _judged(outcome: Outcome) -> int:
    """Places of a proposal that were judged: those kept, and the one where it ended, if that is why it ended."""
    return outcome.accepted + (outcome.emitted > outcome.accepted and not outcome.is_bonus)


def starters(num_jobs: int) -> int:
    """How many jobs begin with a drafter that nothing is known of."""
    return math.isqrt(num_jobs)
