"""The header of a GGUF file: its keys and where its tensors lie. Nothing here knows what a model is.

The reader is our own because the gguf package builds a numpy array per string and needs seconds for a vocabulary.
Every count and length is compared with the bytes that are left before anything is allocated for it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from outrider.errors import ModelFileError
from outrider.models.base import Shape

MAGIC = b"GGUF"
MAX_STRING = 2**26
MAX_ITEMS = 2**22  # of an array: vocabularies have a quarter of a million entries
MAX_DIMENSIONS = 4
MAX_NAME = 128  # of a tensor; ggml itself stops at 64
MAX_ALIGNMENT = 2**20


class Storage(NamedTuple):
    """How a tensor type is laid out: `block` values in `size` bytes."""

    name: str
    block: int
    size: int


# The types gguf.quants can decode, by their number in the file. A table of our own because importing gguf costs more
# than opening a file; a test compares it with the package.
STORAGES: Mapping[int, Storage] = {
    0: Storage("F32", 1, 4),
    1: Storage("F16", 1, 2),
    2: Storage("Q4_0", 32, 18),
    3: Storage("Q4_1", 32, 20),
    6: Storage("Q5_0", 32, 22),
    7: Storage("Q5_1", 32, 24),
    8: Storage("Q8_0", 32, 34),
    10: Storage("Q2_K", 256, 84),
    11: Storage("Q3_K", 256, 110),
    12: Storage("Q4_K", 256, 144),
    13: Storage("Q5_K", 256, 176),
    14: Storage("Q6_K", 256, 210),
    16: Storage("IQ2_XXS", 256, 66),
    17: Storage("IQ2_XS", 256, 74),
    18: Storage("IQ3_XXS", 256, 98),
    19: Storage("IQ1_S", 256, 50),
    20: Storage("IQ4_NL", 32, 18),
    21: Storage("IQ3_S", 256, 110),
    22: Storage("IQ2_S", 256, 82),
    23: Storage("IQ4_XS", 256, 136),
    29: Storage("IQ1_M", 256, 56),
    30: Storage("BF16", 1, 2),
    34: Storage("TQ1_0", 256, 54),
    35: Storage("TQ2_0", 256, 66),
    39: Storage("MXFP4", 32, 17),
    40: Storage("NVFP4", 64, 36),
}

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies in the file. Its shape has the rows first, unlike the file."""

    name: str
    shape: Shape
    storage: Storage
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


def read_header(path: Path, data: mmap.mmap) -> Header:
    """Keys and tensors of a mapped GGUF file, or a ModelFileError with what is wrong."""
    cursor = _Cursor(path, data)
    num_tensors, num_keys = _counts(cursor)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.text("a key")
        if key in metadata:
            raise cursor.fail(f"{_named(key)} is there twice")
        metadata[key] = cursor.value(cursor.unpack(_U32, "keys"), key)
    alignment = _alignment(cursor, metadata)
    tensors: dict[str, StoredTensor] = {}
    for _ in range(num_tensors):
        tensor = _tensor(cursor, alignment)
        if tensor.name in tensors:
            raise cursor.fail(f"the tensor {tensor.name!r} is there twice")
        tensors[tensor.name] = tensor
    start = -(-cursor.position // alignment) * alignment
    return Header(metadata=metadata, tensors=_placed(cursor, tensors, start))


class _Cursor:
    """Reads forward through the mapped file and never past its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = 0

    def fail(self, reason: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {reason}")

    def truncated(self, where: str) -> ModelFileError:
        return self.fail(f"the file ends within its {where}; it is incomplete or damaged, fetch it again")

    def unpack(self, layout: struct.Struct, where: str) -> Any:
        if layout.size > self.size - self.position:
            raise self.truncated(where)
        (value,) = layout.unpack_from(self.data, self.position)
        self.position += layout.size
        return value

    def text(self, where: str) -> str:
        return self.texts(1, where)[0]

    def texts(self, count: int, where: str) -> list[str]:
        """Strings one after another. The one hot loop of opening a file: a vocabulary has hundreds of thousands."""
        data, position, length_at = self.data, self.position, _U64.unpack_from
        texts: list[str] = []
        try:
            for _ in range(count):
                (length,) = length_at(data, position)
                start = position + 8
                position = start + length
                if length > MAX_STRING or position > self.size:
                    raise self.truncated(f"text of {where}")
                texts.append(str(data[start:position], "utf-8"))
        except struct.error as error:  # fewer than the 8 bytes of a length are left
            raise self.truncated(f"text of {where}") from error
        except UnicodeDecodeError as error:
            raise self.fail(f"{where} has text that is not UTF-8; the file is damaged, fetch it again") from error
        self.position = position
        return texts

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.text(_named(key))
        if kind == _ARRAY:
            return self._array(key)
        if kind in _SCALARS:
            return self.unpack(struct.Struct("<" + _SCALARS[kind]), "keys")
        raise self.fail(f"{_named(key)} has the unknown value type {kind}")

    def _array(self, key: str) -> list[Any]:
        kind, count = self.unpack(_U32, "keys"), self.unpack(_U64, "keys")
        left = self.size - self.position
        if kind == _STRING:
            if count > min(MAX_ITEMS, left // _U64.size):
                raise self.fail(f"{_named(key)} cannot have {count} entries in a file of {self.size} bytes")
            return self.texts(count, _named(key))
        if kind not in _SCALARS:
            raise self.fail(f"{_named(key)} is an array of the unknown value type {kind}")
        letter = _SCALARS[kind]
        if count > min(MAX_ITEMS, left // struct.calcsize("<" + letter)):
            raise self.fail(f"{_named(key)} cannot have {count} entries in a file of {self.size} bytes")
        layout = struct.Struct(f"<{count}{letter}")
        values = list(layout.unpack_from(self.data, self.position))
        self.position += layout.size
        return values


def _named(key: str) -> str:
    """A key as it may stand in a message: a damaged one can be very long."""
    return f"the key {key[:80]!r}"


def _counts(cursor: _Cursor) -> tuple[int, int]:
    """Numbers of tensors and of keys, after the magic and the version."""
    magic = cursor.data[:4]
    if magic != MAGIC:
        raise cursor.fail(f"this is not a GGUF file, it starts with {magic!r}")
    cursor.position = 4
    version = cursor.unpack(_U32, "header")
    if version >= 2**24:  # a small number read from the wrong end
        raise cursor.fail("this is a big-endian GGUF file; only little-endian files can be read, convert it first")
    if version not in (2, 3):
        raise cursor.fail(f"GGUF version {version} cannot be read, only 2 and 3; convert the model again")
    num_tensors, num_keys = cursor.unpack(_U64, "header"), cursor.unpack(_U64, "header")
    left = cursor.size - cursor.position
    # A key takes at least 13 bytes and a tensor 32.
    if num_keys > min(MAX_ITEMS, left // 13) or num_tensors > min(MAX_ITEMS, left // 32):
        raise cursor.fail(f"{num_keys} keys and {num_tensors} tensors do not fit into a file of {cursor.size} bytes")
    return num_tensors, num_keys


def _alignment(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise cursor.fail(f"general.alignment must be a power of two from 8 to {MAX_ALIGNMENT}, got {value!r}")
    return value


def _tensor(cursor: _Cursor, alignment: int) -> StoredTensor:
    """One entry of the tensor list; `start` still counts from the beginning of the data."""
    name = cursor.text("a tensor name")
    if len(name) > MAX_NAME:
        raise cursor.fail(f"a tensor name has {len(name)} characters, at most {MAX_NAME} are possible")
    num_dimensions = cursor.unpack(_U32, "tensor list")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise cursor.fail(f"the tensor {name!r} has {num_dimensions} dimensions, 1 to {MAX_DIMENSIONS} are possible")
    shape = tuple(cursor.unpack(_U64, "tensor list") for _ in range(num_dimensions))[::-1]
    kind, start = cursor.unpack(_U32, "tensor list"), cursor.unpack(_U64, "tensor list")
    storage = STORAGES.get(kind)
    if storage is None:
        raise cursor.fail(f"the tensor {name!r} has the type {kind}, which is unknown or cannot be decoded")
    num_values = 1
    for size in shape:
        num_values *= size
    if num_values == 0 or shape[-1] % storage.block:
        raise cursor.fail(f"the tensor {name!r} has the impossible shape {list(shape)} for its type {storage.name}")
    if start % alignment:
        raise cursor.fail(f"the tensor {name!r} starts at {start}, not at a multiple of the alignment {alignment}")
    num_bytes = num_values // storage.block * storage.size
    return StoredTensor(name=name, shape=shape, storage=storage, start=start, num_bytes=num_bytes)


def _placed(cursor: _Cursor, tensors: Mapping[str, StoredTensor], data_start: int) -> dict[str, StoredTensor]:
    """The tensors with places in the file, none outside of it and none on top of another."""
    placed: dict[str, StoredTensor] = {}
    end = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
        start = data_start + tensor.start
        if start < end:
            raise cursor.fail(f"the tensor {tensor.name!r} overlaps the one before it; the file is damaged")
        end = start + tensor.num_bytes
        if end > cursor.size:
            raise cursor.fail(
                f"{tensor.name!r} would end at byte {end} of {cursor.size}; the file is truncated, fetch it again"
            )
        placed[tensor.name] = StoredTensor(
            name=tensor.name, shape=tensor.shape, storage=tensor.storage, start=start, num_bytes=tensor.num_bytes
        )
    return placed
