"""A transformer's weights as the forward pass wants them: projections of one input in one matrix, pairs side by side.

Tensors are read, turned and copied one at a time, so loading needs little more memory than the weights themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from outrider.backends.forward import Layer
from outrider.backends.torch_common import tensor_of
from outrider.models.base import ModelFile, TransformerSpec, check_shapes
from outrider.models.cache import progress


class Weights(NamedTuple):
    embedding: torch.Tensor
    layers: list[Layer]
    norm: torch.Tensor  # before the output, which may be the embedding and so has no norm in it
    output: torch.Tensor  # [width, columns]; the embedding itself when tied


class Loader:
    """Reads one file into tensors of one type on one device."""

    def __init__(self, file: ModelFile, spec: TransformerSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.file, self.spec, self.dtype, self.device = file, spec, dtype, device

    def load(self) -> Weights:
        """Everything, with a bar while somebody watches: decoding a large quantised file takes its time."""
        check_shapes(self.file)  # below, one bias or norm stands for all of its kind
        total = sum(map(math.prod, self.file.shapes.values())) * self.dtype.itemsize
        with progress(total, f"loading {self.file.name}") as self._advance:
            return self._load()

    def _load(self) -> Weights:
        embedding = self._stack(["token_embd.weight"])
        layers = [self._layer(f"blk.{index}.") for index in range(self.spec.num_layers)]
        output = embedding if self.spec.tied else self._stack(["output.weight"])
        return Weights(embedding, layers, self._norm("output_norm.weight"), output.t())

    def _layer(self, prefix: str) -> Layer:
        present = self.file.shapes
        parts = ["attn_qkv"] if f"{prefix}attn_qkv.weight" in present else ["attn_q", "attn_k", "attn_v"]
        biases = [f"{prefix}{part}.bias" for part in parts]
        halves = ["ffn_gate.weight", "ffn_up.weight"] if f"{prefix}ffn_gate.weight" in present else ["ffn_up.weight"]
        return Layer(
            qkv=self._paired(self._stack([f"{prefix}{part}.weight" for part in parts], f"{prefix}attn_norm")).t(),
            qkv_bias=self._paired(self._stack(biases)) if biases[0] in present else None,
            head_norm=self._head_norm(prefix) if f"{prefix}attn_q_norm.weight" in present else None,
            attention_out=self._stack([f"{prefix}attn_output.weight"]).t(),
            gate_up=self._stack([prefix + half for half in halves], f"{prefix}ffn_norm").t(),
            down=self._stack([f"{prefix}ffn_down.weight"]).t(),
        )

    def _stack(self, names: Sequence[str], norm: str | None = None) -> torch.Tensor:
        """The tensors below one another, in one allocation; a norm before them is multiplied in."""
        scale = None if norm is None else self._norm(f"{norm}.weight").cpu()
        shapes = [self.file.shapes[name] for name in names]
        whole = torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=self.dtype, device=self.device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            tensor = tensor_of(self.file.read(name))
            whole[start : start + shape[0]] = tensor if scale is None else tensor * scale.to(tensor.device)
            start += shape[0]
            self._advance(math.prod(shape) * self.dtype.itemsize)
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

    def _norm(self, name: str) -> torch.Tensor:
        """The weight of an RMS norm, for rows that were divided by their length and not by their root mean square."""
        weight = tensor_of(self.file.read(name)).float()
        return (weight * math.sqrt(len(weight))).to(self.device)

    def _head_norm(self, prefix: str) -> torch.Tensor:
        spec = self.spec
        queries, keys = (self._norm(f"{prefix}attn_{part}_norm.weight") for part in "qk")
        rows = torch.stack([queries] * spec.num_heads + [keys] * spec.num_kv_heads)
        return rows if spec.rope.interleaved else rows[:, self._pairs()]
