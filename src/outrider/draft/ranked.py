"""Trees that are grown beyond their size and cut back to the best nodes, as EAGLE-2 does it.

Every level takes the likeliest children of a few tips, and the best of those are the next tips. In the end the nodes
stay that are likeliest as a whole, with their ancestors; none is likelier than its parent, so they hang together.

Choosing by what was drawn is allowed because nothing is sampled: children are certain (one-hot), or drawn with the
target's own noise where any proposal is exact (`coupled`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from outrider.draft.growth import DEPTH, LEVEL, Read, Sprout, grow
from outrider.draft.join import Part, join
from outrider.errors import DraftError, RequestError
from outrider.sampling.branch import Children, DraftRows, OwnRows
from outrider.sampling.ops import SamplingOps
from outrider.types import Drafts, Job

T = TypeVar("T")
Look = Callable[[Sequence[Sprout]], OwnRows]  # as `Read`


def grow_heads(
    ops: SamplingOps,
    jobs: Sequence[Job],
    rooms: Sequence[int],
    feeds: Sequence[int],
    trees: Sequence[bool],
    read: Read,
    drafts: Drafts,
    *,
    depth: int = DEPTH,
    look: Look | None = None,
) -> Drafts:
    """Ranked trees for those that may branch, chains for the others; `drafts` brings the fallbacks.

    look: reads for trees, where the likeliest children are wanted and can be had for less.
    """
    chains = [index for index, tree in enumerate(trees) if not tree]
    branching = [index for index, tree in enumerate(trees) if tree]
    if not branching:
        grow(ops, jobs, rooms, trees, read, drafts)
    elif not chains:
        grow_ranked(ops, jobs, rooms, feeds, read, drafts, depth=depth, look=look)
    else:
        first, second = Drafts([], None), Drafts([], None)

        def pick(values: Sequence[T], members: Sequence[int]) -> list[T]:
            return [values[index] for index in members]

        grow(ops, pick(jobs, chains), pick(rooms, chains), pick(trees, chains), read, first)
        chosen = (pick(jobs, branching), pick(rooms, branching), pick(feeds, branching))
        grow_ranked(ops, *chosen, read, second, depth=depth, look=look)
        whole = join(ops, len(jobs), [Part(chains, first), Part(branching, second)])
        whole.fallbacks = drafts.fallbacks
        return whole
    return drafts


def grow_ranked(
    ops: SamplingOps,
    jobs: Sequence[Job],
    rooms: Sequence[int],
    feeds: Sequence[int],
    read: Read,
    drafts: Drafts,
    *,
    depth: int = DEPTH,
    look: Look | None = None,
) -> None:
    """Fill `drafts` with a tree of up to rooms[b] tokens for each job; `read` is fed feeds[b] nodes at most."""
    sprouts = [Sprout(job, room, True) for job, room in zip(jobs, rooms, strict=True)]
    index_of = {id(sprout): index for index, sprout in enumerate(sprouts)}
    while active := [sprout for sprout in sprouts if sprout.wants_more and sprout.depth < depth]:
        drafts.steps += 1
        tips = [(sprout, tip) for sprout in active for tip in sprout.tips]
        rows: DraftRows | OwnRows
        if look is not None:
            rows = look(active)
            drawn = [rows.draw([min(LEVEL, sprout.room) for sprout, _ in tips], certain=True)]
        else:
            jobs_of, lines = [sprout.job for sprout, _ in tips], [sprout.line(tip) for sprout, tip in tips]
            rows = ops.draft_rows(jobs_of, lines, read(active))
            drawn = _draw(rows, [sprout for sprout, _ in tips])
        fresh: dict[int, list[int]] = {id(sprout): [] for sprout in active}
        for children in drawn:
            for row, token, confidence in zip(children.rows, children.tokens, children.confidences, strict=True):
                sprout, tip = tips[row]
                fresh[id(sprout)].append(_add(sprout, token, tip, confidence))
        for sprout in active:
            sprout.depth += 1
            left = feeds[index_of[id(sprout)]] - len(sprout.fed)
            sprout.tips = _next_tips(sprout, fresh[id(sprout)], left)
        for row, fault in rows.faults.items():
            sprout = tips[row][0]
            sprout.tips, sprout.room = [], 0
            if not isinstance(fault, RequestError):  # else the request did it to its row: the target's rows will tell
                error = DraftError(f"the draft failed: {fault.message}", param=fault.param)
                drafts.faults[index_of[id(sprout)]] = error
    trees = [_cut(sprout) for sprout in sprouts]
    drafts.counts = [len(tokens) for tokens, _ in trees]
    drafts.tokens = ops.integers([token for tokens, _ in trees for token in tokens])
    drafts.parents = {index: parents for index, (_, parents) in enumerate(trees) if parents}


def _draw(rows: DraftRows, owners: Sequence[Sprout]) -> list[Children]:
    """A few children of every row: the likeliest, or under `coupled` those the noise favours."""
    coupled = [sprout.job.rule == "coupled" for sprout in owners]
    counts = [min(LEVEL, sprout.room) for sprout in owners]
    drawn = []
    for by_noise in (False, True):
        if by_noise in coupled:
            some = [count if one is by_noise else 0 for count, one in zip(counts, coupled, strict=True)]
            drawn.append(rows.draw(some, certain=not by_noise))
    return drawn


def _add(sprout: Sprout, token: int, parent: int, confidence: float) -> int:
    sprout.tokens.append(token)
    sprout.parents.append(parent)
    sprout.confidences.append(confidence + (0.0 if parent < 0 else sprout.confidences[parent]))
    return len(sprout.tokens) - 1


def _next_tips(sprout: Sprout, fresh: Sequence[int], left: int) -> list[int]:
    """The best of the new nodes, as far as a child of theirs could still be among those that stay."""
    confidences = sprout.confidences
    worst = heapq.nlargest(sprout.room, confidences)[-1] if len(confidences) >= sprout.room else None
    hopeful = [node for node in fresh if worst is None or confidences[node] > worst]
    best = heapq.nlargest(min(LEVEL, left), hopeful, key=lambda node: (confidences[node], -node))
    return sorted(best)


def _cut(sprout: Sprout) -> tuple[list[int], list[int]]:
    return best_nodes(sprout.tokens, sprout.parents, sprout.confidences, room=sprout.room)


def best_nodes(
    tokens: Sequence[int], parents: Sequence[int], confidences: Sequence[float], *, room: int
) -> tuple[list[int], list[int]]:
    """Tokens and parents of the nodes that stay, numbered anew."""
    possible = [node for node, confidence in enumerate(confidences) if confidence > -math.inf]
    kept = sorted(heapq.nsmallest(room, possible, key=lambda node: (-confidences[node], node)))
    number = {-1: -1, **{node: place for place, node in enumerate(kept)}}
    return [tokens[node] for node in kept], [number[parents[node]] for node in kept]
