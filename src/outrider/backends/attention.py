"""Who sees whom in a pass: prompt chunks, decodes, chains and trees of many sequences in one plan for all layers.

Spans of one length are attended to together; a long span is cut into blocks of queries, so that keys no query of a
block may see are not even multiplied.

    span      start=5, fed 3        keys 0..4 cached | 5 6 7 fed now
    chain                           query i sees keys 0 .. 5 + i
    tree                            query i sees keys 0 .. 4, its ancestors and itself
    window w                        of those, the ones at the last w positions
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from outrider.errors import BackendError

BLOCK = 64  # queries of a long span attended to at a time: the quickest of 32 to 512 on a CPU, measured

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(slots=True)
class Span:
    """A piece of one sequence in a pass."""

    start: int  # tokens that were there before
    count: int  # tokens fed
    places: Ints  # [start + count] where all its tokens lie in the store
    depths: Ints  # [count] position of each fed token, counted from the start
    ancestry: Bools | None  # tree: [count, count], whether column is row's ancestor or row itself; None: a chain

    @property
    def length(self) -> int:
        return self.start + self.count

    def visible(self, first: int, last: int, window: int | None) -> Bools:
        """Whether queries `first` to `last` see each key. [queries, length]"""
        positions = np.concatenate([np.arange(self.start), self.start + self.depths])
        own = positions[self.start + first : self.start + last, None]
        if self.ancestry is None:
            seen = positions <= own
        else:
            cached = np.ones((last - first, self.start), dtype=np.bool_)
            seen = np.concatenate([cached, self.ancestry[first:last]], axis=1)
        return seen if window is None else seen & (positions > own - window)


def build_span(start: int, count: int, places: Ints, parents: Sequence[int] | None) -> Span:
    """A chain, or a tree when there are `parents` (see `backends.base.Spans`)."""
    if parents is None:
        return Span(start, count, places, np.arange(count), None)
    ancestry = np.eye(count, dtype=np.bool_)
    depths = np.zeros(count, dtype=np.int64)
    if len(parents) != count or not all(-1 <= parent < node for node, parent in enumerate(parents)):
        raise BackendError(f"{count} tokens with parents {list(parents)}; each must come after its parent, -1 or more")
    for node, parent in enumerate(parents):
        if parent >= 0:
            ancestry[node] |= ancestry[parent]
            depths[node] = depths[parent] + 1
    return Span(start, count, places, depths, ancestry)


@dataclass(slots=True)
class Block:
    """Queries `first` to `last` of each span in a group look at keys `low` to `high`."""

    first: int
    last: int
    low: int
    high: int
    mask: torch.Tensor | None  # [batch, 1, queries, keys], added to the products: -inf where there is nothing to see


@dataclass(slots=True)
class Group:
    """Spans of one length, standing one after another in the pass."""

    first: int  # the group's first token in the pass
    batch: int
    count: int  # tokens fed per span
    keys: torch.Tensor | slice  # places [batch * size]; a slice where they are neighbours, which saves a copy
    size: int  # keys per span, the shorter ones padded
    blocks: list[Block]  # several only for a single span


def build_groups(spans: Sequence[Span], window: int | None, device: torch.device) -> list[Group]:
    """The plan for spans in the order of the pass."""
    groups, first, at = [], 0, 0
    while at < len(spans):
        end = at + 1
        while end < len(spans) and spans[end].count == spans[at].count <= BLOCK:
            end += 1
        alike = spans[at:end]
        groups.append(_lone(alike[0], first, window, device) if end == at + 1 else _batch(alike, first, window, device))
        first += len(alike) * alike[0].count
        at = end
    return groups


def _lone(span: Span, first: int, window: int | None, device: torch.device) -> Group:
    """One span, its queries in blocks that look at no more keys than they must."""
    step = BLOCK if span.ancestry is None else span.count
    blocks = []
    for start in range(0, span.count, step):
        end = min(start + step, span.count)
        visible = span.visible(start, end, window)[:, : span.start + end]
        low = int(visible.any(axis=0).argmax())  # the first key anybody sees
        blocks.append(Block(start, end, low, visible.shape[1], _mask(visible[None, None, :, low:], device)))
    run = int(span.places[0])
    is_run = int(span.places[-1]) - run == span.length - 1 and bool((np.diff(span.places) == 1).all())
    keys = slice(run, run + span.length) if is_run else torch.from_numpy(span.places).to(device)
    return Group(first, 1, span.count, keys, span.length, blocks)


def _batch(spans: Sequence[Span], first: int, window: int | None, device: torch.device) -> Group:
    """Short spans of one length, padded to the longest sequence."""
    count, size = spans[0].count, max(span.length for span in spans)
    # A padded key is masked, but it must be a number, so it is one the span itself has written.
    places = np.concatenate([np.pad(span.places, (0, size - span.length), mode="edge") for span in spans])
    visible = np.zeros((len(spans), 1, count, size), dtype=np.bool_)
    for index, span in enumerate(spans):
        visible[index, 0, :, : span.length] = span.visible(0, count, window)
    block = Block(0, count, 0, size, _mask(visible, device))
    return Group(first, len(spans), count, torch.from_numpy(places).to(device), size, [block])


def _mask(visible: Bools, device: torch.device) -> torch.Tensor | None:
    if visible.all():
        return None
    return torch.zeros(visible.shape).masked_fill_(torch.from_numpy(~visible), -torch.inf).to(device)


def attend(qkv: torch.Tensor, layer: torch.Tensor, groups: Sequence[Group], heads: int, head_dim: int) -> torch.Tensor:
    """Attention of every token of a pass. qkv: [N, queries | keys | values], layer: [places, keys | values]."""
    parts = []
    for group in groups:
        held = layer[group.keys] if isinstance(group.keys, slice) else layer.index_select(0, group.keys)
        held = held.view(group.batch, group.size, -1, head_dim).transpose(1, 2)
        parts += [_attend(qkv, held, group, block, heads) for block in group.blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(qkv: torch.Tensor, held: torch.Tensor, group: Group, block: Block, heads: int) -> torch.Tensor:
    """[queries, heads * head_dim] of one block; held: [batch, kv heads of keys, then of values, size, head_dim]."""
    kv_heads, head_dim = held.shape[1] // 2, held.shape[3]
    count = block.last - block.first
    start = group.first + block.first
    queries = qkv[start : start + group.batch * count, : heads * head_dim]
    mixed = functional.scaled_dot_product_attention(
        queries.view(group.batch, count, heads, head_dim).transpose(1, 2),
        held[:, :kv_heads, block.low : block.high],
        held[:, kv_heads:, block.low : block.high],
        attn_mask=None if block.mask is None else block.mask.to(qkv.dtype),
        enable_gqa=heads != kv_heads,
    )
    return mixed.transpose(1, 2).reshape(group.batch * count, heads * head_dim)
