"""Putting an engine together: the only place that names concrete classes. What does not fit is said here, once."""

from __future__ import annotations

from typing import Any

from outrider.backends.base import Backend
from outrider.backends.mock import MockBackend, mock_tokenizer
from outrider.clock import Clock
from outrider.config import NgramConfig, SchedulerConfig, SpeculationConfig
from outrider.draft.base import Drafter
from outrider.draft.lookup import NgramDrafter, NoDrafter
from outrider.draft.model import ModelDrafter
from outrider.engine.engine import Engine
from outrider.engine.presets import PRESETS, Preset
from outrider.errors import ConfigError, MissingDraftError, VocabularyError
from outrider.tokenizer import Tokenizer

METHODS = ("none", "ngram", "model")


def build_engine(
    target: str | Backend,
    *,
    draft: str | Backend | Drafter | None = None,
    method: str | None = None,
    width: int | None = None,
    tokenizer: Tokenizer | None = None,
    scheduling: SchedulerConfig,
    ngram: NgramConfig,
    clock: Clock | None = None,
) -> Engine:
    """See `Engine.load`."""
    if method is not None and method not in METHODS:
        raise ConfigError(f"{method!r} is not a drafting method; choose one of {', '.join(METHODS)}", param="method")
    preset = None
    speculation = SpeculationConfig(width=width)
    if not isinstance(target, str) and not _has(target, "score"):
        raise ConfigError(f"target must be a name or a backend, got {type(target).__name__}", param="target")
    if isinstance(target, str):
        preset = _preset(target, "target")
        if draft is None and method in (None, preset.method):
            draft = None if preset.draft is None else MockBackend(preset.draft, clock=clock)
        if width is None:
            speculation = SpeculationConfig(width=preset.width)
        tokenizer = tokenizer or mock_tokenizer(preset.target.vocab_size)
        target = MockBackend(preset.target, clock=clock)
    drafter = _drafter(target, draft, method, ngram, scheduling.prefill_chunk, clock)
    if width and drafter.name == "none":
        raise MissingDraftError(f"width={width} needs a draft; pass draft=, or leave width out", param="draft")
    return Engine(
        target,
        drafter,
        tokenizer=tokenizer,
        scheduling=scheduling,
        speculation=speculation,
        defaults=preset.defaults if preset else None,
        clock=clock,
    )


def _drafter(
    target: Backend,
    draft: str | Backend | Drafter | None,
    method: str | None,
    ngram: NgramConfig,
    chunk: int,
    clock: Clock | None,
) -> Drafter:
    if method is None:
        method = "none" if draft is None else draft if draft in ("none", "ngram") else "model"
    if method in ("none", "ngram") and draft not in (None, "none", "ngram"):
        raise ConfigError(f"the method {method} uses no draft model; leave out draft= or method=", param="method")
    if method == "none":
        return NoDrafter()
    if method == "ngram":
        return NgramDrafter(ngram)
    if draft is None or draft in ("none", "ngram"):
        raise MissingDraftError(
            "the method model needs a draft; pass draft=<a backend or a preset name>", param="draft"
        )
    if isinstance(draft, str):
        preset = _preset(draft, "draft")
        return _model_drafter(target, MockBackend(preset.draft or preset.target, clock=clock), chunk)
    if isinstance(draft, ModelDrafter):
        _check_vocabulary(target, draft.backend)
    if _has(draft, "propose"):
        return draft  # type: ignore[return-value]
    if _has(draft, "score"):
        return _model_drafter(target, draft, chunk)  # type: ignore[arg-type]
    raise ConfigError(f"draft must be a name, a backend or a drafter, got {type(draft).__name__}", param="draft")


def _model_drafter(target: Backend, draft: Backend, chunk: int) -> ModelDrafter:
    _check_vocabulary(target, draft)
    return ModelDrafter(draft, chunk=chunk)


def _check_vocabulary(target: Backend, draft: Backend) -> None:
    ours, theirs = target.info, draft.info
    if ours.vocab_size != theirs.vocab_size:
        raise VocabularyError(
            f"the target {ours.name} has {ours.vocab_size} tokens and the draft {theirs.name} has {theirs.vocab_size}; "
            "choose a draft with the target's vocabulary",
            param="draft",
        )


def _preset(name: str, param: str) -> Preset:
    if name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r}; known: {', '.join(sorted(PRESETS))}", param=param)
    return PRESETS[name]


def _has(thing: Any, method: str) -> bool:
    return callable(getattr(thing, method, None))
