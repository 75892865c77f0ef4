"""Who sees whom in a pass: prompt chunks, decodes, chains and trees of many sequences in one plan for all layers.

Spans of one length are attended to together; a long span is cut into blocks of queries, so that keys no query of a
block may see are not even multiplied.

    span      start=5, fed 3        keys 0..4 cached | 5 6 7 fed now
    chain                           query i sees keys 0 .. 5 + i
    tree                            query i sees keys 0 .. 4, its ancestors and itself
    window w                        of those, the ones at the last w positions
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from outrider.backends.forward import Block
from outrider.errors import BackendError
from outrider.kv.store import PageStore

BLOCK = 64  # queries of a long span attended to at a time: the quickest of 32 to 512 on a CPU, measured

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(slots=True)
class Span:
    """A piece of one sequence in a pass."""

    start: int  # tokens that were there before
    count: int  # tokens fed
    places: Ints  # [start + count] where all its tokens lie in the store
    positions: Ints  # [start + count] of all its tokens; those of a tree stand side by side
    ancestry: (
        Bools | None
    )  # tree: [count, n], whether a fed token comes after each of the last n, or is it; None: a chain

    @property
    def length(self) -> int:
        return self.start + self.count

    def visible(self, first: int, last: int, window: int | None) -> Bools:
        """Whether queries `first` to `last` see each key. [queries, length]"""
        positions = self.positions
        own = positions[self.start + first : self.start + last, None]
        if self.ancestry is None:
            seen = positions <= own
        else:
            settled = np.ones((last - first, self.length - self.ancestry.shape[1]), dtype=np.bool_)
            seen = np.concatenate([settled, self.ancestry[first:last]], axis=1)
        return seen if window is None else seen & (positions > own - window)


def build_span(start: int, count: int, places: Ints, parents: Sequence[int] | None) -> Span:
    """A chain, or a tree when there are `parents` (see `backends.base.Spans`)."""
    positions = np.arange(start + count)
    if parents is None:
        return Span(start, count, places, positions, None)
    size = len(parents)
    if not count <= size <= start + count or not all(-1 <= parent < node for node, parent in enumerate(parents)):
        raise BackendError(
            f"{count} tokens at {start} with parents {list(parents)}; each must come after its parent, -1 or more"
        )
    ancestry = np.eye(size, dtype=np.bool_)
    root = start + count - size
    positions[root:] = root
    for node, parent in enumerate(parents):
        if parent >= 0:
            ancestry[node] |= ancestry[parent]
            positions[root + node] = positions[root + parent] + 1
    return Span(start, count, places, positions, ancestry[size - count :])


def build_blocks(spans: Sequence[Span], window: int | None, queries: torch.Tensor, store: PageStore) -> list[Block]:
    """What the queries of a pass see, in the order of the pass. queries: [tokens, heads, head_dim]"""
    blocks: list[Block] = []
    first = at = 0
    while at < len(spans):
        end = at + 1
        while end < len(spans) and _goes_with(spans[end], spans[at]):
            end += 1
        last = first + (end - at) * spans[at].count
        if end == at + 1:
            blocks += _lone(spans[at], window, queries[first:last], store)
        else:
            blocks.append(_batch(spans[at:end], window, queries[first:last]))
        first, at = last, end
    return blocks


def _goes_with(span: Span, first: Span) -> bool:
    """Short spans of one length are attended to together, but none is padded to much more than its own keys."""
    return span.count == first.count <= BLOCK and span.length <= 2 * max(first.length, BLOCK)


def _lone(span: Span, window: int | None, queries: torch.Tensor, store: PageStore) -> Iterator[Block]:
    """One span, its queries in blocks that look at no more keys than they must."""
    step = BLOCK if span.ancestry is None else span.count
    for start in range(0, span.count, step):
        end = min(start + step, span.count)
        low, high, mask = 0, span.start + end, None
        if span.count > 1 or span.ancestry is not None or window is not None:
            visible = span.visible(start, end, window)[:, :high]
            low = int(visible.any(axis=0).argmax())  # the first key anybody sees
            mask = _mask(visible[None, None, :, low:], queries)
        asking = queries[start:end].unsqueeze(0).transpose(1, 2)
        yield _looking(asking, span.places[low:high], mask, store)


def build_lone_query(span: Span, index: int, window: int | None, query: torch.Tensor, store: PageStore) -> Block:
    """One token of a span and nothing but the keys it sees, in order. query: [1, heads, head_dim]"""
    visible = span.visible(index, index + 1, window)[0]
    return _looking(query.unsqueeze(2), span.places[visible], None, store)


def _looking(queries: torch.Tensor, places: Ints, mask: torch.Tensor | None, store: PageStore) -> Block:
    first, last = int(places[0]), int(places[-1])
    if last - first + 1 == len(places) and (np.diff(places) == 1).all():  # neighbours need no copy
        keys, values = store.run(slice(first, last + 1))
        return Block(queries, keys, values, None, mask)
    return Block(queries, [], [], torch.from_numpy(places).to(queries.device), mask)


def _batch(spans: Sequence[Span], window: int | None, queries: torch.Tensor) -> Block:
    """Short spans of one length, padded to the longest sequence."""
    count, size = spans[0].count, max(span.length for span in spans)
    # A padded key is masked, but it must be a number, so it is one the span itself has written.
    places = np.concatenate([np.pad(span.places, (0, size - span.length), mode="edge") for span in spans])
    visible = np.zeros((len(spans), 1, count, size), dtype=np.bool_)
    for index, span in enumerate(spans):
        visible[index, 0, :, : span.length] = span.visible(0, count, window)
    asking = queries.view(len(spans), count, *queries.shape[1:]).transpose(1, 2)
    return Block(asking, [], [], torch.from_numpy(places).to(queries.device), _mask(visible, queries))


def _mask(visible: Bools, like: torch.Tensor) -> torch.Tensor | None:
    if visible.all():
        return None
    return torch.zeros(visible.shape).masked_fill_(torch.from_numpy(~visible), -torch.inf).to(like)
