"""The GPU's backend without a GPU: its kernels in Triton's interpreter, where that is installed, and their torch twins.

On a machine with a GPU `outrider bench gpu` checks the same kernels for real.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from outrider.backends.base import Spans
from outrider.backends.cuda import twins
from outrider.backends.cuda.backend import GpuBackend
from outrider.backends.cuda.layout import CHAIN, MIN_SPLIT, Shape, arrange, fill, size_of, split_sizes, view
from outrider.backends.cuda.sampling import DeviceSampling, Verdict
from outrider.backends.transformer import TransformerBackend
from outrider.cli.main import app
from outrider.draft.layerskip import LayerSkipDrafter
from outrider.draft.ngram import NgramDrafter
from outrider.engine.engine import Engine
from outrider.errors import ConfigError, ModelSourceError, RequestError
from outrider.kv.pages import Pages
from outrider.models.random_file import SHAPES, RandomFile, build_shape
from outrider.sampling.noise import Noise, Stream, seed_words
from outrider.types import Request

PAGE = 4


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    pytest.importorskip("triton")
    from outrider.backends.cuda import kernels

    return kernels


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(ours: torch.Tensor, wanted: torch.Tensor) -> bool:
    allowed = 1e-5 if wanted.dtype == torch.float32 else 1e-2
    return bool((ours.float() - wanted.float()).norm() <= allowed * wanted.float().norm())


@pytest.mark.parametrize("rows", [1, 2, 9, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("extra", ["", "norm", "bias", "added", "norm bias"])
def test_product(kernels: ModuleType, rows: int, dtype: torch.dtype, extra: str) -> None:
    x, w = noise(rows, 96, dtype=dtype), noise(70, 96, seed=1, dtype=dtype)
    given: dict[str, Any] = {}
    if "norm" in extra:
        given["norm"] = 0.5
    if "bias" in extra:
        given["bias"] = noise(70, seed=2, dtype=dtype)
    if "added" in extra:
        given["added"] = noise(rows, 70, seed=3, dtype=dtype)
    ours, wanted = torch.full((rows, 70), torch.nan, dtype=dtype), torch.empty(rows, 70, dtype=dtype)
    kernels.product(x, w, ours, **given)
    twins.product(x, w, wanted, **given)
    assert close(ours, wanted)


@pytest.mark.parametrize("rows", [1, 7, 20, 40])
def test_gated_product(kernels: ModuleType, rows: int) -> None:
    x, w = noise(rows, 64), noise(2 * 70, 64, seed=1)
    ours, wanted = torch.full((rows, 70), torch.nan), torch.empty(rows, 70)
    kernels.gated_product(x, w, ours, norm=0.5)
    twins.gated_product(x, w, wanted, norm=0.5)
    assert close(ours, wanted)


@pytest.mark.parametrize("weighted", [False, True])
def test_normed(kernels: ModuleType, weighted: bool) -> None:
    x, weight = noise(3, 70), noise(70, seed=1) if weighted else None
    ours, wanted = torch.full((3, 70), torch.nan), torch.empty(3, 70)
    kernels.normed(x, ours, norm=0.5, weight=weight)
    twins.normed(x, wanted, norm=0.5, weight=weight)
    assert close(ours, wanted)


@pytest.mark.parametrize("turning", [12, 16])
@pytest.mark.parametrize("has_norm", [False, True])
def test_turn_and_store(kernels: ModuleType, turning: int, has_norm: bool) -> None:
    heads, rows = (4, 2, 32), 3
    turns = torch.view_as_real(torch.polar(torch.ones(rows, turning), noise(rows, turning, seed=2)))
    norm = noise(6, 32, seed=3) if has_norm else None
    places = torch.tensor([5, 0, 9], dtype=torch.int32)
    sides = []
    for side in (kernels, twins):
        qkv, held = noise(rows, 8 * 32, seed=1), torch.zeros(10, 4 * 32)
        side.turn_and_store(qkv, held, turns.contiguous(), places, heads, head_norm=norm, floor=0.3)
        sides.append((qkv, held))
    assert close(sides[0][0], sides[1][0]) and close(sides[0][1], sides[1][1])


def random_pass(seed: int, tree: str, tile: int, num_spans: int) -> tuple[Any, int]:
    """Spans of all lengths on pages in any order, some of them trees."""
    random = np.random.default_rng(seed)
    starts = random.integers(0, 3 * MIN_SPLIT, num_spans).tolist()
    counts = random.integers(1, 9, num_spans).tolist()
    free = random.permutation(num_spans * 200).tolist()
    pages = [
        [free.pop() for _ in range(-(-(start + count) // PAGE) + 1)]
        for start, count in zip(starts, counts, strict=True)
    ]
    parents: dict[int, list[int]] = {}
    for index in range(0, num_spans, 2) if tree else ():
        earlier = int(random.integers(0, min(4, starts[index]) + 1))  # nodes that were fed before
        parents[index] = [int(random.integers(-1, node)) for node in range(earlier + counts[index])]
    rows = arrange(starts, counts, pages, PAGE, parents, tile=tile, max_splits=32, by_path=tree == "paths")
    return rows, num_spans * 200 * PAGE


def on_device(rows: Any, places: int, tile: int, filled: int = 3) -> Any:
    shape = Shape(sum(rows.fields["counts"]) + filled, rows.num_groups + filled, tile, rows.tree)
    numbers = torch.full((size_of(shape) + len(rows.table),), -7, dtype=torch.int32)
    used = fill(rows, shape, places, numbers.numpy())
    assert used == len(numbers)
    return view(numbers, shape, rows.num_splits)


@pytest.mark.parametrize("tree", ["", "masks", "paths"])
@pytest.mark.parametrize("window", [40, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tile", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_attend(kernels: ModuleType, tree: str, window: int | None, tile: int) -> None:
    if tree == "masks" and window is not None:
        pytest.skip("a window goes by position, which masks do not know: such trees are looked at by path")
    heads = (6, 2, 24)
    rows, places = random_pass(7, tree, tile, 4)
    layout = on_device(rows, places, tile)
    count = layout.shape.rows
    qkv, held = noise(count, 10 * 24), noise(places + 1, 4 * 24, seed=1)
    outs = []
    for side in (kernels, twins):
        slots = count * 6 * layout.num_splits
        scratch = (
            torch.full((slots * 24,), torch.nan),
            torch.full((slots,), torch.nan),
            torch.full((slots,), torch.nan),
        )
        out = torch.zeros(count, 6 * 24)
        side.attend(qkv, held, out, layout, heads, page_size=PAGE, window=window, scratch=scratch)
        outs.append(out)
    assert close(*outs) and outs[0][-3:].eq(0).all(), "rows that fill a pass up are in no group"


@pytest.mark.parametrize("vocab", [37, 5000])
def test_choose(kernels: ModuleType, vocab: int) -> None:
    """The reference's tokens: greedy, sampled, with a floor; and who cannot choose."""
    from outrider.backends.cuda.choosing import choose

    rows = 12
    logits = (noise(rows, vocab + 3) * 3)[:, :vocab]  # a view, as padding columns leave it
    logits[9, 5], logits[10] = torch.nan, -torch.inf
    logits[11, 7] = torch.inf
    words = np.asarray([seed_words(row, 0) for row in range(rows)], dtype=np.int32)
    positions = np.arange(rows, dtype=np.int32) * 1000
    temperature, floor = torch.full((rows,), 0.7), torch.full((rows,), -torch.inf)
    temperature[:3], floor[6:9] = 0.0, -1.0
    asked = np.column_stack([words, 4 * positions + Stream.TARGET]).astype(np.int32)
    ours = choose(logits, torch.from_numpy(asked), torch.stack([temperature, floor], dim=1)).tokens.numpy()
    shaped = (logits - logits.max(-1, keepdim=True).values) / 0.7
    shaped = torch.where(shaped < floor[:, None], -torch.inf, shaped)
    wanted = Noise(np).draw(shaped.numpy()[:9], words.T.copy()[:, :9], positions[:9], Stream.TARGET)
    wanted[:3] = logits[:3].argmax(-1).numpy()
    assert ours.tolist() == [*wanted.tolist(), -1, -1, -1]


def test_splits_depend_on_the_row_alone() -> None:
    sizes = split_sizes(np.array([1, MIN_SPLIT * 32, MIN_SPLIT * 32 + 1, 32_000, 131_072]), 32)
    assert sizes.tolist() == [128, 128, 256, 1024, 4096]
    edge = MIN_SPLIT * 32  # the row that sees one key more has larger splits: it is in a group of its own
    rows = arrange([edge - 3], [6], [list(range(2000))], PAGE, {}, tile=16, max_splits=32, by_path=False)
    assert rows.fields["counts"].tolist() == [3, 3] and rows.fields["splits"].tolist() == [128, 256]
    shape = Shape(rows=8, groups=1, tile=16, tree="")
    with pytest.raises(AssertionError, match="2 firsts in a pass that has room for 1"):
        fill(rows, shape, 0, np.zeros(size_of(shape) + 2000, dtype=np.int32))


def test_even_chains_are_arranged_like_any_others() -> None:
    starts, pages = [5, 0, 70], [list(range(40 * number, 40 * number + 40)) for number in range(3)]
    settings: dict[str, Any] = {"tile": 8, "max_splits": 32, "by_path": False, "ahead": 3}
    quickly = arrange(starts, [4] * 3, pages, PAGE, {}, **settings)
    slowly = arrange(starts, [4] * 3, pages, PAGE, {}, apart=[False] * 3, **settings)
    assert quickly[2:] == slowly[2:] and quickly.table.tolist() == slowly.table.tolist()
    assert {name: values.tolist() for name, values in quickly.fields.items()} == {
        name: values.tolist() for name, values in slowly.fields.items()
    }


def test_rows_of_spans_apart_are_in_no_group() -> None:
    rows = arrange(
        [0, 3, 2],
        [2, 3, 1],
        [[0], [1, 2], [3]],
        PAGE,
        {},
        tile=2,
        max_splits=32,
        by_path=False,
        apart=[False, True, False],
    )
    assert rows.fields["groups"].tolist() == [0, 0, -1, -1, -1, 1]
    assert rows.fields["seats"].tolist() == [0, 2] and rows.num_seated == 3
    assert rows.fields["roots"].tolist() == [CHAIN, CHAIN]
    assert rows.fields["places"].tolist() == [0, 1, 7, 8, 9, 14]


@pytest.fixture(scope="module")
def model() -> RandomFile:
    SHAPES["tiny"] = build_shape("llama", 2, 32, (4, 2, 8), 48, 60, context=512, tied=True)
    return RandomFile("tiny")


class Counting:
    """The twins, and how many passes they made."""

    def __init__(self) -> None:
        self.passes = 0

    def __getattr__(self, name: str) -> Any:
        self.passes += name == "normed"  # once a pass, before the output
        return getattr(twins, name)


def gpu_engine(model: RandomFile, counting: Counting) -> Engine:
    """On a CPU, but chosen and queued as on a GPU."""
    backend = GpuBackend(model, Pages(64, PAGE), device="cpu", dtype=torch.float32, kernels=counting)
    backend.ops = DeviceSampling(torch.device("cpu"))
    backend.ops.foresee = backend.foresee
    backend.info = replace(backend.info, prelaunch=True)
    return Engine(backend, [NgramDrafter()], threaded=False)


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.9, "seed": 3, "accept": "coupled"}, pytest.param({"temperature": 0.0}, marks=pytest.mark.slow)],
)
def test_the_next_pass_is_queued_before_the_host_looks(
    kernels: ModuleType, model: RandomFile, settings: dict[str, Any]
) -> None:
    """The same text, without a pass too many; and where the guess was wrong nobody notices."""
    counting = Counting()
    engine, foreseen = gpu_engine(model, counting), []
    target: Any = engine.loop.target
    run = target.foresee
    target.ops.foresee = lambda verdict: (run(verdict), foreseen.append(target._queued is not None))
    plain = Engine(TransformerBackend(model, Pages(64, PAGE)), [])
    prompts = [[1, 2, 3, 4], [7, 8, 9] * 5]
    wanted = [plain.generate(prompt, max_tokens=40, **settings).token_ids for prompt in prompts]
    before = counting.passes
    assert engine.generate(prompts[0], width=0, max_tokens=40, **settings).token_ids == wanted[0]
    assert counting.passes - before == 40 and sum(foreseen) > 20, "one for each token, most of them queued ahead"
    stop = wanted[0][9]
    end = wanted[0].index(stop) + 1
    first = engine.generate(prompts[0], width=0, max_tokens=40, stop_ids=[stop], **settings)
    assert first.token_ids == wanted[0][:end], "the pass behind a stop is for nothing"
    stream = engine.stream(prompts[0], width=0, max_tokens=40, **settings)
    tokens = list(next(stream).tokens)
    together = engine.generate(prompts[1], max_tokens=40, width=3, **settings)  # joins in the middle, and drafts
    assert together.token_ids == wanted[1]
    assert tokens + [token for event in stream for token in event.tokens] == wanted[0]


def test_a_batch_is_queued_whoever_comes_and_goes(kernels: ModuleType, model: RandomFile) -> None:
    """Answers end one by one, and somebody joins: what was computed ahead is used, and no text changes."""
    counting = Counting()
    engine = gpu_engine(model, counting)
    plain = Engine(TransformerBackend(model, Pages(64, PAGE)), [])
    prompts = [[1, 2, 3, 4], [7, 8, 9] * 3, [5] * 6]
    given: dict[str, Any] = {"temperature": 0.8, "seed": 2, "accept": "coupled", "width": 0, "ignore_eos": True}
    lengths = [30, 9, 17]
    requests = [
        Request.of(prompt, {"max_tokens": length, **given}) for prompt, length in zip(prompts, lengths, strict=True)
    ]
    wanted = [plain.generate(request).token_ids for request in requests]
    before = counting.passes
    assert [result.token_ids for result in engine.generate(requests)] == wanted
    assert counting.passes - before == 30, "one for each token of the longest: nothing was computed twice"
    streams = engine.open_streams(requests[:2])
    for _ in range(5):
        engine.step()
    before = counting.passes
    (late,) = engine.open_streams(requests[2:])
    answers = [[token for event in stream for token in event.tokens] for stream in (*streams, late)]
    assert answers == wanted
    # one of the 25 passes to come is queued already; who joins is read in a pass of its own, beside that
    assert counting.passes - before == 24 + 1


@pytest.mark.parametrize("options", [{"width": 3}, {"width": 6, "tree": True}])
@pytest.mark.parametrize("method", ["ngram", "layerskip"])
def test_speculation_says_what_plain_decoding_says(model: RandomFile, method: str, options: dict[str, Any]) -> None:
    """Lookups, and the model's own first layers, on pages and programs of the GPU's backend."""
    backend = GpuBackend(model, Pages(64, PAGE), device="cpu", dtype=torch.float32)
    drafter = NgramDrafter() if method == "ngram" else LayerSkipDrafter(backend.view(1))
    engine = Engine(backend, [drafter])
    for prompt in ([1, 2, 3] * 6, [9, 8, 7, 6, 5]):
        settings = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
        wanted = engine.generate(prompt, method="none", **settings).token_ids
        assert engine.generate(prompt, method=method, **options, **settings).token_ids == wanted


def test_random_weights_can_be_named_wherever_a_model_can(model: RandomFile) -> None:
    engine = Engine.load("random:tiny", cache_tokens=200)
    again = Engine.load("random:tiny", cache_tokens=200)
    first = engine.generate([1, 2, 3], max_tokens=8, temperature=0.0)
    assert first.token_ids == again.generate([1, 2, 3], max_tokens=8, temperature=0.0).token_ids
    with pytest.raises(ModelSourceError, match=r"no shape 'llama-9'; choose one of llama-3\.1-8b"):
        Engine.load("random:llama-9")
    with pytest.raises(RequestError, match="token ids"):
        engine.generate("text needs a tokenizer")


def test_what_a_gpu_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="dtype must be one of auto, bfloat16, float16, float32"):
        Engine.load("random:smollm2-135m", dtype="int3")
    with pytest.raises(ConfigError, match="no quick float16 on a CPU"):
        Engine.load("random:smollm2-135m", dtype="float16", device="cpu")
    answer = CliRunner().invoke(app, ["bench", "gpu"], catch_exceptions=True)
    if not torch.cuda.is_available():
        assert isinstance(answer.exception, ConfigError) and "no GPU that torch can use" in str(answer.exception)


def test_a_pass_that_was_expected_is_forgotten_when_another_comes(
    model: RandomFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its places may be somebody else's by then."""
    monkeypatch.setattr("outrider.backends.cuda.passes.LONG", 4)
    monkeypatch.setattr("outrider.backends.cuda.passes.FAR", 8)
    counting = Counting()
    backend = GpuBackend(model, Pages(64, PAGE), device="cpu", dtype=torch.float32, kernels=counting)
    slot, other = backend.open((), 40), backend.open((), 40)
    assert slot is not None and other is not None

    def decode(goes_on: bool) -> None:
        at = backend.length(slot)
        backend.score(Spans([slot], [at], [1], [1], np.array([5]), goes_on=[0] if goes_on else []))

    chosen = Verdict(torch.tensor([3], dtype=torch.int32))
    decode(goes_on=True)
    backend.foresee(chosen)
    assert backend._queued is not None and backend._queued.verdict is chosen, "it goes on"
    decode(goes_on=False)
    backend.foresee(chosen)
    assert backend._queued is None, "it does not"
    decode(goes_on=True)
    backend.score(Spans([other], [0], [9], [1], np.arange(9)))
    backend.foresee(chosen)
    assert backend._queued is None, "a prompt was read since"
    decode(goes_on=True)
    fork = backend.fork(slot)
    decode(goes_on=True)
    assert backend._expected and fork is not None, "after a fork it writes into a page of its own"


def test_heads_read_more_rows_than_a_strict_pass_has(kernels: ModuleType, model: RandomFile) -> None:
    strict = GpuBackend(model, Pages(8, PAGE), device="cpu", dtype=torch.float32, kernels=kernels, strict=True)
    hidden = noise(40, 32)[:, ::2].repeat(1, 2)[:20]
    wanted = hidden @ strict.weights.output
    assert close(strict.unembed(hidden), wanted)


def test_a_prompt_a_token_and_a_tree_in_the_interpreter(kernels: ModuleType, model: RandomFile) -> None:
    """Whole passes of the kernels beside whole passes of their twins; every family so in `make proofs`."""
    rows = []
    for how in (kernels, twins):
        backend = GpuBackend(model, Pages(16, PAGE), device="cpu", dtype=torch.float32, kernels=how)
        slot = backend.open((), 40)
        assert slot is not None
        fed = [([1, 2, 3, 4, 5], None), ([6], None), ([7, 8, 9], {0: [-1, 0, 0]})]
        for tokens, parents in fed:
            at, count = backend.length(slot), len(tokens)
            scores = backend.score(Spans([slot], [at], [count], [count], np.array(tokens), parents or {}))
            rows.append(torch.as_tensor(scores.logits))
    assert close(torch.cat(rows[:3]), torch.cat(rows[3:]))
