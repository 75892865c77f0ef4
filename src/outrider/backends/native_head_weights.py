"""The weights of an EAGLE-3 head for the native kernels, rounded to four bits (Q4_1): a step of the head reads all of
them, so a draft costs what their bytes do. Embedding and output are the target's own where the head has none.

SmolLM2's head, 60 answers at width 3: 2,739 rounds with Q8_0 and 2,773 with Q4_1, where a step takes a third less. By
least squares alone they would be 2,820: errors count by the norm's weights, which the inputs are multiplied with.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.backends.native_weights import HALF_MOST, NativeWeights
from outrider.errors import ModelFileError
from outrider.models.head_spec import EagleSpec
from outrider.models.heads import HeadFile
from outrider.native.binding import Arena, Layer, Packed, address_of, as_q4_1, packed_bytes, room_for

Array = np.ndarray[Any, Any]
DRAFTS = "Q4_1"
BLOCK = 32  # numbers with one scale
SOME_ROWS = 4096  # of a matrix, as numbers, at a time


class HeadWeights:
    """`layers` is an array of the structures the library reads. ids: the target's id of each token it chooses among."""

    def __init__(self, file: HeadFile, target: NativeWeights, ids: Array | None, vocab_size: int) -> None:
        spec = file.spec
        assert isinstance(spec, EagleSpec)
        self._file, self._held = file, list[Any]()  # what the structures point to
        self._arena = Arena(sum(_room(name, *shape) for name, shape in file.shapes.items() if len(shape) == 2))
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
        self.output = own or (target.output if self.ids is None else self._rows_of(target.output, self.ids))
        count = spec.layer.num_layers
        self.layers = (Layer * count)(*(self._layer(f"blk.{index}.") for index in range(count)))
        del self._file, self._arena

    def _layer(self, prefix: str) -> Any:
        attention_norm, ffn_norm = (self._vector(f"{prefix}{name}_norm.weight") for name in ("attn", "ffn"))
        entered = [attention_norm, self.input_norm] if prefix == "blk.0." else [attention_norm]
        inputs = dict.fromkeys(("queries", "keys", "values"), np.concatenate(entered))
        inputs |= dict.fromkeys(("gate", "up"), ffn_norm)
        names = {"queries": "attn_q", "keys": "attn_k", "values": "attn_v", "attention_out": "attn_output"}
        names |= {"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}
        biases = {"query_bias": "attn_q.bias", "key_bias": "attn_k.bias", "value_bias": "attn_v.bias"}
        norms = {"query_norm": "attn_q_norm.weight", "key_norm": "attn_k_norm.weight"}
        return Layer(
            **{
                ours: self._matrix(f"{prefix}{theirs}.weight", inputs.get(ours)).matrix
                for ours, theirs in names.items()
            },
            attention_norm=address_of(attention_norm),
            ffn_norm=address_of(ffn_norm),
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
            starts = range(0, len(own), SOME_ROWS)
            parts = [np.arange(start, min(start + SOME_ROWS, len(own))) for start in starts]
            if all(np.array_equal(own[part], targets.rows(part)) for part in parts):
                return None
        return self._pack(name, own, self.norm)

    def _rows_of(self, targets: Packed, ids: Array) -> Packed:
        """Rows of the target's output, in four bits if they have more."""
        rows, columns = len(ids), targets.matrix.columns
        if columns % BLOCK or packed_bytes(targets.kind, rows, columns) <= packed_bytes(DRAFTS, rows, columns):
            return targets.take(ids)
        parts = [ids[start : start + SOME_ROWS] for start in range(0, rows, SOME_ROWS)]
        stored = [as_q4_1(targets.rows(part), np.square(self.norm)) for part in parts]
        return Packed(DRAFTS, np.concatenate(stored), rows, columns)

    def _matrix(self, name: str, norm: Array | None = None) -> Packed:
        return self._pack(name, self._file.numbers(name), norm)

    def _pack(self, name: str, values: Array, norm: Array | None) -> Packed:
        """norm: what the norm before it multiplies its inputs with."""
        if not np.isfinite(values).all() or np.abs(values).max(initial=0.0) > HALF_MOST:
            raise ModelFileError(f"{self._file.path}: {name} has values that are no numbers, or too large for a head")
        rows, columns = values.shape
        kind = _kind(name, columns)
        if kind == DRAFTS:
            stored = as_q4_1(values, None if norm is None else np.square(norm))
        else:
            stored = as_q8_0(values) if kind == "Q8_0" else _halves(values)
        packed = Packed(kind, stored, rows, columns, self._arena)
        assert packed.is_sound, f"{name} has scales that are no numbers"
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
    scales = (np.abs(blocks).max(axis=1) / 127.0).astype(np.float16)
    divisors = np.where(scales == 0, 1.0, scales.astype(np.float32))
    numbers = np.rint(blocks / divisors[:, None]).clip(-127, 127).astype(np.int8)
    stored = np.empty((len(blocks), 2 + BLOCK), dtype=np.uint8)
    stored[:, :2] = scales.view(np.uint8).reshape(-1, 2)
    stored[:, 2:] = numbers.view(np.uint8)
    return stored.reshape(-1)


def _halves(values: Array) -> Array:
    return np.ascontiguousarray(values, dtype=np.float16).view(np.uint8).reshape(-1)


def _kind(name: str, columns: int) -> str:
    if columns % BLOCK:
        return "F16"
    return "Q8_0" if name.startswith("fc.") else DRAFTS  # read once a round, and its inputs differ by orders of size


def _room(name: str, rows: int, columns: int) -> int:
    return room_for(packed_bytes(_kind(name, columns), rows, columns))
