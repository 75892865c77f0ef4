"""Models of the Hugging Face hub, through huggingface_hub: it shows progress and resumes broken downloads itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.errors import MissingPackageError, ModelSourceError
from outrider.models.cache import cache_folder

# What of a repository is needed: never a pickle, never code.
WANTED = ["*.safetensors", "*.safetensors.index.json", "*.jinja"]
WANTED += ["config.json", "generation_config.json", "tokenizer*.json", "special_tokens_map.json", "added_tokens.json"]
COMPLETE = ".outrider-complete"  # written when a download has ended: one that broke off is taken up again


def cached(repository: str, file: str | None) -> Path | None:
    """The model, if all of it is here already."""
    try:
        return _get(repository, file, local_files_only=True)
    except (MissingPackageError, ModelSourceError):
        return None


def fetch(repository: str, file: str | None) -> Path:
    path = _get(repository, file, local_files_only=False)
    if file is not None:
        return path
    if not list(path.glob("*.safetensors")):
        raise ModelSourceError(
            f"hf:{repository} has no safetensors that could be fetched (pickles are never loaded); check the network, "
            f"or name one of its GGUF files, if it has any: hf:{repository}:file.gguf"
        )
    if not _has_all_shards(path):  # out of reach of the hub, the library is content with what is here
        raise ModelSourceError(f"hf:{repository} could be fetched only in part; check the network and try again")
    (path / COMPLETE).touch()
    return path


def fetch_head(repository: str, files: Sequence[str]) -> Path:
    """A draft head: its config and those of `files` that are there. Torch's own files are read as tensors only."""
    path = _get(repository, None, local_files_only=False, wanted=[*files, "config.json"])
    if not any((path / name).exists() for name in files):
        raise ModelSourceError(f"hf:{repository} has none of {', '.join(files)}; name a repository with a draft head")
    return path


def _has_all_shards(path: Path) -> bool:
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return (path / "model.safetensors").exists()
    try:
        return all((path / name).exists() for name in json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):  # the reader will say what is wrong with it
        return True


def _get(repository: str, file: str | None, *, local_files_only: bool, wanted: Sequence[str] = tuple(WANTED)) -> Path:
    """One file of the repository, or a folder with what is wanted of it."""
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
    except ImportError:
        raise MissingPackageError(
            f"hf:{repository} needs huggingface_hub; install it with pip install 'outrider[hf]'"
        ) from None
    options: dict[str, Any] = {"cache_dir": cache_folder() / "hf", "local_files_only": local_files_only}
    try:
        if file is not None:
            return Path(hf_hub_download(repository, file, **options))
        path = Path(snapshot_download(repository, allow_patterns=list(wanted), **options))
    except Exception as error:  # of the network, the hub or the disk: the library has many
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise ModelSourceError(
            f"hf:{repository} could not be fetched ({type(error).__name__}: {reason}); check the name, the network "
            "and, for gated models, `hf auth login`; or download it elsewhere and give its path"
        ) from error
    if local_files_only and not (path / COMPLETE).exists():
        raise ModelSourceError(f"hf:{repository} is only partly here")
    return path
