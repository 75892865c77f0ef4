"""The width controller: how many tokens to draft for each request, 0 included, from measured costs and acceptance.

`cost_model.py` knows what rounds cost, `acceptance.py` what drafts bring, `choose.py` finds the best widths, and
`outlook.py` says what those bring over the rest of the answers. A decision stands for a few rounds. While it says
plain, `explore.py` looks now and then whether that is still right; while it says draft, a plain round now and then
confirms what plain decoding costs.

Never slower is kept by an account: what drafting gains or loses against plain decoding is measured in every round.
Looks are made only as far as it covers them, and drafting begins only if it repays what was lost.

Fixed widths are applied outside of the decision and never changed. Lookups (ngram, suffix) cost nothing to try: what
they find is cut where the next row costs more than it is expected to gain (`trim`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp
from typing import NamedTuple

from outrider.draft.base import DrafterInfo
from outrider.metrics import LOSING, Outcome, RoundTimes
from outrider.spec.acceptance import Acceptance
from outrider.spec.account import Account
from outrider.spec.cost_model import CostModel
from outrider.spec.explore import UNCHANGED, Explorer
from outrider.spec.outlook import Outlook, to_catch_up
from outrider.types import Ask, Asks, Batch, Drafts, Job

HOLD = 8  # rounds that a decision stands, or as many as bring so many tokens to each request
DOUBT = 0.75  # standard deviations by which acceptance may be worse than it looks, for drafting to begin
PLAIN_EVERY = 64  # rounds after which plain decoding is measured again
PACE_DECAY = 0.95  # of the rounds that tell how long a token takes
TREE_LEVEL = 4  # nodes of a tree for each token of depth

PAYS = "drafting pays: about "
PROBE = "probing whether drafting pays"
MEASURE = "measuring plain decoding"
LOOKUP = "lookups are verified as far as that pays"


class Found(NamedTuple):
    """A lookup's proposal before it was cut. What was cut off teaches as well: the target's own tokens judge it."""

    drafter: str
    matched: int
    start: int  # length of the job's tokens before it
    tokens: list[int]


class WidthController:
    """`uniform`: whether the whole batch gets one width, as a device with a graph for each shape wants it. `trees`:
    whether the target verifies trees."""

    def __init__(
        self,
        drafters: Sequence[DrafterInfo] = (),
        *,
        uniform: bool = False,
        trees: bool = True,
        costs: CostModel | None = None,
    ) -> None:
        self.costs = costs or CostModel()
        self.acceptance = Acceptance(drafters)
        self._lookups = frozenset(info.name for info in drafters if info.lookup)
        self._uniform = uniform
        self._trees = trees
        self._unread: dict[int, int] = {}  # job id -> tokens that its drafter has not read
        self._reading_s: dict[str, float] = {}  # drafter -> seconds that it has been catching up for
        self._found: dict[int, Found] = {}  # job id -> the lookup of this round
        # a device that runs ahead of the host would have to wait for hindsight
        self._with_hindsight = frozenset(info.name for info in drafters if info.hindsight and not uniform)
        self._hindsight_from: dict[int, str] = {}  # job id -> the drafter that is asked for hindsight in this round
        # The decision that stands
        self._key: tuple[object, ...] = ()
        self._left = 0  # rounds
        self._widths: dict[int, int] = {}  # job id -> width
        self._reason = ""
        self._token_s = 0.0  # what a token is worth: the seconds of a steady round over its tokens
        self._rival = 0.0  # tokens that the drafted requests gain a round, each
        self._fed = 1  # rows of the pass without free drafts
        self._context = 0
        self._is_drafting = False  # because it pays, not as a probe
        self._widest = 0  # width of this round
        self._width_changed = False  # since the round before
        self._plain_round = 0  # number of the last round without drafts
        self._looked = 0  # the last round in which a drafter was judged
        self.account = Account()
        self._plain_token_s = 0.0  # seconds of a token of plain decoding
        self._pace = (0.0, 0.0)  # seconds and tokens of the last rounds, decayed

    # Choosing

    def choose(self, batch: Batch) -> list[Asks]:
        """For each decode job which drafters propose how much, within its room. Fixed widths stay as they are."""
        free: dict[int, str] = {}
        self._fed = sum(batch.chunks)
        for index, (job, room) in enumerate(zip(batch.decode, batch.room, strict=True)):
            self._fed += len(job.tokens) - job.cached
            if job.width is not None:
                self._fed += room
            elif room and (name := self._computing(job)) is not None:
                free[index] = name
        self._context = sum([job.cached for job in batch.jobs])
        key = (bool(batch.prefill), *[job.id for job in batch.decode])
        if key != self._key or self._left <= 0:
            self._key, self._left = key, HOLD
            self._decide(batch, free)
        self._left -= 1
        widest = max(self._widths.values(), default=0)
        self._width_changed, self._widest = widest != self._widest, widest
        if not self.costs.knows(len(batch.decode)):  # an engine without a profile: plain decoding is measured first
            self._widths, self._reason = {}, MEASURE
            return self.fixed(batch)
        return [self._asks(job, room) for job, room in zip(batch.decode, batch.room, strict=True)]

    def fixed(self, batch: Batch) -> list[Asks]:
        """Fixed widths alone, where the controller itself failed: every other request decodes plainly."""
        return [
            tuple([Ask(name, room, self._trees and bool(job.tree)) for name in job.drafters])
            if room and job.width is not None
            else ()
            for job, room in zip(batch.decode, batch.room, strict=True)
        ]

    def _asks(self, job: Job, room: int) -> Asks:
        if not room:
            return ()
        if job.width is not None:
            return tuple([Ask(name, room, self._trees and bool(job.tree)) for name in job.drafters])
        tree, width = self._trees and bool(job.tree), self._widths.get(job.id, 0)
        width = min(room, width * TREE_LEVEL if tree else width)
        asked = self._hindsight_from.get(job.id)
        asks = [
            Ask(name, room if name in self._lookups else width, tree)
            for name in job.drafters
            if width or name in self._lookups
        ]
        return tuple(asks) if asked is None else (Ask(asked, 0), *asks)

    def _computing(self, job: Job) -> str | None:
        """The job's first drafter that computes; lookups need no decision."""
        for name in job.drafters:
            if name not in self._lookups:
                return name
        return None

    def _decide(self, batch: Batch, free: Mapping[int, str]) -> None:
        was_drafting, self._is_drafting = self._is_drafting, False
        self._widths, self._hindsight_from, self._rival = {}, {}, 0.0
        num_jobs = len(batch.decode)
        fixed = sum([r for job, r in zip(batch.decode, batch.room, strict=True) if job.width is not None])
        outlook = Outlook(
            batch,
            free,
            num_jobs + fixed,
            self._context,
            self.costs,
            self.acceptance,
            self._unread,
            uniform=self._uniform,
        )
        self._token_s = self._plain_token_s = outlook.plain_s / max(1, num_jobs)
        self._reason = LOOKUP
        if not free:
            return
        candidates = outlook.candidates(doubt=0.0 if was_drafting else DOUBT)
        growth = 0.0 if was_drafting else outlook.tokens_left / 2
        setting = outlook.setting(outlook.rows, hopeful=was_drafting, growth=growth)
        best = outlook.best(candidates, setting)
        ratio = best.tokens / best.seconds * setting.seconds(0, ()) / num_jobs
        # to begin, it must repay twice what catching up takes, and what was lost before
        needed_s = 0.0 if was_drafting else outlook.entry_s(best.widths) + self.account.debt
        pays = bool(best.widths) and outlook.gain_s(best.widths, candidates) > needed_s
        self._is_drafting = pays
        self._reason = f"{PAYS if pays else LOSING}{_rounded(ratio)}x of plain"
        if not pays:
            self._look(batch, outlook)
            return
        self._token_s = best.seconds / best.tokens
        self._rival = (best.tokens - num_jobs) * (1.0 - 1.0 / ratio) / len(best.widths)
        is_plain_due = self.costs.num_rounds - self._plain_round >= PLAIN_EVERY
        if is_plain_due and self.account.pay(outlook.plain_s * (1.0 - 1.0 / ratio)):
            self._reason = MEASURE
            return
        self._left = max(1, round(HOLD * num_jobs / best.tokens))
        if self._fed != outlook.rows:  # a prefill shares the pass: a token keeps the value of a steady round
            best = outlook.best(candidates, outlook.setting(self._fed), self._token_s)
            self._left = 1
        if not self.costs.has_seen(outlook.rows + sum(best.widths.values())):
            self._left = 1  # look again at once
        self._widths = {batch.decode[index].id: width for index, width in best.widths.items()}

    def _look(self, batch: Batch, outlook: Outlook) -> None:
        """Find out whether drafting pays after all, if that is worth what it costs."""

        def affordable(seconds: float) -> bool:
            return self.account.covers(seconds, outlook.tokens_left * self._plain_token_s)

        jobs, rested = batch.decode, self.costs.num_rounds - self._looked
        judgeable = {
            place: min(self._unread.get(jobs[place].id, len(jobs[place].tokens) - 1), len(jobs[place].output))
            for place, name in outlook.free.items()
            if self._has_hindsight(jobs[place], name)
        }
        found = Explorer(outlook, self._fed, self._token_s, rested, affordable).look(judgeable)
        self._widths = {batch.decode[place].id: width for place, width in found.widths.items()}
        self._hindsight_from = {batch.decode[place].id: outlook.free[place] for place in found.hindsight}
        if self._widths or self._hindsight_from:
            self._reason, self._left = PROBE, 1
        elif found.wait is not None:
            self._left = min(self._left, found.wait)

    def _has_hindsight(self, job: Job, name: str) -> bool:
        """Whether hindsight tells the job's acceptance: a draft is kept if it is the target's own token."""
        is_certain = job.rule == "coupled" or job.params.temperature == 0.0
        return name in self._with_hindsight and is_certain and job.grammar is None

    def trim(self, drafter: str, jobs: Sequence[Job], drafts: Drafts) -> list[int]:
        """How many tokens of each lookup proposal to verify. The rest still teaches, once the target's are known."""
        counts = list(drafts.counts)
        for index, (job, proposal) in enumerate(zip(jobs, drafts.proposals(), strict=True)):
            if not proposal:
                continue
            matched = drafts.matched[index]
            self._found[job.id] = Found(drafter, matched, len(job.tokens), proposal)
            if job.width is None and index not in drafts.parents:
                counts[index] = self._worth(job, drafter, matched, len(proposal), len(jobs))
        return counts

    def _worth(self, job: Job, drafter: str, matched: int, width: int, num_jobs: int) -> int:
        """The length with the largest gain in tokens, if that is more than the next drafter would gain.

        A token is worth the seconds that one has taken lately, or takes with this proposal if that is less: the faster
        the text goes anyway, the less is a row worth that may bring another. At the price of plain decoding, wide
        passes would gain tokens and lose time.
        """
        costs, context = self.costs, self._context
        reach = self.acceptance.reach(job.id, drafter, width, alone=True, matched=matched)
        before_s = costs.pass_s(self._fed, num_jobs, context)
        tokens, lengths = 0.0, list[tuple[float, float]]()  # that each length brings, and costs
        for count in range(1, width + 1):
            tokens += reach[min(count, len(reach)) - 1]
            lengths.append((tokens, costs.pass_s(self._fed + count, num_jobs, context) - before_s))
        token_s = min([self._token_s, *[(before_s + cost_s) / (num_jobs + tokens) for tokens, cost_s in lengths]])
        if self._pace[1]:
            token_s = min(token_s, self._pace[0] / self._pace[1])
        gains = [tokens - cost_s / token_s if token_s > 0.0 else tokens for tokens, cost_s in lengths]
        rival = self._rival if job.id in self._widths else 0.0
        return gains.index(max(gains)) + 1 if max(gains, default=0.0) > rival else 0

    def repeats(self, batch: Batch) -> bool:
        """Whether the next round will most likely have the widths of this one, so that a device may be given it.

        A probe lasts one round. Plain decoding is measured for two: the first one cannot be prelaunched.
        """
        goes_on = self._left == HOLD - 1 if self._reason == MEASURE else self._reason != PROBE
        return goes_on or all(job.width is not None for job in batch.decode)

    # Learning

    def observe(
        self, batch: Batch, drafts: Drafts, times: RoundTimes, outcomes: Sequence[tuple[Job, Outcome]]
    ) -> dict[tuple[int, str], int]:
        """What a round cost and brought. Returns how many requests got which width, and why."""
        self._learn_costs(batch, drafts, times, outcomes)
        if self._reason == MEASURE and not self._skip_timing(times):
            self._left = 0  # measured: decide again
        self._balance(batch, times, outcomes)
        if times.steady and not times.skip:
            emitted = sum([outcome.emitted for _, outcome in outcomes])
            self._pace = (PACE_DECAY * self._pace[0] + times.round_s, PACE_DECAY * self._pace[1] + emitted)
        rested = max(0, self.costs.num_rounds - self._looked - 1)
        outdated = 1.0 - exp(-rested / UNCHANGED)  # the chance that acceptance has changed since it was seen
        looked = {told.job.id for told in drafts.hindsight if told.chains}
        fixed: dict[str, list[tuple[int, int]]] = {}  # drafter -> chains of fixed widths: they teach the pool alone
        for job, outcome in outcomes:
            if not job.drafters:
                continue
            found = self._found.pop(job.id, None) if self._found else None
            if found is not None:
                self._learn_lookup(job, found)
            if outcome.drafted and outcome.maker not in self._lookups:
                chain = (outcome.accepted, outcome.depth)
                if job.width is not None:
                    fixed.setdefault(outcome.maker, []).append(chain)
                else:
                    self.acceptance.add(job.id, outcome.maker, [chain], outdated=outdated)
                self._looked = self.costs.num_rounds
                self._unread[job.id] = int(outcome.accepted == outcome.depth)  # it has not read its own last token
            elif job.id in looked:
                self._unread[job.id] = outcome.emitted + 1
            else:
                self._unread[job.id] = self._unread.get(job.id, job.num_prompt - 1) + outcome.emitted
        for name, chains in fixed.items():
            self.acceptance.add(None, name, chains, outdated=outdated)
        for told in drafts.hindsight:
            own = None if told.job.done else told.job.id  # nothing is kept of a job that is over
            self.acceptance.add(own, told.drafter, told.chains, outdated=outdated, overlapping=True)
            self._looked = self.costs.num_rounds
        self._found.clear()
        return self._count(batch)

    def _balance(self, batch: Batch, times: RoundTimes, outcomes: Sequence[tuple[Job, Outcome]]) -> None:
        """Book what the round's drafts gained or lost against plain decoding.

        What rows cost is taken from the costs, this round included: its own time alone is mostly noise, and a machine
        that is busy for a moment would look like a loss by drafting.
        """
        gained = 0.0
        drafted = sum([outcome.drafted for _, outcome in outcomes])
        is_free = all(job.width is None for job, outcome in outcomes if outcome.drafted)
        if self._hindsight_from and not drafted:
            gained = -times.draft_s
        if drafted and is_free and not times.skip:
            rows, num_jobs = times.num_fed, len(batch.decode)
            plain_s = self.costs.pass_s(rows - drafted, num_jobs, self._context)
            pass_s = self.costs.pass_s(rows, num_jobs, self._context)
            kept = sum([outcome.accepted for _, outcome in outcomes])
            if self._reason == PROBE and num_jobs > 1:
                kept = 0  # a few requests that end earlier do not make the batch faster
            gained = kept * self._plain_token_s - times.draft_s - (pass_s - plain_s)
        self.account.add(times.round_s, gained, self._plain_token_s * len(batch.decode))

    def _learn_lookup(self, job: Job, found: Found) -> None:
        emitted = job.tokens[found.start :]
        right = 0
        while right < min(len(found.tokens), len(emitted)) and found.tokens[right] == emitted[right]:
            right += 1
        own = None if job.width is not None else job.id
        judged = min(len(found.tokens), len(emitted))
        self.acceptance.add(own, found.drafter, [(right, judged)], found.matched)

    def _learn_costs(
        self, batch: Batch, drafts: Drafts, times: RoundTimes, outcomes: Sequence[tuple[Job, Outcome]]
    ) -> None:
        if self._skip_timing(times):
            return
        if times.steady and not any(drafts.counts):
            self._plain_round = self.costs.num_rounds
        if times.missed_prelaunch:  # the device did not measure drafting: assume its usual cost
            makers = {outcome.maker for _, outcome in outcomes if outcome.depth} - self._lookups
            draft_s = sum([self.costs.draft_s(name, _requests_by_step(outcomes, name)) for name in makers])
            if times.steady:
                self.costs.observe_pass(times.num_fed, len(batch.decode), self._context, times.round_s - draft_s)
            return
        if times.steady:
            self.costs.observe_pass(times.num_fed, len(batch.decode), self._context, times.pass_s)
        else:
            self.costs.extend(times.num_fed, times.pass_s)
        for name, seconds in times.drafters.items():
            if name in self._lookups:
                continue
            steps = _requests_by_step(outcomes, name)
            looked = [told.job for told in drafts.hindsight if told.drafter == name and told.chains]
            if looked:
                self._learn_reading(name, looked, seconds, outcomes)
                continue
            drafted = [job for job, outcome in outcomes if outcome.maker == name]
            unread = sum([to_catch_up(job, self._unread) for job in (drafted or batch.decode) if name in job.wanted])
            if unread and not steps:  # it reads on, and drafts when it is through
                self._reading_s[name] = self._reading_s.get(name, 0.0) + seconds
            elif unread:
                spent_s = self._reading_s.pop(name, 0.0) + seconds
                self.costs.observe_read(name, unread, steps[0], spent_s - self.costs.draft_s(name, steps))
            elif steps and not drafts.parents:
                steps[0] += sum([self._unread.get(job.id, 0) for job in batch.decode if name in job.wanted])
                self.costs.observe_draft(name, steps, seconds)

    def _learn_reading(
        self, name: str, jobs: Sequence[Job], seconds: float, outcomes: Sequence[tuple[Job, Outcome]]
    ) -> None:
        """It read all but the last token of these jobs, and drafted for none."""
        emitted = {job.id: outcome.emitted for job, outcome in outcomes}
        unread = [self._unread.get(job.id, len(job.tokens) - emitted.get(job.id, 0)) - 1 for job in jobs]
        tokens = max(0, sum(unread) - len(jobs))  # the step has a row for each job
        self.costs.observe_read(name, tokens, len(jobs), seconds - self.costs.draft_s(name, [len(jobs)]))

    def _skip_timing(self, times: RoundTimes) -> bool:
        """Whether the times of this round must not be learned: a kernel was compiled, or the device waited for the host
        because the width has changed, which says nothing about the cost of the new width."""
        return times.skip or (times.missed_prelaunch and self._width_changed)

    def _count(self, batch: Batch) -> dict[tuple[int, str], int]:
        """The decisions of this round, counted for each request and for all."""
        counts: dict[tuple[int, str], int] = {}
        for job, room in zip(batch.decode, batch.room, strict=True):
            if room and job.width is None:
                choice = (min(room, self._widths.get(job.id, 0)), self._reason)
                job.statistics.add_choice(*choice)
                counts[choice] = counts.get(choice, 0) + 1
        return counts

    def forget(self, job: Job) -> None:
        self.acceptance.forget(job.id)
        self._unread.pop(job.id, None)
        self._found.pop(job.id, None)
        self._widths.pop(job.id, None)
        self._hindsight_from.pop(job.id, None)

    def holds(self, job: Job) -> bool:
        """Whether anything is remembered of the job."""
        return job.id in self.acceptance or job.id in self._unread or job.id in self._found or job.id in self._widths


def _requests_by_step(outcomes: Sequence[tuple[Job, Outcome]], drafter: str) -> list[int]:
    """How many requests the drafter made a first, a second, ... token for."""
    steps: list[int] = []
    for _, outcome in outcomes:
        if outcome.maker == drafter:
            steps += [0] * (outcome.depth - len(steps))
            for step in range(outcome.depth):
                steps[step] += 1
    return steps


def _rounded(ratio: float) -> str:
    """In steps that keep the number of different reasons small."""
    return f"{ratio:.1f}" if ratio < 2.0 else f"{min(ratio, 20.0):.0f}"
