"""Whoever fails is named: what a plug-in raises becomes a typed error."""

from __future__ import annotations

from outrider.errors import OutriderError


class blaming:  # noqa: N801
    """A class, since a generator-based context costs four times as much, several times a round."""

    __slots__ = ("_error", "_what")

    def __init__(self, error: type[OutriderError], what: str) -> None:
        self._error = error
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, cause: BaseException | None, trace: object) -> None:
        if isinstance(cause, Exception) and not isinstance(cause, self._error):
            lines = str(cause).strip().splitlines() or [""]  # of a long report the last line says what happened
            raise self._error(f"{self._what}: {type(cause).__name__}: {lines[-1]}") from cause
