"""The EAGLE-3 head as it is trained: `backends.eagle_head` computes the same without gradients, one entry at a time.

    tokens    t0  t1  t2  t3 ...
    entry i   (h_i, t_i+1), its output guesses t_i+2; the next step is (that output, t_i+2) and guesses t_i+3, and so on

In training all entries go at once, and each of them guesses on for some steps from its own outputs, as it will have to
when it drafts. Step s of entry i sees the true entries up to i, and its own steps up to s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.models.base import TransformerSpec

# ours -> the names of the `speculators` layout
NAMES = {
    "fc": "fc.weight",
    "embedding_norm": "layers.0.input_layernorm.weight",
    "hidden_norm": "layers.0.hidden_norm.weight",
    "query": "layers.0.self_attn.q_proj.weight",
    "key": "layers.0.self_attn.k_proj.weight",
    "value": "layers.0.self_attn.v_proj.weight",
    "attention_out": "layers.0.self_attn.o_proj.weight",
    "ffn_norm": "layers.0.post_attention_layernorm.weight",
    "gate": "layers.0.mlp.gate_proj.weight",
    "up": "layers.0.mlp.up_proj.weight",
    "down": "layers.0.mlp.down_proj.weight",
    "output_norm": "norm.weight",
}


class Past(NamedTuple):
    """Keys and values of the true entries, and of each step after them. [B, kv heads, T, size]"""

    keys: list[Tensor]
    values: list[Tensor]


class EagleNet(nn.Module):
    """A layer like the target's own, over `num_features` hidden states."""

    fc: nn.Parameter
    query: nn.Parameter
    key: nn.Parameter
    value: nn.Parameter
    attention_out: nn.Parameter
    gate: nn.Parameter
    up: nn.Parameter
    down: nn.Parameter
    embedding_norm: nn.Parameter
    hidden_norm: nn.Parameter
    ffn_norm: nn.Parameter
    output_norm: nn.Parameter
    frequencies: Tensor

    def __init__(self, spec: TransformerSpec, num_features: int) -> None:
        super().__init__()
        self.spec = spec
        width, size = spec.width, spec.head_dim
        shapes = {
            "fc": (width, num_features * width),
            "query": (spec.num_heads * size, 2 * width),
            "key": (spec.num_kv_heads * size, 2 * width),
            "value": (spec.num_kv_heads * size, 2 * width),
            "attention_out": (width, spec.num_heads * size),
            "gate": (spec.ffn_width, width),
            "up": (spec.ffn_width, width),
            "down": (width, spec.ffn_width),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / math.sqrt(shape[1])))
        for name in ("embedding_norm", "hidden_norm", "ffn_norm", "output_norm"):
            self.register_parameter(name, nn.Parameter(torch.ones(width)))
        self.register_buffer("frequencies", torch.tensor(spec.rope.frequencies), persistent=False)

    def fuse(self, features: Tensor) -> Tensor:
        """[..., num_features * width] -> [..., width]"""
        return functional.linear(features, self.fc)

    def forward(self, embedding: Tensor, hidden: Tensor, step: int, past: Past) -> Tensor:
        """Outputs of one step of all entries. [B, T, width]"""
        normed = self._norm(hidden, self.hidden_norm)
        seen = torch.cat([self._norm(embedding, self.embedding_norm), normed], dim=-1)
        x = hidden + functional.linear(self._attend(seen, step, past), self.attention_out)
        inner = self._norm(x, self.ffn_norm)
        gated = functional.silu(functional.linear(inner, self.gate)) * functional.linear(inner, self.up)
        return x + functional.linear(gated, self.down)

    def normed(self, outputs: Tensor) -> Tensor:
        """What an output matrix makes logits of."""
        return self._norm(outputs, self.output_norm)

    def _attend(self, seen: Tensor, step: int, past: Past) -> Tensor:
        spec, length = self.spec, seen.shape[1]
        positions = torch.arange(length, device=seen.device) + step
        query = self._turn(self._heads(seen, self.query, spec.num_heads), positions)
        past.keys.append(self._turn(self._heads(seen, self.key, spec.num_kv_heads), positions))
        past.values.append(self._heads(seen, self.value, spec.num_kv_heads))
        share = spec.num_heads // spec.num_kv_heads
        keys, values = (torch.cat(parts, dim=2).repeat_interleave(share, dim=1) for parts in past[:2])
        mixed = functional.scaled_dot_product_attention(query, keys, values, attn_mask=_mask(length, step, seen.device))
        return mixed.transpose(1, 2).flatten(2)

    def _heads(self, seen: Tensor, matrix: Tensor, count: int) -> Tensor:
        rows = functional.linear(seen, matrix)
        return rows.view(*rows.shape[:2], count, self.spec.head_dim).transpose(1, 2)

    def _turn(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Rotary positions, of halves: dimension i turns with i + d / 2, as in files of Hugging Face."""
        angles = positions[:, None] * self.frequencies
        scale = self.spec.rope.scale
        cos, sin = (angles.cos() * scale).to(heads.dtype), (angles.sin() * scale).to(heads.dtype)
        half = len(self.frequencies)
        first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):  # its kernel is exact enough in halves
            return functional.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), self.spec.norm_eps)


@lru_cache(maxsize=64)
def _mask(length: int, step: int, device: torch.device) -> Tensor:
    """Which keys an entry sees in its step: the true ones up to itself, and of every step after them its own."""
    own = torch.eye(length, dtype=torch.bool, device=device)
    true = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return torch.cat([true] + [own] * step, dim=1)


def exported(net: EagleNet, ids: Sequence[int] | None) -> dict[str, Tensor]:
    """Tensors by the names of the `speculators` layout. ids: of the tokens it chooses among, where not all."""
    state: Mapping[str, Any] = net.state_dict()
    tensors = {theirs: state[ours].detach().cpu().contiguous() for ours, theirs in NAMES.items()}
    if ids is not None:
        chosen = torch.tensor(list(ids), dtype=torch.int64)
        tensors["d2t"] = chosen - torch.arange(len(chosen))
    return tensors
