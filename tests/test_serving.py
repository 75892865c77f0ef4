"""Metrics of serving: R21. Bounded memory, known accuracy, formats that people and Prometheus can read."""

from __future__ import annotations

import json
import math
import random
import re
import sys
import threading
from collections.abc import Callable

import pytest

from outrider.serving import HISTOGRAMS, KINDS, REASONS, Histogram, Rate, ServingMetrics
from outrider.types import FinishReason

DRAWS: dict[str, Callable[[random.Random], float]] = {
    "lognormal": lambda rng: rng.lognormvariate(-3.0, 1.5),
    "uniform": lambda rng: rng.uniform(0.2, 0.9),
    "two points": lambda rng: 0.0101 if rng.random() < 0.7 else 31.4,
    "two points of one bucket": lambda rng: 0.001001 if rng.random() < 0.95 else 0.001025,
    "whole": lambda rng: rng.randint(1, 20),
}


def exact(values: list[float], share: float) -> float:
    rank = share * (len(values) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (rank - low)


def busy() -> ServingMetrics:
    """An engine after ten requests: eight answered, one cancelled, one failed before its first token."""
    metrics = ServingMetrics()
    for number in range(10):
        metrics.arrived(now=100.0 + number)
        if number == 9:
            metrics.finished("error", 0.5, 0, None)
            continue
        metrics.started(0.002, num_prompt=100, num_cached=25)
        metrics.first_token(0.040)
        metrics.step(100.0 + number, batch=4, num_fed=192, budget=256, emitted=12)
        reason = FinishReason.CANCELLED if number == 8 else FinishReason.STOP
        metrics.finished(reason, 1.5, 12, 0.0105)
    metrics.preempted("swap")
    metrics.went_stale(3)
    metrics.running, metrics.waiting = 2, 5
    metrics.pages_free, metrics.pages_held, metrics.pages_idle = 1000, 20, 4
    return metrics


@pytest.mark.parametrize("name", DRAWS)
def test_quantiles_are_within_three_percent(name: str) -> None:
    rng = random.Random(name)
    values = [DRAWS[name](rng) for _ in range(20_001)]
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    values.sort()
    for share in (0.01, 0.1, 0.5, 0.9, 0.99, 0.999):
        assert histogram.quantile(share) == pytest.approx(exact(values, share), rel=0.03), share
        if name == "whole":  # whole numbers this small have a bucket each
            assert histogram.quantile(share) == exact(values, share)
    assert histogram.quantile(0.0) == values[0] and histogram.quantile(1.0) == values[-1]
    assert histogram.count == len(values) and histogram.mean == pytest.approx(sum(values) / len(values))


def test_a_million_values_take_few_buckets() -> None:
    rng, histogram = random.Random(1), Histogram()
    for _ in range(1_000_000):
        histogram.add(10.0 ** (rng.random() * 20 - 10))  # far beyond both ends
    assert histogram.count == 1_000_000 and histogram.num_buckets <= 962


def test_unknown_names_and_long_times_take_no_memory() -> None:
    metrics = ServingMetrics()
    for number in range(1000):
        metrics.finished(f"reason {number}", 1.0, 1, None)
        metrics.preempted(f"kind {number}")
        metrics.rate.add(number * 7.0, 1)
    assert list(metrics.finished_by) == [*REASONS, "other"] and metrics.finished_by["other"] == 1000
    assert list(metrics.preemptions) == [*KINDS, "other"] and len(metrics.rate._slots) == 60


def test_odd_values() -> None:
    histogram = Histogram()
    assert histogram.quantile(0.5) is None and histogram.mean is None
    for value in (math.nan, math.inf, -math.inf):
        histogram.add(value)
    histogram.add(1.0, times=0)
    assert histogram.count == 0 and histogram.num_buckets == 0
    for value in (-1.0, 0.0, 1e-9, 1e9):
        histogram.add(value)
    assert histogram.quantile(0.0) == -1.0 and histogram.quantile(1.0) == 1e9 and histogram.total == pytest.approx(1e9)
    assert histogram.cumulative([1e-4, 1.0]) == [3, 3]
    with pytest.raises(AssertionError, match="between 0 and 1"):
        histogram.quantile(50)


def test_merging_is_adding_everything() -> None:
    rng = random.Random(2)
    values = [rng.lognormvariate(0.0, 3.0) for _ in range(2000)]
    parts, whole = [Histogram(), Histogram()], Histogram()
    for place, value in enumerate(values):
        parts[place % 2 if place < 1500 else 0].add(value, times=3)
        whole.add(value, times=3)
    parts[0].merge(parts[1])
    shares = [0.0, 0.01, 0.5, 0.99, 1.0]
    assert parts[0].count == whole.count == 6000 and parts[0].total == pytest.approx(whole.total)
    assert parts[0].quantiles(shares) == whole.quantiles(shares)
    before = parts[1].quantile(0.5)
    parts[1].merge(parts[1])
    parts[0].add(values[0])
    assert parts[1].quantile(0.5) == pytest.approx(before, rel=0.03) and parts[1].count == 2 * 3 * 750
    with pytest.raises(AssertionError, match="share"):
        whole.merge(Histogram("share"))


def test_bounds_count_what_lies_below() -> None:
    """Right at a bound a value counts, and 1 % beyond it no longer does."""
    for bound in (1e-4, 2.5e-4, 5e-4, 1e-3, 0.025, 0.5, 1.0, 2.5, 5.0, 10.0, 250.0, 1e4):
        histogram = Histogram()
        for value in (bound * 0.99, bound, bound * 1.01):
            histogram.add(value)
        assert histogram.cumulative([bound / 2, bound, bound * 2]) == [0, 2, 3], bound


def test_rate_is_that_of_the_last_minute() -> None:
    rate = Rate()
    assert rate.per_second(0.0) == 0.0
    rate.add(1000.25, 50)
    assert rate.per_second(1000.25) == 50.0  # a moment counts as a second
    assert rate.per_second(1010.25) == 5.0
    for tenth in range(6000):
        rate.add(2000.0 + tenth / 10, 4)
    assert rate.per_second(2599.99) == pytest.approx(40.0, rel=0.01)
    assert rate.per_second(2629.5) == pytest.approx(20.0, rel=0.03)
    assert rate.per_second(2700.0) == 0.0
    rate.add(-5.0, 10)  # a clock may start anywhere
    assert rate.per_second(-4.0) == 10.0


def test_report() -> None:
    report = busy().report(now=110.0)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    finished = {"stop": 8, "length": 0, "cancelled": 1, "deadline": 0, "error": 1}
    assert report["requests"] == {"received": 10, "running": 2, "waiting": 5, "finished": finished}
    assert report["preemptions"] == {"recompute": 0, "swap": 1} and report["stale_proposals"] == 3
    tokens = {"prompt": 900, "prompt_cached": 225, "fed": 9 * 192, "output": 108, "output_per_second": 10.8}
    assert report["tokens"] == pytest.approx(tokens) and report["steps"] == 9
    assert report["pages"] == {"free": 1000, "held": 20, "idle": 4}
    for name, count, value in (
        ("time_to_first_token_seconds", 9, 0.040),
        ("time_per_output_token_seconds", 9, 0.0105),
        ("queue_time_seconds", 9, 0.002),
        ("request_latency_seconds", 8, 1.5),
        ("answer_tokens", 8, 12),
        ("batch_size", 9, 4),
        ("step_budget_used_ratio", 9, 0.75),
        ("output_tokens_per_step", 9, 12),
    ):
        spread = dict.fromkeys(("mean", "min", "p50", "p90", "p99", "max"), value)
        assert report[name] == pytest.approx({"count": count, **spread}), name
    assert busy().report()["tokens"]["output_per_second"] == pytest.approx(108 / 9)  # at the last time heard of
    assert busy().report(now=500.0)["tokens"]["output_per_second"] == 0.0


def test_text() -> None:
    metrics = busy()
    metrics.ttft.add(0.0002)
    metrics.ttft.add(2.0)
    lines = metrics.text(now=110.0).splitlines()
    assert lines[:5] == [
        "requests      10 received, 5 waiting, 2 running, 10 finished (8 stop, 1 cancelled, 1 error)",
        "tokens        900 prompt (25% from the prefix cache), 108 output",
        "speed         10.8 output tokens/s over the last minute; 9 steps",
        "preemptions   0 recompute, 1 swap; 3 stale drafts dropped",
        "pages         1,000 free, 20 held, 4 idle",
    ]
    table = lines[6:]
    assert len({len(line) for line in table}) == 1, "the columns are aligned"
    rows = {line[:14].strip(): re.split(r"\s{2,}", line[14:].strip()) for line in table}
    assert rows[""] == ["p50", "p90", "p99", "mean", "max"]
    assert rows["first token"][0] == "40 ms" and rows["first token"][-1] == "2 s"
    assert rows["per token"] == ["10.5 ms"] * 5 and rows["whole answer"][0] == "1.50 s"
    assert rows["budget used"][0] == "75%" and rows["batch size"][0] == "4"
    assert len(rows) == 1 + len(HISTOGRAMS)
    empty = ServingMetrics().text()
    assert "0 received" in empty and empty.splitlines()[-1].split()[-5:] == ["-"] * 5


def parsed(text: str) -> tuple[dict[str, str], dict[tuple[str, str], float]]:
    """(type by metric, value by (sample name, labels)), each seen once and in the order the format asks for."""
    types: dict[str, str] = {}
    samples: dict[tuple[str, str], float] = {}
    helped, current = "", ""
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            helped = line.split(" ", 3)[2]
            assert len(line.split(" ", 3)[3]) > 5
        elif line.startswith("# TYPE "):
            current, kind = line.split(" ")[2:]
            assert current == helped and current not in types
            types[current] = kind
        else:
            match = re.fullmatch(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[a-z]+="[^"\\]*"\})? (\S+)', line)
            assert match is not None, line
            name, labels, value = match.groups()
            suffixes = ("_bucket", "_sum", "_count") if types[current] == "histogram" else ("",)
            assert name in [current + suffix for suffix in suffixes], line
            assert (name, labels or "") not in samples, line
            samples[name, labels or ""] = float(value)
    return types, samples


@pytest.mark.parametrize("metrics", [busy(), ServingMetrics()], ids=["busy", "empty"])
def test_prometheus(metrics: ServingMetrics) -> None:
    types, samples = parsed(metrics.prometheus())
    assert all(name.startswith("outrider_") for name in types)
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in types.items())
    histograms = [name for name, kind in types.items() if kind == "histogram"]
    assert len(histograms) == len(HISTOGRAMS)
    for name in histograms:
        buckets = [(labels[5:-2], value) for (sample, labels), value in samples.items() if sample == f"{name}_bucket"]
        bounds, counts = [float(bound) for bound, _ in buckets], [count for _, count in buckets]
        assert bounds == sorted(bounds) and bounds[-1] == math.inf and 5 < len(bounds) <= 20
        assert counts == sorted(counts) and counts[-1] == samples[f"{name}_count", ""]
        assert (samples[f"{name}_sum", ""] > 0) == (counts[-1] > 0)
    assert samples["outrider_requests_received_total", ""] == metrics.received
    for reason in REASONS:
        assert samples["outrider_requests_finished_total", f'{{reason="{reason}"}}'] == metrics.finished_by[reason]
    assert (("outrider_pages", '{state="held"}') in samples) == (metrics.pages_held is not None)


def test_prometheus_values() -> None:
    _, samples = parsed(busy().prometheus(prefix="mine", now=110.0))
    assert samples["mine_time_to_first_token_seconds_bucket", '{le="0.025"}'] == 0
    assert samples["mine_time_to_first_token_seconds_bucket", '{le="0.05"}'] == 9
    assert samples["mine_time_to_first_token_seconds_sum", ""] == pytest.approx(0.36)
    assert samples["mine_output_tokens_per_second", ""] == pytest.approx(10.8)
    assert samples["mine_preemptions_total", '{kind="swap"}'] == 1 and samples["mine_requests_waiting", ""] == 5
    with pytest.raises(AssertionError, match="cannot begin"):
        busy().prometheus(prefix="1 bad")


def test_reading_while_another_thread_writes() -> None:
    metrics, done, turns = ServingMetrics(), threading.Event(), 0

    def write() -> None:
        rng = random.Random(3)
        try:
            for number in range(15_000):
                metrics.arrived(number / 10)
                metrics.started(10.0 ** (rng.random() * 12 - 6))  # new buckets all the time
                metrics.finished(rng.choice([*REASONS, "new"]), 10.0 ** (rng.random() * 12 - 6), number, rng.random())
                metrics.step(number / 10, number % 300, number, 20_000, number % 7)
        finally:
            done.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    writer = threading.Thread(target=write)
    writer.start()
    try:
        last: dict[tuple[str, str], float] = {}
        while not done.is_set():
            json.dumps(metrics.report())
            metrics.text()
            _, samples = parsed(metrics.prometheus())
            for shown in HISTOGRAMS:
                name = f"outrider_{shown.name}"
                assert samples[f"{name}_bucket", '{le="+Inf"}'] == samples[f"{name}_count", ""]
            counted = {key: value for key, value in samples.items() if key[0].endswith(("_bucket", "_total"))}
            assert all(counted[key] >= value for key, value in last.items()), "what is counted never shrinks"
            last, turns = counted, turns + 1
    finally:
        writer.join()
        sys.setswitchinterval(interval)
    assert turns > 3 and metrics.queue.count == 15_000
