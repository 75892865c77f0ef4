"""A token of every row, on the device: the Gumbel race of `sampling.noise`, or the argmax.

Three kernels, since a row is too long for one program: the peaks of blocks, the best of each block, the best of all.
The same integers of noise as the reference, and its arithmetic behind them, but for the last digit of a logarithm.
A fourth one writes the probabilities a draft was drawn from, for a judge that weighs them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from outrider.sampling.noise import _COUNTER, _FIRST, _GOLDEN, _SECOND

BLOCK = 4096
# The mix's multipliers: what kernels read of the world outside must be constants.
COUNTER, FIRST, SECOND, GOLDEN = (tl.constexpr(value) for value in (_COUNTER, _FIRST, _SECOND, _GOLDEN))


@triton.jit
def unit(counter, first, second, ids):
    """The noise of some ids as numbers in (0, 1), float64. counter: 4 * position + stream."""
    bits = (counter * COUNTER ^ first) ^ (ids * GOLDEN)
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * FIRST ^ second
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    bits = bits * SECOND
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    return (bits.to(tl.float64) + 2147483648.0 + 0.5) * 2.3283064365386963e-10  # 2^31, 2^-32: exact in fp32, too


@triton.jit
def gumbel(counter, first, second, ids):
    """Standard Gumbel noise, float32."""
    return -tl.log((-tl.log(unit(counter, first, second, ids))).to(tl.float32))


@triton.jit
def warp(x, peak, temperature, floor):
    """Shaped logits: temperature, then min_p, whose logarithm is `floor`."""
    x = tl.div_rn(x - peak, temperature)  # rounded as torch and numpy do
    return tl.where(x < floor, -float("inf"), x)


@triton.jit
def odds(x):
    """Of shaped logits, whose highest is 0; of rows that cannot be used something harmless."""
    return tl.exp(tl.minimum(x, 0.0))


@triton.jit
def peak_of(peaks, row, blocks, BLOCKS: tl.constexpr):
    """The highest of a row; something harmless for rows that cannot be used."""
    part = tl.arange(0, BLOCKS)
    found = tl.load(peaks + row * blocks + part, mask=part < blocks, other=-float("inf"))
    return tl.max(tl.where(tl.abs(found) < float("inf"), found, -1e30), axis=0)


@triton.jit
def _peaks(logits, peaks, stride, columns, blocks, BLOCK: tl.constexpr):
    """The highest of a block of a row; NaN if one of them is."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + column, mask=column < columns, other=-float("inf"))
    is_nan = tl.max((x != x).to(tl.int32), axis=0) > 0
    peak = tl.max(tl.where(x == x, x, -float("inf")), axis=0)
    tl.store(peaks + row * blocks + block, tl.where(is_nan, float("nan"), peak))


@triton.jit(do_not_specialize_on_alignment=["asked"])  # a part of what all steps ask for
def _race(
    logits,
    peaks,
    masses,
    scores,
    ids,
    asked,
    settings,
    asked_width,
    stride,
    columns,
    blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The best of a block of a row, and the block's share of the row's mass."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak = peak_of(peaks, row, blocks, BLOCKS)
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + column, mask=column < columns, other=-float("inf"))
    x = tl.where(x == x, x, -float("inf"))
    temperature, floor = tl.load(settings + row * 2), tl.load(settings + row * 2 + 1)
    if temperature > 0:
        x = warp(x, peak, temperature, floor)
        tl.store(masses + row * blocks + block, tl.sum(odds(x), axis=0))
        asked += row * asked_width
        x = x + gumbel(tl.load(asked + 2), tl.load(asked), tl.load(asked + 1), column)
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


@triton.jit
def _spread(
    logits,
    peaks,
    masses,
    tokens,
    settings,
    out,
    stride,
    out_stride,
    columns,
    blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The probabilities of a block of a row; greedy rows are certain of their token."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part = tl.arange(0, BLOCKS)
    column = block * BLOCK + tl.arange(0, BLOCK)
    temperature, floor = tl.load(settings + row * 2), tl.load(settings + row * 2 + 1)
    if temperature > 0:
        x = tl.load(logits + row * stride + column, mask=column < columns, other=-float("inf"))
        x = warp(x, peak_of(peaks, row, blocks, BLOCKS), temperature, floor)
        mass = tl.sum(tl.load(masses + row * blocks + part, mask=part < blocks, other=0.0), axis=0)
        share = odds(x) / mass
    else:
        share = (column == tl.load(tokens + row)).to(tl.float32)
    tl.store(out + row * out_stride + column, share, mask=column < columns)


class Chosen(NamedTuple):
    """A token of each row, -1 where a row cannot be used. [R] int32; and what it was chosen by. [R, blocks]"""

    tokens: torch.Tensor
    peaks: torch.Tensor
    masses: torch.Tensor


def choose(logits: torch.Tensor, asked: torch.Tensor, settings: torch.Tensor) -> Chosen:
    """logits [R, V]. asked: [R, 3 or more] int32, the seed's words and 4 * position + stream. settings: [R, 2]
    temperature (0: greedy) and the logarithm of min_p.
    """
    rows, columns = logits.shape
    blocks = triton.cdiv(columns, BLOCK)
    peaks, masses, scores = torch.empty(3, rows, blocks, device=logits.device).unbind(0)
    ids = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    padded, stride = triton.next_power_of_2(blocks), logits.stride(0)
    _peaks[(rows, blocks)](logits, peaks, stride, columns, blocks, BLOCK=BLOCK)
    _race[(rows, blocks)](
        logits, peaks, masses, scores, ids, asked, settings, asked.stride(0), stride, columns, blocks,
        BLOCK=BLOCK, BLOCKS=padded,
    )  # fmt: skip
    _best[(rows,)](peaks, scores, ids, out, blocks, BLOCKS=padded)
    return Chosen(out, peaks, masses)


def spread(logits: torch.Tensor, chosen: Chosen, settings: torch.Tensor, out: torch.Tensor) -> None:
    """The distributions that tokens were chosen from. out [R, V], whose rows may lie apart"""
    rows, columns = logits.shape
    blocks = chosen.peaks.shape[1]
    _spread[(rows, blocks)](
        logits, chosen.peaks, chosen.masses, chosen.tokens, settings, out, logits.stride(0), out.stride(0), columns,
        blocks, BLOCK=BLOCK, BLOCKS=triton.next_power_of_2(blocks),
    )  # fmt: skip
