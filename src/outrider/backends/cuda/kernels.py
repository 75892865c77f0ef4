"""Triton kernels of the pass. Each has a twin in plain torch (`twins.py`) with the same name and arguments.

Products of a few rows are bound by reading weights, so a program takes some outputs of ALL rows and reads its weights
once. What surrounds a product is done on the way: the norm before it (a factor per row, since the norm's weight is in
the matrix), bias, residual, SiLU gate. For more rows cuBLAS is as fast as anybody.

Attention of a few rows is bound by reading the cache and by having too little to do side by side: the keys of a
sequence are cut into splits that programs work on at once, and `_combine` joins them.

A kernel may be launched while the one before it still runs and wait for it inside (`gdc_wait`): that hides the launch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.compiler.compiler import max_shared_mem
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.backends.cuda.layout import SPLIT_STEP, Layout, most_splits

FEW = 32  # rows our own products are for; measured on an H200 against cuBLAS, as is the table
SIZES = (16, 32)
TILES = {  # outputs and inputs of a step, warps, stages
    "plain": {16: (16, 512, 2, 4), 32: (64, 256, 4, 4)},
    "norm": {16: (64, 256, 4, 4), 32: (64, 256, 4, 4)},
    "gated": {16: (64, 128, 4, 3), 32: (64, 128, 4, 3)},
}
LEAST_PAIRS = 16  # (row, head) pairs of a group: the tensor cores take no fewer
LOOKING = {16: (128, 4, 2), 64: (64, 4, 2)}  # by pairs: keys of a step, warps, stages
LOG2_E = 1.4426950408889634
INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def _product(
    x,
    w,
    out,
    added,
    bias,
    num_rows,
    num_outputs,
    num_inputs,
    floor,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out[r, n] = sum over k of x[r, k] w[n, k]. GATED: silu of that, times the same with the second half of w."""
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    r = tl.arange(0, ROWS)
    k = tl.arange(0, INPUTS)
    is_row = r < num_rows
    inside = tl.minimum(n, num_outputs - 1)
    w_at = w + inside[:, None].to(tl.int64) * num_inputs + k[None, :]
    up_at = w_at + num_outputs.to(tl.int64) * num_inputs
    x_at = x + r[None, :] * num_inputs + k[:, None]
    total = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    ups = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    squares = tl.zeros([INPUTS, ROWS], dtype=tl.float32)
    if OVERLAP:
        gdc_wait()
    for _ in range(0, num_inputs, INPUTS):
        weights = tl.load(w_at, eviction_policy="evict_first")
        fed = tl.load(x_at, mask=is_row[None, :], other=0.0)
        total = tl.dot(weights, fed, total, input_precision="ieee")
        if GATED:
            ups = tl.dot(tl.load(up_at, eviction_policy="evict_first"), fed, ups, input_precision="ieee")
            up_at += INPUTS
        if NORM:
            squares += fed.to(tl.float32) * fed.to(tl.float32)
        w_at += INPUTS
        x_at += INPUTS
    if OVERLAP:
        gdc_launch_dependents()
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(squares, axis=0) + floor)
        total *= scale[None, :]
        ups *= scale[None, :]
    if BIAS:
        total += tl.load(bias + inside).to(tl.float32)[:, None]
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * ups
    at = r[None, :] * num_outputs + n[:, None]
    kept = is_row[None, :] & (n < num_outputs)[:, None]
    if ADD:
        total += tl.load(added + at, mask=kept, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=kept)


@triton.jit
def _norm(x, out, weight, width, floor, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """out = x / |x|, times a weight. One row."""
    at = tl.program_id(0).to(tl.int64) * width + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < width
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    row *= 1.0 / tl.sqrt(tl.sum(row * row, axis=0) + floor)
    if WEIGHTED:
        row *= tl.load(weight + tl.arange(0, BLOCK), mask=inside, other=0.0)
    tl.store(out + at, row.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate(gate_up, out, width, BLOCK: tl.constexpr):
    """out = silu(gate) * up. One row and a block of it."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


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
    PROGRAMS: tl.constexpr,
    TREE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SKIP: tl.constexpr,  # keys at the beginning that nobody sees
    OVERLAP: tl.constexpr,
):
    """Some rows of one sequence, the query heads of one key head, every PROGRAMS-th split: a softmax over each."""
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
    for split in range(tl.program_id(2), num_here, PROGRAMS):
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


@triton.jit
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


def product(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    *,
    norm: float | None = None,
    bias: torch.Tensor | None = None,
    added: torch.Tensor | None = None,
    tile: int | None = None,
) -> None:
    """out = x w^T, perhaps of x / |x|, with a bias or a residual. x [rows, inputs], w [outputs, inputs].

    norm: eps times the inputs. tile: rows of the kernel, where it must be the same for any number of them.
    """
    if _is_cublas(x):
        _product_of_many(x, w, out, norm, bias, added)
    else:
        _product_of_few("plain" if norm is None else "norm", x, w, out, len(w), norm, bias, added, tile)


def gated_product(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, *, norm: float, tile: int | None = None) -> None:
    """out = silu(x g^T) * (x u^T) of x / |x|; w holds g and then u. [2 * outputs, inputs]"""
    rows, outputs = len(x), len(w) // 2
    if not _is_cublas(x):
        _product_of_few("gated", x, w, out, outputs, norm, None, None, tile)
        return
    gate_up = x.new_empty(rows, 2 * outputs)
    _product_of_many(x, w, gate_up, norm, None, None)
    _launch(_gate, (rows, triton.cdiv(outputs, 1024)), gate_up, out, outputs, BLOCK=1024, overlap=None)


def _is_cublas(x: torch.Tensor) -> bool:
    """Whether this is not for our kernels: many rows, or inputs that the tensor cores' steps do not divide."""
    return len(x) > FEW or x.shape[1] % 16 != 0


def _product_of_few(
    kind: str,
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    outputs: int,
    norm: float | None,
    bias: torch.Tensor | None,
    added: torch.Tensor | None,
    tile: int | None,
) -> None:
    rows, inputs = x.shape
    padded = tile or next(size for size in SIZES if size >= rows)
    assert rows <= padded, f"{rows} rows in a tile of {padded}"
    per, wide, warps, stages = TILES[kind][padded]
    bytes_per_input = (per * (2 if kind == "gated" else 1) + padded) * w.element_size()
    wide, stages = _fitted(x.device, 0, bytes_per_input, wide, stages)
    _launch(
        _product,
        (triton.cdiv(outputs, per),),
        *(x, w, out, x if added is None else added, x if bias is None else bias, rows, outputs, inputs, norm or 0.0),
        NORM=norm is not None,
        GATED=kind == "gated",
        ADD=added is not None,
        BIAS=bias is not None,
        ROWS=padded,
        OUTPUTS=per,
        INPUTS=min(wide, inputs & -inputs),  # a power of two that divides the inputs
        num_warps=warps,
        num_stages=stages,
    )


def normed(x: torch.Tensor, out: torch.Tensor, *, norm: float, weight: torch.Tensor | None = None) -> None:
    """out = x / |x|, times a weight."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    _launch(
        _norm, (rows,), x, out, x if weight is None else weight, width, norm,
        WEIGHTED=weight is not None, BLOCK=block, num_warps=4 if block <= 4096 else 8,
    )  # fmt: skip


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
    _launch(
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
    keys, stages = _fitted(
        held.device, pairs * block * held.element_size(), 2 * block * held.element_size(), keys, stages
    )
    shared = programs(shape.groups, kv_heads)
    groups = [layout[name] for name in ("firsts", "counts", "lengths", "splits", "tables", "roots", "paths", "seats")]
    rows = [layout[name] for name in ("lasts", "low_bits", "high_bits")]
    _launch(
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
        PROGRAMS=shared,
        TREE=shape.tree,
        WINDOWED=window is not None,
        SKIP=skip,
        num_warps=warps,
        num_stages=stages,
    )
    groups = [layout[name] for name in ("groups", "firsts", "lengths", "splits", "seats")]
    _launch(
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
    _launch(
        _advance,
        (1,),
        *(fed, by, *(layout[name] for name in names), layout.table, len(fed), page_size, max_splits),
        PER=len(fed) // len(by),
        STEP=SPLIT_STEP,
        BLOCK=triton.next_power_of_2(len(fed)),
        overlap=None,
    )


def programs(groups: int, kv_heads: int) -> int:
    """Programs that share the splits of a group: few groups leave room for many."""
    return 1 if INTERPRETED else max(1, most_splits(kv_heads) // groups)  # interpreted, they would only take turns


def _product_of_many(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    norm: float | None,
    bias: torch.Tensor | None,
    added: torch.Tensor | None,
) -> None:
    if norm is not None:
        short = torch.empty_like(x)
        normed(x, short, norm=norm)
        x = short
    if out.dtype != x.dtype:
        out.copy_(torch.mm(x, w.t(), out_dtype=out.dtype) if x.is_cuda else x.to(out.dtype) @ w.t().to(out.dtype))
    elif bias is not None:
        torch.addmm(bias, x, w.t(), out=out)
    elif added is not None:
        torch.addmm(added, x, w.t(), out=out)
    else:
        torch.mm(x, w.t(), out=out)


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, overlap: bool | None = True, **options: Any) -> None:
    """overlap: whether it may start before the kernel ahead of it is done; None: it knows nothing of that."""
    if INTERPRETED:
        for name in ("num_warps", "num_stages"):
            options.pop(name, None)
    if overlap is not None:
        options["OVERLAP"] = overlap = overlap and not INTERPRETED and _can_overlap(args[0].device)
    if overlap:
        options["launch_pdl"] = True
    kernel[grid](*args, **options)


@cache
def _can_overlap(device: torch.device) -> bool:
    """Kernels that wait for the one before them came with Hopper."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def _fitted(device: torch.device, fixed: int, per_input: int, wide: int, stages: int) -> tuple[int, int]:
    if device.type != "cuda":
        return wide, stages
    return fitting(max_shared_mem(device.index or 0), fixed, per_input, wide, stages)


def fitting(room: int, fixed: int, per_input: int, wide: int, stages: int) -> tuple[int, int]:
    """Inputs of a step and stages, as far as a program's shared memory goes. The tables are for 227 KB and two bytes.

    fixed: bytes a program needs anyway. per_input: bytes of one input in a stage.
    """
    while fixed + per_input * wide * stages > room and wide > 16:
        if stages > 2:
            stages -= 1
        else:
            wide //= 2
    return wide, stages
