"""The joint law of the emitted tokens, against the law enumerated from the mock's definition.

A representative part runs with `make test`, the whole grid with `make proofs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from outrider.backends.mock import MockBackend
from outrider.backends.paged_mock import PagedMock
from outrider.config import SchedulerConfig, SpeculationConfig
from outrider.draft.base import Drafter
from outrider.draft.model import ModelDrafter
from outrider.draft.run_ahead import RunAheadDrafter
from outrider.engine.engine import Engine
from outrider.kv.pages import Pages
from outrider.sampling import noise
from outrider.sched.policies import Policy
from outrider.types import Job, Request, SamplingParams

from cases import CONTROLS, LENGTH, PROMPT, TARGET, Case, grid, measure, repeatable_seeds
from oracle import SIGNIFICANCE, joint_law, law_p_value

GENERATIONS = 50_000
TREES = 20_000  # a round of theirs takes longer
GRID = grid()
QUICK = (
    "plain",
    "model-k5-rejection",
    "model-together-rejection",
    "no-rewind-model-rejection",
)
QUICK_TREES = ("model-tree8-rejection", "trees-tree-together-rejection")


@pytest.mark.slow
@pytest.mark.parametrize("name", GRID)
def test_joint_law(name: str) -> None:
    case = GRID[name]
    assert measure(case, GENERATIONS if case.tree is False else TREES) > SIGNIFICANCE


@pytest.mark.parametrize("name", [*QUICK, *QUICK_TREES])
def test_a_taste_of_the_grid(name: str) -> None:
    """More generations than show a mutation; `make proofs` has the rest of the grid, with more."""
    assert measure(GRID[name], 6_000 if GRID[name].tree else 8_000) > SIGNIFICANCE


@pytest.mark.parametrize("count", [2_000, pytest.param(GENERATIONS, marks=pytest.mark.slow)])
def test_a_batch_of_different_settings_keeps_every_law(count: int) -> None:
    """Requests with different controls, rules and widths share every pass; each follows its own law."""
    mixed = [
        Case("a", rule="rejection", width=5, controls={"temperature": 0.7, "top_p": 0.8}),
        Case("b", rule="coupled", width=2, controls=CONTROLS["together"]),
        Case("c", rule="rejection", width=1, controls=CONTROLS["together"]),
        Case("d", rule="rejection", width=0),
        Case("e", rule="coupled", width=5, controls={"repetition_penalty": 1.5, "min_p": 0.2}),
        Case("f", rule="rejection", width=3, controls={"temperature": 0.0, "typical_p": 0.5}),
    ]
    every_law_holds(mixed, mixed[0].engine(), count)


EVERYBODY = "ngram,suffix,trees,mixed,model"
MIXED = [
    Case("chain", rule="rejection", width=5, method="model", controls={"temperature": 0.7, "top_p": 0.8}),
    Case("tree", rule="rejection", width=8, method="model", tree=True),
    Case("coupled", rule="coupled", width=8, method="model", tree=True, controls=CONTROLS["together"]),
    Case("certain", rule="rejection", width=7, method="trees", tree=True, controls={"repetition_penalty": 1.5}),
    Case("both", rule="rejection", width=16, method="mixed", tree=True, controls={"top_k": 3}),
    Case("lookup", rule="rejection", width=8, method="ngram", tree=True, controls={"min_p": 0.1}),
    Case("past", rule="rejection", width=6, method="suffix", tree=True),
    Case("nobody", rule="rejection", width=4, method="none"),
    Case("plain", rule="coupled", width=0, controls=CONTROLS["frequency"]),
    Case("anybody", EVERYBODY, rule="rejection", width=8, tree=True),
    Case("in turn", rule="rejection", width=6, method="mixed,ngram", tree=True, controls={"top_p": 0.9}),
    Case("free", rule="rejection", width=None, tree=None, controls=CONTROLS["together"]),
    Case("greedy", rule="rejection", width=5, method="model", tree=True, controls={"temperature": 0.0}),
]


@pytest.mark.parametrize("count", [1_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_batch_of_different_methods_keeps_every_law(count: int) -> None:
    """Chains and trees of every drafter, fixed widths and free ones, both rules and all kinds of controls together."""
    every_law_holds(MIXED, Case("all", EVERYBODY, width=None).engine(), count)


@pytest.mark.slow
@pytest.mark.parametrize("arrays", ["numpy", "torch"])
def test_every_control_in_one_batch_of_trees(arrays: str) -> None:
    mixed = [
        Case(f"{method}-{name}", rule=rule, width=8, method=method, tree=True, controls=controls)
        for index, (name, controls) in enumerate(CONTROLS.items())
        for method, rule in [
            (("model", "mixed", "trees")[index % 3], "rejection"),
            (("model", "mixed", "trees")[(index + 1) % 3], ("rejection", "coupled")[index % 2]),
        ]
    ]
    every_law_holds(mixed, Case("all", EVERYBODY, arrays=arrays, draft_arrays=arrays).engine(), 5_000)


def every_law_holds(cases: Sequence[Case], engine: Engine, count: int) -> None:
    """`count` requests of each case, side by side."""
    requests: list[Request] = []
    for together in zip(*(case.requests(count, seed) for seed, case in enumerate(cases)), strict=True):
        requests += together
    with repeatable_seeds():
        results = engine.generate(requests)
    for index, case in enumerate(cases):
        outputs = [result.token_ids for result in results[index :: len(cases)]]
        assert case.p_value(outputs) > SIGNIFICANCE, case


@pytest.mark.parametrize("rule", ["rejection", pytest.param("coupled", marks=pytest.mark.slow)])
def test_the_race_of_contenders_keeps_the_law(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large vocabularies draw from contenders only; here a small one is made to."""
    monkeypatch.setattr(noise, "PRUNED", 0)
    assert measure(Case("pruned", width=2, rule=rule), 8_000) > SIGNIFICANCE


@pytest.mark.slow
def test_suffixes_of_answers_before() -> None:
    """One request after another, each of which may say what the tenant's past ones said."""
    case = Case("past", draft="suffix", width=5, max_batch=1)
    engine = case.engine()
    with repeatable_seeds():
        outputs = [engine.generate(request).token_ids for request in case.requests(10_000)]
    assert engine.loop.statistics.accepted > 2_000
    assert case.p_value(outputs) > SIGNIFICANCE


@pytest.mark.parametrize(("tree", "count"), [(False, 3_000), pytest.param(True, 6_000, marks=pytest.mark.slow)])
def test_one_seed_again_and_again_under_rejection(tree: bool, count: int) -> None:
    """Past text may not come from the noise that judges it: the fourth answer to the same request follows the law, too.

    A tenant for each seed, so that nothing but the answers of the same seed can be found.
    """
    case, seeded = Case("again", draft="suffix", width=5, tree=tree), SamplingParams(seed=5, accept="rejection")
    engine = case.engine()
    requests = [replace(one, tenant=str(one.choice), sampling=seeded) for one in case.requests(count)]
    for _ in range(4):
        outputs = [result.token_ids for result in engine.generate(requests)]
    assert case.p_value(outputs) > SIGNIFICANCE


def test_different_seeds_draw_from_the_law_too() -> None:
    """The grid varies the choice index under one seed; here every generation has a seed of its own, 0, 1, 2, ..."""
    case = Case("seeds", width=3)
    requests = [
        Request(prompt=PROMPT, sampling=SamplingParams(seed=seed, accept="rejection"), max_tokens=LENGTH)
        for seed in range(8_000)
    ]
    outputs = [result.token_ids for result in case.engine().generate(requests)]
    law = joint_law(MockBackend(TARGET), PROMPT, SamplingParams(), LENGTH)
    assert law_p_value(outputs, law) > SIGNIFICANCE


class Tight(Policy):
    """Lets jobs in as soon as they fit, so that they get into each other's way."""

    def reserve(self, job: Job) -> int:
        return len(job.tokens) + 1


@pytest.mark.parametrize(
    ("num_pages", "preempt", "run_ahead"),
    [
        pytest.param(30, "recompute", False, id="recompute"),
        pytest.param(30, "swap", False, id="swap", marks=pytest.mark.slow),
        pytest.param(200, "recompute", True, id="run-ahead", marks=pytest.mark.slow),
    ],
)
def test_the_law_of_a_busy_engine(num_pages: int, preempt: Any, run_ahead: bool) -> None:
    """Pages run out all the time, or the draft works while the target judges: the law is that of plain decoding."""
    pages = Pages(num_pages, 2)
    config = SchedulerConfig(max_batch=16, policy=Tight(), preempt=preempt)
    requests = [
        Request(prompt=PROMPT, sampling=SamplingParams(seed=seed, accept="rejection"), max_tokens=LENGTH)
        for seed in range(6_000)
    ]
    target, draft = PagedMock(TARGET, pages), PagedMock(replace(TARGET, drift=0.6), pages)
    speculation = SpeculationConfig(width=2)
    drafter: Drafter = ModelDrafter(draft, shares_slots=True)
    ahead = RunAheadDrafter(drafter, target.ops, always=True) if run_ahead else None
    with Engine(target, [ahead or drafter], scheduling=config, speculation=speculation) as engine:
        outputs = [result.token_ids for result in engine.generate(requests)]
        assert engine.statistics.preemptions > 1_000 or num_pages > 30
        assert ahead is None or ahead.overlap.fresh > 500
    law = joint_law(MockBackend(TARGET), PROMPT, SamplingParams(), LENGTH)
    assert law_p_value(outputs, law) > SIGNIFICANCE
