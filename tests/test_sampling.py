"""Noise, distribution and acceptance on their own, with numpy and with torch arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import array_api_compat.torch as torch_xp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from outrider.errors import BackendError, RequestError
from outrider.sampling import accept
from outrider.sampling.noise import Noise, Stream, seed_words
from outrider.sampling.ops import SamplingOps
from outrider.sampling.warp import build_controls, shape
from outrider.types import Drafts, Scores
from rounds import job

from cases import CONTROLS
from oracle import distribution

LIBRARIES = {"numpy": SamplingOps(np), "torch": SamplingOps(torch_xp)}
both = pytest.mark.parametrize("library", LIBRARIES)


GOLDEN = [[-1682487256, 1931281889, -955180625], [-952337866, 1377277455, 1141714030]]


def words(xp: Any, *pairs: tuple[int, int]) -> Any:
    return xp.asarray(np.asarray(pairs, dtype=np.int32).T.copy())


def positions(xp: Any, *values: int) -> Any:
    return xp.asarray(np.asarray(values, dtype=np.int32))


# ---- noise --------------------------------------------------------------------------------------------------------


@both
def test_noise_integers_are_fixed_for_ever(library: str) -> None:
    """Changing these breaks every seed users wrote down."""
    xp = LIBRARIES[library].xp
    bits = Noise(xp).bits(words(xp, seed_words(42, 0), seed_words(42, 1)), positions(xp, 7, 7), Stream.DRAFT, 3)
    assert bits.tolist() == GOLDEN


def test_numpy_and_torch_noise_are_the_same_integers() -> None:
    rng = np.random.default_rng(0)
    pairs = [seed_words(int(seed), choice) for choice, seed in enumerate(rng.integers(0, 2**62, 50))]
    at = rng.integers(0, 100_000, 50)
    for stream in (Stream.TARGET, Stream.DRAFT, Stream.ACCEPT, Stream.REPLACE):
        ours, theirs = (
            Noise(xp).bits(words(xp, *pairs), positions(xp, *at), stream, 1000).tolist() for xp in (np, torch_xp)
        )
        assert ours == theirs


def test_each_row_depends_on_its_own_key_only() -> None:
    noise = Noise(np)
    pairs, at = [seed_words(s, 0) for s in range(5)], [3, 9, 4, 4, 0]
    streams = np.asarray([0, 1, 2, 3, 0], dtype=np.int32)
    batch = noise.bits(words(np, *pairs), positions(np, *at), streams, 100)
    for row in range(5):
        alone = noise.bits(words(np, pairs[row]), positions(np, at[row]), int(streams[row]), 100)
        assert (alone[0] == batch[row]).all()


NEIGHBOURS = {
    "position": lambda seed, at, stream, choice: (seed, at + 1, stream, choice),
    "stream": lambda seed, at, stream, choice: (seed, at, stream ^ 1, choice),
    "other stream": lambda seed, at, stream, choice: (seed, at, stream ^ 2, choice),
    "seed": lambda seed, at, stream, choice: (seed + 1, at, stream, choice),
    "high seed": lambda seed, at, stream, choice: (seed ^ (1 << 40), at, stream, choice),
    "choice": lambda seed, at, stream, choice: (seed, at, stream, choice + 1),
}


@pytest.mark.parametrize("neighbour", NEIGHBOURS)
@pytest.mark.parametrize("shift", [0, 26])
def test_noise_is_uniform_and_independent_of_its_neighbours(neighbour: str, shift: int) -> None:
    """Pairs of 6-bit pieces (low and high bits) of noise under keys that differ in one thing, and of adjacent ids."""
    noise, width = Noise(np), 64

    def row(seed: int, at: int, stream: int, choice: int) -> Any:
        return noise.bits(words(np, seed_words(seed, choice)), positions(np, at), stream, width)[0]

    keys = list(product(range(20), range(0, 40, 2), (0, 3), (0, 5)))
    here = np.concatenate([row(*key) for key in keys]) >> shift & 63
    there = np.concatenate([row(*NEIGHBOURS[neighbour](*key)) for key in keys]) >> shift & 63
    for first, second in ((here, there), (here[:-1], here[1:])):
        table = np.zeros((64, 64))
        np.add.at(table, (first, second), 1)
        assert stats.chisquare(table.ravel()).pvalue > 1e-6


def test_uniform_never_reaches_an_end_and_gumbel_is_finite() -> None:
    class Extremes(Noise):
        def bits(self, *_: Any) -> Any:
            return np.asarray([[-(2**31), -1, 0, 2**31 - 1]], dtype=np.int32)

    noise = Extremes(np)
    unit = noise._unit(noise.bits())
    assert (unit > 0).all() and (unit < 1).all() and len(set(unit.ravel())) == 4
    assert np.isfinite(noise.gumbel(noise.bits())).all()


def test_gumbel_has_its_distribution() -> None:
    noise = Noise(np)
    sample = noise.gumbel(noise.bits(words(np, seed_words(3, 0)), positions(np, 1), 0, 200_000))[0]
    assert stats.kstest(sample, "gumbel_r").pvalue > 1e-6


@both
@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0, 5.0, 30.0])
def test_pruning_never_changes_the_drawn_token(library: str, spread: float) -> None:
    """At a real vocabulary only contenders get noise: the same token as the full race, flat rows and bans included."""
    ops, rng = LIBRARIES[library], np.random.default_rng(3)
    x = (rng.standard_normal((40, 5000)) * spread).astype(np.float32)
    x[5:15, rng.integers(0, 5000, 4500)] = -np.inf
    x[15] = -np.inf
    x[15, 77] = -3.0
    pairs = [seed_words(seed, 0) for seed in range(40)]
    rows, at = ops.xp.asarray(x), positions(ops.xp, *range(40))
    noise = ops.noise
    bits = noise.bits(words(ops.xp, *pairs), at, Stream.TARGET, 5000)
    full = (rows + noise.gumbel(bits)).argmax(-1).tolist()
    assert noise._draw_from_contenders(rows, bits).tolist() == full
    assert noise.draw(rows, words(ops.xp, *pairs), at, Stream.TARGET).tolist() == full
    assert full[15] == 77
    greedy = ops.xp.asarray(np.zeros((40, 1), dtype=np.float32))
    drawn = noise.draw(rows, words(ops.xp, *pairs), at, Stream.TARGET, greedy)
    assert drawn.tolist() == x.argmax(-1).tolist()


# ---- the target distribution --------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("name", CONTROLS)
def test_every_control_against_its_definition(library: str, name: str) -> None:
    """The distribution a draft row is drawn from, read off `draft`'s probabilities."""
    ops, rng = LIBRARIES[library], np.random.default_rng(5)
    for _ in range(30):
        logits = rng.standard_normal((1, 4)).astype(np.float32) * 2
        one = job(4, [1, 3], [0, 0, 2], accept="rejection", **CONTROLS[name])
        drawn = ops.draft([one], [[3, 0]], ops.xp.asarray(logits))
        expected = distribution(logits[0], one.params, [1, 3], [0, 0, 2, 3, 0])
        np.testing.assert_allclose(np.asarray(drawn.probs)[0], expected, atol=1e-6)


@settings(max_examples=150)
@given(
    size=st.integers(1, 40),
    seed=st.integers(0, 10**6),
    library=st.sampled_from(sorted(LIBRARIES)),
    shape=st.fixed_dictionaries(
        {"temperature": st.sampled_from([0.2, 1.0, 2.0])},
        optional={
            "top_k": st.integers(1, 50),
            "top_p": st.floats(0.01, 0.99),
            "min_p": st.floats(0.0, 1.0),
            "typical_p": st.floats(0.01, 0.99),
            "repetition_penalty": st.floats(0.3, 3.0),
            "presence_penalty": st.floats(-2.0, 2.0),
            "frequency_penalty": st.floats(-2.0, 2.0),
        },
    ),
)
def test_random_combinations_against_the_definition(size: int, seed: int, library: str, shape: dict[str, Any]) -> None:
    ops, rng = LIBRARIES[library], np.random.default_rng(seed)
    logits = rng.standard_normal((1, size)).astype(np.float32) * 2
    history = rng.integers(0, size, 6).tolist()
    one = job(size, history[:2], history[2:], accept="rejection", **shape)
    probs = np.asarray(ops.draft([one], [[]], ops.xp.asarray(logits)).probs)[0]
    expected = distribution(logits[0], one.params, history[:2], history[2:])
    # A limit that falls on a token's edge may round either way: then one token more or less is kept.
    if (np.asarray(probs > 0) == np.asarray(expected > 0)).all():
        np.testing.assert_allclose(probs, expected, atol=2e-6)
    else:
        assert abs(int((probs > 0).sum()) - int((expected > 0).sum())) == 1


@both
def test_ties_go_to_the_lowest_id(library: str) -> None:
    ops = LIBRARIES[library]
    flat = ops.xp.asarray(np.zeros((1, 6), dtype=np.float32))
    one = job(6, accept="rejection", top_k=2)
    assert np.asarray(ops.draft([one], [[]], flat).probs).tolist() == [[0.5, 0.5, 0, 0, 0, 0]]
    nucleus = job(6, accept="rejection", top_p=0.4)
    np.testing.assert_allclose(np.asarray(ops.draft([nucleus], [[]], flat).probs)[0], [1 / 3] * 3 + [0] * 3, atol=1e-6)
    greedy = job(6, temperature=0.0)
    assert ops.draft([greedy], [[]], flat).tokens.tolist() == [0]


@pytest.mark.parametrize("shape_by", [{"top_p": 0.8}, {"typical_p": 0.6}, {"top_k": 900, "top_p": 0.95}])
@both
def test_a_row_is_shaped_the_same_alone_and_among_others(library: str, shape_by: dict[str, Any]) -> None:
    """At a real vocabulary, where a library may split its sums over threads by the number of rows."""
    ops, rng = LIBRARIES[library], np.random.default_rng(1)
    logits = ops.xp.asarray(rng.standard_normal((8, 50_000)).astype(np.float32))
    jobs = [job(50_000, seed=b, **shape_by) for b in range(8)]

    def shaped(rows: slice) -> Any:
        controls = build_controls(ops.xp, None, jobs[rows], [1] * len(jobs[rows]))
        return np.asarray(shape(ops.xp, logits[rows], controls, lambda row: (jobs[row], [])).logits)

    together = shaped(slice(0, 8))
    for row in range(8):
        assert (shaped(slice(row, row + 1))[0] == together[row]).all()


@both
def test_a_fault_in_a_row_nobody_reaches_is_no_fault(library: str) -> None:
    """Rows after a refused draft are of a text that never was."""
    ops = LIBRARIES[library]
    logits = np.zeros((3, 4), dtype=np.float32)
    logits[:, 1] = 5.0
    logits[2] = np.nan
    for drafts, accepted, faults in (([0, 1], 0, 0), ([1, 0], 1, 0), ([1, 1], 2, 1)):
        for rule in ("coupled", "rejection"):
            one = job(4, temperature=0.0, accept=rule)
            verdict = ops.judge([one], Drafts([2], ops.integers(drafts)), Scores([3], ops.xp.asarray(logits)))
            assert verdict.accepted.tolist() == [accepted] and len(verdict.faults) == faults


@both
def test_extreme_temperatures_stay_finite(library: str) -> None:
    ops = LIBRARIES[library]
    logits = ops.xp.asarray(np.asarray([[30.0, 29.0, -80.0]], dtype=np.float32))
    for temperature in (1e-300, 1e-30, 1e-3, 1e5, 1e6):
        probs = np.asarray(ops.draft([job(3, accept="rejection", temperature=temperature)], [[]], logits).probs)
        assert np.isfinite(probs).all() and probs.sum() == pytest.approx(1.0)


@both
@pytest.mark.parametrize("tiny", [{"top_p": 1e-46}, {"typical_p": 1e-50}, {"top_p": 5e-324, "top_k": 3}])
def test_tiny_limits_keep_one_token(library: str, tiny: dict[str, float]) -> None:
    ops = LIBRARIES[library]
    logits = ops.xp.asarray(np.asarray([[0.0, 3.0, 1.0, -9.0]], dtype=np.float32))
    probs = np.asarray(ops.draft([job(4, accept="rejection", **tiny)], [[]], logits).probs)
    assert (probs > 0).sum() == 1 and probs.sum() == 1


@both
def test_a_processor_sees_tokens_and_drafts_and_comes_first(library: str) -> None:
    ops, seen = LIBRARIES[library], []

    def processor(tokens: Sequence[int], row: Any) -> Any:
        seen.append(list(tokens))
        row[2] = row[2] + 50.0
        return row

    logits = ops.xp.asarray(np.zeros((1, 4), dtype=np.float32))
    one = job(4, [1, 3], [2], processors=(processor,), logit_bias={2: -100.0}, temperature=0.0)
    assert ops.draft([one], [[0]], logits).tokens.tolist() == [0]
    assert seen == [[1, 3, 2, 0]]
    assert np.asarray(logits).tolist() == [[0, 0, 0, 0]]  # the model's own row is left alone


@both
@pytest.mark.parametrize(
    ("row", "settings", "error", "message"),
    [
        ([0.0, math.nan, 0.0], {}, BackendError, "NaN"),
        ([0.0, math.nan, 0.0], {"banned": (1,)}, BackendError, "NaN"),
        ([-math.inf] * 3, {}, BackendError, "without finite logits"),
        ([0.0, math.inf, 0.0], {}, BackendError, "without finite logits"),
        ([0.0, 1.0, 2.0], {"banned": (0, 1, 2)}, RequestError, "leave no token"),
        ([0.0, 1.0, 2.0], {"processors": (lambda t, r: r[:1] + r,)}, None, ""),
        ([0.0, 1.0, 2.0], {"processors": (lambda t, r: [1, 2],)}, RequestError, "processor failed"),
        ([0.0, 1.0, 2.0], {"processors": (lambda t, r: 1 / 0,)}, RequestError, "division by zero"),
        ([0.0, 1.0, 2.0], {"processors": (lambda t, r: r[:1],)}, RequestError, r"it returned shape (1,)"),
        ([0.0, 1.0, 2.0], {"processors": (lambda t, r: r * math.nan,)}, RequestError, "processor returned NaN"),
        ([0.0, 1.0, 2.0], {"processors": (lambda t, r: r + math.inf,)}, RequestError, "NaN or infinity"),
    ],
)
def test_faults_name_the_job_and_spare_its_neighbour(
    library: str, row: list[float], settings: dict[str, Any], error: type[Exception] | None, message: str
) -> None:
    ops = LIBRARIES[library]
    good = [0.0, 9.0, 0.0]
    logits = ops.xp.asarray(np.asarray([good, row, good], dtype=np.float32))
    jobs = [job(3, temperature=0.0), job(3, temperature=0.0, **settings), job(3, temperature=0.0)]
    verdicts = ops.judge(jobs, Drafts([0, 0, 0], ops.integers([])), Scores([1, 1, 1], logits))
    assert verdicts.next.tolist()[::2] == [1, 1]
    if error is None:
        assert verdicts.faults == {}
    else:
        assert list(verdicts.faults) == [1]
        assert type(verdicts.faults[1]) is error and message in verdicts.faults[1].message


# ---- acceptance ---------------------------------------------------------------------------------------------------


@both
def test_layout(library: str) -> None:
    ops = LIBRARIES[library]
    layout = accept.build_layout(ops.xp, None, [2, 0, 1], [3, 1, 1])  # the last job has no bonus row
    assert layout.first.tolist() == [0, 3, 4]
    assert layout.last.tolist() == [2, 3, 4]
    assert layout.judge.tolist() == [0, 1, 4]
    assert layout.inside.tolist() == [[True, True, False], [False] * 3, [True, False, False]]
    keep = ops.xp.asarray(np.asarray([True, False, True]))
    assert accept.leading(ops.xp, keep, layout).tolist() == [1, 0, 1]
    assert accept.leading(ops.xp, ~keep, layout).tolist() == [0, 0, 0]


@both
def test_a_token_the_target_rules_out_is_never_kept(library: str) -> None:
    """p(x) = 0 under both rules and for sampled and certain drafts; q(x) = 0 does not divide."""
    ops = LIBRARIES[library]
    logits = ops.xp.asarray(np.asarray([[0.0, -np.inf, 0.0]] * 2, dtype=np.float32))
    for rule in ("rejection", "coupled"):
        for probs in (None, [[0.0, 1.0, 0.0]], [[0.5, 0.0, 0.5]]):
            for seed in range(50):
                one = job(3, seed=seed, accept=rule)
                rows = None if probs is None else ops.xp.asarray(np.asarray(probs, dtype=np.float32))
                verdict = ops.judge([one], Drafts([1], ops.integers([1]), rows), Scores([2], logits))
                assert verdict.accepted.tolist() == [0] and verdict.next.tolist()[0] in (0, 2)


@both
def test_a_residual_without_mass_falls_back_to_the_target(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding may refuse a draft where p and q are equal: nothing is left of p - q, so p itself is drawn from."""
    ops = LIBRARIES[library]
    monkeypatch.setattr(accept, "kept", lambda uniform, target, draft: target < 0)
    logits = ops.xp.asarray(np.zeros((2, 2), dtype=np.float32))
    row = ops.xp.asarray(np.asarray([[0.5, 0.5]], dtype=np.float32))
    drawn = []
    for seed in range(400):
        one = job(2, seed=seed, accept="rejection")
        verdict = ops.judge([one], Drafts([1], ops.integers([1]), row), Scores([2], logits))
        drawn += verdict.next.tolist()
    assert 0.4 < sum(drawn) / len(drawn) < 0.6


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), jobs=st.integers(1, 6), vocab=st.integers(2, 30))
def test_numpy_and_torch_judge_alike(seed: int, jobs: int, vocab: int) -> None:
    """Random batches of mixed rules, settings and lengths: the same verdicts from both libraries."""
    rng = np.random.default_rng(seed)
    shapes = [{}, {"temperature": 0.0}, {"top_p": 0.8, "temperature": 0.7}, {"repetition_penalty": 1.4, "top_k": 3}]
    batch = [
        job(vocab, [1, 0], seed=seed + b, accept=str(rng.choice(["rejection", "coupled"])), **shapes[rng.integers(4)])
        for b in range(jobs)
    ]
    counts = rng.integers(0, 4, jobs).tolist()
    rows = [count + 1 for count in counts]
    tokens = rng.integers(0, vocab, sum(counts)).tolist()
    probs = rng.dirichlet(np.ones(vocab), sum(counts)).astype(np.float32)
    logits = rng.standard_normal((sum(rows), vocab)).astype(np.float32) * 2
    verdicts = [
        ops.judge(
            batch,
            Drafts(counts, ops.integers(tokens), ops.xp.asarray(probs)),
            Scores(rows, ops.xp.asarray(logits)),
        )
        for ops in LIBRARIES.values()
    ]
    assert verdicts[0].accepted.tolist() == verdicts[1].accepted.tolist()
    assert verdicts[0].next.tolist() == verdicts[1].next.tolist()


def test_drafts_travel_between_libraries() -> None:
    ours, theirs = LIBRARIES["numpy"], LIBRARIES["torch"]
    there = theirs.adopt(Drafts([2], ours.integers([1, 0]), np.asarray([[0.5, 0.5], [1.0, 0.0]])))
    assert isinstance(there.tokens, torch.Tensor) and there.probs.dtype == torch.float32
    back = ours.adopt(there)
    assert isinstance(back.tokens, np.ndarray) and back.probs.tolist() == [[0.5, 0.5], [1.0, 0.0]]


@pytest.mark.parametrize("seed", range(40))
def test_a_long_row_is_ranked_as_a_short_one_would_be(seed: int) -> None:
    """The pruned ranking keeps exactly what the whole sort keeps: flat rows, peaked rows, ties, banned tokens."""
    from outrider.sampling import warp

    rng = np.random.default_rng(seed)
    x = rng.standard_normal((3, 3000)).astype(np.float32) * rng.choice([0.0, 0.01, 1.0, 6.0, 40.0])
    if seed % 3 == 0:
        x = np.round(x)  # many ties
    if seed % 4 == 0:
        x[:, rng.integers(0, 3000, 2900)] = -np.inf
    x -= x.max(axis=-1, keepdims=True)
    top_k = np.array([[math.inf], [rng.integers(1, 3500)], [40.0]], dtype=np.float32)
    top_p = np.array([[rng.uniform(0.01, 0.999)], [2.0], [0.5]], dtype=np.float32)
    pruned = warp._keep_ranked(np, x, top_k, top_p)
    order = np.argsort(-x, axis=-1, stable=True)
    ranked = np.take_along_axis(x, order, axis=-1)
    ranked = np.where(np.arange(3000) < top_k, ranked, -np.inf)
    assert (pruned == warp._keep_mass(np, x, order, ranked, top_p)).all()
