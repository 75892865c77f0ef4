"""Heads that come with the package: small, with a card, and found by the weights they were made for."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.engine.presets import PRESETS
from outrider.models.head_spec import EagleSpec
from outrider.models.heads import open_head
from outrider.models.own_heads import SHIPPED, find_head, made_for

HEADS = sorted(path.parent for path in SHIPPED.glob("*/config.json"))


def test_the_default_model_has_one() -> None:
    assert [head.name for head in HEADS] == ["smollm2"]
    assert PRESETS["smollm2"].draft == "suffix,eagle"


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.name)
def test_a_head(head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    fingerprint = made_for(head / "config.json")
    assert fingerprint is not None and find_head(fingerprint) == head
    assert sum(file.stat().st_size for file in head.iterdir()) < 12e6
    file = open_head(head)
    assert isinstance(file.spec, EagleSpec) and file.spec.version == 3 and file.made_for == fingerprint
    assert len(file.kept) == 5 and file.kept[0] > 0.5, "what it is like is known before it drafts"
    card = (head / "README.md").read_text(encoding="utf-8")
    assert all(word in card for word in ("Licence", "recipes/", "tokens a round"))
