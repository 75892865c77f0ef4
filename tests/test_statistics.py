"""Counters of speculation: R7, on hand-made rounds and on a mock with known costs."""

from __future__ import annotations

import json

import pytest

from outrider.backends.mock import MockBackend
from outrider.clock import VirtualClock
from outrider.config import MockConfig
from outrider.draft.lookup import ScriptedDrafter
from outrider.draft.ngram import NgramDrafter
from outrider.engine.engine import Engine
from outrider.metrics import Outcome, PassCosts, RoundTimes, Statistics, Tempo
from outrider.types import Batch, Request, SamplingParams

from conftest import drafter_of


def test_empty_statistics_are_zeros_and_nulls() -> None:
    counts = Statistics()
    assert counts.acceptance_rate == 0.0 and counts.tokens_per_round == 0.0 and counts.accepted_by_position == []
    report = counts.report()
    assert report["measured_speedup"] is None and report["estimated_speedup"] is None and report["advice"] is None
    json.dumps(report)


@pytest.mark.parametrize(
    ("drafted", "accepted", "emitted", "expected"),
    [  # accepted, rejected, bonus, unread
        (4, 4, 5, (4, 0, 1, 0)),
        (4, 2, 3, (2, 1, 0, 1)),
        (4, 0, 1, (0, 1, 0, 3)),
        (4, 4, 2, (2, 0, 0, 2)),  # a stop at the second token
        (4, 2, 2, (2, 0, 0, 2)),  # a stop just before the replacement
        (1, 1, 1, (1, 0, 0, 0)),  # a target that cannot rewind: no bonus
        (0, 0, 1, (0, 0, 0, 0)),
    ],
)
def test_a_round(drafted: int, accepted: int, emitted: int, expected: tuple[int, ...]) -> None:
    counts = Statistics()
    counts.add_round(Outcome.of_chain(drafted, accepted, emitted))
    assert (counts.accepted, counts.rejected, counts.bonus, counts.unread) == expected
    assert counts.drafted == counts.accepted + counts.rejected + counts.unread
    assert counts.tokens == emitted


def test_acceptance_by_position() -> None:
    counts = Statistics()
    for drafted, accepted in ((3, 3), (3, 1), (3, 0), (1, 1)):
        counts.add_round(Outcome.of_chain(drafted, accepted, accepted + 1))
    assert counts.accepted_by_position == [3 / 4, 1 / 3, 1 / 3]
    assert counts.acceptance_rate == 5 / 10
    assert counts.tokens_per_round == 9 / 4


def test_pass_costs_interpolate_between_what_was_measured() -> None:
    costs = PassCosts()
    assert costs.curve() is None
    for rows, seconds in ((1, 2.0), (5, 6.0), (5, 8.0), (1000, 50.0)):
        costs.add(rows, seconds)
    assert costs.curve() == {1: 1.0, 5: 3.5, 1024: 25.0}
    assert costs.seconds(3) == 4.5 and costs.seconds(0) is None and costs.seconds(2000) is None


def test_cost_points_are_bounded() -> None:
    costs = PassCosts()
    for rows in range(1, 100_000):
        costs.add(rows, 1.0)
    assert len(costs.points) <= 64 + 11


def test_speedup_compares_rounds_of_one_batch_size() -> None:
    tempo = Tempo()
    tempo.add(1, True, 30, 1.0)
    assert tempo.speedup() is None
    tempo.add(8, False, 10, 1.0)
    assert tempo.speedup() is None
    tempo.add(1, False, 10, 1.0)
    assert tempo.speedup() == 3.0


def costly_engine(accepting: bool, **costs: float) -> Engine:
    """Passes cost virtual time; the draft is free and always right, or always wrong."""
    clock = VirtualClock()
    target = MockBackend(MockConfig(vocab_size=16, seed=1, **costs), clock=clock)

    def guess(tokens: list[int], width: int) -> list[int]:
        out = list(tokens)
        for _ in range(width):
            best = int(target.logits_after(out).argmax())
            out.append(best if accepting else (best + 1) % 16)
        return out[len(tokens) :]

    return Engine.load(target, draft=ScriptedDrafter(guess), width=4, clock=clock)


def test_estimates_and_measurements_agree_where_costs_are_known() -> None:
    """A pass costs 1 + 0.1 per token, every draft is kept: 5 tokens for 1.5 s instead of 5 x 1.1 s."""
    engine = costly_engine(True, seconds_per_pass=1.0, seconds_per_token=0.1)
    engine.generate([1], temperature=0.0, max_tokens=20, width=0)
    engine.generate([1], temperature=0.0, max_tokens=100)
    counts = engine.statistics
    assert counts.costs.curve()[1] == 1.0 and counts.costs.curve()[5] == pytest.approx(1.5 / 1.1)
    assert counts.acceptance_rate == 1.0
    assert counts.measured_speedup == pytest.approx(5 * 1.1 / 1.5)
    assert counts.estimated_speedup == pytest.approx(counts.measured_speedup)
    assert counts.advice is None
    assert counts.score_s == pytest.approx(20 * 1.1 + 20 * 1.5)


def test_advice_when_it_does_not_pay() -> None:
    engine = costly_engine(False, seconds_per_pass=0.1, seconds_per_token=1.0)
    engine.generate([1], temperature=0.0, max_tokens=20, width=0)
    result = engine.generate([1], temperature=0.0, max_tokens=20)
    assert engine.statistics.measured_speedup < 0.5
    assert "does not pay" in engine.statistics.advice and "0% of the drafts are kept" in engine.statistics.advice
    assert result.statistics.rejected == result.statistics.draft_rounds
    result.statistics.tempo = Tempo()  # without plain rounds to compare with, the estimate speaks
    assert result.statistics.measured_speedup is None
    assert result.statistics.estimated_speedup < 0.5 and "estimated" in result.statistics.advice


def test_reading_the_prompt_is_not_held_against_plain_rounds() -> None:
    engine = costly_engine(True, seconds_per_token=1.0)
    engine.generate([1] * 50, temperature=0.0, max_tokens=3, width=0)
    assert engine.statistics.tempo.by_batch == {1: [2.0, 2.0, 0.0, 0.0]}


def test_engine_and_request_statistics_add_up() -> None:
    config = MockConfig(vocab_size=12, seed=1)
    engine = Engine.load(MockBackend(config), draft=MockBackend(MockConfig(vocab_size=12, seed=1, drift=0.5)))
    target, draft = engine.loop.target, drafter_of(engine).backend
    profiled, drafted = target.num_passes, draft.num_passes  # before the first request
    results = engine.generate(
        [Request(prompt=[b], sampling=SamplingParams(seed=b), max_tokens=10 + b, width=b) for b in range(5)]
    )
    for name in ("rounds", "tokens", "drafted", "accepted", "rejected", "bonus", "unread"):
        assert getattr(engine.statistics, name) == sum(getattr(r.statistics, name) for r in results)
    assert engine.statistics.passes == target.num_passes - profiled
    assert engine.statistics.draft_steps == draft.num_passes - drafted
    assert results[0].statistics.drafted == 0
    engine.reset_statistics()
    assert engine.statistics.report() == Statistics().report()
    assert results[1].statistics.tokens == 11


def test_ngram_lookup_proposes_what_followed_and_repeats_loops() -> None:
    config = MockConfig(vocab_size=16, seed=1)
    engine = Engine.load(MockBackend(config), draft="ngram", threaded=False)
    drafter = drafter_of(engine)
    assert isinstance(drafter, NgramDrafter)

    def lookup(tokens: list[int], width: int) -> list[int]:
        with engine.stream(tokens) as stream:
            return drafter.propose([stream._job], [width], [False]).tokens.tolist()

    assert lookup([5, 6, 7, 8, 1, 5, 6, 7], 3) == [8, 1, 5]
    assert lookup([5, 6, 9, 4, 6, 3, 5, 6], 1) == [9]  # the longer match wins over the later one
    assert lookup([4, 1, 4, 2, 4], 1) == [2]  # the later one among equals
    assert lookup([1, 2, 1, 2], 6) == [1, 2, 1, 2, 1, 2]
    assert lookup([3, 3], 4) == [3, 3, 3, 3]
    assert lookup([1, 2, 3, 4], 4) == []
    assert lookup([1], 4) == []
    assert drafter.observe(Batch([], [], [], []), None, None) == 0
    assert not drafter.lookups


def test_the_estimate_knows_that_a_target_without_rewind_saves_nothing() -> None:
    clock = VirtualClock()
    target = MockBackend(MockConfig(vocab_size=16, seed=1, seconds_per_pass=1.0, max_rewind=0), clock=clock)
    draft = MockBackend(MockConfig(vocab_size=16, seed=1, seconds_per_pass=0.1), clock=clock)
    engine = Engine.load(target, draft=draft, width=4, clock=clock)
    engine.generate([1], temperature=0.0, max_tokens=20)
    engine.generate([1], temperature=0.0, max_tokens=20, width=0)
    assert engine.statistics.estimated_speedup == pytest.approx(1 / 1.1)
    assert engine.statistics.measured_speedup == pytest.approx(1 / 1.1)


def test_request_estimates_price_the_batch_they_ran_in() -> None:
    """8 requests side by side, passes cost 1 s a row, drafts nothing and are always wrong: 1 token for 5 rows."""
    engine = costly_engine(False, seconds_per_token=1.0)
    plain = [Request(prompt=[b], sampling=SamplingParams(temperature=0.0), max_tokens=10, width=0) for b in range(8)]
    wide = [Request(prompt=[b], sampling=SamplingParams(temperature=0.0), max_tokens=40) for b in range(8)]
    engine.generate(plain)
    results = engine.generate(wide)
    assert results[0].statistics.estimated_speedup == pytest.approx(engine.statistics.estimated_speedup, rel=0.1)
    assert results[0].statistics.estimated_speedup == pytest.approx(0.2, rel=0.2)


def test_no_time_and_no_pass_goes_missing() -> None:
    """Prompt chunks, draft catch-up and rounds all cost virtual time, and all of it is in the request's statistics."""
    clock = VirtualClock()
    costs = {"seconds_per_pass": 1.0, "seconds_per_token": 0.1}
    target = MockBackend(MockConfig(vocab_size=16, seed=1, **costs), clock=clock)
    draft = MockBackend(MockConfig(vocab_size=16, seed=1, drift=0.3, **costs), clock=clock)
    engine = Engine.load(target, draft=draft, width=3, clock=clock, prefill_chunk=8)
    engine.generate([1], seed=1, max_tokens=3, width=0)
    started, passes = clock.now(), target.num_passes
    counts = engine.generate([1] * 50, seed=1, max_tokens=20).statistics
    assert counts.draft_s + counts.score_s + counts.judge_s == pytest.approx(clock.now() - started)
    assert counts.passes == target.num_passes - passes and counts.draft_steps == draft.num_passes
    assert counts.draft_step_cost == pytest.approx(1.0, rel=0.25)  # the prompt's chunks are left aside


def test_advice_prefers_the_estimate_when_few_rounds_can_be_compared() -> None:
    counts = Statistics()
    counts.tempo.add(1, True, 5, 1.0)
    counts.tempo.add(1, False, 5, 0.5)
    counts.tempo.add(8, True, 95, 1.0)
    assert counts.tempo.coverage() == 0.05
    assert counts.measured_speedup == 0.5
    assert counts.advice is not None and "measured 0.50x" in counts.advice  # nothing better is known
    counts.costs.add(1, 1.0)
    counts.costs.add(5, 2.0)
    counts.add_round(Outcome.of_chain(4, 4, 5))
    counts.wide.add_pass(RoundTimes(0.0, 2.0, 0.0, 4, 5, True), batch=1)
    assert counts.estimated_speedup == 2.5 and counts.advice is None


def test_no_advice_about_what_the_engine_tried_by_itself() -> None:
    counts = Statistics()
    for width in (0, 0, 2):
        counts.add_choice(width, "trying")
    counts.add_round(Outcome.of_chain(2, 0, 1))
    counts.tempo.add(1, True, 1, 2.0)
    counts.tempo.add(1, False, 2, 2.0)
    assert counts.measured_speedup == 0.5 and counts.advice is None
    counts.add_round(Outcome.of_chain(2, 0, 1))
    counts.fixed_rounds += 1  # a draft that a caller wanted
    assert counts.advice is not None
