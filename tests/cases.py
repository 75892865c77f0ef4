"""Engines and generations for the proofs of the law."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from outrider.backends.mock import MockBackend
from outrider.clock import VirtualClock
from outrider.config import MockConfig
from outrider.draft.base import DrafterInfo
from outrider.draft.lookup import NoDrafter, ScriptedDrafter
from outrider.engine.engine import Engine
from outrider.types import Drafts, Job, OnToken, Request, SamplingParams

from oracle import joint_law, law_p_value

VOCAB = 4
LENGTH = 6  # tokens generated: a draft of 5 fits, and several rounds when drafts are refused
PROMPT = [1, 3, 0]
TARGET = MockConfig(vocab_size=VOCAB, seed=11, sharpness=1.3)
# Agrees with the target about half of the time: every branch of the acceptance rule is taken often.
DRAFT = replace(TARGET, drift=1.2)

CONTROLS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.3},
    "typical_p": {"typical_p": 0.6},
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 1.1},
    "frequency": {"frequency_penalty": 0.8},
    "bias": {"logit_bias": {0: 1.2, 2: -0.7}},
    "banned": {"banned": (2,)},
    "together": {
        "temperature": 1.3,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.05,
        "typical_p": 0.95,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {1: 0.8},
        "banned": (3,),
    },
}


def scripted(tokens: Sequence[int], width: int) -> list[int]:
    """A deterministic guess that depends on the context."""
    return [(tokens[-1] + tokens[-2] + place) % VOCAB for place in range(width)]


@dataclass(frozen=True)
class Shape:
    """A tree without the values of sampled tokens: each node's parent, and its token where that is certain."""

    parents: list[int]
    tokens: list[int | None]  # None: drawn


@cache
def random_shape(context: tuple[int, ...], width: int, vocab: int, drawn: float) -> Shape:
    """Looks random and depends on the context alone. Siblings may have the same token, and some have p = 0."""
    dice = random.Random(f"{context}:{width}")
    parents: list[int] = []
    tokens: list[int | None] = []
    for node in range(dice.randint(width // 2, width)):
        # mostly near the root, where nodes are judged often; or the node before, for depth
        parents.append(dice.choice([-1, -1, node - 1, dice.randrange(-1, node)]))
        tokens.append(None if dice.random() < drawn else dice.randrange(vocab))
    return Shape(parents, tokens)


class TreeDrafter(NoDrafter):
    """Trees of tokens that are certain: what `random_shape` says."""

    info = DrafterInfo(name="trees")

    def __init__(self, vocab: int = VOCAB) -> None:
        self._vocab = vocab

    def propose(self, jobs: Sequence[Job], widths: Sequence[int], trees: Sequence[bool]) -> Drafts:
        drafts, tokens = Drafts([], None), []
        for index, (job, width, tree) in enumerate(zip(jobs, widths, trees, strict=True)):
            shape = random_shape(tuple(job.tokens), width, self._vocab, 0.0)
            drafts.counts.append(len(shape.parents))
            if tree and shape.parents:
                drafts.parents[index] = shape.parents
            tokens += shape.tokens
        drafts.tokens = np.asarray(tokens, dtype=np.int64)
        return drafts


class MixedDrafter(NoDrafter):
    """Trees whose siblings are certain or sampled as they come.

    A sampled one is drawn from a row that depends on its ancestors and on its earlier siblings, mostly without their
    tokens; rows may have zeros. The draws are those of a generator of its own, which the judge knows nothing of.
    """

    info = DrafterInfo(name="mixed")

    def __init__(self, vocab: int = VOCAB, seed: int = 0) -> None:
        self._generator = np.random.default_rng(seed)
        rows = np.random.default_rng(1).dirichlet([0.8] * vocab, size=(vocab, 8))
        rows[:, :3][rows[:, :3] < 0.1] = 0.0
        self._rows = (rows / rows.sum(-1, keepdims=True)).tolist()
        self._vocab = vocab

    def propose(self, jobs: Sequence[Job], widths: Sequence[int], trees: Sequence[bool]) -> Drafts:
        drafts, tokens, rows = Drafts([], None), [], []
        for index, (job, width, tree) in enumerate(zip(jobs, widths, trees, strict=True)):
            shape = random_shape(tuple(job.tokens), width, self._vocab, 0.6)
            parents = shape.parents if tree else list(range(-1, len(shape.parents) - 1))
            drafts.counts.append(len(parents))
            if tree and parents:
                drafts.parents[index] = parents
            for token, row in self._draw(job.tokens[-1], parents, shape.tokens):
                tokens.append(token)
                rows.append(row)
        drafts.tokens = np.asarray(tokens, dtype=np.int64)
        drafts.probs = np.asarray(rows, dtype=np.float32).reshape(-1, self._vocab)
        return drafts

    def _draw(
        self, last: int, parents: Sequence[int], certain: Sequence[int | None]
    ) -> list[tuple[int, Sequence[float]]]:
        drawn: list[tuple[int, Sequence[float]]] = []
        uniforms = self._generator.random(len(parents)).tolist()
        taken: dict[int, list[int]] = {}
        for node, (parent, token) in enumerate(zip(parents, certain, strict=True)):
            siblings = taken.setdefault(parent, [])
            row: Sequence[float]
            if token is not None:
                row = [float(other == token) for other in range(self._vocab)]
            else:
                row = self._rows[last if parent < 0 else drawn[parent][0]][node % 8]
                left = [0.0 if other in siblings else chance for other, chance in enumerate(row)]
                if node % 5 and sum(left) > 0.01:  # sometimes with replacement
                    row = [chance / sum(left) for chance in left]
                token = _draw_one(row, uniforms[node])
            siblings.append(token)
            drawn.append((token, row))
        return drawn


def _draw_one(row: Sequence[float], uniform: float) -> int:
    last = 0
    for token, chance in enumerate(row):
        if chance > 0.0:
            last = token
            uniform -= chance
            if uniform < 0.0:
                break
    return last


def stop_after(count: int) -> OnToken:
    """A callback that ends the answer after so many tokens, so that width is not cut where max_tokens comes near."""
    seen = 0

    def on_token(token: int, text: str) -> bool:
        nonlocal seen
        seen += 1
        return seen < count

    return on_token


@dataclass(frozen=True)
class Case:
    """One setting of which the law is proven. A tree has `width` nodes."""

    name: str
    draft: str = "model"  # a key of `drafts`, or several with commas
    width: int | None = 2
    rule: str = "rejection"
    controls: dict[str, Any] = field(default_factory=dict)
    target: MockConfig = TARGET
    draft_config: MockConfig = DRAFT
    arrays: str = "numpy"
    draft_arrays: str = "numpy"
    device: str | None = None  # of torch's arrays
    prefill_chunk: int = 512
    max_batch: int = 1000
    tree: bool | None = False
    method: str | None = None  # of the engine's drafters; all of them when not given

    def params(self, seed: int | None = 5) -> SamplingParams:
        # A seeded answer under `rejection` is not shown what was said before: without a seed it is.
        looks_back = self.rule == "rejection" and "suffix" in (self.method or self.draft)
        return SamplingParams(seed=None if looks_back else seed, accept=self.rule, **self.controls)

    def engine(self) -> Engine:
        clock, target, draft = None, self.target, self.draft_config
        if self.width is None:  # the engine chooses by costs: here drafting pays
            clock = VirtualClock()
            target, draft = replace(target, seconds_per_pass=1.0), replace(draft, seconds_per_pass=0.01)
        drafts: dict[str, Callable[[], Any]] = {
            "none": lambda: "none",
            "ngram": lambda: "ngram",
            "suffix": lambda: "suffix",
            "scripted": lambda: ScriptedDrafter(scripted),
            "trees": TreeDrafter,
            "mixed": MixedDrafter,
            "model": lambda: MockBackend(draft, arrays=self.draft_arrays, device=self.device, clock=clock),
        }
        return Engine.load(
            MockBackend(target, arrays=self.arrays, device=self.device, clock=clock),
            draft=[drafts[name]() for name in self.draft.split(",")],
            width=self.width,
            max_batch=self.max_batch,
            prefill_chunk=self.prefill_chunk,
            clock=clock,
            threaded=False,
        )

    def requests(self, count: int, seed: int = 5) -> list[Request]:
        params = self.params(seed)
        wide = self.width is None or self.width >= LENGTH
        return [
            Request(
                prompt=PROMPT,
                sampling=params,
                max_tokens=LENGTH + 17 if wide else LENGTH,
                on_token=stop_after(LENGTH) if wide else None,
                choice=choice,
                method=self.method,
                width=self.width,
                tree=self.tree,
            )
            for choice in range(count)
        ]

    def p_value(self, outputs: Sequence[Sequence[int]]) -> float:
        law = joint_law(MockBackend(self.target), PROMPT, self.params(), LENGTH)
        return law_p_value(outputs, law)


def measure(case: Case, count: int) -> float:
    """p-value of `count` generations against the enumerated law."""
    engine = case.engine()
    with repeatable_seeds():
        outputs = [result.token_ids for result in engine.generate(case.requests(count))]
    assert case.width == 0 or engine.loop.statistics.drafted > count, "plain decoding proves nothing"
    return case.p_value(outputs)


@contextmanager
def repeatable_seeds() -> Iterator[None]:
    """Requests that bring no seed get the same ones in every run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.engine.intake.secrets.randbits", random.Random(5).getrandbits)
        yield


def grid() -> dict[str, Case]:
    """Every case of `make proofs`, by name."""
    cases = [*chains(), *trees()]
    return {case.name: case for case in cases}


def chains() -> list[Case]:
    cases = [Case("plain", draft="none", width=0)]
    for rule in ("rejection", "coupled"):
        for draft in ("model", "scripted", "ngram", "suffix"):
            for width in (1, 2, 5):
                cases.append(Case(f"{draft}-k{width}-{rule}", draft, width, rule))
        for name, controls in CONTROLS.items():
            cases.append(Case(f"model-{name}-{rule}", "model", 2, rule, controls))
            cases.append(Case(f"scripted-{name}-{rule}", "scripted", 2, rule, controls))
        for width in (1, 5):
            cases.append(Case(f"model-together-k{width}-{rule}", "model", width, rule, CONTROLS["together"]))
        cases.append(Case(f"mixed-k5-{rule}", "mixed", 5, rule))
        cases.append(Case(f"each-in-turn-k5-{rule}", "ngram,suffix,model", 5, rule))
        forward_only = replace(TARGET, max_rewind=0)
        cases.append(Case(f"no-rewind-model-{rule}", "model", 5, rule, target=forward_only))
        cases.append(Case(f"no-rewind-scripted-{rule}", "scripted", 5, rule, target=forward_only))
        cases.append(Case(f"no-rewind-together-{rule}", "model", 5, rule, CONTROLS["together"], target=forward_only))
        cases.append(Case(f"draft-no-rewind-{rule}", "model", 5, rule, draft_config=replace(DRAFT, max_rewind=0)))
        cases.append(
            Case(f"short-rewind-{rule}", "model", 5, rule, target=replace(TARGET, max_rewind=3), prefill_chunk=1)
        )
        cases.append(
            Case(f"padded-{rule}", target=replace(TARGET, padding=3), draft_config=replace(DRAFT, padding=1), rule=rule)
        )
        cases.append(
            Case(f"torch-{rule}", "model", 5, rule, CONTROLS["together"], arrays="torch", draft_arrays="torch")
        )
    cases.append(Case("torch-target-numpy-draft", "model", 2, arrays="torch"))
    cases.append(Case("numpy-target-torch-draft", "model", 2, draft_arrays="torch"))
    for name, controls in CONTROLS.items():
        cases.append(Case(f"plain-{name}", "none", 0, controls=controls))
    return cases


def trees() -> list[Case]:
    """Sampled children (model), certain ones (trees), both kinds as siblings (mixed), and lookups that branch."""
    cases: list[Case] = []
    for rule in ("rejection", "coupled"):
        for draft in ("model", "trees", "mixed"):
            for size in (3, 8, 16):
                cases.append(Case(f"{draft}-tree{size}-{rule}", draft, size, rule, tree=True))
            for name, controls in CONTROLS.items():
                cases.append(Case(f"{draft}-tree-{name}-{rule}", draft, 8, rule, controls, tree=True))
            whole = Case(f"{draft}-tree-torch-{rule}", draft, 8, rule, CONTROLS["together"], tree=True, arrays="torch")
            cases.append(replace(whole, draft_arrays="torch"))
            padded = Case(f"{draft}-tree-padded-{rule}", draft, 8, rule, tree=True, target=replace(TARGET, padding=3))
            cases.append(replace(padded, draft_config=replace(DRAFT, padding=1)))
        for draft in ("ngram", "suffix"):
            for size in (8, 16):
                cases.append(Case(f"{draft}-tree{size}-{rule}", draft, size, rule, tree=True))
            cases.append(
                Case(f"{draft}-tree-together-{rule}", draft, 8, rule, controls=CONTROLS["together"], tree=True)
            )
        cases.append(Case(f"each-in-turn-tree-{rule}", "ngram,suffix,model", 8, rule, tree=True))
        cases.append(Case(f"engines-choice-{rule}", "ngram,model", None, rule, tree=None, max_batch=20))
        cases.append(Case(f"engines-width-tree-{rule}", "model", None, rule, tree=True, max_batch=20))
        chains_only = replace(TARGET, max_rewind=3)
        cases.append(Case(f"tree-for-a-target-of-chains-{rule}", "model", 8, rule, target=chains_only, tree=True))
        chains_only = replace(DRAFT, max_rewind=9)
        cases.append(Case(f"tree-of-a-draft-of-chains-{rule}", "model", 8, rule, draft_config=chains_only, tree=True))
        cases.append(Case(f"tree-read-in-chunks-{rule}", "model", 8, rule, tree=True, prefill_chunk=1))
    cases.append(Case("tree-torch-target-numpy-draft", "model", 8, arrays="torch", tree=True))
    cases.append(Case("tree-numpy-target-torch-draft", "model", 8, draft_arrays="torch", tree=True))
    return cases
