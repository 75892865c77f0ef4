"""One model by itself: plain decoding and prefill beside transformers, and beside what the machine allows.

Everything runs in one process with the same threads and the same file, alternating, so that a noisy machine hits all
alike. The limits are measured too: reading the weights once a token and, for models on torch, large matrix products.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from outrider.backends.base import Backend, Spans
from outrider.bench.kernels import Limits, measured_limits
from outrider.engine.engine import Engine
from outrider.models.source import ModelSource
from outrider.native.binding import num_cores

PROMPT = "Explain to a friend who has never programmed what a computer does when it runs a program."
PREFILL = 512


@dataclass(frozen=True, slots=True)
class Reading:
    name: str
    median: float
    low: float
    high: float
    unit: str


def readings(model: str, *, quick: bool = False, threads: int | None = None) -> Iterator[Reading]:
    """Speeds in tokens per second, then the ratios of each repeat."""
    threads = threads or num_cores()
    engine = Engine.load(model, draft="none", threads=threads, device="cpu", threaded=False)
    target = engine.loop.target
    prompt = engine.encode(PROMPT)
    num_tokens, repeats = (16, 2) if quick else (64, 7)
    tasks: dict[str, Callable[[], float]] = {
        "plain decoding": lambda: _decoding(engine, prompt, num_tokens),
        "prefill": lambda: _prefill(target),
    }
    limits = measured_limits(target, threads)
    if limits is not None:
        least = limits.seconds(1)
        tasks["limit of decoding (weights read once)"] = lambda: 1.0 / least
        if limits.flops is not None:
            fastest = limits.flops / _flops_per_token(target, limits)
            tasks["limit of prefill (large matrix product)"] = lambda: fastest
    if limits is not None and all(find_spec(name) is not None for name in ("torch", "transformers")):
        peer = _Peer(ModelSource.parse(model).fetch(), threads)
        tasks["transformers: plain decoding"] = lambda: peer.decoding(prompt, num_tokens)
        tasks["transformers: prefill"] = peer.prefill
    speeds: dict[str, list[float]] = {name: [] for name in tasks}
    for task in tasks.values():
        task()  # warm
    for _ in range(repeats):
        for name, task in tasks.items():
            speeds[name].append(task())
    for name, values in speeds.items():
        yield _reading(name, values, "tokens/s")
    for name, ours, theirs in (
        ("decoding: share of the limit", "plain decoding", "limit of decoding (weights read once)"),
        ("prefill: share of the limit", "prefill", "limit of prefill (large matrix product)"),
        ("decoding: ratio to transformers", "plain decoding", "transformers: plain decoding"),
        ("prefill: ratio to transformers", "prefill", "transformers: prefill"),
    ):
        if theirs in speeds:
            yield _reading(name, [a / b for a, b in zip(speeds[ours], speeds[theirs], strict=True)], "")


def _reading(name: str, values: Sequence[float], unit: str) -> Reading:
    return Reading(name, median(values), min(values), max(values), unit)


def _decoding(engine: Engine, prompt: list[int], num_tokens: int) -> float:
    """Tokens per second after the first, through the whole engine."""
    times = []
    for _ in engine.stream(prompt, max_tokens=num_tokens + 1, temperature=0.0, ignore_eos=True):
        times.append(time.perf_counter())
    return num_tokens / (times[-1] - times[0])


def _prefill(target: Backend) -> float:
    """Prompt tokens per second of one pass."""
    count = min(PREFILL, target.info.context)
    tokens = np.random.default_rng(0).integers(0, target.info.vocab_size, count)
    slot = target.open((), count)
    assert slot is not None, "an idle cache has room"
    started = time.perf_counter()
    target.score(Spans([slot], [0], [count], [1], target.ops.integers(tokens.tolist())))
    elapsed = time.perf_counter() - started
    target.close(slot)
    return count / elapsed


def _flops_per_token(target: Any, limits: Limits) -> float:
    """Of a prompt: the layers' matrices, attention to half of the prompt on average, and one row of logits."""
    spec, output = target.spec, 2 * target.weights.output.numel()
    attention = 2 * 2 * spec.num_layers * spec.num_heads * spec.head_dim * PREFILL / 2
    return float(limits.flops_per_row - output + attention + output / PREFILL)


class _Peer:
    """The same weights in transformers."""

    def __init__(self, path: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        folder, options = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
        load: Any = AutoModelForCausalLM.from_pretrained
        self.model = load(folder, local_files_only=True, dtype=torch.float32, **options).eval()

    def decoding(self, prompt: list[int], num_tokens: int) -> float:
        import torch

        times: list[float] = []

        class Clock:
            def put(self, _: object) -> None:
                times.append(time.perf_counter())

            def end(self) -> None:
                pass

        with torch.inference_mode():
            self.model.generate(
                torch.tensor([prompt]),
                max_new_tokens=num_tokens + 1,
                min_new_tokens=num_tokens + 1,
                do_sample=False,
                streamer=Clock(),
            )
        return num_tokens / (times[-1] - times[1])  # the first put is the prompt

    def prefill(self) -> float:
        import torch

        tokens = torch.randint(0, self.model.config.vocab_size, (1, PREFILL))
        with torch.inference_mode():
            started = time.perf_counter()
            self.model(tokens, logits_to_keep=1)
            return PREFILL / (time.perf_counter() - started)
