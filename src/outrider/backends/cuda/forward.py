"""The layers of a pass on a GPU, on one screen. `kernels` is the module of that name, or `twins`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from outrider.backends.cuda.layout import Layout
from outrider.backends.forward import Layer
from outrider.models.base import TransformerSpec


class Buffers(NamedTuple):
    """What a pass of so many rows works in."""

    x: torch.Tensor  # [rows, width] the residual stream
    qkv: torch.Tensor  # [rows, queries | keys | values]
    seen: torch.Tensor  # [rows, queries]
    gated: torch.Tensor  # [rows, ffn width]
    normed: torch.Tensor  # [rows, width]
    scratch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # of attention: sums, peaks, weights of each split


class Long(NamedTuple):
    """A long stretch of one sequence in a pass: its attention is torch's."""

    first: int  # row
    size: int  # tokens of it in this pass
    places: torch.Tensor | None  # of all its tokens, None where all of them are in this pass


class Constants(NamedTuple):
    heads: tuple[int, int, int]  # of queries, of keys, their size
    floor: float  # eps of the norms, times the width
    head_floor: float
    page_size: int
    windows: Sequence[int | None]  # of each layer
    tile: int | None  # rows of every product, where it must always be the same (strict)


def build_buffers(rows: int, num_splits: int, spec: TransformerSpec, like: torch.Tensor) -> Buffers:
    """num_splits: of all rows together."""
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    slots = num_splits * spec.num_heads
    return Buffers(
        x=like.new_empty(rows, spec.width),
        qkv=like.new_empty(rows, queries + 2 * keys),
        seen=like.new_zeros(rows, queries),
        gated=like.new_empty(rows, spec.ffn_width),
        normed=like.new_empty(rows, spec.width),
        scratch=(
            torch.empty(slots * spec.head_dim, device=like.device),
            torch.empty(slots, device=like.device),
            torch.empty(slots, device=like.device),
        ),
    )


def run_layers(
    kernels: Any,
    layers: Sequence[Layer],
    first: int,
    held: Sequence[torch.Tensor],
    buffers: Buffers,
    layout: Layout | None,
    turns: torch.Tensor,
    places: torch.Tensor,
    long: Sequence[Long],
    constants: Constants,
) -> None:
    """`buffers.x` goes through these layers. held: keys and values of all layers, [places, keys | values] each."""
    x, qkv, seen, gated, tile = buffers.x, buffers.qkv, buffers.seen, buffers.gated, constants.tile
    for number, layer in enumerate(layers, first):
        window, cache = constants.windows[number], held[number]
        kernels.product(x, layer.qkv.t(), qkv, norm=constants.floor, bias=layer.qkv_bias, tile=tile)
        kernels.turn_and_store(
            qkv, cache, turns, places, constants.heads, head_norm=layer.head_norm, floor=constants.head_floor
        )
        if layout is not None:
            kernels.attend(
                qkv, cache, seen, layout, constants.heads,
                page_size=constants.page_size, window=window, scratch=buffers.scratch,
            )  # fmt: skip
        for stretch in long:
            attend_long(qkv, cache, seen, stretch, constants.heads, window)
        kernels.product(seen, layer.attention_out.t(), x, added=x, tile=tile)
        kernels.gated_product(x, layer.gate_up.t(), gated, norm=constants.floor, tile=tile)
        kernels.product(gated, layer.down.t(), x, added=x, tile=tile)


def attend_long(
    qkv: torch.Tensor,
    held: torch.Tensor,
    out: torch.Tensor,
    long: Long,
    heads: tuple[int, int, int],
    window: int | None,
) -> None:
    """A chain of many tokens, through the fastest attention torch has for it."""
    num_heads, kv_heads, dim = heads
    rows = slice(long.first, long.first + long.size)
    queries = qkv[rows, : num_heads * dim].view(1, long.size, num_heads, dim).transpose(1, 2)
    known = qkv[rows, num_heads * dim :] if long.places is None else held.index_select(0, long.places)
    keys, values = known.view(1, -1, 2, kv_heads, dim).transpose(1, 3).unbind(2)
    mask = None
    if window is not None and window < keys.shape[2]:
        mask = _window(long.size, keys.shape[2], window, qkv.device)
    elif long.places is not None:
        mask = _lower_right(long.size, keys.shape[2], qkv.device)
    mixed = functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=num_heads != kv_heads
    )
    out[rows] = mixed.transpose(1, 2).reshape(long.size, -1)


def _lower_right(count: int, length: int, device: torch.device) -> torch.Tensor:
    """Query i of the last `count` tokens sees everything up to itself."""
    from torch.nn.attention.bias import causal_lower_right

    if device.type == "cuda":
        return causal_lower_right(count, length)
    return torch.ones(count, length, dtype=torch.bool, device=device).tril(length - count)


def _window(count: int, length: int, window: int, device: torch.device) -> torch.Tensor:
    whole = torch.ones(count, length, dtype=torch.bool, device=device)
    return whole.tril(length - count).triu(length - count - window + 1)
