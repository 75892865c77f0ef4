"""The layers of a transformer: the forward pass on one screen.

Plain torch, few operations, every buffer and view made beforehand. It is written so that TorchScript can run it, too:
on a CPU, between matrix products that sweep the caches, a call from Python costs 5 to 15 us, and 17 calls in each of 30
layers are a tenth of a token. Where there is no TorchScript, the same function runs as it stands.
"""
# No `from __future__ import annotations`: TorchScript reads the annotations of this file.

import logging
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional

log = logging.getLogger("outrider")


class Layer(NamedTuple):
    """Matrices are turned over: a row times one gives its output. [inputs, outputs]

    The weight of an RMS norm is multiplied into the matrix that follows it.
    """

    qkv: torch.Tensor  # [width, queries + keys + values]
    qkv_bias: torch.Tensor | None
    head_norm: torch.Tensor | None  # of queries and keys, [heads + kv heads, head_dim]
    attention_out: torch.Tensor
    gate_up: torch.Tensor  # [width, 2 * ffn_width]
    down: torch.Tensor


class Rows(NamedTuple):
    """Buffers for the tokens of a pass, and the views of them that a layer needs."""

    x: torch.Tensor  # [N, width] the residual stream
    length: torch.Tensor  # [N, 1] of each row of x
    normed: torch.Tensor  # [N, width]
    qkv: torch.Tensor  # [N, queries | keys | values]
    heads: torch.Tensor  # [N, heads + kv heads, head_dim]: queries and keys
    pairs: torch.Tensor  # what turns together: complex [N, pairs] in fp32, else [N, pairs, 2]
    turns: torch.Tensor  # [N, pairs] complex: how each pair turns
    fresh: torch.Tensor  # [N, keys | values] of the tokens that are fed
    gate_up: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor


class Block(NamedTuple):
    """Some queries of a pass, and what they see."""

    queries: torch.Tensor  # [batch, heads, queries, head_dim]
    keys: list[torch.Tensor]  # [1, kv heads, keys, head_dim] of each layer, where they lie side by side; or empty
    values: list[torch.Tensor]
    places: torch.Tensor | None  # else: where they lie, [batch * keys]
    mask: torch.Tensor | None  # [batch, 1, queries, keys], -inf where there is nothing to see


class Constants(NamedTuple):
    """What is the same in every pass of a model."""

    floor: torch.Tensor  # eps of the norms, as a length
    head_floor: float  # eps of the heads' norms, as the square of a length
    kv_heads: int


class Work(NamedTuple):
    """One pass."""

    rows: Rows
    places: torch.Tensor  # [N] where keys and values go
    blocks: list[list[Block]]  # for each kind of window
    kinds: list[int]  # the kind of each layer


def run_layers(layers: list[Layer], first: int, held: list[torch.Tensor], work: Work, constants: Constants) -> None:
    """`work.rows.x` goes through these layers. held: their keys and values, [places, keys | values] each."""
    rows, floor = work.rows, constants.floor
    for index, layer in enumerate(layers):
        number = first + index
        # x / |x|: torch's RMS norm is eight kernels on a CPU, this is three; weights are in the matrices.
        torch.linalg.vector_norm(rows.x, 2, [-1], True, dtype=torch.float32, out=rows.length)
        torch.div(rows.x, rows.length.hypot_(floor), out=rows.normed)
        bias, head_norm = layer.qkv_bias, layer.head_norm
        if bias is None:
            torch.mm(rows.normed, layer.qkv, out=rows.qkv)
        else:
            torch.addmm(bias, rows.normed, layer.qkv, out=rows.qkv)
        if head_norm is not None:
            length = torch.linalg.vector_norm(rows.heads, 2, [-1], True, dtype=torch.float32)
            rows.heads.copy_(rows.heads / length.square_().add_(constants.head_floor).sqrt_() * head_norm)
        if rows.pairs.is_complex():
            rows.pairs.mul_(rows.turns)
        else:
            turned = torch.view_as_complex(rows.pairs.float()).mul_(rows.turns)
            rows.pairs.copy_(torch.view_as_real(turned))
        held[number].index_copy_(0, work.places, rows.fresh)
        seen = attend(work.blocks[work.kinds[number]], number, held[number], constants.kv_heads)
        rows.x.addmm_(seen, layer.attention_out)
        torch.linalg.vector_norm(rows.x, 2, [-1], True, dtype=torch.float32, out=rows.length)
        torch.div(rows.x, rows.length.hypot_(floor), out=rows.normed)
        torch.mm(rows.normed, layer.gate_up, out=rows.gate_up)
        rows.x.addmm_(functional.silu(rows.gate, inplace=True).mul_(rows.up), layer.down)


def attend(blocks: list[Block], number: int, held: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """What every token of the pass sees in one layer. [N, heads * head_dim]"""
    parts: list[torch.Tensor] = []
    for block in blocks:
        places, queries = block.places, block.queries
        if places is None:
            keys, values = block.keys[number], block.values[number]
        else:
            gathered = held.index_select(0, places).view(queries.size(0), -1, 2, kv_heads, queries.size(3))
            keys, values = gathered.select(2, 0).transpose(1, 2), gathered.select(2, 1).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(
            queries, keys, values, block.mask, 0.0, False, scale=None, enable_gqa=queries.size(1) != kv_heads
        )
        if mixed.size(2) != 1:
            mixed = mixed.transpose(1, 2)
        parts.append(mixed.reshape(queries.size(0) * queries.size(2), -1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


RunLayers = Callable[[list[Layer], int, list[torch.Tensor], Work, Constants], None]


def compiled() -> RunLayers:
    """`run_layers`, in TorchScript if this torch has it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch points to a compiler that needs a C++ toolchain
        try:
            scripted: RunLayers = torch.jit.script(run_layers)
        except Exception as error:
            log.info("TorchScript is not available (%s); layers run from Python", error)
            return run_layers
    return scripted
