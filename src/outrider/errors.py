"""The error tree. The class decides the HTTP status and the stable `code`; every message names the cure.

A caller can fix a `RequestError` or a `ConfigError`; a `BackendError` or a `DraftError` is a fault of a model
or a plug-in and ends the requests it touched, never the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self


class OutriderError(Exception):
    """Base of everything Outrider raises on purpose. `param` names the offending field, where there is one.

    When one of several requests in a call fails, the others are answered first: `results` holds their answers,
    None in place of the failed.
    """

    status: int = 500
    code: str = "internal_error"
    results: Sequence[object] = ()

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def copy(self) -> Self:
        """Another one like it: each caller gets an exception of its own."""
        other = type(self)(self.message, param=self.param)
        other.__cause__ = self.__cause__
        return other


class ConfigError(OutriderError):
    """An engine cannot be built like this."""

    status, code = 400, "invalid_config"


class MissingDraftError(ConfigError):
    """The method needs something to draft with, and nothing was given."""

    code = "missing_draft"


class VocabularyError(ConfigError):
    """Draft and target do not speak the same token ids."""

    code = "vocabulary_mismatch"


class ModelSourceError(ConfigError):
    """There is no such model, or it cannot be fetched."""

    code = "model_not_found"


class ModelFileError(ConfigError):
    """A model file that cannot be used. The message names the file and the reason."""

    code = "bad_model_file"


class MissingPackageError(ConfigError):
    """An optional package is not installed. The message has the pip command that brings it."""

    code = "missing_package"


class NativeMissingError(ConfigError):
    """The native library is not there, or not fit to be used. The message says why, and how to get it."""

    code = "missing_native"


class RequestError(OutriderError):
    """A request the caller can correct."""

    status, code = 400, "invalid_request"


class EmptyPromptError(RequestError):
    """There is nothing to continue."""

    code = "empty_prompt"


class ContextLengthError(RequestError):
    """Prompt and answer do not fit into the model's context."""

    code = "context_length_exceeded"


class UnknownMethodError(RequestError):
    """The request names a drafting method this engine has not loaded."""

    code = "unknown_method"


class TokenRangeError(RequestError):
    """A token id outside the vocabulary."""

    code = "token_out_of_range"


class SnapshotError(OutriderError):
    """A snapshot that cannot be written, or a file that cannot be resumed from. Nothing of it is loaded then."""

    status, code = 400, "invalid_snapshot"


class NotReadyError(OutriderError):
    """The engine is closed."""

    status, code = 503, "not_ready"


class QueueFullError(OutriderError):
    """Too many requests run or wait already: try again later."""

    status, code = 429, "queue_full"


class PolicyError(OutriderError):
    """A scheduling policy raised or returned something unusable. Only the request it was called for fails."""

    code = "policy_error"


class BackendError(OutriderError):
    """The target model broke its contract: wrong shapes, NaN, or an exception of its own."""

    code = "backend_error"


class DraftError(OutriderError):
    """The draft side failed; the request is ended with this error instead of being answered short."""

    code = "draft_error"


class DeviceLostError(BackendError):
    """The device is gone, and everything that it held: no request of this engine can go on."""

    code = "device_lost"


class wrap_errors:  # noqa: N801
    """A context that turns exceptions of plug-ins into typed errors: what failed, and the last line of why.

    A class, since a generator-based context costs four times as much, several times a round.
    """

    __slots__ = ("_error", "_what")

    def __init__(self, error: type[OutriderError], what: str) -> None:
        self._error = error
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, cause: BaseException | None, trace: object) -> None:
        if isinstance(cause, Exception) and not isinstance(cause, (self._error, DeviceLostError)):
            lines = str(cause).strip().splitlines() or [""]
            error = DeviceLostError if type(cause).__name__ == "AcceleratorError" else self._error
            raise error(f"{self._what}: {type(cause).__name__}: {lines[-1]}") from cause
