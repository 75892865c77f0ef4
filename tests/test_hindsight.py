"""Hindsight: what a drafter says it would have drafted is what it does draft, and asking it changes no answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider.backends.mock import MockBackend
from outrider.bench.never_slower import Cell, measure
from outrider.clock import VirtualClock
from outrider.config import MockConfig
from outrider.draft.base import Drafter, DrafterInfo
from outrider.draft.model import ModelDrafter
from outrider.engine.engine import Engine
from outrider.errors import DraftError
from outrider.spec.cost_model import CostModel
from outrider.types import Drafts, Job, Request, SamplingParams

from conftest import check_caches

TARGET = MockConfig(vocab_size=32, seed=3, sharpness=2.0, context=512)
DRAFT = MockConfig(vocab_size=32, seed=3, sharpness=2.0, context=512, drift=0.4)
LONGEST = 8


class Watched(ModelDrafter):
    """Drafts behind each of the tokens that it is asked about, with a model of its own, and compares."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(MockBackend(DRAFT, clock=clock))
        self.told: list[tuple[Job, list[tuple[int, int]]]] = []

    def hindsight(self, jobs: Sequence[Job]) -> list[list[tuple[int, int]]]:
        told = super().hindsight(jobs)
        for job, chains in zip(jobs, told, strict=True):
            assert chains == expected(job, len(chains))
            assert self.backend.length(self.seats[job.id].slot) == len(job.tokens) - 1, "all but the last are read"
            self.told.append((job, chains))
        return told


def expected(job: Job, judged: int) -> list[tuple[int, int]]:
    """What it would have drafted behind each of the last tokens, drafted."""
    chains = []
    for start in range(len(job.tokens) - judged, len(job.tokens)):
        drafter, then = ModelDrafter(MockBackend(DRAFT)), job.with_tokens(job.tokens[:start])
        [proposal] = drafter.propose([then], [LONGEST], [False]).proposals()
        following, right = job.tokens[start : start + LONGEST], 0
        while right < len(following) and proposal[right] == following[right]:
            right += 1
        chains.append((right, min(right + 1, len(following))))
    return chains


def losing_engine(drafter: Any, clock: VirtualClock, **settings: Any) -> Engine:
    """Passes cost a second a token, so drafting never pays, and only looks are worth anything."""
    target = MockBackend(replace(TARGET, seconds_per_token=1.0), clock=clock)
    costs = CostModel({1: 1.0, 4: 4.0, 16: 16.0}, {drafter.name: 0.02})
    return Engine(target, [drafter], clock=clock, costs=costs, threaded=False, **settings)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=7, accept="coupled"),
        SamplingParams(temperature=0.8, seed=8, accept="coupled", repetition_penalty=1.3, top_k=9),
    ],
    ids=["greedy", "coupled", "penalised"],
)
def test_it_says_what_it_would_have_drafted_and_changes_no_answer(sampling: SamplingParams) -> None:
    clock = VirtualClock()
    drafter = Watched(clock)
    engine = losing_engine(drafter, clock)
    requests = [Request(prompt=[index, 1, 2, 3], sampling=sampling, max_tokens=150) for index in range(3)]
    streams = [engine.stream(request) for request in requests]
    answers: dict[str, list[int]] = {}
    for _ in range(1000):
        for event in engine.step():
            answers.setdefault(event.request_id, []).extend(event.tokens)
        check_caches(engine.loop)
    plain = [Engine(MockBackend(TARGET), threaded=False).generate(request).token_ids for request in requests]
    assert [answers[stream.request_id] for stream in streams] == plain
    assert sum(len(chains) for _, chains in drafter.told) >= 16
    assert {right for _, chains in drafter.told for right, _ in chains} > {0}, "some of it fits"


def test_drafts_that_are_judged_by_their_probabilities_are_probed_by_drafting() -> None:
    clock = VirtualClock()
    drafter = Watched(clock)
    engine = losing_engine(drafter, clock)
    sampled = SamplingParams(temperature=1.0, accept="rejection")
    result = engine.generate(Request(prompt=[1, 2], sampling=sampled, max_tokens=300))
    assert not drafter.told and result.statistics.drafted > 0


@pytest.mark.parametrize(
    "told",
    [None, [], [[(2, 1)]], [[(1,)]], ["no"]],
    ids=["None", "too few", "more right than drafted", "no pair", "text"],
)
def test_what_it_says_is_checked(told: Any) -> None:
    class Liar(ModelDrafter):
        def hindsight(self, jobs: Sequence[Job]) -> list[list[tuple[int, int]]]:
            answer: list[list[tuple[int, int]]] = told
            return answer

    clock = VirtualClock()
    engine = losing_engine(Liar(MockBackend(DRAFT, clock=clock)), clock)
    with pytest.raises(DraftError, match="hindsight"):
        engine.generate(Request(prompt=[1, 2], sampling=SamplingParams(temperature=0.0), max_tokens=300))
    assert engine.generate(Request(prompt=[1, 2], max_tokens=5, width=0)).token_ids, "the engine goes on"


def test_a_drafter_without_it_is_never_asked() -> None:
    class Mute(Drafter):
        info = DrafterInfo(name="mute")

        def propose(self, jobs: Sequence[Job], widths: Sequence[int], trees: Sequence[bool]) -> Drafts:
            assert all(widths), "a width of 0 asks for hindsight"
            return Drafts([1] * len(jobs), np.zeros(len(jobs), dtype=np.int64))

    engine = losing_engine(Mute(), VirtualClock())
    greedy = SamplingParams(temperature=0.0)
    assert len(engine.generate(Request(prompt=[1, 2], sampling=greedy, max_tokens=100)).token_ids) == 100


def test_it_notices_that_a_dear_draft_has_become_good() -> None:
    """Each look reads what was emitted since the last one; verifying a few drafts told too little for what it cost."""
    reading = measure(Cell((0.2, 0.9), 0.2, "cpu", 4, jitter=0.05))
    assert reading.holds and reading.of_plain > 1.1, reading
