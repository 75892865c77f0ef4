"""From models' names to backends and tokenizers. Heavy packages load here, when somebody needs them."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from outrider.backends.base import Backend
from outrider.config import ModelConfig
from outrider.errors import ConfigError, MissingPackageError, ModelSourceError
from outrider.kv.pages import Pages
from outrider.models import hub
from outrider.models.base import ModelFile, TransformerSpec
from outrider.models.fingerprint import fingerprint
from outrider.models.gguf import GGUFFile, read_metadata
from outrider.models.opening import open_model
from outrider.models.source import ModelSource
from outrider.tokenizer.base import Tokenizer
from outrider.tokenizer.build import tokenizer_from_metadata
from outrider.tokenizer.folder import tokenizer_from_folder
from outrider.tokenizer.text import TextTokenizer

if TYPE_CHECKING:
    import torch

Named = str | os.PathLike[str]
log = logging.getLogger("outrider")
CONTEXTS = 4  # that the cache holds at once, where memory allows; on a CPU what is never used costs nothing
MEMORY_SHARE = 0.5  # of the free memory that keys and values may fill


class Loaded(NamedTuple):
    """A model that can run. `tokenizer` is None where none came with it: token ids only.

    A draft that `shares_slots` keeps its state under the target's page ids.
    """

    backend: Backend
    tokenizer: TextTokenizer | None
    shares_slots: bool = False


def load_models(target: Named, drafts: Sequence[Named], may_share: Sequence[bool], config: ModelConfig) -> list[Loaded]:
    """The target and its draft models. All files are looked at before any is read.

    may_share: drafts that can use the target's slots, if they have its vocabulary.
    """
    paths = [_fetch(target, "target"), *(_fetch(draft, "draft") for draft in drafts)]
    return _adapt(paths, config) if config.backend == "hf" else _load(paths, config, [True, *may_share])


def load_draft(draft: Named, config: ModelConfig) -> Loaded:
    """A draft model for a target that is here already."""
    path = _fetch(draft, "draft")
    return _adapt([path], config)[0] if config.backend == "hf" else _load([path], config, [True])[0]


def fetch_head(name: Named) -> Path:
    """Where the file or folder of a draft head is."""
    source = ModelSource.parse(name)
    if source.kind != "hf" or source.file is not None:
        return _fetch(name, "draft")
    from outrider.models.heads import FILES

    return hub.fetch_head(source.location, FILES)


def _fetch(name: Named, param: str) -> Path:
    try:
        return ModelSource.parse(name).fetch()
    except ModelSourceError as error:
        error.param = param
        raise


def tokenizer_of(path: Path, file: ModelFile | None = None) -> TextTokenizer | None:
    """The tokenizer that came with a model, if one did. `file` is the model, where it is open already."""
    if path.is_dir():
        return tokenizer_from_folder(path) if (path / "tokenizer.json").exists() else None
    metadata = file.metadata if isinstance(file, GGUFFile) else read_metadata(path)
    return tokenizer_from_metadata(metadata, path) if "tokenizer.ggml.model" in metadata else None


def _load(paths: Sequence[Path], config: ModelConfig, may_share: Sequence[bool]) -> list[Loaded]:
    """Models that our own backends run, the target first. Transformers of its vocabulary share its pages."""
    files = [open_model(path) for path in paths]
    tokenizers = [tokenizer_of(path, file) for path, file in zip(paths, files, strict=True)]
    device = _device(config)
    weights = sum(math.prod(shape) for file in files for shape in file.shapes.values())
    sizes = [
        file.spec.num_columns if tokenizer is None else min(tokenizer.vocab_size, file.spec.num_columns)
        for file, tokenizer in zip(files, tokenizers, strict=True)
    ]
    shares = [
        may_share[index]
        and isinstance(files[0].spec, TransformerSpec)
        and isinstance(file.spec, TransformerSpec)
        and sizes[index] == sizes[0]
        and mean_the_same(tokenizers[0], tokenizers[index])
        for index, file in enumerate(files)
    ]
    shared = [file.spec for file, shares_pages in zip(files, shares, strict=True) if shares_pages]
    pages = _pages(shared, weights, config, device) if shared else None  # type: ignore[arg-type]
    loaded = []
    for index, (file, tokenizer) in enumerate(zip(files, tokenizers, strict=True)):
        own = pages if shares[index] else None
        if own is None and isinstance(file.spec, TransformerSpec):
            own = _pages([file.spec], weights, config, device)
        size = None if tokenizer is None else sizes[index]
        backend = _backend(file, own, size, config, device)
        backend.fingerprint = fingerprint(paths[index])  # type: ignore[attr-defined]
        loaded.append(Loaded(backend, tokenizer, shares[index] and index > 0))
    return loaded


def mean_the_same(ours: Tokenizer | None, theirs: Tokenizer | None) -> bool:
    """Whether ids of one mean the same in the other. A handful of renamed special tokens does no harm; what has
    no tokenizer of its own is taken at its word."""
    if not isinstance(ours, TextTokenizer) or not isinstance(theirs, TextTokenizer) or ours is theirs:
        return True
    return ours.vocab_size == theirs.vocab_size and ours.num_different(theirs) <= ours.vocab_size // 100


def _backend(
    file: ModelFile, pages: Pages | None, vocab_size: int | None, config: ModelConfig, device: torch.device
) -> Backend:
    if pages is None:
        from outrider.backends.mamba import MambaBackend

        _refuse_strict(config, f"{file.name}, a recurrent model")
        return MambaBackend(file, vocab_size=vocab_size, context=config.context, device=str(device))
    from outrider.backends.transformer import TransformerBackend

    if device.type != "cpu":
        _refuse_strict(config, f"{device.type} yet")
    try:
        return TransformerBackend(
            file, pages, vocab_size=vocab_size, context=config.context, device=str(device), strict=config.strict
        )
    except (RuntimeError, MemoryError) as error:  # torch's out-of-memory errors are RuntimeErrors
        raise ConfigError(
            f"{file.name} does not fit into memory with a cache of {pages.num_pages * pages.page_size} tokens "
            f"({str(error).splitlines()[0]}); set a smaller cache_tokens or context, or take a smaller model",
            param="cache_tokens",
        ) from error


def _adapt(paths: Sequence[Path], config: ModelConfig) -> list[Loaded]:
    """Models that transformers runs for us."""
    device = _device(config)
    for name in ("cache_tokens", "cache_bytes"):
        if getattr(config, name) is not None:
            raise ConfigError(f"the hf backend sizes its own caches; leave {name} out", param=name)
    if find_spec("transformers") is None:
        raise MissingPackageError("the hf backend needs transformers; install it with pip install 'outrider[hf]'")
    from outrider.backends.hf import HFBackend

    loaded = []
    for path in paths:
        _refuse_strict(config, f"{path.name} on the hf backend")
        tokenizer = tokenizer_of(path)
        vocab_size = None if tokenizer is None else tokenizer.vocab_size
        backend = HFBackend.from_path(path, device=str(device), vocab_size=vocab_size, context=config.context)
        backend.fingerprint = fingerprint(path)
        loaded.append(Loaded(backend, tokenizer))
    return loaded


def _device(config: ModelConfig) -> torch.device:
    if find_spec("torch") is None:
        raise MissingPackageError("real models need torch; install it with pip install 'outrider[torch]'")
    import torch

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    elif name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {name} was asked for, but torch sees no CUDA device; use cpu", param="device")
    return torch.device(name)


def _pages(specs: Sequence[TransformerSpec], weights: int, config: ModelConfig, device: torch.device) -> Pages:
    """Pages for the keys and values of these models, which keep them under the same ids.

    weights: numbers that are about to be loaded, of all models together.
    """
    from outrider.backends.torch_common import dtype_for, free_memory

    size = config.page_size
    if config.cache_tokens is not None:
        return Pages(-(-config.cache_tokens // size), size)
    values = sum(2 * spec.num_layers * spec.num_kv_heads * spec.head_dim for spec in specs)
    number = dtype_for(device).itemsize
    if config.cache_bytes is not None:
        num_pages = config.cache_bytes // (values * number * size)
        if num_pages < 1:
            raise ConfigError(
                f"cache_bytes={config.cache_bytes} is less than a page of {size} tokens; give at least "
                f"{values * number * size}",
                param="cache_bytes",
            )
        return Pages(num_pages, size)
    spare = max(0, free_memory(device) - weights * number)
    affordable = int(MEMORY_SHARE * spare) // (values * number * size)
    pages_of_a_context = -(-min(specs[0].context, config.context or specs[0].context) // size)
    if affordable < pages_of_a_context:
        log.warning("memory is short: the cache holds %d tokens instead of a whole context", max(1, affordable) * size)
    return Pages(max(1, min(CONTEXTS * pages_of_a_context, affordable)), size)


def _refuse_strict(config: ModelConfig, what: str) -> None:
    if config.strict:
        raise ConfigError(
            f"strict is not offered for {what}; leave it out, or run a transformer on the CPU", param="strict"
        )
