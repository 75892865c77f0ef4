"""The C interface in Python: packed matrices, a model, a pass; structures are those of `table.h` and `forward.h`."""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from outrider.native.library import library

Array = np.ndarray[Any, Any]

# Types that stay as the file has them, by GGUF's numbers. Everything else is widened before it comes here.
TYPES = {
    **{"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8},
    **{"Q4_K": 12, "Q5_K": 13, "Q6_K": 14},
}
KV_TYPES = {"f32": 0, "f16": 1, "q8": 2}  # how the KV cache stores numbers, see `KvType` in table.h
ALIGNMENT = 64

_are_set = False  # threads, by anybody
_pointer, _int, _long = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


def _structure(name: str, fields: Mapping[str, Any]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


def _fields(kind: Any, *names: str) -> dict[str, Any]:
    return dict.fromkeys(names, kind)


Matrix: Any = _structure(
    "Matrix", {"data": _pointer, **_fields(_int, "type", "rows", "columns", "padding"), "tile_bytes": _long}
)
Layer: Any = _structure(
    "Layer",
    {
        **_fields(Matrix, "queries", "keys", "values", "attention_out", "gate", "up", "down"),
        **_fields(_pointer, "attention_norm", "ffn_norm", "query_bias", "key_bias", "value_bias"),
        **_fields(_pointer, "query_norm", "key_norm"),
        "window": _long,
    },
)
Model: Any = _structure(
    "Model",
    {
        **_fields(_int, "num_layers", "width", "num_heads", "num_kv_heads", "head_dim", "ffn_width", "num_columns"),
        **_fields(_int, "rotary_pairs", "interleaved", "page_size"),
        "eps": ctypes.c_float,
        **_fields(_int, "keeps_normed", "kv_type"),
        **_fields(Matrix, "embedding", "output"),
        **_fields(_pointer, "output_norm", "input_norm", "layers", "kv_cache"),
        "num_pages": _long,
    },
)
Pass: Any = _structure(
    "Pass",
    {
        **_fields(_int, "num_rows", "num_layers"),
        **_fields(_pointer, "tokens", "positions", "inputs", "places", "pages", "tables", "firsts", "runs"),
        **_fields(_pointer, "extra_ends", "extras", "turns"),
        **_fields(_int, "num_wanted", "num_hidden"),
        **_fields(_pointer, "wanted", "logits", "hidden_layers", "hidden"),
    },
)
Roll: Any = _structure(
    "Roll",
    {
        **_fields(_int, "num_chains", "steps", "vocab_size", "hidden_layer"),
        **_fields(_pointer, "ids", "jobs", "lengths", "streams", "drawn", "probs"),
    },
)


class Arena:
    """Memory for many matrices in one piece: large enough that the system backs it with large pages, which a pass over
    all weights needs (a tenth of its time, else)."""

    def __init__(self, num_bytes: int) -> None:
        memory = np.empty(num_bytes + ALIGNMENT, dtype=np.uint8)
        start = -address(memory) % ALIGNMENT
        self._free = memory[start:]

    def take(self, num_bytes: int) -> Array:
        """The next piece, at the start of a cache line."""
        assert num_bytes <= len(self._free), f"{num_bytes} bytes of {len(self._free)}"
        piece = self._free[:num_bytes]
        self._free = self._free[room_for(num_bytes) :]
        return piece


def room_for(num_bytes: int) -> int:
    """What a piece takes of an arena."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def packed_bytes(kind: str, rows: int, columns: int) -> int:
    """Bytes of a matrix in the layout of the kernels."""
    num_bytes = int(_calls().outrider_packed_bytes(TYPES[kind], rows, columns))
    assert num_bytes, f"{kind} has no tiles of {columns} columns"
    return num_bytes


class Packed:
    """A matrix in the layout of the kernels, and the memory it lies in."""

    def __init__(self, kind: str, stored: Array, rows: int, columns: int, arena: Arena | None = None) -> None:
        """stored: the rows as the file has them, in bytes."""
        self._reserve(kind, rows, columns, arena)
        # Whether all its scales are numbers; the file is damaged where they are not.
        self.is_sound = _calls().outrider_pack(ctypes.byref(self.matrix), address(stored)) == 0

    def rows(self, indices: Array) -> Array:
        """These rows as numbers, exactly the file's. [n, columns]"""
        wanted = np.ascontiguousarray(indices, dtype=np.int32)
        assert not len(wanted) or (wanted.min() >= 0 and wanted.max() < self.matrix.rows), "rows that are not there"
        out = np.empty((len(wanted), self.matrix.columns), dtype=np.float32)
        _calls().outrider_unpack(ctypes.byref(self.matrix), address(wanted), len(wanted), address(out))
        return out

    def take(self, indices: Array) -> Packed:
        """A matrix of these rows, as they are."""
        wanted = np.ascontiguousarray(indices, dtype=np.int32)
        assert not len(wanted) or (wanted.min() >= 0 and wanted.max() < self.matrix.rows), "rows that are not there"
        taken = object.__new__(Packed)
        taken._reserve(self.kind, len(wanted), self.matrix.columns, None)
        taken.is_sound = self.is_sound
        _calls().outrider_take(ctypes.byref(self.matrix), address(wanted), ctypes.byref(taken.matrix))
        return taken

    def _reserve(self, kind: str, rows: int, columns: int, arena: Arena | None) -> None:
        num_bytes = packed_bytes(kind, rows, columns)
        self.kind, self.memory = kind, (arena or Arena(room_for(num_bytes))).take(num_bytes)
        self.matrix = Matrix(address(self.memory), TYPES[kind], rows, columns, 0, 0)

    def multiply(self, rows: Array) -> Array:
        """[n, columns] -> [n, outputs]"""
        rows = np.ascontiguousarray(rows, dtype=np.float32)
        assert rows.ndim == 2 and rows.shape[1] == self.matrix.columns, f"{rows.shape}"
        out = np.empty((len(rows), self.matrix.rows), dtype=np.float32)
        _check(_calls().outrider_multiply(ctypes.byref(self.matrix), address(rows), len(rows), address(out)))
        return out


def as_q4_1(rows: Array, counts: Array | None = None) -> Array:
    """Rows of numbers as a file has them in Q4_1. counts: how much an error in each column does, if not alike."""
    num_rows, columns = rows.shape
    assert columns % 32 == 0, f"{columns} columns are no whole blocks"
    rows = np.ascontiguousarray(rows, dtype=np.float32)
    counts = None if counts is None else np.ascontiguousarray(counts, dtype=np.float32)
    stored = np.empty(num_rows * columns // 32 * 20, dtype=np.uint8)
    _calls().outrider_quantise(address(rows), num_rows, columns, address_of(counts), address(stored))
    return stored


class Numbers:
    """Lists of integers for a pass, one after the other in one piece of memory: a dozen arrays would cost more."""

    def __init__(self, **lists: Sequence[int]) -> None:
        starts, numbers = {}, list[int]()
        for name, values in lists.items():
            starts[name] = len(numbers)
            numbers += values
        self._memory = array("i", numbers)
        first, _ = self._memory.buffer_info()
        self.addresses = {name: first + start * self._memory.itemsize for name, start in starts.items()}


def forward(model: Any, one_pass: Any) -> None:
    """One pass. Python's other threads go on meanwhile."""
    _check(_calls().outrider_forward(ctypes.byref(model), ctypes.byref(one_pass)))


def roll(model: Any, first_pass: Any, one_roll: Any) -> bool:
    """Chains of a head. False: a row was unusable, and not all is drawn."""
    code = _calls().outrider_roll(ctypes.byref(model), ctypes.byref(first_pass), ctypes.byref(one_roll))
    _check(code == 1)
    return bool(code == 0)


def use_threads(count: int | None) -> None:
    """Threads for all models of the process. None: as many as before, one for each core at first."""
    global _are_set
    if count is not None or not _are_set:
        library().outrider_set_threads(num_cores() if count is None else count)
    _are_set = True


def num_cores() -> int:
    """Cores that this process may use. Two threads of one core share its arithmetic, so they count once."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in usable:
        try:
            cores.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            cores.add(str(cpu))
    return max(1, min(len(cores), _allowed()))


def _allowed() -> int:
    """CPUs that a container may use at a time."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no such limit
        return os.cpu_count() or 1


def _check(code: int | bool) -> None:
    if code:
        raise MemoryError("there is no memory left for this pass; use shorter prompt chunks (prefill_chunk)")


def address_of(array: Array | None) -> int | None:
    """For a pointer in a structure. Whoever takes it keeps the array."""
    return None if array is None else address(array)


def address(array: Array) -> int:
    """Where its numbers lie."""
    if array.flags.carray and array.size:  # a third of the time of asking numpy
        memory: Any = array
        return ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return int(array.__array_interface__["data"][0])


@cache
def _calls() -> Any:
    """The library, knowing what its functions take and return."""
    loaded = library()
    takes = {
        "packed_bytes": [ctypes.c_int, _long, _long],
        "pack": [_pointer, _pointer],
        "unpack": [_pointer, _pointer, _long, _pointer],
        "multiply": [_pointer, _pointer, _long, _pointer],
        "take": [_pointer, _pointer, _pointer],
        "quantise": [_pointer, _long, _long, _pointer, _pointer],
        "forward": [_pointer, _pointer],
        "roll": [_pointer, _pointer, _pointer],
    }
    for name, arguments in takes.items():
        function = getattr(loaded, f"outrider_{name}")
        function.argtypes, function.restype = arguments, ctypes.c_int
    loaded.outrider_packed_bytes.restype = _long
    return loaded
