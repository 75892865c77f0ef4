"""The draft works while the target judges: the same answers, stale proposals never judged, errors told, time gained."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
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
from outrider.draft.base import Drafter
from outrider.draft.model import ModelDrafter
from outrider.draft.run_ahead import Payoff, Ready, RunAheadDrafter
from outrider.engine.engine import Engine
from outrider.errors import ConfigError, DraftError
from outrider.kv.pages import Pages
from outrider.types import Drafts, FinishReason, Job, Request, SamplingParams, Scores

from conftest import drafter_of

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
    drafters: list[Drafter] = [drafter]
    if run_ahead:
        drafters = [RunAheadDrafter(drafter, target.ops, always=run_ahead == "always")]
    return Engine(target, drafters, scheduling=config, speculation=speculation, threaded=False)


def requests(count: int, **sampling: Any) -> list[Request]:
    return [
        Request(
            prompt=[1, 2 + index % 5, 3], sampling=SamplingParams(seed=index, **sampling), max_tokens=12 + 7 * index
        )
        for index in range(count)
    ]


def test_one_gpu_refuses_it() -> None:
    """Passes are queued behind each other there: it took up to twice as long."""
    target = MockBackend(TARGET)
    target.info = replace(target.info, prelaunch=True)
    with pytest.raises(ConfigError, match=r"run_ahead gains nothing on one GPU.*draft_device"):
        Engine.load(target, draft=MockBackend(DRAFT), run_ahead=True)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("width", [1, 3, 6, None])
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"accept": "coupled"}, {"accept": "coupled", "repetition_penalty": 1.4, "top_p": 0.9}],
    ids=["greedy", "coupled", "shaped"],
)
def test_answers_are_those_of_plain_decoding(paged: bool, width: int | None, sampling: dict[str, Any]) -> None:
    asked = requests(5, **sampling)
    plain = Engine(MockBackend(TARGET), threaded=False).generate(asked)
    with make(width=width, paged=paged) as engine:
        ours = engine.generate(asked)
        assert [result.token_ids for result in ours] == [result.token_ids for result in plain]
        if width is not None:
            assert drafter_of(engine).overlap.fresh > 0 and drafter_of(engine).overlap.stale > 0


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
    plain = Engine(MockBackend(TARGET), threaded=False).generate(asked)
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


def num_stale_proposals_verified(monkeypatch: pytest.MonkeyPatch) -> int:
    """Rounds whose proposal had been drafted behind other tokens than the job's."""
    made: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    wrong = 0
    draft, take = RunAheadDrafter._draft, RunAheadDrafter._take

    def spy_draft(self: RunAheadDrafter, jobs: list[Job], *given: Any) -> Any:
        drafts, seconds = draft(self, jobs, *given)
        for assumed, tokens in zip(jobs, drafts.proposals(), strict=True):
            if len(tokens) > 1:
                made.setdefault(tuple(tokens[1:]), []).append((assumed.id, *assumed.tokens, tokens[0]))
        return drafts, seconds

    def spy_take(self: RunAheadDrafter, job: Job, *given: Any) -> Ready | None:
        nonlocal wrong
        ready = take(self, job, *given)
        if ready is not None:
            wrong += (job.id, *job.tokens) not in made[tuple(ready.tokens)]
        return ready

    monkeypatch.setattr(RunAheadDrafter, "_draft", spy_draft)
    monkeypatch.setattr(RunAheadDrafter, "_take", spy_take)
    with make() as engine:
        engine.generate(requests(4, accept="coupled"))
        assert drafter_of(engine).overlap.fresh > 5
    return wrong


def test_stale_proposals_are_never_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_stale_proposals_verified(monkeypatch) == 0


@pytest.mark.blind
def test_without_a_look_at_the_tokens_they_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ready, "is_fresh", lambda self, job: True)
    assert num_stale_proposals_verified(monkeypatch) > 0


@pytest.mark.blind
def test_the_length_alone_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rejected draft and the token that replaced it are as long."""
    monkeypatch.setattr(Ready, "is_fresh", lambda self, job: len(job.tokens) - self.start == len(self.expected))
    assert num_stale_proposals_verified(monkeypatch) > 0


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
    target = MockBackend(slow)
    drafter = RunAheadDrafter(ModelDrafter(MockBackend(slow)), target.ops, always=True)
    with Engine(target, [drafter], speculation=SpeculationConfig(width=4)) as engine:
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
    target = Slow(clock, 0.01)
    drafter = RunAheadDrafter(ModelDrafter(Slow(clock, 0.0005)), target.ops, now=clock.now)
    with Engine(target, [drafter], clock=clock, threaded=False) as engine:
        settings: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
        for _ in range(20):  # batches of two: what one row costs is not known by them
            engine.generate([[1] * 8, [2] * 8], width=4, max_tokens=17, **settings)
            if drafter.payoff.is_trying:
                break
        assert drafter.payoff.is_trying
        started = clock.now()
        engine.generate([3] * 8, max_tokens=400, **settings)
        assert 400 / (clock.now() - started) > 300, "plain decoding gives 98 tokens a second"


def test_only_models_run_ahead() -> None:
    with pytest.raises(ConfigError, match="run_ahead needs a draft model; ngram does not draft ahead"):
        Engine.load(MockBackend(TARGET), draft="ngram", run_ahead=True)


def test_the_engine_builds_it_around_models_only() -> None:
    with Engine.load(MockBackend(TARGET), draft=["ngram", MockBackend(DRAFT)], width=2, run_ahead=True) as engine:
        kinds = {name: isinstance(one, RunAheadDrafter) for name, one in engine.loop.router.drafters.items()}
        assert kinds["model"] and not kinds["ngram"]
