"""What one pass costs by its number of rows and the context behind it: the curve that decides whether drafting can pay.

Beside it stand the limits of this machine, measured in the same run: memory (every weight is read once a pass) and, for
models that run on torch, arithmetic (every row multiplies every weight). A width pays when a round emits more tokens
than its pass costs, in units of a one-row pass; `needed_acceptance` says how often a draft must be right for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from outrider.backends.base import Backend, Spans
from outrider.backends.native_weights import NativeWeights
from outrider.engine.engine import Engine
from outrider.native.binding import Packed, num_cores

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
CONTEXTS = (128, 1024)
LARGE = 2048  # rows and columns of the products that show what the arithmetic can do
READ_BYTES = 2**29  # of the array that shows what memory can do: far larger than caches


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
    """Of this machine, as measured: bytes and operations per second, and what the model needs of each.

    `flops` of native products are those of our own kernels with weights that stay in the cache.
    """

    bandwidth: float
    weight_bytes: int
    flops: float | None = None
    flops_per_row: float = 0.0
    kv_bytes: int = 0  # keys and values of one token, all layers

    def memory(self, context: int = 0) -> float:
        """Seconds to read all weights, and the keys and values of `context` tokens."""
        return (self.weight_bytes + context * self.kv_bytes) / self.bandwidth

    def arithmetic(self, rows: int) -> float:
        """Seconds of the products of `rows` rows with all weights."""
        return 0.0 if self.flops is None else rows * self.flops_per_row / self.flops

    def seconds(self, rows: int, context: int = 0) -> float:
        """The least a pass can take."""
        return max(self.memory(context), self.arithmetic(rows))


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
    limits = measured_limits(target, threads)
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


def measured_limits(target: Backend, threads: int | None = None) -> Limits | None:
    """What this machine allows the model; None for a model whose weights nobody knows."""
    weights: Any = getattr(target, "weights", None)
    if isinstance(weights, NativeWeights):
        return _native_limits(target, weights, threads or num_cores())
    parts = _torch_matrices(weights)
    if not parts:
        return None
    import torch

    largest = max(parts, key=lambda part: part.numel())
    square = torch.randn(LARGE, LARGE, device=largest.device, dtype=largest.dtype)
    flops = 2 * LARGE**3 / _least_seconds(lambda: _finish(torch.mm(square, square)))
    numbers = sum(part.numel() for part in parts)
    bandwidth = memory_bandwidth(threads, largest.device)
    return Limits(bandwidth, numbers * largest.element_size(), flops, 2.0 * numbers)


def memory_bandwidth(threads: int | None = None, device: Any = None) -> float:
    """Bytes per second that can be read from memory: a CPU's with so many threads, or a GPU's own."""
    if device is not None and device.type == "cuda":
        import torch

        whole = torch.ones(READ_BYTES // 4, device=device)
        return READ_BYTES / _least_seconds(lambda: _finish(whole.sum()))
    count = threads or num_cores()
    parts = np.array_split(np.ones(READ_BYTES // 4, dtype=np.int32), count)
    with ThreadPoolExecutor(count) as pool:  # numpy lets other threads run meanwhile
        return READ_BYTES / _least_seconds(lambda: list(pool.map(np.max, parts)))


def _native_limits(target: Any, weights: NativeWeights, threads: int) -> Limits:
    parts = [part for part in weights.matrices if part is weights.output or part is not weights.embedding]
    products = dict.fromkeys(sorted({part.kind for part in parts}), 0)
    for part in parts:
        products[part.kind] += 2 * part.matrix.rows * part.matrix.columns
    seconds = sum(count / _native_flops(kind, threads) for kind, count in products.items())
    flops = sum(products.values())
    kv_bytes = target.store.bytes_of_token
    num_bytes = sum(part.memory.nbytes for part in parts)
    return Limits(memory_bandwidth(threads), num_bytes, flops / seconds, float(flops), kv_bytes)


def _native_flops(kind: str, threads: int) -> float:
    """Operations per second of our products with weights of this type that stay in the second cache."""
    rows, columns, inputs = 512 * threads, 1024, 48
    raw = np.zeros(rows * columns * 4, dtype=np.uint8)  # no type takes more
    packed = Packed(kind, raw, rows, columns)
    x = np.random.default_rng(0).normal(size=(inputs, columns)).astype(np.float32)
    return 2 * rows * columns * inputs / _least_seconds(lambda: packed.multiply(x), 10)


def _torch_matrices(weights: Any) -> list[Any]:
    """That every token passes through, where they are torch's."""
    if not hasattr(getattr(weights, "output", None), "element_size"):
        return []
    return [part for layer in weights.layers for part in layer if getattr(part, "ndim", 0) == 2] + [weights.output]


def _least_seconds(work: Callable[[], Any], repeats: int = 5) -> float:
    """The best of a few: a limit is what is possible."""
    times = []
    for _ in range(repeats + 1):  # the first warms up and is not counted
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times[1:])
