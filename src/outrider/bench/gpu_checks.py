"""Is what the GPU computes right? Kernels beside their torch twins, logits beside fp32 on the CPU, trees beside their
unrolled paths, bits of rows in strict mode, and speculation beside plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from outrider.backends.base import Spans
from outrider.backends.cuda import twins
from outrider.backends.cuda.backend import GpuBackend
from outrider.backends.cuda.layout import MIN_SPLIT, Layout, Shape, arrange, fill, size_of, view
from outrider.backends.transformer import TransformerBackend
from outrider.engine.engine import Engine
from outrider.kv.pages import Pages
from outrider.models.base import ModelFile
from outrider.models.opening import open_model
from outrider.models.random_file import RandomFile

PAGE = 16
TREE = [-1, 0, 0, 1, 3, 2, 2, 5]


class Check(NamedTuple):
    name: str
    value: float
    limit: float | None  # that it must not be above; None: for information

    @property
    def is_good(self) -> bool:
        return self.limit is None or self.value <= self.limit


def checks(model: str, device: str, quick: bool) -> Iterator[Check]:
    """All of them. model: whose logits and texts are looked at; random weights of a shape will do."""
    yield from kernel_checks(device, 1 if quick else 4)
    path = Path(model)
    yield from logit_checks(lambda: _open(path), device)
    yield from strict_checks(lambda: _open(path), device)
    yield from speculation_checks(model, device, 4 if quick else 12)
    yield from coupled_checks(model, device, 48)


def _open(path: Path) -> ModelFile:
    return open_model(path)


def kernel_checks(device: str, repeats: int) -> Iterator[Check]:
    from outrider.backends.cuda import kernels

    draw = torch.Generator(device).manual_seed(1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, device=device).to(torch.bfloat16)

    def beside(run: Callable[[Any, torch.Tensor], None], like: torch.Tensor) -> float:
        outs = []
        for side in (kernels, twins):
            out = torch.full_like(like, torch.nan)
            run(side, out)
            outs.append(out.float())
        return float((outs[0] - outs[1]).norm() / outs[1].norm())

    worst: dict[str, float] = {}
    random = np.random.default_rng(0)
    for _ in range(repeats):
        for rows in (1, 3, 8, 13, 32, 50):
            inputs, outputs = int(random.integers(2, 40)) * 64, int(random.integers(40, 3000))
            x, out, bias = noise(rows, inputs), noise(rows, outputs), noise(outputs)
            w = noise(2 * outputs, inputs) / 8
            given: list[dict[str, Any]] = [{}, {"norm": 0.3}, {"norm": 0.3, "bias": bias}, {"added": out.clone()}]
            for tile in (None, 32):
                for more in given:
                    found = beside(partial(_product, x, w[:outputs], {"tile": tile, **more}), out)
                    worst["product"] = max(worst.get("product", 0.0), found)
                found = beside(partial(_gated, x, w, {"tile": tile, "norm": 0.3}), out)
                worst["gated product"] = max(worst.get("gated product", 0.0), found)
        for tree in ("", "masks", "paths"):
            for heads, tile in (((32, 8, 128), 16), ((32, 8, 128), 4), ((9, 3, 64), 5), ((12, 2, 128), 10)):
                for window in (None, 100) if tree != "masks" else (None,):
                    layout, places = _random_pass(random, tree, tile, device)
                    num_heads, kv_heads, dim = heads
                    rows = layout.shape.rows
                    qkv, held = noise(rows, (num_heads + 2 * kv_heads) * dim), noise(places + 1, 2 * kv_heads * dim)
                    slots = rows * num_heads * layout.num_splits
                    scratch = tuple(torch.full((n,), torch.nan, device=device) for n in (slots * dim, slots, slots))
                    looked = {"page_size": PAGE, "window": window, "scratch": scratch}
                    name = f"attention, {tree or 'chains'}"
                    found = beside(partial(_attend, qkv, held, layout, heads, looked), noise(rows, num_heads * dim))
                    worst[name] = max(worst.get(name, 0.0), found)
    for name, value in worst.items():
        yield Check(f"kernel beside its twin: {name}", value, 1e-2)


def _product(x: torch.Tensor, w: torch.Tensor, options: dict[str, Any], side: Any, out: torch.Tensor) -> None:
    side.product(x, w, out, **options)


def _gated(x: torch.Tensor, w: torch.Tensor, options: dict[str, Any], side: Any, out: torch.Tensor) -> None:
    side.gated_product(x, w, out, **options)


def _attend(
    qkv: torch.Tensor, held: torch.Tensor, layout: Layout, heads: Any, options: Any, side: Any, out: torch.Tensor
) -> None:
    out.zero_()  # rows that fill a pass up are not written
    side.attend(qkv, held, out, layout, heads, **options)


def _random_pass(random: np.random.Generator, tree: str, tile: int, device: str) -> tuple[Layout, int]:
    spans = int(random.integers(1, 6))
    starts = random.integers(0, 40 * MIN_SPLIT, spans).tolist()
    counts = random.integers(1, 40 if tree else 12, spans).tolist()
    free = random.permutation(spans * 400).tolist()
    pages = [[free.pop() for _ in range((s + c) // PAGE + 1)] for s, c in zip(starts, counts, strict=True)]
    parents: dict[int, list[int]] = {}
    for index in range(0, spans, 2) if tree else ():
        earlier = int(random.integers(0, min(4, starts[index]) + 1))
        parents[index] = [int(random.integers(-1, node)) for node in range(earlier + counts[index])]
    rows = arrange(starts, counts, pages, PAGE, parents, tile=tile, max_splits=32, by_path=tree == "paths")
    shape = Shape(sum(counts) + 3, rows.num_groups + 2, tile, rows.tree)
    numbers = torch.zeros(size_of(shape) + len(rows.table), dtype=torch.int32)
    fill(rows, shape, spans * 400 * PAGE, numbers.numpy())
    return view(numbers.to(device), shape, rows.num_splits), spans * 400 * PAGE


def _feed(backend: Any, slot: Any, tokens: Sequence[int], parents: Sequence[int] | None = None) -> torch.Tensor:
    start, count = backend.length(slot), len(tokens)
    spans = Spans([slot], [start], [count], [count], np.asarray(tokens), {} if parents is None else {0: parents})
    return torch.as_tensor(backend.score(spans).logits).float().cpu()


def _ways(backend: Any, tokens: Sequence[int]) -> torch.Tensor:
    """A prompt in chunks, a chain, a tree of which a path stays, single tokens: every way rows can come."""
    slot = backend.open(tokens, 400)
    rows = [_feed(backend, slot, tokens[:90]), _feed(backend, slot, tokens[90:91]), _feed(backend, slot, tokens[91:99])]
    rows.append(_feed(backend, slot, tokens[99 : 99 + len(TREE)], TREE))
    backend.keep([slot], [99 + 4], {slot: [99 + node for node in (0, 1, 3, 4)]})
    rows += [_feed(backend, slot, [token]) for token in tokens[110:114]]
    rows += [_feed(backend, slot, tokens[114:134]), _feed(backend, slot, tokens[134:234])]
    backend.close(slot)
    return torch.cat(rows)


def logit_checks(file: Callable[[], ModelFile], device: str) -> Iterator[Check]:
    """Beside fp32 on the CPU: what bf16 costs torch's own layers, and that ours cost no more."""
    tokens = np.random.default_rng(0).integers(0, file().spec.num_columns, 240).tolist()
    exact = _ways(TransformerBackend(file(), Pages(64, PAGE)), tokens)
    torchs = _ways(TransformerBackend(file(), Pages(64, PAGE), device=device, dtype=torch.bfloat16), tokens)
    ours = _ways(GpuBackend(file(), Pages(64, PAGE), device=device), tokens)
    allowed, error = (float(((rows - exact).norm(dim=-1) / exact.norm(dim=-1)).median()) for rows in (torchs, ours))
    yield Check("logits beside fp32 on the CPU, median row: torch in bf16", allowed, 0.1)
    yield Check("logits beside fp32 on the CPU, median row: ours in bf16", error, 1.25 * allowed)
    same = (exact.argmax(-1) == ours.argmax(-1)).float().mean()
    yield Check("rows whose likeliest token differs from fp32's", 1.0 - float(same), 0.1)


def strict_checks(file: Callable[[], ModelFile], device: str) -> Iterator[Check]:
    """Rows alone, in chunks, beside others, as a chain and as a tree: to the last bit."""
    backend: Any = GpuBackend(_near(file(), device), Pages(128, PAGE), device=device, strict=True)
    random = np.random.default_rng(1)
    size = backend.info.vocab_size
    tokens, others = (random.integers(0, size, 300).tolist() for _ in range(2))
    slot = backend.open(tokens, 400)
    wanted = _feed(backend, slot, tokens[:230])
    mate, again = backend.open(others, 300), backend.open(others, 400)
    _feed(backend, mate, others[:40])
    rows = [_feed(backend, again, tokens[:50]), _feed(backend, again, tokens[50:51])]
    flat = np.array([*others[40:43], *tokens[51:120]])
    both = Spans([mate, again], [40, 51], [3, 69], [1, 69], flat)
    rows.append(torch.as_tensor(backend.score(both).logits)[1:].float().cpu())
    tree = [tokens[120], others[0], tokens[121], others[1], tokens[122]]
    rows.append(_feed(backend, again, tree, [-1, 0, 0, 1, 2])[[0, 2, 4]])
    backend.keep([again], [123], {again: [120, 122, 124]})
    rows += [_feed(backend, again, [token]) for token in tokens[123:140]]
    rows.append(_feed(backend, again, tokens[140:230]))
    found = torch.cat(rows)
    different = (found != wanted).any(-1)
    yield Check("strict: rows whose bits depend on how they came", float(different.sum()), 0.0)


def speculation_checks(model: str, device: str, count: int) -> Iterator[Check]:
    """Greedy texts of lookups, chains and trees, beside plain decoding."""
    random = np.random.default_rng(2)
    for strict in (True, False):
        engine = Engine.load(model, draft="ngram", device=device, strict=strict, cache_tokens=8192)
        size = engine.loop.target.info.vocab_size
        prompts = []
        for _ in range(count):
            part = random.integers(0, size, 20).tolist()
            prompts.append(part + random.integers(0, size, 10).tolist() + part)  # something to look up
        settings: dict[str, Any] = {"max_tokens": 64, "temperature": 0.0, "ignore_eos": True}
        plain = [engine.generate(prompt, width=0, **settings).token_ids for prompt in prompts]
        different = total = 0
        for options in ({"width": 4}, {"width": 8, "tree": True}):
            for prompt, wanted in zip(prompts, plain, strict=True):
                total += 1
                different += engine.generate(prompt, **options, **settings).token_ids != wanted
        engine.close()
        name = "strict: texts of speculation" if strict else "texts of speculation that are not strict"
        yield Check(f"{name} that differ from plain, of {total}", float(different), 0.0 if strict else None)


def coupled_checks(model: str, device: str, count: int) -> Iterator[Check]:
    """Sampled texts at temperature 1 under `coupled`, many at once, beside plain decoding of each: strict, so none may
    differ."""
    engine = Engine.load(model, draft="layerskip", device=device, strict=True, cache_tokens=128 * count)
    random, size = np.random.default_rng(3), engine.loop.target.info.vocab_size
    prompts = [random.integers(0, size, int(random.integers(4, 40))).tolist() for _ in range(count)]
    settings: dict[str, Any] = {"max_tokens": 48, "temperature": 1.0, "seed": 7, "accept": "coupled"}
    plain = [engine.generate(prompt, width=0, ignore_eos=True, **settings).token_ids for prompt in prompts]
    different, drafted = 0, 0
    for options in ({"width": 4}, {"width": 6, "tree": True}):
        results = engine.generate(prompts, ignore_eos=True, **options, **settings)
        different += sum(result.token_ids != wanted for result, wanted in zip(results, plain, strict=True))
        drafted += engine.statistics.drafted
    engine.close()
    name = f"strict, temperature 1, coupled: texts that differ from plain, of {2 * count}"
    yield Check(name if drafted else f"{name} (nothing was drafted)", float(different), 0.0 if drafted else -1.0)


def _near(file: ModelFile, device: str) -> ModelFile:
    return file.on(device) if isinstance(file, RandomFile) else file
