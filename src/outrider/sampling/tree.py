"""The two exact acceptance rules on trees: `accept.py` with branches, vectorised over jobs.

A job is at a row; a child of it is judged. Kept: the job goes on to the child's row. Refused: to the next sibling, and
with none left the token is drawn from what remains of the row.

    row 0 (root)   children a b        a refused: p becomes max(0, p - q_a), normalised; b is judged by that
    row 1 (a)      child c
    row 2 (b)      no child            b kept: the next token is drawn from row 2
    row 3 (c)

Rows of a job: 0 is the root, i + 1 comes after its draft i. A chain is the tree in which everybody has one child.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from outrider.sampling.accept import draft_chance
from outrider.sampling.noise import Noise, Stream
from outrider.sampling.warp import softmax
from outrider.types import Array


class TreeLayout(NamedTuple):
    """Who is whose child. B jobs, N drafts, R = B + N rows. -1 is nobody."""

    owner: Array  # [R] the job of each row
    depth: Array  # [R] drafts on the way to it, int32
    first: Array  # [B] the root
    draft: Array  # [R] the draft a row comes after; 0 at roots
    child: Array  # [R] row of its first child
    sibling: Array  # [R] row of its next sibling
    rank: Array  # [R] earlier siblings, int32
    steps: int  # the most children that may have to be judged, one after another
    parent: list[int]  # [R] row it comes from, on the host


class TreeRuling(NamedTuple):
    """Where each job ended, and the token that follows there. rows [B], next [B]"""

    rows: Array
    next: Array


def build_tree_layout(xp: Any, device: Any, parents: Sequence[Sequence[int]]) -> TreeLayout:
    """From the parents of each job's drafts (see `types.Drafts`). Computed on the host, where they are known."""
    owner: list[int] = []
    depth: list[int] = []
    first: list[int] = []
    draft: list[int] = []
    child: list[int] = []
    sibling: list[int] = []
    rank: list[int] = []
    parent: list[int] = []
    steps = 0
    for job, nodes in enumerate(parents):
        root = len(owner)
        first.append(root)
        size = len(nodes) + 1
        owner += [job] * size
        draft += [0, *range(root - job, root - job + len(nodes))]
        parent += [-1, *(root + node + 1 for node in nodes)]
        depth += [0] * size
        child += [-1] * size
        sibling += [-1] * size
        rank += [0] * size
        youngest: dict[int, int] = {}
        judged = [0] * size  # judgements from the root up to and including each row's own
        for row in range(root + 1, root + size):
            above = parent[row]
            depth[row] = depth[above] + 1
            elder = youngest.get(above)
            if elder is None:
                child[above] = row
                judged[row - root] = judged[above - root] + 1
            else:
                sibling[elder] = row
                rank[row] = rank[elder] + 1
                judged[row - root] = judged[elder - root] + 1
            youngest[above] = row
        steps = max(steps, *judged)

    def index(values: Sequence[int], dtype: Any = None) -> Array:
        return xp.asarray(np.asarray(values, dtype=np.int64), dtype=dtype, device=device)

    return TreeLayout(
        owner=index(owner),
        depth=index(depth, xp.int32),
        first=index(first),
        draft=index(draft),
        child=index(child),
        sibling=index(sibling),
        rank=index(rank, xp.int32),
        steps=steps,
        parent=parent,
    )


def path_to(layout: TreeLayout, row: int, root: int) -> list[int]:
    """The drafts (counted within their job) from the root to a row."""
    path: list[int] = []
    while row != root:
        path.append(row - root - 1)
        row = layout.parent[row]
    return path[::-1]


def match_tree(xp: Any, chosen: Array, tokens: Array, layout: TreeLayout) -> TreeRuling:
    """Follow the target's own token as long as a child has it. chosen [R], tokens [N]"""
    row = layout.first
    candidate = layout.child[row]
    for _ in range(layout.steps):
        there = candidate >= 0
        at = xp.where(there, candidate, 0)
        hit = there & (tokens[layout.draft[at]] == chosen[row])
        row = xp.where(hit, at, row)
        candidate = xp.where(hit, layout.child[at], xp.where(there, layout.sibling[at], -1))
    return TreeRuling(row, chosen[row])


def reject_tree(
    xp: Any,
    x: Array,
    tokens: Array,
    probs: Array | None,
    layout: TreeLayout,
    noise: Noise,
    words: Array,
    positions: Array,
) -> TreeRuling:
    """Rejection sampling, child after child. x [R, V] shaped logits, tokens [N], probs [N, V] or None, positions [R].

    `target` holds what is left of each row, `mass` its sum: p is target / mass.
    """
    target = softmax(xp, x)
    mass = xp.ones_like(target[:, 0])
    refused = mass < 0  # rows of which a child was refused
    # A row's own noise is that of its drafted token: it stands one before what the row decides.
    uniform = noise.uniform(words, positions - 1, Stream.ACCEPT, layout.rank)
    chance = draft_chance(xp, tokens, probs)
    row = layout.first
    candidate = layout.child[row]
    for _ in range(layout.steps):
        there = candidate >= 0
        at = xp.where(there, candidate, 0)
        draft = layout.draft[at]
        token = tokens[draft]
        left, weight = target[row, token], mass[row]
        keep = there & (uniform[at] * (1.0 if probs is None else chance[draft]) * weight < left)  # type: ignore[index]
        refuse = there & ~keep
        if probs is None:
            target[row, token] = xp.where(refuse, xp.zeros_like(left), left)
            mass[row] = xp.where(refuse, weight - left, weight)
        else:
            before = target[row, ...]
            rest = before - weight[:, None] * probs[draft, ...]
            rest = xp.where(rest > 0, rest, xp.zeros_like(rest))
            target[row, ...] = xp.where(refuse[:, None], rest, before)
            mass[row] = xp.where(refuse, xp.sum(rest, axis=-1), weight)
        refused[row] = refused[row] | refuse
        row = xp.where(keep, at, row)
        candidate = xp.where(keep, layout.child[at], xp.where(refuse, layout.sibling[at], -1))
    rest = target[row, ...]
    replace = refused[row] & xp.any(rest > 0, axis=-1)  # a residual without mass falls back to p
    log_rest = xp.where(rest > 0, xp.log(xp.where(rest > 0, rest, xp.ones_like(rest))), -xp.inf)
    source = xp.where(replace[:, None], log_rest, x[row, ...])
    stream = xp.astype(refused[row], xp.int32) * Stream.REPLACE  # the others draw from TARGET, which is 0
    return TreeRuling(row, noise.draw(source, words[:, row], positions[row], stream))
