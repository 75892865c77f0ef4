"""Sampling in native code against the reference in numpy: the same verdicts, tokens and probabilities."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from outrider.errors import BackendError, RequestError
from outrider.native import sampling
from outrider.native.library import why_not
from outrider.native.sampling import NativeSampling
from outrider.sampling.noise import Noise, Stream, seed_words
from outrider.sampling.ops import SamplingOps
from outrider.sampling.warp import build_controls
from outrider.types import Drafts, Scores
from rounds import REFERENCE, SETTINGS, Round, job

from cases import CONTROLS, Case, measure

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture(scope="module")
def native() -> NativeSampling:
    return NativeSampling()


@pytest.mark.parametrize("size", [2, 3, 127, 128, 129, 1000, 1025, 5003])
def test_verdicts_are_the_reference_s(native: NativeSampling, size: int) -> None:
    settings = SETTINGS if size > 2 else SETTINGS[:-1]
    for seed in range(60):
        batch = Round(seed * 100 + size, size, settings)
        assert batch.told(batch.judge(native)) == batch.told(batch.judge(REFERENCE)), (seed, size)


@pytest.mark.parametrize("size", [49_152, 49_157])
@pytest.mark.parametrize("settings", SETTINGS)
def test_verdicts_at_a_real_vocabulary(native: NativeSampling, size: int, settings: dict[str, Any]) -> None:
    for seed in range(2):
        batch = Round(seed + size, size, [settings])
        assert batch.told(batch.judge(native)) == batch.told(batch.judge(REFERENCE)), seed


@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0, 5.0, 30.0])
def test_draws_are_the_reference_s(native: NativeSampling, spread: float) -> None:
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((60, 5001)) * spread).astype(np.float32)
    x[5:15, rng.integers(0, 5001, 4500)] = -np.inf
    x[15] = -np.inf
    x[15, 77] = -3.0
    words = np.asarray([seed_words(seed, 0) for seed in range(60)], dtype=np.int32).T.copy()
    positions = np.arange(60, dtype=np.int32)
    for stream in (Stream.TARGET, np.arange(60, dtype=np.int32) % 4):
        expected = Noise(np).draw(x, words, positions, stream)
        assert native.noise.draw(x, words, positions, stream).tolist() == expected.tolist()
    greedy = np.asarray([[index % 2] for index in range(60)], dtype=np.float32)
    expected = Noise(np).draw(x, words, positions, Stream.TARGET, greedy)
    assert native.noise.draw(x, words, positions, Stream.TARGET, greedy).tolist() == expected.tolist()


@pytest.mark.parametrize("settings", [*SETTINGS[:-1], *CONTROLS.values()])
def test_drafts_and_shaped_rows_are_the_reference_s(native: NativeSampling, settings: dict[str, Any]) -> None:
    rng = np.random.default_rng(2)
    logits = (rng.standard_normal((5, 3001)) * 3).astype(np.float32)
    jobs = [job(3001, seed=s, accept="coupled" if s == 2 else "rejection", **settings) for s in range(4)]
    jobs.append(job(3001, seed=4, temperature=0.0))
    drafted: list[list[int]] = [[], [3], [5, 6], [], []]
    ours, theirs = (ops.draft(jobs, drafted, logits) for ops in (native, REFERENCE))
    assert ours.tokens.tolist() == theirs.tokens.tolist() and ours.faults == theirs.faults == {}
    assert (ours.probs is None) == (theirs.probs is None)
    if theirs.probs is not None:
        assert ((ours.probs > 0) == (theirs.probs > 0)).all()
        np.testing.assert_allclose(ours.probs, theirs.probs, rtol=5e-6, atol=1e-30)
    children = [ops.draft_rows(jobs, drafted, logits).draw([3, 1, 2, 3, 2]) for ops in (native, REFERENCE)]
    assert children[0].tokens == children[1].tokens and children[0].rows == children[1].rows


@pytest.mark.parametrize("counts", [[2, 2, 2], [1, 2, 0]])
def test_what_is_drawn_step_by_step(native: NativeSampling, counts: list[int]) -> None:
    """The tokens and rows of drafts that are drawn one at a time."""
    logits = np.random.default_rng(2).standard_normal((2, 3, 301)).astype(np.float32) * 3
    jobs = [job(301, seed=1, accept="rejection"), job(301, seed=2, accept="coupled"), job(301, temperature=0.0)]
    drawing = native.drawing(jobs, 2)
    assert drawing is not None
    first = native.draft(jobs, [[]] * 3, logits[0])
    assert drawing.step(logits[0]).tolist() == first.tokens.tolist()
    second = native.draft(jobs, [[token] for token in first.tokens.tolist()], logits[1])
    assert drawing.step(logits[1]).tolist() == second.tokens.tolist()
    tokens, probs = drawing.result(counts)
    wanted = [(one, index) for index, count in enumerate(counts) for one in (first, second)[:count]]
    assert tokens.tolist() == [int(one.tokens[index]) for one, index in wanted]
    assert np.array_equal(probs, np.stack([one.probs[index] for one, index in wanted]))
    assert native.drawing([job(301, typical_p=0.5)], 2) is None
    assert native.drawing([job(301, repetition_penalty=1.2)], 2) is None


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_row_does_not_depend_on_its_neighbours(native: NativeSampling, settings: dict[str, Any]) -> None:
    """The same bits alone, among others, and in every order."""
    logits = np.random.default_rng(1).standard_normal((6, 20_011)).astype(np.float32) * 2
    jobs = [job(20_011, seed=b, accept="rejection", **settings) for b in range(6)]

    def probabilities(rows: Sequence[int]) -> Any:
        some = [jobs[row] for row in rows]
        drawn = native.draft(some, [[]] * len(rows), logits[list(rows)])
        controls = build_controls(np, None, some, [1] * len(some))
        shaped = native._shape(some, logits[list(rows)], controls, lambda row: (some[row], []))
        return drawn.tokens, shaped.logits if drawn.probs is None else np.stack([drawn.probs, shaped.logits], axis=1)

    tokens, together = probabilities(range(6))
    for order in ([3], [5, 4, 3, 2, 1, 0], [2, 2]):
        some, rows = probabilities(order)
        assert some.tolist() == tokens[order].tolist() and (rows == together[order]).all()


def test_ties_go_to_the_lowest_id(native: NativeSampling) -> None:
    flat = np.zeros((1, 300), dtype=np.float32)
    drawn = native.draft([job(300, accept="rejection", top_k=200)], [[]], flat)
    assert (drawn.probs[0] > 0).tolist() == [True] * 200 + [False] * 100
    flat[0, 250:] = 1.0
    assert native.draft([job(300, temperature=0.0)], [[]], flat).tokens.tolist() == [250]


@pytest.mark.parametrize(
    ("row", "settings", "error", "message"),
    [
        ([0.0, math.nan, 0.0], {}, BackendError, "NaN"),
        ([0.0, math.nan, 0.0], {"banned": (1,)}, BackendError, "NaN"),
        ([-math.inf] * 3, {}, BackendError, "without finite logits"),
        ([0.0, math.inf, 0.0], {"top_p": 0.5}, BackendError, "without finite logits"),
        ([0.0, 1.0, 2.0], {"banned": (0, 1, 2)}, RequestError, "leave no token"),
        ([0.0, 1.0, 2.0], {"processors": (lambda t, r: 1 / 0,)}, RequestError, "division by zero"),
        ([0.0, math.nan, 0.0], {"typical_p": 0.5}, BackendError, "NaN"),
    ],
)
def test_faults_name_the_job_and_spare_its_neighbour(
    native: NativeSampling, row: list[float], settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    good = [0.0, 90.0, 0.0]
    logits = np.asarray([good, row, good])  # float64 on purpose
    jobs = [job(3), job(3, **settings), job(3)]
    verdicts = native.judge(jobs, Drafts([0, 0, 0], native.integers([])), Scores([1, 1, 1], logits))
    assert verdicts.next.tolist()[::2] == [1, 1] and list(verdicts.faults) == [1]
    assert type(verdicts.faults[1]) is error and message in verdicts.faults[1].message
    drawn = native.draft(jobs, [[], [], []], logits)
    assert drawn.tokens.tolist()[::2] == [1, 1] and list(drawn.faults) == [1]


@pytest.mark.parametrize(
    "case",
    [
        Case("chain", "model", 5, "rejection", CONTROLS["together"]),
        Case("coupled", "model", 2, "coupled", {"top_p": 0.7}),
        Case("certain", "scripted", 5, "rejection", {"min_p": 0.3}),
        Case("mixed tree", "mixed", 8, "rejection", tree=True),
        Case("model tree", "model", 8, "rejection", {"top_k": 3}, tree=True),
    ],
    ids=lambda case: case.name,
)
def test_the_law_holds(native: NativeSampling, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.backends.mock.SamplingOps", lambda xp, device: NativeSampling())
    assert measure(case, 1500) > 1e-4


def test_a_cpu_samples_by_native_code_where_that_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(sampling.cpu_sampling()) is NativeSampling
    monkeypatch.setattr(sampling, "why_not", lambda: "there is no compiler")
    assert type(sampling.cpu_sampling()) is SamplingOps


def test_chains_are_trees_without_branches() -> None:
    chance = random.Random(0)
    for _ in range(200):
        counts = [chance.randint(0, 6) for _ in range(chance.randint(1, 9))]
        rows = [count + 1 - (count > 0 and chance.random() < 0.2) for count in counts]  # some without a bonus row
        made = [sampling._chains(counts, rows), sampling._trees(Drafts(counts, None), rows)]
        assert made[0].nodes.tolist() == made[1].nodes.tolist() and made[0].roots.tolist() == made[1].roots.tolist()
        assert made[0].rows == made[1].rows and made[0].parents == made[1].parents
