"""The joint law of a real model with every drafter: layer skip, another model, Medusa, EAGLE-2, EAGLE-3, lookups.

The target is a tiny random llama with a vocabulary of 5, whose law is enumerated: transformers scores all contexts.
Drafts and heads have random weights, too: what they guess is poor, and exactness does not depend on it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.backends.base import Spans
from outrider.backends.transformer import TransformerBackend
from outrider.draft.model import ModelDrafter
from outrider.engine.engine import Engine
from outrider.kv.pages import Pages
from outrider.models.opening import open_model
from outrider.types import Job, Request, SamplingParams

import tiny_heads
from cases import CONTROLS, stop_after
from oracle import SIGNIFICANCE, enumerated_law, law_p_value
from tiny import save_folder, tiny

VOCAB = 5
LENGTH = 5
PROMPT = [3, 1, 4]
LONG = [3, 1, 4, 1, 0, 2, 2, 4, 3, 0, 1, 1, 3, 4, 2, 0, 4, 0]
BATCH = 400
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


@cache
def model(layers: int, seed: int = 0) -> Any:
    """Flat enough that random drafts are kept now and then."""
    made = tiny("llama", seed=seed, num_hidden_layers=layers, **SMALL)
    with torch.no_grad():
        made.lm_head.weight.mul_(0.4)
    return made


@cache
def rows() -> dict[tuple[int, ...], list[float]]:
    """Logits after the prompt and every output shorter than LENGTH, as transformers computes them."""
    found: dict[tuple[int, ...], list[float]] = {}
    for length in range(LENGTH):
        outputs = list(product(range(VOCAB), repeat=length))
        with torch.inference_mode():
            logits = model(3)(torch.tensor([[*PROMPT, *output] for output in outputs])).logits[:, -1]
        found.update(zip(outputs, logits.tolist(), strict=True))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target, a draft of its vocabulary, and heads; one of EAGLE-3 knows only three of the five tokens."""
    folder = tmp_path_factory.mktemp("models")
    save_folder(model(3), folder / "target")
    save_folder(model(1, seed=1), folder / "draft")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_heads, "DRAFT_VOCAB", 3)
        for layout in ("medusa", "eagle", "eagle3"):
            tiny_heads.save_head(folder / layout, layout, model(3))
    config = folder / "eagle3" / "config.json"
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    config.write_text(json.dumps(json.loads(config.read_text()) | layers))
    return folder


DRAFTS = ("layerskip", "model", "medusa", "eagle", "eagle3")


def written(draft: str, folder: Path) -> str:
    """As people write it."""
    if "," in draft:
        return ",".join(written(one, folder) for one in draft.split(","))
    if draft in ("none", "ngram", "suffix"):
        return draft
    paths = {
        "layerskip": "layerskip:1",
        "model": str(folder / "draft"),
        "medusa": f"medusa:{folder / 'medusa'}",
        "eagle": f"eagle:{folder / 'eagle'}",
        "eagle3": f"eagle:{folder / 'eagle3'}",
    }
    return paths[draft]


@dataclass(frozen=True)
class Tiny:
    """What is asked of the tiny model. A tree has `width` nodes."""

    method: str | None = None
    width: int = 3
    tree: bool = False
    rule: str = "rejection"
    controls: dict[str, Any] = field(default_factory=dict)

    def params(self, seed: int = 5) -> SamplingParams:
        return SamplingParams(seed=seed, accept=self.rule, **self.controls)

    def requests(self, count: int, seed: int = 5, length: int = LENGTH) -> list[Request]:
        params = self.params(seed)
        return [
            Request(
                prompt=PROMPT,
                sampling=params,
                max_tokens=length + 17,  # so that width is not cut
                on_token=stop_after(length),
                ignore_eos=True,
                choice=choice,
                method=self.method,
                width=self.width,
                tree=self.tree,
            )
            for choice in range(count)
        ]

    def p_value(self, outputs: Sequence[Sequence[int]]) -> float:
        return law_p_value(outputs, enumerated_law(rows().__getitem__, VOCAB, PROMPT, self.params(), LENGTH))


CHAIN = Tiny()
TREE = Tiny(width=8, tree=True)


def engine_for(draft: str, folder: Path, **settings: Any) -> Engine:
    return Engine.load(
        folder / "target",
        draft=written(draft, folder),
        cache_tokens=BATCH * 48,
        max_batch=BATCH,
        threaded=False,
        **settings,
    )


def every_law_holds(engine: Engine, cases: Sequence[Tiny], count: int) -> None:
    """`count` requests of each case, side by side."""
    requests: list[Request] = []
    for together in zip(*(case.requests(count, seed) for seed, case in enumerate(cases)), strict=True):
        requests += together
    results = engine.generate(requests)
    for index, case in enumerate(cases):
        mine = results[index :: len(cases)]
        assert case.p_value([result.token_ids for result in mine]) > SIGNIFICANCE, case
        if case.width and case.method != "none":
            accepted = sum(result.statistics.accepted for result in mine)
            assert accepted > count / 10, f"too little is kept to prove anything: {accepted} for {case}"


def test_the_backend_computes_what_is_enumerated(folder: Path) -> None:
    backend = TransformerBackend(open_model(folder / "target"), Pages(64, 4))
    for output in [(), (0,), (4, 2), (1, 3, 0, 2)]:
        slot = backend.open([], 16)
        fed = [*PROMPT, *output]
        ours = backend.score(Spans([slot], [0], [len(fed)], [1], np.array(fed))).logits[0]
        assert np.allclose(ours, rows()[output], atol=1e-4)
        backend.close(slot)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [CHAIN, TREE, replace(TREE, width=16)], ids=["chain", "tree8", "tree16"])
@pytest.mark.parametrize("draft", [*DRAFTS, "ngram,medusa", "suffix,layerskip", "ngram,eagle", "suffix,model"])
def test_the_law_of_every_drafter(draft: str, shape: Tiny, folder: Path) -> None:
    every_law_holds(engine_for(draft, folder), [shape], 10_000)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_every_control_with_every_drafter(draft: str, shape: Tiny, folder: Path) -> None:
    """One batch of all controls; `coupled` beside `rejection`."""
    cases = [replace(shape, controls=controls) for controls in CONTROLS.values()]
    cases.append(replace(shape, rule="coupled", controls=CONTROLS["together"]))
    every_law_holds(engine_for(draft, folder), cases, 2_000)


ALL = "ngram,suffix,layerskip,medusa,eagle3,model"
MIXED = [
    replace(TREE, method="layerskip"),
    replace(TREE, method="model", controls={"temperature": 1.3, "repetition_penalty": 1.4}),
    replace(TREE, method="medusa", controls={"top_p": 0.9}),
    replace(CHAIN, method="medusa", width=2),
    replace(TREE, method="eagle", width=6),
    replace(CHAIN, method="eagle", controls={"top_k": 4}),
]
MORE = [
    *MIXED,
    replace(CHAIN, method="layerskip", width=5, controls=CONTROLS["together"]),
    replace(CHAIN, method="model", rule="coupled"),
    replace(TREE, method="suffix"),
    replace(TREE, method="ngram", controls={"frequency_penalty": 0.7}),
    replace(TREE, width=12),  # whoever has something to say
    replace(CHAIN, method="none"),
    replace(CHAIN, width=0, controls=CONTROLS["typical_p"]),
]


def test_a_batch_of_methods_keeps_every_law(folder: Path) -> None:
    every_law_holds(engine_for("layerskip,medusa,eagle3,model", folder), MIXED, 800)


@pytest.mark.slow
@pytest.mark.parametrize("eagle", ["eagle", "eagle3"])
def test_a_batch_of_all_methods_keeps_every_law(eagle: str, folder: Path) -> None:
    every_law_holds(engine_for(ALL.replace("eagle3", eagle), folder), MORE, 5_000)


# ---- the same tokens as plain ------------------------------------------------------------------------------------

COUPLED = {"rule": "coupled"}
GREEDY = {"controls": {"temperature": 0.0}}
SHAPED = {"rule": "coupled", "controls": CONTROLS["together"]}


def answers(engine: Engine, case: Tiny, count: int = 8, length: int = 14) -> list[list[int]]:
    """To prompts of different lengths; the long ones share a page."""
    requests = [
        replace(one, prompt=[*LONG[: 1 + 5 * (one.choice % 4)], one.choice % VOCAB])
        for one in case.requests(count, length=length)
    ]
    return [result.token_ids for result in engine.generate(requests)]


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(COUPLED, id="coupled"),
        pytest.param(GREEDY, id="greedy"),
        pytest.param(SHAPED, id="shaped", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("draft", [*DRAFTS, "ngram,medusa", "suffix,layerskip,model"])
def test_the_same_tokens_as_plain(draft: str, sampling: dict[str, Any], folder: Path) -> None:
    engine = engine_for(draft, folder, prefill_chunk=2)
    plain = answers(engine, Tiny(width=0, **sampling))
    for shape in (CHAIN, replace(TREE, width=14)):
        assert answers(engine, replace(shape, **sampling)) == plain, shape
    assert engine.loop.statistics.accepted > 0


def test_the_same_tokens_as_plain_in_a_batch_of_all_methods(folder: Path) -> None:
    engine = engine_for(ALL, folder)
    cases = [replace(case, rule="coupled") for case in MORE]
    requests = [request for case in cases for request in case.requests(5, length=16)]
    plain = engine.generate([replace(one, width=0, method="none", on_token=stop_after(16)) for one in requests])
    mixed = engine.generate(requests)
    assert [result.token_ids for result in mixed] == [result.token_ids for result in plain]
    assert sum(result.statistics.accepted for result in mixed) > 50


# ---- keys and values ---------------------------------------------------------------------------------------------


class Fresh:
    """What keys and values of a text are, computed from nothing."""

    def __init__(self, path: Path) -> None:
        self._backend = TransformerBackend(open_model(path), Pages(32, 4))

    def check(self, backend: TransformerBackend, job: Job, length: int) -> None:
        """`backend` holds the first `length` tokens of the job."""
        own, tokens = self._backend, job.tokens[:length]
        assert backend.length(job.slot) == length
        if length == 0:
            return
        slot = own.open([], length + 1)
        own.score(Spans([slot], [0], [length], [1], np.array(tokens)))
        ours = own.store.read(own.pages.places(slot, range(length)))
        theirs = backend.store.read(backend.pages.places(job.slot, range(length)))
        own.close(slot)
        assert torch.allclose(theirs, ours, atol=1e-4), f"{job} holds something else than its {length} tokens"


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_keys_and_values_after_every_round_of_trees(draft: str, rule: str, folder: Path) -> None:
    """The target's, and those of a draft that shares its pages: exactly the path that was kept."""
    engine, fresh, fresh_draft = engine_for(draft, folder), Fresh(folder / "target"), Fresh(folder / "draft")
    step, checked = engine.step, 0

    def compared() -> Any:
        nonlocal checked
        events = step()
        for job in engine.loop.scheduler.running:
            fresh.check(engine.loop.target, job, job.cached)
            for drafter in engine.loop.router.drafters.values():
                if isinstance(drafter, ModelDrafter) and job.id in drafter.seats:
                    fresh_draft.check(drafter.backend, job, drafter.seats[job.id].length)
            checked += 1
        return events

    engine.step = compared  # type: ignore[method-assign]
    requests = [*replace(TREE, width=16, rule=rule).requests(4, length=20), *CHAIN.requests(1, length=20)]
    results = engine.generate([replace(one, prompt=LONG) for one in requests])
    assert sum(result.statistics.accepted for result in results) > 10 and checked > 20
