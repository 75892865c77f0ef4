"""Widths on a device that is given work ahead: the host's work costs nothing while it is clear what comes next, and
much in rounds where it is not. Virtual time; the costs are about those of an 8B model and a 1B draft on an H200."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from outrider.backends.base import Spans
from outrider.backends.mock import MockBackend
from outrider.clock import VirtualClock
from outrider.config import MockConfig
from outrider.draft.lookup import NoDrafter, certain
from outrider.engine.engine import Engine
from outrider.engine.timing import RoundTimer
from outrider.metrics import PassTimes
from outrider.sampling.ops import SamplingOps
from outrider.spec.costs import CostCurve, DraftCosts
from outrider.types import Drafts, Job, Request, SamplingParams, Scores, Verdicts

MODEL = MockConfig(vocab_size=16, seed=3, order=1, context=4096)
PASS_MS = {1: 4.03, 8: 4.18, 32: 4.6, 64: 5.5, 128: 6.6, 256: 9.8, 512: 17.0, 4096: 102.0}  # by rows
STEP_MS = {1: 0.95, 32: 1.1, 64: 1.3, 128: 1.6, 256: 2.3}  # by jobs
LENGTH = 128


def between(points: Mapping[int, float], at: float) -> float:
    known = sorted(points)
    low, high = list(pairwise(known))[max(0, min(bisect_left(known, at), len(known) - 1) - 1)]
    return (points[low] + (points[high] - points[low]) * (at - low) / (high - low)) / 1e3


class Ops(SamplingOps):
    is_late = False

    @property
    def queues(self) -> bool:
        return True

    def judge(self, jobs: Sequence[Job], drafts: Drafts, scores: Scores) -> Verdicts:
        verdicts = super().judge(jobs, drafts, scores)
        verdicts.is_late = self.is_late and (drafts.may_be_queued or not any(drafts.counts))
        return verdicts


class Device(MockBackend):
    """A pass that comes as expected has run while the host worked."""

    def __init__(self, clock: VirtualClock, *, queues_drafts: bool = True) -> None:
        super().__init__(MODEL)
        self.clock, self.ops, self.expected = clock, Ops(np), ("", 0)
        self.queues_drafts = queues_drafts
        self.following = [int(np.argmax(self.logits_after([token]))) for token in range(MODEL.vocab_size)]

    def pass_s(self, jobs: int, rows: int, context: int = 0, hidden: Sequence[int] = ()) -> float:
        return between(PASS_MS, jobs * rows)

    def score(self, spans: Spans, hidden: Sequence[int] = ()) -> Scores:
        jobs, kind = len(spans.slots), "drafts" if max(spans.rows) > 1 else "plain"
        self.ops.is_late = self.expected[0] != kind or jobs > self.expected[1]  # type: ignore[attr-defined]
        host_s = (1e-3 + 40e-6 * jobs) * (3.0 if kind == "drafts" else 1.0) if self.ops.is_late else 0.0  # type: ignore[attr-defined]
        self.clock.sleep(between(PASS_MS, sum(spans.counts)) + host_s)
        goes_on = spans.goes_on and (kind == "plain" or (self.queues_drafts and min(spans.rows) > 1))
        self.expected = (kind if goes_on else "", jobs)
        return super().score(spans, hidden)


class SlowHost(Device):
    """However little is drafted, a round with drafts waits for the host."""

    def score(self, spans: Spans, hidden: Sequence[int] = ()) -> Scores:
        started = self.clock.now()
        scores = super().score(spans, hidden)
        if max(spans.rows) > 1:
            drafted_s = between(STEP_MS, len(spans.slots)) * (max(spans.rows) - 1)
            self.clock.sleep(max(0.0, 11e-3 - drafted_s - (self.clock.now() - started)))
        return scores


class Prophet(NoDrafter):
    name = "prophet"
    is_built_by_length = False

    def __init__(self, device: Device, share: float) -> None:
        self.device, self.share, self.dice, self.read = device, share, np.random.default_rng(0), set[int]()

    def draft_s(self, jobs: int, steps: int) -> float | None:
        return between(STEP_MS, jobs) * steps if self.device.queues_drafts else None

    def propose(self, jobs: Sequence[Job], widths: Sequence[int], trees: Sequence[bool]) -> Drafts:
        unread = sum(len(job.tokens) for job in jobs if job.id not in self.read)
        self.read |= {job.id for job in jobs}
        self.device.clock.sleep(between(STEP_MS, len(jobs)) * max(widths) + 7e-6 * unread)
        drafts = certain([self._line(job.tokens[-1], width) for job, width in zip(jobs, widths, strict=True)])
        drafts.may_be_queued = self.device.queues_drafts
        return drafts

    def _line(self, token: int, width: int) -> list[int]:
        line: list[int] = []
        for _ in range(width):
            token = (self.device.following[token] + (self.dice.random() >= self.share)) % MODEL.vocab_size
            line.append(token)
        return line


def rate(engine: Engine, batch: int, width: int | None) -> float:
    """Tokens a second while all of them are under way."""
    requests = [
        Request(
            prompt=[number % 16] * 32,
            sampling=SamplingParams(temperature=0.0),
            max_tokens=LENGTH,
            width=width,
            ignore_eos=True,
        )
        for number in range(batch)
    ]
    streams = engine.open_streams(requests)  # held: a stream that nobody holds is cancelled
    clock, seen = engine.loop.clock, list[tuple[float, int]]()
    while engine.num_requests:
        engine.step()
        running = list(engine.loop.scheduler.running)
        if len(running) == batch and all(len(job.tokens) > job.num_prompt for job in running):
            seen.append((clock.now(), sum(len(job.tokens) for job in running)))
    assert all(len(stream.tokens) == LENGTH for stream in streams)
    return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])


@pytest.mark.parametrize(("batch", "least"), [(1, 1.4), (8, 1.45), (32, 1.2), (128, 0.95), (256, 0.97)])
def test_widths_follow_what_rounds_cost_when_they_are_queued(batch: int, least: float) -> None:
    """With a draft that is right 8 times of 10, costs allow 1.7, 1.6, 1.4, 1.04 and no gain at all."""
    clock = VirtualClock()
    device = Device(clock)
    engine = Engine.load(device, draft=Prophet(device, 0.8), max_batch=batch, prefill_chunk=4096, clock=clock)
    plain = [rate(engine, batch, 0) for _ in range(2)][1]
    ratios = sorted(rate(engine, batch, None) / plain for _ in range(6 if batch < 128 else 5))
    assert ratios[len(ratios) // 2] > least, ratios


def test_where_rounds_wait_for_the_host_longer_chains_cost_nothing() -> None:
    """11 ms allow 7 drafts, of which 3.2 stay; a plain pass takes 4."""
    clock = VirtualClock()
    device = SlowHost(clock)
    engine = Engine.load(device, draft=Prophet(device, 0.8), max_batch=1, clock=clock)
    plain = [rate(engine, 1, 0) for _ in range(2)][1]
    best = max(rate(engine, 1, width) for width in (3, 5, 7, 9))
    rates = sorted(rate(engine, 1, None) for _ in range(6))
    assert best > 1.3 * plain and rates[3] > 0.9 * best, (plain, best, rates)
    assert engine.statistics.widths.get(7, 0) > 0.3 * sum(engine.statistics.widths.values()), engine.statistics.widths


@pytest.mark.parametrize("is_built", [True, False])
def test_what_would_have_to_be_built_first_is_not_chosen(is_built: bool) -> None:
    """Longer chains than were measured, and trees."""
    clock = VirtualClock()
    device = Device(clock)
    prophet = Prophet(device, 0.97)
    prophet.is_built_by_length = is_built
    engine = Engine.load(device, draft=prophet, max_batch=1, clock=clock)
    rate(engine, 1, 0)
    for _ in range(4):
        rate(engine, 1, None)
    widths = engine.statistics.widths
    assert max(widths) == 7 if is_built else max(widths) > 7, widths


def test_a_floor_is_what_is_seen_above_the_price() -> None:
    passes, costs = CostCurve(), DraftCosts()
    passes.expect(1, 0.001)
    for depth in (1, 3, 7):
        costs.expect(1e-4 * depth, depth, 1.0)
    for _ in range(3):
        costs.add(6e-4, 3, 1.0, 0, passes)
    assert costs.seconds(1, 1.0, passes) == costs.seconds(5, 1.0, passes) == pytest.approx(6e-4)
    assert costs.seconds(7, 1.0, passes) == pytest.approx(7e-4), "the device takes that long"
    costs.add(1.0, 3, 1.0, 0, passes)
    assert costs.seconds(3, 1.0, passes) < 8e-4, "something else took its time"
    costs.add(3e-4, 3, 1.0, 0, passes)
    assert costs.seconds(1, 1.0, passes) == pytest.approx(3e-4), "the device was waited for: the host takes no longer"
    for _ in range(6):
        costs.add(6e-4, 3, 1.0, 0, passes)
    assert costs.seconds(1, 1.0, passes) > 5e-4, "or that was chance"


def test_floors_of_batches_that_were_not_priced() -> None:
    """Their prices are those of the nearest. A round that seems to have cost nothing does not say that drafts are."""
    passes, costs = CostCurve(), DraftCosts()
    for rows in (1, 4):
        passes.expect(rows, 0.001)
        for depth in (1, 4, 7):
            costs.expect(1e-4 * depth, depth, float(rows))
    costs.add(0.0, 4, 2.0, 0, passes)
    assert costs.seconds(4, 2.0, passes) == pytest.approx(4e-4)
    for _ in range(24):
        costs.add(2e-3, 2, 2.0, 0, passes)
    assert costs.seconds(2, 2.0, passes) == costs.seconds(7, 2.0, passes) == pytest.approx(2e-3, rel=0.2)
    assert costs.seconds(4, 4.0, passes) == pytest.approx(4e-4), "others have a floor of their own"


@pytest.mark.parametrize(("batch", "share"), [(1, 0.6), (8, 0.7), (32, 0.8)])
def test_drafts_that_are_never_queued_cost_what_they_take(batch: int, share: float) -> None:
    """Plain passes are, and fixed widths lose there."""
    clock = VirtualClock()
    device = Device(clock, queues_drafts=False)
    engine = Engine.load(device, draft=Prophet(device, share), max_batch=batch, prefill_chunk=4096, clock=clock)
    plain = [rate(engine, batch, 0) for _ in range(2)][1]
    assert max(rate(engine, batch, width) / plain for width in (1, 2, 3, 5)) < 0.97
    ratios = sorted(rate(engine, batch, None) / plain for _ in range(5))
    assert ratios[2] > 0.96, ratios


def test_what_can_be_less_gives_way_to_what_is_known() -> None:
    curve = CostCurve()
    curve.add(8, 0.010, at_most=True)
    assert curve.seconds(8) == pytest.approx(0.010) and curve.samples(1, 99) == 0.0
    curve.add(8, 0.004)
    assert curve.seconds(8) == pytest.approx(0.004, rel=0.12)
    for _ in range(9):
        curve.add(8, 0.020, at_most=True)
    curve.add(16, 0.020, at_most=True)
    assert curve.seconds(8) == pytest.approx(0.004, rel=0.12)
    assert curve.seconds(16) < 0.008, "a pass that came late says little of passes that do not"
    curve.add(8, 0.003, at_most=True)
    assert curve.seconds(8) <= 0.003, "what can be less is at most that"


def test_drafting_costs_are_those_of_rounds_that_were_queued() -> None:
    passes, costs = CostCurve(), DraftCosts()
    passes.add(1, 0.004)
    costs.add(0.009, 3, 1.0, 0, passes, at_most=True)
    assert not costs.is_sure and costs.seconds(3, 1.0, passes) == pytest.approx(0.009)
    assert costs.hope * costs.seconds(3, 1.0, passes) < 0.009
    costs.add(0.003, 3, 1.0, 0, passes)
    assert costs.is_sure and costs.seconds(3, 1.0, passes) == pytest.approx(0.003)
    assert costs.seconds(1, 1.0, passes) == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("makers", "is_late", "draft_s", "judge_s"),
    [(["a", ""], False, 0.005, 0.0), ([], True, 0.0, 0.005), ([], False, 0.0, 0.0)],
)
def test_a_round_is_charged_to_whom_it_is_for(makers: list[str], is_late: bool, draft_s: float, judge_s: float) -> None:
    """The device says that the pass took 4 ms of a round of 9: the rest is drafting's, or of a pass that came late."""
    clock = VirtualClock()
    timer, times = RoundTimer(clock), PassTimes(0.001, 0.001, 0.002, 0, 1, True)
    verdicts: Any = Verdicts(np.zeros(1), np.zeros(1), seconds=(0.0, 0.004), is_late=is_late)
    timer.begin()
    clock.sleep(0.009)
    timer.take(times, verdicts, queues=True)
    timer.charge(times, Drafts([1] * len(makers), None, makers=makers))
    assert times.draft_s == pytest.approx(draft_s) and times.judge_s == pytest.approx(judge_s)
    assert times.drafters.get("a", 0.0) == pytest.approx(draft_s) and times.score_s == 0.004
    clock.sleep(0.002)
    assert timer.end() == pytest.approx(0.011)
    timer.begin()
    clock.sleep(0.003)
    times = PassTimes(0.0, 0.001, 0.0, 0, 1, True, queues=True)
    timer.charge(times, Drafts([1], None, makers=["a"]))
    assert times.draft_s == pytest.approx(0.004), "what went on after the last round's times is this one's"
