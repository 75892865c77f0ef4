"""The torch backend against transformers, family by family, from GGUF and from safetensors: the same logits however
the tokens come, whatever shares the pass, and after every way a cache can be changed.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.backends.base import Spans
from outrider.backends.cuda import forward
from outrider.backends.cuda.backend import GpuBackend
from outrider.backends.forward import run_layers
from outrider.backends.transformer import TransformerBackend
from outrider.engine.engine import Engine
from outrider.errors import BackendError
from outrider.kv.pages import Pages
from outrider.models.opening import open_model
from outrider.types import Slot

from conftest import drafter_of
from tiny import save_folder, save_gguf, tiny

FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen3", "phi3")
VOCAB = 101


@cache
def reference(family: str) -> Any:
    return tiny(family).eval()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        save_folder(reference(family), folder / family)
        save_gguf(reference(family), folder / f"{family}.gguf")
    return folder


INTERPRETED = [pytest.param(f"{family}@triton", marks=pytest.mark.slow) for family in FAMILIES]


@pytest.fixture(params=[f"{family}{kind}" for family in FAMILIES for kind in ("", ".gguf", "@twins")] + INTERPRETED)
def pair(request: pytest.FixtureRequest, files: Path) -> tuple[TransformerBackend, Any]:
    """A backend and what it must compute. @: the GPU's, with its kernels' twins, or the kernels interpreted."""
    model, _, kernels = request.param.partition("@")
    return load(files / model, kernels=kernels), reference(model.removesuffix(".gguf"))


def load(path: Path, num_pages: int = 64, page_size: int = 4, kernels: str = "", strict: bool = False) -> Any:
    file, pages = open_model(path), Pages(num_pages, page_size)
    if not kernels:
        return TransformerBackend(file, pages, strict=strict)
    if kernels == "triton":
        pytest.importorskip("triton")
    how = importlib.import_module(f"outrider.backends.cuda.{'kernels' if kernels == 'triton' else kernels}")
    return GpuBackend(file, pages, device="cpu", dtype=torch.float32, kernels=how, strict=strict)


def truth(model: Any, tokens: Sequence[int]) -> np.ndarray:
    """Rows of a whole text at once, as transformers computes them. [tokens, V]"""
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)])).logits[0].numpy()


def feed(backend: TransformerBackend, slot: Slot, tokens: Sequence[int], rows: int | None = None, **more: Any) -> Any:
    start, count = backend.length(slot), len(tokens)
    spans = Spans([slot], [start], [count], [count if rows is None else rows], np.array(tokens), **more)
    return backend.score(spans).logits


def error(ours: np.ndarray, wanted: np.ndarray) -> float:
    assert ours.shape == wanted.shape
    return float(np.abs(ours - wanted).max() / np.abs(wanted).max())


def text(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def opened(backend: TransformerBackend, *arguments: Any) -> Slot:
    slot = backend.open(*arguments)
    assert slot is not None
    return slot


def test_a_whole_prompt(pair: tuple[TransformerBackend, Any]) -> None:
    backend, model = pair
    tokens = text(100)
    assert error(feed(backend, opened(backend), tokens), truth(model, tokens)) < 1e-4


def test_in_chunks_and_one_by_one(pair: tuple[TransformerBackend, Any]) -> None:
    backend, model = pair
    tokens = text(80)
    slot = opened(backend)
    parts = [tokens[:7], tokens[7:8], tokens[8:75], *[[token] for token in tokens[75:]]]
    rows = np.concatenate([feed(backend, slot, part) for part in parts])
    assert error(rows, truth(model, tokens)) < 1e-4


def test_only_wanted_rows_and_hidden_states(pair: tuple[TransformerBackend, Any]) -> None:
    backend, model = pair
    tokens = text(20)
    slot, layers = opened(backend), backend.info.num_hidden
    scores = backend.score(Spans([slot], [0], [20], [3], np.array(tokens)), hidden=range(layers))
    assert error(scores.logits, truth(model, tokens)[-3:]) < 1e-4
    with torch.inference_mode():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        last = model.model.norm(torch.as_tensor(scores.hidden[layers - 2]))
    for layer in range(layers - 2):
        assert error(scores.hidden[layer], states[layer][0].numpy()) < 1e-4
    assert error(last.numpy(), states[-1][0].numpy()) < 1e-4
    assert error(scores.hidden[layers - 1], states[-1][0].numpy()) < 1e-4, "the last is after the output norm"


def test_after_rewind(pair: tuple[TransformerBackend, Any]) -> None:
    backend, model = pair
    slot = opened(backend)
    feed(backend, slot, text(30))
    backend.rewind(slot, 13)
    tokens = text(30)[:13] + text(9, seed=1)
    assert error(feed(backend, slot, tokens[13:]), truth(model, tokens)[13:]) < 1e-4


def test_after_fork_both_go_their_own_ways(pair: tuple[TransformerBackend, Any]) -> None:
    backend, model = pair
    slot, common = opened(backend), text(18)
    feed(backend, slot, common)
    other = backend.fork(slot)
    assert other is not None
    ours, theirs = common + text(5, seed=1), common + text(7, seed=2)
    assert error(feed(backend, slot, ours[18:]), truth(model, ours)[18:]) < 1e-4
    assert error(feed(backend, other, theirs[18:]), truth(model, theirs)[18:]) < 1e-4
    backend.close(slot)
    assert error(feed(backend, other, [5]), truth(model, [*theirs, 5])[-1:]) < 1e-4
    backend.close(other)
    backend.pages.check()


def test_after_a_prefix_hit(pair: tuple[TransformerBackend, Any]) -> None:
    backend, model = pair
    tokens = text(30)
    slot = opened(backend)
    feed(backend, slot, tokens)
    backend.publish(slot, tokens)
    backend.close(slot)
    again = opened(backend, tokens, 40)
    assert backend.length(again) == 28
    assert error(feed(backend, again, tokens[28:]), truth(model, tokens)[28:]) < 1e-4
    branch = tokens[:17] + text(6, seed=3)
    third = opened(backend, branch, 40)
    assert backend.length(third) == 16
    assert error(feed(backend, third, branch[16:]), truth(model, branch)[16:]) < 1e-4


TREE = [-1, 0, 0, 1, 3, 2, 2, 4]


def paths_of(parents: Sequence[int]) -> list[list[int]]:
    """For every node, the nodes from the root to it."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    return paths


def test_a_tree_is_its_unrolled_paths(pair: tuple[TransformerBackend, Any]) -> None:
    backend, model = pair
    slot, before, nodes = opened(backend), text(13), text(len(TREE), seed=4)
    feed(backend, slot, before)
    rows = feed(backend, slot, nodes, parents={0: TREE})
    for node, path in enumerate(paths_of(TREE)):
        wanted = truth(model, before + [nodes[one] for one in path])[-1]
        assert error(rows[node], wanted) < 1e-4, f"node {node}"
    backend.rewind(slot, 13)
    levels = [feed(backend, slot, nodes[:3], parents={0: TREE[:3]})]
    levels += [feed(backend, slot, nodes[at : at + 1], parents={0: TREE[: at + 1]}) for at in range(3, 5)]
    levels += [feed(backend, slot, nodes[5:], parents={0: TREE})]
    assert error(np.concatenate(levels), rows) < 1e-4, "fed in several passes"
    path = paths_of(TREE)[7]  # 0 1 3 4 7
    backend.keep([slot], [13 + len(path)], {slot: [13 + node for node in path]})
    kept = before + [nodes[one] for one in path]
    assert backend.length(slot) == len(kept)
    assert error(feed(backend, slot, [3, 4]), truth(model, [*kept, 3, 4])[-2:]) < 1e-4


def test_a_mixed_batch(pair: tuple[TransformerBackend, Any]) -> None:
    """A long prompt chunk, decodes of several lengths, chains and trees, in one pass and in any order."""
    backend, model = pair
    texts = [text(length, seed=length) for length in (40, 3, 11, 22, 9, 30)]
    fed = [70, 1, 1, 5, len(TREE), 5]
    slots = [opened(backend) for _ in texts]
    for slot, tokens in zip(slots, texts, strict=True):
        feed(backend, slot, tokens, rows=0)
    more = [text(count, seed=90 + count + index) for index, count in enumerate(fed)]
    rows = [1, 1, 1, 5, len(TREE), 3]
    scores = backend.score(
        Spans(slots, [len(t) for t in texts], fed, rows, np.concatenate(more), parents={4: TREE}), hidden=[1]
    )
    assert scores.counts == rows
    ends = np.cumsum(rows)
    hidden = np.split(scores.hidden[1], np.cumsum(fed)[:-1])
    for index, (tokens, new) in enumerate(zip(texts, more, strict=True)):
        got = scores.logits[ends[index] - rows[index] : ends[index]]
        paths = paths_of(TREE) if index == 4 else [list(range(node + 1)) for node in range(len(new))]
        wanted = [truth(model, tokens + [new[one] for one in path])[-1] for path in paths[-rows[index] :]]
        assert error(got, np.stack(wanted)) < 1e-4, f"span {index}"
        with torch.inference_mode():
            whole = tokens + [new[one] for one in paths[-1]]
            state = model(torch.tensor([whole]), output_hidden_states=True).hidden_states[1][0, -1].numpy()
        assert error(hidden[index][-1], state) < 1e-4, f"span {index}"


def test_a_short_and_a_long_sequence_are_not_padded_to_each_other(files: Path) -> None:
    """Decodes whose lengths differ much go into blocks of their own; the rows are the same."""
    backend, model = load(files / "mistral", num_pages=256), reference("mistral")
    texts = [text(length, seed=length) for length in (200, 3, 190, 10)]
    slots = [opened(backend) for _ in texts]
    for slot, tokens in zip(slots, texts, strict=True):
        feed(backend, slot, tokens, rows=0)
    spans = Spans(slots, [len(tokens) for tokens in texts], [1] * 4, [1] * 4, np.array([7, 8, 9, 10]))
    rows = backend.score(spans).logits
    for row, tokens, token in zip(rows, texts, (7, 8, 9, 10), strict=True):
        assert error(row, truth(model, [*tokens, token])[-1]) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_without_torchscript_the_same_function_runs_from_python(files: Path, family: str) -> None:
    backend, model = load(files / family), reference(family)
    assert isinstance(backend._run_layers, torch.jit.ScriptFunction), "TorchScript took the layers"
    backend._run_layers = run_layers
    tokens = text(30)
    assert error(feed(backend, opened(backend), tokens), truth(model, tokens)) < 1e-4


@pytest.mark.parametrize(("far", "ways"), [(0, {True, False}), (8192, set())], ids=["torch", "graph"])
@pytest.mark.parametrize("family", FAMILIES)
def test_long_stretches_on_a_gpu_are_attended_to_by_torch_where_they_are_far_on(
    files: Path, family: str, far: int, ways: set[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """New prompts, prompts with a beginning that is known, and decodes beside them, in one pass."""
    monkeypatch.setattr("outrider.backends.cuda.passes.LONG", 6)
    monkeypatch.setattr("outrider.backends.cuda.passes.FAR", far)
    attend, by_torch = forward.attend_long, set[bool]()  # whether there was something before it

    def attend_long(qkv: Any, held: Any, out: Any, long: Any, *more: Any) -> None:
        by_torch.add(long.places is not None)
        attend(qkv, held, out, long, *more)

    monkeypatch.setattr(forward, "attend_long", attend_long)
    backend, model = load(files / family, kernels="twins"), reference(family)
    texts = [text(count, seed=count) for count in (20, 33, 12, 25)]
    slots = [opened(backend) for _ in texts]
    known = [0, 9, 11, 0]
    for slot, tokens, count in zip(slots, texts, known, strict=True):
        if count:
            feed(backend, slot, tokens[:count])
    fed = [tokens[count:] for tokens, count in zip(texts, known, strict=True)]
    rows = [1, 24, 1, 0]
    flat = np.array([token for part in fed for token in part])
    scores = backend.score(Spans(slots, known, [len(part) for part in fed], rows, flat), hidden=(1,))
    wanted = np.concatenate([truth(model, t)[len(t) - n :] for t, n in zip(texts, rows, strict=True)])
    assert error(scores.logits, wanted) < 1e-4
    assert by_torch == ways
    lone = opened(backend)
    again = Spans([lone], [0], [20], [1], np.array(texts[0]))
    assert error(scores.hidden[1][:20], backend.score(again, hidden=(1,)).hidden[1]) < 1e-4


def test_saved_and_loaded(pair: tuple[TransformerBackend, Any]) -> None:
    backend, model = pair
    slot, tokens = opened(backend), text(21)
    feed(backend, slot, tokens)
    state = backend.save(slot)
    backend.close(slot)
    other = backend.load(state)
    assert other is not None and backend.length(other) == 21
    assert error(feed(backend, other, [1]), truth(model, [*tokens, 1])[-1:]) < 1e-4
    others = [backend.load(state) for _ in range(10)]  # six pages each, of 58 that are left
    assert None not in others[:9] and others[9] is None, "shortage is a value"


@given(st.data())
@settings(max_examples=40)
def test_random_trees_against_their_paths(files: Path, data: st.DataObject) -> None:
    backend, model = shared(files, "mistral"), reference("mistral")
    before = text(data.draw(st.integers(0, 20), "before"), seed=5)
    parents = [-1] + [data.draw(st.integers(-1, node - 1)) for node in range(1, data.draw(st.integers(1, 14)))]
    nodes = text(len(parents), seed=6)
    slot = opened(backend)
    if before:
        feed(backend, slot, before, rows=0)
    rows = feed(backend, slot, nodes, parents={0: parents})
    for node, path in enumerate(paths_of(parents)):
        assert error(rows[node], truth(model, before + [nodes[one] for one in path])[-1]) < 1e-4
    path = paths_of(parents)[-1]
    backend.keep([slot], [len(before) + len(path)], {slot: [len(before) + node for node in path]})
    kept = before + [nodes[one] for one in path]
    assert error(feed(backend, slot, [7]), truth(model, [*kept, 7])[-1:]) < 1e-4
    backend.close(slot)


@cache
def shared(files: Path, model: str) -> TransformerBackend:
    return load(files / model)


def test_wrong_spans_are_refused(files: Path) -> None:
    backend = load(files / "llama", num_pages=8)
    slot = opened(backend)
    for message, spans in (
        ("holds 0 tokens but was fed position 3", Spans([slot], [3], [1], [1], np.array([1]))),
        ("token 101 is not in a vocabulary of 101", Spans([slot], [0], [1], [1], np.array([VOCAB]))),
        ("33 tokens in a context of 32", Spans([slot], [0], [33], [1], np.arange(33))),
        ("there is no slot 77", Spans([Slot(77)], [0], [1], [1], np.array([1]))),
        ("each must come after its parent", Spans([slot], [0], [2], [1], np.array([1, 2]), {0: [-1, 1]})),
    ):
        with pytest.raises(BackendError, match=message):
            backend.score(spans)
    feed(backend, slot, text(30))
    with pytest.raises(BackendError, match="no page is left"):
        feed(backend, opened(backend), [1])
    with pytest.raises(BackendError, match="holds 30 tokens and cannot go to 31"):
        backend.rewind(slot, 31)
    with pytest.raises(BackendError, match=r"cannot keep places \[30\]"):
        backend.keep([slot], [30], {slot: [30]})
    assert error(feed(backend, slot, [1]), truth(reference("llama"), [*text(30), 1])[-1:]) < 1e-4


def compare_caches(engine: Engine, dense: Sequence[TransformerBackend]) -> None:
    """After a round, target and draft hold what a fresh pass over the emitted tokens would write, place by place."""
    target, draft = engine.loop.target, drafter_of(engine).backend
    for job in engine.loop.scheduler.running:
        for backend, fresh in zip((target, draft), dense, strict=True):
            length = backend.length(job.slot)
            assert length <= len(job.tokens) - 1
            if length:
                slot = opened(fresh)
                feed(fresh, slot, job.tokens[:length], rows=0)
                held = backend.store.read(backend.pages.places(job.slot, range(length))).numpy()
                wanted = fresh.store.read(fresh.pages.places(slot, range(length))).numpy()
                fresh.close(slot)
                assert error(held, wanted) < 1e-4, f"{job.request_id}, store {backend.number}"


def test_the_law_of_speculation_on_a_real_model(files: Path) -> None:
    """Greedy and seeded tokens do not depend on draft, width, sharing of pages or batch mates."""
    save_folder(tiny("llama", seed=0), files / "target")
    draft = tiny("llama", seed=0)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.mul_(1.0 + 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    save_folder(draft, files / "draft")
    prompts = [text(length, seed=length) for length in (5, 33, 12)]
    settings = {"max_tokens": 40, "ignore_eos": True}
    plain = Engine.load(files / "target", cache_tokens=2000)
    engine = Engine.load(
        files / "target", draft=files / "draft", width=4, prefill_chunk=16, cache_tokens=2000, threaded=False
    )
    assert drafter_of(engine).shares_slots
    dense = [load(files / name) for name in ("target", "draft")]
    step, num_compared = engine.step, 0

    def compared() -> Any:
        nonlocal num_compared
        events = step()
        compare_caches(engine, dense)
        num_compared += 1
        return events

    engine.step = compared
    for sampling in ({"temperature": 0.0}, {"temperature": 0.9, "seed": 5}):
        wanted = [plain.generate(prompt, **settings, **sampling).token_ids for prompt in prompts]
        for shape in ({}, {}, {"width": 9, "tree": True}):  # the second time target and draft know the prefixes
            results = engine.generate(prompts, **settings, **sampling, **shape)
            assert [result.token_ids for result in results] == wanted
            assert all(result.statistics.accepted > 10 for result in results)
        engine.loop.target.pages.check()
        assert engine.loop.target.pages.usage.held == 0
    assert num_compared > 40


def test_a_prefix_hit_serves_the_draft_too(files: Path) -> None:
    """Trap 13: hits for the target alone would make acceptance collapse, or the draft read everything again."""
    engine = Engine.load(files / "llama", draft=files / "llama.gguf", width=4, cache_tokens=2000, backend="torch")
    draft = drafter_of(engine).backend
    fed: list[int] = []
    score = draft.score

    def counted(spans: Spans, hidden: Sequence[int] = ()) -> Any:
        fed.append(sum(spans.counts))
        return score(spans, hidden)

    draft.score = counted
    prompt = text(200)
    first = engine.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True)
    assert sum(fed) > 200
    fed.clear()
    second = engine.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True)
    assert second.token_ids == first.token_ids and sum(fed) < 40
    assert second.statistics.acceptance_rate == first.statistics.acceptance_rate > 0.9
    fed.clear()
    other = engine.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True, tenant="b")
    assert other.token_ids == first.token_ids and sum(fed) > 200


@pytest.mark.parametrize("kernels", ["", "twins", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_strict_rows_have_the_same_bits_however_they_come(files: Path, family: str, kernels: str) -> None:
    """Whole, chunked, one by one, beside others, as a path of a tree, after a prefix hit: equal to the last bit."""
    backend = load(files / family, 128, 4, kernels, strict=True)
    tokens = text(43)
    wanted = feed(backend, opened(backend), tokens)
    assert error(wanted, truth(reference(family), tokens)) < 1e-4
    slot, mate = opened(backend), opened(backend)
    feed(backend, mate, text(9, seed=8))
    rows = [feed(backend, slot, tokens[:5]), feed(backend, slot, tokens[5:6])]
    spans = Spans([mate, slot], [9, 6], [3, 20], [1, 20], np.array([*text(3, seed=9), *tokens[6:26]]))
    rows.append(backend.score(spans).logits[1:])
    other = text(5, seed=10)
    tree = [tokens[26], other[0], tokens[27], other[1], tokens[28]]
    branches = feed(backend, slot, tree, parents={0: [-1, 0, 0, 1, 2]})
    rows.append(branches[[0, 2, 4]])
    backend.keep([slot], [29], {slot: [26, 28, 30]})
    rows += [feed(backend, slot, [token]) for token in tokens[29:]]
    assert (np.concatenate(rows) == wanted).all()
    backend.publish(slot, tokens)
    again = opened(backend, tokens, 60)
    assert backend.length(again) == 40 and (feed(backend, again, tokens[40:]) == wanted[40:]).all()
