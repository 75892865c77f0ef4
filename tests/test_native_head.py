"""EAGLE-3 heads by the native kernels: beside torch's on the same weights, against themselves in any company, chains
that roll beside chains that are looked at, and all of it without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.backends import native_head_weights
from outrider.backends.base import Spans
from outrider.backends.eagle_head import EagleHead
from outrider.backends.head_base import Entries
from outrider.backends.native import NativeBackend
from outrider.backends.native_head import NativeHead
from outrider.config import SchedulerConfig
from outrider.draft import eagle
from outrider.draft.eagle import EagleDrafter
from outrider.engine.engine import Engine
from outrider.errors import DraftError, ModelFileError
from outrider.kv.pages import Pages
from outrider.models.gguf import GGUFFile
from outrider.models.heads import open_head
from outrider.native.library import library, why_not
from outrider.sched import policies
from outrider.types import Drafts, Request, SamplingParams

from tiny import save_gguf, tiny
from tiny_heads import EAGLE3, save_head

pytestmark = [pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}"), pytest.mark.usefixtures("one_thread")]

Array = np.ndarray[Any, Any]
TREE = [-1, -1, 0, 0, 1, 2, 5]
PROMPTS = [[5, 9, 77, 2, 40, 8, 19, 33, 61, 4, 90], [7, 7, 3], [50]]
# Weights in half precision are off by 2^-11 of themselves at most, and five products come one after the other.
HALF_BOUND = 2e-3
# Weights are rounded to four bits: 32 normal numbers lie within about 4.1 deviations, so a step is 4.1 / 15 of one, and
# a number is off by a step / sqrt(12), 8 %; so is a product, and five or nine (two layers) in a row by 16 to 24 %, more
# where attention is sharp.
ROUNDED_BOUND = 0.3


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    yield
    library().outrider_set_threads(1)


@pytest.fixture(scope="module")
def model() -> Any:
    """Its layers add little to the embedding, so that a head has something to go by."""
    made = tiny("llama", num_hidden_layers=7)
    with torch.no_grad():
        for layer in made.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
    return made


@pytest.fixture(scope="module")
def path(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(model, tmp_path_factory.mktemp("target") / "target.gguf", types="Q8_0")


def native(path: Path, page_size: int = 4, **more: Any) -> NativeBackend:
    return NativeBackend(GGUFFile(path), Pages(512 // page_size, page_size), threads=1, **more)


def deviation(ours: Any, wanted: Any) -> float:
    """The length of the difference by the length of what was wanted; what is minus infinity must be so in both."""
    ours, wanted = np.asarray(ours, dtype=np.float64), np.asarray(wanted, dtype=np.float64)
    assert ours.shape == wanted.shape and np.array_equal(np.isinf(ours), np.isinf(wanted))
    ours, wanted = np.where(np.isinf(ours), 0.0, ours), np.where(np.isinf(wanted), 0.0, wanted)
    return float(np.linalg.norm(ours - wanted) / np.linalg.norm(wanted))


def without(folder: Path, *names: str) -> Path:
    """The head without some of its tensors: the target's stand in for them."""
    weights = load_file(folder / "model.safetensors")
    save_file({name: value for name, value in weights.items() if name not in names}, folder / "model.safetensors")
    return folder


def head_folder(folder: Path, layout: str, model: Any) -> Path:
    if layout != "trained":
        save_head(folder, layout, model)
        return folder
    save_head(folder, "eagle3_speculators", model)  # as `outrider train eagle` writes it
    return without(folder, "embed_tokens.weight", "lm_head.weight")


LAYOUTS = [*EAGLE3, "trained"]


@pytest.mark.parametrize("bound", [HALF_BOUND, ROUNDED_BOUND])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_computes_what_torch_does(
    layout: str, bound: float, isa: str, model: Any, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the target's own hidden states: read in pieces, as a tree of guesses in several passes, and beside another."""
    if bound == HALF_BOUND:
        monkeypatch.setattr(native_head_weights, "BLOCK", 1 << 20)  # no row is of whole blocks then
    file = open_head(head_folder(tmp_path, layout, model))
    target, other_target = native(path), native(path)
    head, theirs = NativeHead(file, target), EagleHead(file, other_target)
    assert head.hidden == theirs.hidden and head.context == theirs.context
    generator = np.random.default_rng(3)
    tokens = generator.integers(0, 101, 18).tolist()
    slots = [one.open(tokens, 40) for one in (target, other_target)]
    states = target.score(Spans(slots[:1], [0], [17], [1], np.array(tokens[:17])), hidden=head.hidden).hidden
    rows = list(range(17))
    hidden, theirs_hidden = head.fuse(head.pick(states, rows)), theirs.fuse(theirs.pick(states, rows))
    assert deviation(hidden, theirs_hidden) < bound
    hidden = theirs_hidden.numpy()
    for start, stop in ((0, 1), (1, 9), (9, 17)):
        places = [[start], [stop - start], tokens[start + 1 : stop + 1]]
        output = head.read(Entries(slots[:1], [0], *places, hidden[start:stop]))
        wanted = theirs.read(Entries(slots[1:], [0], *places, theirs_hidden[start:stop]))
        assert deviation(output, wanted) < bound
        is_rounded = layout == "trained"  # the output is the target's, in Q8_0
        assert deviation(head.logits(wanted.numpy()), theirs.rows(wanted)) < (ROUNDED_BOUND if is_rounded else bound)
        assert deviation(head.again(wanted.numpy()), theirs.again(wanted)) < 1e-5
    nodes = generator.integers(0, 101, len(TREE)).tolist()
    feed = generator.standard_normal((len(TREE), hidden.shape[1])).astype(np.float32)
    beside = [one.open([1, 2, 3], 40) for one in (target, other_target)]
    for start, stop in ((0, 2), (2, 5), (5, 6), (6, 7)):
        both = [
            Entries(
                slots=[other, slot],
                firsts=[0, 0],
                starts=[4 * start, 17 + start],
                counts=[4, stop - start],
                tokens=[7, 7, 7, 7, *nodes[start:stop]],
                hidden=np.concatenate([hidden[:4], feed[start:stop]]),
                parents={1: TREE[:stop]},
            )
            for slot, other in zip(slots, beside, strict=True)
        ]
        both[1].hidden = torch.from_numpy(both[1].hidden)
        assert deviation(head.read(both[0]), theirs.read(both[1])) < bound


@pytest.mark.parametrize(("types", "is_rounded"), [("Q8_0", True), ("Q4_0", False)])
def test_rows_of_the_targets_output(types: str, is_rounded: bool, model: Any, tmp_path: Path) -> None:
    """A reduced vocabulary has four bits a weight: the target's own, with their bits, or those rounded."""
    target = native(save_gguf(model, tmp_path / "target.gguf", types=types))
    head = NativeHead(open_head(head_folder(tmp_path / "head", "trained", model)), target)
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    ours, wanted = head.weights.output.multiply(x), target.weights.output.multiply(x)[:, head.weights.ids]
    assert np.array_equal(ours, wanted) != is_rounded
    assert deviation(ours, wanted) < 0.1
    assert head.weights.embedding is target.weights.embedding


def test_copies_of_the_targets_matrices_are_not_kept(model: Any, path: Path, tmp_path: Path) -> None:
    head_folder(tmp_path, "eagle3_forge", model)
    target = native(path)
    weights = load_file(tmp_path / "model.safetensors")
    whole = np.arange(101)
    weights["embed_tokens.weight"] = torch.from_numpy(target.weights.embedding.rows(whole))
    weights["lm_head.weight"] = torch.from_numpy(target.weights.output.rows(whole))
    save_file(weights, tmp_path / "model.safetensors")
    head = NativeHead(open_head(tmp_path), target)
    assert head.weights.embedding is target.weights.embedding and head.weights.output is target.weights.output


def test_bits_depend_on_nothing_but_the_entries(isa: str, model: Any, path: Path, tmp_path: Path) -> None:
    """One by one or together, in pages of any size, on any number of threads, from the beginning or later."""
    file = open_head(head_folder(tmp_path, "trained", model))
    generator = np.random.default_rng(1)
    tokens = generator.integers(0, 101, 23).tolist()
    hidden = generator.standard_normal((23, 64)).astype(np.float32)
    found = []
    for page_size, pieces, first, threads in (
        (4, [23], 0, 1),
        (16, [1] * 23, 0, 2),
        (5, [9, 1, 13], 0, 3),
        (4, [23], 6, 1),
    ):
        library().outrider_set_threads(threads)
        target = native(path, page_size)
        head, outputs, start = NativeHead(file, target), [], 0
        slot, other = target.open([], 60), target.open([], 60)
        for size in pieces:
            entries = Entries(
                [other, slot],
                [0, first],
                [3 * start, first + start],
                [3, size],
                [4, 4, 4, *tokens[start : start + size]],
                np.concatenate([hidden[:3], hidden[start : start + size]]),
            )
            if start > 8:  # now without the other
                entries = Entries([slot], [first], [first + start], [size], entries.tokens[3:], entries.hidden[3:])
            outputs.append(head.read(entries)[-size:])
            start += size
        found.append(np.concatenate(outputs))
    assert all(np.array_equal(found[0], one) for one in found[1:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prompt_that_only_fills_the_cache(layout: str, model: Any, path: Path, tmp_path: Path) -> None:
    """The last layer computes keys and values alone; they are those of a pass whose outputs are wanted."""
    file = open_head(head_folder(tmp_path, layout, model))
    generator = np.random.default_rng(4)
    tokens = generator.integers(0, 101, 21).tolist()
    hidden = generator.standard_normal((21, 64)).astype(np.float32)
    held, outputs = [], []
    for fills in (False, True):
        head = NativeHead(file, native(path))
        slot = head.target.open([], 60)
        prompt = Entries([slot], [0], [0], [20], tokens[:20], hidden[:20])
        if fills:
            head.fill_cache(prompt)
        else:
            head.read(prompt)
        held.append(head.store.read(head.pages.places(slot, range(1, 21))))
        outputs.append(head.read(Entries([slot], [0], [20], [1], tokens[20:], hidden[20:])))
    assert np.array_equal(*held) and np.array_equal(*outputs) and np.ptp(held[0]) > 1.0


def test_edges_of_pages(model: Any, path: Path, tmp_path: Path) -> None:
    target = native(path)
    head = NativeHead(open_head(head_folder(tmp_path, "trained", model)), target)
    slot = target.open([1] * 11, 20)
    assert target.pages.make_room(slot, 12)
    hidden = np.random.default_rng(2).standard_normal((9, 64)).astype(np.float32)
    head.keep_edges(slot, 2, hidden)  # positions 2 to 10: pages end at 3 and 7
    assert np.array_equal(head.edge(slot, 3)[0], hidden[1]) and np.array_equal(head.edge(slot, 7)[0], hidden[5])
    pages = target.pages.leases[slot].pages
    head.store.copy_page(pages[1], pages[2])
    assert np.array_equal(head.edge(slot, 11)[0], hidden[5])


# --- chains that roll


def proposals_of(engine: Engine, drafter: EagleDrafter, **asked: Any) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Answers, and what was drafted on the way."""
    seen: list[list[list[int]]] = []
    propose = drafter.propose

    def noted(*given: Any) -> Drafts:
        drafts = propose(*given)
        if drafts.steps:
            seen.append([list(one) for one in drafts.proposals()])
        return drafts

    drafter.propose = noted  # type: ignore[method-assign]
    return [result.token_ids for result in engine.generate(PROMPTS, **asked)], seen


@pytest.mark.parametrize("layout", ["trained", "eagle3_forge", "eagle3_norms", "eagle3_deep"])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.8, "accept": "coupled", "seed": 3},
        {"temperature": 0.9, "accept": "coupled", "seed": 4, "top_k": 9, "min_p": 0.01},
        {"temperature": 0.9, "accept": "rejection", "seed": 5},
    ],
)
def test_rolled_chains_are_those_that_are_looked_at(
    layout: str, sampling: dict[str, Any], model: Any, path: Path, tmp_path: Path
) -> None:
    """Several requests of different widths at once; answers are those of plain decoding."""
    head_folder(tmp_path, layout, model)
    asked = {"max_tokens": 14, "ignore_eos": True, **sampling}
    plain = Engine.load(native(path)).generate(PROMPTS, **asked)
    found = []
    for rolls in (True, False):
        target = native(path)
        drafter = EagleDrafter.load(tmp_path, target)
        assert isinstance(drafter.head, NativeHead) and drafter._roller is drafter.head
        if not rolls:
            drafter._roller = None
        answers, drafted = proposals_of(Engine.load(target, draft=drafter), drafter, width=4, **asked)
        if sampling.get("accept") != "rejection":
            assert answers == [result.token_ids for result in plain]
        found.append((answers, drafted))
    assert len(found[0][1]) > 5 and found[0] == found[1]


@pytest.mark.parametrize("rolls", [True, False])
def test_requests_of_every_kind_in_one_batch(rolls: bool, model: Any, path: Path, tmp_path: Path) -> None:
    """Weighed rows beside certain ones, chains of different lengths; the same with and without rolling."""
    head_folder(tmp_path, "trained", model)
    target = native(path)
    drafter = EagleDrafter.load(tmp_path, target)
    if not rolls:
        drafter._roller = None
    kinds = [(0.9, "rejection", 4, 12), (0.8, "coupled", 2, 9), (0.0, "auto", 3, 10)]
    requests = [
        Request(
            prompt=prompt, max_tokens=most, width=width, sampling=SamplingParams(temperature=warm, seed=4, accept=rule)
        )
        for prompt, (warm, rule, width, most) in zip(PROMPTS, kinds, strict=True)
    ]
    results = Engine.load(target, draft=drafter).generate(requests)
    plain = Engine.load(native(path))
    alone = [plain.generate(replace(request, width=None)) for request in requests]
    assert [one.token_ids for one in results[1:]] == [one.token_ids for one in alone[1:]]
    assert all(one.statistics.drafted > 3 for one in results)


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
@pytest.mark.parametrize("shape", [{"width": 4}, {"width": 8, "tree": True}])
def test_requests_that_give_way(
    preempt: Any, shape: dict[str, Any], model: Any, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where pages run out, requests are put aside and come back."""
    monkeypatch.setattr(policies, "HEADROOM", 2)
    head_folder(tmp_path, "trained", model)
    target = NativeBackend(GGUFFile(path), Pages(12, 4), threads=1)
    scheduling = SchedulerConfig(preempt=preempt)
    engine = Engine.load(target, draft=EagleDrafter.load(tmp_path, target), scheduling=scheduling)
    prompts = [[place, 1, 2, place] for place in range(4)]
    asked = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    results = engine.generate(prompts, **asked, **shape)
    plain = Engine.load(native(path)).generate(prompts, **asked)
    assert [one.token_ids for one in results] == [one.token_ids for one in plain]
    assert engine.statistics.preemptions > 0 and all(one.statistics.drafted > 5 for one in results)


def test_requests_that_outlive_their_engine(model: Any, path: Path, tmp_path: Path) -> None:
    head_folder(tmp_path / "head", "trained", model)
    asked = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
    plain = Engine.load(native(path)).generate(PROMPTS, **asked)
    engines = []
    for _ in range(2):
        target = native(path)
        engines.append(Engine.load(target, draft=EagleDrafter.load(tmp_path / "head", target), threaded=False))
    handles = [engines[0].stream(prompt, width=3, **asked) for prompt in PROMPTS]
    for _ in range(4):
        engines[0].step()
    assert engines[0].snapshot(tmp_path / "state") == len(handles)
    streams = engines[1].resume(tmp_path / "state")
    for stream in streams:
        for _ in stream:
            pass
    assert [stream.result.token_ids for stream in streams] == [one.token_ids for one in plain]


@pytest.mark.parametrize("layout", ["trained", "eagle3_forge"])
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"temperature": 0.8, "accept": "rejection", "seed": 2, "min_p": 0.01}],
)
def test_trees_of_its_own_tokens_are_those_of_whole_rows(
    layout: str, sampling: dict[str, Any], model: Any, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head_folder(tmp_path, layout, model)
    found = []
    for looks in (True, False):
        target = native(path)
        drafter = EagleDrafter.load(tmp_path, target)
        if not looks:
            monkeypatch.setattr(eagle, "_is_ranked_plainly", lambda job: False)
        asked = {"max_tokens": 12, "ignore_eos": True, "width": 9, "tree": True, **sampling}
        found.append(proposals_of(Engine.load(target, draft=drafter), drafter, **asked))
    assert len(found[0][1]) > 5 and found[0] == found[1]


@pytest.mark.parametrize("asked", [{"temperature": 0.8, "typical_p": 0.9, "seed": 1}, {"repetition_penalty": 1.2}])
def test_what_cannot_roll_is_looked_at(
    asked: dict[str, Any], model: Any, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head_folder(tmp_path, "trained", model)
    target = native(path)
    engine = Engine.load(target, draft=EagleDrafter.load(tmp_path, target), threaded=False)
    monkeypatch.setattr(NativeHead, "roll", lambda *given: pytest.fail("it rolled"))  # the profile's dummies may
    results = engine.generate(PROMPTS, max_tokens=10, ignore_eos=True, width=3, **{"temperature": 0.0, **asked})
    assert all(result.statistics.drafted > 5 for result in results)


def test_the_head_never_drafts_what_is_padding(model: Any, path: Path, tmp_path: Path) -> None:
    for number, layout in enumerate(("trained", "eagle3_forge")):
        head_folder(tmp_path / layout, layout, model)
        target = native(path, vocab_size=60)
        drafter = EagleDrafter.load(tmp_path / layout, target)
        engine = Engine.load(target, draft=drafter)
        prompts = [[token for token in prompt if token < 60] for prompt in PROMPTS]
        for sampling in ({"temperature": 0.0}, {"temperature": 1.5, "seed": number}):
            results = engine.generate(prompts, max_tokens=12, ignore_eos=True, width=4, **sampling)
            assert all(result.statistics.drafted > 5 for result in results)
            assert all(max(result.token_ids) < 60 for result in results)
        assert drafter.head.logits(drafter.head.fuse([np.ones((2, 64), np.float32)] * 3)).shape == (2, 60)


def test_a_head_that_says_nothing_usable(model: Any, path: Path, tmp_path: Path) -> None:
    """Rows are looked at again where a chain could not roll, and the failure has a name."""
    head_folder(tmp_path, "trained", model)
    target = native(path)
    drafter = EagleDrafter.load(tmp_path, target)
    drafter.head.weights.norm[:] = np.nan
    with pytest.raises(DraftError, match="the draft failed: the model returned NaN logits"):
        Engine.load(target, draft=drafter).generate(PROMPTS, max_tokens=6, temperature=0.0, width=3)


def test_weights_that_are_no_numbers(model: Any, path: Path, tmp_path: Path) -> None:
    head_folder(tmp_path, "trained", model)
    for value in (torch.nan, torch.inf, 1e6):
        weights = load_file(tmp_path / "model.safetensors")
        weights["layers.0.mlp.up_proj.weight"][3, 5] = value
        save_file(weights, tmp_path / "model.safetensors")
        with pytest.raises(
            ModelFileError, match=r"blk\.0\.ffn_up\.weight has values that are no numbers, or too large"
        ):
            NativeHead(open_head(tmp_path), native(path))


# --- without torch


CODE = """
import json, sys
sys.modules["torch"] = None
from outrider.engine.engine import Engine
from outrider.errors import OutriderError
target, drafts, prompts = json.loads(sys.argv[1])
answers = []
for draft in drafts:
    try:
        engine = Engine.load(target, draft=draft, backend="native", cache_tokens=256, threads=1)
        results = [
            engine.generate(prompts, max_tokens=10, temperature=0.0, ignore_eos=True, **shape)
            for shape in ({"width": 3}, {"width": 8, "tree": True})
        ]
        answers.append([[one.token_ids, one.statistics.drafted] for some in results for one in some])
    except OutriderError as error:
        answers.append(f"{type(error).__name__}: {error.message}")
print(json.dumps(answers))
"""


def run(target: Path, drafts: Sequence[str]) -> list[Any]:
    given = json.dumps([str(target), drafts, PROMPTS])
    return list(json.loads(subprocess.check_output([sys.executable, "-c", CODE, given], text=True)))


def test_without_torch(model: Any, path: Path, tmp_path: Path) -> None:
    layouts = ("trained", "eagle3_forge", "eagle_safetensors", "eagle3", "medusa_safetensors")
    for layout in layouts:
        head_folder(tmp_path / layout, layout, model)
    drafts = [f"{'medusa' if 'medusa' in layout else 'eagle'}:{tmp_path / layout}" for layout in layouts]
    trained, forge, *refused = run(path, drafts)
    plain = Engine.load(native(path)).generate(PROMPTS, max_tokens=10, temperature=0.0, ignore_eos=True)
    for answers in (trained, forge):
        assert [tokens for tokens, _ in answers] == 2 * [result.token_ids for result in plain]
        assert all(drafted > 5 for _, drafted in answers)
    assert all(told.startswith("MissingPackageError") and "pip install 'outrider[torch]" in told for told in refused)
    assert "this head needs torch, as all do that are older than EAGLE-3" in refused[0]
    assert "a head that torch.save wrote needs torch" in refused[1] and "a Medusa head needs torch" in refused[2]
