"""What running ahead brings: on mocks that sleep, beside what the overlap should bring, and on a real pair."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Literal

from outrider.backends.mock import MockBackend
from outrider.config import MockConfig
from outrider.draft.run_ahead import Overlap, RunAheadDrafter
from outrider.engine.engine import Engine

PASS_S, WIDTH, NUM_TOKENS = 0.020, 4, 240
STEPS_S = (0.001, 0.002, 0.004)  # of a draft
DRIFTS = (0.0, 0.1, 0.3)
PROMPTS = ("Write a short story about a small dog and a big red ball.", "Tell me a story about a girl who finds a key.")


@dataclass(frozen=True, slots=True)
class Reading:
    """`gain` is seconds in order over seconds run ahead; `expected` is what the overlap should bring (of mocks)."""

    name: str
    gain: float
    low: float
    high: float
    expected: float | None
    fresh: float  # share of the proposals drafted ahead that could be used
    same: bool  # whether the answers were equal


def mock_readings(*, quick: bool = False) -> Iterator[Reading]:
    """Draft and target sleep for as long as they would compute."""
    for step_s in STEPS_S[1:2] if quick else STEPS_S:
        for drift in DRIFTS:
            yield _mock(step_s, drift, 80 if quick else NUM_TOKENS)


def _mock(step_s: float, drift: float, num_tokens: int) -> Reading:
    answers, seconds = [], []
    for run_ahead in (False, True):
        target = MockBackend(MockConfig(seed=5, sharpness=3.0, seconds_per_pass=PASS_S))
        draft = MockBackend(MockConfig(seed=5, sharpness=3.0, drift=drift, seconds_per_pass=step_s))
        with Engine.load(target, draft=draft, width=WIDTH, run_ahead="always" if run_ahead else False) as engine:
            started = time.perf_counter()
            answers.append(engine.generate([1, 2, 3], max_tokens=num_tokens, temperature=0.0))
            seconds.append(time.perf_counter() - started)
            overlap = _overlap(engine)
    assert overlap is not None, "the last one ran ahead"
    rounds = answers[1].statistics.rounds
    in_order_s = rounds * (PASS_S + WIDTH * step_s)
    # Of rounds with a fresh proposal only the target's pass is left; the last guess may take longer than the pass
    longest = max(PASS_S, (WIDTH + 1) * step_s)
    expected_s = overlap.fresh * longest + (rounds - overlap.fresh) * (WIDTH * step_s + PASS_S)
    share = overlap.fresh / max(1, overlap.fresh + overlap.stale)
    name = f"mock: pass {PASS_S * 1e3:g} ms, draft step {step_s * 1e3:g} ms, drift {drift:g}"
    gain, same = seconds[0] / seconds[1], answers[0].token_ids == answers[1].token_ids
    return Reading(name, gain, gain, gain, in_order_s / expected_s, share, same)


def _overlap(engine: Engine) -> Overlap | None:
    """What the engine's drafter did beside passes; None where it drafts in order."""
    drafters = engine.loop.router.drafters.values()
    return next((drafter.overlap for drafter in drafters if isinstance(drafter, RunAheadDrafter)), None)


ORDERS: dict[str, bool | Literal["always"]] = {"in order": False, "always ahead": "always", "ahead where it pays": True}


def pair_readings(
    model: str, draft: str, *, quick: bool = False, threads: int | None = None, width: int = WIDTH
) -> Iterator[Reading]:
    """A real pair, greedy; the orders take turns."""
    repeats, num_tokens = (2, 32) if quick else (5, 64)
    engines = {
        name: Engine.load(model, draft=draft, width=width, run_ahead=order, threads=threads)
        for name, order in ORDERS.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in ORDERS}
    answers: dict[str, list[list[int]]] = {name: [] for name in ORDERS}
    for repeat in range(repeats + 1):  # the first warms up and is not counted
        for name, engine in engines.items():
            started = time.perf_counter()
            for prompt in PROMPTS:
                answer = engine.generate(
                    prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True, tenant=f"run {repeat}"
                )
                answers[name].append(answer.token_ids)
            if repeat:
                seconds[name].append(time.perf_counter() - started)
    for name, engine in engines.items():
        overlap = _overlap(engine)
        if overlap is not None:
            share = overlap.fresh / max(1, overlap.fresh + overlap.stale)
            gains = [base / own for base, own in zip(seconds["in order"], seconds[name], strict=True)]
            same = answers[name] == answers["in order"]
            title = f"{model} + {draft}, width {width}: {name}"
            yield Reading(title, median(gains), min(gains), max(gains), None, share, same)
