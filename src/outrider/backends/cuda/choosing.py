"""The target's own token in every row, on the device: the Gumbel race of `sampling.noise`, or the argmax.

Three kernels, since a row is too long for one program: the peaks of blocks, the best of each block, the best of all.
The same integers of noise as the reference, and its arithmetic behind them, but for the last digit of a logarithm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.sampling.noise import _COUNTER, _FIRST, _GOLDEN, _SECOND

BLOCK = 4096


@triton.jit
def _peaks(logits, peaks, stride, columns, blocks, BLOCK: tl.constexpr):
    """The highest of a block of a row; NaN if one of them is."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + column, mask=column < columns, other=-float("inf"))
    is_nan = tl.max((x != x).to(tl.int32), axis=0) > 0
    peak = tl.max(tl.where(x == x, x, -float("inf")), axis=0)
    tl.store(peaks + row * blocks + block, tl.where(is_nan, float("nan"), peak))


@triton.jit
def _race(
    logits,
    peaks,
    scores,
    ids,
    asked,
    settings,
    stride,
    columns,
    blocks,
    COUNTER: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    GOLDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The best of a block of a row."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part = tl.arange(0, BLOCKS)
    found = tl.load(peaks + row * blocks + part, mask=part < blocks, other=-float("inf"))
    peak = tl.max(
        tl.where(tl.abs(found) < float("inf"), found, -1e30), axis=0
    )  # rows that cannot be used must not trap
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + column, mask=column < columns, other=-float("inf"))
    x = tl.where(x == x, x, -float("inf"))
    temperature, floor = tl.load(settings + row * 2), tl.load(settings + row * 2 + 1)
    if temperature > 0:
        x = tl.div_rn(x - peak, temperature)  # rounded as torch and numpy do
        x = tl.where(x < floor, -float("inf"), x)
        first, second = tl.load(asked + row * 3), tl.load(asked + row * 3 + 1)
        bits = (tl.load(asked + row * 3 + 2) * COUNTER ^ first) ^ (column * GOLDEN)
        bits = bits ^ ((bits >> 16) & 0xFFFF)
        bits = bits * FIRST ^ second
        bits = bits ^ ((bits >> 15) & 0x1FFFF)
        bits = bits * SECOND
        bits = bits ^ ((bits >> 15) & 0x1FFFF)
        unit = (bits.to(tl.float64) + 2147483648.0 + 0.5) * 2.3283064365386963e-10  # 2^31, 2^-32: exact in fp32, too
        x = x - tl.log((-tl.log(unit)).to(tl.float32))
    best = tl.argmax(x, axis=0, tie_break_left=True)
    tl.store(scores + row * blocks + block, tl.max(x, axis=0))
    tl.store(ids + row * blocks + block, block * BLOCK + best)


@triton.jit
def _best(peaks, scores, ids, out, blocks, BLOCKS: tl.constexpr):
    """The best of a row; -1 for a row that has no finite peak."""
    row = tl.program_id(0)
    part = tl.arange(0, BLOCKS)
    inside = part < blocks
    peak = tl.load(peaks + row * blocks + part, mask=inside, other=-float("inf"))
    top = tl.max(tl.where(peak == peak, peak, -float("inf")), axis=0)
    is_bad = (tl.max((peak != peak).to(tl.int32), axis=0) > 0) | (top == float("inf")) | (top == -float("inf"))
    score = tl.load(scores + row * blocks + part, mask=inside, other=-float("inf"))
    best = tl.argmax(score, axis=0, tie_break_left=True)
    tl.store(out + row, tl.where(is_bad, -1, tl.load(ids + row * blocks + best)))


def choose(logits: torch.Tensor, asked: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
    """The token of each row, or -1 where a row cannot be used. [R, V] -> [R] int32

    asked: [R, 3] int32, the seed's words and 4 * position + stream. settings: [R, 2] temperature (0: greedy) and the
    logarithm of min_p.
    """
    rows, columns = logits.shape
    blocks = triton.cdiv(columns, BLOCK)
    peaks, scores = torch.empty(2, rows, blocks, device=logits.device).unbind(0)
    ids = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    padded, stride = triton.next_power_of_2(blocks), logits.stride(0)
    _peaks[(rows, blocks)](logits, peaks, stride, columns, blocks, BLOCK=BLOCK)
    _race[(rows, blocks)](
        logits, peaks, scores, ids, asked, settings, stride, columns, blocks, COUNTER=_COUNTER, FIRST=_FIRST,
        SECOND=_SECOND, GOLDEN=_GOLDEN, BLOCK=BLOCK, BLOCKS=padded,
    )  # fmt: skip
    _best[(rows,)](peaks, scores, ids, out, blocks, BLOCKS=padded)
    return out
