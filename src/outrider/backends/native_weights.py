"""A GGUF file's weights as the native kernels read them: quantised as they are, in tiles, the file's own values."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from outrider.errors import ModelFileError
from outrider.models.base import TransformerSpec, check_shapes
from outrider.models.cache import progress
from outrider.models.gguf import GGUFFile
from outrider.native.binding import TYPES, Arena, Layer, Packed, address_of, packed_bytes, room_for
from outrider.native.library import library

log = logging.getLogger("outrider")
Array = np.ndarray[Any, Any]
MAX_LANES = 16  # rows side by side in a tile, at most
HALF_MOST = 65504.0  # half precision ends here


def weights_of(file: GGUFFile, spec: TransformerSpec) -> NativeWeights:
    """The weights of a file: those that another engine of this process has loaded, while the file is the same. Nobody
    writes to them, and two engines of one model need no more memory or cache than one."""
    status, tiles = file.path.stat(), library().outrider_selected().decode()  # each instruction set has its own tiles
    key = (str(file.path.resolve()), status.st_size, status.st_mtime_ns, tiles)
    with _lock:
        weights = _loaded.get(key)
        if weights is None:
            weights = _loaded[key] = NativeWeights(file, spec)
        return weights


class NativeWeights:
    """All of a model, in memory of its own. `layers` is an array of the structures the library reads."""

    def __init__(self, file: GGUFFile, spec: TransformerSpec) -> None:
        check_shapes(file)
        self._file, self._spec = file, spec
        self._held: list[Any] = []  # what the structures point to
        self._widened: Counter[str] = Counter()
        self._arena = Arena(sum(self._room(name) for name, shape in file.shapes.items() if len(shape) == 2))
        total = sum(map(math.prod, file.shapes.values()))
        with progress(total, f"loading {file.name}") as self._advance:
            self.embedding = self._matrix("token_embd.weight")
            self.output = self.embedding if spec.tied else self._matrix("output.weight")
            self.norm = self._vector("output_norm.weight")
            self.layers = (Layer * spec.num_layers)(*(self._layer(index) for index in range(spec.num_layers)))
        for kind, count in self._widened.items():
            log.warning("%s: %d tensors of type %s are widened to half precision", file.name, count, kind)
        del self._file, self._arena, self._advance  # the file's mapping and metadata need not stay

    @property
    def matrices(self) -> list[Packed]:
        """All of them, in the layout of the kernels."""
        return [held for held in self._held if isinstance(held, Packed)]

    def _room(self, name: str) -> int:
        """What a matrix takes of the arena; one that is cut into three needs a little more."""
        kind = self._file.types[name]
        num_bytes = packed_bytes(kind if kind in TYPES else "F16", *self._file.shapes[name])
        return room_for(num_bytes) + 3 * room_for(num_bytes // self._file.shapes[name][0] * MAX_LANES)

    def _layer(self, index: int) -> Any:
        spec, prefix = self._spec, f"blk.{index}."
        heads, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        queries, keys, values = self._parts(f"{prefix}attn_", ("q", "k", "v"), "qkv", (heads, kv, kv))
        gate, up = self._parts(f"{prefix}ffn_", ("gate", "up"), "up", (spec.ffn_width, spec.ffn_width))
        biases = self._biases(prefix, (heads, kv, kv))
        norms = [self._optional(f"{prefix}attn_{one}_norm.weight") for one in "qk"]
        window = spec.windows[index] if spec.windows else None
        return Layer(
            queries=queries.matrix,
            keys=keys.matrix,
            values=values.matrix,
            attention_out=self._matrix(f"{prefix}attn_output.weight").matrix,
            gate=gate.matrix,
            up=up.matrix,
            down=self._matrix(f"{prefix}ffn_down.weight").matrix,
            attention_norm=address_of(self._vector(f"{prefix}attn_norm.weight")),
            ffn_norm=address_of(self._vector(f"{prefix}ffn_norm.weight")),
            **dict(zip(("query_bias", "key_bias", "value_bias"), map(address_of, biases), strict=True)),
            query_norm=address_of(norms[0]),
            key_norm=address_of(norms[1]),
            window=window or 0,
        )

    def _parts(self, prefix: str, names: Sequence[str], fused: str, sizes: Sequence[int]) -> list[Packed]:
        """Matrices of one input: each a tensor of its own, or rows of one tensor."""
        if f"{prefix}{names[0]}.weight" in self._file.shapes:
            return [self._matrix(f"{prefix}{name}.weight") for name in names]
        whole, ends = f"{prefix}{fused}.weight", np.cumsum(sizes).tolist()
        return [self._matrix(whole, end - size, end) for size, end in zip(sizes, ends, strict=True)]

    def _biases(self, prefix: str, sizes: Sequence[int]) -> Sequence[Array | None]:
        fused = self._optional(f"{prefix}attn_qkv.bias")
        if fused is None:
            return [self._optional(f"{prefix}attn_{name}.bias") for name in "qkv"]
        parts = [np.ascontiguousarray(part) for part in np.split(fused, np.cumsum(sizes)[:-1].tolist())]
        self._held += parts
        return parts

    def _matrix(self, name: str, first: int = 0, last: int | None = None) -> Packed:
        """A tensor, or some of its rows."""
        rows, columns = self._file.shapes[name]
        last = rows if last is None else last
        kind = self._file.types[name]
        if kind in TYPES:
            stored = self._file.stored(name)
            row_bytes = len(stored) // rows
            packed = Packed(kind, stored[first * row_bytes : last * row_bytes], last - first, columns, self._arena)
        else:
            self._widened[kind] += first == 0
            packed = self._widen(name, self._file.read(name)[first:last])
        if not packed.is_sound:
            raise ModelFileError(f"{self._file.path}: {name} has a scale that is no number; the file is damaged")
        self._file.let_go(name)
        self._held.append(packed)
        self._advance((last - first) * columns)
        return packed

    def _widen(self, name: str, values: Array) -> Packed:
        least, most = values.min(initial=0.0), values.max(initial=0.0)
        if not (least >= -HALF_MOST and most <= HALF_MOST):
            raise ModelFileError(
                f"{self._file.path}: {name} has values that half precision cannot hold; use --backend torch"
            )
        halves = np.ascontiguousarray(values, dtype=np.float16)
        rows, columns = halves.shape
        return Packed("F16", halves.view(np.uint8).reshape(-1), rows, columns, self._arena)

    def _optional(self, name: str) -> Array | None:
        return self._vector(name) if name in self._file.shapes else None

    def _vector(self, name: str) -> Array:
        vector = np.array(self._file.read(name), dtype=np.float32)
        self._held.append(vector)
        self._advance(len(vector))
        return vector


_loaded: WeakValueDictionary[tuple[str, int, int, str], NativeWeights] = WeakValueDictionary()
_lock = Lock()
