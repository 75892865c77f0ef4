"""The weights of a draft head in one file: safetensors, or what `torch.save` wrote. No pickle is ever executed.

Numbers of safetensors need no torch. `torch.load(weights_only=True)` builds tensors and nothing else. Whatever a
damaged or hostile file holds, the answer is tensors that fit into it or a ModelFileError.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from outrider.errors import MissingPackageError, ModelFileError
from outrider.models.base import Shape

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    Array = np.ndarray[Any, Any]

FLOATS = ("F64", "F32", "F16", "BF16")
INTEGERS = ("I64", "I32")
_STORED = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4"}
_TORCH_TYPES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.bool": "BOOL",
}


class Tensors(Protocol):
    """Named tensors, by the names of whoever wrote them."""

    @property
    def path(self) -> Path: ...

    @property
    def shapes(self) -> Mapping[str, Shape]: ...

    @property
    def types(self) -> Mapping[str, str]: ...

    def read(self, name: str) -> Tensor:
        """For torch, in the precision it is stored in."""

    def numbers(self, name: str) -> Array:
        """For numpy, in single precision; whole numbers in 64 bits."""


def open_tensors(path: Path) -> Tensors:
    if path.suffix == ".safetensors":
        return _Safetensors(path)
    if find_spec("torch") is None:
        raise MissingPackageError(f"{path}: a head that torch.save wrote needs torch: pip install 'outrider[torch]'")
    return _TorchFile(path)


class _Safetensors:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise _missing_package() from error
        self._errors = (SafetensorError, OSError, ValueError, RuntimeError)
        try:
            self._file: Any = safe_open(path, framework="np")
            slices = self._slices()
            self.shapes: Mapping[str, Shape] = {name: tuple(one.get_shape()) for name, one in slices.items()}
            self.types: Mapping[str, str] = {name: str(one.get_dtype()) for name, one in slices.items()}
        except self._errors as error:
            raise ModelFileError(f"{path}: the safetensors file is damaged, fetch it again: {_line(error)}") from error

    def read(self, name: str) -> Tensor:
        from safetensors import safe_open

        try:
            with safe_open(self.path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except self._errors as error:
            raise self._unreadable(name, error) from error
        return tensor

    def numbers(self, name: str) -> Array:
        """By hand: numpy has no BF16. The library has checked the offsets."""
        import numpy as np  # opening a model loads this module, and needs no numbers yet

        try:
            with self.path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                begin, end = json.loads(file.read(size))[name]["data_offsets"]
                file.seek(8 + size + begin)
                stored = np.frombuffer(file.read(end - begin), dtype=_STORED[self.types[name]])
            values = stored.reshape(self.shapes[name])
        except (OSError, ValueError, KeyError) as error:
            raise self._unreadable(name, error) from error
        if self.types[name] == "BF16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.int64 if self.types[name] in INTEGERS else np.float32)

    def _unreadable(self, name: str, error: Exception) -> ModelFileError:
        return ModelFileError(f"{self.path}: the tensor {name[:80]!r} cannot be read: {_line(error)}")

    def _slices(self) -> dict[str, Any]:
        return {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118 it is not a dict


class _TorchFile:
    """A zip archive of raw tensors and a pickle that says how they are called."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._check_archive()
        self._tensors = self._load()
        self.shapes: Mapping[str, Shape] = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        self.types: Mapping[str, str] = {
            name: _TORCH_TYPES.get(str(tensor.dtype), str(tensor.dtype)) for name, tensor in self._tensors.items()
        }

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def numbers(self, name: str) -> Array:
        tensor = self._tensors[name]
        wide: Array = (tensor.float() if tensor.is_floating_point() else tensor.long()).numpy()
        return wide

    def _check_archive(self) -> None:
        """Before torch opens it: nothing in it may unpack to more than the file holds."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                packed = [entry for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
                total = sum(entry.file_size for entry in archive.infolist())
        except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
            raise ModelFileError(
                f"{self.path}: this is not a file of torch.save (1.6 or later), or it is damaged: {_line(error)}"
            ) from error
        if packed or total > self.path.stat().st_size:
            raise ModelFileError(f"{self.path}: the archive is compressed, which torch.save never does; fetch it again")

    def _load(self) -> dict[str, Tensor]:
        import torch

        try:
            loaded = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # a damaged pickle makes the unpickler raise anything
            raise ModelFileError(
                f"{self.path}: the tensors cannot be read, and what is no tensor is not executed: {_line(error)}"
            ) from error
        if not isinstance(loaded, dict) or not all(
            isinstance(name, str) and isinstance(one, torch.Tensor) for name, one in loaded.items()
        ):
            raise ModelFileError(f"{self.path}: there must be tensors by name and nothing else")
        size = self.path.stat().st_size
        for name, tensor in loaded.items():
            dense = tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type == "cpu"
            if not dense or tensor.numel() * tensor.element_size() > size:
                raise ModelFileError(
                    f"{self.path}: the tensor {name[:80]!r} is not a plain one, or larger than the file"
                )
        return {name: tensor.detach() for name, tensor in loaded.items()}


def _line(error: BaseException) -> str:
    """What went wrong in one line of a sane length."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return first[:200]


def _missing_package() -> MissingPackageError:
    return MissingPackageError("reading draft heads needs safetensors: pip install safetensors")
