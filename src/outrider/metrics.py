"""Counters of speculation, per request and for the engine: what was drafted, what was kept, what it cost.

Memory is bounded: outcomes grow with the widest draft, cost points with the row counts seen. Nothing here decides;
the width chooser and people read it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

LOSING = "plain: drafting would give about "  # how a reason for width 0 begins that names the speed-up
EXACT_ROWS = 64  # passes of more rows share a cost point per power of two


@dataclass(slots=True)
class RoundTimes:
    """Seconds that one round spent in each verb (drafting includes catching up), and what it was made of.

    `steady` rounds fed no prompt: only those say what a token costs.
    """

    draft_s: float
    score_s: float
    judge_s: float
    draft_steps: int
    num_fed: int
    steady: bool
    drafters: dict[str, float] = field(default_factory=dict)  # seconds of each drafter
    skip: bool = False  # a kernel was compiled or a graph captured: the times do not predict other rounds
    missed_prelaunch: bool = False  # the device waited for the host, so only the time of the whole round is known
    host_s: float = 0.0  # everything else that a round is: scheduling, stop conditions, delivery
    device_s: tuple[float, float] | None = None  # the device's own times of drafting and of the rest of the round

    def end(self, seconds: float, drafters: dict[str, float], makers: Collection[str]) -> None:
        """Set the times when the round is over. seconds: of the whole round on the host's clock. drafters: the part of
        each drafter. makers: the names of the drafters whose tokens were verified.

        With prelaunched passes the host's clock measures only the launches, so the device's times replace it.
        """
        self.drafters, self.draft_s = drafters, sum(drafters.values())
        self.host_s = max(0.0, seconds - self.draft_s - self.score_s - self.judge_s)
        if self.device_s is not None:
            self.draft_s, self.score_s = self.device_s
            self.judge_s = self.host_s = 0.0
            self.drafters = dict.fromkeys(makers, self.draft_s / max(1, len(makers)))

    @property
    def pass_s(self) -> float:
        """What a round takes beside its drafts."""
        return self.score_s + self.judge_s + self.host_s

    @property
    def round_s(self) -> float:
        return self.draft_s + self.pass_s


class Outcome(NamedTuple):
    """What a round did for one job, in tokens. Of a chain, `depth` is `drafted`."""

    drafted: int
    depth: int  # tokens on the longest path
    accepted: int  # kept and emitted: a stop may cut
    refused: int  # judged and not kept
    emitted: int
    is_bonus: bool  # whether a token came after the last draft
    maker: str  # who drafted, "" for nobody

    @classmethod
    @lru_cache(maxsize=4096)  # there are few different ones, and every job has one in every round
    def of_chain(cls, drafted: int, accepted: int, emitted: int, maker: str = "") -> Outcome:
        kept = min(accepted, emitted)
        refused = 1 if accepted < drafted and emitted > accepted else 0
        return cls(drafted, drafted, kept, refused, emitted, emitted > drafted, maker)

    @classmethod
    def of_tree(cls, parents: Sequence[int], path: Sequence[int], emitted: int, maker: str = "") -> Outcome:
        """Siblings that stood before a kept draft were refused, and all children where the path ended."""
        depths: list[int] = []
        for parent in parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        kept, refused, is_leaf, node = path[:emitted], 0, True, -1
        for following in [*kept, len(parents)] if emitted > len(path) else kept:
            children = [child for child in range(node + 1, len(parents)) if parents[child] == node]
            refused += sum(child < following for child in children)
            is_leaf, node = not children, following
        is_bonus = emitted > len(path) and is_leaf
        return cls(len(parents), max(depths), len(kept), refused, emitted, is_bonus, maker)


@dataclass(slots=True)
class DrafterCounts:
    """What came of one drafter's proposals."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0

    def report(self) -> dict[str, float]:
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_rate": self.accepted / self.drafted if self.drafted else 0.0,
            "tokens_per_round": self.tokens / self.rounds if self.rounds else 0.0,
        }


@dataclass(slots=True)
class PassCosts:
    """Measured seconds of a target pass by the rows it was fed: the curve r(rows), in units of a one-row pass."""

    points: dict[int, list[float]] = field(default_factory=dict)  # rows -> [passes, seconds]

    def copy(self) -> PassCosts:
        return PassCosts({rows: list(point) for rows, point in self.points.items()})

    def add(self, rows: int, seconds: float) -> None:
        point = self.points.setdefault(rows if rows <= EXACT_ROWS else 1 << (rows - 1).bit_length(), [0.0, 0.0])
        point[0] += 1.0
        point[1] += seconds

    def seconds(self, rows: float) -> float | None:
        """Mean seconds of a pass of `rows` rows, interpolated; None outside what was measured."""
        known = sorted(self.points)
        if not known or not known[0] <= rows <= known[-1]:
            return None
        right = bisect_left(known, rows)
        high = known[right]
        passes, total = self.points[high]
        if high == rows:
            return total / passes
        low = known[right - 1]
        low_passes, low_total = self.points[low]
        share = (rows - low) / (high - low)
        return (1.0 - share) * low_total / low_passes + share * total / passes

    def curve(self) -> dict[int, float] | None:
        """r(rows); None until a one-row pass was measured."""
        unit = self.seconds(1)
        if not unit:
            return None
        return {rows: total / passes / unit for rows, (passes, total) in sorted(self.points.items())}


@dataclass(slots=True)
class Tempo:
    """Tokens and seconds of plain and of speculative rounds, apart by batch size, so that like meets like."""

    # batch size -> [plain tokens, plain seconds, speculative tokens, speculative seconds]
    by_batch: dict[int, list[float]] = field(default_factory=dict)

    def add(self, batch: int, speculative: bool, tokens: int, seconds: float) -> None:
        cell = self.by_batch.get(batch)
        if cell is None:
            cell = self.by_batch[batch] = [0.0, 0.0, 0.0, 0.0]
        at = 2 if speculative else 0
        cell[at] += tokens
        cell[at + 1] += seconds

    def speedup(self) -> float | None:
        """Seconds plain rounds would have taken for the speculative tokens, over the seconds those took."""
        plain_s = speculative_s = 0.0
        for plain_tokens, plain_seconds, tokens, seconds in self.by_batch.values():
            if plain_tokens and tokens:
                plain_s += tokens * plain_seconds / plain_tokens
                speculative_s += seconds
        return plain_s / speculative_s if speculative_s else None

    def coverage(self) -> float:
        """Share of the speculative tokens that `speedup` speaks of: those with plain rounds to compare with."""
        speculative = sum(cell[2] for cell in self.by_batch.values())
        compared = sum(cell[2] for cell in self.by_batch.values() if cell[0])
        return compared / speculative if speculative else 0.0


@dataclass(slots=True)
class WideRounds:
    """The steady passes of rounds with a draft: what an estimate of the speed-up is made of."""

    passes: int = 0
    batch: int = 0  # summed over the passes, as the following
    num_fed: int = 0
    draft_steps: int = 0
    draft_s: float = 0.0

    def add_pass(self, times: RoundTimes, batch: int) -> None:
        self.passes += 1
        self.batch += batch
        self.num_fed += times.num_fed
        self.draft_steps += times.draft_steps
        self.draft_s += times.draft_s


@dataclass(slots=True)
class Statistics:
    """What speculation did. drafted = accepted + rejected + unread, always.

    A round judges one job once, so it emits 1 to width + 1 tokens. `unread` drafts came after a rejection or a stop
    and were never judged, or not counted. Places in a proposal are counted along its paths: siblings share one. Times
    are those of the passes taken part in: a batch shares them. Tokens are counted where somebody asks: a round only
    counts its outcome, of which there are few different ones.
    """

    outcomes: dict[Outcome, int] = field(default_factory=dict)  # -> rounds
    passes: int = 0
    draft_steps: int = 0
    draft_s: float = 0.0
    score_s: float = 0.0
    judge_s: float = 0.0
    wide: WideRounds = field(default_factory=WideRounds)
    fallbacks: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0
    widths: dict[int, int] = field(default_factory=dict)  # width the engine chose -> rounds
    reasons: dict[str, int] = field(default_factory=dict)  # why -> rounds
    fixed_rounds: int = 0  # rounds with drafts of a width that the caller fixed
    costs: PassCosts = field(default_factory=PassCosts)  # the engine's curve, shared by its requests
    tempo: Tempo = field(default_factory=Tempo)

    def add_round(self, outcome: Outcome, times: int = 1) -> None:
        """A job was judged. `times` counts jobs with the same outcome in one go."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + times

    def add_pass(self, times: RoundTimes, batch: int, speculative: bool, tokens: int) -> None:
        """One pass was taken part in."""
        self.passes += 1
        self.draft_steps += times.draft_steps
        self.draft_s += times.draft_s
        self.score_s += times.score_s
        self.judge_s += times.judge_s
        if times.steady:
            self.tempo.add(batch, speculative, tokens, times.draft_s + times.pass_s)
            if speculative:
                self.wide.add_pass(times, batch)

    def add_choice(self, width: int, reason: str, times: int = 1) -> None:
        """The engine chose a width for a round, and says why. `times` counts requests with the same choice."""
        self.widths[width] = self.widths.get(width, 0) + times
        self.reasons[reason] = self.reasons.get(reason, 0) + times

    def add_fallback(self, reason: str) -> None:
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1

    @property
    def rounds(self) -> int:
        return sum(list(self.outcomes.values()))

    @property
    def tokens(self) -> int:
        return self._sum(lambda outcome: outcome.emitted)

    @property
    def drafted(self) -> int:
        return self._sum(lambda outcome: outcome.drafted)

    @property
    def accepted(self) -> int:
        return self._sum(lambda outcome: outcome.accepted)

    @property
    def rejected(self) -> int:
        return self._sum(lambda outcome: outcome.refused)

    @property
    def unread(self) -> int:
        return self._sum(lambda outcome: outcome.drafted - outcome.accepted - outcome.refused)

    @property
    def bonus(self) -> int:
        return self._sum(lambda outcome: outcome.is_bonus and outcome.drafted > 0)

    @property
    def rounds_by_depth(self) -> dict[int, int]:
        return self._histogram(lambda outcome: outcome.depth)

    @property
    def rounds_by_accepted(self) -> dict[int, int]:
        return self._histogram(lambda outcome: outcome.accepted)

    @property
    def drafters(self) -> dict[str, DrafterCounts]:
        counts: dict[str, DrafterCounts] = {}
        for outcome, times in self._rounds_with_drafts():
            one = counts.setdefault(outcome.maker, DrafterCounts())
            one.rounds += times
            one.drafted += outcome.drafted * times
            one.accepted += outcome.accepted * times
            one.tokens += outcome.emitted * times
        return counts

    @property
    def draft_rounds(self) -> int:
        """Rounds with a draft."""
        return sum([times for _, times in self._rounds_with_drafts()])

    @property
    def tokens_per_draft_round(self) -> float:
        """Of the rounds with a draft."""
        drafted = self._rounds_with_drafts()
        return sum([outcome.emitted * times for outcome, times in drafted]) / max(1, self.draft_rounds)

    def _rounds_with_drafts(self) -> list[tuple[Outcome, int]]:
        return [(outcome, times) for outcome, times in list(self.outcomes.items()) if outcome.drafted]

    def _sum(self, what: Callable[[Outcome], int]) -> int:
        return sum([what(outcome) * times for outcome, times in list(self.outcomes.items())])

    def _histogram(self, what: Callable[[Outcome], int]) -> dict[int, int]:
        """Rounds with a draft by what came of them."""
        rounds: dict[int, int] = {}
        for outcome, times in self._rounds_with_drafts():
            rounds[what(outcome)] = rounds.get(what(outcome), 0) + times
        return rounds

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def accepted_by_position(self) -> list[float]:
        """Share of the drafts at each place of a proposal that were kept."""
        return kept_by_place(self.rounds_by_accepted, self.rounds_by_depth)

    @property
    def draft_step_cost(self) -> float | None:
        """c: one draft pass in units of a one-row target pass, reading the prompt left aside."""
        unit = self.costs.seconds(1)
        return self.wide.draft_s / self.wide.draft_steps / unit if unit and self.wide.draft_steps else None

    @property
    def estimated_speedup(self) -> float | None:
        """E[tokens per round] / (r(k+1) + k*c), at the mean width and batch; None until such passes were measured."""
        wide, tokens = self.wide, self.tokens_per_draft_round
        if not tokens or not wide.passes:
            return None
        plain = self.costs.seconds(wide.batch / wide.passes)
        scored = self.costs.seconds(wide.num_fed / wide.passes)
        if not plain or scored is None:
            return None
        return tokens * plain / (scored + wide.draft_s / wide.passes)

    @property
    def measured_speedup(self) -> float | None:
        """Against width-0 rounds at the same batch size; None if there were none."""
        return self.tempo.speedup()

    @property
    def advice(self) -> str | None:
        """Plain words when speculation does not pay."""
        if self._verdict is not None:
            return self._verdict
        if self.widths and not self.fixed_rounds:
            return None  # the engine chose these widths by itself: there is nothing to advise
        speedup, source = self.estimated_speedup, "estimated"
        if speedup is None or self.tempo.coverage() >= 0.5:  # a few comparable rounds say less than the estimate
            speedup, source = self.measured_speedup, "measured"
        if speedup is None or speedup >= 1.0:
            return None
        cure = "leave the width to the engine, try a cheaper draft, or width 0"
        if self.acceptance_rate < 0.3:
            cure = f"only {self.acceptance_rate:.0%} of the drafts are kept: try another draft, or width 0"
        return f"speculation does not pay here ({source} {speedup:.2f}x of plain); {cure}"

    @property
    def _verdict(self) -> str | None:
        """What the engine's own choices come to, where they were mostly not to draft."""
        choices, resting = sum(self.widths.values()), self.widths.get(0, 0)
        whys = [reason for reason in self.reasons if reason.startswith(LOSING)]
        if not whys or resting < 0.8 * choices:
            return None
        outlook = max(whys, key=self.reasons.__getitem__).removeprefix(LOSING)
        cure = "try a cheaper draft"
        if self.acceptance_rate < 0.3:
            cure = f"only {self.acceptance_rate:.0%} of the drafts are kept: try another draft"
        return (
            f"speculation does not pay here, so the engine decodes plainly ({resting / choices:.0%} of the rounds; "
            f"drafting would give about {outlook} of plain); {cure}"
        )

    def report(self) -> dict[str, Any]:
        """Everything as plain data, for JSON."""
        return {
            "rounds": self.rounds,
            "tokens": self.tokens,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "rejected": self.rejected,
            "bonus": self.bonus,
            "unread": self.unread,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_round": self.tokens_per_round,
            "accepted_by_position": self.accepted_by_position,
            "drafters": {name: counts.report() for name, counts in self.drafters.items()},
            "passes": self.passes,
            "draft_s": self.draft_s,
            "score_s": self.score_s,
            "judge_s": self.judge_s,
            "draft_step_cost": self.draft_step_cost,
            "pass_cost_curve": self.costs.curve(),
            "estimated_speedup": self.estimated_speedup,
            "measured_speedup": self.measured_speedup,
            "fallbacks": dict(self.fallbacks),
            "widths": dict(sorted(self.widths.items())),
            "reasons": dict(self.reasons),
            "advice": self.advice,
        }


def kept_by_place(accepted: Mapping[int, int], depth: Mapping[int, int]) -> list[float]:
    """The share of the drafts at each place that were kept, from rounds by tokens accepted and by depth."""
    return [_rounds_past(accepted, place) / _rounds_past(depth, place) for place in range(max(depth, default=0))]


def _rounds_past(histogram: Mapping[int, int], place: int) -> int:
    """Rounds whose count goes beyond `place`."""
    return sum(rounds for count, rounds in histogram.items() if count > place)
