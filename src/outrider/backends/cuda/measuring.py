"""How long passes take, measured before anybody asks (`backends.base.Measured`)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from outrider.backends.base import Spans
from outrider.backends.cuda.rolling import RollingPasses
from outrider.backends.torch_common import on
from outrider.types import SamplingParams, Slot

WARM = 3  # runs before it counts: the first builds what it needs, the second is recorded
REPEATS = 5


class MeasuredPasses(RollingPasses):
    """Sequences of its own are opened for a measurement, and closed again."""

    measures_cpu = False  # for tests: on a CPU nothing runs ahead, so there is nothing to learn

    def pass_s(self, jobs: int, rows: int, context: int = 0, hidden: Sequence[int] = ()) -> float | None:
        with self.sequences(jobs, context, rows) as slots:
            return None if slots is None else self.median_s(partial(self._pass, slots, context, rows, hidden))

    def roll_s(self, jobs: int, steps: int, context: int = 0) -> float | None:
        with self.sequences(jobs, context, 1 + steps) as slots:
            if slots is None or not self._roll_once(slots, context, steps):
                return None
            return self.median_s(partial(self._roll_once, slots, context, steps))

    @contextmanager
    def sequences(self, jobs: int, context: int, room: int) -> Iterator[list[Slot] | None]:
        """So many of this length, or None where they do not fit."""
        if self.device.type != "cuda" and not self.measures_cpu:
            yield None
            return
        slots: list[Slot] = []
        try:
            while len(slots) < jobs and (slot := self.pages.open((), context + room)) is not None:
                slots.append(slot)
                if context:
                    self.score(Spans([slot], [0], [context], [0], np.arange(context)))
            yield slots if len(slots) == jobs else None
        finally:
            for slot in slots:
                self.close(slot)  # a draft that shares pages only lets go of what it holds
                if slot in self.pages.leases:
                    self.pages.close(slot)

    def _pass(self, slots: list[Slot], start: int, rows: int, hidden: Sequence[int]) -> None:
        count = len(slots)
        tokens = np.arange(rows * count) % self.info.vocab_size
        self.score(Spans(slots, [start] * count, [rows] * count, [rows] * count, tokens), hidden)
        self._back(slots, start)

    def _roll_once(self, slots: list[Slot], start: int, steps: int) -> bool:
        """One token each is read, as in a round."""
        count = len(slots)
        drawing: Any = self.ops.drawing([Greedy(slot) for slot in slots], steps)  # type: ignore[misc]
        spans = Spans(slots, [start] * count, [1] * count, [1] * count, np.arange(count))
        rolled = drawing is not None and self.roll(spans, steps, drawing)
        self._back(slots, start)
        return rolled

    def _back(self, slots: list[Slot], length: int) -> None:
        for slot in slots:
            self.rewind(slot, length)

    def median_s(self, run: Callable[[], object]) -> float:
        """Of runs that are queued one behind the other."""
        for _ in range(WARM):
            run()
        if self.device.type != "cuda":
            marks = [time.perf_counter()]
            for _ in range(REPEATS):
                run()
                marks.append(time.perf_counter())
            return statistics.median(after - before for before, after in pairwise(marks))
        with on(self.device):
            events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            events[0].record()
            for event in events[1:]:
                run()
                event.record()
            torch.cuda.synchronize()
        spent: list[float] = [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]
        return statistics.median(spent)


class Greedy:
    """As much of a greedy job as drawing its drafts needs."""

    rule, words, grammar, min_length, tokens = "coupled", (0, 0), None, 0, (0,)

    def __init__(self, number: int) -> None:
        self.id, self.params = -1 - number, SamplingParams(temperature=0.0)
