"""What a training run is made of. Written beside the head: the same settings give the same head again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.errors import ConfigError
from outrider.jsonfile import read_json

FILE = "train.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """`vocabulary` is how many tokens the head chooses among, those said most often (None: all). `steps` is how many
    tokens it guesses on in training, each from its own output. `held_out` prompts are for evaluation alone."""

    model: str
    prompts: tuple[str, ...] = ()  # files; without any, the target invents them
    num_prompts: int = 8000
    held_out: int = 64
    max_tokens: int = 256  # of an answer
    temperature: float = 0.8  # of every second answer; the others are greedy
    vocabulary: int | None = None
    steps: int = 5
    decay: float = 0.85  # a later step counts so much of the one before it
    strayed: float = 0.1  # what a guess counts behind one that was wrong: when the head drafts, nobody looks at it
    certain: float = 0.5  # of what is learned, the target's likeliest token alone; the rest is its whole distribution
    start: str | None = None  # a head of the same target to begin with, a folder
    updates: int = 4000
    tokens: int = 16384  # of an update, texts filled up to the longest counted in
    length: int = 640  # tokens of a text at most
    rate: float = 5e-3  # of learning, at its highest
    warmup: float = 0.05  # share of the updates in which it rises
    clip: float = 1.0
    save_every: int = 500  # updates
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_tokens", "steps", "updates", "tokens", "save_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}", param=name)
        if self.length < self.steps + 4:
            raise ConfigError(f"length must be at least {self.steps + 4} for {self.steps} steps", param="length")
        if self.vocabulary is not None and self.vocabulary < 1:
            raise ConfigError(f"vocabulary must be at least 1, got {self.vocabulary}", param="vocabulary")
        if not 0 <= self.held_out < self.num_prompts:
            raise ConfigError(
                f"held_out must be less than the {self.num_prompts} prompts, got {self.held_out}", param="held_out"
            )

    def save(self, folder: Path) -> None:
        write_whole(folder / FILE, json.dumps(asdict(self), indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """All of it or nothing."""
    beside = path.with_name(f"{path.name}.tmp")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def check_same(folder: Path, settings: TrainSettings) -> None:
    """What lies there already was begun with these settings; a ConfigError names the first that differs."""
    if not (folder / FILE).exists():
        return
    before, now = read_json(folder / FILE), json.loads(json.dumps(asdict(settings)))
    for name, value in now.items():
        if name not in before:
            raise ConfigError(f"{folder} was begun by an older outrider; choose another --out", param="out")
        if before[name] != value:
            raise ConfigError(
                f"{folder} was begun with {name} {before[name]!r}, not {value!r}; keep that, or choose another --out",
                param=name,
            )
