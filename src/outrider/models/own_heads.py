"""Heads that belong to a model: those that come with Outrider, and those that were trained here."""

from __future__ import annotations

from pathlib import Path

from outrider.errors import OutriderError
from outrider.jsonfile import read_json
from outrider.models.cache import cache_folder

SHIPPED = Path(__file__).parents[1] / "heads"  # a folder for each model


def trained_heads() -> Path:
    """Where `outrider train` puts them if it is not told."""
    return cache_folder() / "heads"


def find_head(fingerprint: str) -> Path | None:
    """The head that was made for these weights; one that was trained here comes before one that was shipped."""
    for folder in (trained_heads(), SHIPPED):
        configs = folder.glob("*/config.json")
        for config in sorted(configs, key=lambda path: -path.stat().st_mtime):
            if made_for(config) == fingerprint and (config.parent / "model.safetensors").is_file():
                return config.parent
    return None


def made_for(config: Path) -> str | None:
    """The fingerprint of the weights that a head was trained on, where its config says that."""
    try:
        values = read_json(config)
    except OutriderError:  # nobody named this file: it is for others to complain about
        return None
    return fingerprint_in(values.get("outrider"))


def fingerprint_in(ours: object) -> str | None:
    """Of the part of a config that is ours."""
    made_for = ours.get("made_for") if isinstance(ours, dict) else None
    found = made_for.get("fingerprint") if isinstance(made_for, dict) else None
    return found if isinstance(found, str) else None


def kept_in(ours: object) -> list[float]:
    """Of the same part: the share of chains that were kept up to each place, when the head was evaluated."""
    found = ours.get("kept") if isinstance(ours, dict) else None
    shares = found if isinstance(found, list) else []
    is_sound = all(isinstance(share, (int, float)) and 0.0 <= share <= 1.0 for share in shares)
    return shares if is_sound and shares == sorted(shares, reverse=True) else []
