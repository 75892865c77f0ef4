"""Requests together beside one after another: tokens per second of both, plainly and with the model's usual draft."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from outrider.bench.work import OWN
from outrider.engine.engine import Engine
from outrider.types import Request, SamplingParams

TOGETHER = 8


@dataclass(frozen=True, slots=True)
class Reading:
    """Median over the repeats, with the range. A ratio, or tokens per second."""

    name: str
    median: float
    low: float
    high: float


def readings(model: str, *, quick: bool = False, threads: int | None = None) -> Iterator[Reading]:
    """The ways take turns, repeat by repeat."""
    repeats, num_tokens = (2, 16) if quick else (5, 64)
    engine = Engine.load(model, threads=threads)
    prompts = [engine.encode(some[0])[:64] for some in OWN.values()]
    prompts = (prompts * TOGETHER)[:TOGETHER]
    rates: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):  # the first warms up and is not counted
        for width in (0, None):
            kind = "plain" if width == 0 else "auto"
            for together in (False, True):
                # Tenants of their own: nobody finds another's pages or past text
                requests = [
                    Request(
                        prompt=prompt,
                        sampling=SamplingParams(temperature=0.0),
                        max_tokens=num_tokens,
                        ignore_eos=True,
                        width=width,
                        tenant=f"{repeat} {kind} {together} {number}",
                    )
                    for number, prompt in enumerate(prompts)
                ]
                started = time.perf_counter()
                for group in [requests] if together else [[request] for request in requests]:
                    engine.generate(group)
                rate = len(requests) * num_tokens / (time.perf_counter() - started)
                if repeat:
                    rates.setdefault(f"{kind}, {'together' if together else 'one by one'}", []).append(rate)
    for name, values in rates.items():
        yield _reading(f"{TOGETHER} requests, {name}, tokens/s", values)
    alone, plain, auto = rates["plain, one by one"], rates["plain, together"], rates["auto, together"]
    yield _reading("together over one by one, plain", _ratios(plain, alone))
    yield _reading("auto over plain, together", _ratios(auto, plain))


def _ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    return [value / other for value, other in zip(values, others, strict=True)]


def _reading(name: str, values: Sequence[float]) -> Reading:
    return Reading(name, median(values), min(values), max(values))
