"""The joint law of the emitted tokens, against the law enumerated from the mock's definition.

A representative part runs with `make test`, the whole grid with `make proofs`.
"""

from __future__ import annotations

import pytest

from outrider.backends.mock import MockBackend
from outrider.sampling import noise
from outrider.types import Request, SamplingParams

from cases import CONTROLS, LENGTH, PROMPT, TARGET, Case, grid, measure
from oracle import SIGNIFICANCE, joint_law, law_p_value

GENERATIONS = 50_000
GRID = grid()
QUICK = {
    "plain",
    "model-k1-rejection",
    "model-k5-rejection",
    "model-k5-coupled",
    "scripted-k2-rejection",
    "model-top_p-rejection",
    "scripted-repetition-rejection",
    "model-together-rejection",
    "scripted-together-rejection",
    "model-together-coupled",
    "no-rewind-model-rejection",
    "no-rewind-scripted-rejection",
    "torch-rejection",
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in GRID])
def test_joint_law(name: str) -> None:
    assert measure(GRID[name], GENERATIONS) > SIGNIFICANCE


def test_a_batch_of_different_settings_keeps_every_law() -> None:
    """Requests with different controls, rules and widths share every pass; each follows its own law."""
    mixed = [
        Case("a", rule="rejection", width=5, controls={"temperature": 0.7, "top_p": 0.8}),
        Case("b", rule="coupled", width=2, controls=CONTROLS["together"]),
        Case("c", rule="rejection", width=1, controls=CONTROLS["together"]),
        Case("d", rule="rejection", width=0),
        Case("e", rule="coupled", width=5, controls={"repetition_penalty": 1.5, "min_p": 0.2}),
        Case("f", rule="rejection", width=3, controls={"temperature": 0.0, "typical_p": 0.5}),
    ]
    requests: list[Request] = []
    for together in zip(*(case.requests(GENERATIONS, seed) for seed, case in enumerate(mixed)), strict=True):
        requests += together
    results = mixed[0].engine().generate(requests)
    for index, case in enumerate(mixed):
        outputs = [result.token_ids for result in results[index :: len(mixed)]]
        assert case.p_value(outputs) > SIGNIFICANCE, case


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_the_race_of_contenders_keeps_the_law(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large vocabularies draw from contenders only; here a small one is made to."""
    monkeypatch.setattr(noise, "PRUNED", 0)
    assert measure(Case("pruned", width=2, rule=rule), GENERATIONS) > SIGNIFICANCE


def test_different_seeds_draw_from_the_law_too() -> None:
    """The grid varies the choice index under one seed; here every generation has a seed of its own, 0, 1, 2, ..."""
    case = Case("seeds", width=3)
    requests = [
        Request(prompt=PROMPT, sampling=SamplingParams(seed=seed, accept="rejection"), max_tokens=LENGTH)
        for seed in range(GENERATIONS)
    ]
    outputs = [result.token_ids for result in case.engine().generate(requests)]
    law = joint_law(MockBackend(TARGET), PROMPT, SamplingParams(), LENGTH)
    assert law_p_value(outputs, law) > SIGNIFICANCE
