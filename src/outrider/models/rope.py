"""Frequencies of rotary positions and their scalings, as pure functions. Which one a file asks for, its reader knows.

A frequency is the angle in radians by which a pair of dimensions turns from one position to the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Frequencies = tuple[float, ...]


def plain(dims: int, base: float) -> Frequencies:
    """One frequency per pair of `dims` dimensions."""
    return tuple(base ** (-2.0 * pair / dims) for pair in range(dims // 2))


def linear(frequencies: Frequencies, factor: float) -> Frequencies:
    """Positions squeezed by `factor`."""
    return tuple(frequency / factor for frequency in frequencies)


def divided(frequencies: Frequencies, factors: Sequence[float]) -> Frequencies:
    """Each frequency by a factor of its own: longrope, and llama 3 as GGUF stores it."""
    return tuple(frequency / factor for frequency, factor in zip(frequencies, factors, strict=True))


def llama3(frequencies: Frequencies, *, factor: float, low: float, high: float, original: int) -> Frequencies:
    """Slow pairs are squeezed, fast ones kept; between `low` and `high` turns per `original` context both are mixed."""
    scaled: list[float] = []
    for frequency in frequencies:
        turns = original * frequency / (2.0 * math.pi)
        kept = min(1.0, max(0.0, (turns - low) / (high - low)))
        scaled.append(frequency * (kept + (1.0 - kept) / factor))
    return tuple(scaled)


def yarn(
    dims: int, base: float, *, factor: float, original: int, fast: float = 32.0, slow: float = 1.0, whole: bool = True
) -> Frequencies:
    """Pairs that turn more than `fast` times in the original context are kept, fewer than `slow` times squeezed.

    Peng 2023, section 3.2; `whole` rounds the two edges of the ramp outwards to pairs.
    """

    def pair_turning(turns: float) -> float:
        return dims * math.log(original / (turns * 2.0 * math.pi)) / (2.0 * math.log(base))

    first, last = pair_turning(fast), pair_turning(slow)
    if whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0.0), min(last, dims - 1.0)
    length = last - first if last != first else 0.001  # a step, as in the reference code
    scaled: list[float] = []
    for pair, frequency in enumerate(plain(dims, base)):
        squeezed = min(1.0, max(0.0, (pair - first) / length))
        scaled.append(frequency * (1.0 - squeezed + squeezed / factor))
    return tuple(scaled)


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """What yarn multiplies cosine and sine by."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def longrope_scale(factor: float, original: int) -> float:
    """What longrope multiplies cosine and sine by; `factor` is new context over original context."""
    return 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))
