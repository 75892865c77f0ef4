"""The native backend against torch on the same file, and against itself: a row's bits depend on its own text alone,
however it came to be asked for; answers of the engine are those of plain decoding to the last token."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.backends.base import Spans
from outrider.backends.forward import run_layers
from outrider.backends.native import NativeBackend
from outrider.backends.transformer import TransformerBackend
from outrider.draft.eagle import EagleDrafter
from outrider.draft.medusa import MedusaDrafter
from outrider.draft.model import ModelDrafter
from outrider.engine.engine import Engine
from outrider.errors import BackendError, ModelFileError, NativeMissingError, OutriderError
from outrider.kv.pages import Pages
from outrider.models.gguf import GGUFFile
from outrider.models.opening import open_model
from outrider.native.library import library, why_not
from outrider.types import Result

from native_models import BY_BLOCK, BY_SUPER, Shape, Truth, Walk, all_shapes, save_model
from tiny import save_gguf, tiny
from tiny_heads import EAGLE3, save_head

pytestmark = [pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}"), pytest.mark.usefixtures("one_thread")]

Array = np.ndarray[Any, Any]
SHAPES = dict(all_shapes())
# Floats are summed in another order, that is all (3e-6 were seen).
FLOAT_BOUND = 2e-5
# Activations are rounded to int8, with one scale for 32 or 256 of them. Of normal numbers the largest of 32 is about
# 2.2 deviations (of 256: 2.9), so a step is 2.2 / 127 and a product is off by 0.5 % (0.7 %) of its size; a dozen
# products in a row come to 2 %, and to twice that where attention is sharp. A wrong minimum, scale or order of weights
# gives other rows altogether: 1.4 and more. (What a single product may be off by is in test_native_kernels.py.)
ROUNDED_BOUND = 0.06
# Keys and values are rounded: to 11 significant bits, or to 127 steps of the largest of a head.
KV_BOUNDS = {"f32": FLOAT_BOUND, "f16": 2e-3, "q8": 0.05}


@pytest.fixture(autouse=True)
def from_python(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch's layers run from Python: compiling them for every small model takes longer than running it."""
    monkeypatch.setattr("outrider.backends.transformer.compiled", lambda: run_layers)
    yield
    library().outrider_set_threads(1)


def native(path: Path, pages: Pages | int = 16, **more: Any) -> NativeBackend:
    pages = Pages(512 // pages, pages) if isinstance(pages, int) else pages
    return NativeBackend(GGUFFile(path), pages, threads=1, **more)


def with_torch(path: Path) -> TransformerBackend:
    return TransformerBackend(open_model(path), Pages(128, 4))


def deviation(ours: Array, wanted: Array) -> float:
    """Of a whole row: the length of the difference by the length of what was wanted."""
    assert ours.shape == wanted.shape
    return float(np.linalg.norm(ours.astype(np.float64) - wanted) / np.linalg.norm(wanted))


def walk(folder: Path, shape: Shape, seed: int, rounds: int, bound: float | None = None, kv_type: str = "f16") -> Walk:
    """A random walk whose rows must have the bits of a fresh pass, in pages of another size, on one thread. With a
    bound, torch must come as close as that."""
    paths = {name: save_model(folder / f"{name}.gguf", shape, seed=index) for index, name in enumerate(("m", "d"))}
    pages = Pages(800 // shape.page_size, shape.page_size)
    target, draft = native(paths["m"], pages, kv_type=kv_type), native(paths["d"], pages, kv_type=kv_type)
    other = 16 if shape.page_size == 24 else 24
    alone, second = native(paths["m"], other, kv_type=kv_type), native(paths["d"], other, kv_type=kv_type)
    truths = {"target": Truth(alone), "draft": Truth(second), "view": Truth(alone.view(1), alone)}
    references: dict[str, Truth] = {}
    if bound is not None:
        whole = with_torch(paths["m"])
        references = {"target": Truth(whole), "view": Truth(whole.view(1), whole)}
        references["draft"] = Truth(with_torch(paths["d"]))

    def check(who: str, text: Sequence[int], row: Array | None, states: Mapping[int, Array]) -> None:
        wanted, wanted_states = truths[who].after(text)
        assert row is None or np.array_equal(row, wanted), f"{who} after {text}"
        for layer, state in states.items():
            assert np.array_equal(state, wanted_states[layer]), f"{who}, layer {layer} after {text}"
        if who in references:
            wanted, wanted_states = references[who].after(text)
            assert row is None or deviation(row, wanted) < bound, f"{who} after {text}"
            for layer, state in states.items():
                assert deviation(state, wanted_states[layer]) < bound, f"{who}, layer {layer} after {text}"

    walking = Walk(target, draft, check, seed)
    walking.run(rounds)
    assert pages.usage.held == 0
    return walking


@pytest.mark.parametrize("name", SHAPES)
def test_every_family_is_what_torch_computes(name: str, tmp_path: Path) -> None:
    """Chunks, chains, trees, forks, rewinds, kept paths, swaps, prefix hits, a second model, the first layers."""
    done = walk(tmp_path, SHAPES[name], seed=1, rounds=5, bound=FLOAT_BOUND, kv_type="f32").done
    assert min(done[kind] for kind in Walk.KINDS) > 0 and done["rows of the target"] > 100, done


def quantised(kind: str, **more: Any) -> Shape:
    if kind in BY_SUPER:
        sizes = {"width": 256, "heads": 8, "kv_heads": 2, "head_dim": 32, "ffn": 256}
    else:
        sizes = {"width": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 160}
    return Shape(**{**sizes, "kinds": (kind,), "vocab": 75, **more})


@pytest.mark.parametrize("kind", ["F16", *BY_BLOCK, *BY_SUPER])
def test_every_type_is_what_torch_computes(isa: str, kind: str, tmp_path: Path) -> None:
    bound = FLOAT_BOUND if kind == "F16" else ROUNDED_BOUND
    walk(tmp_path, quantised(kind), seed=2, rounds=1, bound=bound, kv_type="f32")


@pytest.mark.parametrize("kv_type", KV_BOUNDS)
def test_every_kv_type_comes_close_to_torch(isa: str, kv_type: str, tmp_path: Path) -> None:
    walk(tmp_path, SHAPES["qwen3"], seed=5, rounds=1, bound=KV_BOUNDS[kv_type], kv_type=kv_type)


@pytest.mark.parametrize("family", ["phi3", "qwen2"])
def test_types_side_by_side(isa: str, family: str, tmp_path: Path) -> None:
    """As in files of mixed precision, also where matrices of one input differ."""
    shape = quantised("Q4_K", family=family, kinds=("F32", "F16", *BY_BLOCK, *BY_SUPER))
    walk(tmp_path, shape, seed=3, rounds=1, bound=ROUNDED_BOUND)


@pytest.mark.parametrize("kv_type", KV_BOUNDS)
@pytest.mark.parametrize("name", ["llama-odd", "mistral", "mistral-pattern", "qwen3", "phi3"])
def test_bits_depend_on_nothing_but_the_text(isa: str, name: str, kv_type: str, tmp_path: Path) -> None:
    walk(tmp_path, SHAPES[name], seed=4, rounds=3, kv_type=kv_type)


@pytest.mark.parametrize("kv_type", KV_BOUNDS)
@pytest.mark.parametrize("window", [0, 3, 100])
def test_a_tree_across_chunks_of_keys(isa: str, window: int, kv_type: str, tmp_path: Path) -> None:
    """A path of a tree that crosses an edge between chunks, with siblings between its nodes, has the bits of the chain,
    whatever the threads; so do its tokens when they are kept and fed on."""
    path = save_model(tmp_path / "m.gguf", Shape(window=window, heads=6, kv_heads=2))
    backend = native(path, Pages(40, 16), kv_type=kv_type)
    text = np.random.default_rng(0).integers(0, 101, 140).tolist()
    chain = backend.open()
    wanted = backend.score(Spans([chain], [0], [140], [140], np.array(text))).logits
    for threads in (1, 2, 3):
        library().outrider_set_threads(threads)
        slot = backend.open()
        backend.score(Spans([slot], [0], [124], [1], np.array(text[:124])))
        tokens, parents, nodes = [text[124]], [-1], [0]
        for token in text[125:134]:  # each has a sibling before it
            tokens += [(token + 1) % 101, token]
            parents += [nodes[-1], nodes[-1]]
            nodes.append(len(tokens) - 1)
        spans = Spans([slot], [124], [len(tokens)], [len(tokens)], np.array(tokens), {0: parents})
        rows = backend.score(spans).logits
        assert np.array_equal(rows[nodes], wanted[124:134])
        backend.keep([slot], [134], {slot: [124 + node for node in nodes]})
        rest = backend.score(Spans([slot], [134], [6], [6], np.array(text[134:]))).logits
        assert np.array_equal(rest, wanted[134:])
        backend.close(slot)


@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8"])
def test_a_token_that_breaks_the_model_breaks_no_row_before_it(isa: str, kv_type: str, tmp_path: Path) -> None:
    """Rows of a chain read keys and values together; a value that is not a number must stay with those that see it."""

    def change(name: str, raw: Array) -> Array:
        if name == "token_embd.weight":
            raw = raw.copy()
            raw.reshape(101, -1).view(np.float32)[50] = np.inf
        return raw

    backend = native(save_model(tmp_path / "m.gguf", Shape(), change=change), kv_type=kv_type)

    def rows(text: list[int]) -> Array:
        slot = backend.open()
        return backend.score(Spans([slot], [0], [len(text)], [len(text)], np.array(text))).logits

    text = [4, 100, 7, 9, 3, 8]
    for place in range(1, len(text)):  # which rows go together depends on the instruction set
        wanted, seen = rows(text[:place]), rows([*text[:place], 50, 9])
        assert np.isfinite(wanted).all() and not np.isfinite(seen[place]).all()
        assert np.array_equal(seen[:place], wanted)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_long_walks(isa: str, seed: int, tmp_path: Path) -> None:
    for name in SHAPES:
        walk(tmp_path, SHAPES[name], seed=seed, rounds=10)
    walk(tmp_path, quantised("Q4_K", kinds=("F16", *BY_BLOCK, *BY_SUPER)), seed=seed, rounds=10)


def test_long_texts_in_any_chunks(isa: str, tmp_path: Path) -> None:
    """Past the turns that are computed at once, and past many pages, with more rows than a tile has."""
    path = save_model(tmp_path / "m.gguf", quantised("Q4_1", window=100, slides=(False, True)))
    backend = native(path, Pages(40, 16))
    text = np.random.default_rng(0).integers(0, 75, 400).tolist()
    slot = backend.open()
    wanted = backend.score(Spans([slot], [0], [400], [400], np.array(text))).logits
    for cuts in ((1, 2, 3, 20, 21, 150), (200,), (399,)):
        backend.rewind(slot, 0)
        library().outrider_set_threads(2)
        edges = [0, *cuts, 400]
        parts = []
        for start, end in pairwise(edges):
            spans = Spans([slot], [start], [end - start], [end - start], np.array(text[start:end]))
            parts.append(backend.score(spans).logits)
        assert np.array_equal(np.concatenate(parts), wanted)


def test_spans_that_cannot_be_are_refused(tmp_path: Path) -> None:
    backend = native(save_model(tmp_path / "m.gguf", Shape()), Pages(8, 4))
    slot = backend.open()
    for message, spans in (
        ("holds 0 tokens but was fed position 3", Spans([slot], [3], [1], [1], np.array([1]))),
        ("token 101 is not in a vocabulary of 101", Spans([slot], [0], [1], [1], np.array([101]))),
        ("33 tokens in a context of 32", Spans([slot], [0], [33], [1], np.arange(33))),
        ("each must come after its parent", Spans([slot], [0], [2], [1], np.array([1, 2]), {0: [-1, 1]})),
    ):
        with pytest.raises(BackendError, match=message):
            backend.score(spans)


# --- through the engine


def ids(results: Sequence[Result]) -> list[list[int]]:
    return [result.token_ids for result in results]


PROMPTS = [[5, 9, 77, 2, 40, 8, 19, 33, 61, 4, 90], [7, 7, 3], [50], [5, 9, 77, 2, 40, 8, 19, 1], [8, 8, 8, 8, 8, 8]]
ASKED = [
    {"temperature": 0.0},
    {"temperature": 0.8, "accept": "coupled", "seed": 3, "top_p": 0.9, "repetition_penalty": 1.1},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose layers matter little, so that drafts are often right, and a draft that is nearly the same."""
    folder = tmp_path_factory.mktemp("models")
    target, draft = tiny("llama", num_hidden_layers=4), tiny("llama", num_hidden_layers=4)
    with torch.no_grad():
        for model in (target, draft):
            for layer in model.model.layers[1:]:
                layer.self_attn.o_proj.weight.mul_(0.2)
                layer.mlp.down_proj.weight.mul_(0.2)
        for weight in draft.parameters():
            weight.mul_(1.0 + 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    save_gguf(target, folder / "target.gguf", types="Q4_1")
    save_gguf(draft, folder / "draft.gguf", types="Q8_0")
    return folder


@pytest.mark.parametrize("draft", ["ngram", "suffix", "layerskip", "layerskip:2", "model", "suffix,model"])
def test_answers_are_those_of_plain_decoding(draft: str, folder: Path) -> None:
    """Chains and trees of every kind, several answers at once, prompts in chunks, pages that run short."""
    path = folder / "target.gguf"
    drafts = [folder / "draft.gguf" if one == "model" else one for one in draft.split(",")]
    settings: dict[str, Any] = {"backend": "native", "cache_tokens": 400, "threads": 2, "prefill_chunk": 5}
    plain, engine = Engine.load(path, **settings), Engine.load(path, draft=drafts, **settings)
    accepted = 0
    for sampling in ASKED:
        asked = {"max_tokens": 24, "ignore_eos": True, **sampling}
        wanted = [plain.generate(prompt, **asked).token_ids for prompt in PROMPTS]
        for shape in ({"width": 4}, {"width": 9, "tree": True}, {}):
            results = engine.generate(PROMPTS, **asked, **shape)
            assert ids(results) == wanted, f"{draft} {sampling} {shape}"
            accepted += sum(result.statistics.accepted for result in results)
    assert accepted > 20


def test_a_draft_that_runs_ahead(folder: Path) -> None:
    wanted = Engine.load(folder / "target.gguf", backend="native").generate(PROMPTS, max_tokens=30, temperature=0.0)
    with Engine.load(
        folder / "target.gguf", draft=folder / "draft.gguf", backend="native", width=4, run_ahead="always"
    ) as engine:
        assert ids(engine.generate(PROMPTS, max_tokens=30, temperature=0.0)) == ids(wanted)


def test_a_draft_of_its_own_pages_and_of_another_backend(folder: Path) -> None:
    """Who proposes does not matter."""
    wanted = Engine.load(native(folder / "target.gguf")).generate(PROMPTS, max_tokens=20, temperature=0.0)
    for draft in (native(folder / "draft.gguf"), with_torch(folder / "draft.gguf")):
        engine = Engine.load(native(folder / "target.gguf"), draft=ModelDrafter(draft), width=4)
        assert ids(engine.generate(PROMPTS, max_tokens=20, temperature=0.0)) == ids(wanted)


# --- heads


HEADS = ("medusa_second", "vllm_reduced", "eagle", "eagle_biased", *EAGLE3)


@pytest.mark.parametrize("layout", HEADS)
def test_heads_sit_on_native_models(layout: str, tmp_path: Path) -> None:
    """Nearly as many right guesses as on torch (weights have four bits), and the answers of plain decoding."""
    model = tiny("llama", num_hidden_layers=7)
    path = save_gguf(model, tmp_path / "target.gguf")
    save_head(tmp_path / "head", layout, model)
    kind = EagleDrafter if layout.startswith("eagle") else MedusaDrafter
    target, reference = native(path, 4, kv_type="f32"), with_torch(path)
    engine = Engine.load(target, draft=kind.load(tmp_path / "head", target))
    theirs = Engine.load(reference, draft=kind.load(tmp_path / "head", reference))
    plain = Engine.load(native(path, kv_type="f32"))
    for sampling, shape in zip(ASKED, ({"width": 9, "tree": True}, {"width": 3}), strict=True):
        asked = {"max_tokens": 12, "ignore_eos": True, **sampling}
        results, others = engine.generate(PROMPTS, **asked, **shape), theirs.generate(PROMPTS, **asked, **shape)
        assert ids(results) == [plain.generate(prompt, **asked).token_ids for prompt in PROMPTS]
        drafted, accepted = (
            [sum(getattr(one.statistics, name) for one in answers) for answers in (results, others)]
            for name in ("drafted", "accepted")
        )
        assert drafted[0] == pytest.approx(drafted[1], rel=0.1) and drafted[1] > 0
        assert accepted[0] == pytest.approx(accepted[1], abs=2)


def test_heads_read_quantised_matrices(folder: Path) -> None:
    """Embeddings are the file's own values, logits those of a pass."""
    target, reference = native(folder / "target.gguf"), with_torch(folder / "target.gguf")
    tokens = torch.tensor([3, 100, 0, 3])
    assert torch.equal(target.embed(tokens), reference.embed(tokens))
    slot, last = target.open(), target.info.num_hidden - 1
    scores = target.score(Spans([slot], [0], [4], [4], tokens.numpy()), hidden=[last])
    assert np.array_equal(target.unembed(torch.from_numpy(scores.hidden[last])).numpy(), scores.logits)


# --- files that are not as they should be


def test_engines_of_one_process_share_the_weights_of_a_file(tmp_path: Path) -> None:
    path = save_model(tmp_path / "m.gguf", Shape())
    first, second = native(path), native(path)
    assert first.weights is second.weights and first.store is not second.store
    text = [4, 100, 7, 7]
    rows = Truth(first).after(text)[0]
    assert np.array_equal(Truth(second).after(text)[0], rows)
    save_model(path, Shape(kinds=("F16",)))
    other = native(path)
    assert other.weights is not first.weights, "the file is another one now"
    assert not np.array_equal(Truth(other).after(text)[0], rows)
    assert np.array_equal(Truth(first).after(text)[0], rows)
    gone = weakref.ref(first.weights)
    del first, second
    gc.collect()
    assert gone() is None, "nobody needs them any more"


@pytest.mark.parametrize("kind", ["BF16", "IQ4_NL"])
def test_what_has_no_kernel_is_widened_and_said_once(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_model(tmp_path / "odd.gguf", Shape(kinds=(kind,)))
    with caplog.at_level(logging.WARNING, logger="outrider"):
        backend = native(path)
    assert [record.getMessage() for record in caplog.records] == [
        f"odd: 16 tensors of type {kind} are widened to half precision"
    ]
    text = [4, 100, 7, 7]
    wanted = Truth(with_torch(path)).after(text)[0]
    assert deviation(Truth(backend).after(text)[0], wanted) < 2e-3, "eight bits more than BF16 has"


def test_what_is_beyond_half_precision_is_refused(tmp_path: Path) -> None:
    def change(name: str, raw: Array) -> Array:
        if name == "blk.1.ffn_down.weight":
            raw = raw.copy()
            raw[3, 10:12] = (0, 0x48)  # 131072 as BF16
        return raw

    path = save_model(tmp_path / "m.gguf", Shape(kinds=("BF16",)), change=change)
    with pytest.raises(ModelFileError, match=r"blk\.1\.ffn_down\.weight has values that half precision cannot hold"):
        native(path)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *BY_BLOCK, *BY_SUPER])
@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "blk.1.ffn_up.weight", "output.weight", "token_embd.weight"])
def test_a_damaged_file_is_never_silent(isa: str, kind: str, name: str, tmp_path: Path) -> None:
    """One infinite scale, or an infinite number. A scale is seen while loading."""
    if kind in ("F32", "F16") and name == "output.weight":
        pytest.skip("one of the two infinities is a token that is impossible, and a model may say so")

    def change(tensor: str, raw: Array) -> Array:
        if tensor == name:
            raw = raw.copy()
            at = {"Q6_K": 208, "F32": 2}.get(kind, 0)
            raw[5].view(np.uint8)[at : at + 2] = (0x80, 0x7F) if kind in ("F32", "BF16") else (0, 0x7C)
        return raw

    path = save_model(tmp_path / "m.gguf", quantised(kind), change=change)
    with pytest.raises(OutriderError, match=r"NaN logits|without finite logits|half precision|no number"):
        Engine.load(native(path)).generate([1, 5, 5, 2], max_tokens=4, temperature=0.0)


def test_another_library_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_NATIVE_LIBRARY", str(tmp_path / "checked.so"))
    with pytest.raises(NativeMissingError, match=r"cannot be loaded: .*checked\.so"):
        library.__wrapped__()


def test_a_forked_process_has_threads_of_its_own(tmp_path: Path) -> None:
    """Threads do not follow into a fork: what waits for them would wait for ever."""
    path = save_model(tmp_path / "m.gguf", Shape())
    code = (
        "import os, sys, time\n"
        "from outrider import Engine\n"
        f"engine = Engine.load({str(path)!r}, backend='native', threads=2)\n"
        "ask = lambda: engine.generate([1, 5, 5, 2], max_tokens=3, temperature=0.0).token_ids\n"
        "wanted = ask()\n"
        "time.sleep(0.05)\n"  # the threads sleep
        "child = os.fork()\n"
        "if child == 0:\n"
        "    answers = [ask() for _ in range(3) if time.sleep(0.02) is None]\n"
        "    os._exit(0 if answers == [wanted] * 3 else 1)\n"
        "code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "sys.exit(code or ask() != wanted)\n"
    )
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=60).returncode == 0
