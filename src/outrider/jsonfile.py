"""Text and JSON files of models. Whatever is wrong with one is a ModelFileError that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.errors import ModelFileError

MAX_BYTES = 2**28  # tokenizers of large vocabularies have 35 MB
MAX_JSON = 2**26


def read_text(path: Path, *, most: int = MAX_BYTES) -> str:
    """A file of UTF-8 text."""
    try:
        if path.stat().st_size > most:
            raise ModelFileError(f"{path}: a file of more than {most >> 20} MiB is not what it should be")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ModelFileError(f"{path}: the file is missing; a model folder needs it") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{path}: the file cannot be read: {error}; fetch it again") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file with an object in it."""
    return parse_json(read_text(path, most=MAX_JSON), path)


def parse_json(text: str, path: Path) -> dict[str, Any]:
    """The object a JSON text holds. Half a surrogate pair is refused: no text of a model can hold one."""
    try:
        value = json.loads(text)
        if "\\u" in text:  # such halves can only come from escapes
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # numbers without end and halves are ValueErrors, too
        raise ModelFileError(f"{path}: this is not valid JSON: {error}; fetch it again") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: there must be a JSON object, got {type(value).__name__}; fetch it again")
    return value
