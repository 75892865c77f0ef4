"""Trees by themselves: who is whose child, both rules on them, and children drawn from a row.

The references here are written for reading, in float64, one child after another.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import array_api_compat.torch as torch_arrays
import numpy as np
import pytest
from scipy import stats

from outrider.backends.mock import MockBackend
from outrider.config import MockConfig
from outrider.engine.engine import Engine
from outrider.sampling.accept import build_layout, match, reject
from outrider.sampling.branch import DraftRows
from outrider.sampling.noise import Noise, Stream, seed_words
from outrider.sampling.ops import SamplingOps
from outrider.sampling.tree import TreeLayout, build_tree_layout, match_tree, path_to, reject_tree
from outrider.sampling.warp import softmax
from outrider.types import Job, Request, SamplingParams

from oracle import SIGNIFICANCE

VOCAB = 4
ARRAYS = {"numpy": np, "torch": torch_arrays}


def random_parents(dice: random.Random, size: int) -> list[int]:
    return [dice.randrange(-1, node) for node in range(size)]


def children_of(parents: Sequence[int], node: int) -> list[int]:
    return [child for child, parent in enumerate(parents) if parent == node]


def words_for(jobs: int, rows: Sequence[int]) -> np.ndarray:
    """A seed for every job, once for each of its rows."""
    words = np.asarray([seed_words(9, job) for job in range(jobs)], dtype=np.int32)
    return np.repeat(words, rows, axis=0).T.copy()


# ---- who is whose child ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_the_layout(seed: int) -> None:
    dice = random.Random(seed)
    trees = [random_parents(dice, dice.randint(0, 12)) for _ in range(dice.randint(1, 5))]
    layout = build_tree_layout(np, None, trees)
    row = draft = 0
    for job, parents in enumerate(trees):
        root = row
        assert layout.first[job] == root
        depth = {-1: 0}
        for node in range(-1, len(parents)):
            siblings = children_of(parents, parents[node]) if node >= 0 else [-1]
            if node >= 0:
                depth[node] = depth[parents[node]] + 1
                assert layout.draft[row] == draft
                assert layout.parent[row] == root + 1 + parents[node]
                draft += 1
            rank = siblings.index(node)
            own = children_of(parents, node)
            later = siblings[rank + 1 : rank + 2]
            assert layout.owner[row] == job and layout.depth[row] == depth[node] and layout.rank[row] == rank
            assert layout.child[row] == (root + 1 + own[0] if own else -1)
            assert layout.sibling[row] == (root + 1 + later[0] if later else -1)
            line = path_to(layout, row, root)
            assert line[-1:] == ([node] if node >= 0 else []) and len(line) == depth[node]
            assert all(parents[child] == above for above, child in itertools.pairwise([-1, *line]))
            row += 1


def most_judged(parents: Sequence[int], node: int = -1) -> int:
    """The most children that can be judged from a node on: all but the last refused, or one kept and so on."""
    children = children_of(parents, node)
    return max([place + 1 + most_judged(parents, child) for place, child in enumerate(children)], default=0)


@pytest.mark.parametrize("seed", range(20))
def test_steps_are_enough_for_the_worst_way_through_a_tree(seed: int) -> None:
    dice = random.Random(seed)
    trees = [random_parents(dice, dice.randint(1, 14)) for _ in range(3)]
    assert build_tree_layout(np, None, trees).steps == max(map(most_judged, trees))


@pytest.mark.parametrize(
    ("parents", "steps"), [([], 0), ([-1] * 6, 6), ([-1, 0, 1, 2], 4), ([-1, -1, -1, 2, 2, 2], 6), ([-1, 0, 0, -1], 3)]
)
def test_steps(parents: list[int], steps: int) -> None:
    assert build_tree_layout(np, None, [parents]).steps == steps


# ---- both rules, against references ------------------------------------------------------------------------------


class Round(NamedTuple):
    """Trees of some jobs with the rows that judge them."""

    trees: list[list[int]]
    tokens: np.ndarray  # [N]
    probs: np.ndarray | None  # [N, V]
    x: np.ndarray  # [R, V] shaped logits
    layout: TreeLayout
    words: np.ndarray  # [2, R]
    positions: np.ndarray  # [R]

    def arguments(self, xp: Any) -> list[Any]:
        """For `reject_tree` in an array library."""
        probs = None if self.probs is None else xp.asarray(self.probs)
        layout = build_tree_layout(xp, None, self.trees)
        words, positions = xp.asarray(self.words), xp.asarray(self.positions)
        return [xp.asarray(self.x), xp.asarray(self.tokens), probs, layout, Noise(xp), words, positions]


def rows_of(generator: np.random.Generator, count: int, zeros: float) -> np.ndarray:
    """Distributions of which some entries are zero. [count, V]"""
    rows = generator.dirichlet([0.7] * VOCAB, size=count)
    rows[generator.random(rows.shape) < zeros] = 0.0
    rows[np.arange(count), generator.integers(VOCAB, size=count)] += 0.05
    return (rows / rows.sum(-1, keepdims=True)).astype(np.float32)


def random_round(seed: int, kind: str) -> Round:
    """Certain drafts, sampled ones, or both. Tokens may have p = 0 or q = 0, and siblings may be the same."""
    dice, generator = random.Random(seed), np.random.default_rng(seed)
    trees = [random_parents(dice, dice.randint(0 if job else 3, 10)) for job in range(40)]
    layout = build_tree_layout(np, None, trees)
    num_drafts = sum(map(len, trees))
    tokens = generator.integers(VOCAB, size=num_drafts)
    probs = None
    if kind != "certain":
        probs = rows_of(generator, num_drafts, 0.2)
        hot = generator.random(num_drafts) < (0.4 if kind == "mixed" else 0.0)
        probs[hot] = np.eye(VOCAB, dtype=np.float32)[tokens[hot]]
    with np.errstate(divide="ignore"):
        x = np.log(rows_of(generator, len(layout.owner), 0.3))
    starts = generator.integers(1, 50, size=len(trees)).astype(np.int32)
    words = words_for(len(trees), [len(tree) + 1 for tree in trees])
    return Round(trees, tokens, probs, x, layout, words, starts[layout.owner] + layout.depth)


def match_one(parents: Sequence[int], tokens: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The path of the target's own tokens."""
    path: list[int] = []
    while True:
        node = path[-1] if path else -1
        following = [child for child in children_of(parents, node) if tokens[child] == chosen[node + 1]]
        if not following:
            return path
        path.append(following[0])


@pytest.mark.parametrize("arrays", ARRAYS)
def test_matching_follows_the_targets_own_tokens(arrays: str) -> None:
    xp, lengths = ARRAYS[arrays], set()
    for seed in range(10):
        case = random_round(seed, "certain")
        chosen = np.random.default_rng(seed).integers(VOCAB, size=len(case.x))
        layout = build_tree_layout(xp, None, case.trees)
        ruling = match_tree(xp, xp.asarray(chosen), xp.asarray(case.tokens), layout)
        first = draft = 0
        for job, parents in enumerate(case.trees):
            size = len(parents)
            path = match_one(parents, case.tokens[draft : draft + size], chosen[first : first + size + 1])
            assert path_to(layout, int(ruling.rows[job]), first) == path
            assert ruling.next[job] == chosen[int(ruling.rows[job])]
            lengths.add(len(path))
            first, draft = first + size + 1, draft + size
    assert lengths >= {0, 1, 2, 3}


def judge_one(case: Round, job: int) -> tuple[list[int], int]:
    """Path and next token of a job by the rule as it is written in books, in float64."""
    parents, noise = case.trees[job], Noise(np)
    root, draft = int(case.layout.first[job]), int(case.layout.first[job]) - job
    path: list[int] = []
    while True:
        row = root + 1 + (path[-1] if path else -1)
        words, position = case.words[:, row : row + 1], case.positions[row : row + 1]
        p = softmax(np, case.x[row].astype(np.float64)[None])[0]
        stream, children = Stream.TARGET, children_of(parents, path[-1] if path else -1)
        for rank, child in enumerate(children):
            uniform = float(noise.uniform(words, position, Stream.ACCEPT, np.array([rank], dtype=np.int32))[0])
            token = case.tokens[draft + child]
            q = np.eye(VOCAB)[token] if case.probs is None else case.probs[draft + child].astype(np.float64)
            if uniform * q[token] < p[token]:
                path.append(child)
                break
            stream = Stream.REPLACE
            rest = np.maximum(p - q, 0.0)
            p = rest / rest.sum() if rest.sum() > 1e-6 else rest
        else:
            with np.errstate(divide="ignore"):
                logs = np.log(p) if p.any() else case.x[row]
            return path, int(noise.draw(logs[None].astype(np.float32), words, position, stream)[0])


@pytest.mark.parametrize("kind", ["certain", "sampled", "mixed"])
@pytest.mark.parametrize("arrays", ARRAYS)
def test_rejection_decides_as_the_reference(arrays: str, kind: str) -> None:
    xp, lengths = ARRAYS[arrays], set()
    for seed in range(6):
        case = random_round(seed, kind)
        ruling = reject_tree(xp, *case.arguments(xp))
        for job in range(len(case.trees)):
            path = path_to(case.layout, int(ruling.rows[job]), int(case.layout.first[job]))
            assert (path, int(ruling.next[job])) == judge_one(case, job), (seed, job)
            lengths.add(len(path))
    assert lengths >= {0, 1, 2, 3}


@pytest.mark.parametrize("kind", ["certain", "sampled"])
@pytest.mark.parametrize("arrays", ARRAYS)
def test_a_chain_is_a_tree(arrays: str, kind: str) -> None:
    """The same numbers decide the same way in `accept.py`."""
    xp, generator = ARRAYS[arrays], np.random.default_rng(3)
    counts = [int(count) for count in generator.integers(1, 6, size=300)]
    chains = [list(range(-1, count - 1)) for count in counts]
    tree = build_tree_layout(xp, None, chains)
    rows = [count + 1 for count in counts]
    chain = build_layout(xp, None, counts, rows)
    tokens = xp.asarray(generator.integers(VOCAB, size=sum(counts)))
    probs = None if kind == "certain" else xp.asarray(rows_of(generator, sum(counts), 0.2))
    with np.errstate(divide="ignore"):
        x = xp.asarray(np.log(rows_of(generator, sum(rows), 0.2)))
    words, positions = xp.asarray(words_for(len(counts), rows)), 7 + tree.depth
    assert positions.tolist() == (7 + chain.depth).tolist()
    ours = reject_tree(xp, x, tokens, probs, tree, Noise(xp), words, positions)
    theirs = reject(xp, x, tokens, probs, chain, Noise(xp), words, positions)
    assert (ours.rows - tree.first).tolist() == theirs.accepted.tolist()
    assert ours.next.tolist() == theirs.next.tolist()
    assert set(theirs.accepted.tolist()) >= {0, 1, 2}
    chosen = Noise(xp).draw(x, words, positions, Stream.TARGET)
    matched, expected = match_tree(xp, chosen, tokens, tree), match(xp, chosen, tokens, chain)
    assert (matched.rows - tree.first).tolist() == expected.accepted.tolist()
    assert matched.next.tolist() == expected.next.tolist()


# ---- the law of one round, by integration ------------------------------------------------------------------------

P = np.array([0.45, 0.3, 0.25, 0.0])


class Child(NamedTuple):
    token: int
    row: tuple[float, ...] | None = None  # what it was drawn from; None: certain

    def chances(self) -> np.ndarray:
        return np.eye(VOCAB)[self.token] if self.row is None else np.array(self.row)


def law_of_round(p: np.ndarray, children: Sequence[Child]) -> tuple[list[float], np.ndarray]:
    """For given children: the chance that each is kept, and of every token to come in place of them all."""
    kept, alive = [], 1.0
    for child in children:
        q = child.chances()
        share = min(1.0, p[child.token] / q[child.token]) if q[child.token] > 0 else float(p[child.token] > 0)
        kept.append(alive * share)
        alive *= 1.0 - share
        rest = np.maximum(p - q, 0.0)
        p = rest / rest.sum() if rest.sum() > 0 else rest
    return kept, alive * p


def emitted_law(p: np.ndarray, children: Sequence[Child]) -> np.ndarray:
    """Of the round's first token."""
    kept, law = law_of_round(p, children)
    for child, chance in zip(children, kept, strict=True):
        law = law + chance * np.eye(VOCAB)[child.token]
    return law


def without(row: Sequence[float], taken: Sequence[int]) -> tuple[float, ...]:
    left = np.array([0.0 if token in taken else chance for token, chance in enumerate(row)])
    return tuple(left / left.sum())


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("certain", [(), (0,), (1,), (0, 2), (2,)])
def test_siblings_drawn_one_after_another_leave_p_as_it_was(count: int, certain: tuple[int, ...]) -> None:
    """The reference by itself: over all ways to draw the sampled siblings, the token that comes follows p exactly.

    Siblings in the places of `certain` are fixed tokens: one that p rules out, and one of those drawn before.
    """
    q, whole = np.array([0.1, 0.4, 0.2, 0.3]), np.zeros(VOCAB)

    def draw(children: list[Child], chance: float) -> None:
        nonlocal whole
        if len(children) == count:
            whole = whole + chance * emitted_law(P, children)
        elif len(children) in certain:
            draw([*children, Child(children[0].token if children else 3)], chance)
        else:
            row = without(q, [child.token for child in children if child.row is not None])
            for token, share in enumerate(row):
                if share > 0:
                    draw([*children, Child(token, row)], chance * share)

    draw([], 1.0)
    assert np.allclose(whole, P, atol=1e-14)


ROUNDS = {
    "without-replacement": [
        Child(1, (0.1, 0.4, 0.2, 0.3)),
        Child(0, without((0.1, 0.4, 0.2, 0.3), [1])),
        Child(2, without((0.1, 0.4, 0.2, 0.3), [1, 0])),
    ],
    "with-replacement": [
        Child(1, (0.1, 0.7, 0.1, 0.1)),
        Child(1, (0.1, 0.7, 0.1, 0.1)),
        Child(1, (0.1, 0.7, 0.1, 0.1)),
    ],
    "p-is-zero": [Child(3, (0.1, 0.1, 0.1, 0.7)), Child(3), Child(0)],
    "q-is-zero": [Child(2, (0.5, 0.5, 0.0, 0.0)), Child(1)],
    "certain": [Child(0), Child(1)],
    "certain-twice": [Child(0), Child(0), Child(1), Child(0)],
    "certain-then-sampled": [Child(0), Child(1, (0.1, 0.8, 0.1, 0.0)), Child(2, (0.4, 0.0, 0.6, 0.0))],
    "sampled-then-certain": [Child(1, (0.2, 0.8, 0.0, 0.0)), Child(0), Child(1)],
    "everybody": [Child(0), Child(1), Child(2), Child(3)],
    "q-is-p": [Child(0, tuple(P)), Child(1, (0.0, 0.5, 0.5, 0.0)), Child(2)],
}


@pytest.mark.parametrize("arrays", ARRAYS)
@pytest.mark.parametrize("name", ROUNDS)
def test_the_law_of_given_siblings(name: str, arrays: str) -> None:
    """How often each child is kept, and which tokens come in place of all: 100,000 rounds and the integral."""
    children = ROUNDS[name]
    frequencies = np.zeros(len(children) + VOCAB)
    ends, following = play(ARRAYS[arrays], [-1] * len(children), children, np.tile(P, (len(children) + 1, 1)))
    outcomes = np.where(ends > 0, ends - 1, len(children) + following)
    np.add.at(frequencies, outcomes, 1)
    expected = np.concatenate(law_of_round(P, children))
    assert_frequencies(frequencies, expected)


def play(
    xp: Any, parents: list[int], children: Sequence[Child], rows: np.ndarray, times: int = 10
) -> tuple[np.ndarray, np.ndarray]:
    """The same round 10,000 times `times` with other numbers: the row each ended at, and the next token."""
    count, size = 10_000, len(parents) + 1
    tokens = xp.asarray(np.tile([child.token for child in children], count))
    probs = None
    if any(child.row is not None for child in children):
        chances = np.stack([child.chances() for child in children]).astype(np.float32)
        probs = xp.asarray(np.tile(chances, (count, 1)))
    with np.errstate(divide="ignore"):
        x = xp.asarray(np.tile(np.log(rows).astype(np.float32), (count, 1)))
    layout = build_tree_layout(xp, None, [parents] * count)
    generator, ends, following = np.random.default_rng(1), [], []
    for _ in range(times):
        seeds = generator.integers(-(2**31), 2**31, size=(2, count), dtype=np.int32)
        words = xp.asarray(np.repeat(seeds, size, axis=1))
        ruling = reject_tree(xp, x, tokens, probs, layout, Noise(xp), words, 5 + layout.depth)
        ends.append(np.asarray(ruling.rows - layout.first))
        following.append(np.asarray(ruling.next))
    return np.concatenate(ends), np.concatenate(following)


def assert_frequencies(counts: np.ndarray, law: np.ndarray) -> None:
    assert law.sum() == pytest.approx(1.0)
    possible = law > 1e-12
    assert not counts[~possible].any(), "something came that cannot come"
    if possible.sum() > 1:
        assert (
            stats.chisquare(counts[possible], law[possible] / law[possible].sum() * counts.sum()).pvalue > SIGNIFICANCE
        )


def test_the_law_of_a_tree_of_two_levels() -> None:
    """Path and next token together, each level by its own rows."""
    q, second = (0.1, 0.4, 0.2, 0.3), (0.25, 0.25, 0.25, 0.25)
    parents = [-1, -1, 0, 0, 1, -1, 5]
    children = [
        Child(1, q),
        Child(0, without(q, [1])),
        Child(2, second),
        Child(2),
        Child(1),
        Child(1),
        Child(3, second),
    ]
    rows = np.random.default_rng(2).dirichlet([1.0] * VOCAB, size=len(parents) + 1)
    law = np.zeros((len(parents) + 1, VOCAB))

    def walk(node: int, chance: float) -> None:
        own = children_of(parents, node)
        kept, rest = law_of_round(rows[node + 1], [children[child] for child in own])
        law[node + 1] += chance * rest
        for child, share in zip(own, kept, strict=True):
            walk(child, chance * share)

    walk(-1, 1.0)
    ends, following = play(np, parents, children, rows)
    counts = np.zeros(law.shape)
    np.add.at(counts, (ends, following), 1)
    assert_frequencies(counts.ravel(), law.ravel())


def test_a_residual_without_mass_falls_back_to_p() -> None:
    """Rounding may do that where q is close to p. Here q is larger than p everywhere, which no distribution is."""
    children = [Child(0, (0.9, 0.6, 0.5, 0.1)), Child(1, (0.5, 0.6, 0.5, 0.1))]
    ends, following = play(np, [-1, -1], children, np.tile(P, (3, 1)), times=5)
    refused = np.bincount(following[ends == 0], minlength=VOCAB)
    assert refused.sum() == pytest.approx(25_000, rel=0.05)
    assert_frequencies(refused, P)
    assert not (ends == 2).any(), "nothing is left that could be kept"


# ---- children of a row -------------------------------------------------------------------------------------------


def jobs_for(count: int, **settings: Any) -> list[Job]:
    """Jobs of an engine that never runs."""
    engine = Engine.load(MockBackend(MockConfig(vocab_size=VOCAB)), draft="none")
    params = SamplingParams(seed=4, **settings)
    requests = [Request(prompt=[1, 2], sampling=params, choice=choice) for choice in range(count)]
    return [engine._intake.job(request, str(request.choice), 0.0) for request in requests]


def rows_for(xp: Any, jobs: Sequence[Job], logits: Sequence[float]) -> DraftRows:
    row = np.asarray(logits, dtype=np.float32)
    return SamplingOps(xp).draft_rows(jobs, [[]] * len(jobs), xp.asarray(np.tile(row, (len(jobs), 1))))


@pytest.mark.parametrize("arrays", ARRAYS)
def test_children_are_drawn_without_replacement(arrays: str) -> None:
    q, count = np.array([0.15, 0.5, 0.05, 0.3]), 5_000
    rows = rows_for(ARRAYS[arrays], jobs_for(count, accept="rejection"), np.log(q))
    children = rows.draw([3] * count)
    assert children.rows == [row for row in range(count) for _ in range(3)]
    drawn = np.asarray(children.tokens).reshape(count, 3)
    assert children.confidences == pytest.approx(np.log(q)[drawn.ravel()], abs=1e-6)
    probs = np.asarray(children.probs).reshape(count, 3, VOCAB)
    frequencies, law = np.zeros((VOCAB,) * 3), np.zeros((VOCAB,) * 3)
    np.add.at(frequencies, tuple(drawn.T), 1)
    for a, b, c in itertools.permutations(range(VOCAB), 3):
        given = [tuple(q), without(q, [a]), without(q, [a, b])]
        law[a, b, c] = q[a] * given[1][b] * given[2][c]
        here = (drawn == [a, b, c]).all(-1)
        assert np.allclose(probs[here], given, atol=1e-6)
    assert_frequencies(frequencies.ravel(), law.ravel())


@pytest.mark.parametrize("arrays", ARRAYS)
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_a_row_has_no_more_children_than_tokens(arrays: str, rule: str) -> None:
    """Nor is a token drawn twice, the first one included."""
    for logits, possible in (([0.5, -np.inf, -np.inf, 0.0], {0, 3}), ([-np.inf, 1.0, -np.inf, 0.0], {1, 3})):
        for certain in (False, True):
            children = rows_for(ARRAYS[arrays], jobs_for(3, accept=rule), logits).draw([4, 0, 3], certain=certain)
            assert children.rows == [0, 0, 2, 2]
            assert set(children.tokens[:2]) == set(children.tokens[2:]) == possible
            assert (children.probs is None) == (certain or rule == "coupled")
            if children.probs is not None:
                assert np.asarray(children.probs).shape == (4, VOCAB)
                assert all(children.probs[index, token] > 0 for index, token in enumerate(children.tokens))


def test_children_under_coupled_are_those_the_target_would_say() -> None:
    """The first child is the target's own token if both have the same row, the second what it would say without it."""
    jobs = jobs_for(50, accept="coupled")
    logits = np.log(np.array([0.3, 0.3, 0.2, 0.2], dtype=np.float32))
    children = rows_for(np, jobs, logits).draw([2] * len(jobs))
    words = np.asarray([job.words for job in jobs], dtype=np.int32).T
    positions = np.asarray([len(job.tokens) for job in jobs], dtype=np.int32)
    own = Noise(np).draw(np.tile(logits, (len(jobs), 1)), words, positions, Stream.TARGET)
    assert children.tokens[::2] == own.tolist() and children.probs is None
    left = np.tile(logits, (len(jobs), 1))
    left[np.arange(len(jobs)), own] = -np.inf
    assert children.tokens[1::2] == Noise(np).draw(left, words, positions, Stream.TARGET).tolist()
    assert set(children.confidences) == {-1.0, -2.0}


@pytest.mark.parametrize("arrays", ARRAYS)
def test_promises_are_the_best_first(arrays: str) -> None:
    q = np.array([0.15, 0.5, 0.05, 0.3])
    promises = rows_for(ARRAYS[arrays], jobs_for(2, accept="rejection"), np.log(q)).promises(3)
    assert promises[0] == promises[1] == pytest.approx(np.log([0.5, 0.3, 0.15]), abs=1e-6)
    assert rows_for(ARRAYS[arrays], jobs_for(1, accept="coupled"), np.log(q)).promises(9) == [[-1.0, -2.0, -3.0, -4.0]]
    greedy = rows_for(ARRAYS[arrays], jobs_for(1, temperature=0.0), np.log(q))
    assert greedy.promises(2)[0] == pytest.approx(np.log([0.5, 0.3]), abs=1e-6)
    assert greedy.draw([3]).tokens == [1, 3, 0]
