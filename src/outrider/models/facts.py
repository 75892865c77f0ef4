"""Checked reading of the keys of a model file: each is there, of the right type and in a sane range, or it is named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.errors import ModelFileError

MAX_LAYERS = 1_000  # the largest open models have 126; a bound keeps a damaged count from costing memory
MAX_SIZE = 2**24  # of any one dimension
MAX_HEAD = 2**13
MIN_CONTEXT, MAX_CONTEXT = 2, 2**31  # a token to read and one to say


class Facts:
    """The keys of one file. A default makes a key optional; a null counts as absent."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    def fail(self, reason: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {reason}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def whole(self, key: str, *, default: int | None = None, low: int = 1, high: int = MAX_SIZE) -> int:
        value = self._get(key, default)
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            value = value[0]  # GGUF may give a count per layer
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.fail(f"{key} must be a whole number, the same in every layer, got {_brief(value)}")
        if not low <= value <= high:
            raise self.fail(f"{key} must be between {low} and {high}, got {_brief(value)}")
        return value

    def number(self, key: str, *, default: float | None = None, low: float = 1e-12, high: float = 1e12) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(f"{key} must be a number, got {_brief(value)}")
        if not low <= value <= high:  # also false for NaN
            raise self.fail(f"{key} must be between {low:g} and {high:g}, got {_brief(value)}")
        return float(value)

    def numbers(self, key: str) -> list[float]:
        """A list of positive numbers of a sane size."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(_is_sane(one) for one in value):
            raise self.fail(f"{key} must be a list of positive numbers from 1e-6 to 1e6, got {_brief(value)}")
        return [float(one) for one in value]

    def text(self, key: str, *, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.fail(f"{key} must be a text, got {_brief(value)}")
        return value

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.fail(f"{key} must be true or false, got {_brief(value)}")
        return value

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.fail(f"the key {key} is missing")
        return value


def _is_sane(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 1e-6 < value < 1e6


def _brief(value: Any) -> str:
    """A value as it may stand in a message: a damaged file can hold very long ones."""
    if isinstance(value, int) and abs(value) > 10**20:
        return "a number of more than 20 digits"
    shown = repr(value[:8] if isinstance(value, str | list) else value)
    return shown if len(shown) <= 60 else shown[:60] + "..."
