"""Faults in one request or plug-in: the guilty request fails with its own error, the others are served."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from outrider.backends.mock import MockBackend
from outrider.backends.paged_mock import PagedMock
from outrider.clock import VirtualClock
from outrider.config import MockConfig
from outrider.engine.engine import Engine
from outrider.engine.stream import Stream
from outrider.errors import PolicyError
from outrider.kv.pages import Pages
from outrider.sched.policies import Policy
from outrider.types import Job

TARGET = MockConfig(vocab_size=32, seed=7, sharpness=2.0)
DRAFT = MockConfig(vocab_size=32, seed=7, sharpness=2.0, drift=0.5)


def test_fixed_widths_beside_adaptive_ones_near_the_end_of_answers() -> None:
    """A standing decision must fit the room that each request has left: 12 streams, every fourth with width 3."""
    dice, clock = random.Random(3), VirtualClock()
    target = MockBackend(replace(TARGET, seconds_per_pass=1.0), clock=clock)
    draft = MockBackend(replace(DRAFT, seconds_per_pass=2.0), clock=clock)
    engine = Engine.load(target, draft=["suffix", draft], max_batch=12, clock=clock, threaded=False)
    streams: list[Stream] = []
    for index in range(200):
        while len(streams) >= 12:
            engine.step()
            streams = [stream for stream in streams if not stream.is_over]
        width = 3 if index % 4 == 0 else None
        prompt = [1 + index % 3, 2, 3, 1, 2, 3]
        streams.append(engine.stream(prompt, max_tokens=dice.randint(40, 400), temperature=0.0, width=width))
    for stream in streams:
        stream.close()
    assert engine.num_requests == 0


def test_fixed_widths_beside_adaptive_ones_with_threads() -> None:
    engine = Engine.load(MockBackend(TARGET), draft=["suffix", MockBackend(DRAFT)], max_batch=12)
    errors: list[BaseException] = []

    def client(number: int) -> None:
        try:
            for index in range(12):
                width = 3 if number % 4 == 0 else None
                engine.generate(
                    [number, 2, 3, 1, 2, 3], max_tokens=5 + (7 * number + index) % 50, temperature=0.0, width=width
                )
        except BaseException as error:
            errors.append(error)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(12)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    assert not errors


class OddPolicy(Policy):
    """Fails on prompts that begin with 13, in one of several ways."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def order(self, job: Job) -> Any:
        if job.tokens[0] != 13:
            return super().order(job)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


ODD_ORDERS = [ValueError("no order"), None, (None,), ("late",), (math.nan,)]


@pytest.mark.parametrize("answer", ODD_ORDERS, ids=str)
def test_a_policy_that_fails_on_one_request_fails_only_that_one(answer: Any) -> None:
    engine = Engine.load(MockBackend(TARGET), policy=OddPolicy(answer))
    before = engine.generate([1, 2], max_tokens=4, temperature=0.0)
    with pytest.raises(PolicyError):
        engine.generate([13, 2], max_tokens=4, temperature=0.0)
    streams = [engine.stream([first, 2], max_tokens=4, temperature=0.0) for first in (1, 13, 1)]
    assert [token for event in streams[0] for token in event.tokens] == before.token_ids
    with pytest.raises(PolicyError):
        list(streams[1])
    assert [token for event in streams[2] for token in event.tokens] == before.token_ids
    assert engine.num_requests == 0


@pytest.mark.parametrize("answer", ODD_ORDERS, ids=str)
def test_a_policy_that_fails_ends_an_asynchronous_stream(answer: Any) -> None:
    engine = Engine.load(MockBackend(TARGET), policy=OddPolicy(answer))

    async def read(first: int) -> list[int]:
        settings: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0}
        return [token async for event in engine.astream([first, 2], **settings) for token in event.tokens]

    async def both() -> list[Any]:
        return await asyncio.wait_for(asyncio.gather(read(1), read(13), read(1), return_exceptions=True), 10)

    good, odd, again = asyncio.run(both())
    assert isinstance(odd, PolicyError)
    assert len(good) == 4 and good == again


class UndecidedPolicy(Policy):
    """Lets everybody in, and fails when somebody must give way."""

    name = "undecided"

    def reserve(self, job: Job) -> int:
        return len(job.tokens)

    def victim(self, candidates: Any) -> Any:
        raise RuntimeError("who?")


def test_a_policy_that_cannot_choose_who_gives_way_fails_the_request_in_need() -> None:
    plain = Engine.load(MockBackend(TARGET), threaded=False).generate([1, 2, 3], max_tokens=36, temperature=0.0)
    target = PagedMock(TARGET, Pages(16, 4))
    engine = Engine.load(target, policy=UndecidedPolicy(), max_batch=2, threaded=False)
    streams = [engine.stream([1, 2, 3], max_tokens=36, temperature=0.0, tenant=name) for name in ("a", "b")]
    while engine.num_requests:
        engine.step()
    failed = [stream for stream in streams if stream.error is not None]
    served = [stream for stream in streams if stream.error is None]
    assert len(failed) == len(served) == 1
    assert isinstance(failed[0].error, PolicyError) and "who?" in str(failed[0].error)
    assert served[0].tokens == plain.token_ids
    assert engine.metrics.pages_held == 0


class SlowMock(MockBackend):
    def score(self, *arguments: Any, **settings: Any) -> Any:
        time.sleep(0.02)
        return super().score(*arguments, **settings)


def test_a_request_that_comes_while_the_engine_pauses_is_served() -> None:
    engine = Engine.load(SlowMock(TARGET))
    first = engine.stream([1, 2], max_tokens=10, temperature=0.0)
    next(first)
    assert engine.thread is not None
    engine.thread.signal_stop()  # in the middle of a step, most likely
    second = engine.stream([3, 4], max_tokens=10, temperature=0.0)
    deadline = time.monotonic() + 30.0
    while not (first.is_over and second.is_over):
        assert time.monotonic() < deadline, "nobody steps"
        time.sleep(0.01)
    assert len(first.tokens) == len(second.tokens) == 10
    engine.close()


@pytest.mark.parametrize("tree", [False, True])
def test_refused_text_of_another_request_is_not_shown(tree: bool) -> None:
    """Both prompts end alike; the first goes on with a secret that the second is drafted with, and refuses."""
    secret = [21, 22, 23, 24, 25, 26]
    engine = Engine.load(MockBackend(TARGET), draft="suffix", width=6, tree=tree)
    engine.generate([1, 2, 3, 4, *secret], max_tokens=1, temperature=0.0)
    drafted = 0
    for event in engine.stream([9, 1, 2, 3, 4], max_tokens=6, temperature=0.0):
        drafted += len(event.drafts)
        refused = event.drafts[event.accepted :]
        assert not set(refused) & set(secret), f"{refused} was refused and shown"
    assert engine.statistics.drafted > drafted, "nothing was refused: the test proves nothing"


def test_refused_text_of_the_same_request_is_shown() -> None:
    engine = Engine.load(MockBackend(TARGET), draft="suffix", width=6)
    stream = engine.stream([1, 2, 3, 4, 21, 22, 23, 1, 2, 3, 4], max_tokens=6, temperature=0.0)
    assert any(event.drafts[event.accepted :] for event in stream)
