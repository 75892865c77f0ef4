"""The width that pays, per request and round, from what was measured: 0 where plain decoding wins.

`acceptance.py` and `costs.py` learn, `choice.py` computes the best widths from it, `budget.py` says what may be tried.
A decision stands for a few rounds. Requests that rest are tried again now and then, and so are widths and trees that
nothing is known about, if they look good.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from outrider.config import WidthConfig
from outrider.metrics import Outcome, PassTimes, Statistics
from outrider.spec.acceptance import DrafterRecord, JobRecord
from outrider.spec.budget import Budget
from outrider.spec.choice import Batch, Best, DraftSeconds, Group, Prospect, best_choice, hope, plain_rate
from outrider.spec.costs import CostCurve, DraftCosts
from outrider.types import Ask, Drafts, Job, Plan

FIRST_STEP = 0.1  # a draft step as a share of a target pass, before one was measured
FIRST_WIDTH = 4  # tokens drafted as long as costs are unknown
SHORT = 16  # an answer with fewer tokens to come tries nothing new
CHEAP = 0.5  # of a row in the largest pass: who can catch up for that may start at once
MARGIN = 1.01  # drafting must be better than plain by so much: requests that drift apart share fewer passes
NOTABLE = 1.03  # what is not known is tried when it may be better by so much
NEAR = 1.1  # passes whose rows differ by less cost about the same
LONGEST_HOLD = 8.0  # rounds a decision stands
SURE = 4.0  # samples of a plain pass
LONG_AGO = 256  # rounds after which it is measured again
FIRST_NODES = 3.0  # tokens of a tree's level, before there was one
CHARGE = 1.0 / 16.0  # catching up is counted in such parts of a pass


class Offer(NamedTuple):
    """A drafter that may be asked for a job."""

    drafter: str
    width: int  # at most
    shift: int  # of the job's acceptance, see `JobRecord`
    entry: int  # what catching up costs this round, in units of CHARGE
    may_branch: bool
    must_branch: bool


class View(NamedTuple):
    """A job whose width is free."""

    place: int
    offers: tuple[Offer, ...]


@dataclass(slots=True)
class Situation:
    """What a decision is made from."""

    jobs: Sequence[Job]
    rooms: Sequence[tuple[Ask, ...]]
    batch: Batch
    views: list[View]
    draft_s: DraftSeconds
    is_steady: bool  # nobody reads a prompt
    plain_rate: float = 0.0
    rate: float = 0.0  # of the best drafting


class AdaptiveController:
    """`statistics`: where decisions of all requests are counted."""

    def __init__(self, config: WidthConfig | None = None, statistics: Callable[[], Statistics] | None = None) -> None:
        self._statistics = statistics
        self._budget = Budget((config or WidthConfig()).probing)
        self._passes = CostCurve()
        self._draft_costs: dict[str, DraftCosts] = {}
        self._drafters: dict[tuple[str, bool], DrafterRecord] = {}  # by name, and whether for trees
        self._jobs: dict[int, dict[str, JobRecord]] = {}
        # The decision that stands
        self._deciding: list[Job] = []
        self._rooms: list[tuple[Ask, ...]] = []
        self._rows = 0
        self._asks: list[tuple[Ask, ...]] = []
        self._reasons: list[str] = []
        self._probed: list[tuple[int, str]] = []  # (job, drafter)
        self._left = 0  # rounds
        self._hold = 1.0
        self._is_fresh = False  # made for the round under way
        self._knows_plain = False  # what a pass without drafts costs
        self._num_rounds = self._plain_round = 0  # so far, and when a pass without drafts was last measured

    def choose(self, jobs: Sequence[Job], rooms: Sequence[tuple[Ask, ...]], rows: int) -> Sequence[tuple[Ask, ...]]:
        self._is_fresh = True
        if self._left > 0 and rows == self._rows and jobs == self._deciding:
            self._left -= 1
            if rooms != self._rooms:  # near the end of an answer
                return [_within(asks, room) for asks, room in zip(self._asks, rooms, strict=True)]
            return self._asks
        lasts = jobs == self._deciding and self._knows_plain
        self._hold = min(LONGEST_HOLD, self._hold + 0.25) if lasts else 1.0
        self._deciding, self._rooms, self._rows = list(jobs), list(rooms), rows
        self._asks = [room if job.width is not None else () for job, room in zip(jobs, rooms, strict=True)]
        self._reasons, self._probed, self._left = [""] * len(jobs), [], 0
        self._decide(self._survey(jobs, rooms, rows))
        return self._asks

    def learn(self, plan: Plan, drafts: Drafts, times: PassTimes, outcomes: Sequence[tuple[Job, Outcome]]) -> None:
        pass_s, batch = times.score_s + times.judge_s, len(plan.deciding)
        self._num_rounds += 1
        if times.steady:
            self._passes.add(times.num_fed, pass_s)
            if times.num_fed == batch:
                self._plain_round = self._num_rounds
        elif times.num_fed:
            self._passes.hint(times.num_fed, pass_s)
        if batch:
            passes = sum([outcome.emitted for _, outcome in outcomes]) / batch
            plain_s = self._passes.seconds(batch) if self._knows_plain else None
            if times.steady:
                self._budget.count(pass_s + times.draft_s, pass_s + times.draft_s, passes, plain_s)
            else:  # reading the prompt is nobody's loss
                self._budget.count(pass_s + times.draft_s, times.draft_s, passes - 1.0, plain_s)
        if any(plan.asks):
            self._learn_drafts(plan, drafts, times, outcomes)
        if self._is_fresh:
            self._is_fresh = False
            self._tally(plan)

    def forget(self, job: Job) -> None:
        self._jobs.pop(job.id, None)

    def _survey(self, jobs: Sequence[Job], rooms: Sequence[tuple[Ask, ...]], rows: int) -> Situation:
        """What is known of the batch, and what may be drafted for whom."""
        fed = rows + sum([len(job.tokens) - job.cached for job in jobs])
        passes, longest = self._passes, max(job.limit - len(job.tokens) for job in jobs)
        if len(jobs) == 1:  # a single row may be a case of its own
            self._knows_plain = passes.knows(0, 1) or (passes.is_known and longest < 64)
        else:
            self._knows_plain |= passes.knows(0, 2.2 * len(jobs))
        for drafter in self._drafters.values():
            drafter.look()
        batch = Batch(float(fed), float(len(jobs)))
        pass_s, starters, views = passes.seconds(fed), dict[str, int](), list[View]()
        for index, (job, room) in enumerate(zip(jobs, rooms, strict=True)):
            if not room:
                continue
            records = [self._record(job, ask.drafter) for ask in room]
            for record in records:
                if record.at != len(job.tokens) and record.look(len(job.tokens)):
                    self._hold = 1.0
                    self._budget.encourage()
            if job.width is not None:
                self._add_fixed(batch, room[0], records[0])
                continue
            offers = [
                self._offer(job, ask, record, pass_s)
                for ask, record in zip(room, records, strict=True)
                if self._may_start(job, ask.drafter, len(jobs), starters)
            ]
            views.append(View(index, tuple(offers)))
        draft_s = partial(self._draft_s, FIRST_STEP * passes.seconds(len(jobs)))
        return Situation(
            jobs, rooms, batch, views, draft_s, fed == len(jobs), plain_rate(batch, passes.seconds, draft_s)
        )

    def _add_fixed(self, batch: Batch, ask: Ask, record: JobRecord) -> None:
        """A job whose width is fixed is part of the batch as it is."""
        drafter = self._drafter(ask.drafter, ask.tree)
        places = max(1, round(ask.width / drafter.nodes))
        batch.tokens += sum(drafter.outlook(record.shift, places))
        batch.rows += ask.width
        steps = batch.steps.setdefault(ask.drafter, [])
        steps += [0.0] * (places - len(steps))
        for place in range(places):
            steps[place] += drafter.nodes

    def _may_start(self, job: Job, name: str, num_jobs: int, starters: dict[str, int]) -> bool:
        """A drafter that nothing is known of begins with a few jobs."""
        costs = self._draft_costs.get(name)
        if self._knows_plain and costs is not None and costs.is_known:
            return True
        if job.limit - len(job.tokens) < SHORT:
            return False
        starters[name] = starters.get(name, 0) + 1
        largest = self._passes.largest
        is_cheap = costs is not None and self._read_s(job, name) * largest < CHEAP * self._passes.seconds(largest)
        return is_cheap or starters[name] <= math.isqrt(num_jobs)

    def _offer(self, job: Job, ask: Ask, record: JobRecord, pass_s: float) -> Offer:
        width = ask.width if self._knows_plain else min(ask.width, FIRST_WIDTH)
        # Catching up is spread over what is left of the answer, about two tokens a round
        entry_s = self._read_s(job, ask.drafter) * min(1.0, 2.0 / max(1, job.limit - len(job.tokens)))
        return Offer(ask.drafter, width, record.shift, round(entry_s / (CHARGE * pass_s)), ask.tree, bool(job.tree))

    def _decide(self, now: Situation) -> None:
        """Fill in asks and reasons."""
        passes = self._passes
        groups = self._groups(now, trees=False)
        most_rows = max(2.0 * passes.largest, now.batch.rows + FIRST_WIDTH * len(now.jobs))
        best = best_choice(groups, now.batch, passes.seconds, now.draft_s, most_rows)
        for view in now.views:
            self._reasons[view.place] = "plain: a few others try the draft first"
        if best is None:
            return
        now.rate = best.rate
        best, is_try = self._bolder(now, groups, best, most_rows)
        ratio = best.rate / now.plain_rate
        drafts = ratio > MARGIN and (is_try or self._repays(now, groups, best))
        if drafts and now.is_steady and passes.is_known and not self._knows_plain:
            self._give(groups, [], "measuring what plain decoding costs")
            return
        if is_try:
            self._give(groups, best.places, "trying a width that was not measured")
        elif drafts:
            self._give(groups, best.places, f"drafting pays: about {_rounded(ratio)}x of plain")
        else:
            self._give(groups, [], f"plain: drafting would give about {_rounded(ratio)}x")
        self._left = 0 if is_try else int(self._hold) - 1
        if drafts and not passes.knows(best.rows / NEAR**2, best.rows * NEAR**2):
            self._left = 0
        if now.is_steady and self._knows_plain and self._budget.is_due and not is_try:
            if drafts and self._doubts_plain(len(now.jobs), ratio):
                self._measure_plain(now, groups)
            else:
                self._probe(now, groups)

    def _doubts_plain(self, num_jobs: int, ratio: float) -> bool:
        """Whether plain passes were measured too seldom, or too long ago, to be sure that they are slower."""
        if ratio < 1.0 + 4.0 * self._passes.noise:
            return self._passes.samples(num_jobs / NEAR, num_jobs * NEAR) < SURE
        return ratio < 2.0 and self._num_rounds - self._plain_round > LONG_AGO

    def _measure_plain(self, now: Situation, groups: Sequence[Group]) -> None:
        pass_s = self._passes.seconds(now.batch.rows)
        loss = pass_s - now.batch.tokens / now.rate
        if loss <= 0.5 * self._allowed(now, next(iter(groups[0].prospects))):
            self._give(groups, [], "measuring what plain decoding costs")
            self._left = 0
            self._budget.wait(loss, pass_s)

    def _groups(self, now: Situation, *, trees: bool) -> list[Group]:
        """Jobs that promise the same, together."""
        groups: dict[tuple[Offer, ...], Group] = {}
        pass_s = self._passes.seconds(now.batch.rows)
        for index, offers in now.views:
            group = groups.get(offers)
            if group is not None:
                group.members.append(index)
            elif offers:
                prospects = {
                    offer.drafter: self._prospect(offer, offer.must_branch or (trees and offer.may_branch), pass_s)
                    for offer in offers
                }
                groups[offers] = Group([index], prospects)
        return list(groups.values())

    def _prospect(self, offer: Offer, branches: bool, pass_s: float) -> Prospect:
        drafter = self._drafter(offer.drafter, branches)
        places = max(1, int(offer.width / drafter.nodes))
        chances, reach = drafter.outlook(offer.shift, places), drafter.reach(places)
        return Prospect(chances, reach, drafter.answers, drafter.nodes, offer.entry * CHARGE * pass_s)

    def _bolder(self, now: Situation, groups: Sequence[Group], best: Best, most_rows: float) -> tuple[Best, bool]:
        """Something that was not measured and may be better, if it can be afforded."""
        passes = self._passes
        bold = best_choice(groups, now.batch, passes.hopeful, now.draft_s, most_rows)
        if bold is None or passes.samples(bold.rows / NEAR, bold.rows * NEAR) > min(SURE, 40.0 * passes.noise):
            return best, False
        rate = max(best.rate, now.plain_rate)
        loss = passes.seconds(bold.rows) + bold.draft_s + self._entry_s(now, groups, bold) - bold.tokens / rate
        if bold.rate < NOTABLE * rate or loss > 0.25 * self._allowed(now, next(iter(groups[0].prospects))):
            return best, False
        self._budget.spend(loss)
        return bold, True

    def _entry_s(self, now: Situation, groups: Sequence[Group], best: Best) -> float:
        """Seconds that catching up takes for a choice."""
        return sum(
            self._read_s(now.jobs[index], name)
            for group, places in zip(groups, best.places, strict=True)
            for name, count in places.items()
            if count
            for index in group.members
        )

    def _repays(self, now: Situation, groups: Sequence[Group], best: Best) -> bool:
        """Whether the rest of the answers repays what catching up costs, some times over."""
        entry_s = self._entry_s(now, groups, best)
        if entry_s == 0.0:
            return True
        left = sum(job.limit - len(job.tokens) for job in now.jobs)
        return left * (1.0 / now.plain_rate - 1.0 / best.rate) > 1.5 * entry_s

    def _probe(self, now: Situation, groups: Sequence[Group]) -> None:
        """Let a few jobs ask a drafter that rests, as far as the budget goes."""
        if not groups or hope(groups, now.batch, self._passes.seconds, now.draft_s) < NOTABLE * now.plain_rate:
            return  # not even if all drafts were kept
        pass_s = self._passes.seconds(now.batch.rows)
        waiting = [
            (
                round(50.0 * self._read_s(now.jobs[view.place], offer.drafter) / pass_s),
                -self._unread(view.place, offer.drafter),
                view.place,
                offer,
            )
            for view in now.views
            for offer in view.offers
            if not any(ask.drafter == offer.drafter for ask in self._asks[view.place])
            and now.jobs[view.place].limit - len(now.jobs[view.place].tokens) >= SHORT
        ]
        waiting.sort(key=lambda entry: entry[:3])
        rate, total, first, rows = max(now.rate, now.plain_rate), 0.0, 0.0, now.batch.rows
        steps: dict[str, list[float]] = {}
        for _, _, index, offer in waiting[: max(1, len(now.jobs) // 4)]:
            job = now.jobs[index]
            width, loss, seconds = self._cheapest(now, job, offer, steps, rows, rate)
            allowed = self._allowed(now, offer.drafter)
            if loss > (allowed if loss < 0.3 * seconds else 0.5 * allowed) or (total and loss > 0.4 * first):
                break
            first = first or loss
            made = steps.setdefault(offer.drafter, [])
            made += [0.0] * (width - len(made))
            for place in range(width):
                made[place] += 1.0
            rows += width
            total += loss
            self._probed.append((job.id, offer.drafter))
            widths = {ask.drafter: ask.width for ask in self._asks[index]} | {offer.drafter: width}
            self._ask(index, widths, {}, "probing whether drafting pays again")
        if self._probed:
            self._left = 0
            self._budget.wait(total, pass_s)

    def _cheapest(
        self, now: Situation, job: Job, offer: Offer, steps: Mapping[str, list[float]], rows: float, rate: float
    ) -> tuple[int, float, float]:
        """The width that costs the least per token judged, what it loses, and its seconds; `steps`: of other probes."""
        drafter, passes = self._drafter(offer.drafter), self._passes
        chances, answers = drafter.outlook(offer.shift, offer.width), drafter.answers
        made = steps.get(offer.drafter, [])
        before_s = now.draft_s(offer.drafter, len(made), sum(made) / len(made)) if made else 0.0
        entry_s, pass_s = self._read_s(job, offer.drafter), passes.seconds(rows)
        # One of many that gets ahead leaves the others their passes: it saves its row
        token_s = 1.0 / rate if len(now.jobs) == 1 else min(1.0 / rate, pass_s - passes.seconds(rows - 1.0))
        best, best_value, gained, judged = (1, 0.0, 0.0), float("inf"), 0.0, 0.0
        for width in range(1, offer.width + 1):
            judged += chances[width - 2] if width > 1 else 1.0
            gained += chances[width - 1] * answers
            depth = max(width, len(made))
            drafting_s = now.draft_s(offer.drafter, depth, (sum(made) + width) / depth) - before_s
            seconds = passes.seconds(rows + width * answers) + drafting_s + entry_s
            loss = max(0.0, seconds - pass_s - gained * token_s)
            value = (loss + 0.02 * pass_s / len(now.jobs)) / judged
            if value < best_value:
                best, best_value = (width, loss, seconds), value
        return best

    def _allowed(self, now: Situation, name: str) -> float:
        return self._budget.allowed(now.rate, now.plain_rate, self._drafter(name).num_judged)

    def _give(self, groups: Sequence[Group], places: Sequence[Mapping[str, int]], reason: str) -> None:
        """Decide for all jobs of the groups; without places they rest."""
        for number, group in enumerate(groups):
            nodes = {name: prospect.nodes for name, prospect in group.prospects.items()}
            for index in group.members:
                self._ask(index, places[number] if places else {}, nodes, reason)

    def _ask(self, index: int, places: Mapping[str, int], nodes: Mapping[str, float], reason: str) -> None:
        job = self._deciding[index]
        self._asks[index] = tuple(
            Ask(
                ask.drafter,
                min(ask.width, round(places[ask.drafter] * nodes.get(ask.drafter, 1.0))),
                bool(job.tree) or nodes.get(ask.drafter, 1.0) > 1.0,
            )
            for ask in self._rooms[index]
            if places.get(ask.drafter)
        )
        self._reasons[index] = reason

    def _draft_s(self, first_step_s: float, name: str, depth: float, jobs: float) -> float:
        costs = self._draft_costs.get(name)
        return costs.seconds(depth, jobs, self._passes) if costs and costs.is_known else first_step_s * depth

    def _unread(self, index: int, name: str) -> int:
        job = self._deciding[index]
        return len(job.tokens) - self._record(job, name).read

    def _read_s(self, job: Job, name: str) -> float:
        """Seconds the drafter needs to catch up with a job."""
        costs = self._draft_costs.get(name)
        unread = len(job.tokens) - self._record(job, name).read
        return costs.read_s * unread if costs is not None and unread > 8 else 0.0

    def _drafter(self, name: str, branches: bool = False) -> DrafterRecord:
        record = self._drafters.get((name, branches))
        if record is None:
            record = DrafterRecord(nodes=FIRST_NODES) if branches else DrafterRecord()
            self._drafters[name, branches] = record
        return record

    def _record(self, job: Job, name: str) -> JobRecord:
        records = self._jobs.get(job.id)
        if records is None:
            self._budget.welcome(job.limit - len(job.tokens), len(self._jobs))
            records = self._jobs[job.id] = {}
        record = records.get(name)
        if record is None:
            record = records[name] = JobRecord(len(job.tokens))
        return record

    def _learn_drafts(
        self, plan: Plan, drafts: Drafts, times: PassTimes, outcomes: Sequence[tuple[Job, Outcome]]
    ) -> None:
        results, excused = {job.id: outcome for job, outcome in outcomes}, {job.id for job, _ in drafts.fallbacks}
        work: dict[str, list[int]] = {}  # drafter -> steps, tokens drafted, tokens read before
        for index, (job, asks) in enumerate(zip(plan.deciding, plan.asks, strict=True)):
            outcome = results.get(job.id)
            if not asks or outcome is None:
                continue
            for ask in asks:
                record, drafter = self._record(job, ask.drafter), self._drafter(ask.drafter, index in drafts.parents)
                before = len(job.tokens) - outcome.emitted
                unread, record.read = before - record.read, before
                if outcome.maker != ask.drafter:
                    if job.id not in excused:
                        drafter.add_silence()
                    continue
                record.read += outcome.accepted
                judged = outcome.accepted + (outcome.emitted > outcome.accepted and not outcome.is_bonus)
                expected = drafter.expected(judged)
                record.add(outcome.accepted, judged, expected)
                drafter.add(ask.width, outcome, judged)
                if outcome.accepted > expected and (job.id, ask.drafter) in self._probed:
                    self._budget.encourage()
                did = work.setdefault(ask.drafter, [0, 0, 0])
                did[0] = max(did[0], outcome.depth)
                did[1] += outcome.drafted
                did[2] += unread
                break
        for name, (steps, drafted, unread) in work.items():
            costs = self._draft_costs.setdefault(name, DraftCosts())
            costs.add(times.drafters.get(name, 0.0), steps, drafted / steps, unread, self._passes)

    def _tally(self, plan: Plan) -> None:
        """Count the decisions, for each request and for the engine."""
        if len(self._reasons) != len(plan.deciding):
            return
        whole = self._statistics() if self._statistics is not None else None
        for job, asks, reason in zip(plan.deciding, plan.asks, self._reasons, strict=True):
            if job.width is None:
                width = asks[0].width if asks else 0
                job.statistics.add_choice(width, reason)
                if whole is not None:
                    whole.add_choice(width, reason)


def _within(asks: tuple[Ask, ...], room: tuple[Ask, ...]) -> tuple[Ask, ...]:
    """Asks that stood for a while, in what room there is now."""
    most = {ask.drafter: ask.width for ask in room}
    return tuple(ask._replace(width=min(ask.width, most[ask.drafter])) for ask in asks if ask.drafter in most)


def _rounded(ratio: float) -> str:
    """In steps that keep the number of different reasons small."""
    return f"{ratio:.1f}" if ratio < 2.0 else f"{min(ratio, 20.0):.0f}"
