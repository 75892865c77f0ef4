"""The width that pays, per request and round, from what was measured: 0 where plain decoding wins.

`knowledge.py` learns (with `acceptance.py` and `costs.py`), `survey.py` says what that means for the jobs at hand,
`choice.py` computes the best widths from it, `budget.py` says what may be tried. A decision stands for a few rounds.
Requests that rest are tried again now and then, and so are widths and trees that nothing is known about, if they look
good.

Drafters that look text up are another matter: what they found decides how many rows they get (`lookups.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from outrider.config import WidthConfig
from outrider.metrics import LOSING, Outcome, PassTimes, Statistics
from outrider.spec.choice import Batch, Best, Group, best_choice, hope, plain_rate
from outrider.spec.knowledge import NEAR, Knowledge
from outrider.spec.lookups import Lookups
from outrider.spec.probe import Candidate, Probes, cheapest
from outrider.spec.survey import SHORT, Offer, Situation, Survey
from outrider.spec.width import Prices
from outrider.types import Ask, Drafts, Job, Plan

NOTABLE = 1.03  # what is not known is tried when it may be better by so much
LIKELY = 0.85  # of what a batch could bring at most without drafts: what brings more needs no comparison
SURE = 4.0  # samples of a pass, where they differ by chance
SURE_OF_CHAINS = 48.0  # judged tokens, before trees are tried
CHAIN_EVERY = 4  # decisions for trees, one is for a chain: they learn apart
LONG_AGO = 256  # rounds after which plain passes are measured again, and trees tried again
LONGEST_HOLD = 16.0  # rounds a decision stands
LONGEST_REST = 48.0  # the same, of one not to draft: nothing is learned meanwhile, and looking costs as well
DOUBTED = 4  # rounds that are drafted on in doubt
LONGEST_DELAY = 2  # rounds it stands when jobs come and go
MORE_TRIES = 2  # rounds that a try goes on where rounds are queued: the first takes longer than the others
MOST_ATTEMPTS = 3  # rounds that an unknown drafter is asked, whatever is expected of it
WORTH_TRYING = 100  # tokens to come, for that

FIRST_TRY = "plain: a few other requests try the draft first"
NEW = "plain: a new request waits for the next decision"
UNKNOWN = "trying a draft that nothing is known of"
MEASURING = "measuring what plain decoding costs"
TRYING = "trying a width that was not measured"
BRANCHING = "trying a tree"
CHECKING = "checking that a tree is better than a chain"
UNSURE = "drafting may pay: too little was seen to tell"
PROBING = "probing whether drafting pays by now"
LOOKING = "what was looked up is judged as far as that pays"


Rooms = list[tuple[Ask, ...]]


class Found(NamedTuple):
    """A choice, and why it was made if not for its rate."""

    groups: Sequence[Group]
    best: Best
    reason: str | None = None


class AdaptiveController:
    """`statistics`: where the decisions for all requests are counted; `lookups`: drafters that look text up; `prices`:
    what a device says of itself; `promised`: how much of drafters' chains was kept elsewhere. Rounds confirm that, or
    not."""

    def __init__(
        self,
        config: WidthConfig | None = None,
        statistics: Callable[[], Statistics] | None = None,
        lookups: Collection[str] = (),
        prices: Prices | None = None,
        promised: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        self._known = Knowledge((config or WidthConfig()).probing, promised)
        if prices is not None:
            self._known.expect(prices)
        self._survey = Survey(self._known)
        self._lookups = Lookups(frozenset(lookups), self._known.passes.seconds, self._known.turn_s)
        self._statistics = statistics
        # The decision that stands
        self._jobs: list[Job] = []
        self._rooms: list[tuple[Ask, ...]] = []
        self._rows = 0
        self._asks: list[tuple[Ask, ...]] = []
        self._reasons: list[str] = []
        self._probed: list[tuple[int, str]] = []  # (job, drafter)
        self._left = 0  # rounds
        self._hold = 1.0
        self._is_fresh = False  # made for the round under way
        self._pays = False  # drafts, since that is known to be better,
        self._gain = 0.0  # by so many tokens of a round and job
        self._repeats = False  # says the same as the one before
        self._rests = False  # nobody drafts
        self._num_trees = 0  # decisions for trees
        self._attempts: dict[str, int] = {}  # drafter -> rounds it was tried, knowing nothing

    def choose(self, jobs: Sequence[Job], rooms: Sequence[tuple[Ask, ...]], rows: int) -> Sequence[tuple[Ask, ...]]:
        if not self._lookups.names:
            return self._choose(jobs, rooms, rows)
        looking, others = self._apart(jobs, rooms)
        fed = rows + sum([len(job.tokens) - job.cached for job in jobs])
        asked = self._lookups.choose(jobs, looking, fed)
        if not any(others):
            self._jobs, self._reasons, self._is_fresh = [], [LOOKING] * len(jobs), True
            return asked
        chosen = self._choose(jobs, others, rows)
        drafted = zip(jobs, chosen, strict=True) if self._pays else ()
        self._lookups.rivals = {job.id: self._gain for job, asks in drafted if asks}
        return [_in_order(asks + own, room) for asks, own, room in zip(chosen, asked, rooms, strict=True)]

    def still_rests(self, jobs: Sequence[Job], rows: int) -> bool:
        if self._left <= 0 or not self._rests or rows != self._rows or jobs != self._jobs:
            return False
        if self._lookups.names and not self._lookups.nap(jobs):
            return False
        self._left -= 1
        self._is_fresh = True
        return True

    def _apart(self, jobs: Sequence[Job], rooms: Sequence[tuple[Ask, ...]]) -> tuple[Rooms, Rooms]:
        """Rooms of those who look text up, where the width is free; and of all others."""
        looking: Rooms = []
        others: Rooms = []
        for job, room in zip(jobs, rooms, strict=True):
            is_free = job.width is None and not job.tree  # of trees nothing can be cut
            own, rest = self._lookups.split(room) if is_free else ((), room)
            looking.append(own)
            others.append(rest)
        return looking, others

    def _choose(self, jobs: Sequence[Job], rooms: Sequence[tuple[Ask, ...]], rows: int) -> Sequence[tuple[Ask, ...]]:
        self._is_fresh = True
        is_same = jobs == self._jobs
        if self._left > 0 and rows == self._rows and (is_same or self._take_over(jobs, rooms)):
            self._left -= 1
            return [_within(asks, room) for asks, room in zip(self._asks, rooms, strict=True)]
        before = self._asks
        self._jobs, self._rooms, self._rows = list(jobs), list(rooms), rows
        self._asks = [room if job.width is not None else () for job, room in zip(jobs, rooms, strict=True)]
        self._reasons, self._probed, self._left, self._pays = [""] * len(jobs), [], 0, False
        if not self._known.knows_plain:
            self._hold = 1.0
        elif not is_same:  # others come: more often again, but not as if nothing was known
            self._hold = max(1.0, self._hold / 8.0)
        now = self._survey.look(self._jobs, self._rooms, rows)
        if now.has_changed:
            self._hold = 1.0
        self._decide(now)
        self._repeats, self._rests = self._asks == before, not any(self._asks)
        longest = LONGEST_REST if self._rests else LONGEST_HOLD
        self._hold = min(longest, 2.0 * self._hold if self._repeats else self._hold + 0.25)
        return self._asks

    def _take_over(self, jobs: Sequence[Job], rooms: Sequence[tuple[Ask, ...]]) -> bool:
        """Whether the decision can stand a little longer though some jobs left and came; those who came rest."""
        places = {job.id: place for place, job in enumerate(self._jobs)}
        known = [places.get(job.id) for job in jobs]
        if 8 * known.count(None) > len(jobs) or 8 * len(jobs) < 7 * len(self._jobs):
            return False
        self._asks = [
            self._asks[place] if place is not None else room if job.width is not None else ()
            for job, room, place in zip(jobs, rooms, known, strict=True)
        ]
        self._reasons = [
            self._reasons[place] if place is not None else NEW if room and job.width is None else ""
            for job, room, place in zip(jobs, rooms, known, strict=True)
        ]
        self._jobs, self._rooms, self._left = list(jobs), list(rooms), min(self._left, LONGEST_DELAY)
        self._rests = not any(self._asks)
        return True

    def worth(self, drafter: str, jobs: Sequence[Job], drafts: Drafts) -> Sequence[int]:
        return self._lookups.worth(drafter, jobs, drafts)

    def rests(self, jobs: Sequence[Job]) -> bool:
        looks = [[name in self._lookups.names for name in job.drafters] for job in jobs]
        if not all(self._lookups.rests(job) for job, looking in zip(jobs, looks, strict=True) if any(looking)):
            return False
        rest = (self._left > 0 or self._repeats) and not any(ask.width for asks in self._asks for ask in asks)
        return rest or all(map(all, looks))

    def stands(self, *, surely: bool = False) -> bool:
        return self._left > 0 or (self._pays and (self._repeats or not surely))

    def learn(self, plan: Plan, drafts: Drafts, times: PassTimes, outcomes: Sequence[tuple[Job, Outcome]]) -> None:
        if self._lookups.names:
            self._lookups.learn(times, outcomes)
        self._known.learn(
            plan, drafts, times, outcomes, self._probed, self._is_fresh and self._pays, self._lookups.names
        )
        if self._is_fresh and len(self._reasons) == len(plan.deciding):
            self._tally(plan)
        self._is_fresh = False

    def forget(self, job: Job) -> None:
        self._known.forget(job)
        self._lookups.forget(job)

    def _tally(self, plan: Plan) -> None:
        """Count the decisions, for each request and for the engine."""
        counts: dict[tuple[int, str], int] = {}
        for job, asks, reason in zip(plan.deciding, plan.asks, self._reasons, strict=True):
            if reason:
                choice = (asks[0].width if asks else 0, reason)
                job.statistics.add_choice(*choice)
                counts[choice] = counts.get(choice, 0) + 1
        if self._statistics is not None:
            for (width, reason), times in counts.items():
                self._statistics().add_choice(width, reason, times)

    def _decide(self, now: Situation) -> None:
        """Fill in asks and reasons."""
        known = self._known
        for view in now.views:
            self._reasons[view.place] = FIRST_TRY
        groups = self._survey.groups(now, trees=False)
        best = best_choice(groups, now.batch, known.passes.seconds, known.draft_s, now.most_rows)
        if best is None:
            return
        now.rate = best.rate
        found = self._bolder(now, Found(groups, best))
        if found.reason is None:
            found = self._branching(now, found)
        ratio = found.best.rate / now.plain_rate
        drafts = ratio > known.budget.margin(now.plain_rate) and (found.reason is not None or self._repays(now, found))
        if not drafts and self._is_untried(now):
            found, drafts = found._replace(reason=UNKNOWN), True
        elif not drafts and found.reason is None and (doubted := self._in_doubt(now)) is not None:
            self._give(doubted.groups, doubted.best.places, UNSURE)
            self._left = DOUBTED - 1
            return
        elif drafts and now.is_steady and known.passes.is_known and not known.knows_plain:
            if len(now.jobs) == 1 or found.best.rate < LIKELY * known.passes.most_per_second:
                self._give(groups, [], MEASURING)
                self._left = int(known.queues)
                return
            known.is_surely_slower = known.knows_plain = True
        if drafts:
            self._give(
                found.groups, found.best.places, found.reason or f"drafting pays: about {_rounded(ratio)}x of plain"
            )
        else:
            self._give(groups, [], f"{LOSING}{_rounded(ratio)}x")
        rows, self._pays = found.best.rows, drafts and found.reason is None and known.knows_plain
        self._gain = found.best.tokens * (1.0 - 1.0 / ratio) / len(now.jobs)
        if drafts and known.queues and now.is_steady and found.reason != BRANCHING:
            self._left = MORE_TRIES
        if found.reason is None and (not drafts or known.passes.knows(rows / NEAR**2, rows * NEAR**2)):
            self._left = int(self._hold) - 1
            if now.is_steady and known.knows_plain and known.budget.is_due:
                if drafts and self._doubts_plain(ratio):
                    self._measure_plain(now, groups)
                elif not now.is_saving:
                    self._probe(now, groups)

    def _in_doubt(self, now: Situation) -> Found | None:
        """A choice that would pay if requests were as much better as they may well be, and that can be afforded."""
        known = self._known
        if not now.is_steady or not known.knows_plain or known.queues:  # where rounds are queued, a turn is dear
            return None
        if self._allowed(now) <= 0.0:
            return None
        views = [
            view._replace(offers=tuple([self._doubting(now.jobs[view.place], offer) for offer in view.offers]))
            for view in now.views
        ]
        groups = self._survey.groups(now, trees=False, views=views)
        best = best_choice(groups, now.batch, known.passes.seconds, known.draft_s, now.most_rows)
        if best is None or best.rate < known.budget.margin(now.plain_rate) * now.plain_rate:
            return None
        tokens = now.batch.tokens + sum(
            sum(known.drafter(name).outlook(known.record(now.jobs[place], name).shift, count))
            for group, places in zip(groups, best.places, strict=True)
            for place in group.members
            for name, count in places.items()
        )
        loss = known.passes.seconds(best.rows) + best.draft_s - tokens / now.plain_rate
        loss = self._entry_s(groups, best) + DOUBTED * max(0.0, loss)
        if loss > 0.5 * self._allowed(now):
            return None
        known.budget.spend(loss)
        return Found(groups, best)

    def _doubting(self, job: Job, offer: Offer) -> Offer:
        return offer._replace(shift=offer.shift + self._known.record(job, offer.drafter).doubt)

    def _is_untried(self, now: Situation) -> bool:
        """Whether nothing is known of a drafter, and there is time enough to use it if it is good."""
        names = {
            offer.drafter
            for place, offers in now.views
            for offer in offers
            if not self._known.knows_steps(offer.drafter) and now.room(place) >= WORTH_TRYING
        }
        names = {name for name in names if self._attempts.get(name, 0) < MOST_ATTEMPTS}
        for name in names:
            self._attempts[name] = self._attempts.get(name, 0) + 1
        return bool(names)

    def _bolder(self, now: Situation, found: Found) -> Found:
        """Something that was not measured and may be better, if it can be afforded."""
        passes, allowed = self._known.passes, self._allowed(now)
        if allowed <= 0.0:
            return found
        bold = best_choice(found.groups, now.batch, passes.hopeful, self._known.hopeful_draft_s, now.most_rows)
        if bold is None:
            return found
        is_known = passes.samples(bold.rows / NEAR, bold.rows * NEAR) > min(SURE, 40.0 * passes.noise)
        if is_known and self._known.is_sure_of_drafts:
            return found
        rate = max(now.rate, now.plain_rate)
        loss = passes.seconds(bold.rows) + bold.draft_s + self._entry_s(found.groups, bold) - bold.tokens / rate
        loss += self._known.turn_s(len(now.jobs))
        if bold.rate < NOTABLE * rate:
            return found
        if loss > 0.35 * allowed:
            now.is_saving = loss < 0.6 * allowed
            return found
        self._known.budget.spend(loss)
        return Found(found.groups, bold, TRYING)

    def _branching(self, now: Situation, found: Found) -> Found:
        """Trees, where they are known to do better; or a try of them."""
        known = self._known
        names = {
            offer.drafter for _, offers in now.views for offer in offers if offer.may_branch and not offer.must_branch
        }
        if not known.knows_plain or found.best.rate < now.plain_rate:
            return found
        if not all(known.drafter(name).num_judged >= SURE_OF_CHAINS for name in names) or not names:
            return found
        groups = self._survey.groups(now, trees=True)
        best = best_choice(groups, now.batch, known.passes.seconds, known.draft_s, now.most_rows)
        if best is None or best.rate < NOTABLE * found.best.rate:
            return found
        measured = known.trees.over(known.chains)
        if measured is not None and measured > NOTABLE:
            self._num_trees += 1
            return Found(groups, best) if self._num_trees % CHAIN_EVERY else found._replace(reason=CHECKING)
        if measured is not None and known.num_rounds - known.tree_round < LONG_AGO:
            return found
        loss = 0.3 * best.tokens / best.rate
        if loss > 0.25 * self._allowed(now):
            return found
        known.budget.spend(loss)
        return Found(groups, best, BRANCHING)

    def _entry_s(self, groups: Sequence[Group], best: Best) -> float:
        """Seconds that catching up takes for a choice."""
        return sum(
            self._known.read_s(self._jobs[place], name)
            for group, places in zip(groups, best.places, strict=True)
            for name, count in places.items()
            if count
            for place in group.members
        )

    def _repays(self, now: Situation, found: Found) -> bool:
        """Whether the rest of the answers repays what catching up costs, and half as much again."""
        entry_s = self._entry_s(found.groups, found.best)
        if entry_s == 0.0:
            return True
        plain, best = now.plain_rate, found.best.rate
        if not now.is_steady:  # beside prompts much is cheap that will not be so later
            known, num_jobs = self._known, float(len(now.jobs))
            batch = Batch(num_jobs, num_jobs)
            later = best_choice(found.groups, batch, known.passes.seconds, known.draft_s, now.most_rows)
            plain, best = plain_rate(batch, known.plain_s, known.draft_s), 0.0 if later is None else later.rate
        left = sum(now.room(place) for place in range(len(now.jobs)))
        return best > 0.0 and left * (1.0 / plain - 1.0 / best) > 1.5 * entry_s

    def _doubts_plain(self, ratio: float) -> bool:
        """Whether plain passes were measured too seldom, or too long ago, to be sure that they are slower."""
        known = self._known
        if ratio < 1.0 + 4.0 * known.passes.noise:
            return known.plain_samples(len(self._jobs)) < SURE
        never = known.is_surely_slower and not known.plain_round
        return ratio < 2.0 and (never or known.num_rounds - known.plain_round > LONG_AGO)

    def _measure_plain(self, now: Situation, groups: Sequence[Group]) -> None:
        loss = now.pass_s - now.batch.tokens / now.rate + self._known.turn_s(len(now.jobs))
        if loss <= 0.5 * self._allowed(now):
            self._give(groups, [], MEASURING)
            self._left = int(self._known.queues)  # then a second one can be queued behind the first, and is quicker
            self._known.budget.wait(loss, now.pass_s)

    def _probe(self, now: Situation, groups: Sequence[Group]) -> None:
        """Let a few jobs ask a drafter that rests, as far as the budget goes."""
        known = self._known
        if self._allowed(now) <= 0.0:
            return
        if hope(groups, now.batch, known.passes.hopeful, known.hopeful_draft_s) < NOTABLE * now.plain_rate:
            return  # not even if all drafts were kept
        resting = [
            (view.place, offer)
            for view in now.views
            for offer in view.offers
            if now.room(view.place) >= SHORT and all(ask.drafter != offer.drafter for ask in self._asks[view.place])
        ]
        resting.sort(key=lambda entry: self._reluctance(now, *entry))
        others, rate = Probes(now.batch.rows, {}), max(now.rate, now.plain_rate)
        first, total, turn_s = 0.0, 0.0, known.turn_s(len(now.jobs))
        for place, offer in resting[: max(1, len(now.jobs) // 4)]:
            job, drafter = now.jobs[place], known.drafter(offer.drafter)
            chances, entry_s = drafter.outlook(offer.shift, offer.width), known.read_s(job, offer.drafter)
            candidate = Candidate(offer.drafter, chances, drafter.answers, entry_s)
            probe = cheapest(candidate, others, known.passes.seconds, known.draft_s, rate, len(now.jobs))
            allowed = self._allowed(now) * (1.0 if probe.loss_s < 0.3 * probe.seconds else 0.5)
            loss_s = probe.loss_s if self._probed else probe.loss_s + turn_s
            if loss_s > allowed or (total and loss_s > 0.4 * first):  # the first may pay the draft steps, and the turn
                break
            others = others.plus(offer.drafter, probe.width)
            first, total = first or loss_s, total + loss_s
            self._probed.append((job.id, offer.drafter))
            widths = {ask.drafter: ask.width for ask in self._asks[place]}
            self._ask(place, {**widths, offer.drafter: probe.width}, {}, PROBING)
        if self._probed:
            self._left = 0
            known.budget.wait(total, now.pass_s)

    def _reluctance(self, now: Situation, place: int, offer: Offer) -> tuple[int, int]:
        """Who has little to catch up comes first, then who was not asked for long."""
        job, known = now.jobs[place], self._known
        return round(50.0 * known.read_s(job, offer.drafter) / now.pass_s), -known.unread(job, offer.drafter)

    def _allowed(self, now: Situation) -> float:
        """Seconds that a try may lose."""
        offers = next(view.offers for view in now.views if view.offers)
        judged = min(self._known.drafter(offer.drafter).num_judged for offer in offers)
        return self._known.budget.allowed(now.rate, now.plain_rate, judged)

    def _give(self, groups: Sequence[Group], places: Sequence[Mapping[str, int]], reason: str) -> None:
        """Decide for all jobs of the groups; without places they rest."""
        for number, group in enumerate(groups):
            nodes = {name: prospect.nodes for name, prospect in group.prospects.items()}
            for place in group.members:
                self._ask(place, places[number] if places else {}, nodes, reason)

    def _ask(self, place: int, places: Mapping[str, int], nodes: Mapping[str, float], reason: str) -> None:
        tree = bool(self._jobs[place].tree)
        asks = []
        for name, most, _ in self._rooms[place]:
            if places.get(name):
                each = nodes.get(name, 1.0)
                asks.append(Ask(name, min(most, round(places[name] * each)), tree or each > 1.0))
        self._asks[place], self._reasons[place] = tuple(asks), reason


def _within(asks: tuple[Ask, ...], room: tuple[Ask, ...]) -> tuple[Ask, ...]:
    """Asks that stood for a while, in what room there is now."""
    most = {ask.drafter: ask.width for ask in room}
    return tuple(ask._replace(width=min(ask.width, most[ask.drafter])) for ask in asks if ask.drafter in most)


def _in_order(asks: tuple[Ask, ...], room: tuple[Ask, ...]) -> tuple[Ask, ...]:
    """In the order in which drafters are asked."""
    names = [ask.drafter for ask in room]
    return tuple(sorted(asks, key=lambda ask: names.index(ask.drafter)))


def _rounded(ratio: float) -> str:
    """In steps that keep the number of different reasons small."""
    return f"{ratio:.1f}" if ratio < 2.0 else f"{min(ratio, 20.0):.0f}"
