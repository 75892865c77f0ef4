"""The width controller: how many tokens to draft for each request, 0 included, from measured costs and acceptance.

`cost_model.py` knows what rounds cost, `acceptance.py` what drafts bring, `choose.py` finds the best widths, and
`outlook.py` says what those bring over the rest of the answers. A decision stands for a few rounds. While it says
plain, a request is drafted for now and then, to see whether that is still right: as far as it may bring more than it
costs, and as far as a credit of 1.5 % of the time covers it. That is what keeps `auto` from being slower than plain.

Fixed widths are applied outside of the decision and never changed. Lookups (ngram, suffix) cost nothing to try: what
they find is cut where the next row costs more than it is expected to gain (`trim`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import exp
from typing import NamedTuple

from outrider.draft.base import DrafterInfo
from outrider.metrics import LOSING, Outcome, RoundTimes
from outrider.spec.acceptance import Acceptance
from outrider.spec.cost_model import CostModel
from outrider.spec.outlook import Outlook, to_catch_up
from outrider.types import Ask, Asks, Batch, Drafts, Job

HOLD = 8  # rounds that a decision stands, or as many as bring so many tokens to each request
DOUBT = 0.75  # standard deviations by which acceptance may be worse than it looks, for drafting to begin
BETTER = 0.16  # the chance that acceptance is better than it looks by a standard deviation
ALLOWED_LOSS = 0.015  # of the time: what probes may cost
PROBE_SHARE = 0.01  # of the time since a draft was rejected: what a probe may cost that promises nothing
MOST_CREDIT = 4.0  # plain rounds that the credit may come to
UNCHANGED = 80.0  # rounds of plain decoding after which a third of the evidence is left: texts change
PLAIN_ROUNDS = 3  # of plain decoding that are timed before drafts, on a device that is given rounds ahead
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
    """`uniform`: whether the whole batch gets one width, as a device with a graph for each shape, that is given rounds
    ahead, wants it. `trees`: whether the target verifies trees."""

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
        self._found: dict[int, Found] = {}  # job id -> the lookup of this round
        # The decision that stands
        self._key: tuple[object, ...] = ()
        self._left = 0  # rounds
        self._widths: dict[int, int] = {}  # job id -> width
        self._reason = ""
        self._is_drafting = False  # because it pays, not as a probe
        self._token_s = 0.0  # what a token is worth: the seconds of a steady round over its tokens
        self._plain_token_s = 0.0  # the same of plain decoding
        self._rival = 0.0  # tokens that the drafted requests gain a round, each
        self._fed = 1  # rows of the pass without free drafts
        self._context = 0
        self._widest = 0  # width of this round
        self._width_changed = False  # since the round before
        self._credit = 0.0  # seconds that probes may cost
        self._rested_s = 0.0  # seconds since a draft was rejected: where a probe is kept, the next follows at once
        self._faded = 0  # the round up to which evidence has faded
        self._measured = Counter[int]()  # rounds that measured plain decoding, by requests
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
            self._asks(job, room) if job.width is not None else ()
            for job, room in zip(batch.decode, batch.room, strict=True)
        ]

    def _asks(self, job: Job, room: int) -> Asks:
        if not room:
            return ()
        tree = self._trees and bool(job.tree)
        if job.width is not None:
            return tuple([Ask(name, room, tree) for name in job.drafters])
        width = self._widths.get(job.id, 0)
        width = min(room, width * TREE_LEVEL if tree else width)
        return tuple(
            [
                Ask(name, room if name in self._lookups else width, tree)
                for name in job.drafters
                if width or name in self._lookups
            ]
        )

    def _computing(self, job: Job) -> str | None:
        """The job's first drafter that computes; lookups need no decision."""
        for name in job.drafters:
            if name not in self._lookups:
                return name
        return None

    def _decide(self, batch: Batch, free: Mapping[int, str]) -> None:
        was_drafting, self._is_drafting = self._is_drafting, False
        self._widths, self._rival, self._reason = {}, 0.0, LOOKUP
        num_jobs, uniform = len(batch.decode), self._uniform
        fixed = [room for job, room in zip(batch.decode, batch.room, strict=True) if job.width is not None]
        rows = num_jobs + sum(fixed)  # of a steady pass, without free drafts
        outlook = Outlook(batch, free, rows, self._context, self.costs, self.acceptance, self._unread, uniform=uniform)
        self._token_s = self._plain_token_s = outlook.plain_s / max(1, num_jobs)
        if not free:
            return
        candidates = outlook.candidates(doubt=0.0 if was_drafting else DOUBT)
        setting = outlook.setting(rows) if was_drafting else outlook.later()
        best = outlook.best(candidates, setting)
        ratio = best.tokens / best.seconds * setting.seconds(0, ()) / num_jobs
        # to begin, it must repay twice what catching up takes, and what was lost before
        needed_s = 0.0 if was_drafting else outlook.entry_s(best.widths) - min(0.0, self._credit)
        self._is_drafting = bool(best.widths) and outlook.gain_s(best.widths, candidates) > needed_s
        self._reason = f"{PAYS if self._is_drafting else LOSING}{_rounded(ratio)}x of plain"
        if not self._is_drafting:
            self._probe(batch, outlook)
            return
        self._token_s = best.seconds / best.tokens
        self._rival = (best.tokens - num_jobs) * (1.0 - 1.0 / ratio) / len(best.widths)
        measured = self._measured[num_jobs]
        if uniform and not batch.prefill and measured <= PLAIN_ROUNDS:
            # The profile is one of a single request, whose rounds the device was not given ahead: of a batch it may be
            # wrong by more than drafts gain. One round more, since the first waits for the host, which says nothing.
            self._reason, self._left = MEASURE, PLAIN_ROUNDS + 1 - measured
            return
        self._left = max(1, round(HOLD * num_jobs / best.tokens))
        if self._fed != rows:  # a prefill shares the pass: a token keeps the value of a steady round
            best = outlook.best(candidates, outlook.setting(self._fed), self._token_s)
            self._left = 1
        self._widths = {batch.decode[index].id: width for index, width in best.widths.items()}

    def _probe(self, batch: Batch, outlook: Outlook) -> None:
        """Draft for a few requests in this round, if what that may bring is worth what it costs.

        Evidence fades meanwhile: after a long rest little is known, so a probe promises more.
        """
        rested, self._faded = self.costs.num_rounds - self._faded, self.costs.num_rounds
        for name in set(outlook.free.values()):
            self.acceptance.fade(name, exp(-rested / UNCHANGED))
        if not outlook.may_pay():
            return
        hopeful = outlook.candidates(doubt=-1.0)
        worth_s = BETTER * outlook.gain_s(outlook.best(hopeful, outlook.later()).widths, hopeful)
        allowed_s = self._credit + ALLOWED_LOSS * outlook.tokens_left * self._token_s
        due_s = PROBE_SHARE * self._rested_s
        known = max([self.acceptance.evidence(name) for name in outlook.free.values()])
        cost_s = judged = 0.0
        for one in sorted(outlook.candidates(), key=lambda one: outlook.entry_s([one.place])):
            width, one_s, one_judged = outlook.cheapest_probe(one, self._fed, self._token_s)
            cost_s, judged = cost_s + one_s, judged + one_judged
            if cost_s > min(allowed_s, max(due_s, worth_s * judged / (judged + known))):
                break
            self._widths[batch.decode[one.place].id] = width
            self._reason, self._left = PROBE, 1

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
        """Whether the next round will most likely have the widths of this one, so that a device may be given it."""
        goes_on = self._left > 0 if self._reason == MEASURE else self._reason != PROBE
        return goes_on or all(job.width is not None for job in batch.decode)

    # Learning

    def observe(
        self, batch: Batch, drafts: Drafts, times: RoundTimes, outcomes: Sequence[tuple[Job, Outcome]]
    ) -> dict[tuple[int, str], int]:
        """What a round cost and brought. Returns how many requests got which width, and why."""
        self._learn_costs(batch, drafts, times, outcomes)
        self._measured[len(batch.decode)] += self._reason == MEASURE
        self._balance(batch, times, outcomes)
        if times.steady and not times.skip:
            emitted = sum([outcome.emitted for _, outcome in outcomes])
            self._pace = (PACE_DECAY * self._pace[0] + times.round_s, PACE_DECAY * self._pace[1] + emitted)
        fixed: dict[str, list[tuple[int, int]]] = {}  # drafter -> chains of fixed widths: they teach the pool alone
        for job, outcome in outcomes:
            if not job.drafters:
                continue
            found = self._found.pop(job.id, None) if self._found else None
            if found is not None:
                self._learn_lookup(job, found)
            if outcome.drafted and outcome.maker not in self._lookups:
                self._faded = self.costs.num_rounds
                chain = (outcome.accepted, outcome.depth)
                if job.width is not None:
                    fixed.setdefault(outcome.maker, []).append(chain)
                else:
                    self.acceptance.add(job.id, outcome.maker, [chain])
                self._unread[job.id] = int(outcome.accepted == outcome.depth)  # it has not read its own last token
            else:
                self._unread[job.id] = self._unread.get(job.id, job.num_prompt - 1) + outcome.emitted
        for name, chains in fixed.items():
            self.acceptance.add(None, name, chains)
        self._found.clear()
        return self._count(batch)

    def _balance(self, batch: Batch, times: RoundTimes, outcomes: Sequence[tuple[Job, Outcome]]) -> None:
        """Book what the round's drafts gained or lost against plain decoding.

        What rows cost is taken from the costs, this round included: its own time alone is mostly noise, and a machine
        that is busy for a moment would look like a loss by drafting.
        """
        gained, num_jobs = ALLOWED_LOSS * times.round_s, len(batch.decode)
        drafted = sum([outcome.drafted for _, outcome in outcomes])
        is_refused = any(outcome.refused for _, outcome in outcomes)
        self._rested_s = 0.0 if is_refused else self._rested_s + times.round_s
        if drafted and not times.skip and all(job.width is None for job, outcome in outcomes if outcome.drafted):
            kept = sum([outcome.accepted for _, outcome in outcomes])
            if self._reason == PROBE and num_jobs > 1:
                kept = 0  # a few requests that end earlier do not make the batch faster
            rows, context = times.num_fed, self._context
            rows_s = self.costs.pass_s(rows, num_jobs, context) - self.costs.pass_s(rows - drafted, num_jobs, context)
            gained += kept * self._plain_token_s - times.draft_s - rows_s
        self._credit = min(self._credit + gained, MOST_CREDIT * num_jobs * self._plain_token_s)

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
        # A kernel was compiled, or the device waited for the host because the width has changed: that says nothing of
        # what the new width costs.
        if times.skip or (times.missed_prelaunch and self._width_changed):
            return
        drafters, pass_s = times.drafters, times.pass_s
        if times.missed_prelaunch:  # the device did not measure drafting: assume its usual cost
            makers = {outcome.maker for _, outcome in outcomes if outcome.depth} - self._lookups
            drafted_s = [self.costs.draft_s(name, _requests_by_step(outcomes, name)) for name in makers]
            drafters, pass_s = {}, times.round_s - sum(drafted_s)
        if times.steady:
            self.costs.observe_pass(
                times.num_fed, len(batch.decode), self._context, pass_s, is_measured=self._reason == MEASURE
            )
        elif not times.missed_prelaunch:
            self.costs.extend(times.num_fed, pass_s)
        for name, seconds in drafters.items():
            steps = _requests_by_step(outcomes, name)
            if name in self._lookups or not steps or drafts.parents:
                continue
            jobs = [job for job in batch.decode if name in job.wanted]
            if not any(to_catch_up(job, self._unread) for job in jobs):
                steps[0] += sum([self._unread.get(job.id, 0) for job in jobs])
                self.costs.observe_draft(name, steps, seconds)
            elif self.costs.is_profile:
                unread = sum([to_catch_up(job, self._unread) for job in jobs])
                self.costs.profile_read(name, unread, seconds - self.costs.draft_s(name, steps))

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
        for held in (self._unread, self._found, self._widths):
            held.pop(job.id, None)

    def holds(self, job: Job) -> bool:
        """Whether anything is remembered of the job."""
        return job.id in self.acceptance or any(job.id in held for held in (self._unread, self._found, self._widths))


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
