"""Growing a proposal level by level, for drafters that compute rows: models, layer skip, heads.

A level is one pass of the draft. Chains get one token per level. A tree's level has a few places, handed out to the
most promising (node, child) pairs; a promise comes from rows alone and is settled before any child of that level is
drawn, so sampled children keep the law.

    level 1    a  b          rows of the root
    level 2    aa ab ba      rows of a and b; here b's second child promised less than a's
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.errors import DraftError, OutriderError, RequestError
from outrider.sampling.ops import SamplingOps
from outrider.types import Array, Drafts, Job

FAINT = math.log(0.1)  # of a level's best promise: less is not worth a row
LEVEL = 4  # places of a tree's level
DEPTH = 8  # levels of a tree at most: each is a pass


@dataclass(slots=True)
class Sprout:
    """A job's proposal while it grows. Nodes are numbered in the order they were drawn."""

    job: Job
    room: int  # tokens it may still get
    is_tree: bool
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)  # log of how likely each node is, its ancestors included
    tips: list[int] = field(default_factory=lambda: [-1])  # nodes whose rows come next; -1 is the job's last token
    depth: int = 0
    fed: list[int] = field(default_factory=list)  # nodes the draft was fed, in that order
    fed_parents: list[int] = field(default_factory=list)  # for each of them its parent's place among them, or -1

    def feed(self) -> list[int]:
        """The tokens of the tips, which count as fed from now on."""
        if not self.is_tree:
            self.fed_parents.append(len(self.fed) - 1)
            self.fed += self.tips
            return self.tokens[-1:]
        place = {node: at for at, node in enumerate(self.fed)}
        self.fed_parents += [place.get(self.parents[tip], -1) for tip in self.tips]
        self.fed += self.tips
        return [self.tokens[tip] for tip in self.tips]

    def line(self, node: int) -> list[int]:
        """The drafted tokens up to a node."""
        if not self.is_tree:
            return self.tokens[: node + 1]
        line: list[int] = []
        while node >= 0:
            line.append(self.tokens[node])
            node = self.parents[node]
        return line[::-1]

    @property
    def wants_more(self) -> bool:
        return self.room > 0 and bool(self.tips) and not self.job.cancelled and (not self.is_tree or self.depth < DEPTH)


# Feeds every sprout's tips (the job's unread tokens, when the tip is -1) and returns one row per tip. [tips, V]
Read = Callable[[Sequence[Sprout]], Array]


def grow(
    ops: SamplingOps, jobs: Sequence[Job], rooms: Sequence[int], trees: Sequence[bool], read: Read, drafts: Drafts
) -> list[Sprout]:
    """Fill `drafts` with up to rooms[b] tokens for each job. Returns the sprouts, whose nodes `read` has fed."""
    sprouts = [Sprout(job, room, tree) for job, room, tree in zip(jobs, rooms, trees, strict=True)]
    levels: list[tuple[Drawn, Array | None]] = []
    while active := [sprout for sprout in sprouts if sprout.wants_more]:
        drafts.steps += 1
        logits = read(active)
        draw = _branch if any(sprout.is_tree for sprout in active) else _extend
        drawn, probs, faults = draw(ops, active, logits)
        for sprout, fault in faults:
            sprout.room = 0
            if not isinstance(fault, RequestError):  # else the request did it to its row: the target's rows will tell
                drafts.faults[jobs.index(sprout.job)] = DraftError(
                    f"the draft failed: {fault.message}", param=fault.param
                )
        levels.append((drawn, probs))
    drafts.counts = [len(sprout.tokens) for sprout in sprouts]
    drafts.tokens = ops.integers([token for sprout in sprouts for token in sprout.tokens])
    drafts.parents = {index: sprout.parents for index, sprout in enumerate(sprouts) if sprout.is_tree and sprout.tokens}
    if any(probs is not None for _, probs in levels):
        drafts.probs = _in_order(ops, sprouts, levels)
    return sprouts


Drawn = list[tuple[Sprout, int]]  # a sprout and its new node, in the order of `probs`
Faults = list[tuple[Sprout, OutriderError]]


def _extend(ops: SamplingOps, active: Sequence[Sprout], logits: Array) -> tuple[Drawn, Array | None, Faults]:
    """One more token for chains."""
    drawn = ops.draft([sprout.job for sprout in active], [sprout.tokens for sprout in active], logits)
    nodes = []
    for sprout, token in zip(active, drawn.tokens.tolist(), strict=True):
        node = sprout.depth
        sprout.tokens.append(token)
        sprout.tips = [node]
        sprout.room -= 1
        sprout.depth = node + 1
        nodes.append((sprout, node))
    return nodes, drawn.probs, [(active[index], fault) for index, fault in drawn.faults.items()]


def _branch(ops: SamplingOps, active: Sequence[Sprout], logits: Array) -> tuple[Drawn, Array | None, Faults]:
    """The next level of trees; a chain among them is a tree with one place per level."""
    tips = [(sprout, tip) for sprout in active for tip in sprout.tips]
    rows = ops.draft_rows([sprout.job for sprout, _ in tips], [sprout.line(tip) for sprout, tip in tips], logits)
    promises = rows.promises(LEVEL)
    counts, at = [], 0
    for sprout in active:
        size = len(sprout.tips)
        counts += _hand_out(sprout, promises[at : at + size])
        at += size
    children = rows.draw(counts)
    for sprout in active:
        sprout.tips = []
        sprout.depth += 1
    nodes = []
    for row, token, confidence in zip(children.rows, children.tokens, children.confidences, strict=True):
        sprout, tip = tips[row]
        before = 0.0 if tip < 0 else sprout.confidences[tip]
        node = _add(sprout, token, tip, before + confidence)
        sprout.tips.append(node)
        nodes.append((sprout, node))
    return nodes, children.probs, [(tips[row][0], fault) for row, fault in rows.faults.items()]


def _hand_out(sprout: Sprout, promises: Sequence[Sequence[float]]) -> list[int]:
    """How many children each tip of a sprout gets."""
    counts = [0] * len(promises)
    places = min(sprout.room, LEVEL if sprout.is_tree else 1)
    pairs = [
        ((0.0 if tip < 0 else sprout.confidences[tip]) + promise, -index)
        for index, (tip, row) in enumerate(zip(sprout.tips, promises, strict=True))
        for promise in row
    ]
    best = heapq.nlargest(places, pairs)
    for promise, index in best:
        if promise >= best[0][0] + FAINT:
            counts[-index] += 1
    return counts


def _add(sprout: Sprout, token: int, parent: int, confidence: float) -> int:
    sprout.tokens.append(token)
    sprout.parents.append(parent)
    sprout.confidences.append(confidence)
    sprout.room -= 1
    return len(sprout.tokens) - 1


def _in_order(ops: SamplingOps, sprouts: Sequence[Sprout], levels: Sequence[tuple[Drawn, Array | None]]) -> Array:
    """The rows of all drafts, job after job; they came level after level. [N, V]"""
    vocab_size = next(probs.shape[1] for _, probs in levels if probs is not None)
    index_of = {id(sprout): index for index, sprout in enumerate(sprouts)}
    rows: list[Array] = []
    came: list[tuple[int, int]] = []  # (job, node)
    for drawn, probs in levels:
        if probs is None:
            probs = ops.one_hot(ops.integers([sprout.tokens[node] for sprout, node in drawn]), vocab_size)
        rows.append(probs)
        came += [(index_of[id(sprout)], node) for sprout, node in drawn]
    order = sorted(range(len(came)), key=came.__getitem__)
    return ops.xp.concat(rows)[ops.integers(order), ...]
