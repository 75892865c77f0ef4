"""What a round costs: seconds of a target pass by (rows, requests, context), and of a draft step.

A profile at load gives the first points (`engine/profile.py`); rounds correct them while the engine runs:

    pass_s = curve(rows) * ratio(rows) + per_token * context + per_request * (requests - 1)

`curve` is piecewise linear through profiled row counts. `ratio` is how much longer passes take than that: measured for
the row counts that rounds have, and like their neighbours' for all others. The slopes are regressions over rounds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from math import inf, sqrt

FOLLOW = 0.1  # how far a moving average goes towards a new round
# Variances: 0.01 is a tenth
UNSURE_OF_ALL = 0.09  # of a profile as a whole,
UNSURE_OF_ONE = 0.01  # and of one row count in it
DRIFT_OF_ALL = 1e-4  # of the machine, in a round
NOISE = 0.004  # of a round, at first: later it is what rounds differed by
NOISE_FOLLOWS = 0.02
LEAST_NOISE = 0.001
STAY_PUT = 1.0 - 1.0 / 512  # of what a row count was found to differ by, is left after a round without it
HOPE = 0.9  # of what a pass of more rows than any round had seems to take: it may take as little
LEAST_S = 1e-9  # a pass takes longer than this; a clock that stands still does not divide by zero
SLOPE_DECAY = 0.995  # of what slopes were learned from, a round
LEAST_STEP = 0.25  # of a chain of one token, that its step takes: less is noise
LEAST_READ = 0.25  # of a draft step that reading must take, to learn from it
DRIFT = 0.25  # how far off a profile may be as a whole
SETTLED = 32  # rounds after which that is known: from then on the level is the machine's speed
OUTLIER = 2.0  # a round that takes longer than this many times the expectation counts as this many times


class Curve:
    """Seconds by rows, linear between measured row counts."""

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
    """How much longer passes take than the curve says, by rows: a Kalman filter that treats its parts as independent.

    A level drifts as the machine becomes slower or faster, and each row count differs from it by something of its own;
    between row counts that were seen that is linear, outside of them like the nearest. A round measures the level and
    one row count, and what it says is shared out by how unsure each is. What is not measured any more returns to the
    shape of the profile: else a row count that one slow round has made seem dear would never be tried again.
    """

    def __init__(self) -> None:
        self._now = 0
        self.level, self._unsure = 1.0, UNSURE_OF_ALL
        self._own: dict[int, tuple[float, float, int]] = {}  # rows -> difference, its variance, the round of both
        self._rows: list[int] = []

    def __call__(self, rows: float) -> float:
        return self.level * (1.0 + self._difference(rows))

    def observe(self, rows: int, ratio: float, noise: float) -> None:
        self._now += 1
        unsure = self._unsure + DRIFT_OF_ALL
        own = 1.0 + self._difference(rows)
        own_unsure = UNSURE_OF_ONE
        if rows in self._own:
            _, before, seen = self._own[rows]
            own_unsure += (before - UNSURE_OF_ONE) * STAY_PUT ** (2 * (self._now - seen))
        else:
            insort(self._rows, rows)
        variance = unsure + own_unsure + noise
        most = 3.0 * sqrt(variance)  # a round that was interrupted says nothing of the next
        surprise = min(most, max(-most, ratio / (self.level * own) - 1.0)) / variance
        self.level *= 1.0 + unsure * surprise
        self._unsure = unsure * (1.0 - unsure / variance)
        own *= 1.0 + own_unsure * surprise
        self._own[rows] = own - 1.0, own_unsure * (1.0 - own_unsure / variance), self._now

    def _difference(self, rows: float) -> float:
        known = self._rows
        right = bisect_left(known, rows)
        if right == len(known):
            return self._at(known[-1]) if known else 0.0
        if right == 0 or known[right] == rows:
            return self._at(known[right])
        low, high = known[right - 1], known[right]
        share = (rows - low) / (high - low)
        return (1.0 - share) * self._at(low) + share * self._at(high)

    def _at(self, rows: int) -> float:
        difference, _, seen = self._own[rows]
        return difference * STAY_PUT ** (self._now - seen)


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
        self.steps = dict(steps or {})
        self.starts: dict[str, float] = {}  # seconds that a proposal takes beside its steps, by drafter
        self._drafted: dict[str, int] = {}  # drafter -> rounds in which it was timed
        self._level_when_timed: dict[str, float] = {}  # drafter -> the target's level when it was timed
        self._settled_level = 1.0
        self._profiled: dict[str, dict[int, float]] = {}  # drafter -> steps of a chain -> seconds
        self.reads: dict[str, float] = {}  # what reading takes, as a share of what as many rows add to a draft step
        self.ratio = Ratios()
        self._rows_s: dict[float, float] = {}  # what was asked for since something changed: rows -> seconds
        self.num_rounds = 0
        self._seen: set[int] = set()  # row counts that rounds had
        self.widest_seen = 0  # most rows that a round had
        self.is_profile = False  # whether one round settles a point
        self.on_drift: Callable[[], None] | None = None  # called once, when rounds differ from the profile for good
        self._noise = NOISE
        self._by_context = Slope()
        self._by_request = Slope()

    def end_profile(self) -> None:
        """From here on rounds correct what was measured: the first ones much, later ones little."""
        self.is_profile = False
        self.num_rounds = 0
        self._seen.clear()
        self.widest_seen = 0
        self._rows_s.clear()
        self.ratio = Ratios()
        self._by_context.reset_means()
        self._by_request.reset_means()

    @property
    def is_known(self) -> bool:
        """Whether any pass was measured."""
        return bool(self.curve.points)

    def knows(self, rows: int) -> bool:
        """Whether a pass of so many rows or fewer was measured: without one, more rows seem to cost nothing."""
        return rows >= self.curve.first

    def pass_s(self, rows: float, requests: int = 1, context: float = 0.0, *, hopeful: bool = False) -> float:
        """hopeful: some more rows than any round had may cost less than the profile says. One round corrects that."""
        widest = self.widest_seen
        share = HOPE if hopeful and rows > widest else 1.0
        extra = self._by_context.value * context + self._by_request.value * (requests - 1)
        return share * self.rows_s(rows) + extra

    def rows_s(self, rows: float) -> float:
        """What rows alone cost."""
        seconds = self._rows_s.get(rows)
        if seconds is None:
            seconds = self._rows_s[rows] = self.curve(rows) * self.ratio(rows)
        return seconds

    def step_s(self, drafter: str, rows: float) -> float:
        """One draft step of so many rows. More rows cost a draft relatively as much as they cost the target."""
        if rows == 0:
            return 0.0
        return self.steps.get(drafter, 0.0) * self._slowdown(drafter) * self._relative_cost(rows)

    def _relative_cost(self, rows: float) -> float:
        """A target pass of so many rows, in units of a pass of one row."""
        return self.rows_s(rows) / (self.ratio.level * self.curve(1))

    def _slowdown(self, drafter: str) -> float:
        """How many times slower the machine is than when the drafter was timed. The first rounds do not count: they
        correct the target's profile, which is not the draft's."""
        if self.num_rounds < SETTLED:
            return 1.0
        return self.ratio.level / self._level_when_timed.get(drafter, self._settled_level)

    def draft_s(self, drafter: str, rows_by_step: Sequence[float], *, hopeful: bool = False) -> float:
        """Chains: how many rows each step has. hopeful: a profile that no round has confirmed may be too high."""
        if not rows_by_step:
            return 0.0
        seconds = self.starts.get(drafter, 0.0) * self._slowdown(drafter)
        before, step_s = 0.0, 0.0
        for rows in rows_by_step:
            if rows != before:  # most steps are like the one before
                before, step_s = rows, self.step_s(drafter, rows)
            seconds += step_s
        return (1.0 - DRIFT) * seconds if hopeful and drafter not in self._drafted else seconds

    def read_s(self, drafter: str, tokens: int, requests: int) -> float:
        """What it takes to read so many tokens that the drafter has not seen, in the first draft step for requests."""
        if tokens == 0:
            return 0.0
        return self.reads.get(drafter, 1.0) * (self.step_s(drafter, tokens + requests) - self.step_s(drafter, requests))

    def has_seen(self, rows: int) -> bool:
        """Whether a round had so many rows; a profile alone may be off."""
        return rows in self._seen

    def observe_pass(self, rows: int, requests: int, context: float, seconds: float) -> None:
        """A round took so long, beside its drafts."""
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
        self._noise += NOISE_FOLLOWS * ((seconds / expected - 1.0) ** 2 - self._noise)
        noise = max(self._noise, LEAST_NOISE)
        if not is_cut:  # a round that was cut does not tell what its context took
            weight = 1.0 / (noise * seconds * seconds)
            self._by_context.add(rows, context, seconds, weight)
            self._by_request.add(rows, requests, seconds - self._by_context.value * context, weight)
        own = max(seconds - slopes, 0.1 * seconds)
        if self.is_profile:
            self.curve.move(rows, own, 0.5)
            return
        self.ratio.observe(rows, own / self.curve(rows), noise)
        if self.num_rounds == SETTLED:
            self._settled_level = self.ratio.level
            self._level_when_timed.clear()
        self._seen.add(rows)
        self.widest_seen = max(rows, self.widest_seen)
        if self.on_drift is not None and self.num_rounds >= SETTLED and abs(self.ratio(1) - 1.0) > DRIFT:
            self.on_drift()
            self.on_drift = None

    def observe_draft(self, drafter: str, rows_by_step: Sequence[float], seconds: float) -> None:
        """Chains took so long to draft, with nothing to catch up on."""
        expected = self.draft_s(drafter, rows_by_step)
        if self.is_profile:
            self._profile_draft(drafter, len(rows_by_step), seconds)
        elif drafter not in self.steps or expected <= 0.0:
            self.steps[drafter] = seconds / sum([self._relative_cost(rows) for rows in rows_by_step])
            self._level_when_timed[drafter] = self.ratio.level
        else:
            self._drafted[drafter] = num_seen = self._drafted.get(drafter, 0) + 1
            share = max(2.0 * FOLLOW, 1.0 / (1.0 + num_seen))  # the first rounds tell how far off the profile is
            factor = self._slowdown(drafter) * (1.0 + share * (min(seconds / expected, OUTLIER) - 1.0))
            self._level_when_timed[drafter] = self.ratio.level
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
        self.starts[drafter] = profiled[short] - short * self.steps[drafter]

    def observe_read(self, drafter: str, tokens: int, requests: int, seconds: float) -> None:
        """Catching up on so many tokens took so much longer than drafting alone."""
        step_s = self.step_s(drafter, requests)
        expected = self.step_s(drafter, tokens + requests) - step_s
        if expected > LEAST_READ * step_s:  # less drowns in noise
            before = self.reads.get(drafter, 1.0)
            share = 1.0 if self.is_profile else 2.0 * FOLLOW
            self.reads[drafter] = before + share * (max(0.0, seconds) / expected - before)

    def profile_pass(self, rows: int, seconds: float) -> None:
        """A pass of so many rows took so long, by itself. The quickest counts."""
        self._rows_s.clear()
        self.curve.move(rows, min(seconds, self.curve.points.get(rows, seconds)), 1.0)

    def extend(self, rows: int, seconds: float) -> None:
        """A prefill of more rows than any pass so far: a first guess of what a round of so many drafts costs."""
        if self.is_known and rows > max(self.curve.points):
            self._rows_s.clear()
            self.curve.move(rows, seconds / self.ratio(rows), 1.0)
