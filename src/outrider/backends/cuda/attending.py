"""Attention of a few rows over keys in pages, in Triton; and where its rows stand.

It is bound by reading the cache and by having too little to do side by side: the keys of a sequence are cut into splits
that programs work on at once, and `_combine` joins them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.backends.cuda.launching import INTERPRETED, fitted, launch
from outrider.backends.cuda.layout import SPLIT_STEP, WORK_ROWS, Layout, most_splits

LEAST_PAIRS = 16  # (row, head) pairs of a group: the tensor cores take no fewer
LOOKING = {16: (128, 4, 2), 64: (64, 4, 2)}  # by pairs: keys of a step, warps, stages
LOG2_E = 1.4426950408889634


@triton.jit
def _turn(
    qkv,
    held,
    turns,
    head_norm,
    places,
    width,  # of a row of qkv
    held_width,
    floor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAIRS: tl.constexpr,  # of a head
    PAIR_BLOCK: tl.constexpr,
    TURNING: tl.constexpr,  # pairs that turn
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One head of one row: norm, turn by the row's position, and keys and values go to their place in the cache."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, PAIR_BLOCK)
    is_pair = pair < PAIRS
    at = qkv + row * width + head * 2 * PAIRS + 2 * pair
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    even = tl.load(at, mask=is_pair, other=0.0)
    odd = tl.load(at + 1, mask=is_pair, other=0.0)
    if head < HEADS + KV_HEADS:
        real, imaginary = even.to(tl.float32), odd.to(tl.float32)
        if NORM:
            weight = head_norm + head * 2 * PAIRS + 2 * pair
            scale = 1.0 / tl.sqrt(tl.sum(real * real + imaginary * imaginary, axis=0) + floor)
            real *= scale * tl.load(weight, mask=is_pair, other=0.0)
            imaginary *= scale * tl.load(weight + 1, mask=is_pair, other=0.0)
        turning = pair < TURNING
        turn = turns + row * 2 * TURNING + 2 * pair
        cosine = tl.load(turn, mask=turning, other=1.0)
        sine = tl.load(turn + 1, mask=turning, other=0.0)
        even = (real * cosine - imaginary * sine).to(even.dtype)
        odd = (real * sine + imaginary * cosine).to(odd.dtype)
        tl.store(at, even, mask=is_pair)
        tl.store(at + 1, odd, mask=is_pair)
    if head >= HEADS:
        place = tl.load(places + row).to(tl.int64)
        kept = held + place * held_width + (head - HEADS) * 2 * PAIRS + 2 * pair
        tl.store(kept, even, mask=is_pair)
        tl.store(kept + 1, odd, mask=is_pair)


@triton.jit
def _attend(
    qkv,
    held,
    sums,
    peaks,
    weights,
    firsts,
    counts,
    lengths,
    splits,
    tables,
    roots,
    paths,
    seats,
    lasts,
    low_bits,
    high_bits,
    table,
    page_size,
    width,  # of a row of qkv
    held_width,
    num_splits,
    window,
    scale,  # of logits, times log2(e)
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,  # (row, head) pairs of a group
    KEYS: tl.constexpr,
    TREE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SKIP: tl.constexpr,  # keys at the beginning that nobody sees
    OVERLAP: tl.constexpr,
):
    """Some rows of one sequence, the query heads of one key head, every so many-th split: a softmax over each."""
    group, kv_head = tl.program_id(0), tl.program_id(1)
    SHARE: tl.constexpr = HEADS // KV_HEADS
    count, first = tl.load(counts + group), tl.load(firsts + group)
    length, size = tl.load(lengths + group), tl.load(splits + group)
    table_at, root, path_at = tl.load(tables + group), tl.load(roots + group), tl.load(paths + group)
    pair = tl.arange(0, PAIRS)
    row = first + pair // SHARE
    head = kv_head * SHARE + pair % SHARE
    is_pair = pair // SHARE < count
    d = tl.arange(0, DIM_BLOCK)
    is_dim = d < DIM
    last = tl.load(lasts + row, mask=is_pair, other=-1)
    seat = tl.load(seats + group) + pair // SHARE
    if TREE == "masks":
        low = tl.load(low_bits + row, mask=is_pair, other=0)
        high = tl.load(high_bits + row, mask=is_pair, other=0)
    num_here = tl.where(count > 0, tl.cdiv(length, tl.maximum(size, 1)), 0)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    q_at = qkv + row.to(tl.int64)[:, None] * width + head[:, None] * DIM + d[None, :]
    queries = tl.load(q_at, mask=is_pair[:, None] & is_dim[None, :], other=0.0)
    for split in range(tl.program_id(2), num_here, tl.num_programs(2)):
        peak = tl.full([PAIRS], -float("inf"), dtype=tl.float32)
        weight = tl.zeros([PAIRS], dtype=tl.float32)
        total = tl.zeros([PAIRS, DIM_BLOCK], dtype=tl.float32)
        end = tl.minimum((split + 1) * size, length)
        for start in range(split * size, end, KEYS):
            key = start + tl.arange(0, KEYS)
            exists = key < end
            index = key
            if TREE == "paths":
                own = tl.load(table + path_at + key - root, mask=exists & (key >= root), other=0)
                index = tl.where(key < root, key, own)
            page = tl.load(table + table_at + index // page_size, mask=exists, other=0)
            place = page.to(tl.int64) * page_size + index % page_size
            at = held + place[:, None] * held_width + kv_head * DIM + d[None, :]
            here = exists[:, None] & is_dim[None, :]
            keys = tl.load(at, mask=here, other=0.0)
            values = tl.load(at + KV_HEADS * DIM, mask=here, other=0.0)
            logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
            seen = (key[None, :] <= last[:, None]) & exists[None, :]
            if TREE == "masks":
                node = key - root
                bits = tl.where((node < 32)[None, :], low[:, None], high[:, None])
                seen = seen & ((node < 0)[None, :] | (((bits >> (node & 31)[None, :]) & 1) != 0))
            if WINDOWED:
                seen = seen & (key[None, :] > last[:, None] - window)
            if SKIP:
                seen = seen & (key >= SKIP)[None, :]
            logits = tl.where(seen, logits, -float("inf"))
            higher = tl.maximum(peak, tl.max(logits, axis=1))
            base = tl.where(higher == -float("inf"), 0.0, higher)  # nothing seen so far: everything stays 0
            odds = tl.exp2(logits - base[:, None])
            fade = tl.exp2(peak - base)
            weight = weight * fade + tl.sum(odds, axis=1)
            total = total * fade[:, None]
            total = tl.dot(odds.to(values.dtype), values, total, input_precision="ieee")
            peak = higher
        slot = (seat.to(tl.int64) * HEADS + head) * num_splits + split
        tl.store(peaks + slot, peak, mask=is_pair)
        tl.store(weights + slot, weight, mask=is_pair)
        tl.store(sums + slot[:, None] * DIM + d[None, :], total, mask=is_pair[:, None] & is_dim[None, :])


@triton.jit
def _combine(
    sums,
    peaks,
    weights,
    out,
    groups,
    firsts,
    lengths,
    splits,
    seats,
    num_splits,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The splits of one head of one row as one softmax."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = tl.load(groups + row)
    if group < 0:
        if OVERLAP:
            gdc_wait()
        return
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, DIM_BLOCK)
    exists = split < tl.cdiv(tl.load(lengths + group), tl.load(splits + group))
    seat = tl.load(seats + group) + row - tl.load(firsts + group)
    slot = (seat * HEADS + head) * num_splits + split
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    peak = tl.load(peaks + slot, mask=exists, other=-float("inf"))
    share = tl.exp2(peak - tl.max(peak, axis=0))
    weight = tl.sum(tl.load(weights + slot, mask=exists, other=0.0) * share, axis=0)
    inside = exists[:, None] & (d < DIM)[None, :]
    parts = tl.load(sums + slot[:, None] * DIM + d[None, :], mask=inside, other=0.0)
    mixed = tl.sum(parts * share[:, None], axis=0) / weight
    tl.store(out + (row * HEADS + head) * DIM + d, mixed.to(out.dtype.element_ty), mask=d < DIM)


# compiled once for all batches, not for each kind of number and each alignment
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["fed", "by"])
def _advance(
    fed,
    by,
    tokens,
    positions,
    places,
    lasts,
    groups,
    firsts,
    lengths,
    splits,
    tables,
    table,
    num_rows,
    page_size,
    max_splits,
    PER: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of chains stand elsewhere in their sequences and are fed other tokens; what follows from that, too."""
    row = tl.arange(0, BLOCK)
    inside = row < num_rows
    group = tl.load(groups + row, mask=inside, other=0)
    moved = tl.load(by + row // PER, mask=inside, other=0)
    position = tl.load(positions + row, mask=inside, other=0) + moved
    page = tl.load(table + tl.load(tables + group, mask=inside, other=0) + position // page_size, mask=inside, other=0)
    tl.store(tokens + row, tl.load(fed + row, mask=inside, other=0), mask=inside)
    tl.store(positions + row, position, mask=inside)
    tl.store(lasts + row, position, mask=inside)
    tl.store(places + row, page * page_size + position % page_size, mask=inside)
    is_first = inside & (tl.load(firsts + group, mask=inside, other=-1) == row)
    length = tl.load(lengths + group, mask=is_first, other=0) + moved
    tl.store(lengths + group, length, mask=is_first)
    tl.store(splits + group, tl.maximum(tl.cdiv(length, max_splits * STEP), 1) * STEP, mask=is_first)


def turn_and_store(
    qkv: torch.Tensor,
    held: torch.Tensor,
    turns: torch.Tensor,
    places: torch.Tensor,
    heads: tuple[int, int, int],
    *,
    head_norm: torch.Tensor | None,
    floor: float,
) -> None:
    """Queries and keys turn by their positions, in place; keys and values go to `places` of the cache.

    qkv [rows, queries | keys | values], held [places, keys | values], turns [rows, pairs, 2], heads: query heads, key
    heads, and their size.
    """
    num_heads, kv_heads, dim = heads
    norm = turns if head_norm is None else head_norm
    launch(
        _turn,
        (len(qkv), num_heads + 2 * kv_heads),
        *(qkv, held, turns, norm, places, qkv.shape[1], held.shape[1], floor),
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        PAIRS=dim // 2,
        PAIR_BLOCK=triton.next_power_of_2(dim // 2),
        TURNING=turns.shape[1],
        NORM=head_norm is not None,
        num_warps=1,
    )


def attend(
    qkv: torch.Tensor,
    held: torch.Tensor,
    out: torch.Tensor,
    layout: Layout,
    heads: tuple[int, int, int],
    *,
    page_size: int,
    window: int | None,
    scratch: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    skip: int = 0,
) -> None:
    """What each row that is in a group sees. out [rows, heads * size]; scratch: room for sums, peaks and weights; skip:
    keys at the beginning that nobody sees."""
    num_heads, kv_heads, dim = heads
    shape, block = layout.shape, max(16, triton.next_power_of_2(dim))
    pairs = max(LEAST_PAIRS, triton.next_power_of_2(shape.tile * (num_heads // kv_heads)))
    keys, warps, stages = LOOKING[16 if pairs == 16 else 64]
    keys, stages = fitted(
        held.device, pairs * block * held.element_size(), 2 * block * held.element_size(), keys, stages
    )
    shared = programs(shape.groups, kv_heads)
    groups = [layout[name] for name in ("firsts", "counts", "lengths", "splits", "tables", "roots", "paths", "seats")]
    rows = [layout[name] for name in ("lasts", "low_bits", "high_bits")]
    launch(
        _attend,
        (shape.groups, kv_heads, shared),
        *(qkv, held, *scratch, *groups, *rows, layout.table),
        *(page_size, qkv.shape[1], held.shape[1], layout.num_splits, window or 0, dim**-0.5 * LOG2_E),
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        DIM_BLOCK=block,
        PAIRS=pairs,
        KEYS=keys,
        TREE=shape.tree,
        WINDOWED=window is not None,
        SKIP=skip,
        num_warps=warps,
        num_stages=stages,
    )
    groups = [layout[name] for name in ("groups", "firsts", "lengths", "splits", "seats")]
    launch(
        _combine,
        (shape.rows, num_heads),
        *(*scratch, out, *groups, layout.num_splits),
        HEADS=num_heads,
        DIM=dim,
        DIM_BLOCK=block,
        SPLITS=triton.next_power_of_2(layout.num_splits),
        num_warps=4,
    )


def advance(layout: Layout, fed: torch.Tensor, by: torch.Tensor, *, page_size: int, max_splits: int) -> None:
    """The rows of a pass move on by so many tokens and are fed these. fed [rows], by [sequences]: each has as many rows
    as the others, which are a chain."""
    fed, by = fed.contiguous(), by.contiguous()
    names = ("tokens", "positions", "places", "lasts", "groups", "firsts", "lengths", "splits", "tables")
    launch(
        _advance,
        (1,),
        *(fed, by, *(layout[name] for name in names), layout.table, len(fed), page_size, max_splits),
        PER=len(fed) // len(by),
        STEP=SPLIT_STEP,
        BLOCK=next(size for size in WORK_ROWS if size >= len(fed)),
        overlap=None,
    )


def programs(groups: int, kv_heads: int) -> int:
    """Programs that share the splits of a group: few groups leave room for many."""
    return 1 if INTERPRETED else max(1, most_splits(kv_heads) // groups)  # interpreted, they would only take turns
