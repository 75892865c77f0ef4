"""The width that pays, per request and round, from what was measured (`acceptance.py`, `costs.py`): 0 where plain decoding
wins.

A decision stands for a few rounds. What is not known is tried, and what lost is tried again, at a bounded cost: a share
of the time so far and of the answers asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from outrider.config import WidthConfig
from outrider.metrics import Outcome, PassTimes, Statistics
from outrider.spec.acceptance import DrafterRecord, JobRecord
from outrider.spec.choice import Batch, Best, Group, Prospect, best_choice
from outrider.spec.costs import CostCurve, DraftCosts
from outrider.types import Ask, Drafts, Job, Plan

GUESSED_STEP = 0.1  # a draft step as a share of a target pass, before one was measured
ENOUGH = 8.0  # judged tokens that make a drafter known
START = 4  # tokens drafted as long as costs are unknown
MOST_HOLD = 8  # rounds a decision stands
UNSURE = 32.0  # judged tokens after which a drafter is known half
MARGIN = 1.01  # drafting must be better than plain by so much
SHORT = 16  # an answer with fewer tokens to come starts no unknown drafter
LONG = 1000  # tokens of an answer that count for what may be tried on it


class AdaptiveController:
    def __init__(self, config: WidthConfig | None = None, statistics: Callable[[], Statistics] | None = None) -> None:
        self._config = config or WidthConfig()
        self._statistics = statistics
        self._decoding = CostCurve()
        self._drafters: dict[str, DrafterRecord] = {}
        self._draft_costs: dict[str, DraftCosts] = {}
        self._jobs: dict[int, dict[str, JobRecord]] = {}
        self._elapsed = 0.0
        self._spent = 0.0
        self._balance = 0.0
        self._allowance = 0.0
        # the decision that stands
        self._deciding: list[Job] = []
        self._rooms: list[tuple[Ask, ...]] = []
        self._asks: list[tuple[Ask, ...]] = []
        self._reasons: list[str] = []
        self._rows = 0
        self._left = 0
        self._hold = 1
        self._is_settled = False
        self._ratio = 1.0
        self._early_s = self._early_passes = 0.0

    # ---- choosing

    def choose(self, jobs: Sequence[Job], rooms: Sequence[tuple[Ask, ...]], rows: int) -> Sequence[tuple[Ask, ...]]:
        if self._left > 0 and rows == self._rows and jobs == self._deciding:
            self._left -= 1
            if rooms == self._rooms:
                return self._asks
            return [_within(asks, room) for asks, room in zip(self._asks, rooms, strict=True)]
        if jobs != self._deciding or not self._is_settled:
            self._hold = 1
        else:
            self._hold = min(MOST_HOLD, self._hold + 0.25)
        self._deciding, self._rooms, self._rows = list(jobs), list(rooms), rows
        self._left = 0
        self._decide(jobs, rooms, rows)
        return self._asks

    def _decide(self, jobs, rooms, rows):
        fed = rows + sum([len(job.tokens) - job.cached for job in jobs])
        steady = fed == len(jobs)
        curve = self._decoding
        if len(jobs) == 1:
            self._is_settled = curve.knows(0, 1) or jobs[0].limit - len(jobs[0].tokens) < 64
        else:
            self._is_settled |= curve.knows(0, 2.2 * len(jobs))
        step_s = partial(self._step_s, GUESSED_STEP * curve.seconds(len(jobs)))
        batch = Batch(float(fed), float(len(jobs)))
        self._asks = [room if job.width is not None else () for job, room in zip(jobs, rooms, strict=True)]
        self._reasons = [""] * len(jobs)
        groups, free = self._groups(jobs, rooms, batch, curve.seconds(fed), step_s)
        plain_rate = batch.tokens / (curve.seconds(batch.rows) + batch.draft_s)
        most_rows = max(2.0 * curve.most_rows, batch.rows + START * len(jobs))
        best = best_choice(groups, batch, curve.seconds, step_s, most_rows)
        if best is None:
            return
        hold = int(self._hold)
        self._ratio = best.rate / plain_rate
        rate = max(best.rate, plain_rate)
        bold = best_choice(groups, batch, curve.hopeful, step_s, most_rows)
        if bold.rate > 1.03 * rate and not curve.knows(bold.rows / 1.1, bold.rows * 1.1):
            loss = curve.seconds(bold.rows) + bold.draft_s - bold.tokens / rate
            if loss <= 0.25 * self._allowed(next(iter(bold.widths[0])), rate, plain_rate):
                self._spent += max(0.0, loss)
                best = bold
                hold = 1
        drafts = best.rate > MARGIN * plain_rate
        ratio = best.rate / plain_rate
        if drafts and steady and curve.is_known and not self._is_settled:
            for index in free:
                self._reasons[index] = "measuring what plain decoding costs"
            return
        reason = (
            f"drafting pays: about {_rounded(ratio)}x of plain"
            if drafts
            else f"plain: drafting would give {_rounded(ratio)}x"
        )
        for group, widths in zip(groups, best.widths, strict=True):
            for index in group.members:
                self._set(index, rooms[index], widths if drafts else {}, reason)
        self._left = hold - 1
        if drafts and not curve.knows(best.rows * 0.8, best.rows * 1.25):
            self._left = 0
        resting = [index for index in free if not self._asks[index]]
        for index in resting:
            self._reasons[index] = self._reasons[index] or "plain: others draft first"
        if resting and steady and self._is_settled:
            self._probe(jobs, rooms, resting, curve, batch, max(best.rate, plain_rate), plain_rate, step_s)

    def _groups(self, jobs, rooms, batch, pass_s, step_s):
        """Jobs that may draft, by what they promise, and the indices of all whose width is free."""
        groups: dict[tuple, Group] = {}
        free: list[int] = []
        starters: dict[str, int] = {}
        levels: dict[str, list[int]] = {}
        for drafter in self._drafters.values():
            drafter.look()
        for index, (job, room) in enumerate(zip(jobs, rooms, strict=True)):
            if not room:
                continue
            records = [self._record(job, ask.drafter) for ask in room]
            for record in records:
                if record.at != len(job.tokens) and record.look(len(job.tokens)):
                    self._hold = 1
            if job.width is not None:
                record, name, width = records[0], room[0].drafter, room[0].width
                batch.tokens += sum(self._drafter(name).outlook(record.shift, width)[:width])
                batch.rows += width
                counts = levels.setdefault(name, [])
                counts += [0] * (width - len(counts))
                for level in range(width):
                    counts[level] += 1
                continue
            free.append(index)
            key = []
            for ask, record in zip(room, records, strict=True):
                name, width = ask.drafter, ask.width
                if self._is_new(name):
                    starters[name] = starters.get(name, 0) + 1
                    if starters[name] > max(1, len(jobs) // 4) or job.limit - len(job.tokens) < SHORT:
                        continue
                if not self._is_settled:
                    width = min(width, START)
                entry_s = self._entry_s(job, name, len(job.tokens) - record.read)
                key.append((name, width, record.shift, round(16 * entry_s / pass_s)))
            if not key:
                continue
            group = groups.get(tuple(key))
            if group is not None:
                group.members.append(index)
                continue
            prospects = {}
            for name, width, shift, entry in key:
                drafter = self._drafter(name)
                answers = drafter.answers
                reach = [answers * length for length in drafter.lengths(width)[:width]]
                prospects[name] = Prospect(
                    drafter.outlook(shift, width)[:width], reach, 1.0, answers, entry * pass_s / 16
                )
            groups[tuple(key)] = Group([index], prospects)
        for name, counts in levels.items():
            batch.draft_s += sum([step_s(name, count) for count in counts])
        return list(groups.values()), free

    def _probe(self, jobs, rooms, resting, curve, batch, rate, plain_rate, step_s) -> None:
        """Let some resting jobs draft, as far as the budget goes."""
        pass_s = curve.seconds(batch.rows)
        waiting = [index for index in resting if self._record(jobs[index], rooms[index][0].drafter).due <= len(jobs[index].tokens)]
        waiting.sort(key=lambda index: self._staleness(jobs[index], rooms[index][0].drafter, pass_s))
        levels: dict[str, list[int]] = {}
        rows = batch.rows
        waiting = [index for index in waiting if self._hope(rooms[index][0], len(resting), batch, curve, step_s) > 1.03 * plain_rate]
        for index in waiting[: max(1, len(jobs) // 4)]:
            job, ask = jobs[index], rooms[index][0]
            name = ask.drafter
            allowed = self._allowed(name, rate, plain_rate)
            record, drafter = self._record(job, name), self._drafter(name)
            if job.limit - len(job.tokens) < SHORT:
                continue
            counts = levels.setdefault(name, [])
            counts += [0] * (ask.width - len(counts))
            chances = drafter.outlook(record.shift, ask.width)
            answers = drafter.answers
            draft_s = self._read_s(name, len(job.tokens) - record.read)
            gained = judged = 0.0
            best = None
            pass_s = curve.seconds(rows)
            for width in range(1, ask.width + 1):
                judged += chances[width - 2] if width > 1 else 1.0
                gained += chances[width - 1] * answers
                had = counts[width - 1]
                draft_s += step_s(name, had + 1.0) - (step_s(name, had) if had else 0.0)
                total_s = curve.seconds(rows + width * answers) + draft_s
                loss = max(0.0, total_s - pass_s - gained / rate)
                value = (loss + 0.02 * pass_s / len(jobs)) / judged
                if best is None or value < best[0]:
                    best = value, width, loss, total_s
            _, width, loss, total_s = best
            if loss > (1.0 if loss < 0.3 * total_s else 0.5) * allowed:
                return
            for level in range(width):
                counts[level] += 1
            rows += width * answers
            record.due = len(job.tokens) + record.gap
            record.gap = max(1.0, min(record.gap * 2, loss * len(jobs) / (0.006 * pass_s)))
            record.is_probed = True
            self._spent += loss
            self._left = 0
            self._set(index, rooms[index], {name: width}, "probe")

    def _hope(self, ask, num_jobs, batch, curve, step_s) -> float:
        """Tokens per second if everybody drafted and all drafts were kept."""
        best, draft_s = 0.0, 0.0
        step = step_s(ask.drafter, num_jobs)
        for width in range(1, ask.width + 1):
            rate = (batch.tokens + num_jobs * width) / (curve.seconds(batch.rows + num_jobs * width) + batch.draft_s + step * width)
            best = max(best, rate)
        return best

    def _allowed(self, name: str, rate: float, plain_rate: float) -> float:
        """Seconds that trying something may cost now."""
        share = self._config.probing * self._elapsed
        unsure = max(UNSURE / (UNSURE + self._drafter(name).num_judged), min(1.0, (self._ratio - 0.5) / 0.3))
        allowance = self._allowance * unsure
        return min(share + allowance / rate - self._spent, share + allowance / plain_rate + self._balance)

    def _staleness(self, job: Job, name: str, pass_s: float) -> float:
        unread = len(job.tokens) - self._record(job, name).read
        return (0.05 * pass_s + self._read_s(name, unread)) / (1.0 + unread) ** 0.5

    def _set(self, index, room, widths, reason) -> None:
        tree = bool(self._deciding[index].tree)
        self._asks[index] = tuple(
            Ask(ask.drafter, widths[ask.drafter], tree) for ask in room if widths.get(ask.drafter)
        )
        self._reasons[index] = reason

    def _is_new(self, name: str) -> bool:
        costs = self._draft_costs.get(name)
        return (
            costs is None or not costs.steps.is_known or not self._is_settled or self._drafter(name).num_judged < ENOUGH
        )

    def _entry_s(self, job: Job, name: str, unread: int) -> float:
        """Seconds of catching up, spread over what is left of the answer: a round has to repay its part."""
        if unread <= 8:
            return 0.0
        remaining = max(1, job.limit - len(job.tokens))
        return self._read_s(name, unread) * min(1.0, 3.0 / remaining)

    def _read_s(self, name: str, unread: int) -> float:
        costs = self._draft_costs.get(name)
        return 0.0 if costs is None or costs.read_s is None or unread <= 2 else costs.read_s * unread

    def _step_s(self, guess: float, name: str, jobs: float) -> float:
        costs = self._draft_costs.get(name)
        return costs.step_s(jobs, self._decoding) if costs is not None and costs.steps.is_known else guess

    def _drafter(self, name: str) -> DrafterRecord:
        record = self._drafters.get(name)
        if record is None:
            record = self._drafters[name] = DrafterRecord()
        return record

    def _record(self, job: Job, name: str) -> JobRecord:
        records = self._jobs.get(job.id)
        if records is None:
            records = self._jobs[job.id] = {}
            self._allowance += 0.017 * min(LONG, job.limit - len(job.tokens)) / (1.0 + 0.25 * (len(self._jobs) - 1))
        record = records.get(name)
        if record is None:
            record = records[name] = JobRecord()
            record.at = len(job.tokens)
        return record

    # ---- learning

    def learn(self, plan: Plan, drafts: Drafts, times: PassTimes, outcomes: Sequence[tuple[Job, Outcome]]) -> None:
        pass_s = times.score_s + times.judge_s
        seconds = pass_s + times.draft_s
        self._elapsed += seconds
        if times.steady:
            self._decoding.add(times.num_fed, pass_s)
        else:
            self._decoding.hint(times.num_fed, pass_s)
        batch = len(plan.deciding)
        emitted = sum([outcome.emitted for _, outcome in outcomes])
        plain_s = self._decoding.seconds(batch)
        if times.steady:
            self._early_s += seconds
            self._early_passes += emitted / batch
        elif batch:
            self._early_s += times.draft_s
            self._early_passes += emitted / batch - 1.0
        if self._is_settled:
            self._balance += self._early_passes * plain_s - self._early_s
            self._early_s = self._early_passes = 0.0
        if any(drafts.counts) or any(plan.widths):
            self._learn_drafts(plan, drafts, times, dict([(job.id, outcome) for job, outcome in outcomes]))
        self._tally(plan)

    def _learn_drafts(self, plan, drafts, times, outcomes) -> None:
        work: dict[str, list[int]] = {}
        for index, (job, asks) in enumerate(zip(plan.deciding, plan.asks, strict=True)):
            outcome = outcomes.get(job.id)
            if outcome is None or not asks or not asks[0].width:
                continue
            name = asks[0].drafter
            record, drafter = self._record(job, name), self._drafter(name)
            before = len(job.tokens) - outcome.emitted
            if not outcome.drafted:
                if not drafts.fallbacks:
                    drafter.add_silence()
                continue
            judged = outcome.accepted + outcome.refused
            record.add(outcome.accepted, judged, drafter.expected(judged))
            drafter.add(asks[0].width, outcome)
            if record.is_probed:
                record.is_probed = False
                if outcome.accepted > drafter.expected(judged):
                    record.gap, record.due = 2, 0
            did = work.setdefault(name, [0, 0, 0])
            did[0] = max(did[0], outcome.depth)
            did[1] += outcome.drafted
            did[2] += before - record.read
            record.read = before + outcome.accepted
        for name, (steps, rows, unread) in work.items():
            costs = self._draft_costs.get(name)
            if costs is None:
                costs = self._draft_costs[name] = DraftCosts()
            costs.add(times.drafters.get(name, 0.0), steps, rows / steps, unread)

    def _tally(self, plan: Plan) -> None:
        if len(self._reasons) != len(plan.deciding):
            return
        whole = self._statistics() if self._statistics is not None else None
        for job, asks, reason in zip(plan.deciding, plan.asks, self._reasons, strict=True):
            width = asks[0].width if asks else 0
            if whole is not None:
                whole.widths[width] = whole.widths.get(width, 0) + 1

    def forget(self, job: Job) -> None:
        self._jobs.pop(job.id, None)


def _within(asks: tuple[Ask, ...], room: tuple[Ask, ...]) -> tuple[Ask, ...]:
    if not room:
        return ()
    return tuple(ask._replace(width=min(ask.width, room[0].width)) for ask in asks)


def _rounded(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio < 3 else f"{ratio:.0f}"
