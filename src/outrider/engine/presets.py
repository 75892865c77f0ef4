"""Names for what people load: a target, what drafts for it, and settings known to go well together."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from outrider.config import MockConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A line of the table. Models are sources (see `models.source`) or mocks; `defaults` are settings of requests that
    do not bring their own.
    """

    target: str | MockConfig
    draft: str | MockConfig | None = None
    width: int | None = None
    defaults: dict[str, float] = field(default_factory=dict)


def _chosen(temperature: float, top_p: float) -> dict[str, float]:
    return {"temperature": temperature, "top_p": top_p}


# Reads any text and answers in words: for trying the server, the page and clients without weights.
_TEXT = MockConfig(vocab_size=384, text=True, seed=7, sharpness=2.0, num_contexts=8191, eos_ids=(256,))

PRESETS = {
    # A small vocabulary, and a draft that agrees with the target often enough to see every kind of round.
    "mock": Preset(
        target=MockConfig(vocab_size=32, seed=7, sharpness=2.0),
        draft=MockConfig(vocab_size=32, seed=7, sharpness=2.0, drift=0.5),
        width=4,
        defaults={"temperature": 0.8},
    ),
    # The same with a real model's vocabulary, to see what sampling costs there.
    "mock-50k": Preset(
        target=MockConfig(vocab_size=50_000, seed=7, sharpness=2.0, num_contexts=61),
        draft=MockConfig(vocab_size=50_000, seed=7, sharpness=2.0, drift=0.5, num_contexts=61),
        width=4,
        defaults={"temperature": 0.8},
    ),
    "mock-text": Preset(target=_TEXT, draft=replace(_TEXT, drift=0.4), width=4, defaults={"temperature": 0.8}),
    # The same at the pace of a real model: a pass of the target takes 10 ms and 0.1 ms per token.
    "mock-cost": Preset(
        target=replace(_TEXT, seconds_per_pass=0.01, seconds_per_token=0.0001),
        draft=replace(_TEXT, drift=0.4, seconds_per_pass=0.0005),
        width=4,
        defaults={"temperature": 0.8},
    ),
    # Temperatures and top-p are those of the models' own cards. The width is the engine's: it drafts where that pays.
    # `eagle` is the head in `heads/`; where none can sit (backend hf) the preset does without.
    "smollm2": Preset(target="smollm2", draft="suffix,eagle", defaults=_chosen(0.2, 0.9)),
    "llama-3.1-8b": Preset(target="llama-3.1-8b", draft="suffix,llama-3.2-1b", defaults=_chosen(0.6, 0.9)),
    "qwen-2.5-7b": Preset(target="qwen-2.5-7b", draft="suffix,qwen-2.5-0.5b", defaults=_chosen(0.7, 0.8)),
    # No small model shares these vocabularies: drafts come from the text itself.
    "mistral-7b": Preset(target="mistral-7b", draft="suffix", defaults=_chosen(0.7, 1.0)),
    "phi-3.5-mini": Preset(target="phi-3.5-mini", draft="suffix", defaults=_chosen(0.7, 1.0)),
}
