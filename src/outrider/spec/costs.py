"""What passes cost, learned while serving: seconds of a target pass by its rows, of a drafter by the depth it drafts.

A pass can be disturbed only to take longer, so a sample far above what was expected is clipped and one far below is
believed. Points are kept relative to a common pace: when everything gets slower (longer contexts, a busy machine), the
points that are not visited follow.
"""

from __future__ import annotations

import math
from bisect import bisect_right

EXACT = 48  # passes of more rows share a point with those of about as many
LEAST = 1e-9  # seconds: nothing takes no time
CLASSES = 8  # of those, per factor of e
MEMORY = 24  # samples a point remembers
EXPECTED = 4.0  # samples that one counts for which was taken beforehand
WELL_KNOWN = 8  # samples, after which one more changes little:
HINT = 0.11  # of a sample is what a pass tells that read a prompt
FRESH = 8.0  # samples of other sizes that change nothing of what a point remembers
FADING = 16.0  # further ones after which that counts for half: contexts grow meanwhile
AT_MOST = 0.1  # of a sample is what can be less, so that the first real one takes its place
SELDOM = 4  # of those so many are taken in together
PACE = 0.07  # how quickly the common pace follows what is well known,
OWN = 0.25  # of which only so much is then thought to be its own
NOISE = 0.04  # how quickly the mean of what samples are off follows
FIRST_SLOPE = 0.04  # of a one-row pass, per row, as long as only one point is known
DEVICE = 1.15  # of a price, up to which it is the device that a round waited for
FLOOR_MEMORY = 12  # samples that a floor remembers
HOPE = 0.5  # share of the last slope that a hopeful guess goes on with


class CostCurve:
    """Seconds by size: never falling, interpolated between what was measured, guessed beyond.

    A first point says nothing about the slope: `in_proportion` guesses that half the size costs half the seconds, else
    that size matters little.
    """

    __slots__ = (
        "_hints",
        "_hopeful",
        "_in_proportion",
        "_is_settled",
        "_now",
        "_num_added",
        "_pace",
        "_points",
        "_usual",
        "noise",
    )

    def __init__(self, *, in_proportion: bool = False) -> None:
        self._in_proportion = in_proportion
        # class of sizes -> [size, seconds / pace, samples, when the last was]
        self._points: dict[int, list[float]] = {}
        self._hints: dict[int, list[float]] = {}  # the same, of passes that read prompts
        self._pace = 1.0
        self._usual = self._hopeful = Line([], [], 0.0)
        self._is_settled = False  # whether the lines are those of the points
        self._num_added = 0
        self._now = 0.0  # samples so far
        self.noise = 0.0  # how far samples are usually off, as a share

    @property
    def is_known(self) -> bool:
        return bool(self._points)

    @property
    def largest(self) -> float:
        """The largest size of which something is known."""
        return max([point[0] for point in (*self._points.values(), *self._hints.values())], default=0.0)

    def knows(self, least: float, most: float) -> bool:
        """Whether a size between these was measured."""
        return any(least <= point[0] <= most for point in self._points.values())

    def samples(self, least: float, most: float) -> float:
        """How often such sizes were measured, as far as it remembers."""
        points = [point for point in self._points.values() if least <= point[0] <= most and point[2] >= 1.0]
        return sum([max(1.0, self._left(point)) for point in points])

    def _left(self, point: list[float]) -> float:
        """What is left of a point's samples."""
        return point[2] * math.exp2(-max(0.0, self._now - point[3] - FRESH) / FADING)

    @property
    def most_per_second(self) -> float:
        """Rows that passes of several can bring at most: fewer take at least their share of a larger pass. (A single
        one may take less: libraries multiply a matrix with one vector by other code.)"""
        return min(
            [point[0] / (point[1] * self._pace) for point in self._points.values() if point[1]], default=math.inf
        )

    def hint(self, size: float, seconds: float) -> None:
        """A pass that read a prompt: it tells of larger passes than those that were measured."""
        self._hints[int(CLASSES * math.log(size + 1.0))] = [size, max(seconds, LEAST) / self._pace, HINT, 0.0]
        self._is_settled = False

    def expect(self, size: float, seconds: float) -> None:
        """What was measured beforehand: one round that is disturbed does not change it much."""
        self.add(size, seconds)
        for point in self._points.values():
            point[2], point[3] = max(point[2], EXPECTED), self._now

    def add(self, size: float, seconds: float, *, at_most: bool = False) -> None:
        """at_most: it can take less, and usually does; that counts until something is known for certain."""
        key = int(size + 0.5) if size <= EXACT else EXACT + 1 + int(CLASSES * math.log(size / EXACT))
        point, seconds = self._points.get(key), max(seconds, LEAST)
        if not at_most:
            self._now += 1.0
        if point is None:
            if self._points:  # the first sample of a point is the least certain
                seconds = min(seconds, 4.0 * self.seconds(size))
            self._points[key] = [size, seconds / self._pace, AT_MOST if at_most else 1.0, self._now]
        elif at_most:
            point[1] = min(point[1], seconds / self._pace)
        elif seconds < 0.5 * point[1] * self._pace:
            point[1], point[2], point[3] = seconds / self._pace, 1.0, self._now
        else:
            change = min(seconds / (point[1] * self._pace), 2.0) - 1.0
            samples = min((self._left(point) if point[2] >= 1.0 else point[2]) + 1.0, MEMORY)
            size = point[0] + 0.1 * (size - point[0])
            self.noise += NOISE * (abs(change) - self.noise)
            is_common = samples >= WELL_KNOWN  # what changes there changes everywhere: contexts, or the machine
            if is_common:
                self._pace *= 1.0 + PACE * change
            own = (OWN if is_common else 1.0) * change / samples
            self._points[key] = [size, point[1] * (1.0 + own), samples, self._now]
            self._num_added += 1
            if samples >= WELL_KNOWN and self._num_added % SELDOM:
                return
        self._is_settled = False

    def seconds(self, size: float) -> float:
        """What it takes; nothing known yet, in units of the smallest size."""
        if not self._is_settled:
            self._settle()
        return self._usual.at(size)

    def hopeful(self, size: float) -> float:
        """As little as it may take, where it was not measured."""
        if not self._is_settled:
            self._settle()
        return self._hopeful.at(size)

    def _settle(self) -> None:
        points = sorted(self._points.values())
        widest = 1.5 * points[-1][0] if points else 0.0
        points += sorted(hint for hint in self._hints.values() if hint[0] > widest)
        points = points or [[1.0, 1.0 / self._pace, 1.0, 0.0]]
        points = self._below(points)
        sizes, seconds = self._line(points)
        self._usual = Line(sizes, seconds, self._last_slope(sizes, seconds))
        # A point measured seldom may have been measured too high
        low = [
            cost * (1.0 - self.noise / math.sqrt(max(1.0, point[2])))
            for cost, point in zip(seconds, points, strict=True)
        ]
        self._hopeful = Line(*_bent(sizes, low), HOPE * self._last_slope(sizes, seconds))
        self._is_settled = True

    def _below(self, points: list[list[float]]) -> list[list[float]]:
        """Without what can be less, unless even that is below what the others say."""
        sure = [point for point in points if point[2] != AT_MOST]
        if all(point[2] == HINT for point in sure):
            return points
        sizes, seconds = self._line(sure)
        line = Line(sizes, seconds, self._last_slope(sizes, seconds))
        return [point for point in points if point[2] != AT_MOST or point[1] * self._pace < line.at(point[0])]

    def _line(self, points: list[list[float]]) -> tuple[list[float], list[float]]:
        return [point[0] for point in points], [cost * self._pace for cost in _never_falling(points)]

    def _last_slope(self, sizes: list[float], seconds: list[float]) -> float:
        """Beyond the last point: from a point well before it, since neighbours differ by chance."""
        if len(sizes) == 1:
            if self._in_proportion:
                return seconds[0] / sizes[0]
            return FIRST_SLOPE * seconds[0] / (1.0 + FIRST_SLOPE * (sizes[0] - 1.0))
        before = max(0, bisect_right(sizes, 0.6 * sizes[-1]) - 1)
        return (seconds[-1] - seconds[before]) / (sizes[-1] - sizes[before])


class Line:
    """Seconds at some sizes, straight between them; `slope` goes on beyond the last."""

    __slots__ = ("_seconds", "_sizes", "_slope")

    def __init__(self, sizes: list[float], seconds: list[float], slope: float) -> None:
        self._sizes = sizes
        self._seconds = seconds
        self._slope = slope

    def at(self, size: float) -> float:
        sizes, seconds = self._sizes, self._seconds
        right = bisect_right(sizes, size)
        if right == len(sizes):
            return seconds[-1] + self._slope * (size - sizes[-1])
        if right == 0:  # not less than in proportion, not more than the slope that follows says
            slope = self._slope if len(sizes) == 1 else (seconds[1] - seconds[0]) / (sizes[1] - sizes[0])
            return max(seconds[0] * size / sizes[0], seconds[0] - slope * (sizes[0] - size))
        left = right - 1
        share = (size - sizes[left]) / (sizes[right] - sizes[left])
        return seconds[left] + share * (seconds[right] - seconds[left])


def _never_falling(points: list[list[float]]) -> list[float]:
    """The seconds of points in order of size; neighbours that would fall are pooled (weighted means)."""
    pools: list[list[float]] = []  # [seconds, samples, points]
    for _, cost, samples, _ in points:
        pools.append([cost, samples, 1.0])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            high, low = pools.pop(), pools.pop()
            weight = low[1] + high[1]
            pools.append([(low[0] * low[1] + high[0] * high[1]) / weight, weight, low[2] + high[2]])
    return [cost for cost, _, count in pools for _ in range(int(count))]


def _bent(sizes: list[float], seconds: list[float]) -> tuple[list[float], list[float]]:
    """Between two points the curve may go on as before them until n rows take n / m of what m rows take: less would
    make m rows in parts quicker than in one pass."""
    sizes, seconds = list(sizes), list(seconds)
    for right in range(len(sizes) - 1, 0, -1):
        left = right - 1
        slope = (seconds[left] - seconds[left - 1]) / (sizes[left] - sizes[left - 1]) if left else 0.0
        share = seconds[right] / sizes[right]
        if slope < share:
            bend = (seconds[left] - slope * sizes[left]) / (share - slope)
            if sizes[left] < bend < sizes[right]:
                sizes.insert(right, bend)
                seconds.insert(right, bend * share)
    return sizes, seconds


class Floor:
    """What drafting takes however little is drafted, where a device goes on by itself and the host says what: for that
    the device waits, if it is done sooner."""

    __slots__ = ("_samples", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._samples = 0

    def add(self, seconds: float, price: float, *, at_most: bool = False) -> None:
        """price: of the device, which it had to take in any case."""
        if at_most or seconds <= DEVICE * price:
            if seconds < self.seconds:  # and if that was chance, a few rounds say so
                self.seconds, self._samples = seconds, min(self._samples, 2)
            return
        self._samples = min(self._samples + 1, FLOOR_MEMORY)
        self.seconds += (min(seconds, 2.0 * max(price, self.seconds)) - self.seconds) / self._samples


class DraftCosts:
    """Seconds of one drafter in a round: by depth, for about as many jobs, and for tokens it has not read yet.

    Where they were measured beforehand, that is what the device takes, and rounds say what the host does.
    """

    __slots__ = ("_begin_s", "_bounds", "_by_jobs", "_floors", "_is_priced", "_num_readings", "_reading", "read_s")

    def __init__(self) -> None:
        self._by_jobs: dict[int, tuple[float, CostCurve]] = {}  # class of job counts -> (jobs, seconds by depth)
        self._bounds: dict[int, tuple[float, CostCurve]] = {}  # the same, of rounds that can take less
        self._floors: dict[int, Floor] = {}  # by class of job counts, where it was measured beforehand
        self._reading: tuple[float, int, float, int] | None = None  # a round that waits for one without reading
        self._num_readings = 0
        self.read_s = 0.0  # per token read
        self._begin_s = 0.0  # and for each who begins, where the other was measured beforehand
        self._is_priced = False

    @property
    def is_known(self) -> bool:
        return bool(self._by_jobs or self._bounds)

    @property
    def is_sure(self) -> bool:
        return bool(self._by_jobs)

    @property
    def hope(self) -> float:
        """The share of `seconds` that it may take, where only more was seen."""
        return HOPE if self._bounds and not self._by_jobs else 1.0

    def expect(self, seconds: float, depth: int, jobs: float) -> None:
        """What was measured beforehand."""
        self._by_jobs.setdefault(jobs_class(jobs), (jobs, CostCurve(in_proportion=True)))[1].expect(depth, seconds)
        self._floors.setdefault(jobs_class(jobs), Floor())

    def expect_reading(self, read_s: float) -> None:
        """What a token takes was measured; what more is seen comes with reading at all."""
        self.read_s, self._is_priced = read_s, True

    def reading_s(self, unread: float) -> float:
        """Of reading so many tokens."""
        return self._begin_s + self.read_s * unread if unread else 0.0

    def seconds(self, depth: float, jobs: float, passes: CostCurve) -> float:
        """Of drafting `depth` tokens for each of `jobs` on average. Where it was not measured, as target passes go."""
        key = jobs_class(jobs)
        guess = self._guess(depth, jobs, passes)
        if self._floors:
            nearest = min(self._floors, key=lambda known: abs(known - key))
            return max(guess, self._floors[nearest].seconds)
        return min(guess, self._bounds[key][1].seconds(depth)) if key in self._bounds else guess

    def _guess(self, depth: float, jobs: float, passes: CostCurve) -> float:
        """What was measured, for so many jobs or the nearest number."""
        curves = self._by_jobs or self._bounds
        entry = curves.get(jobs_class(jobs))
        if entry is not None:
            return entry[1].seconds(depth)
        known, curve = min(curves.values(), key=lambda entry: abs(math.log(entry[0] / jobs)))
        return curve.seconds(depth) * passes.seconds(jobs) / passes.seconds(known)

    def add(
        self, seconds: float, depth: int, jobs: float, unread: int, passes: CostCurve, *, at_most: bool = False
    ) -> None:
        """A round with `depth` steps for `jobs` on average, of which `unread` tokens had to be read first."""
        if unread > 4.0 * jobs + 4.0:
            self._reading = (seconds, depth, jobs, unread)
            if not self.is_known:
                if not self._is_priced:
                    self.read_s = seconds / unread  # at most
                return
        elif self._floors:
            floor = self._floors.setdefault(jobs_class(jobs), Floor())
            floor.add(seconds, self._guess(depth, jobs, passes), at_most=at_most)
        else:
            curves = self._bounds if at_most else self._by_jobs
            curve = curves.setdefault(jobs_class(jobs), (jobs, CostCurve(in_proportion=True)))[1]
            curve.add(depth, seconds)
        if self._reading is not None:
            seconds, depth, jobs, unread = self._reading
            self._reading = None
            self._num_readings = min(self._num_readings + 1, 3)
            self._learn_reading(max(0.0, seconds - self.seconds(depth, jobs, passes)), unread, jobs, passes)

    def _learn_reading(self, seconds: float, unread: int, jobs: float, passes: CostCurve) -> None:
        """Clipped, like the seconds of a pass: the first may have built something."""
        if self._is_priced:
            most = max(2.0 * self._begin_s, 2.0 * passes.seconds(1))
            sample = min(max(0.0, seconds - self.read_s * unread) / max(1.0, jobs), most)
            self._begin_s += (sample - self._begin_s) / self._num_readings
            return
        most = passes.seconds(unread) / unread if passes.is_known else seconds / unread  # the target reads so quickly
        if self._num_readings > 1:
            most = max(most, 2.0 * self.read_s)
        self.read_s += (min(seconds / unread, most) - self.read_s) / self._num_readings


def jobs_class(jobs: float) -> int:
    return round(2.0 * math.log2(jobs))
