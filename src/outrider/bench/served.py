"""What a run against a server comes to: rates, times to the first token and between tokens, and what was refused."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from outrider.bench.asking import Sample
from outrider.bench.policies import Spread
from outrider.bench.traffic import Kind, Traffic

Mode = Literal["plain", "speculation", "as served"]

LATE_S = 0.05  # when the client is later than that, the numbers are its own
NUM_MESSAGES = 5  # different errors that are told


class Promise(NamedTuple):
    """What an answer has to keep to count as good: seconds to its first token, and per token after it."""

    ttft: float | None = None
    per_token: float | None = None

    def is_kept(self, sample: Sample) -> bool:
        if sample.outcome != "ok":
            return False
        has_begun = self.ttft is None or (sample.ttft is not None and sample.ttft <= self.ttft)
        return has_begun and (self.per_token is None or (sample.per_token or 0.0) <= self.per_token)


@dataclass(slots=True)
class Run:
    """What one run saw; it can be read at any moment."""

    keys: Sequence[str] = ()
    begun: float | None = None
    num_started: int = 0
    samples: list[Sample] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)  # seconds that this process was late


@dataclass(frozen=True, slots=True)
class Reading:
    """One load in one mode. Rates are per second of the whole run, tokens those of complete answers."""

    model: str
    kind: Kind
    load: float
    mode: Mode
    requests: int
    ok: int
    refused: dict[str, int]  # by status
    errors: dict[str, int]  # by what was said
    unfinished: int  # when it was interrupted
    seconds: float
    tokens: int
    tokens_per_second: float
    requests_per_second: float
    goodput: float  # requests per second that kept the promise
    promised_ttft: float | None
    promised_per_token: float | None
    ttft: Spread | None
    per_token: Spread | None
    latency: Spread | None
    tokens_from: Literal["usage", "chunks"]
    acceptance: float | None
    tokens_per_round: float | None
    client_late_p99: float
    is_fresh: bool  # no prompt was asked twice of the same caches
    is_interrupted: bool

    @property
    def is_client_late(self) -> bool:
        return self.client_late_p99 > LATE_S


def reading_of(
    run: Run,
    traffic: Traffic,
    promise: Promise,
    *,
    model: str = "",
    mode: Mode = "as served",
    is_fresh: bool = True,
    is_interrupted: bool = False,
) -> Reading:
    """The numbers of a run, also of one that was interrupted."""
    good = [sample for sample in run.samples if sample.outcome == "ok"]
    ended = [sample.ended for sample in run.samples]
    begun = run.begun or 0.0
    seconds = max([begun + 1e-9, *ended, *([time.perf_counter()] if is_interrupted else [])]) - begun
    drafted, rounds = sum(one.drafted for one in good), sum(one.rounds for one in good)
    tokens = sum(one.tokens for one in good)
    return Reading(
        model=model,
        kind=traffic.kind,
        load=traffic.load,
        mode=mode,
        requests=run.num_started,
        ok=len(good),
        refused=dict(sorted(Counter(str(one.status) for one in run.samples if one.outcome == "refused").items())),
        errors=_errors(run.samples),
        unfinished=run.num_started - len(run.samples),
        seconds=seconds,
        tokens=tokens,
        tokens_per_second=tokens / seconds,
        requests_per_second=len(good) / seconds,
        goodput=sum(promise.is_kept(sample) for sample in good) / seconds,
        promised_ttft=promise.ttft,
        promised_per_token=promise.per_token,
        ttft=Spread.of([one.ttft for one in good if one.ttft is not None]),
        per_token=Spread.of([one.per_token for one in good if one.per_token is not None]),
        latency=Spread.of([one.latency for one in good]),
        tokens_from="usage" if all(one.counted is not None for one in good) else "chunks",
        acceptance=sum(one.accepted for one in good) / drafted if drafted else None,
        tokens_per_round=tokens / rounds if rounds else None,
        client_late_p99=_late(run),
        is_fresh=is_fresh,
        is_interrupted=is_interrupted,
    )


def _errors(samples: Sequence[Sample]) -> dict[str, int]:
    """The most frequent ones by name, the rest together."""
    counts = Counter(one.problem for one in samples if one.outcome == "error")
    told = dict(counts.most_common(NUM_MESSAGES))
    rest = counts.total() - sum(told.values())
    return {**told, "others": rest} if rest else told


def _late(run: Run) -> float:
    """The client's own delay at p99: in sending what was due, and in looking at what came."""
    spreads = (Spread.of(run.delays), Spread.of([one.started - one.due for one in run.samples]))
    return max([spread.p99 for spread in spreads if spread is not None], default=0.0)
