"""Which requests come when: so many clients who ask again and again, a Poisson stream, or a trace.

The same traffic gives the same calls every time, so that what is compared is asked the same things at the same moments.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from outrider.bench.trace import Arrival, read_trace
from outrider.bench.work import Work
from outrider.errors import ConfigError

Kind = Literal["clients", "rate", "trace"]

LEAST = 32  # requests of a load, when nobody said how many
TRACE_LENGTH = 100


@dataclass(frozen=True, slots=True)
class Call:
    """A request to be made `at` seconds after the start; None: when a client is free."""

    number: int
    at: float | None
    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One load. `load` is the number of clients, the requests per second, or how many times as quick the trace is.

    It ends after `num_requests` or when no request may begin any more (`seconds`), whichever comes first. A trace gives
    the moments and how long an answer may be; the prompts are those of the work, since text that is made up to have
    a certain length is guessed better or worse than anybody's.
    """

    kind: Kind
    load: float
    prompts: Sequence[str]
    num_requests: int | None = None
    seconds: float | None = None
    max_tokens: int = 64
    seed: int = 0
    trace: Sequence[Arrival] = ()

    @property
    def name(self) -> str:
        words = {"clients": "clients", "rate": "requests/s", "trace": "times the trace's speed"}[self.kind]
        return f"{self.load:g} {words.removesuffix('s') if (self.kind, self.load) == ('clients', 1.0) else words}"

    @property
    def is_open(self) -> bool:
        """Requests begin at their time, whether others have ended or not."""
        return self.kind != "clients"

    @property
    def expected(self) -> int | None:
        """How many calls there will be, where that is known."""
        if self.is_open:
            return sum(1 for _ in self.calls())
        return self.num_requests if self.seconds is None else None

    def calls(self) -> Iterator[Call]:
        """In order of time, the same ones every time."""
        texts = shuffled(self.prompts, self.seed)
        for number, (at, max_tokens) in enumerate(itertools.islice(self._moments(), self.num_requests)):
            if at is not None and self.seconds is not None and at >= self.seconds:
                return
            yield Call(number, at, next(texts), max_tokens)

    def _moments(self) -> Iterator[tuple[float | None, int]]:
        """When, and how long the answer may be."""
        if self.kind == "clients":
            yield from itertools.repeat((None, self.max_tokens))
        elif self.kind == "rate":
            yield from ((at, self.max_tokens) for at in poisson(self.load, self.seed))
        else:
            for arrival in self.trace:
                yield arrival.at / self.load, min(arrival.num_answer, self.max_tokens)


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Moments without end from 0 on, `rate` in a second on average and none of them knowing of another."""
    draw, at = random.Random(f"arrivals {seed}"), 0.0
    while True:
        yield at
        at += draw.expovariate(rate)


def shuffled(prompts: Sequence[str], seed: int) -> Iterator[str]:
    """All prompts in a random order, then all of them in another, without end."""
    draw, order = random.Random(f"prompts {seed}"), list(prompts)
    while True:
        draw.shuffle(order)
        yield from order


def plan(
    work: Work,
    *,
    clients: str | None = None,
    rate: str | None = None,
    trace: Path | None = None,
    speed: str = "1",
    num_requests: int | None = None,
    seconds: float | None = None,
    max_tokens: int = 64,
    seed: int = 0,
) -> list[Traffic]:
    """The loads of a sweep. Clients, rates and speeds are numbers with commas between them; four clients by default."""
    if sum(given is not None for given in (clients, rate, trace)) > 1:
        raise ConfigError("requests come by --clients, --rate or --trace: give one of them", param="clients")
    for name, limit in (("requests", num_requests), ("seconds", seconds), ("max_tokens", max_tokens)):
        if limit is not None and not 0 < limit < math.inf:
            raise ConfigError(f"{name.replace('_', '-')} is a number above 0, got {limit:g}", param=name)
    kind: Kind = "rate" if rate is not None else "trace" if trace is not None else "clients"
    given = {"rate": rate, "trace": speed, "clients": clients or "4"}[kind]
    loads = _numbers(given, "speed" if kind == "trace" else kind, is_whole=kind == "clients")
    arrivals = () if trace is None else read_trace(trace)
    return [
        Traffic(
            kind=kind,
            load=load,
            prompts=[prompt for prompts in work.values() for prompt in prompts],
            num_requests=num_requests if num_requests or seconds else _usual(kind, load),
            seconds=seconds,
            max_tokens=max_tokens,
            seed=seed,
            trace=arrivals,
        )
        for load in loads
    ]


def _usual(kind: Kind, load: float) -> int:
    """Requests when nobody said how many: each client has some, and a rate gets about 20 seconds."""
    if kind == "trace":
        return TRACE_LENGTH
    return max(LEAST, math.ceil(load * (4 if kind == "clients" else 20)))


def _numbers(text: str | None, name: str, *, is_whole: bool) -> list[float]:
    kind = "whole numbers" if is_whole else "numbers"
    try:
        found = [float(int(part)) if is_whole else float(part) for part in (text or "").split(",")]
    except ValueError:
        found = [0.0]
    if not all(0.0 < number < math.inf for number in found):
        raise ConfigError(f"{name} takes {kind} above 0, with commas between them, got {text!r}", param=name)
    return found
