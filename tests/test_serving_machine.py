"""Random lives of a serving engine on real pages, and a day of requests: nothing is lost, nothing is left.

Requests of every kind come, go and are cancelled at random while there is never enough room. Each of them says what it
would have said alone, or a beginning of that; after every step caches, pages and tokens agree.
"""

from __future__ import annotations

import gc
import random
import resource
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from outrider.backends.base import Backend, State
from outrider.backends.mock import MockBackend
from outrider.backends.paged_mock import PagedMock
from outrider.clock import VirtualClock
from outrider.config import MockConfig, SchedulerConfig, SpeculationConfig, SuffixConfig
from outrider.draft.base import Drafter
from outrider.draft.model import ModelDrafter
from outrider.draft.ngram import NgramDrafter
from outrider.draft.run_ahead import RunAheadDrafter
from outrider.draft.suffix import SuffixDrafter
from outrider.engine.engine import Engine
from outrider.engine.stream import Stream
from outrider.kv.pages import Pages
from outrider.sched import policies
from outrider.types import FinishReason, Job, Request, SamplingParams, Slot

from conftest import check_caches, inner_of

MODEL = MockConfig(
    vocab_size=12, context=64, seed=3, sharpness=2.0, eos_ids=(0,), seconds_per_pass=0.01, seconds_per_token=0.001
)
STEMS = ([5, 9, 5, 9, 2, 7, 5, 9] * 3, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10] * 2)  # beginnings that requests have in common
PROMPTS = tuple(tuple(stem[:length] + tail) for stem in STEMS for length in (1, 7, 13, 20) for tail in ([], [11, 3]))
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=1.3, seed=2, top_k=6),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=1.0, seed=3, accept="rejection"),
)
HEADROOM = 3  # tokens a job is let in with beyond what it has: few, so that they get into each other's way
MOST_WIDTH = 6
ENOUGH_STEPS = 3_000  # for everything that is under way to end


@dataclass(frozen=True)
class Setup:
    """An engine of the machine."""

    policy: str
    preempt: Any
    swap_tokens: int
    num_pages: int
    page_size: int
    max_batch: int
    prefill_chunk: int
    spare: int | None  # tokens of a step beyond one for everybody
    draft: str  # on the target's pages, on pages of its own, or without pages and with two seats
    width: int | None
    order: int | None
    run_ahead: Any

    def engine(self) -> Engine:
        clock, model = VirtualClock(), replace(MODEL, order=self.order)
        pages = Pages(self.num_pages * 4 // self.page_size, self.page_size)
        target = CountedMock(model, pages, clock=clock)
        drafter: Drafter = self.drafter(model, pages, clock)
        if self.run_ahead:
            drafter = RunAheadDrafter(drafter, target.ops, always=True)
        drafters = [drafter, NgramDrafter(), SuffixDrafter(SuffixConfig(max_tokens=64))]
        scheduling = SchedulerConfig(
            max_batch=self.max_batch,
            prefill_chunk=self.prefill_chunk,
            step_tokens=None if self.spare is None else self.max_batch + self.spare,
            policy=self.policy,
            preempt=self.preempt,
            swap_tokens=self.swap_tokens,
        )
        speculation = SpeculationConfig(width=self.width, max_width=MOST_WIDTH)
        return Engine(target, drafters, scheduling=scheduling, speculation=speculation, clock=clock, threaded=False)

    def drafter(self, model: MockConfig, pages: Pages, clock: VirtualClock) -> ModelDrafter:
        model = replace(model, drift=0.4, seconds_per_pass=0.002, seconds_per_token=0.0)
        if self.run_ahead:
            clock = VirtualClock()  # two threads that sleep on one clock would not do it twice alike
        backend: Backend
        if self.draft == "shared":
            backend = PagedMock(model, pages, clock=clock)
        elif self.draft == "paged":
            backend = PagedMock(model, Pages(24, 4), clock=clock)
        else:
            backend = MockBackend(replace(model, max_slots=2), clock=clock)
        return ModelDrafter(backend, chunk=6, shares_slots=self.draft == "shared")


class CountedMock(PagedMock):
    """Counts how sequences begin and give way."""

    def open(self, tokens: Sequence[int] = (), limit: int | None = None, tenant: str = "") -> Slot | None:
        slot = super().open(tokens, limit, tenant)
        COUNTS["prefix hits"] += slot is not None and self.length(slot) > 0
        return slot

    def swap_out(self, slot: Slot) -> State:
        COUNTS["swaps out"] += 1
        return super().swap_out(slot)

    def swap_in(self, state: State, tokens: Sequence[int], limit: int, tenant: str = "") -> Slot | None:
        slot = super().swap_in(state, tokens, limit, tenant)
        COUNTS["swaps in"] += slot is not None
        COUNTS["swaps in whole"] += slot is not None and self.length(slot) == state["lengths"][0]
        return slot


COUNTS: Counter[str] = Counter()


@cache
def alone(order: int | None, prompt: tuple[int, ...], sampling: int, max_tokens: int, ignore_eos: bool) -> list[int]:
    """What a request says that nobody disturbs, decoded plainly without pages."""
    engine = Engine(
        MockBackend(replace(MODEL, order=order, seconds_per_pass=0.0, seconds_per_token=0.0)), threaded=False
    )
    request = Request(prompt=prompt, sampling=SAMPLINGS[sampling], max_tokens=max_tokens, ignore_eos=ignore_eos)
    return engine.generate(request).token_ids


SETUPS: dict[str, st.SearchStrategy[Any]] = {
    "policy": st.sampled_from(sorted(policies.POLICIES)),
    "swap_tokens": st.sampled_from([1000, 40, 0]),
    "num_pages": st.integers(16, 20),
    "page_size": st.sampled_from([2, 4, 8]),
    "max_batch": st.sampled_from([3, 5, 8]),
    "prefill_chunk": st.sampled_from([3, 16]),
    "spare": st.sampled_from([None, 1, 9]),
    "width": st.sampled_from([None, 3]),
    "order": st.sampled_from([None, 2]),
}
speculations = st.sampled_from(
    [{}, {}, {"width": 0}, {"width": 1}, {"width": 5}, {"width": 6, "tree": True}, {"tree": True}, {"max_width": 2}]
)


class Serving(RuleBasedStateMachine):
    """An engine that is driven by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Stream] = []
        self.setup: Setup
        self.engine: Engine

    @rule(
        which=st.lists(st.integers(0, len(PROMPTS) - 1), min_size=2, max_size=8),
        sampling=st.integers(0, len(SAMPLINGS) - 1),
        max_tokens=st.sampled_from([1, 4, 15, 40, 40]),
        ignore_eos=st.sampled_from([True, True, False]),
        priority=st.sampled_from(["low", "normal", "high"]),
        deadline_s=st.sampled_from([None] * 6 + [0.05, 0.5, 3.0]),
        tenant=st.sampled_from(["", "", "other"]),
        method=st.sampled_from([None, "none", "model", "ngram", "suffix", "ngram,model", "suffix,ngram"]),
        speculation=speculations,
        count=st.integers(0, 12),
    )
    def submit(self, which: list[int], sampling: int, speculation: dict[str, Any], count: int, **asked: Any) -> None:
        for index in which:
            self.send(Request(prompt=PROMPTS[index], sampling=SAMPLINGS[sampling], **asked, **speculation))
        self.steps(count)

    def send(self, request: Request) -> None:
        self.streams.append(self.engine.stream(request))
        COUNTS["requests"] += 1

    @rule()
    def step(self) -> None:
        engine = self.engine
        COUNTS["steps"] += engine.num_requests > 0  # others are not worth counting
        first, fed, loop = self.first(), engine.loop.target.num_tokens_fed, engine.loop
        lengths = {job: len(job.tokens) for job in loop.scheduler.running if len(job.tokens) - job.cached == 1}
        engine.step()
        check_caches(loop)
        self.check_room()
        assert loop.target.num_tokens_fed - fed <= loop.scheduler.config.budget
        starved = [job for job, length in lengths.items() if job.slot is not None and len(job.tokens) == length]
        assert not starved, f"{starved} decode and got no token"
        assert first is None or first.done or first.slot is not None, f"{first}, the first of all, gave way"

    @rule(count=st.integers(2, 16))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(self.streams[-8:]))
        was_open = not stream.is_over
        assert self.engine.cancel(stream.request_id, stream.tenant) == was_open
        assert stream.is_over != was_open, "the flag is read by the next step"
        self.step()
        assert stream.is_over

    @rule(seconds=st.sampled_from([0.01, 0.1, 1.0]))
    def wait(self, seconds: float) -> None:
        self.engine.clock.sleep(seconds)

    def first(self) -> Job | None:
        """The running job that nobody goes before, if there is one. Remaining work is an order that changes."""
        order, jobs = self.engine.loop.scheduler.policy.order, self.engine.loop.jobs.values()
        if not jobs or self.setup.policy == "sjf":
            return None
        first = min(jobs, key=lambda job: (order(job), job.id))
        return None if first.slot is None else first

    def check_room(self) -> None:
        """Nobody holds more pages than its tokens and drafts need, and limits are kept."""
        loop = self.engine.loop
        pages, running = loop.target.pages, loop.scheduler.running
        ahead = MOST_WIDTH * (2 if self.setup.run_ahead else 1) + 1
        need = [-(-(len(job.tokens) + ahead) // pages.page_size) for job in running]
        held = [len(pages.leases[job.slot].pages) for job in running]
        assert all(have <= most for have, most in zip(held, need, strict=True)), (held, need)
        assert pages.usage.held <= sum(held)
        assert len(running) <= self.setup.max_batch
        assert loop.scheduler.sequences.num_swapped <= self.setup.swap_tokens
        if self.setup.policy == "orca":
            assert self.engine.statistics.preemptions == 0

    def check_answer(self, stream: Stream) -> None:
        """It ended once, and said what it would have said alone, or a beginning of that."""
        job = stream._job
        assert job.error is None, f"{job.request_id} failed: {job.error!r}"
        events = list(stream)
        assert [event.result is not None for event in events] == [False] * (len(events) - 1) + [True], "not one end"
        assert [token for event in events for token in event.tokens] == job.result.token_ids == job.output
        request = job.request
        sampling = SAMPLINGS.index(request.sampling)
        if job.rule == "rejection" and request.sampling.temperature > 0.0:
            return
        wanted = alone(self.setup.order, tuple(request.prompt), sampling, request.max_tokens, request.ignore_eos)
        reason = job.result.finish_reason
        if reason in (FinishReason.CANCELLED, FinishReason.DEADLINE):
            COUNTS[reason] += 1
            wanted = wanted[: len(job.output)]
        assert job.output == wanted, f"{job.request_id} ({reason}) after {job.statistics.preemptions} preemptions"
        COUNTS["answers compared"] += 1

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine, loop = self.engine, self.engine.loop
        for _ in range(ENOUGH_STEPS):
            if not engine.num_requests:
                break
            self.step()
        assert not engine.num_requests, "something never ends"
        for stream in self.streams:
            self.check_answer(stream)
        assert not loop.scheduler.running and not loop.scheduler.waiting and loop.scheduler.sequences.num_swapped == 0
        usage = loop.target.pages.usage
        assert usage.held == usage.promised == 0, "a page leaked"
        for outer in loop.router.drafters.values():
            drafter = inner_of(outer)
            assert not getattr(drafter, "seats", {}) and not getattr(drafter, "lookups", {})
            if isinstance(drafter, ModelDrafter):
                assert drafter.backend.num_slots == 0 and not drafter._unseated
            if isinstance(outer, RunAheadDrafter):
                COUNTS["drafted ahead"] += outer.overlap.fresh
                COUNTS["stale"] += outer.overlap.stale
                assert not outer._ready and outer._flight is None
        statistics = engine.statistics
        COUNTS["preemptions"] += statistics.preemptions
        COUNTS["drafted"] += statistics.drafted
        COUNTS["accepted"] += statistics.accepted
        engine.close()


DRAFTS = {"on the target's pages": st.just("shared"), "apart": st.sampled_from(["paged", "seats"])}
PARTS = list(product(["recompute", "swap"], DRAFTS, [False, "always"]))  # of all kinds, the same number


def live(patch: pytest.MonkeyPatch, examples: int, rules: int, preempt: str, draft: str, run_ahead: Any) -> str:
    """Run machines; returns what happened in words."""
    fixed = {"preempt": st.just(preempt), "draft": DRAFTS[draft], "run_ahead": st.just(run_ahead)}
    if preempt == "swap":
        fixed["swap_tokens"] = st.sampled_from([1000, 40])

    class Machine(Serving):
        @initialize(setup=st.builds(Setup, **{**SETUPS, **fixed}))
        def begin(self, setup: Setup) -> None:
            self.setup, self.engine = setup, setup.engine()
            for prompt in PROMPTS[2:5]:  # more than there is room for, from the beginning
                self.send(Request(prompt=prompt, sampling=SAMPLINGS[0], max_tokens=40, ignore_eos=True))

    patch.setattr(policies, "HEADROOM", HEADROOM)
    COUNTS.clear()
    run_state_machine_as_test(Machine, settings=settings(max_examples=examples, stateful_step_count=rules))
    return ", ".join(f"{count:,} {what}" for what, count in sorted(COUNTS.items()))


@pytest.mark.blind  # `step` checks by itself
@pytest.mark.parametrize(("preempt", "draft", "run_ahead"), PARTS)
def test_random_lives_of_requests(preempt: str, draft: str, run_ahead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told = live(monkeypatch, 5, 14, preempt, draft, run_ahead)
    assert COUNTS["steps"] >= 150 and COUNTS["answers compared"] >= 10 and COUNTS["accepted"] >= 10, told
    assert COUNTS["preemptions"] >= 4 and COUNTS["swaps in"] >= (2 if preempt == "swap" else 0), told


@pytest.mark.slow
@pytest.mark.blind
@pytest.mark.parametrize(("preempt", "draft", "run_ahead"), PARTS)
def test_a_hundred_thousand_steps(
    preempt: str, draft: str, run_ahead: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An eighth of them in each part."""
    told = live(monkeypatch, 170, 40, preempt, draft, run_ahead)
    with capsys.disabled():
        print(f"\n{preempt}, draft {draft}, run_ahead={run_ahead}: {told}")  # noqa: T201
    assert COUNTS["steps"] >= 12_500 and COUNTS["answers compared"] >= 1_000, told
    assert COUNTS["preemptions"] >= 300 and COUNTS["prefix hits"] >= 300 and COUNTS["accepted"] >= 1_000, told
    assert COUNTS["swaps in"] >= (200 if preempt == "swap" else 0), told
    assert COUNTS["drafted ahead"] >= (50 if run_ahead else 0), told


DAY_S = 86_400.0
SMALL = replace(MODEL, context=32, eos_ids=(), seconds_per_pass=2.0)


def soak(num_requests: int, seconds: float) -> tuple[Engine, Counter[FinishReason], dict[str, int]]:
    """So many requests over so much virtual time; returns the engine, how they ended, and what memory grew by since a
    tenth of them."""
    clock, randomness = VirtualClock(), random.Random(5)
    target = PagedMock(SMALL, Pages(256, 4), clock=clock)
    drafters = [SuffixDrafter(SuffixConfig(max_tokens=256)), NgramDrafter()]
    engine = Engine(target, drafters, scheduling=SchedulerConfig(max_batch=64), clock=clock, threaded=False)
    shapes = [
        Request(
            prompt=prompt[:6],
            sampling=sampling,
            max_tokens=max_tokens,
            width=width,
            deadline_s=deadline_s,
            tenant=str(len(prompt) % 3),
        )
        for prompt in PROMPTS
        for sampling in SAMPLINGS[:2]
        for max_tokens in range(1, 5)
        for width, deadline_s in ((0, None), (2, None), (0, 5.0))
    ]
    reasons: Counter[FinishReason] = Counter()
    grown: dict[str, int] = {}
    streams: dict[tuple[str, str], Stream] = {}
    gap, arrival, num_sent = seconds / num_requests, 0.0, 0
    while num_sent < num_requests or engine.num_requests:
        while num_sent < num_requests and arrival <= clock.now():
            stream = engine.stream(randomness.choice(shapes))
            if num_sent % 100 == 7:
                stream.close()
                reasons[stream.result.finish_reason] += 1
            else:
                streams[stream.tenant, stream.request_id] = stream  # a dropped stream is cancelled
            num_sent, arrival = num_sent + 1, arrival + randomness.expovariate(1.0 / gap)
            if num_sent == num_requests // 10:
                grown = {name: -value for name, value in memory().items()}
        if not engine.num_requests:
            clock.sleep(max(0.0, arrival - clock.now()))
        engine.step()
        for key in [key for key, stream in streams.items() if stream.is_over]:
            reasons[streams.pop(key).result.finish_reason] += 1
    return engine, reasons, {name: value + grown[name] for name, value in memory().items()}


def memory() -> dict[str, int]:
    """What the process has come to: objects now, and the most memory so far."""
    gc.collect()
    return {"objects": len(gc.get_objects()), "kilobytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


def check_soak(num_requests: int, seconds: float) -> str:
    engine, reasons, grown = soak(num_requests, seconds)
    loop = engine.loop
    told = f"{dict(reasons)}, {engine.clock.now():,.0f} s, {engine.statistics.passes:,} passes, grown by {grown}"
    assert sum(reasons.values()) == num_requests and reasons[FinishReason.CANCELLED] >= num_requests // 101, told
    assert not loop.jobs and not loop.scheduler.running and not loop.scheduler.waiting, told
    loop.target.pages.check()
    assert loop.target.pages.usage.held == loop.target.num_slots == 0, told
    assert not any(getattr(drafter, "lookups", {}) for drafter in loop.router.drafters.values()), told
    assert grown["objects"] < 2_000 and grown["kilobytes"] < 8_192, told
    return told


@pytest.mark.blind
def test_five_thousand_requests_leave_nothing() -> None:
    check_soak(5_000, DAY_S / 200)


@pytest.mark.slow
@pytest.mark.blind
def test_a_day_of_a_million_requests(capsys: pytest.CaptureFixture[str]) -> None:
    told = check_soak(1_000_000, DAY_S)
    with capsys.disabled():
        print(f"\n{told}")  # noqa: T201
