"""What passes cost, learned while serving: seconds by rows, and what a drafter's steps and reading take.

A pass can be disturbed only to take longer, so a sample far above what was expected is clipped and one far below is
believed. Points are kept relative to a common pace: when everything gets slower (longer contexts, a busy machine), the
points that are not visited follow.
"""

from __future__ import annotations

import math
from bisect import bisect_right

EXACT = 48  # passes of more rows share a point with those of about as many
MEMORY = 24  # samples a point remembers
PACE = 0.04  # how quickly the common pace follows
GUESSED_SLOPE = 0.04  # of a pass, per row, as long as only one point is known
NEAR = 1.1  # passes whose rows differ by no more cost about the same
OPTIMISM = 0.5  # how much of the last slope is believed beyond the last point: what looks good there gets measured


class CostCurve:
    """Seconds of a pass by its rows: never falling, interpolated, and guessed beyond what was seen."""

    __slots__ = ("_bold", "_bold_knots", "_hints", "_knots", "_pace", "_points", "_seconds", "_slope")

    def __init__(self) -> None:
        self._points: dict[int, list[float]] = {}  # rows, or their logarithm -> [rows, seconds / pace, samples]
        self._hints: dict[int, list[float]] = {}  # [rows, seconds]
        self._pace = 1.0
        self._knots: list[float] = []  # rows; empty when points have changed since
        self._seconds: list[float] = []
        self._bold_knots: list[float] = []
        self._bold: list[float] = []
        self._slope = 0.0

    @property
    def is_known(self) -> bool:
        return bool(self._points)

    @property
    def most_rows(self) -> float:
        """Of the widest pass that was measured."""
        return max([point[0] for point in (*self._points.values(), *self._hints.values())], default=0.0)

    @property
    def least_rows(self) -> float:
        return min([point[0] for point in self._points.values()], default=0.0)

    def knows(self, least: float, most: float) -> bool:
        """Whether a pass of that many rows was measured."""
        return any(least <= point[0] <= most for point in self._points.values())

    def hint(self, rows: float, seconds: float) -> None:
        """A pass that read a prompt: it says something about wider passes than those that were measured."""
        self._hints[int(8 * math.log(rows + 1.0))] = [rows, seconds]
        self._knots = []

    def add(self, rows: float, seconds: float) -> None:
        key = int(rows + 0.5) if rows <= EXACT else EXACT + int(8 * math.log(rows / EXACT)) + 1
        point = self._points.get(key)
        self._knots = []
        if point is None:
            if self._points:  # a first sample is the least certain
                seconds = min(seconds, 4.0 * self.seconds(rows))
                self._knots = []
            self._points[key] = [rows, seconds / self._pace, 1.0]
            return
        point[0] += (rows - point[0]) * 0.1
        ratio = seconds / (point[1] * self._pace) if point[1] > 0.0 else 2.0
        if ratio < 0.5 or point[1] <= 0.0:
            point[1], point[2] = seconds / self._pace, 1.0
            return
        change = min(ratio, 2.0) - 1.0
        point[2] = min(point[2] + 1.0, MEMORY)
        point[1] *= 1.0 + change / point[2]
        if point[2] > 4.0:
            self._pace *= 1.0 + PACE * change

    def seconds(self, rows: float) -> float:
        """Of a pass of `rows` rows; a guess of the shape 1 + a little per row when nothing is known."""
        if not self._knots:
            if not self._points and not self._hints:
                return 1.0 + GUESSED_SLOPE * (rows - 1.0)
            self._settle()
        return self._read(self._knots, self._seconds, self._slope, rows)

    def hopeful(self, rows: float) -> float:
        """As few seconds as it may take, where it was not measured."""
        if not self._knots:
            if not self._points and not self._hints:
                return 1.0 + GUESSED_SLOPE * (rows - 1.0)
            self._settle()
        return self._read(self._bold_knots, self._bold, self._slope * OPTIMISM, rows)

    def _read(self, knots: list[float], seconds: list[float], slope: float, rows: float) -> float:
        right = bisect_right(knots, rows)
        if right == 0:  # at least in proportion, at most as the first known slope says
            first, cost = knots[0], seconds[0]
            return max(cost * rows / first, cost - self._first_slope() * (first - rows))
        if right == len(knots):
            return seconds[-1] + slope * (rows - knots[-1])
        low = knots[right - 1]
        share = (rows - low) / (knots[right] - low)
        return seconds[right - 1] + share * (seconds[right] - seconds[right - 1])

    def _first_slope(self) -> float:
        if len(self._knots) == 1:
            return GUESSED_SLOPE * self._seconds[0] / (1.0 + GUESSED_SLOPE * (self._knots[0] - 1.0))
        return (self._seconds[1] - self._seconds[0]) / (self._knots[1] - self._knots[0])

    def _settle(self) -> None:
        """Order the points and pool neighbours that would fall (weighted means)."""
        pools: list[list[float]] = []  # [seconds, weight, last index]
        points = sorted(self._points.values())
        widest = 1.5 * points[-1][0] if points else 0.0
        points += sorted([rows, cost / self._pace, 0.1] for rows, cost in self._hints.values() if rows > widest)
        for index, (_, cost, samples) in enumerate(points):
            pools.append([cost, samples, index])
            while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                high = pools.pop()
                low = pools[-1]
                weight = low[1] + high[1]
                low[0], low[1], low[2] = (low[0] * low[1] + high[0] * high[1]) / weight, weight, high[2]
        self._knots = [point[0] for point in points]
        self._seconds = []
        for cost, _, last in pools:
            self._seconds += [cost * self._pace] * (int(last) + 1 - len(self._seconds))
        self._slope = self._last_slope()
        self._bend()

    def _bend(self) -> None:
        """In a gap the curve may go on as before, until only a split of the next pass would be quicker: n rows take at
        least n / m of what m rows take. What looks good there gets measured."""
        knots, seconds = self._bold_knots, self._bold = list(self._knots), list(self._seconds)
        for right in range(len(knots) - 1, 0, -1):
            left, end = knots[right - 1], knots[right]
            slope = 0.0
            if right > 1:
                slope = (seconds[right - 1] - seconds[right - 2]) / (left - knots[right - 2])
            share = seconds[right] / end
            if slope < share:
                bend = (seconds[right - 1] - slope * left) / (share - slope)
                if left < bend < end:
                    knots.insert(right, bend)
                    seconds.insert(right, bend * share)

    def _last_slope(self) -> float:
        """Per row, beyond the last point: from a point well before it, since neighbours differ by chance."""
        knots, seconds = self._knots, self._seconds
        if len(knots) == 1:
            return self._first_slope()
        before = max(0, bisect_right(knots, 0.6 * knots[-1]) - 1)
        return (seconds[-1] - seconds[before]) / (knots[-1] - knots[before])


class DraftCosts:
    """Seconds of one drafter: a step by the jobs that draft in it, and what it takes to read what it has not seen."""

    __slots__ = ("_held_back", "read_s", "steps")

    def __init__(self) -> None:
        self.steps = CostCurve()
        self.read_s: float | None = None  # per token read, beyond the first of a step
        self._held_back: list[tuple[float, int, float, int]] = []  # reading rounds, until a step's cost is known

    def step_s(self, jobs: float, passes: CostCurve) -> float:
        """Of a step for so many jobs; where that was not measured, as the target's passes go."""
        known = min(max(jobs, self.steps.least_rows), self.steps.most_rows)
        seconds = self.steps.seconds(known)
        return seconds if known == jobs else seconds * passes.seconds(jobs) / passes.seconds(known)

    def add(self, seconds: float, steps: int, rows: float, unread: int) -> None:
        """A round of `steps` steps with `rows` jobs each on average; `unread` tokens had to be read first."""
        if unread > 4 * rows + 4:
            if not self.steps.is_known:
                self._held_back = [(seconds, steps, rows, unread)]
                self.read_s = seconds / unread
                return
            self._add_reading(seconds, steps, rows, unread)
            return
        self.steps.add(rows, seconds / steps)
        while self._held_back:
            self.read_s = None
            self._add_reading(*self._held_back.pop())

    def _add_reading(self, seconds: float, steps: int, rows: float, unread: int) -> None:
        sample = max(0.0, seconds - steps * self.steps.seconds(rows)) / unread
        self.read_s = (
            sample
            if self.read_s is None
            else self.read_s + 0.3 * (min(sample, 4 * self.read_s + self.steps.seconds(1.0)) - self.read_s)
        )
