"""What a model file tells: the shape of the model (`TransformerSpec`, `MambaSpec`) and its tensors by name.

Readers (`gguf.py`, `folder.py`) translate their format into these; backends compute from these alone. Tensor names are
GGUF's short ones whatever the format: `token_embd.weight`, `blk.3.attn_q.weight`, `output_norm.weight`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from outrider.errors import ModelFileError
from outrider.types import Array

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions: pair i of a head's first 2 * len(frequencies) dimensions turns by position * frequencies[i].

    `interleaved` says which dimensions the file pairs: (0, 1), (2, 3), ... or (0, d/2), (1, d/2 + 1), ...
    `scale` multiplies cosine and sine (yarn, longrope).
    """

    frequencies: tuple[float, ...]
    interleaved: bool
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerSpec:
    """A decoder-only transformer of the llama kind: RMS norms, rotary positions, grouped queries, gated SiLU.

    What a family adds (biases, norms of queries and keys, fused projections) shows in the tensors that are there.
    """

    family: str  # as the file names it: llama, mistral, qwen2, qwen3, phi3
    num_layers: int
    width: int  # of the residual stream
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_width: int
    num_columns: int  # rows of the embedding; the vocabulary may be smaller
    context: int
    norm_eps: float
    rope: Rope
    windows: tuple[int | None, ...] = ()  # keys a layer's query sees, itself included; empty: all, in every layer
    tied: bool = False  # no output matrix of its own: the embedding is used


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec:
    """A stack of Mamba-1 mixers: convolution and selective state space instead of attention."""

    family: str
    num_layers: int
    width: int
    inner: int  # channels of the mixer
    state: int  # numbers each channel remembers
    conv: int  # tokens the convolution sees
    dt_rank: int
    num_columns: int
    context: int  # what it was trained on; nothing breaks beyond
    norm_eps: float
    tied: bool = False


Spec = TransformerSpec | MambaSpec


class ModelFile(Protocol):
    """An opened model: nothing is read until it is asked for."""

    @property
    def path(self) -> Path: ...

    @property
    def spec(self) -> Spec: ...

    @property
    def name(self) -> str:
        """For people."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Of every tensor the model uses, by name; a matrix is [outputs, inputs]."""

    @property
    def types(self) -> Mapping[str, str]:
        """How each of them is stored, for people."""

    def read(self, name: str) -> Array:
        """One tensor, decoded to floating point: numpy, or torch on the CPU where numpy has no such type (bf16)."""


def expected_shapes(spec: Spec, present: Collection[str]) -> dict[str, Shape]:
    """The tensors a model of this spec must have.

    `present` decides between fused and separate projections, and what is optional must be there as a whole: a bias or
    a head norm in one layer wants all of its kind in every layer.
    """
    shapes: dict[str, Shape] = {
        "token_embd.weight": (spec.num_columns, spec.width),
        "output_norm.weight": (spec.width,),
    }
    if not spec.tied:
        shapes["output.weight"] = (spec.num_columns, spec.width)
    layer = _mamba_layer(spec) if isinstance(spec, MambaSpec) else _transformer_layer(spec, _in_layers(present))
    for index in range(spec.num_layers):
        shapes.update({f"blk.{index}.{name}": shape for name, shape in layer.items()})
    return shapes


def check_shapes(file: ModelFile) -> None:
    """Every tensor that is needed is there and has the shape the spec says, or a ModelFileError says which is not."""
    for name, wanted in expected_shapes(file.spec, file.shapes).items():
        given = file.shapes.get(name)
        if given is None:
            raise ModelFileError(f"{file.path}: the tensor {name} is missing; the file is incomplete, fetch it again")
        if given != wanted:
            raise ModelFileError(f"{file.path}: {name} has shape {list(given)}, the model needs {list(wanted)}")


def _in_layers(names: Collection[str]) -> set[str]:
    """blk.3.attn_q.weight -> attn_q.weight"""
    return {name.split(".", 2)[2] for name in names if name.startswith("blk.") and name.count(".") > 1}


def _transformer_layer(spec: TransformerSpec, present: Collection[str]) -> dict[str, Shape]:
    """The tensors of one layer; `present` are those that any layer has."""
    width, ffn = spec.width, spec.ffn_width
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, Shape] = {"attn_norm.weight": (width,), "ffn_norm.weight": (width,)}
    parts = {"attn_q": queries, "attn_k": keys, "attn_v": keys}
    if "attn_qkv.weight" in present:
        parts = {"attn_qkv": queries + 2 * keys}
    shapes.update({f"{name}.weight": (rows, width) for name, rows in parts.items()})
    biases: dict[str, Shape] = {f"{name}.bias": (rows,) for name, rows in parts.items()}
    if spec.family == "qwen2" or not biases.keys().isdisjoint(present):
        shapes.update(biases)
    norms: dict[str, Shape] = {f"attn_{one}_norm.weight": (spec.head_dim,) for one in "qk"}
    if spec.family == "qwen3" or not norms.keys().isdisjoint(present):
        shapes.update(norms)
    shapes["attn_output.weight"] = (width, queries)
    if "ffn_gate.weight" in present:
        shapes["ffn_gate.weight"] = (ffn, width)
        shapes["ffn_up.weight"] = (ffn, width)
    else:  # gate and up in one matrix, gate first
        shapes["ffn_up.weight"] = (2 * ffn, width)
    shapes["ffn_down.weight"] = (width, ffn)
    return shapes


def _mamba_layer(spec: MambaSpec) -> dict[str, Shape]:
    return {
        "attn_norm.weight": (spec.width,),
        "ssm_in.weight": (2 * spec.inner, spec.width),
        "ssm_conv1d.weight": (spec.inner, spec.conv),
        "ssm_conv1d.bias": (spec.inner,),
        "ssm_x.weight": (spec.dt_rank + 2 * spec.state, spec.inner),
        "ssm_dt.weight": (spec.inner, spec.dt_rank),
        "ssm_dt.bias": (spec.inner,),
        "ssm_a": (spec.inner, spec.state),  # as GGUF stores it: -exp(A_log)
        "ssm_d": (spec.inner,),
        "ssm_out.weight": (spec.width, spec.inner),
    }
