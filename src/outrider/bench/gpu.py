"""How fast passes are on a GPU, beside what its memory and its matrix units can do at all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from outrider.backends.base import Spans
from outrider.backends.cuda.backend import GpuBackend
from outrider.bench.work import OWN
from outrider.engine.engine import Engine
from outrider.models.base import TransformerSpec
from outrider.types import Slot

ROWS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (128, 4096, 8192, 16_384, 32_000)
PROMPT = 4096


@dataclass(frozen=True, slots=True)
class Line:
    """One number of the table."""

    name: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None
    note: str = ""


def copy_rate(device: str) -> float:
    """Bytes a second, read and written, of a large copy."""
    source = torch.ones(2**31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / median(timed(lambda: target.copy_(source), 10))


def matrix_rate(device: str) -> float:
    """Operations a second of a large product of random numbers."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / median(timed(lambda: torch.mm(a, b), 10))


def timed(run: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of the device for each call, which are queued one behind the other."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    marks = [_mark() for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]


def _mark() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def weight_bytes(spec: TransformerSpec, itemsize: int) -> int:
    """Read by every pass; of the embedding only a row."""
    heads = spec.num_heads + 2 * spec.num_kv_heads
    layer = spec.width * (heads * spec.head_dim + spec.num_heads * spec.head_dim + 3 * spec.ffn_width)
    return itemsize * (spec.num_layers * layer + spec.num_columns * spec.width)


def cache_bytes(spec: TransformerSpec, itemsize: int) -> int:
    """Of one token."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * itemsize


def readings(model: str, device: str, quick: bool) -> Iterator[Line]:
    """Passes and plain decoding of one model. It should be large: of a small one only launches are measured."""
    repeats = 20 if quick else 60
    copied, multiplied = copy_rate(device), matrix_rate(device)
    yield Line("copy of memory", copied / 1e12, "TB/s")
    yield Line("matrix product of 8192", multiplied / 1e12, "TFLOP/s")
    room = CONTEXTS[-1] + PROMPT
    engine = Engine.load(model, draft="ngram", device=device, cache_tokens=room, max_batch=8, threaded=False)
    target: Any = engine.loop.target
    assert isinstance(target, GpuBackend), "a transformer on a GPU with Triton"
    yield from _passes(target, copied, repeats)
    yield from _contexts(target, copied, repeats)
    yield from _prefill(target, multiplied, 3 if quick else 8)
    yield from _decoding(engine, copied, 3)
    engine.close()
    strict = Engine.load(model, device=device, cache_tokens=8192, strict=True)
    yield from _strictly(strict, repeats)
    strict.close()


def _tokens(target: GpuBackend, count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, target.info.vocab_size, count).tolist()  # type: ignore[no-any-return]


def _fill(target: GpuBackend, slot: Slot, length: int) -> None:
    """Bring a sequence to a length."""
    while (held := target.length(slot)) < length:
        tokens = _tokens(target, min(PROMPT, length - held), held)
        target.score(Spans([slot], [held], [len(tokens)], [0], np.asarray(tokens)))


def _pass(target: GpuBackend, slot: Slot, rows: int, parents: Sequence[int] | None, repeats: int) -> list[float]:
    start, tokens = target.length(slot), np.asarray(_tokens(target, rows))
    spans = Spans([slot], [start], [rows], [rows], tokens, {} if parents is None else {0: parents})

    def run() -> None:
        target.score(spans)
        target.rewind(slot, start)

    return timed(run, repeats)


def _tree(size: int) -> list[int]:
    """Every node has up to two children."""
    return [(node - 1) // 2 if node else -1 for node in range(size)]


def _passes(target: GpuBackend, copied: float, repeats: int) -> Iterator[Line]:
    slot = target.open((), 1024)
    assert slot is not None
    _fill(target, slot, 512)
    limit = weight_bytes(target.spec, 2) / copied
    yield Line("reading the weights once at that speed", limit * 1e3, "ms", note=f"{1 / limit:.0f} passes/s")
    one = 0.0
    for rows in ROWS:
        times = _pass(target, slot, rows, None, repeats)
        one = one or median(times)
        yield _line(f"pass of {rows} rows behind 512 tokens", times, f"{median(times) / one:.3f} of one row")
    times = _pass(target, slot, 32, _tree(32), repeats)
    yield _line("pass of a tree of 32 nodes", times, f"{median(times) / one:.3f} of one row")
    target.close(slot)


def _contexts(target: GpuBackend, copied: float, repeats: int) -> Iterator[Line]:
    slot = target.open((), CONTEXTS[-1] + 8)
    assert slot is not None
    first = 0.0
    for length in CONTEXTS:
        if length + 8 > target.info.context:
            break
        _fill(target, slot, length)
        times = _pass(target, slot, 1, None, repeats)
        first = first or median(times)
        more = cache_bytes(target.spec, 2) * (length - CONTEXTS[0]) / copied
        grown = median(times) - first
        note = f"{grown * 1e3:+.2f} ms; its cache alone takes {more * 1e3:.2f}"
        yield _line(f"one row behind {length} tokens", times, note)
    target.close(slot)


def _prefill(target: GpuBackend, multiplied: float, repeats: int) -> Iterator[Line]:
    slot = target.open((), PROMPT + 8)
    assert slot is not None
    length = min(PROMPT, target.info.context - 8)
    spans = Spans([slot], [0], [length], [1], np.asarray(_tokens(target, length)))

    def run() -> None:
        target.score(spans)
        target.rewind(slot, 0)

    times, spec = timed(run, repeats), target.spec
    products = weight_bytes(spec, 1) - spec.num_columns * spec.width
    attention = 2 * spec.num_layers * length**2 * spec.num_heads * spec.head_dim
    rate = (2 * products * length + attention) / median(times)
    yield _line(
        f"prompt of {length} tokens", times, f"{rate / 1e12:.0f} TFLOP/s, {rate / multiplied:.2f} of the product's"
    )
    target.close(slot)


def _decoding(engine: Engine, copied: float, repeats: int) -> Iterator[Line]:
    """Plain decoding through the whole engine, and how much of it is not the device's."""
    target: Any = engine.loop.target
    prompt = _tokens(target, 128)
    slot = target.open((), 1024)
    _fill(target, slot, 128 + 100)
    device_s = median(_pass(target, slot, 1, None, 30))
    target.close(slot)
    for name, settings in (("greedy", {"temperature": 0.0}), ("at temperature 1", {"temperature": 1.0, "seed": 1})):
        rates = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            first = 0.0
            for number, _event in enumerate(
                engine.stream(prompt, width=0, max_tokens=200, ignore_eos=True, **settings)
            ):
                if number == 8:
                    started, first = time.perf_counter(), float(number)
            rates.append((200 - 1 - first) / (time.perf_counter() - started))
        rates = rates[1:]  # the first run records graphs
        hidden = 1.0 - device_s * median(rates)
        note = f"the device waits {hidden:.1%} of a round"
        yield Line(f"plain decoding, {name}", median(rates), "tokens/s", min(rates), max(rates), note)


def _strictly(engine: Engine, repeats: int) -> Iterator[Line]:
    target: Any = engine.loop.target
    slot = target.open((), 1024)
    _fill(target, slot, 512)
    yield _line("strict: pass of 1 row behind 512 tokens", _pass(target, slot, 1, None, repeats), "")
    yield _line("strict: pass of 8 rows", _pass(target, slot, 8, None, repeats), "")
    yield _line("strict: tree of 32 nodes", _pass(target, slot, 32, _tree(32), repeats), "")
    target.close(slot)


def texts(model: str, device: str, quick: bool) -> Iterator[Line]:
    """A model that speaks, on our own prompts: plain, and with lookups whose width is the engine's."""
    engine = Engine.load(model, draft="suffix,ngram", device=device)
    kinds = {kind: prompts[: 1 if quick else 2] for kind, prompts in OWN.items()}
    plain: dict[str, float] = {}
    for method in ("none", "ngram", "suffix"):
        for measured in (False, True):
            for kind, prompts in kinds.items():
                tokens, started = 0, time.perf_counter()
                for prompt in prompts:
                    asked = engine.encode_chat([{"role": "user", "content": prompt}])
                    # a tenant of its own: nobody has read these answers before
                    who = f"{method} {measured}"
                    result = engine.generate(asked, method=method, tenant=who, max_tokens=192, temperature=0.0)
                    tokens += len(result.token_ids)
                rate = tokens / (time.perf_counter() - started)
                if measured:
                    plain.setdefault(kind, rate)
                    note = "" if method == "none" else f"{rate / plain[kind]:.2f} of plain"
                    yield Line(f"{kind}, {'plain' if method == 'none' else method}", rate, "tokens/s", note=note)
    engine.close()


def _line(name: str, seconds: Sequence[float], note: str) -> Line:
    ordered = sorted(seconds)
    low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
    return Line(name, median(seconds) * 1e3, "ms", low * 1e3, high * 1e3, note)
