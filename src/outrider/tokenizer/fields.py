"""Values of a model file's metadata by key, each checked once: a missing or wrong one is the file's fault."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from pathlib import Path
from typing import Any

from outrider.errors import ModelFileError

_DAMAGED = "the file is damaged or incomplete, fetch or convert it again"


class Fields:
    """Typed reading of metadata; every complaint names the file and the key."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def error(self, reason: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {reason}")

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is None or isinstance(value, str):
            return value
        raise self.error(f"{key} must be text, got {value!r:.60}; {_DAMAGED}")

    def flag(self, key: str) -> bool | None:
        value = self.values.get(key)
        if value is None or isinstance(value, bool) or type(value).__name__ == "bool":
            return None if value is None else bool(value)
        raise self.error(f"{key} must be true or false, got {value!r:.60}; {_DAMAGED}")

    def token(self, key: str, num_tokens: int, *, used: bool = True) -> int | None:
        """A token id below `num_tokens`. One that is not `used` may lie beyond, and then counts as absent."""
        value = self.values.get(key)
        if value is None:
            return None
        try:
            token = index(value)
        except TypeError as error:
            raise self.error(f"{key} must be a token id, got {value!r:.60}; {_DAMAGED}") from error
        if not 0 <= token < num_tokens and not used:
            return None
        if not 0 <= token < num_tokens:
            raise self.error(f"{key} is {token}, but the file has {num_tokens} tokens; {_DAMAGED}")
        return token

    def strings(self, key: str) -> list[str]:
        values = self._list(key)
        if not set(map(type, values)) <= {str}:
            where = next(at for at, value in enumerate(values) if type(value) is not str)
            raise self.error(f"{key}[{where}] must be text, got {values[where]!r:.60}; {_DAMAGED}")
        return values

    def numbers(self, key: str, length: int) -> list[float]:
        """One number per token."""
        values = self._list(key)
        if len(values) < length:
            raise self.error(f"{key} has {len(values)} entries for {length} tokens; {_DAMAGED}")
        if not set(map(type, values)) <= {int, float}:
            where = next(at for at, value in enumerate(values) if type(value) not in (int, float))
            raise self.error(f"{key}[{where}] must be a number, got {values[where]!r:.60}; {_DAMAGED}")
        return values

    def _list(self, key: str) -> list[Any]:
        value: Any = self.values.get(key)
        if hasattr(value, "tolist"):  # numpy, whose scalars would slow every use
            value = value.tolist()
        if value is None:
            raise self.error(f"{key} is missing; {_DAMAGED}")
        if not isinstance(value, (list, tuple)):
            raise self.error(f"{key} must be a list, got {value!r:.60}; {_DAMAGED}")
        return list(value)
