"""The oracles can fail: every trap that earlier implementations fell into is put in on purpose, and is seen.

One test per trap (numbers as in the project's requirements), and the ways a tree can go wrong. 5,000 generations show
each.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider.backends.mock import MockBackend
from outrider.draft import model as draft_model
from outrider.draft.model import ModelDrafter, Seat
from outrider.engine import loop
from outrider.errors import BackendError
from outrider.sampling import accept, ops
from outrider.sampling.branch import Children, DraftRows
from outrider.sampling.noise import Noise
from outrider.sampling.tree import TreeLayout, build_tree_layout, reject_tree
from outrider.sampling.warp import softmax
from outrider.sched.policies import Policy
from outrider.sched.sequences import Sequences
from outrider.spec import round as spec_round
from outrider.types import Batch, Drafts, Job, Scores, Slot

from cases import PROMPT, TARGET, Case, measure
from oracle import SIGNIFICANCE

GENERATIONS = 5_000
MODEL = Case("model", width=3)
NUCLEUS = replace(MODEL, controls={"top_p": 0.6})
Patch = pytest.MonkeyPatch


known_to_be_lawful: set[str] = set()


def is_seen(case: Case, mutate: Callable[[Patch], None], patch: Patch) -> bool:
    """The law holds before the mutation, which is measured once for all mutations of a case, and is violated after."""
    if repr(case) not in known_to_be_lawful:
        assert measure(case, GENERATIONS) > SIGNIFICANCE
        known_to_be_lawful.add(repr(case))
    mutate(patch)
    return measure(case, GENERATIONS) < SIGNIFICANCE


def test_trap_1_the_next_positions_row_judges_a_draft(monkeypatch: Patch) -> None:
    def mutate(patch: Patch) -> None:
        build = accept.build_layout

        def shifted(xp: Any, device: Any, drafted: Sequence[int], rows: Sequence[int]) -> accept.Layout:
            layout = build(xp, device, drafted, rows)
            return layout._replace(judge=np.minimum(layout.judge + 1, sum(rows) - 1))

        patch.setattr(ops, "build_layout", shifted)

    assert is_seen(MODEL, mutate, monkeypatch)


def test_trap_1_the_last_token_is_fed_twice(monkeypatch: Patch) -> None:
    """The mock screams, and the scream reaches the caller as a typed error."""
    spans_of = spec_round._spans

    def twice(target: MockBackend, batch: Batch, drafts: Drafts) -> Any:
        for job in batch.decode:
            job.cached = max(0, job.cached - 1)
        return spans_of(target, batch, drafts)

    monkeypatch.setattr(spec_round, "_spans", twice)
    with pytest.raises(BackendError, match="holds 3 tokens but was fed position 2"):
        MODEL.engine().generate(MODEL.requests(1))


@pytest.mark.parametrize("offset", [-1, 1])
def test_trap_2_the_residual_of_another_position(monkeypatch: Patch, offset: int) -> None:
    def mutate(patch: Patch) -> None:
        residual = accept.residual

        def displaced(xp: Any, target: Any, refused: Any, tokens: Any, probs: Any) -> Any:
            return residual(xp, target, np.clip(refused + offset, 0, len(tokens) - 1), tokens, probs)

        patch.setattr(accept, "residual", displaced)

    assert is_seen(MODEL, mutate, monkeypatch)


def test_trap_2_a_one_hot_stand_in_for_the_draft_row(monkeypatch: Patch) -> None:
    def mutate(patch: Patch) -> None:
        residual = accept.residual
        patch.setattr(accept, "residual", lambda xp, p, refused, tokens, probs: residual(xp, p, refused, tokens, None))

    assert is_seen(MODEL, mutate, monkeypatch)


def test_trap_3_a_greedy_draft_that_reports_its_softmax(monkeypatch: Patch) -> None:
    def mutate(patch: Patch) -> None:
        def draft(self: ops.SamplingOps, jobs: Any, drafted: Any, logits: Any) -> ops.Drawn:
            return ops.Drawn(logits.argmax(-1), softmax(self.xp, logits), {})

        patch.setattr(ops.SamplingOps, "draft", draft)

    assert is_seen(MODEL, mutate, monkeypatch)


def keep_the_refused(patch: Patch) -> None:
    """After a refusal the refused token stays in the target's cache, and the replacement never enters it."""
    rewind, feed, length = MockBackend.rewind, MockBackend._feed, MockBackend.length
    stale: set[tuple[MockBackend, Slot]] = set()

    def keep(self: MockBackend, slots: Sequence[Slot], lengths: Sequence[int], paths: object = None) -> None:
        for slot, kept in zip(slots, lengths, strict=True):
            if len(self._tokens[slot]) > kept:
                rewind(self, slot, kept + 1)
                stale.add((self, slot))

    def skip_first(self: MockBackend, slot: Slot, start: int, fed: Sequence[int], parents: object = None) -> None:
        if (self, slot) in stale:
            stale.remove((self, slot))
            start, fed = start + 1, fed[1:]
        feed(self, slot, start, fed)

    patch.setattr(MockBackend, "keep", keep)
    patch.setattr(MockBackend, "_feed", skip_first)
    patch.setattr(MockBackend, "length", lambda self, slot: length(self, slot) - ((self, slot) in stale))


@pytest.mark.blind
@pytest.mark.parametrize("case", [MODEL, Case("scripted", draft="scripted")])
def test_trap_4_the_refused_token_stays_in_the_cache_law(monkeypatch: Patch, case: Case) -> None:
    assert is_seen(case, keep_the_refused, monkeypatch)


def test_trap_4_the_refused_token_stays_in_the_cache_contents(monkeypatch: Patch) -> None:
    keep_the_refused(monkeypatch)
    with pytest.raises(AssertionError, match="target holds"):
        measure(MODEL, 100)


def test_trap_5_new_tokens_never_reach_the_draft(monkeypatch: Patch) -> None:
    """The law does not depend on the draft's cache, its contents do."""
    settle = ModelDrafter._settle

    def careless(self: ModelDrafter, job: Job, seat: Seat) -> None:
        settle(self, job, seat)
        missing = len(job.tokens) - seat.length
        self.backend._feed(seat.slot, seat.length, [0] * missing)
        seat.length += missing

    monkeypatch.setattr(ModelDrafter, "_settle", careless)
    with pytest.raises(AssertionError, match="draft holds"):
        measure(MODEL, 100)


@pytest.mark.blind
def test_trap_5_a_checkpoint_of_an_earlier_request(monkeypatch: Patch) -> None:
    def mutate(patch: Patch) -> None:
        begin = Sequences.open

        def restore(self: Sequences, job: Job, policy: Policy) -> bool:
            has_room = begin(self, job, policy)
            if has_room:
                job.slot = self._target.load({"tokens": [2, *PROMPT[1:-1]]})
                job.cached = len(PROMPT) - 1
            return has_room

        patch.setattr(Sequences, "open", restore)

    assert is_seen(Case("plain", draft="none", width=0), mutate, monkeypatch)


def test_trap_6_a_hash_of_p_and_q_for_a_random_number(monkeypatch: Patch) -> None:
    def mutate(patch: Patch) -> None:
        def hashed(uniform: Any, target: Any, draft: Any) -> Any:
            return np.modf(np.abs(np.sin(target * 12.9898 + draft * 78.233)) * 43758.5453)[0] * draft < target

        patch.setattr(accept, "kept", hashed)

    assert is_seen(MODEL, mutate, monkeypatch)


def mutated_bits(patch: Patch, change: Callable[..., Any]) -> None:
    bits = Noise.bits
    patch.setattr(Noise, "bits", lambda self, *key: bits(self, *change(*key)))


def test_trap_6_one_number_for_drawing_accepting_and_replacing(monkeypatch: Patch) -> None:
    def mutate(patch: Patch) -> None:
        mutated_bits(patch, lambda words, positions, stream, count: (words, positions, 0, count))

    assert is_seen(MODEL, mutate, monkeypatch)


@pytest.mark.parametrize("case", [MODEL, replace(MODEL, rule="coupled"), Case("plain", draft="none", width=0)])
def test_trap_6_the_same_numbers_at_every_position(monkeypatch: Patch, case: Case) -> None:
    def mutate(patch: Patch) -> None:
        mutated_bits(patch, lambda words, positions, stream, count: (words, positions * 0, stream, count))

    assert is_seen(case, mutate, monkeypatch)


def test_trap_6_one_global_generator(monkeypatch: Patch) -> None:
    """The law may hold, but a seed no longer means anything."""
    generator = np.random.default_rng(0)

    def advance(self: Noise, words: Any, positions: Any, stream: Any, count: int) -> Any:
        return generator.integers(-(2**31), 2**31, (len(positions), count), dtype=np.int32)

    case = replace(MODEL, rule="coupled")
    alone, again = (case.engine().generate(case.requests(20)) for _ in range(2))
    assert [r.token_ids for r in alone] == [r.token_ids for r in again]
    monkeypatch.setattr(Noise, "bits", advance)
    alone, again = (case.engine().generate(case.requests(20)) for _ in range(2))
    assert [r.token_ids for r in alone] != [r.token_ids for r in again]


def passes_per_round(case: Case) -> float:
    engine = case.engine()
    result = engine.generate(case.requests(1))[0]
    assert isinstance(engine.loop.target, MockBackend)
    return engine.loop.target.num_passes / result.statistics.rounds


@pytest.mark.parametrize("width", [0, 1, 3, 5])
def test_trap_7_one_pass_a_round(width: int) -> None:
    """Plain decoding included: a round is one pass, and the prompt's is the first token's."""
    assert passes_per_round(Case("passes", width=width)) == 1


@pytest.mark.blind
def test_trap_7_token_by_token_verification_is_seen(monkeypatch: Patch) -> None:
    def slowly(self: MockBackend, spans: Any, hidden: Any = ()) -> Scores:
        rows, at = [], 0
        for slot, start, count, wanted in zip(spans.slots, spans.starts, spans.counts, spans.rows, strict=True):
            for place in range(count):
                last = replace(spans, slots=[slot], starts=[start + place], counts=[1], rows=[1])
                last.tokens = spans.tokens[at + place : at + place + 1]
                if place >= count - wanted:
                    rows.append(score(self, last).logits)
                else:
                    score(self, last)
            at += count
        return Scores([wanted for wanted in spans.rows if wanted], np.concatenate(rows))

    score = MockBackend.score
    case = Case("slow", width=3)
    expected = case.engine().generate(case.requests(1))[0].token_ids
    monkeypatch.setattr(MockBackend, "score", slowly)
    assert case.engine().generate(case.requests(1))[0].token_ids == expected
    assert passes_per_round(case) > 2


@pytest.mark.parametrize("draft", ["model", "scripted"])
def test_trap_8_top_p_ignored_when_speculating(monkeypatch: Patch, draft: str) -> None:
    def mutate(patch: Patch) -> None:
        shape = ops.shape

        def judge(self: ops.SamplingOps, rule: Any, jobs: Any, drafts: Drafts, scores: Scores) -> Any:
            if sum(drafts.counts) > 0:
                patch.setattr(
                    ops, "shape", lambda xp, x, controls, history: shape(xp, x, replace(controls, ranked=None), history)
                )
            verdicts = fair(self, rule, jobs, drafts, scores)
            patch.setattr(ops, "shape", shape)
            return verdicts

        fair = ops.SamplingOps._judge
        patch.setattr(ops.SamplingOps, "_judge", judge)

    assert is_seen(replace(NUCLEUS, draft=draft), mutate, monkeypatch)


def test_penalties_that_do_not_see_drafted_ancestors(monkeypatch: Patch) -> None:
    """History means the tokens before a position, drafted ones included."""

    def mutate(patch: Patch) -> None:
        history_of = ops.SamplingOps._history

        def forgetful(self: ops.SamplingOps, *round: Any) -> Any:
            history = history_of(self, *round)
            return lambda row: (history(row)[0], [])

        patch.setattr(ops.SamplingOps, "_history", forgetful)

    assert is_seen(replace(MODEL, controls={"frequency_penalty": 1.0}), mutate, monkeypatch)


# Trees

# A poor draft, so that siblings are judged often; siblings of both kinds; certain ones.
SAMPLED = Case("sampled", width=5, tree=True, draft_config=replace(TARGET, drift=2.5))
SIBLINGS = Case("siblings", draft="mixed", width=6, tree=True)
CERTAIN = Case("certain", draft="trees", width=8, tree=True)


def rewritten(function: Any, old: str, new: str) -> Any:
    """The function with one piece of its source replaced."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{function.__qualname__} has {old!r} {source.count(old)} times"
    names = dict(function.__globals__)
    exec("from __future__ import annotations\n" + source.replace(old, new), names)
    return names[function.__name__]


BY_P = ("* weight < left)", "< softmax(xp, x)[row, token])")
FROM_P = ("xp.where(replace[:, None], log_rest", "xp.where(replace[:, None], x[row, ...]")
ONE_NUMBER = ("Stream.ACCEPT, layout.rank", "Stream.ACCEPT, layout.rank * 0")
FIRST_ONLY = ("xp.where(refuse[:, None], rest", "xp.where((refuse & (weight == 1.0))[:, None], rest")
TREE_RULES = {
    "siblings are judged by p": (SAMPLED, *BY_P),
    "the residual is not normalised": (SAMPLED, "xp.sum(rest, axis=-1), weight)", "weight, weight)"),
    "the residual of certain drafts is not normalised": (CERTAIN, "weight - left, weight)", "weight, weight)"),
    "one number for all siblings": (SAMPLED, *ONE_NUMBER),
}
MORE_TREE_RULES = {
    "certain siblings are judged by p": (CERTAIN, *BY_P),
    "one number for all certain siblings": (CERTAIN, *ONE_NUMBER),
    "a residual takes too much from what is left": (SIBLINGS, "before - weight[:, None] *", "before -"),
    "only the first refusal is taken out": (SIBLINGS, *FIRST_ONLY),
    "the replacement comes from p": (SAMPLED, *FROM_P),
    "the replacement of certain drafts comes from p": (CERTAIN, *FROM_P),
    "one number at every depth": (SAMPLED, "positions - 1, Stream.ACCEPT", "positions * 0, Stream.ACCEPT"),
}


@pytest.mark.parametrize("name", [*TREE_RULES, *(pytest.param(n, marks=pytest.mark.slow) for n in MORE_TREE_RULES)])
def test_the_rule_of_trees(monkeypatch: Patch, name: str) -> None:
    case, old, new = (TREE_RULES | MORE_TREE_RULES)[name]
    mutated = rewritten(reject_tree, old, new)
    assert is_seen(case, lambda patch: patch.setattr(ops, "reject_tree", mutated), monkeypatch)


def test_every_sibling_reports_the_row_of_the_first(monkeypatch: Patch) -> None:
    mutated = rewritten(DraftRows.draw, "self._sources(left,", "self._sources(self._x[at, ...],")
    assert is_seen(SAMPLED, lambda patch: patch.setattr(DraftRows, "draw", mutated), monkeypatch)


def test_children_are_judged_by_the_row_of_their_parents_sibling(monkeypatch: Patch) -> None:
    def mutate(patch: Patch) -> None:
        def displaced(xp: Any, x: Any, tokens: Any, probs: Any, layout: TreeLayout, *rest: Any) -> Any:
            own = np.arange(len(x))
            return reject_tree(xp, x[np.where(layout.sibling >= 0, layout.sibling, own)], tokens, probs, layout, *rest)

        patch.setattr(ops, "reject_tree", displaced)

    assert is_seen(SAMPLED, mutate, monkeypatch)


def test_trap_16_sampled_children_are_dropped_for_their_own_value(monkeypatch: Patch) -> None:
    def mutate(patch: Patch) -> None:
        draw = DraftRows.draw

        def choosy(self: DraftRows, counts: Sequence[int], **settings: Any) -> Children:
            drawn = draw(self, counts, **settings)
            likely = [at for at, chance in enumerate(drawn.confidences) if chance > np.log(0.2)]
            rows, tokens, confidences = ([values[at] for at in likely] for values in drawn[:3])
            return Children(rows, tokens, confidences, drawn.probs[likely])

        patch.setattr(DraftRows, "draw", choosy)

    assert is_seen(SAMPLED, mutate, monkeypatch)


def test_the_first_nodes_of_a_tree_stay_in_the_cache(monkeypatch: Patch) -> None:
    """Instead of those on the path that was kept."""
    keep = loop.keep
    monkeypatch.setattr(loop, "keep", lambda target, jobs, paths: keep(target, jobs, {}))
    with pytest.raises(AssertionError, match="target holds"):
        measure(SAMPLED, 100)


def test_the_first_nodes_of_a_tree_stay_in_the_draft(monkeypatch: Patch) -> None:
    path = draft_model._path
    monkeypatch.setattr(draft_model, "_path", lambda *seen: list(range(len(path(*seen)))))
    with pytest.raises(AssertionError, match="draft holds"):
        measure(SAMPLED, 100)


def test_nodes_are_numbered_as_if_they_were_a_chain(monkeypatch: Patch) -> None:
    """Noise then belongs to no position: `coupled` does not say what plain decoding says, lawful as it may be."""
    case = replace(SAMPLED, rule="coupled")
    plain = [r.token_ids for r in case.engine().generate(replace(case, width=0, tree=False).requests(50))]
    assert [result.token_ids for result in case.engine().generate(case.requests(50))] == plain

    def flat(*given: Any) -> TreeLayout:
        layout = build_tree_layout(*given)
        return layout._replace(depth=(np.arange(len(layout.owner)) - layout.first[layout.owner]).astype(np.int32))

    monkeypatch.setattr(ops, "build_tree_layout", flat)
    assert [result.token_ids for result in case.engine().generate(case.requests(50))] != plain


def test_the_mock_depends_on_the_whole_context() -> None:
    """What the proofs rest on: another token anywhere in the past changes the distribution."""
    mock = MockBackend(TARGET)
    rows = {tuple(mock.logits_after([first, 1, 2, 3, 0, 1])) for first in range(4)}
    assert len(rows) == 4
