"""A transformer's weights as the forward pass wants them: projections of one input in one matrix, pairs side by side.

Tensors are read, turned and copied one at a time, so loading needs little more memory than the weights themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from outrider.backends.torch_common import tensor_of
from outrider.models.base import ModelFile, TransformerSpec
from outrider.models.cache import progress


class Norm(NamedTuple):
    """An RMS norm: x / hypot(|x|, floor) * weight is x / sqrt(mean(x^2) + eps) * weight of the file."""

    weight: torch.Tensor  # times the square root of the size
    floor: torch.Tensor  # the square root of size * eps


class Layer(NamedTuple):
    attention_norm: Norm
    qkv: torch.Tensor  # [queries + keys + values, width]
    qkv_bias: torch.Tensor | None
    head_norm: Norm | None  # of queries and keys, [heads + kv heads, head_dim]
    attention_out: torch.Tensor
    ffn_norm: Norm
    gate_up: torch.Tensor  # [2 * ffn_width, width]
    down: torch.Tensor


class Weights(NamedTuple):
    embedding: torch.Tensor
    layers: list[Layer]
    norm: Norm
    output: torch.Tensor  # the embedding itself when tied


class Loader:
    """Reads one file into tensors of one type on one device."""

    def __init__(self, file: ModelFile, spec: TransformerSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.file, self.spec, self.dtype, self.device = file, spec, dtype, device

    def load(self) -> Weights:
        """Everything, with a bar while somebody watches: decoding a large quantised file takes its time."""
        total = sum(map(math.prod, self.file.shapes.values()))
        with progress(total, f"loading {self.file.name}") as self._advance:
            return self._load()

    def _load(self) -> Weights:
        embedding = self._stack(["token_embd.weight"])
        layers = [self._layer(f"blk.{index}.") for index in range(self.spec.num_layers)]
        output = embedding if self.spec.tied else self._stack(["output.weight"])
        return Weights(embedding, layers, self._norm("output_norm.weight"), output)

    def _layer(self, prefix: str) -> Layer:
        present = self.file.shapes
        parts = ["attn_qkv"] if f"{prefix}attn_qkv.weight" in present else ["attn_q", "attn_k", "attn_v"]
        biases = [f"{prefix}{part}.bias" for part in parts]
        halves = ["ffn_gate.weight", "ffn_up.weight"] if f"{prefix}ffn_gate.weight" in present else ["ffn_up.weight"]
        return Layer(
            attention_norm=self._norm(f"{prefix}attn_norm.weight"),
            qkv=self._paired(self._stack([f"{prefix}{part}.weight" for part in parts])),
            qkv_bias=self._paired(self._stack(biases)) if biases[0] in present else None,
            head_norm=self._head_norm(prefix) if f"{prefix}attn_q_norm.weight" in present else None,
            attention_out=self._stack([f"{prefix}attn_output.weight"]),
            ffn_norm=self._norm(f"{prefix}ffn_norm.weight"),
            gate_up=self._stack([prefix + half for half in halves]),
            down=self._stack([f"{prefix}ffn_down.weight"]),
        )

    def _stack(self, names: Sequence[str]) -> torch.Tensor:
        """The tensors below one another, in one allocation."""
        shapes = [self.file.shapes[name] for name in names]
        whole = torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=self.dtype, device=self.device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            whole[start : start + shape[0]] = tensor_of(self.file.read(name))
            start += shape[0]
            self._advance(math.prod(shape))
        return whole

    def _paired(self, qkv: torch.Tensor) -> torch.Tensor:
        """Rows of each query and key head in the order of the pairs that turn together."""
        spec = self.spec
        if not spec.rope.interleaved:
            heads = spec.num_heads + spec.num_kv_heads
            turning = qkv[: heads * spec.head_dim].view(heads, spec.head_dim, *qkv.shape[1:])
            turning.copy_(turning[:, self._pairs()])
        return qkv

    def _pairs(self) -> torch.Tensor:
        """Where each dimension of a head comes from: (0, d/2), (1, d/2 + 1), ... become neighbours."""
        half = len(self.spec.rope.frequencies)
        order = torch.arange(self.spec.head_dim)
        order[: 2 * half] = torch.arange(2 * half).view(2, half).t().reshape(-1)
        return order.to(self.device)

    def _norm(self, name: str) -> Norm:
        return self._scaled(self._stack([name]))

    def _head_norm(self, prefix: str) -> Norm:
        spec = self.spec
        queries, keys = (self._stack([f"{prefix}attn_{part}_norm.weight"]) for part in "qk")
        rows = torch.stack([queries] * spec.num_heads + [keys] * spec.num_kv_heads)
        return self._scaled(rows if spec.rope.interleaved else rows[:, self._pairs()])

    def _scaled(self, weight: torch.Tensor) -> Norm:
        size = weight.shape[-1]
        floor = torch.tensor(math.sqrt(size * self.spec.norm_eps), device=self.device)
        return Norm(weight.float() * math.sqrt(size), floor)
