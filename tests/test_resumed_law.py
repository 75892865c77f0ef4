"""Resumed requests keep the law, and repeat what a seed promises; each known way to get it wrong is seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.backends.mock import MockBackend
from outrider.engine import snapshot
from outrider.engine.engine import Engine
from outrider.engine.snapshot import Snapshot
from outrider.types import Request, SamplingParams

from cases import PROMPT, TARGET, repeatable_seeds
from oracle import SIGNIFICANCE, joint_law, law_p_value

LENGTH = 4
GENERATIONS = 1_000
BATCH = 100


def resumed_outputs(count: int) -> list[list[int]]:
    """Answers of copies, resumed in the engine whose lookups have stored what the original said."""
    outputs: list[list[int]] = []
    engine = Engine.load(MockBackend(TARGET), draft="suffix", width=LENGTH, max_batch=BATCH, threaded=False)
    for first in range(0, count, BATCH):
        tenants = [str(number) for number in range(first, first + BATCH)]  # each has a memory of its own
        asked = [Request(prompt=PROMPT, max_tokens=LENGTH, tenant=tenant) for tenant in tenants]
        # The originals are drafted for, and judged by their noise. One draft for all: others would hide each other.
        engine.generate([replace(request, sampling=SamplingParams(temperature=0.0)) for request in asked])
        originals = engine.open_streams(asked)
        taken = Snapshot.take("in memory", engine.loop.target, list(engine.loop.jobs.values()), engine.clock.now())
        for stream in originals:
            list(stream)
        copies = engine.resume(taken)
        outputs += [[token for event in copy for token in event.tokens] for copy in copies]
    return outputs


def law_of_resumed() -> float:
    law = joint_law(MockBackend(TARGET), PROMPT, SamplingParams(), LENGTH)
    with repeatable_seeds():
        return law_p_value(resumed_outputs(GENERATIONS), law)


@pytest.mark.blind  # the law alone is looked at
def test_an_unseeded_copy_beside_its_original_keeps_the_law() -> None:
    assert law_of_resumed() > SIGNIFICANCE


@pytest.mark.blind
def test_mutation_the_old_noise_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    job, old = snapshot._job, dict[str, int]()

    def remember(data: Any, *rest: Any) -> Any:
        old["seed"] = data["seed"]
        return job(data, *rest)

    monkeypatch.setattr(snapshot, "_job", remember)
    monkeypatch.setattr(snapshot, "fresh_seed", lambda: old["seed"])
    assert law_of_resumed() < SIGNIFICANCE


SEEDED = [{"seed": 5}, {"seed": 5, "choice": 3}, {"seed": 5, "choice": 3, "accept": "rejection"}]


def continues_alike(path: Path, settings: dict[str, Any], draft: str) -> bool:
    """Whether a copy says what the original says, from half of the answer on."""

    def engine() -> Engine:
        return Engine.load(MockBackend(TARGET), draft=draft, width=2, threaded=False)

    whole = engine().generate(PROMPT, max_tokens=40, **settings)
    first = engine()
    stream = first.stream(PROMPT, max_tokens=40, **settings)
    for _ in range(8):
        next(stream)
    first.snapshot(path)
    (copy,) = engine().resume(path)
    list(copy)
    assert copy.result is not None
    return copy.result.token_ids == whole.token_ids


@pytest.mark.parametrize("settings", SEEDED, ids=str)
@pytest.mark.parametrize("draft", ["ngram", "suffix"])
def test_a_seeded_copy_says_what_the_original_says(tmp_path: Path, settings: dict[str, Any], draft: str) -> None:
    assert continues_alike(tmp_path / "one", settings, draft)


def test_mutation_the_choice_is_ignored_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = snapshot.seed_words
    monkeypatch.setattr(snapshot, "seed_words", lambda seed, choice: words(seed, 0))
    assert continues_alike(tmp_path / "one", SEEDED[0], "ngram")
    assert not continues_alike(tmp_path / "one", SEEDED[1], "ngram")


def test_mutation_new_noise_under_coupled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = snapshot.seed_words
    monkeypatch.setattr(snapshot, "seed_words", lambda seed, choice: words(seed + 1, choice))
    assert not continues_alike(tmp_path / "one", SEEDED[0], "ngram")


def test_a_seeded_request_under_rejection_sees_no_other_text() -> None:
    """Its noise may have made that text."""
    engine = Engine.load(MockBackend(TARGET), draft="suffix", width=4, threaded=False)
    settings: dict[str, Any] = {"max_tokens": 12, "seed": 3, "accept": "rejection"}
    first = engine.generate(PROMPT, **settings)
    again = engine.generate(PROMPT, **settings)
    assert again.token_ids == first.token_ids
    assert again.statistics.drafted == first.statistics.drafted
