"""What the engine itself costs: time per emitted token on a mock whose passes are nearly free.

The mock's own time (hashing contexts, gathering rows) is measured and taken off; wall time is reported beside it. The
engine is driven without its thread; what that adds to each event of a stream is a line of its own. Each kind is run
twice: with sampling by native code, as models on a CPU have it, and by array functions, as they have it where the
native library could not be built.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

import numpy as np

from outrider.backends.base import Spans
from outrider.backends.mock import MockBackend
from outrider.config import MockConfig
from outrider.engine.engine import Engine
from outrider.native.library import why_not
from outrider.native.sampling import cpu_sampling
from outrider.sampling.noise import Noise, seed_words
from outrider.types import Request, SamplingParams, Scores

RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"accept": "coupled"},
    "rejection": {"accept": "rejection"},
}


@dataclass(frozen=True, slots=True)
class Reading:
    """Microseconds, median and range over the repeats."""

    name: str
    median_us: float
    low_us: float
    high_us: float
    wall_us: float
    tokens_per_round: float = 1.0


class _TimedMock(MockBackend):
    """A mock that knows how long it was at work."""

    busy_s = 0.0

    def __init__(self, config: MockConfig, *, arrays: bool = False) -> None:
        super().__init__(config)
        if not arrays:
            self.ops = cpu_sampling()

    def score(self, spans: Spans, hidden: Sequence[int] = ()) -> Scores:
        started = time.perf_counter()
        scores = super().score(spans, hidden)
        self.busy_s += time.perf_counter() - started
        return scores


def engine_time(
    rule: str, *, width: int, batch: int, vocab_size: int, num_tokens: int, repeats: int, arrays: bool = False
) -> Reading:
    """Engine time per emitted token: everything but the models' passes. arrays: sampling by array functions."""
    contexts = 4099 if vocab_size < 1000 else 61
    config = MockConfig(vocab_size=vocab_size, seed=7, num_contexts=contexts)
    target = _TimedMock(config, arrays=arrays)
    draft = _TimedMock(MockConfig(vocab_size=vocab_size, seed=7, num_contexts=contexts, drift=0.3), arrays=arrays)
    engine = Engine.load(target, draft=draft, width=width, max_batch=batch, threaded=False)
    engine_us, wall_us = [], []
    for repeat in range(repeats + 1):
        sampling = SamplingParams(seed=repeat, **RULES[rule])
        requests = [
            Request(prompt=[1], sampling=sampling, max_tokens=num_tokens, choice=choice) for choice in range(batch)
        ]
        target.busy_s = draft.busy_s = 0.0
        started = time.perf_counter()
        engine.generate(requests)
        wall = time.perf_counter() - started
        if repeat:  # the first one warms up
            wall_us.append(wall * 1e6 / (batch * num_tokens))
            engine_us.append((wall - target.busy_s - draft.busy_s) * 1e6 / (batch * num_tokens))
    name = f"{rule} {'plain' if width == 0 else f'k={width}'}, batch {batch}, vocabulary {vocab_size:,}"
    name += ", array functions" if arrays else ""
    per_round = engine.statistics.tokens_per_round
    return Reading(name, median(engine_us), min(engine_us), max(engine_us), median(wall_us), per_round)


def thread_time(*, num_tokens: int, repeats: int) -> Reading:
    """What the engine's thread adds to each event of a stream: the same answer with and without it, in turn."""
    target = MockBackend(MockConfig(vocab_size=32, seed=7, num_contexts=4099))
    engines = [Engine.load(target, draft="none", threaded=threaded) for threaded in (False, True)]
    added_us, wall_us = [], []
    for repeat in range(repeats + 1):
        direct, threaded = [_per_event(engine, num_tokens) for engine in engines]
        if repeat:  # the first one warms up
            added_us.append(threaded - direct)
            wall_us.append(threaded)
    for engine in engines:
        engine.close()
    name = "the engine's thread, per event of a stream"
    return Reading(name, median(added_us), min(added_us), max(added_us), median(wall_us))


def _per_event(engine: Engine, num_tokens: int) -> float:
    """Microseconds of each event of a plain, greedy stream."""
    started = time.perf_counter()
    for _ in engine.stream([1], max_tokens=num_tokens, temperature=0.0):
        pass
    return (time.perf_counter() - started) * 1e6 / num_tokens


def noise_time(vocab_size: int, repeats: int) -> Reading:
    """Keyed noise for one row."""
    noise = Noise(np)
    words = np.asarray(seed_words(1, 0), dtype=np.int32)[:, None]
    positions = np.asarray([5], dtype=np.int32)
    calls = 2000 if vocab_size < 1000 else 100
    times = [_per_call(lambda: noise.bits(words, positions, 0, vocab_size), calls) for _ in range(repeats + 1)][1:]
    return Reading(f"noise, a row of {vocab_size:,}", median(times), min(times), max(times), median(times))


def readings(*, quick: bool = False) -> Iterator[Reading]:
    """Every line of `outrider bench`, as it is measured."""
    repeats = 3 if quick else 7
    for vocab_size in (32, 49_152):
        yield noise_time(vocab_size, repeats)
    for vocab_size in (32, 50_000):
        for batch in (1, 64):
            num_tokens = {(32, 1): 400, (32, 64): 60, (50_000, 1): 24, (50_000, 64): 4}[vocab_size, batch]
            for arrays in (False, True) if why_not() is None else (True,):
                for rule, width in product(RULES, (0, 4)):
                    yield engine_time(
                        rule,
                        width=width,
                        batch=batch,
                        vocab_size=vocab_size,
                        num_tokens=max(2, num_tokens // 4) if quick else num_tokens,
                        repeats=repeats,
                        arrays=arrays,
                    )
    yield thread_time(num_tokens=400 if quick else 2000, repeats=repeats)


def _per_call(function: Callable[[], object], calls: int) -> float:
    """Microseconds of one call."""
    started = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - started) * 1e6 / calls
