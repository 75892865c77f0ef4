"""Keyed noise: every random number is a pure function of (seed, choice, position, stream, token id or child rank).

Nothing is ever advanced, so noise does not depend on batch mates, chunking, width or who asks first. The integers
are the same 32 bits in numpy and torch, on every device: only int32 `*`, `^`, `>>` and `&` are used.
The mix is short on purpose: a row of 49,152 takes 0.2 ms in numpy on a small CPU (`outrider bench`).
"""

from __future__ import annotations

from typing import Any

from outrider.types import Array

PRUNED = 1024  # from this vocabulary on, tokens that cannot win a draw are left out before logarithms are taken
MARGIN = 4.0  # how far below the favourite a token contends anyway; any value draws the same token
_MASK64 = (1 << 64) - 1


class Stream:
    """Which question the noise answers. One number is never used for two questions.

    Plain integers: adding a member of an enumeration to an array takes five times as long.
    """

    TARGET = 0  # the target's own token: plain, bonus, and everything under `coupled`
    DRAFT = 1  # the draft's token under `rejection`
    ACCEPT = 2  # keep or refuse a drafted token
    REPLACE = 3  # the token in place of a refused one


def _signed(value: int) -> int:
    """The int32 with the low 32 bits of `value`."""
    return ((value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


# Multipliers of a 32-bit mix with low bias (found by search: github.com/skeeto/hash-prospector).
_FIRST = _signed(0x21F0AAAD)
_SECOND = _signed(0xD35A2D97)
_GOLDEN = _signed(0x9E3779B9)  # 2^32 / golden ratio: spreads consecutive ids
_COUNTER = _signed(0x85EBCA6B)  # odd, and not the ids' multiplier: else (id a, counter b) would equal (id b, counter a)


def _mix64(value: int) -> int:
    """A bijection of 64-bit integers that spreads every bit (the finaliser of SplitMix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def seed_words(seed: int, choice: int) -> tuple[int, int]:
    """Seed and choice index as two int32 words: computed once per request."""
    value = _mix64(_mix64(seed & _MASK64) ^ choice)
    return _signed(value), _signed(value >> 32)


class Noise:
    """Keyed noise for one array library and device.

    Constants are 0-d arrays: a Python integer costs numpy twice as much per operation on a short row.
    """

    def __init__(self, xp: Any, device: Any = None) -> None:
        self._xp = xp
        self._device = device = xp.asarray(0, device=device).device

        def constant(value: int) -> Array:
            return xp.asarray(value, dtype=xp.int32, device=device)

        self._prunes = str(device).startswith("cpu")  # elsewhere a shape that depends on the data would have to wait
        self._ids: dict[int, Array] = {}
        self._first, self._second = constant(_FIRST), constant(_SECOND)
        self._counter, self._four = constant(_COUNTER), constant(4)
        self._shift, self._shift16, self._shift15 = xp.bitwise_right_shift, constant(16), constant(15)
        self._low16, self._low17 = constant(0xFFFF), constant(0x1FFFF)

    def bits(self, words: Array, positions: Array, stream: Array | int, count: int) -> Array:
        """The 32 random bits of ids 0..count-1 in each row. words [2, R], positions [R], all int32 -> [R, count].

        Ids and counters meet by exclusive or after odd multiplications, so rows of nearby positions are not shifted
        copies of each other. The second seed word enters between the mix's multiplications: all 64 bits count.
        """
        counter = positions * self._four
        counter += stream
        counter *= self._counter
        counter ^= words[0]
        bits = counter[:, None] ^ self._spread_ids(count)
        scratch = bits >> self._shift16  # one buffer for all shifts: fresh pages cost more than the arithmetic
        scratch &= self._low16
        bits ^= scratch
        bits *= self._first
        bits ^= words[1][:, None]
        self._shift(bits, self._shift15, out=scratch)
        scratch &= self._low17
        bits ^= scratch
        bits *= self._second
        self._shift(bits, self._shift15, out=scratch)
        scratch &= self._low17
        bits ^= scratch
        return bits

    def uniform(self, words: Array, positions: Array, stream: Array | int, ranks: Array | None = None) -> Array:
        """One number in (0, 1) per row, for the child of this rank, 0 when not given. [R] float64."""
        if ranks is None:
            return self._unit(self.bits(words, positions, stream, 1)[:, 0])
        bits = self.bits(words, positions, stream, int(ranks.max()) + 1)
        return self._unit(self._xp.take_along_axis(bits, self._xp.astype(ranks, self._xp.int64)[:, None], axis=1)[:, 0])

    def draw(
        self, x: Array, words: Array, positions: Array, stream: Array | int, sampled: Array | None = None
    ) -> Array:
        """One token per row by the Gumbel-max rule: argmax of log-probability plus noise, ties to the lowest id.

        x [R, V] log-probabilities up to a constant per row; sampled [R, 1] is 0 in greedy rows. -> [R]
        """
        bits = self.bits(words, positions, stream, x.shape[1])
        if x.shape[1] >= PRUNED and self._prunes:
            tokens = self._draw_from_contenders(x, bits)
        else:
            tokens = (x + self.gumbel(bits)).argmax(-1)
        if sampled is not None:
            tokens = self._xp.where(sampled[:, 0] > 0, tokens, x.argmax(-1))
        return tokens

    def gumbel(self, bits: Array) -> Array:
        """Standard Gumbel noise from bits. float32, always finite: between -3.2 and 22.9."""
        waiting = self._xp.astype(-self._xp.log(self._unit(bits)), self._xp.float32)
        return -self._xp.log(waiting)

    def _draw_from_contenders(self, x: Array, bits: Array) -> Array:
        """The same token, with logarithms only for those that can win: 0.4 ms instead of 1.3 for a row of 49,152.

        The favourite of a row scores top + reach, reach being its noise. Another token beats that only if it is less
        than MARGIN below the favourite, or if its noise is above reach + MARGIN; and noise grows with the bits.
        """
        xp, rows = self._xp, self._xp.arange(x.shape[0], device=self._device)
        favourite = x.argmax(-1)
        top = x[rows, favourite][:, None]
        reach = xp.astype(self.gumbel(bits[rows, favourite]), xp.float64)
        least = xp.exp(-xp.exp(-(reach + MARGIN - 1e-3))) - 0.5  # as a uniform, centred; 1e-3 outweighs all rounding
        threshold = xp.astype(xp.clip(least * 2.0**32, -(2.0**31), 2.0**31 - 1), xp.int32)[:, None]
        contends = xp.reshape((x >= top - MARGIN) | (bits >= threshold), (-1,))
        (contenders,) = xp.nonzero(contends)
        if contenders.shape[0] > x.shape[0] * x.shape[1] // 4:  # a flat row: everybody contends
            return (x + self.gumbel(bits)).argmax(-1)
        scores = xp.full(x.shape[0] * x.shape[1], -xp.inf, dtype=xp.float32, device=self._device)
        scores[contenders] = xp.reshape(x, (-1,))[contenders] + self.gumbel(xp.reshape(bits, (-1,))[contenders])
        return xp.reshape(scores, x.shape).argmax(-1)

    def _unit(self, bits: Array) -> Array:
        """Bits as a number in (0, 1), never an end. float64: the race is won close to 1, where float32 is coarse."""
        unit = self._xp.astype(bits, self._xp.float64)
        unit *= 2.0**-32
        unit += 0.5 + 2.0**-33
        return unit

    def _spread_ids(self, count: int) -> Array:
        ids = self._ids.get(count)
        if ids is None:
            ids = self._xp.arange(count, dtype=self._xp.int32, device=self._device) * _GOLDEN
            self._ids[count] = ids
        return ids
