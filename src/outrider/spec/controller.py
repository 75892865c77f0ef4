"""The width controller: how many tokens to draft for each request, 0 included, from measured costs and acceptance.

`cost_model.py` knows what rounds cost, `acceptance.py` what drafts bring, `choose.py` finds the best widths. A
decision stands for a few rounds. While it says plain, a cheap probe now and then finds out whether that is still right;
while it says draft, a plain round now and then confirms what plain decoding costs.

Never slower is kept by an account: what drafting gains or loses against plain decoding is measured in every round. What
is not known to pay (a probe, a drafter of which little was seen) is tried only as far as the account covers it.

Fixed widths are applied outside of the decision and never changed. Lookups (ngram, suffix) cost nothing to try: what
they find is cut where the next row costs more than it is expected to gain (`trim`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from outrider.draft.base import DrafterInfo
from outrider.metrics import LOSING, Outcome, RoundTimes
from outrider.spec.acceptance import Acceptance
from outrider.spec.account import Account
from outrider.spec.choose import Candidate, Choice, Setting, choose_pairs, choose_uniform
from outrider.spec.cost_model import CostModel
from outrider.types import Ask, Asks, Batch, Drafts, Job

HOLD = 8  # rounds that a decision stands
GAIN = 1.05  # what drafting must bring to begin: in a batch, requests that drift apart cost some of it
STAY = 1.02  # what it must bring to go on
LONGEST_GAP = 64  # rounds between two probes,
PROBE_SHARE = 0.004  # or as many as make a probe cost so much of the time
HORIZON = 512  # tokens of an answer that are counted on, whatever its limit is
DOUBT_DEVIATIONS = 0.5  # standard deviations that acceptance may well be worse by than it looks
MOST_PROBED = 8  # tokens that a probe drafts
REPAY = 2.0  # times what catching up costs, that the rest of the answers must gain
PLAIN_EVERY = 64  # rounds after which plain decoding is measured again
PACE_DECAY = 0.95  # of the rounds that tell how long a token takes
TREE_LEVEL = 4  # nodes of a tree for each token of depth
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)  # that a device has one shape for

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
        self._probed = -HOLD  # the round of the last probe
        self._probe_gap = HOLD  # rounds until the next one: twice as many after each that kept nothing
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
        num_jobs = len(batch.decode)
        was_drafting, self._is_drafting = self._is_drafting, False
        self._widths, self._rival = {}, 0.0
        fixed = sum([r for job, r in zip(batch.decode, batch.room, strict=True) if job.width is not None])
        rows = num_jobs + fixed
        steady = self._setting(rows, num_jobs, free)
        plain_s = steady.seconds(0, ())
        self._token_s = self._plain_token_s = plain_s / max(1, num_jobs)
        self._reason = LOOKUP
        if not free:
            return
        candidates = self._candidates(batch, free)
        best = self._best(candidates, self._setting(rows, num_jobs, free, hopeful=was_drafting), None)
        ratio = best.tokens / best.seconds * plain_s / num_jobs
        entry_s, left = self._entry_s(batch, free, best.widths), self._tokens_left(batch)
        outlook, later_s = best, plain_s
        if entry_s:  # paid once, and repaid by the rest of the answers, whose contexts grow meanwhile
            later = self._setting(rows, num_jobs, free, growth=left / 2)
            outlook, later_s = self._best(candidates, later, None), later.seconds(0, ())
        pays = bool(best.widths) and ratio >= (STAY if was_drafting else GAIN)
        pays = pays and self._repays(entry_s, left / num_jobs, outlook, later_s, num_jobs)
        is_sure = pays and self._still_pays(batch, free, outlook, later_s)
        pays = pays and (is_sure or self.account.covers(entry_s, left * self._plain_token_s))
        if pays:
            self._token_s = best.seconds / best.tokens
            self._rival = (best.tokens - num_jobs) * (1.0 - 1.0 / ratio) / len(best.widths)
            if self._fed != rows:  # a prefill shares the pass: a token keeps the value of a steady round
                best = self._best(candidates, self._setting(self._fed, num_jobs, free), self._token_s)
                self._left = 1
        self._is_drafting = pays
        self._reason = f"{PAYS if pays else LOSING}{_rounded(ratio)}x of plain"
        is_plain_due = self.costs.num_rounds - self._plain_round >= PLAIN_EVERY
        if pays and is_plain_due and self.account.pay(plain_s * (1.0 - 1.0 / ratio)):
            self._reason = MEASURE
        elif pays:
            self._widths = {batch.decode[index].id: width for index, width in best.widths.items()}
            if not self.costs.has_seen(rows + sum(best.widths.values())):
                self._left = 1  # look again at once
            elif not is_sure:
                self._left = HOLD // 4  # and soon
        else:
            self._probe(batch, free, candidates)

    def _candidates(self, batch: Batch, free: Mapping[int, str]) -> list[Candidate]:
        alone = len(batch.decode) == 1
        return [
            Candidate(index, self.acceptance.reach(batch.decode[index].id, name, batch.room[index], alone=alone))
            for index, name in free.items()
        ]

    def _tokens_left(self, batch: Batch) -> int:
        """Tokens that are left of these answers, as far as they are counted on."""
        return sum([min(job.limit - len(job.tokens), HORIZON) for job in batch.decode])

    def _best(self, candidates: Sequence[Candidate], setting: Setting, token_s: float | None) -> Choice:
        """Equal widths, unless widths of their own are clearly better: small differences are noise of estimates."""
        uniform = choose_uniform(candidates, setting, WIDTHS, token_s)
        if self._uniform or len(candidates) == 1:
            return uniform
        pairs = choose_pairs(candidates, setting, token_s)
        return pairs if pairs.gain(uniform, token_s) > GAIN else uniform

    def _still_pays(self, batch: Batch, free: Mapping[int, str], choice: Choice, plain_s: float) -> bool:
        """Whether the chosen widths gain something even if acceptance is as low as it may well be."""
        num_jobs, gained = len(batch.decode), 0.0
        for index, width in choice.widths.items():
            job_id, name = batch.decode[index].id, free[index]
            gained += sum(self.acceptance.reach(job_id, name, width, alone=num_jobs == 1, doubt=DOUBT_DEVIATIONS))
        return (num_jobs + gained) * plain_s > num_jobs * choice.seconds

    def _setting(
        self, rows: int, num_jobs: int, free: Mapping[int, str], *, hopeful: bool = False, growth: float = 0.0
    ) -> Setting:
        """hopeful: what no round has confirmed costs as little as it may. growth: of the context, until then."""
        costs, context, names = self.costs, self._context + growth, set(free.values())

        def seconds(drafted: int, rows_by_step: Sequence[float]) -> float:
            draft_s = max([costs.draft_s(name, rows_by_step, hopeful=hopeful) for name in names], default=0.0)
            return costs.pass_s(rows + drafted, num_jobs, context, hopeful=hopeful) + draft_s

        return Setting(num_jobs, seconds)

    def _entry_s(self, batch: Batch, free: Mapping[int, str], places: Collection[int]) -> float:
        """Seconds until the drafters of these jobs have caught up."""
        unread = sum([self._unread_tokens(batch.decode[place]) for place in places])
        return max([self.costs.read_s(free[place], unread, len(places)) for place in places], default=0.0)

    def _repays(self, entry_s: float, rounds: float, outlook: Choice, plain_s: float, num_jobs: int) -> bool:
        """Whether the rest of the answers gains more than it costs drafters to catch up, and what was lost before.

        rounds: of plain decoding that are left. What is hardly a gain does not count: requests of a batch that drift
        apart take it away.
        """
        gained_s = rounds * (plain_s - STAY * num_jobs * outlook.seconds / outlook.tokens)
        return entry_s == 0.0 or gained_s > REPAY * entry_s + self.account.debt

    def _unread_tokens(self, job: Job) -> int:
        """Tokens of the job that its drafter has not read; a few are part of every proposal, and do not count."""
        unread = self._unread.get(job.id, job.num_prompt - 1)
        return unread if unread > 2 else 0

    def _probe(self, batch: Batch, free: Mapping[int, str], candidates: Sequence[Candidate]) -> None:
        """Let a few requests draft, if the account covers what that loses and drafting could pay at all."""
        num_jobs = len(batch.decode)
        rested = self.costs.num_rounds - self._probed
        setting = self._setting(self._fed, num_jobs, free)
        now_s = setting.seconds(0, ())
        if not self._may_pay(batch, free, candidates, now_s):
            return
        entries = {one.place: self._entry_s(batch, free, [one.place]) for one in candidates}
        cheapest = sorted(candidates, key=lambda one: entries[one.place])[: max(1, num_jobs // 4)]
        total = 0.0
        for candidate in cheapest:
            job, name = batch.decode[candidate.place], free[candidate.place]
            width, loss = self._probe_width(candidate, setting, now_s)
            total += max(0.0, loss) + entries[candidate.place]
            is_due = rested >= self._probe_gap or PROBE_SHARE * now_s * rested >= total
            if not is_due or not self.account.covers(total, self._tokens_left(batch) * self._plain_token_s):
                break
            self._widths[job.id] = width
            if self._probed < self.costs.num_rounds:
                self._reason, self._left, self._probed = PROBE, 1, self.costs.num_rounds
                self._probe_gap = min(2 * self._probe_gap, LONGEST_GAP)
            self.acceptance.age(name, self.costs.num_rounds)

    def _may_pay(self, batch: Batch, free: Mapping[int, str], candidates: Sequence[Candidate], now_s: float) -> bool:
        """Whether some width would pay if all its drafts were kept and cost as little as they may."""
        num_jobs = len(batch.decode)
        at_best = self._setting(self._fed, num_jobs, free, hopeful=True)
        most = max([batch.room[one.place] for one in candidates])
        for width in WIDTHS:
            if width > most:
                break
            drafted = [min(width, batch.room[one.place]) for one in candidates]
            rows_by_step = [2 * len(drafted), *[len(drafted)] * (width - 1)]
            if (num_jobs + sum(drafted)) * now_s >= GAIN * num_jobs * at_best.seconds(sum(drafted), rows_by_step):
                return True
        return False

    def _probe_width(self, candidate: Candidate, setting: Setting, now_s: float) -> tuple[int, float]:
        """The width that loses least for each token it verifies, and what it loses."""
        best, num_jobs = (1, 0.0, float("inf")), setting.tokens
        verified, tokens = 0.0, 0.0
        for width, chance in enumerate(candidate.reach[:MOST_PROBED], 1):
            verified += candidate.reach[width - 2] if width > 1 else 1.0
            tokens += chance
            # what a single row costs drowns in noise, so its share of a row for every request counts
            rows_s = max(
                setting.seconds(width, ()) - now_s, (setting.seconds(round(width * num_jobs), ()) - now_s) / num_jobs
            )
            loss = rows_s + setting.seconds(0, (1,) * width) - now_s - tokens * self._token_s
            if loss / verified < best[2]:
                best = (width, loss, loss / verified)
        return best[0], best[1]

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
        kept_any = drafted_any = False
        for job, outcome in outcomes:
            if not job.drafters:
                continue
            found = self._found.pop(job.id, None) if self._found else None
            if found is not None:
                self._learn_lookup(job, found)
            if outcome.drafted and outcome.maker not in self._lookups:
                own = None if job.width is not None else job.id
                self.acceptance.add(own, outcome.maker, outcome.accepted, outcome.depth)
                drafted_any = True
                kept_any |= outcome.accepted > 0
                self._unread[job.id] = int(outcome.accepted == outcome.depth)  # it has not read its own last token
            else:
                self._unread[job.id] = self._unread.get(job.id, job.num_prompt - 1) + outcome.emitted
        if drafted_any:
            self._probe_gap = 1 if kept_any else max(HOLD, self._probe_gap)
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
        self.acceptance.add(own, found.drafter, right, min(len(found.tokens), len(emitted)), found.matched)

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
            unread = sum([self._unread_tokens(job) for job in batch.decode if name in job.wanted])
            if unread and not steps:  # it reads on, and drafts when it is through
                self._reading_s[name] = self._reading_s.get(name, 0.0) + seconds
            elif unread:
                spent_s = self._reading_s.pop(name, 0.0) + seconds
                self.costs.observe_read(name, unread, steps[0], spent_s - self.costs.draft_s(name, steps))
            elif steps and not drafts.parents:
                steps[0] += sum([self._unread.get(job.id, 0) for job in batch.decode if name in job.wanted])
                self.costs.observe_draft(name, steps, seconds)

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
