"""Opening a model whatever its format: a GGUF file or a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from outrider.errors import ModelFileError
from outrider.models.base import check_shapes
from outrider.models.folder import FolderFile
from outrider.models.gguf import GGUFFile
from outrider.models.heads import head_kind
from outrider.models.random_file import PREFIX, RandomFile


def open_model(path: Path) -> GGUFFile | FolderFile | RandomFile:
    """The model at `path` with every tensor it needs in its place, or a ModelFileError that says what is wrong."""
    if str(path).startswith(PREFIX):
        return RandomFile(str(path).removeprefix(PREFIX))
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except OSError as error:
        raise ModelFileError(f"{path}: this cannot be opened: {error.strerror}") from error
    if not is_file and not is_folder:
        raise ModelFileError(f"{path}: there is no such file or folder")
    try:
        file = FolderFile(path) if is_folder else GGUFFile(path)
        check_shapes(file)
    except ModelFileError:
        kind = head_kind(path) if is_folder else None
        if kind is None:
            raise
        message = f"{path} holds {kind} heads, not a model; name them as the draft of a model: {kind}:{path}"
        raise ModelFileError(message) from None
    return file
