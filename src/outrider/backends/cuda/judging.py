"""The verdict on a round, on the device: both rules, chains and trees, a whole batch in a few kernels.

A job is at a row; a child of it is judged, as in `sampling.tree` (a chain is the tree in which everybody has one
child). One program walks for each job, since a walk is short and every step depends on the one before. What takes the
breadth of the machine is done by blocks of rows: the target's own tokens before the walk (`choosing`), and the token in
place of a refused one after it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.backends.cuda.choosing import BLOCK, choose, gumbel, odds, peak_of, unit, warp
from outrider.sampling.noise import Stream

# Of a row: two words of the seed, 4 * position, the draft it comes after, its first child, its next sibling, and how
# many siblings came before it. Of a job: its first row, and whether it is judged by its rule's rejection.
ROW = tl.constexpr(7)
COUNTER, DRAFT, CHILD, SIBLING, RANK = (tl.constexpr(place) for place in (2, 3, 4, 5, 6))
JOB = tl.constexpr(2)
# Of a verdict: the row where the job ended, the token that follows, whether a row on the way cannot be used, and for
# the last kernels the refused draft (-1: none) and whether siblings before it were refused there.
OUT = tl.constexpr(5)
ACCEPT, REPLACE = tl.constexpr(Stream.ACCEPT), tl.constexpr(Stream.REPLACE)


@triton.jit
def _mass_of(masses, row, blocks, BLOCKS: tl.constexpr):
    part = tl.arange(0, BLOCKS)
    return tl.sum(tl.load(masses + row * blocks + part, mask=part < blocks, other=0.0), axis=0)


@triton.jit(do_not_specialize_on_alignment=["tokens"])
def _walk(
    logits,
    peaks,
    masses,
    chosen,
    tokens,
    probs,
    rows,
    jobs,
    settings,
    left,
    weights,
    out,
    stride,
    columns,
    blocks,
    WEIGHED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One job from its root to where it ends. `left` [B, V] is what refused siblings left of the row it stands at."""
    job = tl.program_id(0).to(tl.int64)
    row = tl.load(jobs + job * JOB).to(tl.int64)
    rejects = tl.load(jobs + job * JOB + 1)
    child = tl.load(rows + row * ROW + CHILD).to(tl.int64)
    weight = tl.full((), 1.0, tl.float32)  # the mass of what is left
    refused = tl.full((), -1, tl.int64)
    is_marked = tl.full((), 0, tl.int32)  # whether `left` holds it
    while child >= 0:
        draft = tl.load(rows + child * ROW + DRAFT).to(tl.int64)
        token = tl.load(tokens + draft).to(tl.int64)
        wanted = tl.load(chosen + row)
        is_kept = (wanted == token).to(tl.int32)
        sibling = tl.load(rows + child * ROW + SIBLING).to(tl.int64)
        if wanted < 0:  # a row that cannot be used: the walk ends here
            sibling = tl.full((), -1, tl.int64)
        elif rejects > 0:
            peak, mass = peak_of(peaks, row, blocks, BLOCKS), _mass_of(masses, row, blocks, BLOCKS)
            temperature, floor = tl.load(settings + row * 2), tl.load(settings + row * 2 + 1)
            chance = odds(warp(tl.load(logits + row * stride + token), peak, temperature, floor)) / mass
            if is_marked > 0:
                chance = tl.load(left + job * columns + token)
            asked = rows + row * ROW
            drawn = unit(
                tl.load(asked + COUNTER) + ACCEPT,
                tl.load(asked),
                tl.load(asked + 1),
                tl.load(rows + child * ROW + RANK),
            )
            guess = 1.0
            if WEIGHED:
                guess = tl.load(probs + draft * columns + token)
            is_kept = (drawn * guess * weight < chance).to(tl.int32)
            if is_kept == 0:
                refused = draft
                if sibling >= 0:  # the next one is judged by what this one leaves
                    tl.debug_barrier()  # what is written over now, all threads have read
                    rest = tl.full((), 0.0, tl.float32)
                    for block in range(blocks):
                        column = block * BLOCK + tl.arange(0, BLOCK)
                        inside = column < columns
                        x = tl.load(logits + row * stride + column, mask=inside, other=-float("inf"))
                        part = odds(warp(x, peak, temperature, floor)) / mass
                        if is_marked > 0:
                            part = tl.load(left + job * columns + column, mask=inside, other=0.0)
                        if WEIGHED:
                            part -= weight * tl.load(probs + draft * columns + column, mask=inside, other=0.0)
                            part = tl.maximum(part, 0.0)
                        else:
                            part = tl.where(column == token, 0.0, part)
                        tl.store(left + job * columns + column, part, mask=inside)
                        rest += tl.sum(part, axis=0)
                    tl.debug_barrier()  # what one thread wrote another reads
                    weight = rest
                    is_marked = tl.full((), 1, tl.int32)
        if is_kept > 0:
            row = child
            child = tl.load(rows + row * ROW + CHILD).to(tl.int64)
            weight = tl.full((), 1.0, tl.float32)
            refused = tl.full((), -1, tl.int64)
            is_marked = tl.full((), 0, tl.int32)
        else:
            child = sibling
    wanted = tl.load(chosen + row)
    out += job * OUT
    tl.store(out, row.to(tl.int32))
    tl.store(out + 1, wanted)
    tl.store(out + 2, (wanted < 0).to(tl.int32))
    tl.store(out + 3, refused.to(tl.int32))
    tl.store(out + 4, is_marked)
    tl.store(weights + job, weight)


@triton.jit(do_not_specialize=["num_jobs"])
def _rest(
    logits,
    peaks,
    masses,
    tokens,
    probs,
    rows,
    settings,
    left,
    weights,
    out,
    scores,
    ids,
    stride,
    columns,
    blocks,
    num_jobs,
    WEIGHED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The race for the place of a refused draft: the best of a block among what is left, and among all."""
    job, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    draft = tl.load(out + job * OUT + 3).to(tl.int64)
    if draft < 0:
        return
    row, is_marked = tl.load(out + job * OUT).to(tl.int64), tl.load(out + job * OUT + 4)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(logits + row * stride + column, mask=inside, other=-float("inf"))
    x = tl.where(x == x, x, -float("inf"))
    temperature, floor = tl.load(settings + row * 2), tl.load(settings + row * 2 + 1)
    x = warp(x, peak_of(peaks, row, blocks, BLOCKS), temperature, floor)
    part = odds(x) / _mass_of(masses, row, blocks, BLOCKS)
    if is_marked == 1:
        part = tl.load(left + job * columns + column, mask=inside, other=0.0)
    if WEIGHED:
        part -= tl.load(weights + job) * tl.load(probs + draft * columns + column, mask=inside, other=0.0)
    else:
        part = tl.where(column == tl.load(tokens + draft), 0.0, part)
    asked = rows + row * ROW
    noise = gumbel(tl.load(asked + COUNTER) + REPLACE, tl.load(asked), tl.load(asked + 1), column)
    some = tl.where(part > 0.0, tl.log(tl.where(part > 0.0, part, 1.0)), -float("inf")) + noise
    some = tl.where(inside, some, -float("inf"))
    at = job * blocks + block
    tl.store(scores + at, tl.max(some, axis=0))
    tl.store(ids + at, block * BLOCK + tl.argmax(some, axis=0, tie_break_left=True))
    every = x + noise
    at += num_jobs * blocks
    tl.store(scores + at, tl.max(every, axis=0))
    tl.store(ids + at, block * BLOCK + tl.argmax(every, axis=0, tie_break_left=True))


@triton.jit(do_not_specialize=["num_jobs"])
def _last(scores, ids, out, blocks, num_jobs, BLOCKS: tl.constexpr):
    """Who won it. Where nothing is left, which only rounding can bring about, everybody was in the race."""
    job = tl.program_id(0)
    if tl.load(out + job * OUT + 3) < 0:
        return
    part = tl.arange(0, BLOCKS)
    at = job * blocks
    score = tl.load(scores + at + part, mask=part < blocks, other=-float("inf"))
    if tl.max(score, axis=0) == -float("inf"):
        at += num_jobs * blocks
        score = tl.load(scores + at + part, mask=part < blocks, other=-float("inf"))
    tl.store(out + job * OUT + 1, tl.load(ids + at + tl.argmax(score, axis=0, tie_break_left=True)))


def rule(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    probs: torch.Tensor | None,
    rows: torch.Tensor,
    jobs: torch.Tensor,
    settings: torch.Tensor,
    *,
    rejects: bool,
    branches: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each job the row where it ended, the token that follows, and whether a row there cannot be used; and the
    target's own token in every row. [B, 5] and [R], int32

    logits [R, V], tokens [N] drafted, probs [N, V] or None for one-hot, rows [R, ROW] and jobs [B, JOB] as above,
    settings [R, 2] as `choose` takes them. rejects: whether any job is judged by rejection; branches: whether any
    drafts have siblings.
    """
    num_jobs, columns = len(jobs), logits.shape[1]
    chosen, peaks, masses = choose(logits, rows, settings)
    blocks = peaks.shape[1]
    padded, stride, weighed = triton.next_power_of_2(blocks), logits.stride(0), probs is not None and rejects
    out = torch.empty(num_jobs, OUT.value, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_jobs, device=logits.device)
    left = torch.empty(num_jobs if rejects and branches else 0, columns, device=logits.device)
    tokens, given = tokens.contiguous(), probs.contiguous() if probs is not None and weighed else weights
    _walk[(num_jobs,)](
        logits, peaks, masses, chosen, tokens, given, rows, jobs, settings, left, weights, out, stride, columns,
        blocks, WEIGHED=weighed, BLOCK=BLOCK, BLOCKS=padded,
    )  # fmt: skip
    if rejects:
        scores = torch.empty(2, num_jobs, blocks, device=logits.device)
        ids = torch.empty(2, num_jobs, blocks, dtype=torch.int32, device=logits.device)
        _rest[(num_jobs, blocks)](
            logits, peaks, masses, tokens, given, rows, settings, left, weights, out, scores, ids, stride, columns,
            blocks, num_jobs, WEIGHED=weighed, BLOCK=BLOCK, BLOCKS=padded,
        )  # fmt: skip
        _last[(num_jobs,)](scores, ids, out, blocks, num_jobs, BLOCKS=padded)
    return out, chosen
