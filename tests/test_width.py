"""The width the engine chooses: never slower on the mock, caps and fixed widths kept, decisions told (R11)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from outrider.backends.mock import MockBackend
from outrider.bench.never_slower import Cell, measure
from outrider.clock import VirtualClock
from outrider.config import MockConfig, WidthConfig
from outrider.draft.lookup import ScriptedDrafter
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.metrics import Outcome
from outrider.spec.acceptance import DrafterRecord, JobRecord
from outrider.spec.budget import Budget
from outrider.spec.choice import Batch, Group, Prospect, best_choice, plain_rate
from outrider.spec.costs import CostCurve, DraftCosts
from outrider.spec.knowledge import Surprise
from outrider.spec.width import Choice
from outrider.types import Event, Job, Request, SamplingParams

from conftest import drafter_of

MODEL = {"vocab_size": 32, "seed": 3, "sharpness": 2.0}
CELLS = [  # those of one acceptance and batch share what fixed widths do
    *[Cell((0.0,), cost, curve, 1) for cost, curve in ((0.0, "cpu"), (0.1, "linear"), (0.7, "compute"))],
    *[Cell((0.9,), cost, curve, 1) for cost, curve in ((0.02, "flat"), (0.1, "cpu"), (0.7, "knee"))],
    *[Cell((0.98,), cost, curve, 4) for cost, curve in ((0.0, "flat"), (0.3, "linear"), (0.1, "compute"))],
    *[Cell((0.05, 0.9), cost, curve, 4) for cost, curve in ((0.02, "knee"), (0.1, "cpu"), (0.7, "flat"))],
    *[Cell((0.9, 0.05), cost, curve, 1) for cost, curve in ((0.1, "flat"), (0.3, "linear"))],
]


def engine(**settings: object) -> Engine:
    """Passes cost 1 s, whatever they are fed; a draft step 0.05 s: drafting pays, by virtual time."""
    clock = VirtualClock()
    target = MockBackend(MockConfig(**MODEL, seconds_per_pass=1.0), clock=clock)
    draft = MockBackend(MockConfig(**MODEL, drift=0.2, seconds_per_pass=0.05), clock=clock)
    return Engine.load(target, draft=draft, clock=clock, **settings)


def losing_engine(**settings: object) -> Engine:
    """Passes cost 1 s a token, and the draft is another model: drafting never pays."""
    clock = VirtualClock()
    target = MockBackend(MockConfig(vocab_size=32, seed=3, seconds_per_token=1.0), clock=clock)
    draft = MockBackend(MockConfig(vocab_size=32, seed=9, seconds_per_pass=0.5), clock=clock)
    return Engine.load(target, draft=draft, clock=clock, **settings)


@pytest.mark.blind
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_auto_is_never_slower(cell: Cell) -> None:
    reading = measure(cell)
    assert reading.of_plain >= 0.97 and reading.of_best >= 0.95, reading


def test_it_drafts_where_that_pays_and_says_so() -> None:
    ours = engine()
    plain = ours.generate([1, 2], seed=1, max_tokens=200, width=0)
    auto = ours.generate([1, 2], seed=1, max_tokens=200)
    assert auto.token_ids == plain.token_ids
    assert auto.statistics.tokens_per_round > 2.0
    report = auto.statistics.report()
    chosen = sum(report["widths"].values())
    assert auto.statistics.rounds - 2 <= chosen <= auto.statistics.rounds, "but where there was nothing to choose"
    assert any("drafting pays" in reason for reason in report["reasons"])
    assert sum(ours.statistics.widths.values()) == chosen, "fixed widths are no choices"
    assert auto.statistics.advice is None


def test_it_stops_where_that_does_not_pay_and_says_so() -> None:
    counts = losing_engine().generate([1, 2], seed=1, max_tokens=300).statistics
    assert counts.widths[0] > 280
    assert any(reason.startswith("plain: drafting would give") for reason in counts.reasons)
    assert counts.advice is not None and "does not pay" in counts.advice and "decodes plainly" in counts.advice


def test_what_was_learned_serves_the_next_request() -> None:
    ours, theirs = engine(), losing_engine()
    ours.generate([1, 2], seed=1, max_tokens=200)
    second = ours.generate([2, 1], seed=2, max_tokens=40).statistics
    assert second.widths.get(0, 0) <= 1 and second.tokens_per_round > 2.0
    theirs.generate([1, 2], seed=1, max_tokens=300)
    assert set(theirs.generate([2, 1], seed=2, max_tokens=40).statistics.widths) == {0}


def test_caps_and_fixed_widths_are_kept() -> None:
    ours, widest = engine(), {}
    for name, settings in {"cap": {"max_width": 2}, "none": {"max_width": 0}, "fixed": {"width": 5}}.items():
        events: list[Event] = list(ours.stream([1, 2], seed=1, max_tokens=60, **settings))
        widest[name] = max(len(event.drafts) for event in events)
    assert widest == {"cap": 2, "none": 0, "fixed": 5}
    capped = engine(max_width=3).generate([1, 2], seed=1, max_tokens=100).statistics
    assert max(capped.widths) == 3


def test_a_batch_of_fixed_and_free_widths() -> None:
    ours = engine()
    wanted = [ours.generate([b], seed=b, max_tokens=60, width=0).token_ids for b in range(6)]
    streams = [ours.stream([b], seed=b, max_tokens=60, width=None if b % 2 else b) for b in range(6)]
    assert [list(stream)[-1].result.token_ids for stream in streams] == wanted


def test_a_draft_reads_only_what_it_is_asked_for() -> None:
    """Short answers start no unknown draft, and one that rests does not read along."""
    ours = engine(prefill_chunk=16)
    ours.generate([1] * 100, seed=1, max_tokens=8)
    assert drafter_of(ours).backend.num_tokens_fed == 0
    theirs = losing_engine(prefill_chunk=16)
    theirs.generate([1] * 8, seed=1, max_tokens=400)
    assert drafter_of(theirs).backend.num_tokens_fed < 200


def test_a_silent_draft_costs_nothing() -> None:
    clock = VirtualClock()
    target = MockBackend(MockConfig(**MODEL, seconds_per_pass=1.0), clock=clock)
    counts = Engine.load(target, draft=ScriptedDrafter(lambda tokens, width: []), clock=clock).generate(
        [Request(prompt=[b], sampling=SamplingParams(seed=b), max_tokens=50) for b in range(3)]
    )
    assert clock.now() == 50.0 and counts[0].statistics.drafted == 0


def test_free_passes_divide_by_nothing() -> None:
    clock = VirtualClock()
    draft = MockBackend(MockConfig(**MODEL, drift=0.2), clock=clock)
    ours = Engine.load(MockBackend(MockConfig(**MODEL), clock=clock), draft=draft, clock=clock)
    assert len(ours.generate([1], seed=1, max_tokens=50).token_ids) == 50


def test_a_point_that_was_not_visited_for_long_believes_the_next_sample() -> None:
    """Contexts grow meanwhile, and rows of one size more than of another."""
    curve = CostCurve()
    for _ in range(24):
        curve.add(1, 1.0)
    assert curve.samples(1, 1) == 24.0
    for _ in range(8):
        curve.add(2, 1.5)
    assert curve.samples(1, 1) == 24.0, "a few others change nothing"
    for number in range(100):
        curve.add(2, 1.5 + 0.01 * number)
    assert curve.samples(1, 1) < 4.0 and curve.seconds(1) > 1.2
    for _ in range(3):
        curve.add(1, 1.1)
    assert curve.seconds(1) == pytest.approx(1.1, rel=0.08)


def test_probes_are_lucky_now_and_then() -> None:
    surprise = Surprise()
    surprise.add(1, 1, 0.05)
    assert surprise.is_real(), "what was hardly ever kept is"
    surprise.add(1, 1, 0.45)
    assert not surprise.is_real()
    surprise.add(0, 1, 0.45)
    surprise.add(0, 1, 0.45)
    assert not surprise.is_real()
    for _ in range(3):
        surprise.add(1, 1, 0.45)
    assert surprise.is_real() and not surprise.is_real(), "three of three, after it began anew"


def test_a_request_like_all_others_begins_like_them() -> None:
    """Later places are kept more often, but are judged seldom: a mean over places is no measure of a request."""
    drafter = DrafterRecord()
    for number in range(8):
        record = JobRecord(0, drafter.offset)
        for turn in range(30):
            kept = (0, 0, 0, 6)[(turn + number) % 4]  # the first place one time in four, the others always
            judged = min(kept + 1, 6)
            drafter.add(6, Outcome.of_chain(6, kept, kept + 1), judged)
            record.add(kept, judged, drafter.expected(judged))
        drafter.look()
        drafter.ended(record)
    assert drafter.offset == 0.0


def test_a_new_request_is_one_of_many() -> None:
    """It begins as requests do on average, not as the last one ended."""
    drafter = DrafterRecord()
    for share in (0.4, 0.5, 0.45, 0.98):
        record = JobRecord(0, drafter.offset)
        for _ in range(300):
            drafter.add(1, Outcome.of_chain(1, int(share > 0.5), 1 + int(share > 0.5)), 1)
        drafter.look()
        record.add(round(300 * share), 300, 300 * drafter.mean)
        drafter.ended(record)
    assert drafter.mean > 0.9
    new = JobRecord(0, drafter.offset)
    chance = drafter.outlook(new.shift, 1)[0]
    assert 0.5 < chance < 0.8, chance
    new.add(200, 200, 200 * drafter.mean)
    new.look(200)
    assert drafter.outlook(new.shift, 1)[0] > 0.9, "it speaks for itself soon"


def test_costs_follow_a_drift_and_shrug_off_hiccups() -> None:
    curve = CostCurve()
    for _ in range(20):
        curve.add(1, 1.0)
        curve.add(5, 2.0)
    curve.add(5, 50.0)
    assert curve.seconds(5) == pytest.approx(2.0, rel=0.1)
    for _ in range(60):
        curve.add(5, 3.0)
    assert curve.seconds(5) == pytest.approx(3.0, rel=0.02)
    assert 1.2 < curve.seconds(1) < 1.6, "others follow the common pace"
    curve.add(1, 0.4)
    assert curve.seconds(1) == pytest.approx(0.4), "nothing is quicker than it is"


def test_costs_between_and_beyond_what_was_measured() -> None:
    curve = CostCurve()
    assert curve.seconds(5) > curve.seconds(1) == 1.0
    for size, seconds in ((4, 2.0), (8, 3.0), (12, 2.8), (16, 5.0)):
        curve.add(size, seconds)
    values = [curve.seconds(size / 2) for size in range(2, 100)]
    assert values == sorted(values) and curve.seconds(6) == pytest.approx(2.5, abs=0.1)
    assert curve.seconds(1) == pytest.approx(1.3, abs=0.1) and curve.seconds(32) > curve.hopeful(32) > 5.0
    curve.hint(100, 20.0)
    assert curve.seconds(100) == pytest.approx(20.0) and curve.seconds(16) == 5.0
    gap = CostCurve()
    for size, seconds in ((1, 1.0), (8, 1.1), (32, 3.0)):
        gap.add(size, seconds)
    assert 1.1 < gap.hopeful(12) < 1.2 < gap.seconds(12), "it may go on as before,"
    assert gap.hopeful(24) == pytest.approx(24 / 32 * 3.0), "until parts of the larger pass would be quicker"


def test_draft_costs_keep_reading_apart() -> None:
    passes, costs = CostCurve(), DraftCosts()
    costs.add(10.0 + 4 * 0.5, 4, 1.0, 100, passes)
    assert costs.read_s == pytest.approx(0.12) and not costs.is_known
    costs.add(4 * 0.5, 4, 1.0, 1, passes)
    assert costs.read_s == pytest.approx(0.1) and costs.seconds(2, 1.0, passes) == pytest.approx(1.0)
    assert costs.seconds(4, 8.0, passes) > 2.0


def test_what_reading_takes_at_once_is_learned_beside_a_price() -> None:
    passes, costs = CostCurve(), DraftCosts()
    passes.add(1, 1e-3)
    costs.expect_reading(1e-6)
    for unread in (40, 40, 400):
        costs.add(1e-3 + 1.5e-3 + 1e-6 * unread, 4, 1.0, unread, passes)
        costs.add(1e-3, 4, 1.0, 1, passes)
    assert costs.reading_s(1000) == pytest.approx(2.5e-3) and costs.reading_s(0) == 0.0


def test_a_reading_that_built_something_does_not_end_drafting() -> None:
    """Once a second is spent on graphs, a drafter would never be asked again, and so never be measured again."""
    passes, costs = CostCurve(), DraftCosts()
    for rows in (1, 20):
        passes.add(rows, 1e-3)
    costs.add(1e-3, 4, 1.0, 1, passes)
    costs.add(1.0, 4, 1.0, 20, passes)
    costs.add(1e-3, 4, 1.0, 1, passes)
    assert costs.read_s == pytest.approx(1e-3 / 20), "as slow as the target itself, at most"
    for _ in range(20):  # but if it goes on like that, it is so
        costs.add(0.1, 4, 1.0, 20, passes)
        costs.add(1e-3, 4, 1.0, 1, passes)
    assert costs.read_s > 3e-3


def rounds(record: DrafterRecord, job: JobRecord, share: float, count: int, start: int = 0, width: int = 4) -> int:
    """Rounds with a draft that is right with probability `share`; returns after how many a change was noticed."""
    generator, length, noticed = random.Random(1), start, 0
    for number in range(count):
        kept = next((place for place in range(width) if generator.random() >= share), width)
        judged = min(kept + 1, width)
        job.add(kept, judged, record.expected(judged))
        record.add(width, Outcome.of_chain(width, kept, kept + 1), judged)
        record.look()
        length += kept + 1
        if job.look(length) and not noticed:
            noticed = number + 1
    return noticed


def test_acceptance_is_learned_and_a_change_noticed() -> None:
    record, job = DrafterRecord(), JobRecord(0)
    assert rounds(record, job, 0.9, 200) == 0
    assert record.outlook(job.shift, 6)[5] == pytest.approx(0.9**6, abs=0.1), "places never tried are like the last"
    assert 0 < rounds(record, job, 0.05, 60, start=1000) < 12
    assert record.outlook(job.shift, 1)[0] < 0.2
    assert 0 < rounds(record, job, 0.9, 60, start=2000) < 12
    assert record.outlook(job.shift, 1)[0] > 0.7


def test_a_request_differs_from_the_others() -> None:
    record, good, bad = DrafterRecord(), JobRecord(0), JobRecord(0)
    for start in range(0, 800, 40):
        rounds(record, good, 0.9, 4, start)
        rounds(record, bad, 0.3, 4, start)
    assert record.outlook(good.shift, 1)[0] > record.outlook(bad.shift, 1)[0] + 0.3


def test_a_promise_counts_until_rounds_say_otherwise() -> None:
    kept = [0.6, 0.4, 0.3]
    promised = DrafterRecord()
    promised.believe(kept)
    assert promised.outlook(0, 3) == pytest.approx(kept, abs=0.05)
    unlucky = DrafterRecord()
    for record in (promised, unlucky):
        for _ in range(5):
            record.add(1, Outcome.of_chain(1, 0, 1), 1)
        record.look()
    assert promised.outlook(0, 1)[0] > 0.5 and unlucky.outlook(0, 1)[0] < 0.4, "five misses are bad luck, or not"
    request = JobRecord(0)
    rounds(promised, request, 0.05, 60)
    assert promised.outlook(request.shift, 1)[0] < 0.2, "it was wrong"


def test_a_drafter_that_promises_is_asked_before_it_was_tried_much() -> None:
    """The first proposals are all refused; what is promised outlives that."""
    asked: dict[bool, int] = {}
    for promises in (False, True):
        clock = VirtualClock()
        target = MockBackend(MockConfig(**MODEL, seconds_per_pass=1.0, seconds_per_token=0.4), clock=clock)
        right = Engine.load(target, draft="none", clock=clock).generate([1, 2], max_tokens=100, temperature=0.0)
        wanted = [1, 2, *right.token_ids]

        def script(tokens: Sequence[int], width: int, wanted: list[int] = wanted) -> Sequence[int]:
            line = wanted[len(tokens) : len(tokens) + width]
            return line if len(tokens) > 8 else [(token + 1) % 32 for token in line]

        drafter = ScriptedDrafter(script)
        drafter.promised = [0.9, 0.8, 0.7] if promises else []  # type: ignore[attr-defined]
        engine = Engine.load(target, draft=drafter, clock=clock)
        assert engine.generate([1, 2], max_tokens=100, temperature=0.0).token_ids == right.token_ids
        asked[promises] = engine.statistics.passes
    assert asked[True] < asked[False]


def test_passes_that_are_not_seen_follow_those_that_are() -> None:
    """A long context makes all passes slower; when it ends, all are quicker again."""
    curve = CostCurve()
    for _ in range(24):
        curve.add(1, 1.0)
    curve.add(2, 1.4)
    for _ in range(200):
        curve.add(1, 0.6)
    assert curve.seconds(1) == pytest.approx(0.6, rel=0.05) and curve.seconds(2) == pytest.approx(0.84, rel=0.15)


def test_a_rest_that_stands_asks_nobody() -> None:
    """The rounds between decisions are as plain as can be, and are told all the same."""
    ours = losing_engine()
    ours.generate([1, 2], max_tokens=300, seed=1)
    chooser, looks = ours.loop.width, 0
    room = chooser._room

    def look(job: Job) -> Choice:
        nonlocal looks
        looks += 1
        return room(job)

    chooser._room = look  # type: ignore[method-assign]
    result = ours.generate([1, 3], max_tokens=300, seed=1)
    assert looks < 100 and sum(result.statistics.reasons.values()) >= 295
    assert result.token_ids == losing_engine().generate([1, 3], max_tokens=300, seed=1, width=0).token_ids


def test_silence_and_short_proposals_are_expected() -> None:
    record = DrafterRecord()
    for _ in range(50):
        record.add_silence()
        record.add(8, Outcome.of_chain(2, 2, 3), 2)
    record.look()
    assert record.answers == pytest.approx(0.5, abs=0.02)
    assert record.reach(3) == pytest.approx([0.5, 0.5, 0.0], abs=0.05)


@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_nearly_the_best_of_all(seed: int) -> None:
    generator = random.Random(seed)
    fixed, row, step, extra = (generator.uniform(0.2, 1.0) for _ in range(4))

    def pass_s(rows: float) -> float:
        return fixed + 0.1 * row * rows + max(0.0, rows - 6.0) * 0.2 * extra

    def draft_s(name: str, depth: float, jobs: float) -> float:
        return 0.3 * step * depth * (1.0 + 0.05 * jobs)

    shares = [generator.choice((0.3, 0.6, 0.9, 0.97)) for _ in range(3)]
    chances = [[share**place for place in range(1, 6)] for share in shares]
    groups = [Group([index], {"model": Prospect(line, [1.0] * 5)}) for index, line in enumerate(chances)]
    batch = Batch(3.0, 3.0)

    def rate(widths: tuple[int, ...]) -> float:
        depth, drafted = max(widths), sum(widths)
        tokens = 3.0 + sum(sum(line[:width]) for line, width in zip(chances, widths, strict=True))
        return tokens / (pass_s(3.0 + drafted) + (draft_s("model", depth, drafted / depth) if depth else 0.0))

    ideal = max(itertools.product(range(6), repeat=3), key=rate)
    best = best_choice(groups, batch, pass_s, draft_s, 100.0)
    chosen = tuple(places["model"] for places in best.places)
    assert best.rate == pytest.approx(rate(chosen))
    assert max(best.rate, plain_rate(batch, pass_s, draft_s)) >= 0.97 * rate(ideal), (chosen, ideal)


def test_a_chain_of_drafters_asks_the_second_when_the_first_is_silent() -> None:
    lookup, model = Prospect([0.9, 0.8], [0.2, 0.2], 0.2), Prospect([0.8, 0.64], [1.0, 1.0])
    best = best_choice(
        [Group([0], {"lookup": lookup, "model": model})],
        Batch(1.0, 1.0),
        lambda rows: 1.0 + 0.01 * rows,
        lambda name, depth, jobs: 0.05 * depth if name == "model" else 0.0,
        100.0,
    )
    assert best.places == [{"lookup": 2, "model": 2}]
    assert best.tokens == pytest.approx(1.0 + 0.2 * 1.7 + 0.8 * 1.44)


def test_tries_are_bounded() -> None:
    budget, spent = Budget(0.01), 0.0
    budget.welcome(1000, 0)
    for _ in range(1000):
        budget.count(1, 1.0, 1.0, 1.0, None)
        budget.settle(lambda jobs: 1.0)
        if budget.is_due and budget.allowed(0.7, 1.0, 100.0) >= 0.5:
            budget.wait(0.5, 1.0)
            spent += 0.5
    assert 2.0 < spent < 0.025 * 1000
    with pytest.raises(ConfigError, match="probing"):
        WidthConfig(probing=-1.0)
