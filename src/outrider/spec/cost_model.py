"""What a round costs: seconds of a target pass by (rows, requests, context), and of a draft step.

A profile at load gives the first points (`engine/profile.py`); rounds correct them while the engine runs:

    pass_s = scale * curve(rows) + per_token * context + per_request * (requests - 1)

`curve` is piecewise linear through measured row counts. `scale` follows the machine (it slows down, it shares a core),
the slopes are regressions over the rounds seen, and a row count that is visited moves its own point of the curve.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence

FIRST_ROUNDS = 8  # in which the scale is found
FOLLOW = 0.1  # how far a moving average goes towards a new round
RECENT = 16  # rounds in which a row count counts as seen lately
LEAST_S = 1e-9  # a pass takes longer than this; a clock that stands still does not divide by zero
SLOPE_DECAY = 0.995  # of what slopes were learned from, a round
LEAST_STEP = 0.25  # of a chain of one token, that its step takes: less is noise
LEAST_READ = 0.25  # of a draft step that reading must take, to learn from it
DRIFT = 0.25  # how far off a profile may be as a whole
SETTLED = 32  # rounds after which that is known
OUTLIER = 2.0  # a round that takes longer than this many times the expectation counts as this many times


class Curve:
    """Seconds by rows, linear between measured row counts."""

    def __init__(self, points: Mapping[int, float] | None = None) -> None:
        self.points = dict(points or {})
        self._rows = sorted(self.points)

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
        # Past the last point the mean slope so far is a cautious guess: rows are rarely cheaper there. So is the slope
        # of the last half; that of two neighbours would be noise. Where a single point is known, a further row is taken
        # for half as dear as those.
        if len(known) == 1:
            return points[low] * (1.0 + 0.5 * (rows - low) / low)
        begins = (known[0], known[max(0, bisect_right(known, low // 2) - 1)])
        slope = max([(points[low] - points[begin]) / (low - begin) for begin in begins])
        return points[low] + slope * (rows - low)

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


class Slope:
    """A decayed regression of seconds on one quantity, over passes of as many rows: each row count has its own mean,
    and only what moves away from that teaches. Negative slopes are noise, and count as 0."""

    def __init__(self, spread: float) -> None:
        self._least = spread * spread  # variance of the quantity below which little can be learned
        self._means: dict[int, tuple[float, float, float]] = {}  # rows -> weight, mean quantity, mean seconds
        self._weight = self._variance = self._covariance = 0.0

    @property
    def value(self) -> float:
        return max(0.0, self._covariance / (self._variance + self._least))

    def add(self, rows: int, quantity: float, seconds: float) -> None:
        weight, mean_quantity, mean_seconds = self._means.get(rows, (0.0, quantity, seconds))
        weight = SLOPE_DECAY * weight + 1.0
        away, off = quantity - mean_quantity, seconds - mean_seconds
        mean_quantity += away / weight
        self._means[rows] = (weight, mean_quantity, mean_seconds + off / weight)
        self._weight = SLOPE_DECAY * self._weight + 1.0
        self._variance += (away * (quantity - mean_quantity) - self._variance) / self._weight
        self._covariance += ((quantity - mean_quantity) * off - self._covariance) / self._weight


class CostModel:
    """Costs of one engine. All numbers are seconds."""

    def __init__(self, points: Mapping[int, float] | None = None, steps: Mapping[str, float] | None = None) -> None:
        """points: seconds of a pass by rows. steps: seconds of one draft step of a single request, by drafter."""
        self.curve = Curve(points)
        self.steps = dict(steps or {})
        self.starts: dict[str, float] = {}  # seconds that a proposal takes beside its steps, by drafter
        self._profiled: dict[str, dict[int, float]] = {}  # drafter -> steps of a chain -> seconds
        self.reads: dict[str, float] = {}  # what reading takes, as a share of what as many rows add to a draft step
        self.scale = 1.0
        self.num_rounds = 0
        self._seen: dict[int, int] = {}  # rows -> the last round that fed so many
        self._prefills: dict[int, float] = {}  # rows -> seconds of passes that were longer than all before
        self.is_profile = False  # whether one round settles a point
        self.on_drift: Callable[[], None] | None = None  # called once, when rounds differ from the profile for good
        self._by_context = Slope(spread=16.0)
        self._by_request = Slope(spread=1.0)

    def end_profile(self) -> None:
        """From here on rounds correct what was measured: the first ones much, later ones little."""
        self.is_profile = False
        self.num_rounds = 0
        self._seen.clear()
        self._prefills.clear()

    @property
    def is_known(self) -> bool:
        """Whether any pass was measured."""
        return bool(self.curve.points)

    def knows(self, rows: int) -> bool:
        """Whether a pass of so many rows or fewer was measured: without one, more rows seem to cost nothing."""
        return any(known <= rows for known in self.curve.points)

    def pass_s(self, rows: float, requests: int = 1, context: float = 0.0) -> float:
        extra = self._by_context.value * context + self._by_request.value * (requests - 1)
        return self.scale * self.curve(rows) + extra

    def step_s(self, drafter: str, requests: int) -> float:
        """One draft step for so many requests. More rows cost a draft relatively as much as they cost the target."""
        if requests == 0:
            return 0.0
        return self.steps.get(drafter, 0.0) * self.scale * self.curve(requests) / self.curve(1)

    def draft_s(self, drafter: str, requests_by_step: Sequence[int]) -> float:
        """Chains: how many requests still want a token at each step."""
        if not requests_by_step:
            return 0.0
        start_s = self.scale * self.starts.get(drafter, 0.0)
        return start_s + sum([self.step_s(drafter, requests) for requests in requests_by_step])

    def read_s(self, drafter: str, tokens: int, requests: int) -> float:
        """What it takes to read so many tokens that the drafter has not seen, in the first draft step for requests."""
        if tokens == 0:
            return 0.0
        return self.reads.get(drafter, 1.0) * (self.step_s(drafter, tokens + requests) - self.step_s(drafter, requests))

    def rounds_since(self, rows: int) -> int:
        """Rounds since a pass of so many rows was measured."""
        return self.num_rounds - self._seen.get(rows, 0)

    def observe_pass(self, rows: int, requests: int, context: float, seconds: float) -> None:
        """A round took so long, beside its drafts."""
        self.num_rounds += 1
        seconds = max(seconds, LEAST_S)
        if not self.is_known:
            self.curve.move(rows, seconds, 1.0)
        slopes = self._by_context.value * context + self._by_request.value * (requests - 1)
        expected = self.scale * self.curve(rows) + slopes
        if rows in self.curve.points:
            seconds = min(seconds, OUTLIER * expected)
        self._by_context.add(rows, context, seconds)
        self._by_request.add(rows, requests, seconds - self._by_context.value * context)
        own = max(seconds - slopes, 0.1 * seconds) / self.scale
        if self.is_profile:
            self.curve.move(rows, own, 0.5)
        else:
            self._correct(rows, own)
        self._seen[rows] = self.num_rounds
        if self.on_drift is not None and self.num_rounds >= SETTLED and abs(self.scale - 1.0) > DRIFT:
            self.on_drift()
            self.on_drift = None

    def _correct(self, rows: int, seconds: float) -> None:
        """What a round differs by is in part the scale's, most of all in the first rounds: they tell how far off the
        profile is as a whole. The rest is this row count's. One that was not seen lately moves halfway."""
        is_recent = rows in self.curve.points and self.rounds_since(rows) <= RECENT
        share = max(FOLLOW, 1.0 / (2 + self.num_rounds))
        before = self.curve(rows)
        factor = 1.0 + share * (seconds / before - 1.0)
        self.scale *= factor
        follow = FOLLOW if is_recent else 0.5
        self.curve.move(rows, before + follow * (seconds / factor - before), 1.0)
        if self.num_rounds <= FIRST_ROUNDS:
            for prefill, prefill_s in self._prefills.items():
                self.curve.move(prefill, prefill_s / self.scale, 1.0)

    def observe_draft(self, drafter: str, requests_by_step: Sequence[int], seconds: float) -> None:
        """Chains took so long to draft, with nothing to catch up on. The first step counts each row that it read."""
        expected = self.draft_s(drafter, requests_by_step)
        if self.is_profile:
            self._profile_draft(drafter, len(requests_by_step), seconds)
        elif drafter not in self.steps or expected <= 0.0:
            units = sum([self.curve(requests) for requests in requests_by_step]) / self.curve(1)
            self.steps[drafter] = seconds / (self.scale * units)
        else:
            factor = 1.0 + 2.0 * FOLLOW * (min(seconds / expected, OUTLIER) - 1.0)
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
        self.steps[drafter] = step_s / self.scale
        self.starts[drafter] = profiled[short] / self.scale - short * self.steps[drafter]

    def observe_read(self, drafter: str, tokens: int, requests: int, seconds: float) -> None:
        """Catching up on so many tokens took so much longer than drafting alone."""
        step_s = self.step_s(drafter, requests)
        expected = self.step_s(drafter, tokens + requests) - step_s
        if expected > LEAST_READ * step_s:  # less drowns in noise
            before = self.reads.get(drafter, 1.0)
            share = 1.0 if self.is_profile else 2.0 * FOLLOW
            self.reads[drafter] = before + share * (max(0.0, seconds) / expected - before)

    def extend(self, rows: int, seconds: float) -> None:
        """A prefill of more rows than any pass so far: a first guess of what a round of so many drafts costs."""
        if self.is_known and rows > max(self.curve.points):
            self._prefills[rows] = seconds  # it is looked at again, as long as the scale is hardly known
            self.curve.move(rows, seconds / self.scale, 1.0)
