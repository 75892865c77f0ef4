"""Putting an engine together: concrete classes are named only here and in `loading.py`. Misfits are told once, here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from array_api_compat import is_torch_namespace

from outrider.backends.base import Backend
from outrider.backends.mock import MockBackend, mock_tokenizer
from outrider.clock import Clock, SystemClock
from outrider.config import MockConfig, ModelConfig, NgramConfig, SchedulerConfig, SpeculationConfig, SuffixConfig
from outrider.draft.base import Drafter
from outrider.draft.eagle import EagleDrafter
from outrider.draft.layerskip import LayerSkipDrafter
from outrider.draft.model import ModelDrafter
from outrider.draft.ngram import NgramDrafter
from outrider.draft.reencode import ReencodeDrafter
from outrider.draft.run_ahead import Cores, RunAheadDrafter
from outrider.draft.suffix import SuffixDrafter
from outrider.draft.synthetic import SyntheticDrafter
from outrider.draft.vocab import TranslatedBackend, TranslatedDrafter, Translation, Vocabulary
from outrider.engine.engine import Engine
from outrider.engine.loading import Loaded, Named, fetch_head, load_draft, load_models, mean_the_same
from outrider.engine.methods import DraftSpec, parse_drafts
from outrider.engine.presets import PRESETS
from outrider.engine.profile import profile
from outrider.engine.runner import require_torch, second_gpu
from outrider.errors import ConfigError, MissingDraftError, VocabularyError
from outrider.models.own_heads import find_head
from outrider.tokenizer.base import Tokenizer

Draft = Named | MockConfig | Backend | Drafter | Sequence[Any] | None


class Lookups(NamedTuple):
    """Settings of the drafters that look things up."""

    ngram: NgramConfig
    suffix: SuffixConfig

    @classmethod
    def of(cls, ngram: NgramConfig | None, suffix: SuffixConfig | None) -> Lookups:
        for name, given, kind in (("ngram", ngram, NgramConfig), ("suffix", suffix, SuffixConfig)):
            if given is not None and not isinstance(given, kind):
                raise ConfigError(f"{name} takes {kind.__name__}, got {given!r}", param=name)
        return cls(ngram or NgramConfig(), suffix or SuffixConfig())


def build_engine(
    target: Named | Backend,
    *,
    draft: Draft = None,
    speculation: SpeculationConfig,
    tokenizer: Tokenizer | None = None,
    model: ModelConfig,
    scheduling: SchedulerConfig,
    lookups: Lookups,
    run_ahead: bool | Literal["always"] = False,
    clock: Clock | None = None,
    threaded: bool = True,
) -> Engine:
    """See `Engine.load`."""
    if not isinstance(target, (str, os.PathLike, Backend)):
        raise ConfigError(f"target must be a name or a backend, got {type(target).__name__}", param="target")
    preset = PRESETS.get(target) if isinstance(target, str) else None
    is_presets = preset is not None and draft is None  # nobody asked for it by name
    if preset is not None and is_presets:
        draft = preset.draft
        if speculation.width is None:
            speculation = SpeculationConfig(width=preset.width, max_width=speculation.max_width, tree=speculation.tree)
    specs = [_resolved(spec, clock) for spec in parse_drafts(draft)]
    wish = f"width {speculation.width}" if speculation.width else "a tree" if speculation.tree else None
    if wish is not None and not specs:
        raise MissingDraftError(f"{wish} needs a draft; name one as the draft, or leave it out", param="draft")
    if run_ahead and model.draft_device is None and any(spec.model is not None for spec in specs):
        model = replace(model, draft_device=second_gpu(model))
    first, others = _load(preset.target if preset is not None else target, specs, model, clock)
    chunk = scheduling.prefill_chunk
    drafters = [
        _drafter(spec, first, other, tokenizer, lookups, chunk)
        for spec, other in zip(specs, others, strict=True)
        if first.backend.info.heads or not (is_presets and spec.method == "eagle")
    ]
    if run_ahead and first.backend.info.prelaunch and model.draft_device in (None, model.device):
        raise ConfigError(
            "run_ahead gains nothing on one GPU, where draft and target are queued behind each other anyway; leave "
            "run_ahead out, or name another GPU for the draft (draft_device)",
            param="run_ahead",
        )
    costs = None
    if (drafters and speculation.width is None) or first.backend.info.prelaunch:
        costs = profile(first.backend, drafters, scheduling, clock or SystemClock())
    if run_ahead:
        drafters = _ahead(drafters, first.backend, always=run_ahead == "always")
    return Engine(
        first.backend,
        drafters,
        tokenizer=tokenizer or first.tokenizer,
        scheduling=scheduling,
        speculation=speculation,
        defaults=preset.defaults if preset else None,
        costs=costs,
        clock=clock,
        threaded=threaded,
    )


def _ahead(drafters: Sequence[Drafter], target: Backend, *, always: bool) -> list[Drafter]:
    """Drafters that can run ahead, wrapped so that they do."""
    able = [drafter for drafter in drafters if drafter.info.run_ahead]
    if not able:
        names = ",".join(drafter.name for drafter in drafters) or "none"
        raise ConfigError(
            f"run_ahead needs a draft model; {names} does not draft ahead, leave run_ahead out", param="run_ahead"
        )
    cores = Cores(None) if is_torch_namespace(target.ops.xp) else None
    return [
        RunAheadDrafter(drafter, target.ops, always=always, cores=cores) if drafter in able else drafter
        for drafter in drafters
    ]


class Target(NamedTuple):
    backend: Backend
    tokenizer: Tokenizer | None


def _resolved(spec: DraftSpec, clock: Clock | None) -> DraftSpec:
    """Mocks by name or by their settings become backends."""
    value = spec.value
    if spec.method == "model" and isinstance(value, str) and value in PRESETS:
        named = PRESETS[value]
        if isinstance(named.target, MockConfig):
            value = named.draft if isinstance(named.draft, MockConfig) else named.target
    if isinstance(value, MockConfig):
        return DraftSpec("object", MockBackend(value, clock=clock))
    return spec


def _load(
    target: Named | MockConfig | Backend, specs: Sequence[DraftSpec], config: ModelConfig, clock: Clock | None
) -> tuple[Target, list[Loaded | None]]:
    """The target, and for every drafter the model it needs. Names are loaded together, so that they can share pages."""
    names: list[Named] = [spec.model for spec in specs if spec.model is not None]
    if isinstance(target, MockConfig):
        if config.backend not in ("auto", "mock"):
            raise ConfigError(
                f"a mock does not run on the {config.backend} backend; name a real model", param="backend"
            )
        if not names:
            _refuse_unused(config, "a mock")
        first = Target(MockBackend(target, clock=clock), mock_tokenizer(target.vocab_size, text=target.text))
        loaded = [load_draft(name, config) for name in names]
    elif not isinstance(target, (str, os.PathLike)):
        if not names:
            _refuse_unused(config, "a backend that is here already")
        first = Target(target, None)
        loaded = [load_draft(name, config) for name in names]
    elif config.backend == "mock":
        raise ConfigError(f"{target} is no mock; name one of the mocks, or another backend", param="backend")
    else:
        may_share = [spec.method != "reencode" for spec in specs if spec.model is not None]
        whole, *loaded = load_models(target, names, may_share, config)
        first = Target(whole.backend, whole.tokenizer)
    models = iter(loaded)
    return first, [None if spec.model is None else next(models) for spec in specs]


def _refuse_unused(config: ModelConfig, what: str) -> None:
    """Settings of loading that nothing would be loaded with."""
    for name in (
        "device",
        "draft_device",
        "threads",
        "context",
        "cache_tokens",
        "cache_bytes",
        "strict",
        "dtype",
        "kv_type",
    ):
        if getattr(config, name) != getattr(ModelConfig(), name):
            raise ConfigError(f"{name} is for models that are loaded by name, not for {what}; leave it out", param=name)


def _drafter(
    spec: DraftSpec, target: Target, model: Loaded | None, tokenizer: Tokenizer | None, lookups: Lookups, chunk: int
) -> Drafter:
    backend = target.backend
    if spec.method == "ngram":
        return NgramDrafter(lookups.ngram)
    if spec.method == "suffix":
        return SuffixDrafter(lookups.suffix)
    if spec.method == "layerskip":
        return _layer_skip(backend, spec.value)
    if spec.method in ("medusa", "eagle"):
        return _head(spec, backend)
    if spec.method == "object":
        return _given(spec.value, backend, chunk)
    assert model is not None, f"{spec} came without its model"
    ours = tokenizer or target.tokenizer
    if spec.method == "reencode":
        return ReencodeDrafter(model.backend, _translation(backend, ours, model), chunk=chunk)
    if spec.method == "synthetic":
        return _synthetic(backend, model, spec.value.share, chunk)
    same_size = model.backend.info.vocab_size == backend.info.vocab_size
    if model.shares_slots or (same_size and mean_the_same(target.tokenizer, model.tokenizer)):
        return ModelDrafter(model.backend, chunk=chunk, shares_slots=model.shares_slots)
    translated = TranslatedBackend(model.backend, _translation(backend, ours, model))
    return TranslatedDrafter(translated, chunk=chunk)


def _synthetic(target: Backend, draft: Loaded, share: float, chunk: int) -> Drafter:
    if not target.info.name.endswith(":counting"):
        raise ConfigError(
            f"synthetic needs a target whose words are known, not {target.info.name}; use random:llama-3.1-8b:counting",
            param="draft",
        )
    _check_sizes(target, draft.backend)
    return SyntheticDrafter(draft.backend, share, chunk=chunk, shares_slots=draft.shares_slots)


def _translation(target: Backend, tokenizer: Tokenizer | None, draft: Loaded) -> Translation:
    """Between the target's tokens and those of a draft with another vocabulary."""
    if tokenizer is None or draft.tokenizer is None:
        _check_sizes(target, draft.backend)
        raise VocabularyError(
            f"the draft {draft.backend.info.name} has other tokens than the target, and one of them came without a "
            "tokenizer; choose a draft with the target's vocabulary",
            param="draft",
        )
    return Translation(
        Vocabulary.of(tokenizer, target.info.vocab_size),
        Vocabulary.of(draft.tokenizer, draft.backend.info.vocab_size),
    )


def _layer_skip(target: Backend, layers: int | None) -> Drafter:
    num_layers = target.info.num_layers
    if num_layers < 2:
        raise ConfigError(
            f"layerskip needs a transformer of two layers or more that runs on our own backend, not "
            f"{target.info.name}; choose another draft",
            param="draft",
        )
    chosen = max(1, num_layers // 4) if layers is None else layers
    if not 1 <= chosen < num_layers:
        raise ConfigError(
            f"layerskip:{chosen} must be less than the {num_layers} layers of {target.info.name}; "
            f"write layerskip:{max(1, num_layers // 4)}",
            param="draft",
        )
    return LayerSkipDrafter(target.view(chosen))


def _head(spec: DraftSpec, target: Backend) -> Drafter:
    if not target.info.heads:
        raise ConfigError(
            f"{spec.method} heads need a transformer that runs on our own backend, not {target.info.name}",
            param="draft",
        )
    if spec.method == "eagle":
        return EagleDrafter.load(_own_head(target) if spec.value is None else fetch_head(spec.value), target)
    require_torch("a Medusa head")
    from outrider.draft.medusa import MedusaDrafter

    return MedusaDrafter.load(fetch_head(spec.value), target)


def _own_head(target: Backend) -> Path:
    path = None if target.fingerprint is None else find_head(target.fingerprint)
    if path is None:
        raise ConfigError(
            f"no EAGLE head belongs to {target.info.name}; train one (outrider train eagle), or write eagle:PATH",
            param="draft",
        )
    return path


def _given(draft: Any, target: Backend, chunk: int) -> Drafter:
    """A backend or a drafter of the caller's own."""
    if isinstance(draft, ModelDrafter):
        _check_sizes(target, draft.backend)
    if isinstance(draft, Drafter):
        return draft
    if isinstance(draft, Backend):
        _check_sizes(target, draft)
        return ModelDrafter(draft, chunk=chunk)
    raise ConfigError(f"draft must be a name, a backend or a drafter, got {type(draft).__name__}", param="draft")


def _check_sizes(target: Backend, draft: Backend) -> None:
    ours, theirs = target.info, draft.info
    if ours.vocab_size != theirs.vocab_size:
        raise VocabularyError(
            f"the target {ours.name} has {ours.vocab_size} tokens and the draft {theirs.name} has {theirs.vocab_size}; "
            "choose a draft with the target's vocabulary, or name one that brings its tokenizer",
            param="draft",
        )
