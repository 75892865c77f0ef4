"""Is the chosen width ever slower? Every mix of acceptance, draft cost, pass cost and batch size, in virtual time.

A cell answers the same requests by width 0, by every fixed width and by the engine's own choice (`auto`), each with a
fresh engine, and compares the seconds. Draft passes cost `draft_cost` times what the target needs for as many rows,
reading the prompt and catching up included. What a fixed width does depends on no cost, so it runs once and is priced
for every curve.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from outrider.backends.base import Spans
from outrider.backends.mock import MockBackend
from outrider.clock import VirtualClock
from outrider.config import MockConfig
from outrider.engine.engine import Engine
from outrider.types import Request, SamplingParams, Scores

CURVES: dict[str, Callable[[float], float]] = {  # rows of a pass -> its cost, 1 for a single row
    "flat": lambda rows: 1.0 + 0.01 * (rows - 1),
    "linear": lambda rows: 1.0 + 0.15 * (rows - 1),
    "compute": lambda rows: rows,
    "cpu": lambda rows: 1.0 if rows <= 1 else 3.6 + 0.3 * max(0.0, rows - 8),
    "knee": lambda rows: 1.0 + 0.005 * (rows - 1) + max(0.0, rows - 32) / 32,
}
ACCEPTANCE: tuple[tuple[float, ...], ...] = (
    (0.0,),
    (0.1,),
    (0.3,),
    (0.5,),
    (0.7,),
    (0.9,),
    (0.98,),
    (0.9, 0.05),  # changes midway
    (0.05, 0.9),
)
DRAFT_COSTS = (0.0, 0.02, 0.1, 0.3, 0.7)
TOKENS = {1: 1000, 4: 500, 16: 256}  # batch size -> tokens of each answer
FIXED = (*range(9), 12, 16)
PROMPT = 16
LEAST_OF_PLAIN = 0.97
LEAST_OF_BEST = 0.95
MODEL = MockConfig(vocab_size=16, seed=3, num_contexts=1021, context=2048)


@dataclass(frozen=True, slots=True)
class Cell:
    """`acceptance` of the draft in each part of an answer; `jitter` is the most a pass may take longer or shorter."""

    acceptance: tuple[float, ...]
    draft_cost: float
    curve: str
    batch: int
    jitter: float = 0.0
    seed: int = 0

    @property
    def name(self) -> str:
        kept = " then ".join(f"{share:g}" for share in self.acceptance)
        return f"accept {kept}, draft {self.draft_cost:g}, {self.curve}, batch {self.batch}"


@dataclass(frozen=True, slots=True)
class Reading:
    """Speeds of `auto`: above 1 it was faster. The best fixed width is known only afterwards."""

    cell: Cell
    of_plain: float
    of_best: float
    best_width: int
    widths: Mapping[int, int]  # chosen width -> rounds

    @property
    def holds(self) -> bool:
        return self.of_plain >= LEAST_OF_PLAIN and self.of_best >= LEAST_OF_BEST


def cells(*, jitter: float = 0.0) -> Iterator[Cell]:
    """The whole grid."""
    for batch in TOKENS:
        for acceptance in ACCEPTANCE:
            for curve in CURVES:
                for draft_cost in DRAFT_COSTS:
                    yield Cell(acceptance, draft_cost, curve, batch, jitter)


def readings(*, quick: bool = False, jitter: float = 0.0) -> Iterator[Reading]:
    """Every cell, as it is measured; `quick` takes some from all over the grid."""
    for index, cell in enumerate(cells(jitter=jitter)):
        if not quick or index % 17 == 0:
            yield measure(cell)


def measure(cell: Cell) -> Reading:
    seconds = {width: _priced(cell, width) for width in FIXED}
    best_width = min(seconds, key=seconds.__getitem__)
    clock = VirtualClock()
    engine, auto = _run(cell.acceptance, cell.batch, None, _pricing(cell, clock), clock)
    widths = dict(sorted(engine.statistics.widths.items()))
    return Reading(cell, seconds[0] / auto, seconds[best_width] / auto, best_width, widths)


Price = Callable[[int, bool], None]  # (rows of a pass, whether the draft made it)


def _pricing(cell: Cell, clock: VirtualClock) -> Price:
    curve, cost = CURVES[cell.curve], cell.draft_cost
    noise = random.Random(7)

    def price(rows: int, is_draft: bool) -> None:
        seconds = curve(rows) * (cost if is_draft else 1.0)
        clock.sleep(seconds * (1.0 + noise.uniform(-cell.jitter, cell.jitter)))

    return price


def _priced(cell: Cell, width: int) -> float:
    """Seconds of a fixed width."""
    curve = CURVES[cell.curve]
    # plain decoding is the same whatever the draft
    passes = _passes(cell.acceptance if width else (0.0,), cell.batch, width)
    return sum(
        count * curve(rows) * (cell.draft_cost if is_draft else 1.0) for (rows, is_draft), count in passes.items()
    )


@cache
def _passes(acceptance: tuple[float, ...], batch: int, width: int) -> Counter[tuple[int, bool]]:
    """How many passes of how many rows a fixed width makes, of the target and of the draft."""
    passes: Counter[tuple[int, bool]] = Counter()

    def count(rows: int, is_draft: bool) -> None:
        passes[rows, is_draft] += 1

    _run(acceptance, batch, width, count, VirtualClock())
    return passes


def _run(
    acceptance: tuple[float, ...], batch: int, width: int | None, price: Price, clock: VirtualClock
) -> tuple[Engine, float]:
    """Answer the requests of a cell with a fresh engine, and the seconds of that. Loading, with its profile, is apart."""
    num_tokens = TOKENS[batch]
    target = _PricedMock(price)
    draft = _Guesser(price, acceptance, num_tokens)
    engine = Engine.load(target, draft=draft, width=width, max_batch=batch, clock=clock, threaded=False)
    started = clock.now()
    greedy = SamplingParams(temperature=0.0)
    engine.generate(
        [
            Request(prompt=[index, *range(1, PROMPT)], sampling=greedy, max_tokens=num_tokens)
            for index in range(batch)
        ]
    )
    return engine, clock.now() - started


class _PricedMock(MockBackend):
    """A mock whose passes are told to `price`."""

    is_draft = False

    def __init__(self, price: Price) -> None:
        super().__init__(MODEL)
        self._price = price

    def score(self, spans: Spans, hidden: Sequence[int] = ()) -> Scores:
        scores = super().score(spans, hidden)
        self._price(sum(spans.counts), self.is_draft)
        return scores


class _Guesser(_PricedMock):
    """The same model, except that its first choice is wrong in a share of the contexts."""

    is_draft = True

    def __init__(self, price: Price, acceptance: Sequence[float], num_tokens: int) -> None:
        super().__init__(price)
        self._acceptance = acceptance
        self._part = num_tokens / len(acceptance)

    def score(self, spans: Spans, hidden: Sequence[int] = ()) -> Scores:
        scores = super().score(spans, hidden)
        wrong, at = [], 0
        for slot, rows in zip(spans.slots, spans.rows, strict=True):
            states = self._states[slot]
            for place in range(len(states) - rows, len(states)):
                part = int(max(0, place - PROMPT) / self._part)
                share = self._acceptance[min(part, len(self._acceptance) - 1)]
                wrong.append(_uniform(states[place]) >= share)
            at += rows
        logits: Any = scores.logits
        if any(wrong):
            logits[wrong] = np.roll(logits[wrong], 1, axis=1)
        return scores


def _uniform(state: int) -> float:
    """A number in [0, 1) for every context."""
    return ((state * 0xD1B54A32D192ED03) & ((1 << 64) - 1)) / 2.0**64
