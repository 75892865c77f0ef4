"""The file of a snapshot: safetensors with a tree of plain data in its metadata, a version, and a digest of every byte.

Arrays are tensors of the file; the tree names them. A file is written beside its place, brought to the disk and then
renamed: whatever happens, the old one or the new one is there. Reading trusts nothing before the digest is right.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from hashlib import blake2b
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from outrider import __version__
from outrider.errors import SnapshotError

FORMAT = "outrider-snapshot"
VERSION = 1
MAX_HEADER = 100_000_000  # bytes: what safetensors reads back
_DIGEST = b'"digest":"'  # inside of other values its quotes are escaped, so it stands in the file once
_DIGEST_BYTES = 32
_BLANK = b"0" * 2 * _DIGEST_BYTES
_LENGTH_BYTES = 8  # a safetensors file begins with the length of its header
# Of arrays safetensors keeps by name. Others (objects, texts, dates) are no numbers of a model.
_KINDS = frozenset("float64 float32 float16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool".split())  # noqa: SIM905


def write_state(path: Path, content: Mapping[str, Any]) -> None:
    """Put plain data and arrays into a file that only its owner can read."""
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    tree = json.dumps(_flat(content, tensors, "content"))
    if len(tree) > MAX_HEADER // 2:  # quotes are escaped once more on the way into the file
        raise SnapshotError("the requests are too many for one file; save fewer at a time with request_ids")
    head = {"format": FORMAT, "version": str(VERSION), "outrider": __version__, "digest": _BLANK.decode()}
    data = memoryview(save(tensors, metadata={**head, "content": tree}))
    at = bytes(data[: _header_end(data)]).index(_DIGEST) + len(_DIGEST)
    digest = blake2b(data, digest_size=_DIGEST_BYTES).hexdigest().encode()
    try:
        _replace(path, [data[:at], digest, data[at + len(digest) :]])
    except OSError as error:
        raise SnapshotError(f"cannot write {path}: {error.strerror or error}; choose another place") from error


def read_state(path: Path) -> dict[str, Any]:
    """What `write_state` put there; a SnapshotError for anything else."""
    try:
        with path.open("rb") as file:
            header = file.read(_LENGTH_BYTES)
            header += file.read(min(_header_end(header) - len(header), MAX_HEADER))
            if FORMAT.encode() not in header:  # seen before the rest is read: a model may be named by mistake
                raise SnapshotError(
                    f"{path} is not a snapshot, or its beginning is damaged; name a file that snapshot or --save-after "
                    "wrote"
                )
            file.seek(0)
            data = file.read()
    except FileNotFoundError:
        raise SnapshotError(f"there is no file {path}; name one that snapshot or --save-after wrote") from None
    except OSError as error:
        raise SnapshotError(f"cannot read {path}: {error.strerror or error}") from error
    if not _is_intact(data):
        raise SnapshotError(f"{path} is damaged: its contents do not match its digest; use another copy")
    try:
        head: dict[str, str] = json.loads(data[_LENGTH_BYTES : _header_end(data)])["__metadata__"]
        if int(head["version"]) > VERSION:
            raise SnapshotError(
                f"{path} was written by a newer outrider ({head['outrider']}, this is {__version__}); update outrider"
            )
        content: dict[str, Any] = _deep(json.loads(head["content"]), load(data))
        return content
    except (ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:  # its digest is right, though
        raise SnapshotError(f"{path} was not written by outrider: {error}; use another file") from error


def _is_intact(data: bytes) -> bool:
    """Whether every byte is as it was written."""
    starts = data[: _header_end(data)].split(_DIGEST)
    if len(starts) != 2:
        return False
    at, view = len(starts[0]) + len(_DIGEST), memoryview(data)
    digest = blake2b(view[:at], digest_size=_DIGEST_BYTES)
    digest.update(_BLANK)
    digest.update(view[at + len(_BLANK) :])
    return digest.hexdigest().encode() == data[at : at + len(_BLANK)]


def _header_end(data: bytes | memoryview) -> int:
    return _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")


def _replace(path: Path, pieces: Sequence[bytes | memoryview]) -> None:
    """The file at `path` becomes these bytes, or stays as it was."""
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)  # for the owner only
    try:
        with os.fdopen(number, "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise
    if os.name == "posix":  # elsewhere a folder cannot be opened
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name is on the disk, too
        finally:
            os.close(folder)


def _flat(value: Any, tensors: dict[str, np.ndarray[Any, Any]], where: str) -> Any:
    """A value as JSON takes it. What JSON has no word for becomes an object with one key that begins with $."""
    if isinstance(value, np.ndarray):
        return {"$array": _add_tensor(value, tensors, where)}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _flat(entry, tensors, f"{where}.{key}") for key, entry in value.items()}
        pairs = value.items()
        return {
            "$dict": [[_flat(key, tensors, where), _flat(entry, tensors, f"{where}.{key}")] for key, entry in pairs]
        }
    if isinstance(value, (Sequence, Set)) and not isinstance(value, (bytes, bytearray)):
        kind = "$tuple" if isinstance(value, tuple) else "$set" if isinstance(value, Set) else None
        entries = [_flat(entry, tensors, f"{where}.{index}") for index, entry in enumerate(value)]
        return entries if kind is None else {kind: entries}
    raise SnapshotError(f"{where} is {type(value).__name__}, which cannot be saved; use numbers, text or numpy arrays")


def _add_tensor(array: np.ndarray[Any, Any], tensors: dict[str, np.ndarray[Any, Any]], where: str) -> str:
    if array.dtype.name not in _KINDS:
        raise SnapshotError(f"{where} is an array of {array.dtype}, which cannot be saved; use plain numbers")
    name = f"array-{len(tensors)}"
    tensors[name] = np.asarray(array, order="C")  # the library writes the bytes of others in a wrong order
    return name


def _deep(value: Any, tensors: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    """The value that `_flat` was given; sequences are lists or tuples, sets are frozen."""
    if isinstance(value, list):
        return [_deep(entry, tensors) for entry in value]
    if not isinstance(value, dict):
        return value
    match next(iter(value.items()), None):
        case ("$array", name):
            array = tensors[name]
            return array if array.flags.writeable else array.copy()  # older versions of the library give views
        case ("$float", text):
            return float(text)
        case ("$dict", pairs):
            return {_deep(key, tensors): _deep(entry, tensors) for key, entry in pairs}
        case ("$tuple", entries):
            return tuple(_deep(entry, tensors) for entry in entries)
        case ("$set", entries):
            return frozenset(_deep(entry, tensors) for entry in entries)
    return {key: _deep(entry, tensors) for key, entry in value.items()}
