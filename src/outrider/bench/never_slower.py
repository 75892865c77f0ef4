"""Is the chosen width ever slower? Every mix of acceptance, draft cost, pass cost and batch size, in virtual time.

A cell answers the same requests by width 0, by every fixed width and by the engine's own choice (`auto`), each with a
fresh engine, and compares the seconds. Draft passes cost `draft_cost` times what the target needs for as many rows,
reading the prompt and catching up included. What a fixed width does depends on no cost, so its passes are counted and
priced (`fixed_width.py`). Costs are profiled at load by the same code as for a real model, never handed over.

`random_cells` goes off the grid: random acceptance and costs, jitter, passes that grow dearer with the context, and a
profile that is wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from outrider.backends.base import Spans
from outrider.backends.mock import MockBackend
from outrider.bench.fixed_width import Passes, count_passes
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
LEAST_OF_BEST = 0.90  # in any cell,
USUAL_OF_BEST = 0.95  # in nine of ten,
MEAN_OF_BEST = 0.99  # and on average
MODEL = MockConfig(vocab_size=16, seed=3, num_contexts=1021, context=2048)


@dataclass(frozen=True, slots=True)
class Cell:
    """`acceptance` of the draft in each part of an answer; `jitter` is the most a pass may take longer or shorter.

    A target pass takes `context_cost` more for every thousand tokens in its cache. The profile at load sees passes of
    the target and of the draft that take `profile_error` times as long as later ones.
    """

    acceptance: tuple[float, ...]
    draft_cost: float
    curve: str
    batch: int
    jitter: float = 0.0
    context_cost: float = 0.0
    profile_error: tuple[float, float] = (1.0, 1.0)
    seed: int = 7

    @property
    def name(self) -> str:
        kept = " then ".join(f"{share:g}" for share in self.acceptance)
        name = f"accept {kept}, draft {self.draft_cost:g}, {self.curve}, batch {self.batch}"
        if self.context_cost:
            errors = " and ".join(f"{error:.2f}" for error in self.profile_error)
            name += f", context {self.context_cost:g}, profile off by {errors}"
        return name


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


def random_cells(seed: int, count: int = 100) -> Iterator[Cell]:
    """Cells off the grid."""
    dice = random.Random(seed)
    for number in range(count):
        parts = dice.choice((1, 1, 1, 2))
        yield Cell(
            acceptance=tuple(round(dice.random(), 2) for _ in range(parts)),
            draft_cost=round(dice.choice((0.0, 0.5, 0.5)) * dice.random() ** 2, 3),
            curve=dice.choice(list(CURVES)),
            batch=dice.choice(list(TOKENS)),
            jitter=0.05,
            context_cost=round(dice.random(), 2),
            profile_error=(dice.uniform(0.7, 1.3), dice.uniform(0.7, 1.3)),
            seed=number,
        )


def readings(*, quick: bool = False, jitter: float = 0.0) -> Iterator[Reading]:
    """Every cell, as it is measured; `quick` takes some from all over the grid."""
    for index, cell in enumerate(cells(jitter=jitter)):
        if not quick or index % 17 == 0:
            yield measure(cell)


def random_readings(seed: int, *, quick: bool = False) -> Iterator[Reading]:
    """Random cells, as they are measured."""
    for cell in random_cells(seed, 20 if quick else 100):
        yield measure(cell)


def summary(readings: Sequence[Reading]) -> str:
    """What all cells come to, in a line."""
    best, plain = sorted(reading.of_best for reading in readings), min(reading.of_plain for reading in readings)
    mean, usual = sum(best) / len(best), sum(share >= USUAL_OF_BEST for share in best) / len(best)
    return (
        f"{len(best)} cells: at least {plain:.3f} of plain decoding; of the best fixed width {mean:.3f} on average, "
        f"{USUAL_OF_BEST} or more in {usual:.1%}, at least {best[0]:.3f}"
    )


def measure(cell: Cell) -> Reading:
    seconds = {width: _priced(cell, width) for width in FIXED}
    best_width = min(seconds, key=seconds.__getitem__)
    clock = VirtualClock()
    meter = _Meter(cell, clock)
    engine, auto = _run(cell.acceptance, cell.batch, None, meter.charge, clock, meter.end_of_profile)
    widths = dict(sorted(engine.statistics.widths.items()))
    return Reading(cell, seconds[0] / auto, seconds[best_width] / auto, best_width, widths)


Price = Callable[[int, int, bool], None]  # (rows of a pass, tokens in its cache, whether the draft made it)


class _Meter:
    """Lets the clock go on by what passes cost."""

    def __init__(self, cell: Cell, clock: VirtualClock) -> None:
        self._cell = cell
        self._clock = clock
        self._noise = random.Random(cell.seed)
        self._error = cell.profile_error

    def end_of_profile(self) -> None:
        self._error = (1.0, 1.0)

    def charge(self, rows: int, context: int, is_draft: bool) -> None:
        jitter = 1.0 + self._noise.uniform(-self._cell.jitter, self._cell.jitter)
        self._clock.sleep(_cost(self._cell, rows, context, is_draft) * jitter * self._error[is_draft])


def _cost(cell: Cell, rows: int, context: float, is_draft: bool) -> float:
    curve = CURVES[cell.curve]
    return curve(rows) * cell.draft_cost if is_draft else curve(rows) + cell.context_cost * context / 1000.0


def _priced(cell: Cell, width: int) -> float:
    """Seconds of a fixed width."""
    # plain decoding is the same whatever the draft
    passes = _passes(cell.acceptance if width else (0.0,), cell.batch, width)
    return sum(
        count * _cost(cell, rows, context / count, is_draft) for (rows, is_draft), (count, context) in passes.items()
    )


@cache
def _passes(acceptance: tuple[float, ...], batch: int, width: int) -> Passes:
    """How many passes of how many rows a fixed width makes, of target and draft, and the tokens in their caches."""
    num_tokens, right_ahead = TOKENS[batch], list[list[int]]()
    for uniforms in _uniforms(batch):
        ahead = [0] * (PROMPT + num_tokens + 1)
        for place in range(PROMPT + num_tokens - 1, PROMPT - 1, -1):
            is_right = uniforms[place] < _share_at(acceptance, place, num_tokens)
            ahead[place] = ahead[place + 1] + 1 if is_right else 0
        right_ahead.append(ahead[:-1])
    return count_passes(right_ahead, PROMPT, width)


@cache
def _uniforms(batch: int) -> list[list[float]]:
    """The number that decides whether the draft is right, after each length of each answer."""
    mock = MockBackend(MODEL)
    answers = Engine.load(mock, max_batch=batch, threaded=False).generate(_requests(batch))
    prompts = [request.prompt for request in _requests(batch)]
    texts = [[*prompt, *answer.token_ids] for prompt, answer in zip(prompts, answers, strict=True)]
    return [[_uniform(state) for state in mock._hashes(text)] for text in texts]


def _requests(batch: int) -> list[Request]:
    greedy = SamplingParams(temperature=0.0)
    return [
        Request(prompt=[index, *range(1, PROMPT)], sampling=greedy, max_tokens=TOKENS[batch]) for index in range(batch)
    ]


def _share_at(acceptance: Sequence[float], place: int, num_tokens: int) -> float:
    """The share of right drafts for the token at a place of the text."""
    part = int(max(0, place - PROMPT) / (num_tokens / len(acceptance)))
    return acceptance[min(part, len(acceptance) - 1)]


def _run(
    acceptance: tuple[float, ...],
    batch: int,
    width: int | None,
    price: Price,
    clock: VirtualClock,
    loaded: Callable[[], None] = lambda: None,
) -> tuple[Engine, float]:
    """Answer the requests of a cell with a fresh engine, and the seconds of that. Its profile at load is apart."""
    target = _PricedMock(price)
    draft = _Guesser(price, acceptance, TOKENS[batch])
    engine = Engine.load(target, draft=draft, width=width, max_batch=batch, clock=clock, threaded=False)
    loaded()
    started = clock.now()
    engine.generate(_requests(batch))
    return engine, clock.now() - started


class _PricedMock(MockBackend):
    """A mock whose passes are told to `price`."""

    is_draft = False

    def __init__(self, price: Price) -> None:
        super().__init__(MODEL)
        self._price = price

    def score(self, spans: Spans, hidden: Sequence[int] = ()) -> Scores:
        scores = super().score(spans, hidden)
        self._price(sum(spans.counts), sum(spans.starts), self.is_draft)
        return scores


class _Guesser(_PricedMock):
    """The same model, except that its first choice is wrong in a share of the contexts."""

    is_draft = True

    def __init__(self, price: Price, acceptance: Sequence[float], num_tokens: int) -> None:
        super().__init__(price)
        self._acceptance = acceptance
        self._num_tokens = num_tokens

    def score(self, spans: Spans, hidden: Sequence[int] = ()) -> Scores:
        scores = super().score(spans, hidden)
        wrong, at = [], 0
        for slot, rows in zip(spans.slots, spans.rows, strict=True):
            states = self._states[slot]
            for place in range(len(states) - rows, len(states)):
                wrong.append(_uniform(states[place]) >= _share_at(self._acceptance, place, self._num_tokens))
            at += rows
        logits: Any = scores.logits
        if any(wrong):
            logits[wrong] = np.roll(logits[wrong], 1, axis=1)
        return scores


def _uniform(state: int) -> float:
    """A number in [0, 1) for every context."""
    return ((state * 0xD1B54A32D192ED03) & ((1 << 64) - 1)) / 2.0**64
