"""Putting an engine together: concrete classes are named only here and in `loading.py`. Misfits are told once, here."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from outrider.backends.base import Backend
from outrider.backends.mock import MockBackend, mock_tokenizer
from outrider.clock import Clock
from outrider.config import MockConfig, ModelConfig, NgramConfig, SchedulerConfig, SpeculationConfig
from outrider.draft.base import Drafter
from outrider.draft.lookup import NgramDrafter, NoDrafter
from outrider.draft.model import ModelDrafter
from outrider.engine.engine import Engine
from outrider.engine.loading import Loaded, Named, load_draft, load_pair
from outrider.engine.presets import PRESETS
from outrider.errors import ConfigError, MissingDraftError, VocabularyError
from outrider.tokenizer.base import Tokenizer
from outrider.tokenizer.text import TextTokenizer

LOOKUPS = ("none", "ngram")  # methods without a draft model: `draft` may name them
METHODS = (*LOOKUPS, "model")
Draft = Named | MockConfig | Backend | Drafter | None


class Models(NamedTuple):
    """What an engine runs on, loaded."""

    target: Backend
    draft: Backend | Drafter | None
    tokenizer: Tokenizer | None
    shares_slots: bool = False


def build_engine(
    target: Named | Backend,
    *,
    draft: Named | Backend | Drafter | None = None,
    method: str | None = None,
    width: int | None = None,
    tokenizer: Tokenizer | None = None,
    model: ModelConfig,
    scheduling: SchedulerConfig,
    ngram: NgramConfig,
    clock: Clock | None = None,
) -> Engine:
    """See `Engine.load`."""
    if method is not None and method not in METHODS:
        raise ConfigError(f"{method!r} is not a drafting method; choose one of {', '.join(METHODS)}", param="method")
    if not isinstance(target, (str, os.PathLike)) and not _has(target, "score"):
        raise ConfigError(f"target must be a name or a backend, got {type(target).__name__}", param="target")
    speculation = SpeculationConfig(width=width)
    preset = PRESETS.get(target) if isinstance(target, str) else None
    chosen: Draft = draft
    if preset is not None and draft is None and method in (None, preset.method):
        chosen, method = preset.draft, preset.method
    method = _method(chosen, method)
    if width and method == "none":
        raise MissingDraftError(f"width={width} needs a draft; pass draft=, or leave width out", param="draft")
    source = preset.target if preset is not None else target
    models = _load(source, chosen if method == "model" else None, model, clock)
    return Engine(
        models.target,
        _drafter(method, models, ngram, scheduling.prefill_chunk),
        tokenizer=tokenizer or models.tokenizer,
        scheduling=scheduling,
        speculation=SpeculationConfig(width=preset.width) if preset is not None and width is None else speculation,
        defaults=preset.defaults if preset else None,
        clock=clock,
    )


def _method(draft: Draft, method: str | None) -> str:
    """How drafts are made, where draft and method agree."""
    if method is None:
        method = "none" if draft is None else draft if isinstance(draft, str) and draft in LOOKUPS else "model"
    if method in LOOKUPS and draft is not None and draft not in LOOKUPS:
        raise ConfigError(f"the method {method} uses no draft model; leave out draft= or method=", param="method")
    if method == "model" and (draft is None or draft in LOOKUPS):
        raise MissingDraftError("the method model needs a draft; pass draft=<a model or a backend>", param="draft")
    return method


def _load(target: Named | MockConfig | Backend, draft: Draft, config: ModelConfig, clock: Clock | None) -> Models:
    """Target and draft as backends. Names of a pair are loaded together, so that they can share pages."""
    if isinstance(draft, str) and draft in PRESETS:
        named = PRESETS[draft]
        if isinstance(named.target, MockConfig):
            draft = named.draft if isinstance(named.draft, MockConfig) else named.target
    if isinstance(draft, MockConfig):
        draft = MockBackend(draft, clock=clock)
    if isinstance(target, MockConfig):
        if config.backend not in ("auto", "mock"):
            raise ConfigError(
                f"a mock does not run on the {config.backend} backend; name a real model", param="backend"
            )
        if not isinstance(draft, (str, os.PathLike)):
            _refuse_unused(config, "a mock")
        return _beside(MockBackend(target, clock=clock), draft, mock_tokenizer(target.vocab_size), config)
    if not isinstance(target, (str, os.PathLike)):
        if not isinstance(draft, (str, os.PathLike)):
            _refuse_unused(config, "a backend that is here already")
        return _beside(target, draft, None, config)
    if config.backend == "mock":
        raise ConfigError(f"{target} is no mock; name one of the mocks, or another backend", param="backend")
    named_draft = draft if isinstance(draft, (str, os.PathLike)) else None
    first, second, shares_slots = load_pair(target, named_draft, config)
    if second is None:
        return Models(first.backend, draft, first.tokenizer)  # type: ignore[arg-type]
    _check_tokens(first, second)
    return Models(first.backend, second.backend, first.tokenizer, shares_slots)


def _refuse_unused(config: ModelConfig, what: str) -> None:
    """Settings of loading that nothing would be loaded with."""
    for name in ("device", "threads", "context", "cache_tokens", "strict"):
        if getattr(config, name) != getattr(ModelConfig(), name):
            raise ConfigError(f"{name} is for models that are loaded by name, not for {what}; leave it out", param=name)


def _beside(target: Backend, draft: Draft, tokenizer: Tokenizer | None, config: ModelConfig) -> Models:
    """A target that is here already; a draft that is only named is loaded by itself."""
    if isinstance(draft, (str, os.PathLike)):
        draft = load_draft(draft, config)
    return Models(target, draft, tokenizer)  # type: ignore[arg-type]


def _drafter(method: str, models: Models, ngram: NgramConfig, chunk: int) -> Drafter:
    if method == "none":
        return NoDrafter()
    if method == "ngram":
        return NgramDrafter(ngram)
    draft = models.draft
    if isinstance(draft, ModelDrafter):
        _check_sizes(models.target, draft.backend)
    if _has(draft, "propose"):
        return draft  # type: ignore[return-value]
    if _has(draft, "score"):
        backend: Backend = draft  # type: ignore[assignment]
        _check_sizes(models.target, backend)
        return ModelDrafter(backend, chunk=chunk, shares_slots=models.shares_slots)
    raise ConfigError(f"draft must be a name, a backend or a drafter, got {type(draft).__name__}", param="draft")


def _check_sizes(target: Backend, draft: Backend) -> None:
    ours, theirs = target.info, draft.info
    if ours.vocab_size != theirs.vocab_size:
        raise VocabularyError(
            f"the target {ours.name} has {ours.vocab_size} tokens and the draft {theirs.name} has {theirs.vocab_size}; "
            "choose a draft with the target's vocabulary",
            param="draft",
        )


def _check_tokens(target: Loaded, draft: Loaded) -> None:
    """Ids of one must mean the same in the other; a handful of renamed special tokens does no harm."""
    _check_sizes(target.backend, draft.backend)
    ours, theirs = target.tokenizer, draft.tokenizer
    if isinstance(ours, TextTokenizer) and isinstance(theirs, TextTokenizer):
        different = ours.num_different(theirs)
        if different > ours.vocab_size // 100:
            raise VocabularyError(
                f"{different} of {ours.vocab_size} token ids mean something else in the draft "
                f"{draft.backend.info.name}; choose a draft with the target's vocabulary",
                param="draft",
            )


def _has(thing: Any, method: str) -> bool:
    return callable(getattr(thing, method, None))
