"""What a round costs: seconds of a target pass by (rows, requests, context), and of a draft step.

A profile at load gives the first points (`engine/profile.py`); rounds correct them while the engine runs:

    pass_s = curve(rows) * ratio(rows) + per_token * context + per_request * (requests - 1)

`curve` is piecewise linear through profiled row counts. `ratio` is how much longer passes take than that: measured for
the row counts that rounds have, and like their neighbours' for all others. The slopes are regressions over rounds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from math import inf

FOLLOW = 0.05  # how far a moving average goes towards a new round, at least: the first ones move it further
NOISE = 0.004  # variance of a round, at first (0.01 is a tenth): later it is what rounds differed by
LEAST_S = 1e-9  # a pass takes longer than this; a clock that stands still does not divide by zero
SLOPE_DECAY = 0.995  # of what slopes were learned from, a round
LEAST_STEP = 0.25  # of a chain of one token, that its step takes: less is noise
DRIFT = 0.25  # how far off a profile may be as a whole
SETTLED = 32  # rounds after which that is known
LEAST_NOISE = NOISE / 4.0  # rounds of a virtual clock are all alike, which proves nothing
OUTLIER = 2.0  # a round that takes longer than this many times the expectation counts as this many times


class Curve:
    """Values by rows, linear between known row counts."""

    def __init__(self, points: Mapping[int, float] | None = None) -> None:
        self.points = dict(points or {})
        self._rows = sorted(self.points)

    @property
    def first(self) -> float:
        """The least row count that was measured."""
        return self._rows[0] if self._rows else inf

    def __call__(self, rows: float) -> float:
        known, points = self._rows, self.points
        if not known:
            return 1.0
        if rows in points:
            return points[int(rows)]
        right = bisect_left(known, rows)
        if right == 0:
            return points[known[0]]
        low = known[right - 1]
        if right < len(known):
            high = known[right]
            return points[low] + (points[high] - points[low]) * (rows - low) / (high - low)
        # Past the last point it goes on with the slope of the last half, that of two neighbours would be noise; where
        # it was steeper before, halfway between both. Where a single point is known, a further row is taken for half as
        # dear as those.
        if len(known) == 1:
            return points[low] * (1.0 + 0.5 * (rows - low) / low)
        begins = (known[0], known[max(0, bisect_right(known, low // 2) - 1)])
        whole, last = ((points[low] - points[begin]) / (low - begin) for begin in begins)
        return points[low] + max(last, 0.5 * (whole + last)) * (rows - low)

    def move(self, rows: int, seconds: float, share: float) -> None:
        """Move the point at `rows` by a share of the way; a new one is set. More rows never cost less."""
        seconds, points = max(seconds, LEAST_S), self.points
        if rows in points:
            points[rows] += share * (seconds - points[rows])
        else:
            points[rows] = seconds
            self._rows = sorted(points)
        here = points[rows]
        for other in self._rows:
            if (other < rows and points[other] > here) or (other > rows and points[other] < here):
                points[other] = here


class Ratios:
    """How much longer passes take than the curve says, by rows: moving averages.

    A level follows the machine, and each row count has a factor of its own. It is linear between row counts that
    were seen, outside of them like the nearest. Each round moves the level, and its row count half as far.
    """

    def __init__(self) -> None:
        self.level, self._num_rounds = 1.0, 0
        self._own: dict[int, list[float]] = {}  # rows -> its factor, rounds that had so many
        self._rows: list[int] = []

    def __call__(self, rows: float) -> float:
        return self.level * self._factor(rows)

    def observe(self, rows: int, ratio: float) -> None:
        if rows not in self._own:
            self._own[rows] = [self._factor(rows), 0.0]
            insort(self._rows, rows)
        own = self._own[rows]
        own[1] += 1.0
        self._num_rounds += 1
        self.level *= 1.0 + max(FOLLOW, 1.0 / (1.0 + self._num_rounds)) * self._away(rows, ratio)
        own[0] *= 1.0 + 0.5 * max(FOLLOW, 1.0 / (1.0 + own[1])) * self._away(rows, ratio)  # what the level left over

    def _away(self, rows: int, ratio: float) -> float:
        return min(0.5, max(-0.5, ratio / self(rows) - 1.0))

    def _factor(self, rows: float) -> float:
        known, own = self._rows, self._own
        right = bisect_left(known, rows)
        if right == len(known):
            return own[known[-1]][0] if known else 1.0
        if right == 0 or known[right] == rows:
            return own[known[right]][0]
        low, high = known[right - 1], known[right]
        return own[low][0] + (own[high][0] - own[low][0]) * (rows - low) / (high - low)


class Slope:
    """A decayed regression of seconds on one quantity, over passes of as many rows: each row count has its own mean,
    and only what moves away from that teaches. Noise is a share of the seconds, so short passes count for more. The
    slope is shrunk by its own uncertainty (positive-part James-Stein): a few noisy rounds teach nothing."""

    def __init__(self) -> None:
        self.value = 0.0
        self._means: dict[int, tuple[float, float, float]] = {}  # rows -> weight, mean quantity, mean seconds
        self._square = self._product = 0.0  # weighted sums: the quantity's squares, its products with seconds

    def reset_means(self) -> None:
        """Passes may take longer or shorter as a whole from here on. That is not a slope, so each row count gets a new
        mean."""
        self._means.clear()

    def add(self, rows: int, quantity: float, seconds: float, added: float) -> None:
        """added: the weight of this round, the inverse of the variance of its seconds."""
        weight, mean_quantity, mean_seconds = self._means.get(rows, (0.0, quantity, seconds))
        weight = SLOPE_DECAY * weight + added
        away, off = quantity - mean_quantity, seconds - mean_seconds
        mean_quantity += away * added / weight
        self._means[rows] = (weight, mean_quantity, mean_seconds + off * added / weight)
        left = added * (quantity - mean_quantity)
        self._square = SLOPE_DECAY * self._square + left * away
        self._product = SLOPE_DECAY * self._product + left * off
        self.value = 0.0
        if self._product > 0.0:  # the slope is product / square, its variance 1 / square
            self.value = max(0.0, (self._product - self._square / self._product) / self._square)


class CostModel:
    """Costs of one engine. All numbers are seconds."""

    def __init__(self, points: Mapping[int, float] | None = None, steps: Mapping[str, float] | None = None) -> None:
        """points: seconds of a pass by rows. steps: seconds of one draft step of a single request, by drafter."""
        self.curve = Curve(points)
        self.ratio = Ratios()
        self.steps = dict(steps or {})
        self.starts: dict[str, float] = {}  # seconds that a proposal takes beside its steps, by drafter
        self.reads: dict[str, float] = {}  # what reading takes, as a share of what as many rows add to a draft step
        self.num_rounds = 0
        self.is_profile = False  # whether rounds are those of the profile
        self.on_drift: Callable[[], None] | None = None  # called once, when rounds differ from the profile for good
        self._drafted: dict[str, int] = {}  # drafter -> rounds in which it was timed
        self._profiled: dict[str, dict[int, float]] = {}  # drafter -> steps of a chain -> seconds
        self._rows_s: dict[float, float] = {}  # what was asked for since something changed: rows -> seconds
        self._noise = NOISE
        self._by_context = Slope()
        self._by_request = Slope()

    def end_profile(self) -> None:
        """From here on rounds correct what was measured: the first ones much, later ones little."""
        self.is_profile = False
        self.num_rounds = 0
        self._rows_s.clear()
        self._by_context.reset_means()
        self._by_request.reset_means()

    @property
    def is_known(self) -> bool:
        """Whether any pass was measured."""
        return bool(self.curve.points)

    def knows(self, rows: int) -> bool:
        """Whether a pass of so many rows or fewer was measured: without one, more rows seem to cost nothing."""
        return rows >= self.curve.first

    def pass_s(self, rows: float, requests: int = 1, context: float = 0.0) -> float:
        """A target pass."""
        return self.rows_s(rows) + self._by_context.value * context + self._by_request.value * (requests - 1)

    def rows_s(self, rows: float) -> float:
        """What rows alone cost."""
        seconds = self._rows_s.get(rows)
        if seconds is None:
            seconds = self._rows_s[rows] = self.curve(rows) * self.ratio(rows)
        return seconds

    def step_s(self, drafter: str, rows: float) -> float:
        """One draft step of so many rows. More rows cost a draft relatively as much as they cost the target."""
        return self.steps.get(drafter, 0.0) * self.rows_s(rows) / self.rows_s(1) if rows else 0.0

    def draft_s(self, drafter: str, rows_by_step: Sequence[float]) -> float:
        """Chains: how many rows each step has."""
        if not rows_by_step:
            return 0.0
        seconds, before, step_s = self.starts.get(drafter, 0.0), 0.0, 0.0
        for rows in rows_by_step:
            if rows != before:  # most steps are like the one before
                before, step_s = rows, self.step_s(drafter, rows)
            seconds += step_s
        return seconds

    def read_s(self, drafter: str, tokens: int, requests: int) -> float:
        """What it takes to read so many tokens that the drafter has not seen, in the first draft step for requests."""
        if tokens == 0:
            return 0.0
        return self.reads.get(drafter, 1.0) * (self.step_s(drafter, tokens + requests) - self.step_s(drafter, requests))

    def observe_pass(
        self, rows: int, requests: int, context: float, seconds: float, *, is_measured: bool = False
    ) -> None:
        """A round took so long, beside its drafts. is_measured: it was made for that, and belongs to the profile."""
        self.num_rounds += 1
        self._rows_s.clear()
        seconds = max(seconds, LEAST_S)
        if not self.knows(rows):  # below all that were profiled nothing could be told
            self.curve.move(rows, seconds / self.ratio(rows), 1.0)
        slopes = self._by_context.value * context + self._by_request.value * (requests - 1)
        expected = self.curve(rows) * self.ratio(rows) + slopes
        is_cut = not self.is_profile and seconds > OUTLIER * expected
        if is_cut:
            seconds = OUTLIER * expected
        self._noise += FOLLOW * ((seconds / expected - 1.0) ** 2 - self._noise)
        if not is_cut:  # a round that was cut does not tell what its context took
            weight = 1.0 / (max(self._noise, LEAST_NOISE) * seconds * seconds)
            self._by_context.add(rows, context, seconds, weight)
            self._by_request.add(rows, requests, seconds - self._by_context.value * context, weight)
        own = max(seconds - slopes, 0.1 * seconds)
        if self.is_profile or is_measured:
            self.curve.move(rows, own / self.ratio(rows), 0.5)
            return
        self.ratio.observe(rows, own / self.curve(rows))
        if self.on_drift is not None and self.num_rounds >= SETTLED and abs(self.ratio(1) - 1.0) > DRIFT:
            self.on_drift()
            self.on_drift = None

    def profile_pass(self, rows: int, seconds: float) -> None:
        """A pass of so many rows took so long, by itself. The quickest counts."""
        self._rows_s.clear()
        self.curve.move(rows, min(seconds, self.curve.points.get(rows, seconds)), 1.0)

    def extend(self, rows: int, seconds: float) -> None:
        """A prefill of more rows than any pass so far: a first guess of what a round of so many drafts costs."""
        if self.is_known and rows > max(self.curve.points):
            self._rows_s.clear()
            self.curve.move(rows, seconds / self.ratio(rows), 1.0)

    def observe_draft(self, drafter: str, rows_by_step: Sequence[float], seconds: float) -> None:
        """Chains took so long to draft, with nothing to catch up on."""
        expected = self.draft_s(drafter, rows_by_step)
        if self.is_profile:
            self._profile_draft(drafter, len(rows_by_step), seconds)
        elif expected <= 0.0:
            self.steps[drafter] = seconds * self.rows_s(1) / sum([self.rows_s(rows) for rows in rows_by_step])
        else:
            self._drafted[drafter] = num_seen = self._drafted.get(drafter, 0) + 1
            share = max(FOLLOW, 1.0 / (1.0 + num_seen))  # the first rounds tell how far off the profile is
            factor = 1.0 + share * (min(seconds / expected, OUTLIER) - 1.0)
            self.steps[drafter] *= factor
            self.starts[drafter] = self.starts.get(drafter, 0.0) * factor

    def _profile_draft(self, drafter: str, num_steps: int, seconds: float) -> None:
        """A short and a long chain of one request tell the steps from what comes before them."""
        profiled = self._profiled.setdefault(drafter, {})
        profiled[num_steps] = min(seconds, profiled.get(num_steps, seconds))
        short, long = min(profiled), max(profiled)
        step_s = profiled[short] / short
        if long > short:
            further_s = (profiled[long] - profiled[short]) / (long - short)
            step_s = min(step_s, max(LEAST_STEP * step_s, further_s))
        self.steps[drafter] = step_s
        self.starts[drafter] = profiled[short] - short * step_s

    def profile_read(self, drafter: str, tokens: int, seconds: float) -> None:
        """Reading so many tokens of one request took so much longer than drafting alone."""
        expected = self.step_s(drafter, tokens + 1) - self.step_s(drafter, 1)
        if expected > 0.0:
            self.reads[drafter] = max(0.0, seconds) / expected
