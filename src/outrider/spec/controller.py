"""The width with the most tokens per second, from what was measured: acceptance by place, passes by rows, drafts by step.

    tokens per second = (one token per job + what drafts add) / (target pass of so many rows + draft steps)

Drafted tokens are taken in the order of their chance to be kept, whosever they are, and the best beginning of that list
is drafted; nothing, where plain decoding wins. What is not known is tried at a bounded cost, and what lost is tried
again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from outrider.config import WidthConfig
from outrider.metrics import Outcome, PassTimes, Statistics
from outrider.spec.acceptance import DrafterRecord, JobRecord
from outrider.spec.costs import CostCurve, DraftCosts
from outrider.types import Ask, Drafts, Job, Plan

GUESSED_STEP = 0.1  # a draft step as a share of a target pass, before one was measured
ENOUGH = 8.0  # judged tokens that make a drafter known
MOST_HOLD = 8  # rounds a decision stands


class Group(NamedTuple):
    """Jobs alike: they get the same width."""

    members: list[int]
    drafter: str
    chances: list[float]  # that a proposal is kept up to each place
    rows: list[float]  # expected rows of each place
    entry_s: float  # seconds of catching up, for each job, as far as this round has to repay them


class Decision(NamedTuple):
    width: int
    reason: str


class AdaptiveController:
    def __init__(
        self, config: WidthConfig | None = None, statistics: Callable[[], Statistics] | None = None
    ) -> None:
        self._config = config or WidthConfig()
        self._statistics = statistics
        self._decoding = CostCurve()
        self._reading = CostCurve()
        self._drafters: dict[str, DrafterRecord] = {}
        self._draft_costs: dict[str, DraftCosts] = {}
        self._jobs: dict[int, dict[str, JobRecord]] = {}
        self._elapsed = 0.0
        self._spent = 0.0
        self._balance = 0.0
        self._fails = 0
        # the decision that stands
        self._deciding: list[Job] = []
        self._rooms: list[tuple[Ask, ...]] = []
        self._asks: list[tuple[Ask, ...]] = []
        self._reasons: list[str] = []
        self._rows = 0
        self._left = 0
        self._hold = 1
        self._probed: JobRecord | None = None
        self._probe_at = 0.0

    # ---- choosing

    def choose(self, jobs: Sequence[Job], rooms: Sequence[tuple[Ask, ...]], rows: int) -> Sequence[tuple[Ask, ...]]:
        if self._left > 0 and rows == self._rows and jobs == self._deciding:
            self._left -= 1
            if rooms == self._rooms:
                return self._asks
            return [_within(asks, room) for asks, room in zip(self._asks, rooms, strict=True)]
        if jobs != self._deciding:
            self._hold = 1
        else:
            self._hold = min(MOST_HOLD, self._hold + 1)
        self._deciding, self._rooms, self._rows = list(jobs), list(rooms), rows
        self._left = 0
        self._decide(jobs, rooms, rows)
        return self._asks

    def _decide(self, jobs, rooms, rows):
        curve = self._reading if rows and self._reading.is_known else self._decoding
        base = rows + sum([len(job.tokens) - job.cached for job in jobs])
        steady = base == len(jobs)
        tokens = float(len(jobs))
        groups: dict[tuple, Group] = {}
        levels: dict[str, list[float]] = {}
        num_new: dict[str, int] = {}
        self._asks = [room if job.width is not None else () for job, room in zip(jobs, rooms, strict=True)]
        self._reasons = [""] * len(jobs)
        resting: list[int] = []
        for index, (job, room) in enumerate(zip(jobs, rooms, strict=True)):
            if not room:
                continue
            ask = room[0]
            name, width = ask.drafter, ask.width
            record = self._record(job, name)
            if record.at != len(job.tokens):
                if record.look(len(job.tokens)):
                    self._hold = 1
                    self._fails = 0
            if job.width is not None:
                drafter = self._drafter(name)
                chances = drafter.outlook(record.shift, width)
                tokens += sum(chances[:width])
                base += width
                for level in range(width):
                    _count(levels, name, level, 1.0)
                continue
            resting.append(index)
            if self._is_new(name):
                num_new[name] = num_new.get(name, 0) + 1
                if num_new[name] > max(1, len(jobs) // 4):
                    continue
            unread = len(job.tokens) - record.read
            entry_s = self._entry_s(job, name, unread)
            key = (name, width, record.shift, round(entry_s / curve.seconds(base) * 50))
            group = groups.get(key)
            if group is not None:
                group.members.append(index)
                continue
            drafter = self._drafter(name)
            chances = drafter.outlook(record.shift, width)[:width]
            answers = drafter.answers
            lengths = drafter.lengths(width)
            groups[key] = Group([index], name, chances, [answers * length for length in lengths], entry_s)
        step_s = GUESSED_STEP * curve.seconds(len(jobs))
        items = []
        for number, group in enumerate(groups.values()):
            items += [(-chance, number, level) for level, chance in enumerate(group.chances)]
        items.sort()
        group_list = list(groups.values())
        pass_s = curve.seconds(base)
        draft_s = 0.0
        for name, counts in levels.items():
            for count in counts:
                draft_s += self._step_s(name, count, step_s)
        plain_rate = best_rate = tokens / (pass_s + draft_s)
        best, alternative, alternative_rate = 0, 0, 0.0
        now_rows = float(base)
        for place, (chance, number, level) in enumerate(items, 1):
            group = group_list[number]
            count = len(group.members)
            had = levels.get(group.drafter, ())
            had = had[level] if level < len(had) else 0.0
            draft_s += self._step_s(group.drafter, had + count, step_s) - self._step_s(group.drafter, had, step_s)
            _count(levels, group.drafter, level, count)
            if level == 0:
                draft_s += group.entry_s * count
            now_rows += group.rows[level] * count
            tokens -= chance * group.rows[level] * count
            rate = tokens / (curve.seconds(now_rows) + draft_s)
            if rate > best_rate:
                best, best_rate = place, rate
            if rate > alternative_rate:
                alternative, alternative_rate = place, rate
        widths = [0] * len(group_list)
        for _, number, level in items[:best]:
            widths[number] = level + 1
        ratio = best_rate / plain_rate
        chosen: dict[int, int] = {}
        for group, width in zip(group_list, widths, strict=True):
            for index in group.members:
                chosen[index] = width
        resting = [index for index in resting if not chosen.get(index)]
        if best:
            reason = f"drafting pays: about {_rounded(ratio)}x of plain"
        else:
            reason = f"plain: drafting would give {_rounded(alternative_rate / plain_rate)}x"
        for index, width in chosen.items():
            self._set(index, rooms[index], width, reason)
        for index in resting:
            self._reasons[index] = reason if not best else "plain: other requests gain more"
        self._left = self._hold - 1
        if steady and best and curve.is_known and not curve.knows(0, 1 if base == 1 else 2 * base):
            for index in chosen:
                self._set(index, rooms[index], 0, "measuring what plain decoding costs")
            self._left = 0
            return
        if resting and steady:
            self._probe(jobs, rooms, resting, curve, base, best_rate, step_s)

    def _probe(self, jobs, rooms, resting, curve, base, rate, step_s) -> None:
        """Let one resting job draft, if that costs little enough."""
        def staleness(index: int) -> float:
            job = jobs[index]
            record = self._record(job, rooms[index][0].drafter)
            unread = len(job.tokens) - record.read
            return (1.0 + self._read_s(rooms[index][0].drafter, unread) / curve.seconds(base)) / (1.0 + unread)

        index = min(resting, key=staleness)
        job, ask = jobs[index], rooms[index][0]
        name = ask.drafter
        record, drafter = self._record(job, name), self._drafter(name)
        chances = drafter.outlook(record.shift, ask.width)
        answers = drafter.answers
        pass_s = curve.seconds(base)
        entry_s = self._read_s(name, len(job.tokens) - record.read)
        draft_s, gained, judged = entry_s, 0.0, 0.0
        best = None
        for width in range(1, ask.width + 1):
            judged += chances[width - 2] if width > 1 else 1.0
            gained += chances[width - 1] * answers
            draft_s += self._step_s(name, 1.0, step_s)
            loss = max(0.0, curve.seconds(base + width * answers) + draft_s - pass_s - gained / rate)
            value = (loss + 0.02 * pass_s) / judged
            if best is None or value < best[0]:
                best = value, width, loss
        _, width, loss = best
        share = self._config.probing
        remaining = job.limit - len(job.tokens)
        allowed = share * self._elapsed + 2.0 * pass_s
        if self._spent + loss > allowed or self._balance - loss < -0.02 * self._elapsed - 4 * pass_s:
            return
        self._spent += loss
        self._left = 0
        self._set(index, rooms[index], width, "probe")

    def _set(self, index, room, width, reason) -> None:
        ask = room[0]
        job = self._deciding[index]
        self._asks[index] = (Ask(ask.drafter, width, bool(job.tree)),) if width else ()
        self._reasons[index] = reason

    def _is_new(self, name: str) -> bool:
        costs = self._draft_costs.get(name)
        return costs is None or not costs.steps.is_known or self._drafter(name).num_judged < ENOUGH

    def _entry_s(self, job: Job, name: str, unread: int) -> float:
        """Seconds of catching up, spread over what is left of the answer: a round has to repay its part."""
        if unread <= 8:
            return 0.0
        remaining = max(1, job.limit - len(job.tokens))
        return self._read_s(name, unread) * min(1.0, 3.0 / remaining)

    def _read_s(self, name: str, unread: int) -> float:
        costs = self._draft_costs.get(name)
        return 0.0 if costs is None or costs.read_s is None or unread <= 2 else costs.read_s * unread

    def _step_s(self, name: str, jobs: float, guess: float) -> float:
        if jobs <= 0.0:
            return 0.0
        costs = self._draft_costs.get(name)
        return costs.steps.seconds(jobs) if costs is not None and costs.steps.is_known else guess

    def _drafter(self, name: str) -> DrafterRecord:
        record = self._drafters.get(name)
        if record is None:
            record = self._drafters[name] = DrafterRecord()
        return record

    def _record(self, job: Job, name: str) -> JobRecord:
        records = self._jobs.get(job.id)
        if records is None:
            records = self._jobs[job.id] = {}
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
        curve = self._decoding if times.steady else self._reading
        curve.add(times.num_fed, pass_s)
        batch = len(plan.deciding)
        emitted = sum([outcome.emitted for _, outcome in outcomes])
        plain_s = self._decoding.seconds(batch)
        if times.steady:
            self._balance += emitted * plain_s / max(1, batch) - seconds
        else:
            self._balance += (emitted - batch) * plain_s / max(1, batch) - times.draft_s
        if any(drafts.counts):
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
                drafter.add_silence()
                continue
            judged = outcome.accepted + outcome.refused
            record.add(outcome.accepted, judged, drafter.expected(judged))
            drafter.add(asks[0].width, outcome)
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


def _count(levels: dict[str, list[float]], name: str, level: int, count: float) -> None:
    counts = levels.setdefault(name, [])
    while len(counts) <= level:
        counts.append(0.0)
    counts[level] += count


def _within(asks: tuple[Ask, ...], room: tuple[Ask, ...]) -> tuple[Ask, ...]:
    if not room:
        return ()
    return tuple(ask._replace(width=min(ask.width, room[0].width)) for ask in asks)


def _rounded(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio < 3 else f"{ratio:.0f}"
