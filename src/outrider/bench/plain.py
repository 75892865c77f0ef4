"""One model by itself: plain decoding and prefill beside transformers, and beside what the machine allows.

Everything runs in one process with the same threads and weights, alternating, so that a noisy machine hits all alike.
The limits are measured too: reading the weights once a token, and large matrix products.
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
import torch

from outrider.backends.base import Spans
from outrider.backends.transformer import TransformerBackend
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.models.source import ModelSource

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
    engine = Engine.load(model, draft="none", threads=threads, device="cpu", backend="torch")
    target = engine.loop.target
    if not isinstance(target, TransformerBackend):
        raise ConfigError(f"{model} is no transformer; this benchmark needs one", param="model")
    prompt = engine.encode(PROMPT)
    num_tokens, repeats = (16, 2) if quick else (64, 7)
    tasks: dict[str, Callable[[], float]] = {
        "plain decoding": lambda: _decoding(engine, prompt, num_tokens),
        "prefill": lambda: _prefill(target),
        "limit of decoding (weights read once)": lambda: _bandwidth(target) / _weight_bytes(target),
        "limit of prefill (large matrix product)": lambda: _flops() / _flops_per_token(target),
    }
    if find_spec("transformers") is not None:
        peer = _Peer(ModelSource.parse(model).fetch())
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


def _prefill(target: TransformerBackend) -> float:
    """Prompt tokens per second of one pass."""
    count = min(PREFILL, target.info.context)
    tokens = np.random.default_rng(0).integers(0, target.info.vocab_size, count)
    slot = target.open((), count)
    assert slot is not None, "an idle cache has room"
    started = time.perf_counter()
    target.score(Spans([slot], [0], [count], [1], tokens))
    elapsed = time.perf_counter() - started
    target.close(slot)
    return count / elapsed


def _weights(target: TransformerBackend) -> list[torch.Tensor]:
    """The matrices that every token passes through."""
    parts = [
        part for layer in target.weights.layers for part in (layer.qkv, layer.attention_out, layer.gate_up, layer.down)
    ]
    return [*parts, target.weights.output]


def _weight_bytes(target: TransformerBackend) -> int:
    return sum(part.numel() * part.element_size() for part in _weights(target))


def _flops_per_token(target: TransformerBackend) -> float:
    """Of a prompt: the layers' matrices, attention to half of the prompt on average, and one row of logits."""
    spec = target.spec
    layers = 2 * sum(part.numel() for part in _weights(target)[:-1])
    attention = 2 * 2 * spec.num_layers * spec.num_heads * spec.head_dim * PREFILL / 2
    return layers + attention + 2 * target.weights.output.numel() / PREFILL


def _bandwidth(target: TransformerBackend) -> float:
    """Bytes per second of a matrix-vector product far larger than any cache: the output matrix."""
    matrix = target.weights.output
    row = torch.randn(1, matrix.shape[0])
    with torch.inference_mode():
        started = time.perf_counter()
        for _ in range(4):
            torch.mm(row, matrix)
        return 4 * matrix.numel() * matrix.element_size() / (time.perf_counter() - started)


def _flops(size: int = 2048) -> float:
    square = torch.randn(size, size)
    started = time.perf_counter()
    torch.mm(square, square)
    return 2 * size**3 / (time.perf_counter() - started)


class _Peer:
    """The same weights in transformers."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        folder, options = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
        load: Any = AutoModelForCausalLM.from_pretrained
        self.model = load(folder, local_files_only=True, dtype=torch.float32, **options).eval()

    def decoding(self, prompt: list[int], num_tokens: int) -> float:
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
        tokens = torch.randint(0, self.model.config.vocab_size, (1, PREFILL))
        with torch.inference_mode():
            started = time.perf_counter()
            self.model(tokens, logits_to_keep=1)
            return PREFILL / (time.perf_counter() - started)
