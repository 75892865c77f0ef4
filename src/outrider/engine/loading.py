"""From models' names to backends and tokenizers. Heavy packages load here, when somebody needs them."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider.backends.base import Backend
from outrider.backends.memory import free_host_memory
from outrider.config import ModelConfig
from outrider.engine.runner import Runner, choose, device_name, has_torch, require_torch
from outrider.engine.threads import choose_threads
from outrider.errors import ConfigError, MissingPackageError, ModelSourceError
from outrider.kv.host_store import HostStore
from outrider.kv.pages import Pages
from outrider.models import hub
from outrider.models.base import ModelFile, TransformerSpec
from outrider.models.fingerprint import fingerprint
from outrider.models.gguf import GGUFFile, read_metadata
from outrider.models.opening import open_model
from outrider.models.random_file import RandomFile
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
    config = _aside(config)
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
    if isinstance(file, RandomFile):
        return None
    if path.is_dir():
        return tokenizer_from_folder(path) if (path / "tokenizer.json").exists() else None
    metadata = file.metadata if isinstance(file, GGUFFile) else read_metadata(path)
    return tokenizer_from_metadata(metadata, path) if "tokenizer.ggml.model" in metadata else None


def _load(paths: Sequence[Path], config: ModelConfig, may_share: Sequence[bool]) -> list[Loaded]:
    """Models that our own backends run, the target first.

    Transformers of its vocabulary that run on its backend share its pages.
    """
    files = [open_model(path) for path in paths]
    runners = [choose(file, _aside(config) if index else config) for index, file in enumerate(files)]
    _check_runners(files, runners)
    if config.kv_type != "auto" and all(runner.backend != "native" for runner in runners):
        raise _no_kv_type(config)
    tokenizers = [tokenizer_of(path, file) for path, file in zip(paths, files, strict=True)]
    room = Room.of(files, runners, config)
    sizes = [
        file.spec.num_columns if tokenizer is None else min(tokenizer.vocab_size, file.spec.num_columns)
        for file, tokenizer in zip(files, tokenizers, strict=True)
    ]
    shares = [
        may_share[index]
        and isinstance(files[0].spec, TransformerSpec)
        and isinstance(file.spec, TransformerSpec)
        and runners[index].backend == runners[0].backend
        and sizes[index] == sizes[0]
        and mean_the_same(tokenizers[0], tokenizers[index])
        for index, file in enumerate(files)
    ]
    shared = [file.spec for file, shares_pages in zip(files, shares, strict=True) if shares_pages]
    pages = room.pages(shared, runners[0]) if shared else None  # type: ignore[arg-type]
    loaded = []
    for index, (file, tokenizer) in enumerate(zip(files, tokenizers, strict=True)):
        own = pages if shares[index] else None
        if own is None and isinstance(file.spec, TransformerSpec):
            own = room.pages([file.spec], runners[index])
        size = None if tokenizer is None else sizes[index]
        backend = _backend(file, own, size, config, runners[index])
        backend.fingerprint = fingerprint(paths[index])
        loaded.append(Loaded(backend, tokenizer, shares[index] and index > 0))
    if config.threads is None and runners[0].backend == "native":
        choose_threads(loaded[0].backend)
    return loaded


def _aside(config: ModelConfig) -> ModelConfig:
    """For draft models, which may have a device of their own."""
    return config if config.draft_device is None else replace(config, device=config.draft_device)


def _check_runners(files: Sequence[ModelFile], runners: Sequence[Runner]) -> None:
    """That every model has what runs it. Who could have had the native backend is told once."""
    for file, runner in zip(files, runners, strict=True):
        if runner.backend == "torch":
            require_torch(file.name, runner)
    lost = next((runner.reason for runner in runners if runner.is_loss), None)
    if lost is not None:
        log.warning("torch runs the model, several times slower: %s", lost)


def mean_the_same(ours: Tokenizer | None, theirs: Tokenizer | None) -> bool:
    """Whether ids of one mean the same in the other. A handful of renamed special tokens does no harm; what has
    no tokenizer of its own is taken at its word."""
    if not isinstance(ours, TextTokenizer) or not isinstance(theirs, TextTokenizer) or ours is theirs:
        return True
    return ours.vocab_size == theirs.vocab_size and ours.num_different(theirs) <= ours.vocab_size // 100


def _backend(
    file: ModelFile, pages: Pages | None, vocab_size: int | None, config: ModelConfig, runner: Runner
) -> Backend:
    make = _native_backend if runner.backend == "native" else _torch_backend
    try:
        return make(file, pages, vocab_size, config, runner)
    except (RuntimeError, MemoryError) as error:  # torch's out-of-memory errors are RuntimeErrors
        if pages is None:
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{file.name} does not fit into memory with a cache of {pages.num_pages * pages.page_size} tokens "
            f"({reason}); set a smaller cache_tokens or context, or take a smaller model",
            param="cache_tokens",
        ) from error


def _native_backend(
    file: ModelFile, pages: Pages | None, vocab_size: int | None, config: ModelConfig, runner: Runner
) -> Backend:
    from outrider.backends.native import NativeBackend

    assert isinstance(file, GGUFFile) and pages is not None, "others do not run natively"
    return NativeBackend(
        file,
        pages,
        vocab_size=vocab_size,
        context=config.context,
        threads=config.threads,
        kv_type=_kv_type(config),
    )


def _torch_backend(
    file: ModelFile, pages: Pages | None, vocab_size: int | None, config: ModelConfig, runner: Runner
) -> Backend:
    import torch

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if pages is None:
        from outrider.backends.mamba import MambaBackend

        _refuse_strict(config, f"{file.name}, a recurrent model")
        return MambaBackend(file, vocab_size=vocab_size, context=config.context, device=runner.device)
    if isinstance(file, RandomFile):
        file = file.on(runner.device)
    shared: dict[str, Any] = {"vocab_size": vocab_size, "context": config.context, "strict": config.strict}
    if runner.device != "cpu" and find_spec("triton") is not None:
        from outrider.backends.cuda.backend import GpuBackend

        return GpuBackend(file, pages, device=runner.device, dtype=dtype_of(config, runner.device), **shared)
    from outrider.backends.transformer import TransformerBackend

    if runner.device != "cpu":
        _refuse_strict(config, f"{runner.device} without Triton")
        log.warning("torch's own kernels run the model, several times slower: pip install triton for ours")
    return TransformerBackend(file, pages, device=runner.device, dtype=dtype_of(config, runner.device), **shared)


def _adapt(paths: Sequence[Path], config: ModelConfig) -> list[Loaded]:
    """Models that transformers runs for us."""
    for name in ("cache_tokens", "cache_bytes"):
        if getattr(config, name) is not None:
            raise ConfigError(f"the hf backend sizes its own caches; leave {name} out", param=name)
    if find_spec("transformers") is None or not has_torch():
        raise MissingPackageError("the hf backend needs transformers; install it with pip install 'outrider[hf]'")
    device = device_name(config)
    import torch

    from outrider.backends.hf import HFBackend

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.kv_type != "auto":
        raise _no_kv_type(config)
    loaded = []
    for path in paths:
        _refuse_strict(config, f"{path.name} on the hf backend")
        tokenizer = tokenizer_of(path)
        vocab_size = None if tokenizer is None else tokenizer.vocab_size
        backend = HFBackend.from_path(path, device=device, vocab_size=vocab_size, context=config.context)
        backend.fingerprint = fingerprint(path)
        loaded.append(Loaded(backend, tokenizer))
    return loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How much may be kept of the sequences, beside the weights that are about to be loaded."""

    config: ModelConfig
    weight_bytes: int  # of all models together

    @classmethod
    def of(cls, files: Sequence[ModelFile], runners: Sequence[Runner], config: ModelConfig) -> Room:
        sizes = [_weight_bytes(file, runner, config) for file, runner in zip(files, runners, strict=True)]
        return cls(config=config, weight_bytes=sum(sizes))

    def pages(self, specs: Sequence[TransformerSpec], runner: Runner) -> Pages:
        """Pages for the keys and values of these models, which keep them under the same ids."""
        config, size = self.config, self.config.page_size
        if config.cache_tokens is not None:
            return Pages(-(-config.cache_tokens // size), size)
        page = sum(_page_bytes(spec, runner, size, config) for spec in specs)
        if config.cache_bytes is not None:
            if config.cache_bytes < page:
                raise ConfigError(
                    f"cache_bytes={config.cache_bytes} is less than a page of {size} tokens; give at least {page}",
                    param="cache_bytes",
                )
            return Pages(config.cache_bytes // page, size)
        affordable = int(MEMORY_SHARE * max(0, _free_memory(runner) - self.weight_bytes)) // page
        context = -(-min(specs[0].context, config.context or specs[0].context) // size)
        if affordable < context:
            tokens = max(1, affordable) * size
            log.warning("memory is short: the cache holds %d tokens instead of a whole context", tokens)
        return Pages(max(1, min(CONTEXTS * context, affordable)), size)


def _weight_bytes(file: ModelFile, runner: Runner, config: ModelConfig) -> int:
    """What the weights of a model come to in memory."""
    if runner.backend == "native":
        from outrider.native.binding import TYPES

        halves = sum(2 * math.prod(shape) for name, shape in file.shapes.items() if file.types[name] not in TYPES)
        return int(1.1 * file.path.stat().st_size) + halves
    return sum(math.prod(shape) for shape in file.shapes.values()) * dtype_of(config, runner.device).itemsize


def dtype_of(config: ModelConfig, device: str) -> torch.dtype:
    """What weights, keys and values are kept in."""
    import torch

    from outrider.backends.torch_common import dtype_for

    if config.dtype == "auto":
        return dtype_for(torch.device(device))
    if device == "cpu" and config.dtype != "float32":
        raise ConfigError(
            f"torch has no quick {config.dtype} on a CPU; leave dtype out, or take float32", param="dtype"
        )
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def _page_bytes(spec: TransformerSpec, runner: Runner, size: int, config: ModelConfig) -> int:
    """What a page of so many tokens takes for one model."""
    if runner.backend == "native":
        return HostStore.bytes_of_page(spec.num_layers, spec.num_kv_heads, spec.head_dim, size, _kv_type(config))
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype_of(config, runner.device).itemsize * size


def _no_kv_type(config: ModelConfig) -> ConfigError:
    return ConfigError(
        f"kv_type={config.kv_type} is for GGUF models on the native CPU backend; leave it out, or set dtype",
        param="kv_type",
    )


def _kv_type(config: ModelConfig) -> str:
    """How the native backend stores keys and values."""
    return "f16" if config.kv_type == "auto" else config.kv_type


def _free_memory(runner: Runner) -> int:
    if runner.device == "cpu":
        return free_host_memory()
    import torch

    from outrider.backends.torch_common import free_memory

    return free_memory(torch.device(runner.device))


def _refuse_strict(config: ModelConfig, what: str) -> None:
    if config.strict:
        raise ConfigError(
            f"strict is not offered for {what}; leave it out, or run a transformer on the CPU", param="strict"
        )
