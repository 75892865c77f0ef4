"""The draft works while the target judges: the same answers, stale proposals never judged, errors told, time gained."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from outrider.backends.base import Spans
from outrider.backends.mock import MockBackend
from outrider.backends.paged_mock import PagedMock
from outrider.clock import VirtualClock
from outrider.config import MockConfig, SchedulerConfig, SpeculationConfig
from outrider.draft.model import ModelDrafter
from outrider.engine.ahead import Payoff, RunAhead, Tag
from outrider.engine.engine import Engine
from outrider.errors import ConfigError, DraftError
from outrider.kv.pages import Pages
from outrider.types import Drafts, FinishReason, Request, SamplingParams, Scores

TARGET = MockConfig(vocab_size=8, seed=3, sharpness=3.0)
DRAFT = MockConfig(vocab_size=8, seed=3, sharpness=3.0, drift=0.3)


def make(*, width: int | None = 3, paged: bool = False, run_ahead: Any = "always", **scheduling: Any) -> Engine:
    config = SchedulerConfig(**scheduling)
    speculation = SpeculationConfig(width=width)
    if paged:
        pages = Pages(64, 4)
        target: MockBackend = PagedMock(TARGET, pages)
        drafter = ModelDrafter(PagedMock(DRAFT, pages), shares_slots=True)
    else:
        target, drafter = MockBackend(TARGET), ModelDrafter(MockBackend(DRAFT))
    return Engine(target, [drafter], scheduling=config, speculation=speculation, run_ahead=run_ahead)


def requests(count: int, **sampling: Any) -> list[Request]:
    return [
        Request(
            prompt=[1, 2 + index % 5, 3], sampling=SamplingParams(seed=index, **sampling), max_tokens=12 + 7 * index
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("width", [1, 3, 6, None])
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"accept": "coupled"}, {"accept": "coupled", "repetition_penalty": 1.4, "top_p": 0.9}],
    ids=["greedy", "coupled", "shaped"],
)
def test_answers_are_those_of_plain_decoding(paged: bool, width: int | None, sampling: dict[str, Any]) -> None:
    asked = requests(5, **sampling)
    plain = Engine(MockBackend(TARGET)).generate(asked)
    with make(width=width, paged=paged) as engine:
        ours = engine.generate(asked)
        assert [result.token_ids for result in ours] == [result.token_ids for result in plain]
        if width is not None:
            assert engine.loop.ahead is not None and engine.loop.ahead.overlap.fresh > 0
            assert engine.loop.ahead.overlap.stale > 0


@given(
    seeds=st.lists(st.integers(0, 99), min_size=1, max_size=6),
    width=st.integers(1, 5),
    lengths=st.lists(st.integers(1, 40), min_size=6, max_size=6),
    paged=st.booleans(),
    max_batch=st.integers(1, 6),
)
@hypothesis_settings(max_examples=40)
def test_any_batch(seeds: list[int], width: int, lengths: list[int], paged: bool, max_batch: int) -> None:
    asked = [
        Request(prompt=[1 + seed % 7], sampling=SamplingParams(seed=seed), max_tokens=length, stop_ids=(seed % 8,))
        for seed, length in zip(seeds, lengths, strict=False)
    ]
    plain = Engine(MockBackend(TARGET)).generate(asked)
    with make(width=width, paged=paged, max_batch=max_batch) as engine:
        assert [r.token_ids for r in engine.generate(asked)] == [r.token_ids for r in plain]


def test_the_same_proposals_as_in_order() -> None:
    """Not only the answers: drafted and kept tokens are those of the synchronous order, under `rejection` too."""
    asked = [Request(prompt=[1, 2], sampling=SamplingParams(seed=n, accept="rejection"), max_tokens=60) for n in (1, 2)]
    with make() as ahead, make(run_ahead=False) as ordered:
        for ours, theirs in zip(ahead.generate(asked), ordered.generate(asked), strict=True):
            assert ours.token_ids == theirs.token_ids
            assert ours.statistics.drafted == theirs.statistics.drafted
            assert ours.statistics.accepted == theirs.statistics.accepted


def stale_proposals_judged(monkeypatch: pytest.MonkeyPatch) -> int:
    """Rounds whose proposal had been drafted behind other tokens than the job's."""
    made: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    wrong = 0
    keep, take = RunAhead._keep, RunAhead.take

    def spy_keep(self: RunAhead, flight: Any, drafts: Drafts) -> None:
        for assumed, tokens in zip(flight.copies, drafts.proposals(), strict=True):
            if len(tokens) > 1:
                made.setdefault(tuple(tokens[1:]), []).append((assumed.id, *assumed.tokens, tokens[0]))
        keep(self, flight, drafts)

    def spy_take(self: RunAhead, plan: Any) -> Any:
        nonlocal wrong
        parts = take(self, batch)
        for members, drafts in parts:
            for index, tokens in zip(members, drafts.proposals(), strict=True):
                job = batch.decode[index]
                wrong += (job.id, *job.tokens) not in made[tuple(tokens)]
        return parts

    monkeypatch.setattr(RunAhead, "_keep", spy_keep)
    monkeypatch.setattr(RunAhead, "take", spy_take)
    with make() as engine:
        engine.generate(requests(4, accept="coupled"))
        assert engine.loop.ahead is not None and engine.loop.ahead.overlap.fresh > 5
    return wrong


def test_stale_proposals_are_never_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stale_proposals_judged(monkeypatch) == 0


@pytest.mark.blind
def test_without_the_tag_they_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunAhead, "is_fresh", lambda self, ready, job: True)
    assert stale_proposals_judged(monkeypatch) > 0


@pytest.mark.blind
def test_without_the_epoch_they_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The length alone does not tell: a refused draft and the token that replaced it are as long."""
    monkeypatch.setattr(RunAhead, "is_fresh", lambda self, ready, job: ready.tag[:2] == Tag.of(job)[:2])
    assert stale_proposals_judged(monkeypatch) > 0


def test_an_error_of_the_draft_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Drafts:
        raise RuntimeError("the draft tripped")

    with make() as engine:
        monkeypatch.setattr(ModelDrafter, "propose_ahead", fail)
        with pytest.raises(DraftError, match="the draft tripped"):
            engine.generate([1, 2], max_tokens=9, temperature=0.0)
        monkeypatch.undo()
        assert len(engine.generate([1, 2], max_tokens=9, temperature=0.0).token_ids) == 9


def test_cancelling_ends_within_a_round() -> None:
    slow = MockConfig(vocab_size=8, seed=3, seconds_per_pass=0.02)
    with Engine(
        MockBackend(slow), [ModelDrafter(MockBackend(slow))], speculation=SpeculationConfig(width=4), run_ahead="always"
    ) as engine:
        stream = engine.stream([1, 2], max_tokens=500, temperature=0.0)
        next(stream)
        threading.Timer(0.05, stream.cancel).start()
        started = time.perf_counter()
        events = list(stream)
        assert events[-1].result is not None and events[-1].result.finish_reason is FinishReason.CANCELLED
        assert time.perf_counter() - started < 2.0
        assert engine.loop.target.num_slots == 0


def test_what_does_not_pay_is_switched_off() -> None:
    payoff = Payoff()
    rates = {True: 80.0, False: 100.0}
    on = 0
    for _ in range(400):
        on += payoff.is_on
        payoff.add(4, 4 / rates[payoff.is_on])
    assert 0 < on < 40
    rates[True], on = 150.0, 0  # it pays by now, and a try finds out
    for _ in range(800):
        on += payoff.is_on
        payoff.add(4, 4 / rates[payoff.is_on])
    assert on > 200


def test_plain_rounds_are_learned_from_while_run_ahead_is_tried() -> None:
    """Else plain decoding would be measured again and again, and no round with drafts would end the try."""

    class Slow(MockBackend):
        def __init__(self, clock: VirtualClock, seconds: float) -> None:
            super().__init__(MockConfig(vocab_size=16, seed=3, order=1, context=4096))
            self.clock, self.seconds = clock, seconds

        def score(self, spans: Spans, hidden: Sequence[int] = ()) -> Scores:
            self.clock.sleep(self.seconds * (1.0 + 0.02 * sum(spans.counts)))
            return super().score(spans, hidden)

    clock = VirtualClock()
    with Engine(Slow(clock, 0.01), [ModelDrafter(Slow(clock, 0.0005))], clock=clock, run_ahead=True) as engine:
        assert engine.loop.ahead is not None
        settings: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
        for _ in range(20):  # batches of two: what one row costs is not known by them
            engine.generate([[1] * 8, [2] * 8], width=4, max_tokens=17, **settings)
            if engine.loop.ahead.payoff.is_trying:
                break
        assert engine.loop.ahead.payoff.is_trying
        started = clock.now()
        engine.generate([3] * 8, max_tokens=400, **settings)
        assert 400 / (clock.now() - started) > 300, "plain decoding gives 98 tokens a second"


def test_only_models_run_ahead() -> None:
    with pytest.raises(ConfigError, match="run_ahead needs a draft model; ngram does not draft ahead"):
        Engine.load(MockBackend(TARGET), draft="ngram", run_ahead=True)
