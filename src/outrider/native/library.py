"""The shared library, loaded once with ctypes. Whoever cannot have it is told why, and what to do."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from outrider.errors import ConfigError, NativeMissingError
from outrider.native.build import NAME, REASON

ABI = 5  # of the C interface; api.cpp has the same number, and both change when a struct or a signature does
FOLDER = Path(__file__).parent
INSTALL = "install a C++ compiler, then outrider once more with pip"
REBUILD = "build it again with python -m outrider.native.build"


@cache
def library() -> ctypes.CDLL:
    """The library, with the instructions that OUTRIDER_ISA names or the best that this machine has.

    OUTRIDER_NATIVE_LIBRARY is the path of another one to use, for instance one with checks compiled in.
    """
    named = os.environ.get("OUTRIDER_NATIVE_LIBRARY")
    loaded = _load(Path(named), "name another in OUTRIDER_NATIVE_LIBRARY, or unset it") if named else _open(FOLDER)
    _choose(loaded, os.environ.get("OUTRIDER_ISA"))
    return loaded


def why_not() -> str | None:
    """Why there is no library to use, with the cure; None where there is one."""
    try:
        library()
    except NativeMissingError as error:
        return error.message
    return None


def instructions() -> str:
    """The instruction set in use."""
    return str(library().outrider_selected().decode())


def num_threads() -> int:
    """Threads that compute."""
    return int(library().outrider_threads())


def _open(folder: Path) -> ctypes.CDLL:
    path = folder / NAME
    if not path.exists():
        raise NativeMissingError(f"the native library was not built: {_reason(folder)}; {INSTALL}")
    newer = _newer_source(path)
    if newer is not None:
        raise NativeMissingError(f"the native library is older than its source {newer}; {REBUILD}")
    return _load(path)


def _load(path: Path, cure: str = "") -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeMissingError(f"the native library cannot be loaded: {error}; {cure or INSTALL}") from error
    try:
        number = int(loaded.outrider_abi())
        _declare(loaded)
    except AttributeError as error:
        raise NativeMissingError(f"the native library is not of this version ({error}); {cure or REBUILD}") from error
    if number != ABI:
        raise NativeMissingError(
            f"the native library has interface {number}, this version needs {ABI}; {cure or REBUILD}"
        )
    return loaded


def _reason(folder: Path) -> str:
    try:
        return (folder / REASON).read_text(encoding="utf-8").strip()
    except OSError:
        return "nobody tried when outrider was installed"


def _newer_source(path: Path) -> str | None:
    """A source that changed after the library was built, in a tree that has sources: an installed package has none."""
    built = path.stat().st_mtime_ns
    sources = [*path.parent.glob("*.cpp"), *path.parent.glob("*.h")]
    return next((source.name for source in sorted(sources) if source.stat().st_mtime_ns > built), None)


def _declare(loaded: ctypes.CDLL) -> None:
    """What the functions that are called here take and return."""
    loaded.outrider_isas.restype = ctypes.c_char_p
    loaded.outrider_selected.restype = ctypes.c_char_p
    loaded.outrider_select.argtypes = [ctypes.c_char_p]
    loaded.outrider_set_threads.argtypes = [ctypes.c_int]
    loaded.outrider_set_threads.restype = None
    loaded.outrider_threads.argtypes = []


def _choose(loaded: ctypes.CDLL, name: str | None) -> None:
    if not name:
        return
    known = loaded.outrider_isas().decode().split(",")
    if name not in known or loaded.outrider_select(name.encode()) != 0:
        raise ConfigError(
            f"OUTRIDER_ISA is {name!r}; this machine has {', '.join(known)}, choose one of them or leave it out",
            param="OUTRIDER_ISA",
        )
