"""What one pass costs by its number of rows and the context behind it: the curve that decides whether drafting can pay.

Beside it stand the limits of this machine, measured in the same run: memory (every weight is read once a pass) and
arithmetic (every row multiplies every weight). A width pays when a round emits more tokens than its pass costs, in
units of a one-row pass; `needed_acceptance` says how often a draft must be right for that.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from outrider.backends.base import Backend, Spans
from outrider.engine.engine import Engine

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
CONTEXTS = (128, 1024)
LARGE = 2048  # rows and columns of the products that show what the arithmetic can do


@dataclass(frozen=True, slots=True)
class Point:
    """A pass of `rows` tokens behind `context` others. Milliseconds: median and range; `ratio` to one row."""

    context: int
    rows: int
    ms: float
    low: float
    high: float
    ratio: float
    limit_ms: float | None  # what memory and arithmetic would allow; None where the model's size is not known
    needed: float | None  # acceptance from which rows - 1 drafts pay, if they cost nothing; None: never


@dataclass(frozen=True, slots=True)
class Limits:
    """Of this machine, as measured: bytes and operations per second, and what a token of the model needs of each."""

    bandwidth: float
    flops: float
    weight_bytes: int
    flops_per_row: float

    def seconds(self, rows: int) -> float:
        return max(self.weight_bytes / self.bandwidth, rows * self.flops_per_row / self.flops)


def readings(
    model: str,
    *,
    rows: Sequence[int] = ROWS,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = 7,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Point]:
    """The curve of a model, context after context."""
    engine = Engine.load(model, draft="none", threads=threads)
    target = engine.loop.target
    limits = measured_limits(target)
    fitting = [context for context in contexts if context + max(rows) < target.info.context]
    for number, context in enumerate(fitting or [max(1, target.info.context - max(rows) - 1)]):
        seconds = curve(target, rows, context, repeats)
        one = median(seconds[min(rows)])
        if progress is not None:
            progress(number + 1, len(fitting))
        for count in rows:
            middle = median(seconds[count])
            yield Point(
                context=context,
                rows=count,
                ms=middle * 1e3,
                low=min(seconds[count]) * 1e3,
                high=max(seconds[count]) * 1e3,
                ratio=middle / one,
                limit_ms=None if limits is None else limits.seconds(count) * 1e3,
                needed=needed_acceptance(count - 1, middle / one) if count > 1 else None,
            )


def curve(target: Backend, rows: Sequence[int], context: int, repeats: int) -> dict[int, list[float]]:
    """Seconds of passes of each number of rows. They take turns, so that a noisy machine hits all alike."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, target.info.vocab_size, context + max(rows))
    slot = target.open((), context + max(rows))
    assert slot is not None, "an idle model has room"
    target.score(Spans([slot], [0], [context], [0], target.ops.integers(tokens[:context].tolist())))
    seconds: dict[int, list[float]] = {count: [] for count in rows}
    try:
        for repeat in range(repeats + 1):  # the first warms up and is not counted
            for count in rows:
                fed = target.ops.integers(tokens[context : context + count].tolist())
                started = time.perf_counter()
                scores = target.score(Spans([slot], [context], [count], [count], fed))
                _finish(scores.logits)
                if repeat:
                    seconds[count].append(time.perf_counter() - started)
                target.keep([slot], [context])
    finally:
        target.close(slot)
    return seconds


def _finish(logits: Any) -> None:
    """Wait for a GPU."""
    if hasattr(logits, "is_cuda") and logits.is_cuda:
        import torch

        torch.cuda.synchronize(logits.device)


def needed_acceptance(width: int, cost: float) -> float | None:
    """How often each draft must be right so that `width` of them bring more tokens than a pass of `cost` takes.

    A round emits 1 + a + a^2 + ... + a^width tokens. None: not even if all are right.
    """
    if cost >= width + 1:
        return None
    if cost <= 1.0:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2.0
        if sum(middle**place for place in range(width + 1)) < cost:
            low = middle
        else:
            high = middle
    return high


def measured_limits(target: Backend) -> Limits | None:
    """What this machine allows the model; None for models that do not run on torch."""
    weights: Any = getattr(target, "weights", None)
    if "torch" not in sys.modules or weights is None:
        return None
    import torch

    if not isinstance(getattr(weights, "output", None), torch.Tensor):
        return None
    parts: list[torch.Tensor] = [part for layer in weights.layers for part in layer if _is_matrix(part)] + [
        weights.output
    ]
    numbers = sum(part.numel() for part in parts)
    largest = max(parts, key=lambda part: part.numel())
    device = largest.device
    row = torch.randn(1, largest.shape[0], device=device, dtype=largest.dtype)
    square = torch.randn(LARGE, LARGE, device=device, dtype=largest.dtype)
    bandwidth = largest.numel() * largest.element_size() / _seconds(lambda: torch.mm(row, largest), device)
    flops = 2 * LARGE**3 / _seconds(lambda: torch.mm(square, square), device)
    return Limits(bandwidth, flops, numbers * largest.element_size(), 2.0 * numbers)


def _is_matrix(part: Any) -> bool:
    return getattr(part, "ndim", 0) == 2


def _seconds(work: Callable[[], Any], device: Any, repeats: int = 5) -> float:
    """The best of a few: a limit is what is possible."""
    import torch

    times = []
    with torch.inference_mode():
        for _ in range(repeats + 1):
            started = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - started)
    return min(times[1:])
