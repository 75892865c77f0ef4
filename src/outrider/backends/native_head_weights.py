"""The weights of an EAGLE-3 head for the native kernels, rounded to Q8_0. Embedding and output are the target's own
where the head has none."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.backends.native_weights import HALF_MOST, NativeWeights
from outrider.errors import ModelFileError
from outrider.models.head_spec import EagleSpec
from outrider.models.heads import HeadFile
from outrider.native.binding import Arena, Layer, Packed, address_of, packed_bytes, room_for

Array = np.ndarray[Any, Any]
BLOCK = 32  # numbers with one scale
COMPARED_ROWS = 4096  # of a matrix, at a time


class HeadWeights:
    """`layers` is an array of the structures the library reads. ids: the target's id of each token it chooses among."""

    def __init__(self, file: HeadFile, target: NativeWeights, ids: Array | None, vocab_size: int) -> None:
        spec = file.spec
        assert isinstance(spec, EagleSpec)
        self._file, self._held = file, list[Any]()  # what the structures point to
        self._arena = Arena(sum(_room(*shape) for shape in file.shapes.values() if len(shape) == 2))
        self.fc, self.fc_bias = self._matrix("fc.weight"), self._optional("fc.bias")
        self.fc_norm = self._optional("fc_norm.weight")
        norms = [f"fc_norm.{index}.weight" for index in range(len(spec.features or (0, 0, 0)))]
        self.fc_norms = [self._vector(name) for name in norms if name in file.shapes]
        self.input_norm = self._vector("blk.0.hidden_norm.weight")
        self.norm = self._vector("output_norm.weight")
        self.embedding = self._own("token_embd.weight", target.embedding) or target.embedding
        own = self._own("output.weight", target.output, None if ids is None else ids < vocab_size)
        # Tokens that are padding of the target's are never drawn.
        self.ids = None if ids is None else np.ascontiguousarray(ids[ids < vocab_size], dtype=np.int32)
        self.output = own or (target.output if self.ids is None else target.output.take(self.ids))
        count = spec.layer.num_layers
        self.layers = (Layer * count)(*(self._layer(f"blk.{index}.") for index in range(count)))
        del self._file, self._arena

    def _layer(self, prefix: str) -> Any:
        names = {"queries": "attn_q", "keys": "attn_k", "values": "attn_v", "attention_out": "attn_output"}
        names |= {"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}
        biases = {"query_bias": "attn_q.bias", "key_bias": "attn_k.bias", "value_bias": "attn_v.bias"}
        norms = {"query_norm": "attn_q_norm.weight", "key_norm": "attn_k_norm.weight"}
        return Layer(
            **{ours: self._matrix(f"{prefix}{theirs}.weight").matrix for ours, theirs in names.items()},
            attention_norm=address_of(self._vector(f"{prefix}attn_norm.weight")),
            ffn_norm=address_of(self._vector(f"{prefix}ffn_norm.weight")),
            **{ours: address_of(self._optional(f"{prefix}{theirs}")) for ours, theirs in (biases | norms).items()},
        )

    def _own(self, name: str, targets: Packed, kept: Array | None = None) -> Packed | None:
        """A matrix of its own, or `kept` rows of it; None where it has none, or a copy of the target's."""
        if name not in self._file.shapes:
            return None
        own = self._file.numbers(name)
        if kept is not None:
            own = own[kept]
        elif own.shape == (targets.matrix.rows, targets.matrix.columns):
            starts = range(0, len(own), COMPARED_ROWS)
            parts = [np.arange(start, min(start + COMPARED_ROWS, len(own))) for start in starts]
            if all(np.array_equal(own[part], targets.rows(part)) for part in parts):
                return None
        return self._pack(name, own)

    def _matrix(self, name: str) -> Packed:
        return self._pack(name, self._file.numbers(name))

    def _pack(self, name: str, values: Array) -> Packed:
        rows, columns = values.shape
        stored = as_q8_0(values) if columns % BLOCK == 0 else _halves(values)
        packed = Packed(_kind(columns), stored, rows, columns, self._arena)
        if not packed.is_sound or not np.isfinite(values).all() or np.abs(values).max(initial=0.0) > HALF_MOST:
            raise ModelFileError(f"{self._file.path}: {name} has values that are no numbers, or too large for a head")
        self._held.append(packed)
        return packed

    def _optional(self, name: str) -> Array | None:
        return self._vector(name) if name in self._file.shapes else None

    def _vector(self, name: str) -> Array:
        vector = np.ascontiguousarray(self._file.numbers(name), dtype=np.float32)
        self._held.append(vector)
        return vector


def as_q8_0(values: Array) -> Array:
    """Rows as GGUF stores them in Q8_0: a scale in half precision for 32 numbers, then those in eight bits."""
    blocks = values.reshape(-1, BLOCK)
    with np.errstate(over="ignore", invalid="ignore"):  # whoever packs them looks at the scales
        scales = (np.abs(blocks).max(axis=1) / 127.0).astype(np.float16)
        divisors = np.where(scales == 0, 1.0, scales.astype(np.float32))
        numbers = np.rint(blocks / divisors[:, None]).clip(-127, 127).astype(np.int8)
    stored = np.empty((len(blocks), 2 + BLOCK), dtype=np.uint8)
    stored[:, :2] = scales.view(np.uint8).reshape(-1, 2)
    stored[:, 2:] = numbers.view(np.uint8)
    return stored.reshape(-1)


def _halves(values: Array) -> Array:
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values, dtype=np.float16).view(np.uint8).reshape(-1)


def _kind(columns: int) -> str:
    return "Q8_0" if columns % BLOCK == 0 else "F16"


def _room(rows: int, columns: int) -> int:
    return room_for(packed_bytes(_kind(columns), rows, columns))
