"""Faults in one request or plug-in: the guilty request fails with its own error, the others are served."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

from outrider.backends.mock import MockBackend
from outrider.clock import VirtualClock
from outrider.config import MockConfig
from outrider.engine.engine import Engine
from outrider.engine.stream import Stream

TARGET = MockConfig(vocab_size=32, seed=7, sharpness=2.0)
DRAFT = MockConfig(vocab_size=32, seed=7, sharpness=2.0, drift=0.5)


def test_fixed_widths_beside_adaptive_ones_near_the_end_of_answers() -> None:
    """A standing decision must fit the room that each request has left: 12 streams, every fourth with width 3."""
    dice, clock = random.Random(3), VirtualClock()
    target = MockBackend(replace(TARGET, seconds_per_pass=1.0), clock=clock)
    draft = MockBackend(replace(DRAFT, seconds_per_pass=2.0), clock=clock)
    engine = Engine.load(target, draft=["suffix", draft], max_batch=12, clock=clock)
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
