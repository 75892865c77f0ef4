"""Where the rows of a pass stand and what each of them sees, as one array of integers that is copied to the device.

A row is a token that is fed. Rows of one sequence that look at its keys together are a group. Keys are cut into splits
for programs that work side by side; a split's size depends on nothing but the position of the row that looks, so that
a row's sum has the same order whoever else is in the pass.

    sequence   keys 0 .. 9 cached | fed 10 11 12
    rows       10 11 12        last = 10 11 12: row i sees keys 0 .. last[i]
    tree       masks: of the keys from `root` on, a row sees those whose bit is set, its ancestors and itself
               paths: key number p of a row is its own ancestor at position p, so keys come in order of position
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from outrider.errors import BackendError

MIN_SPLIT = 128  # keys
SPLIT_STEP = 128  # sizes of splits are whole numbers of these
GRAPH_ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # rows that passes are filled up to
WORK_ROWS = (64, GRAPH_ROWS[-1])  # rows that passes of a few, and of many, have room for together
PAIRS, MORE_PAIRS = 16, 64  # (row, head) pairs of a group: for single rows, and for spans of several
ALIGNED = 4  # integers: fields begin at multiples of 16 bytes, or kernels would be compiled anew for each case
MASK_BITS = 64  # nodes of a tree that masks can tell apart
NOWHERE = -1  # where what fills a pass up stands
CHAIN = 1 << 30  # the root of what does not branch: no key comes after it

Ints = np.ndarray[Any, np.dtype[np.int32]]

ROW_FIELDS = ("tokens", "positions", "places", "lasts", "groups", "low_bits", "high_bits")
GROUP_FIELDS = ("firsts", "counts", "lengths", "splits", "tables", "roots", "paths", "seats")


class Shape(NamedTuple):
    """What a pass has in common with all that one CUDA graph can run."""

    rows: int  # there is room for
    groups: int
    tile: int  # rows of a group at most
    tree: str  # "" no tree, "masks", "paths"


@dataclass(slots=True)
class Layout:
    """One pass on the device. Fields are views of `numbers`: [rows] or [groups]; then `table`, page ids and paths."""

    shape: Shape
    num_splits: int  # that any row may have: room for them is needed
    fields: dict[str, torch.Tensor]
    table: torch.Tensor

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.fields[name]


class Rows(NamedTuple):
    """The same on the host, not yet filled up to a graph's shape."""

    fields: dict[str, Ints]
    table: Ints
    tree: str  # see `Shape`
    num_groups: int
    num_seated: int  # rows that are in groups
    num_splits: int


def split_sizes(lengths: Ints, max_splits: int) -> Ints:
    """Keys of a split, for rows that see so many keys: the least that makes few enough splits."""
    steps = -(-lengths // (max_splits * SPLIT_STEP))
    return np.maximum(MIN_SPLIT, steps * SPLIT_STEP)


def most_splits(kv_heads: int) -> int:
    """Splits of a row at most: with its key heads, enough programs to keep a large GPU busy."""
    return min(128, max(16, 256 // kv_heads))


def tile_for(longest: int, share: int, *, strict: bool = False) -> int:
    """Rows of a group at most, where spans have up to so many tokens and so many query heads share a key head."""
    return max(1, (PAIRS if strict or longest * share <= PAIRS else MORE_PAIRS) // share)


def graph_rows(rows: int) -> int:
    return next(size for size in GRAPH_ROWS if size >= rows)


def group_room(groups: int) -> int:
    """Groups a graph is filled up to: powers of four, since each is another graph."""
    room = 1
    while room < groups:
        room *= 4
    return room


def arrange(
    starts: Sequence[int],
    counts: Sequence[int],
    pages: Sequence[Sequence[int]],
    page_size: int,
    parents: Mapping[int, Sequence[int]],
    *,
    tile: int,
    max_splits: int,
    by_path: bool,
    apart: Sequence[bool] | None = None,
    ahead: int = 0,
) -> Rows:
    """Spans one after another as rows and groups of up to `tile` rows.

    pages: of each sequence. by_path: trees see their keys in order of position. apart: spans whose rows are in no
    group, since somebody else does their attention. ahead: places that rows may be moved on by, on the device.
    """
    begin, size = np.asarray(starts, dtype=np.int32), np.asarray(counts, dtype=np.int32)
    if apart is None and not parents and len(counts) == sum(counts):
        return _single_rows(begin, pages, page_size, max_splits, ahead)
    if apart is None and not parents and counts[0] <= tile and len(set(counts)) == 1:
        chains = _even_chains(begin, counts[0], pages, page_size, max_splits, ahead)
        if chains is not None:
            return chains
    ends = np.cumsum(size, dtype=np.int32)
    total = int(ends[-1])
    span = np.repeat(np.arange(len(size), dtype=np.int32), size)
    offset = np.arange(total, dtype=np.int32) - (ends - size)[span]
    index = begin[span] + offset  # where a token lies in its sequence
    table, tables = _join(pages, begin + size + ahead, page_size)
    position, last, root = index.copy(), index.copy(), np.full(total, CHAIN, dtype=np.int32)
    bits, path = np.zeros(total, dtype=np.uint64), np.zeros(total, dtype=np.int32)
    ends_at, alone, lines = last, np.zeros(total, dtype=np.bool_), list[int]()
    if parents:
        ends_at = last.copy()  # what decides the size of splits
    for number, tree in parents.items():
        rows = slice(int(ends[number] - size[number]), int(ends[number]))
        nodes = _walk(tree, int(begin[number]), int(size[number]))
        position[rows], root[rows] = nodes.positions, nodes.root
        if by_path:
            last[rows] = ends_at[rows] = position[rows]
            alone[rows] = True
            for row, line in zip(range(rows.start, rows.stop), nodes.lines(), strict=True):
                path[row] = len(table) + len(lines)
                lines += line
        else:
            bits[rows] = nodes.bits()
            ends_at[rows] = index[rows.stop - 1]
    split = split_sizes(ends_at + 1, max_splits)
    opens = (offset % tile == 0) | alone
    opens[1:] |= split[1:] != split[:-1]
    seated = np.ones(total, dtype=np.bool_) if apart is None else ~np.asarray(apart)[span]
    opens &= seated
    group = np.where(seated, np.cumsum(opens, dtype=np.int32) - 1, NOWHERE)
    firsts = np.flatnonzero(opens).astype(np.int32)
    sizes = np.bincount(group[seated], minlength=len(firsts)).astype(np.int32)
    places = table[tables[span] + index // page_size] * page_size + index % page_size
    return Rows(
        fields={
            "positions": position,
            "places": places,
            "lasts": last,
            "groups": group,
            "low_bits": (bits & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32),
            "high_bits": (bits >> np.uint64(32)).astype(np.uint32).view(np.int32),
            "firsts": firsts,
            "counts": sizes,
            "lengths": last[firsts + sizes - 1] + 1,
            "splits": split[firsts],
            "tables": tables[span[firsts]],
            "roots": root[firsts],
            "paths": path[firsts],
            "seats": np.cumsum(sizes, dtype=np.int32) - sizes,
        },
        table=np.concatenate([table, np.asarray(lines, dtype=np.int32)]) if lines else table,
        tree="" if not parents else "paths" if by_path else "masks",
        num_groups=len(firsts),
        num_seated=int(sizes.sum()),
        num_splits=int((-(-(last + 1) // split))[seated].max(initial=1)),
    )


def _single_rows(index: Ints, pages: Sequence[Sequence[int]], page_size: int, max_splits: int, ahead: int) -> Rows:
    """The same for one token of each sequence, which is what comes most often: each is a group of its own."""
    table, tables = _join(pages, index + 1 + ahead, page_size)
    zeros, number = np.zeros(len(index), dtype=np.int32), np.arange(len(index), dtype=np.int32)
    ones, length = zeros + 1, index + 1
    split = split_sizes(length, max_splits)
    fields = {
        "positions": index,
        "places": table[tables + index // page_size] * page_size + index % page_size,
        "lasts": index,
        "groups": number,
        "low_bits": zeros,
        "high_bits": zeros,
        "firsts": number,
        "counts": ones,
        "lengths": length,
        "splits": split,
        "tables": tables,
        "roots": zeros + CHAIN,
        "paths": zeros,
        "seats": number,
    }
    return Rows(fields, table, "", len(index), len(index), int((-(-length // split)).max()))


def _even_chains(
    begin: Ints, count: int, pages: Sequence[Sequence[int]], page_size: int, max_splits: int, ahead: int
) -> Rows | None:
    """The same for as many tokens of each, which drafts are: each sequence is a group. None where splits differ within
    one."""
    (steps, form), length = _form_of(len(begin), count), begin + count
    split = split_sizes(length, max_splits)
    if not np.array_equal(split, split_sizes(begin + 1, max_splits)):
        return None
    table, tables = _join(pages, length + ahead, page_size)
    index = begin[:, None] + steps
    places = table[tables[:, None] + index // page_size] * page_size + index % page_size
    position = index.ravel()
    fields = {
        **form,
        "positions": position,
        "places": places.ravel(),
        "lasts": position,
        "lengths": length,
        "splits": split,
        "tables": tables,
    }
    return Rows(fields, table, "", len(begin), len(position), int((-(-length // split)).max()))


@lru_cache(maxsize=256)
def _form_of(chains: int, count: int) -> tuple[Ints, dict[str, Ints]]:
    """What all passes of so many chains of so many tokens have in common."""
    numbers, rows = np.arange(chains, dtype=np.int32), np.zeros(chains * count, dtype=np.int32)
    return np.arange(count, dtype=np.int32), {
        "groups": np.repeat(numbers, count),
        "low_bits": rows,
        "high_bits": rows,
        "firsts": numbers * count,
        "counts": np.full(chains, count, dtype=np.int32),
        "roots": np.full(chains, CHAIN, dtype=np.int32),
        "paths": np.zeros(chains, dtype=np.int32),
        "seats": numbers * count,
    }


def fill(rows: Rows, shape: Shape, scratch: int, numbers: Ints) -> int:
    """Write a pass into `numbers`, filled up to its shape; returns how many integers are used. Its tokens, which come
    first, are left at 0."""
    at = 0
    for name, room in _fields(shape):
        values = rows.fields.get(name, ())
        assert len(values) <= room, f"{len(values)} {name} in a pass that has room for {room}"
        numbers[at : at + len(values)] = values
        numbers[at + len(values) : at + room] = {"places": scratch, "groups": NOWHERE}.get(name, 0)
        at += _aligned(room)
    numbers[at : at + len(rows.table)] = rows.table
    return at + len(rows.table)


def view(numbers: torch.Tensor, shape: Shape, num_splits: int) -> Layout:
    """The fields of a filled array."""
    fields, at = {}, 0
    for name, room in _fields(shape):
        fields[name] = numbers[at : at + room]
        at += _aligned(room)
    return Layout(shape, num_splits, fields, numbers[at:])


def size_of(shape: Shape) -> int:
    """Integers of a pass before its table."""
    return sum(_aligned(room) for _, room in _fields(shape))


def _aligned(room: int) -> int:
    return -(-room // ALIGNED) * ALIGNED


def _fields(shape: Shape) -> list[tuple[str, int]]:
    return [(name, shape.rows) for name in ROW_FIELDS] + [(name, shape.groups) for name in GROUP_FIELDS]


class _Nodes(NamedTuple):
    """A tree's fed nodes. Those of earlier passes count, too: `skipped` of them."""

    root: int  # where its first node lies
    skipped: int
    parents: Sequence[int]
    depths: list[int]

    @property
    def positions(self) -> list[int]:
        return [self.root + depth for depth in self.depths[self.skipped :]]

    def bits(self) -> list[int]:
        bits: list[int] = []
        for node, parent in enumerate(self.parents):
            bits.append((bits[parent] if parent >= 0 else 0) | 1 << node)
        return bits[self.skipped :]

    def lines(self) -> list[list[int]]:
        """For each fed node where its ancestors and itself lie, in order."""
        lines: list[list[int]] = []
        for node, parent in enumerate(self.parents):
            lines.append([*(lines[parent] if parent >= 0 else []), self.root + node])
        return lines[self.skipped :]


def _walk(parents: Sequence[int], start: int, count: int) -> _Nodes:
    size = len(parents)
    if not count <= size <= start + count or not all(-1 <= parent < node for node, parent in enumerate(parents)):
        raise BackendError(
            f"{count} tokens at {start} with parents {list(parents)}; each must come after its parent, -1 or more"
        )
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return _Nodes(start + count - size, size - count, parents, depths)


def _join(pages: Sequence[Sequence[int]], lengths: Ints, page_size: int) -> tuple[Ints, Ints]:
    """The page ids of all sequences in one table, and where each one's begin."""
    needed = -(-lengths // page_size)
    flat: list[int] = []
    for ids, count in zip(pages, needed.tolist(), strict=True):
        assert len(ids) >= count, f"{len(ids)} pages are too few for a pass that may go on to {count}"
        flat += ids[:count]
    return np.asarray(flat, dtype=np.int32), (np.cumsum(needed) - needed).astype(np.int32)
