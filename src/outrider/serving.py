"""Metrics of serving: how long requests wait and take, how full the passes are, what is sent back and preempted.

Memory is bounded however long it runs, and a record costs about a microsecond. One thread writes, any thread reads:
what is read was true a moment ago, never half of a dict. What speculation did is in `metrics`. Nothing here decides.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

PER_DECADE = 80  # buckets to a power of ten: each is 2.9 % wide, and no quantile is further off than that
LEAST, MOST = 1e-6, 1e6  # what lies beyond them shares one bucket at either end
FIRST, LAST = -6 * PER_DECADE, 6 * PER_DECADE + 1  # those two buckets
REASONS = ("stop", "length", "cancelled", "deadline", "error")
KINDS = ("recompute", "swap")
OTHER = "other"  # unknown names share one counter: a caller's words must not take memory
UNTIMED = ("cancelled", "error")  # these end when somebody else wants, which says nothing of how long an answer takes


class Bucket:
    """Values of about the same size: how many, the lowest and the highest of them."""

    __slots__ = ("count", "high", "low")

    def __init__(self, count: int, low: float, high: float) -> None:
        self.count, self.low, self.high = count, low, high

    def add(self, count: int, low: float, high: float) -> None:
        self.count += count
        if low < self.low:
            self.low = low
        if high > self.high:
            self.high = high


class Histogram:
    """A distribution in at most 962 logarithmic buckets, whose quantiles are less than 3 % off.

    Each bucket knows its lowest and highest value, so values that are far apart (small whole numbers) come out exact,
    and so do the ends. Values that are no finite numbers are left out.
    """

    __slots__ = ("_buckets", "count", "total", "unit")

    def __init__(self, unit: str = "s") -> None:
        self.unit = unit
        self.count = 0
        self.total = 0.0
        self._buckets: dict[int, Bucket] = {}

    def add(self, value: float, times: int = 1) -> None:
        if times < 1 or not math.isfinite(value):
            return
        index = _index(value)
        bucket = self._buckets.get(index)
        if bucket is None:
            self._buckets[index] = Bucket(times, value, value)
        else:
            bucket.count += times
            if value < bucket.low:
                bucket.low = value
            elif value > bucket.high:
                bucket.high = value
        self.count += times
        self.total += value * times

    def merge(self, other: Histogram) -> None:
        """Take in what another one counted."""
        assert self.unit == other.unit, f"a histogram in {other.unit!r} cannot join one in {self.unit!r}"
        other = other.copy()  # it may be written to meanwhile, or be this one
        for index, bucket in other._buckets.items():
            if index in self._buckets:
                self._buckets[index].add(bucket.count, bucket.low, bucket.high)
            else:
                self._buckets[index] = bucket
        self.count += other.count
        self.total += other.total

    def copy(self) -> Histogram:
        """One that agrees with itself, also while another thread adds to this one."""
        other = Histogram(self.unit)
        other.total = self.total
        for index, bucket in self._buckets.copy().items():  # copying is one step, going through it is not
            other._buckets[index] = Bucket(bucket.count, bucket.low, bucket.high)
        other.count = sum(bucket.count for bucket in other._buckets.values())
        return other

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """The value that `share` of all are not above; 0 is the lowest and 1 the highest. None when empty."""
        return self.quantiles([share])[0]

    def quantiles(self, shares: Iterable[float]) -> list[float | None]:
        """`quantile` of each, all of the same moment."""
        buckets = [bucket for _, bucket in sorted(self._buckets.copy().items())]
        counts = [bucket.count for bucket in buckets]
        return [_quantile(buckets, counts, share) for share in shares]

    def cumulative(self, bounds: Sequence[float]) -> list[int]:
        """How many values are at most as large as each bound, or share its bucket.

        Of bounds 1, 2.5 and 5 times a power of ten the bucket ends less than 0.6 % above. A value always counts for
        the same bounds, so that no number ever shrinks.
        """
        counted = [(index, bucket.count) for index, bucket in self._buckets.copy().items()]
        return [sum(count for index, count in counted if index <= last) for last in map(_index, bounds)]

    def report(self) -> dict[str, float | None]:
        """As plain data, for JSON."""
        seen = self.copy()
        low, median, p90, p99, high = seen.quantiles((0.0, 0.5, 0.9, 0.99, 1.0))
        return {
            "count": seen.count,
            "mean": seen.mean,
            "min": low,
            "p50": median,
            "p90": p90,
            "p99": p99,
            "max": high,
        }


class Rate:
    """Tokens per second over the last minute, from 60 slots of one second. Time comes from the caller."""

    __slots__ = ("_began", "_slot_s", "_slots")

    def __init__(self, num_slots: int = 60, slot_s: float = 1.0) -> None:
        self._slot_s = slot_s
        self._began: float | None = None
        self._slots: list[tuple[int, int]] = [(0, 0)] * num_slots  # (when, in slots; tokens); replaced as a whole

    def add(self, now: float, tokens: int) -> None:
        if self._began is None:
            self._began = now
        when = math.floor(now / self._slot_s)
        place = when % len(self._slots)
        then, before = self._slots[place]
        self._slots[place] = (when, before + tokens if then == when else tokens)

    def per_second(self, now: float) -> float:
        """Of the last minute, or of the time since the first `add` (at least a second) where that is less."""
        if self._began is None:
            return 0.0
        latest = math.floor(now / self._slot_s)
        oldest = latest - len(self._slots) + 1
        tokens = sum(tokens for when, tokens in self._slots.copy() if oldest <= when <= latest)
        return tokens / max(now - max(self._began, oldest * self._slot_s), self._slot_s)


class Shown(NamedTuple):
    """How a histogram of `ServingMetrics` is presented."""

    attribute: str
    words: str
    name: str  # in reports and Prometheus
    help: str


HISTOGRAMS = (
    Shown("ttft", "first token", "time_to_first_token_seconds", "From arrival to the first token."),
    Shown("per_token", "per token", "time_per_output_token_seconds", "Between tokens after the first, per request."),
    Shown("queue", "queue", "queue_time_seconds", "From arrival to the first admission."),
    Shown("latency", "whole answer", "request_latency_seconds", "From arrival to the end of the answer."),
    Shown("answer", "answer tokens", "answer_tokens", "Output tokens of a request."),
    Shown("batch", "batch size", "batch_size", "Requests in a step."),
    Shown("budget", "budget used", "step_budget_used_ratio", "Share of a step's token budget that was used."),
    Shown("emitted", "tokens a step", "output_tokens_per_step", "Output tokens of a step."),
)


@dataclass(slots=True)
class ServingMetrics:
    """What an operator wants to know. The loop calls the methods; gauges are attributes that it sets.

    `now` is the loop's clock. Readers pass it as well, so that the tokens per second of an idle engine go to 0;
    without it they are those of the last arrival or step.
    """

    received: int = 0
    finished_by: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    preemptions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    stale_proposals: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    fed_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0

    ttft: Histogram = field(default_factory=Histogram)
    per_token: Histogram = field(default_factory=Histogram)
    queue: Histogram = field(default_factory=Histogram)
    latency: Histogram = field(default_factory=Histogram)
    answer: Histogram = field(default_factory=lambda: Histogram(""))
    batch: Histogram = field(default_factory=lambda: Histogram(""))
    budget: Histogram = field(default_factory=lambda: Histogram("share"))
    emitted: Histogram = field(default_factory=lambda: Histogram(""))
    rate: Rate = field(default_factory=Rate)

    running: int = 0
    waiting: int = 0
    pages_free: int | None = None  # None: the backend has no pages
    pages_held: int | None = None
    pages_idle: int | None = None
    seen: float = 0.0  # the latest time heard of

    def arrived(self, now: float) -> None:
        """A request came in."""
        self.received += 1
        self.seen = now
        self.rate.add(now, 0)  # the first one starts its time

    def started(self, queued_s: float, num_prompt: int = 0, num_cached: int = 0) -> None:
        """A request was admitted for the first time; `num_cached` of its prompt came from the prefix cache."""
        self.queue.add(queued_s)
        self.prompt_tokens += num_prompt
        self.cached_tokens += num_cached

    def first_token(self, ttft_s: float) -> None:
        """A request got its first token, `ttft_s` after it arrived."""
        self.ttft.add(ttft_s)

    def finished(self, reason: str, latency_s: float, num_tokens: int, per_token_s: float | None) -> None:
        """A request ended. `per_token_s` is (last - first token) / (tokens - 1), None for fewer than two tokens.

        Latency and length of what was cancelled or failed are not counted: they say nothing of answers.
        """
        _count(self.finished_by, reason)
        if reason not in UNTIMED:
            self.latency.add(latency_s)
            self.answer.add(num_tokens)
        if per_token_s is not None:
            self.per_token.add(per_token_s)

    def preempted(self, kind: str) -> None:
        """A running request had to give its pages back."""
        _count(self.preemptions, kind)

    def went_stale(self, num_proposals: int = 1) -> None:
        """Proposals drafted ahead on a branch that was rejected were dropped."""
        self.stale_proposals += num_proposals

    def step(self, now: float, batch: int, num_fed: int, budget: int | None, emitted: int) -> None:
        """A pass was made: `num_fed` tokens of `batch` requests, out of `budget` (None: no limit)."""
        self.steps += 1
        self.seen = now
        self.fed_tokens += num_fed
        self.output_tokens += emitted
        self.batch.add(batch)
        self.emitted.add(emitted)
        if budget:
            self.budget.add(num_fed / budget)
        self.rate.add(now, emitted)

    def tokens_per_second(self, now: float | None = None) -> float:
        """Output tokens per second over the last minute."""
        return self.rate.per_second(self.seen if now is None else now)

    def report(self, now: float | None = None) -> dict[str, Any]:
        """Everything as plain data, for JSON."""
        return {
            "requests": {
                "received": self.received,
                "running": self.running,
                "waiting": self.waiting,
                "finished": dict(self.finished_by),
            },
            "preemptions": dict(self.preemptions),
            "stale_proposals": self.stale_proposals,
            "tokens": {
                "prompt": self.prompt_tokens,
                "prompt_cached": self.cached_tokens,
                "fed": self.fed_tokens,
                "output": self.output_tokens,
                "output_per_second": self.tokens_per_second(now),
            },
            "pages": self._pages(),
            "steps": self.steps,
            **{shown.name: getattr(self, shown.attribute).report() for shown in HISTOGRAMS},
        }

    def text(self, now: float | None = None) -> str:
        """A page for people."""
        prompt, cached, pages = self.prompt_tokens, self.cached_tokens, self._pages()
        speed = self.tokens_per_second(now)
        finished = {reason: count for reason, count in dict(self.finished_by).items() if count}
        ends = f" ({_listed(finished)})" if finished else ""
        known = f" ({cached / prompt:.0%} from the prefix cache)" if prompt else ""
        lines = [
            f"{'requests':<14}{self.received:,} received, {self.waiting:,} waiting, {self.running:,} running, "
            f"{sum(finished.values()):,} finished{ends}",
            f"{'tokens':<14}{prompt:,} prompt{known}, {self.output_tokens:,} output",
            f"{'speed':<14}{speed:,.1f} output tokens/s over the last minute; {self.steps:,} steps",
            f"{'preemptions':<14}{_listed(dict(self.preemptions))}; {self.stale_proposals:,} stale drafts dropped",
            f"{'pages':<14}{_listed(pages) if pages else 'none in use by this backend'}",
            "",
            f"{'':<14}" + "".join(f"{word:>10}" for word in ("p50", "p90", "p99", "mean", "max")),
        ]
        for shown in HISTOGRAMS:
            histogram: Histogram = getattr(self, shown.attribute)
            values = histogram.report()
            cells = (_human(values[key], histogram.unit) for key in ("p50", "p90", "p99", "mean", "max"))
            lines.append(f"{shown.words:<14}" + "".join(f"{cell:>10}" for cell in cells))
        return "\n".join(lines)

    def prometheus(self, prefix: str = "outrider", now: float | None = None) -> str:
        """Prometheus' text exposition format, version 0.0.4."""
        assert re.fullmatch("[a-zA-Z_:][a-zA-Z0-9_:]*", prefix), f"{prefix!r} cannot begin a metric's name"
        lines: list[str] = []

        def tell(kind: str, name: str, text: str, samples: Mapping[str, float]) -> None:
            lines.append(f"# HELP {prefix}_{name} {text}")
            lines.append(f"# TYPE {prefix}_{name} {kind}")
            lines.extend(f"{prefix}_{name}{labels} {value}" for labels, value in samples.items())

        tell("counter", "requests_received_total", "Requests that came in.", {"": self.received})
        tell("counter", "requests_finished_total", "Requests that ended.", _labelled("reason", self.finished_by))
        tell("counter", "preemptions_total", "Requests sent back to wait.", _labelled("kind", self.preemptions))
        tell("counter", "stale_proposals_total", "Drafts dropped as outdated.", {"": self.stale_proposals})
        tell("counter", "prompt_tokens_total", "Tokens of admitted prompts.", {"": self.prompt_tokens})
        tell("counter", "cached_tokens_total", "Prompt tokens from the prefix cache.", {"": self.cached_tokens})
        tell("counter", "fed_tokens_total", "Tokens fed to the target, drafts included.", {"": self.fed_tokens})
        tell("counter", "output_tokens_total", "Tokens emitted.", {"": self.output_tokens})
        tell("counter", "steps_total", "Passes of the target.", {"": self.steps})
        tell("gauge", "requests_running", "Requests in the batch now.", {"": self.running})
        tell("gauge", "requests_waiting", "Requests in the queue now.", {"": self.waiting})
        speed = self.tokens_per_second(now)
        tell("gauge", "output_tokens_per_second", "Tokens emitted a second, last minute.", {"": speed})
        if pages := self._pages():
            tell("gauge", "pages", "Pages of the KV cache now.", _labelled("state", pages))
        for shown in HISTOGRAMS:
            tell("histogram", shown.name, shown.help, {})
            lines.extend(_samples(f"{prefix}_{shown.name}", getattr(self, shown.attribute).copy()))
        return "\n".join(lines) + "\n"

    def _pages(self) -> dict[str, int] | None:
        """Of the states that the backend tells; None when it tells none."""
        told = {"free": self.pages_free, "held": self.pages_held, "idle": self.pages_idle}
        return {state: count for state, count in told.items() if count is not None} or None


@lru_cache(maxsize=256)  # a pass asks with a few small numbers, again and again
def _index(value: float) -> int:
    """The bucket of a value. A bucket holds (low, high]; powers of ten are the upper ends of theirs."""
    if value <= LEAST:
        return FIRST
    if value > MOST:
        return LAST
    return math.ceil(math.log10(value) * PER_DECADE)


def _quantile(buckets: Sequence[Bucket], counts: Sequence[int], share: float) -> float | None:
    assert 0.0 <= share <= 1.0, f"a share lies between 0 and 1, got {share}"
    if not buckets:
        return None
    rank = share * (sum(counts) - 1)  # of the value looked for, the lowest has 0
    for bucket, count in zip(buckets, counts, strict=True):
        if rank < count:
            inside = min(rank / (count - 1), 1.0) if count > 1 else 0.0
            return bucket.low + (bucket.high - bucket.low) * inside
        rank -= count
    return buckets[-1].high


def _count(counts: dict[str, int], name: str) -> None:
    if name not in counts:
        name = OTHER
    counts[name] = counts.get(name, 0) + 1


def _bounds(least: int, most: int) -> tuple[float, ...]:
    """1, 2.5 and 5 times every power of ten from `least` on, `most` being the last."""
    decades = (float(f"{digits}e{power}") for power in range(least, most) for digits in ("1", "2.5", "5"))
    return (*decades, float(f"1e{most}"))


BOUNDS = {"s": _bounds(-4, 2), "share": _bounds(-2, 0), "": _bounds(0, 4)}


def _samples(name: str, histogram: Histogram) -> list[str]:
    """The lines of one histogram, from a copy that nobody writes to."""
    bounds = BOUNDS[histogram.unit]
    within = zip(bounds, histogram.cumulative(bounds), strict=True)
    return [
        *(f'{name}_bucket{{le="{bound:g}"}} {count}' for bound, count in within),
        f'{name}_bucket{{le="+Inf"}} {histogram.count}',
        f"{name}_sum {histogram.total}",
        f"{name}_count {histogram.count}",
    ]


def _labelled(label: str, counts: Mapping[str, int]) -> dict[str, int]:
    return {f'{{{label}="{name}"}}': count for name, count in dict(counts).items()}


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def _human(value: float | None, unit: str) -> str:
    """A number as people read it: three digits, and the unit."""
    if value is None:
        return "-"
    if unit == "share":
        return f"{value:.0%}"
    if unit == "s":
        for size, word in ((1.0, "s"), (1e-3, "ms")):
            if value >= size:
                return f"{_short(value / size)} {word}"
        return f"{_short(value * 1e6)} us" if value > 0 else "0 ms"
    return _short(value)


def _short(value: float) -> str:
    """Three digits, all of those before the point, and no point in whole numbers."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
