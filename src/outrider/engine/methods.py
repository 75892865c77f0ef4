"""The drafting methods: what people write in `draft=` and `--draft`, and one line on each."""

from __future__ import annotations

import math
import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from outrider.engine.presets import PRESETS
from outrider.errors import ConfigError
from outrider.models.names import NAMES


class Method(NamedTuple):
    """A line of `outrider methods`."""

    written: str
    line: str
    needs: str


METHODS = {
    "none": Method("none", "Plain decoding: one pass per token.", "nothing"),
    "ngram": Method("ngram", "What followed the last few tokens before, in this request's own text.", "nothing"),
    "suffix": Method(
        "suffix",
        "The longest match in this request and in past ones of its tenant, as far as their frequencies carry.",
        "nothing; memory for past text",
    ),
    "layerskip": Method(
        "layerskip[:N]",
        "The target's own first N layers (a quarter when left out), without a second copy of anything.",
        "a transformer; pays when it was trained to exit early",
    ),
    "medusa": Method(
        "medusa:PATH",
        "Heads on the last hidden state, one for each token ahead.",
        "Medusa heads trained for the target",
    ),
    "eagle": Method(
        "eagle[:PATH]",
        "A one-layer draft on the target's hidden states (EAGLE, EAGLE-2, EAGLE-3), with a tree of guesses.",
        "an EAGLE head trained for the target; without a path, the one that belongs to it",
    ),
    "model": Method(
        "MODEL",
        "Another model: a path, hf:org/name, pypi:package or a short name; its vocabulary may differ.",
        "a model several times smaller than the target",
    ),
    "reencode": Method(
        "reencode:MODEL",
        "A model of another vocabulary writes text, which is encoded for the target.",
        "a small model and both tokenizers",
    ),
    "synthetic": Method(
        "synthetic:SHAPE@SHARE",
        "For measuring: a draft of that shape whose tokens are right so often (synthetic:llama-3.2-1b@0.8).",
        "a target that counts: random:llama-3.1-8b:counting",
    ),
}
BARE = ("none", "ngram", "suffix", "layerskip")  # can stand without a value
WITH_PATH = ("medusa", "eagle", "reencode")


class Synthetic(NamedTuple):
    """What `synthetic` is asked for."""

    model: str
    share: float  # of tokens that are right

    def __str__(self) -> str:
        return f"{self.model.removeprefix('random:')}@{self.share:g}"


class DraftSpec(NamedTuple):
    """One drafter that was asked for. `value` is what comes after the colon, a model's name, or an object."""

    method: str
    value: Any = None

    @property
    def model(self) -> Any:
        """The model it needs, None where it needs none."""
        if self.method == "synthetic":
            return self.value.model
        return self.value if self.method in ("model", "reencode") else None


def parse_drafts(draft: Any) -> list[DraftSpec]:
    """The drafters of `draft=`, in the order they are tried; nothing for plain decoding.

    Text may name several with commas; a list may hold backends and drafters, too.
    """
    if draft is None:
        return []
    if isinstance(draft, str):
        path = draft.partition(":")[2] if draft.partition(":")[0] in WITH_PATH else draft
        whole = _exists(path)  # a path may have commas of its own
        specs = [_parse(part.strip()) for part in ([draft] if whole else draft.split(","))]
    elif isinstance(draft, (list, tuple)):
        specs = [_parse(part) if isinstance(part, str) else parse_drafts(part)[0] for part in draft]
    elif isinstance(draft, os.PathLike):
        specs = [DraftSpec("model", draft)]
    else:
        specs = [DraftSpec("object", draft)]
    if any(spec.method == "none" for spec in specs):
        if len(specs) > 1:
            raise ConfigError("none drafts nothing, so it goes with no other draft; leave it out", param="draft")
        return []
    return specs


def _parse(text: str) -> DraftSpec:
    name, _, value = text.partition(":")
    if text in BARE or (text == "eagle" and not _exists(text)):
        return DraftSpec(text)
    if name == "layerskip":
        if not value.isdecimal() or int(value) < 1:
            raise ConfigError(f"layerskip takes a number of layers, got {text!r}; write layerskip:8", param="draft")
        return DraftSpec(name, int(value))
    if name == "synthetic":
        return DraftSpec(name, _synthetic(text, value))
    if name in BARE and not _exists(text):
        raise ConfigError(f"{name} takes nothing after a colon, got {text!r}; write {name}", param="draft")
    if name in WITH_PATH and not _exists(text):
        if not value:
            needed = METHODS[name].needs
            raise ConfigError(f"{name} needs {needed}; write {METHODS[name].written}", param="draft")
        return DraftSpec(name, value)
    if text in ("", "model"):
        raise ConfigError(
            f"{text!r} names no draft; choose {', '.join(method.written for method in METHODS.values())}", param="draft"
        )
    if name not in ("hf", "pypi") and text not in NAMES and text not in PRESETS and not _exists(text):
        near = get_close_matches(name.lower(), METHODS.keys() - {"model"}, n=1, cutoff=0.7)
        if near:
            raise ConfigError(
                f"{text!r} names no draft; did you mean {METHODS[near[0]].written}? `outrider methods` lists them all",
                param="draft",
            )
    return DraftSpec("model", text)


def _synthetic(text: str, value: str) -> Synthetic:
    shape, _, share = value.partition("@")
    try:
        chance = float(share)
    except ValueError:
        chance = math.nan
    if not shape or not 0.0 <= chance <= 1.0:
        raise ConfigError(
            f"synthetic takes a shape and a share of right tokens, got {text!r}; write synthetic:llama-3.2-1b@0.8",
            param="draft",
        )
    return Synthetic(f"random:{shape}", chance)


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):
        return False
