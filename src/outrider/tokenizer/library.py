"""Calls into the tokenizers library: what a damaged file makes it raise is the file's fault."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import ModelFileError, OutriderError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PREFIX = "continuing_subword_prefix"
# A prefix that may not be empty, or an escape that could hide its name.
_SUSPECT = re.compile(rf'"{_PREFIX}"\s*:\s*(?!null\b|"")|\\u00[2-7]')


@contextmanager
def blaming(path: Path, problem: str) -> Iterator[None]:
    """Whatever is raised within becomes a ModelFileError. Rust's panics are BaseExceptions, so those count, too."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError, OutriderError):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelFileError(f"{path}: {problem} ({reason})") from error


def tokenizer_from_json(text: str, path: Path) -> Tokenizer:
    """A tokenizer from the text of a tokenizer.json."""
    from tokenizers import Tokenizer

    with blaming(path, "its tokenizer.json cannot be used; fetch it again, or update the tokenizers package"):
        if _SUSPECT.search(text):
            json.loads(text, object_pairs_hook=lambda pairs: _refuse_prefix(pairs, path))
        return Tokenizer.from_str(text)


def _refuse_prefix(pairs: list[tuple[str, Any]], path: Path) -> None:
    """The library can bring down the process over such a prefix, so it must not see one."""
    if any(name == _PREFIX and value for name, value in pairs):
        raise ModelFileError(f"{path}: a tokenizer with a {_PREFIX} cannot be used; use another model")
