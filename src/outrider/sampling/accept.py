"""The two exact acceptance rules on chains, vectorised over jobs with different draft lengths.

`match`: the target's own token is known at every row, a draft stays while it equals it (`coupled`, and greedy).
`reject`: Leviathan et al. 2023, Algorithm 1: keep x with probability min(1, p/q), else draw from max(0, p - q).

Row i of a job judges its draft i; the row after the last accepted draft gives the next token:

    rows     p0    p1    p2    p3
    drafts   d0    d1    d2            accepted = 2: d2 is refused by p2, next is drawn from max(0, p2 - q2)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from outrider.sampling.noise import Noise, Stream
from outrider.sampling.warp import softmax
from outrider.types import Array


class Layout(NamedTuple):
    """Which rows and drafts belong to which job. B jobs, N drafts, R rows, K the longest draft."""

    owner: Array  # [R] the job of each row
    depth: Array  # [R] drafts before it, int32
    first: Array  # [B] first row of a job
    last: Array  # [B] last row: after all drafts, or the last draft's own when there is no bonus row
    drafted: Array  # [B] number of drafts
    judge: Array  # [N] the row that judges each draft
    grid: Array  # [B, K + 1] index of a job's i-th draft; 0 where it has none
    inside: Array  # [B, K + 1] whether it has one; never in the last column
    num_drafts: int


class Ruling(NamedTuple):
    """accepted [B], next [B]."""

    accepted: Array
    next: Array


def build_layout(xp: Any, device: Any, drafted: Sequence[int], rows: Sequence[int]) -> Layout:
    """From the number of drafts and of rows of each job. Computed on the host, where both are known."""
    num_drafts, num_rows = np.asarray(drafted, dtype=np.int64), np.asarray(rows, dtype=np.int64)
    first = np.cumsum(num_rows) - num_rows
    owner = np.repeat(np.arange(len(num_rows)), num_rows)
    depth = np.arange(len(owner)) - first[owner]
    places = np.arange(max(drafted, default=0) + 1)
    inside = places < num_drafts[:, None]
    start = np.cumsum(num_drafts) - num_drafts

    def array(values: Any) -> Array:
        return xp.asarray(values, device=device)

    return Layout(
        owner=array(owner),
        depth=array(depth.astype(np.int32)),
        first=array(first),
        last=array(first + num_rows - 1),
        drafted=array(num_drafts),
        judge=array(np.flatnonzero(depth < num_drafts[owner])),
        grid=array(np.where(inside, start[:, None] + places, 0)),
        inside=array(inside),
        num_drafts=int(num_drafts.sum()),
    )


def leading(xp: Any, keep: Array, layout: Layout) -> Array:
    """How many drafts of each job are kept before the first refusal. keep [N] -> [B]"""
    kept = xp.astype(keep[layout.grid] & layout.inside, xp.uint8)
    return kept.argmin(-1)  # the first zero; the last column always is one


def match(xp: Any, chosen: Array, tokens: Array, layout: Layout) -> Ruling:
    """Follow the target's own tokens while the drafts guessed them. chosen [R], tokens [N]"""
    if layout.num_drafts == 0:
        return Ruling(layout.drafted, chosen)
    accepted = leading(xp, chosen[layout.judge] == tokens, layout)
    return Ruling(accepted, chosen[xp.minimum(layout.first + accepted, layout.last)])


def reject(
    xp: Any,
    x: Array,
    tokens: Array,
    probs: Array | None,
    layout: Layout,
    noise: Noise,
    words: Array,
    positions: Array,
) -> Ruling:
    """Rejection sampling. x [R, V] shaped logits, tokens [N], probs [N, V] or None for one-hot, positions [R]."""
    if layout.num_drafts == 0:
        return Ruling(layout.drafted, noise.draw(x, words, positions, Stream.TARGET))
    target = softmax(xp, x)
    uniform = noise.uniform(words[:, layout.judge], positions[layout.judge], Stream.ACCEPT)
    keep = kept(uniform, target[layout.judge, tokens], draft_chance(xp, tokens, probs))
    accepted = leading(xp, keep, layout)
    row = xp.minimum(layout.first + accepted, layout.last)
    refused = accepted < layout.drafted
    at = xp.take_along_axis(layout.grid, accepted[:, None], axis=1)[:, 0]  # the refused draft, where there is one
    rest = residual(xp, target[row, ...], at, tokens, probs)
    replace = refused & xp.any(rest > 0, axis=-1)  # a residual without mass falls back to p
    log_rest = xp.where(rest > 0, xp.log(xp.where(rest > 0, rest, xp.ones_like(rest))), -xp.inf)
    source = xp.where(replace[:, None], log_rest, x[row, ...])
    stream = xp.astype(refused, xp.int32) * Stream.REPLACE  # the others draw their bonus from TARGET, which is 0
    return Ruling(accepted, noise.draw(source, words[:, row], positions[row], stream))


def kept(uniform: Array, target: Array, draft: Array | float) -> Array:
    """Whether each draft stays: u < p/q, without dividing: q = 0 is no special case, and p = 0 never stays."""
    return uniform * draft < target


def draft_chance(xp: Any, tokens: Array, probs: Array | None) -> Array | float:
    """q(x) of each drafted token. [N]; a one-hot draft was certain of it."""
    if probs is None:
        return 1.0
    return probs[xp.arange(tokens.shape[0], device=tokens.device), tokens]


def residual(xp: Any, target: Array, refused: Array, tokens: Array, probs: Array | None) -> Array:
    """max(0, p - q) with q of the refused position. target [B, V], refused [B] an index into tokens [N] -> [B, V]"""
    if probs is None:
        rest = xp.asarray(target, copy=True)
        rest[xp.arange(target.shape[0], device=target.device), tokens[refused]] = 0.0
        return rest
    rest = target - probs[refused, ...]
    return xp.where(rest > 0, rest, xp.zeros_like(rest))
