"""What is built when it is first needed: kernels, graphs. A round that built something says nothing of other rounds."""

from __future__ import annotations

from typing import Any

_built = 0


def note(*_: Any) -> None:
    """Something was built, by whatever model."""
    global _built
    _built += 1


def count() -> int:
    return _built
