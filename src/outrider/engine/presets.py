"""Short names for what people load: a target, what drafts for it, and settings known to go well together."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.config import MockConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A line of the table. `defaults` are settings of requests that do not bring their own."""

    target: MockConfig
    draft: MockConfig | None = None
    method: str = "model"
    width: int = 4
    defaults: dict[str, float] = field(default_factory=dict)


PRESETS = {
    # A small vocabulary, and a draft that agrees with the target often enough to see every kind of round.
    "mock": Preset(
        target=MockConfig(vocab_size=32, seed=7, sharpness=2.0),
        draft=MockConfig(vocab_size=32, seed=7, sharpness=2.0, drift=0.5),
        defaults={"temperature": 0.8},
    ),
    # The same with a real model's vocabulary, to see what sampling costs there.
    "mock-50k": Preset(
        target=MockConfig(vocab_size=50_000, seed=7, sharpness=2.0, num_contexts=61),
        draft=MockConfig(vocab_size=50_000, seed=7, sharpness=2.0, drift=0.5, num_contexts=61),
        defaults={"temperature": 0.8},
    ),
}
