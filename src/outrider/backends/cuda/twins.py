"""The kernels in plain torch: what `kernels.py` must compute, row by row and key by key. For tests, and to read."""

from __future__ import annotations

import torch
from torch.nn import functional

from outrider.backends.cuda.layout import SPLIT_STEP, Layout


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
    wide = x.float() @ w.float().t()
    if norm is not None:
        wide /= _length(x, norm)
    for more in (bias, added):
        if more is not None:
            wide += more.float()
    out.copy_(wide)


def gated_product(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, *, norm: float, tile: int | None = None) -> None:
    gate, up = (x.float() @ w.float().t() / _length(x, norm)).chunk(2, dim=-1)
    out.copy_(functional.silu(gate) * up)


def normed(x: torch.Tensor, out: torch.Tensor, *, norm: float, weight: torch.Tensor | None = None) -> None:
    short = x.float() / _length(x, norm)
    out.copy_(short if weight is None else short * weight)


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
    num_heads, kv_heads, dim = heads
    turning = qkv[:, : (num_heads + kv_heads) * dim].view(len(qkv), -1, dim)
    wide = turning.float()
    if head_norm is not None:
        wide = wide / _length(wide, floor) * head_norm
    pairs = torch.view_as_complex(wide.reshape(*wide.shape[:2], -1, 2).contiguous())
    pairs[:, :, : turns.shape[1]] *= torch.view_as_complex(turns)[:, None]
    turning.copy_(torch.view_as_real(pairs).flatten(2))
    held.index_copy_(0, places.long(), qkv[:, num_heads * dim :])


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
    num_heads, kv_heads, dim = heads
    table = layout.table.tolist()
    for row, group in enumerate(layout["groups"].tolist()):
        if group < 0:
            continue
        seen = [_index(layout, table, row, group, key) for key in range(int(layout["lasts"][row]) + 1)]
        low = skip if window is None else max(skip, len(seen) - window)
        start = int(layout["tables"][group])
        places = [table[start + at // page_size] * page_size + at % page_size for at in seen[low:] if at is not None]
        keys, values = held[places].float().view(len(places), 2, kv_heads, dim).unbind(1)
        query = qkv[row, : num_heads * dim].float().view(1, num_heads, 1, dim)
        mixed = functional.scaled_dot_product_attention(
            query, keys.transpose(0, 1)[None], values.transpose(0, 1)[None], enable_gqa=True
        )
        out[row] = mixed.flatten().to(out.dtype)


def advance(layout: Layout, fed: torch.Tensor, by: torch.Tensor, *, page_size: int, max_splits: int) -> None:
    count = len(fed)
    moved = by.repeat_interleave(count // len(by))
    group, position = layout["groups"][:count].long(), layout["positions"][:count] + moved
    page = layout.table[layout["tables"][group].long() + position // page_size]
    layout["tokens"][:count] = fed
    layout["positions"][:count] = layout["lasts"][:count] = position
    layout["places"][:count] = page * page_size + position % page_size
    is_first = layout["firsts"][group] == torch.arange(count, device=fed.device)
    first = group[is_first]
    lengths = layout["lengths"][first] + moved[is_first]
    layout["lengths"][first] = lengths
    layout["splits"][first] = (-(-lengths // (max_splits * SPLIT_STEP))).clamp(min=1) * SPLIT_STEP


def _index(layout: Layout, table: list[int], row: int, group: int, key: int) -> int | None:
    """Where key number `key` of a row lies in its sequence; None when the row does not see it."""
    node = key - int(layout["roots"][group])
    if node < 0 or not layout.shape.tree:
        return key
    if layout.shape.tree == "paths":
        return table[int(layout["paths"][group]) + node]
    bits = layout["low_bits" if node < 32 else "high_bits"][row]
    return key if int(bits) >> (node % 32) & 1 else None


def _length(x: torch.Tensor, floor: float) -> torch.Tensor:
    return (x.float().square().sum(-1, keepdim=True) + floor).sqrt()
