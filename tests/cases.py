"""Engines and generations for the proofs of the law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.backends.mock import MockBackend
from outrider.config import MockConfig
from outrider.draft.lookup import ScriptedDrafter
from outrider.engine.engine import Engine
from outrider.types import Request, SamplingParams

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
class Case:
    """One setting of which the law is proven."""

    name: str
    draft: str = "model"  # model, scripted, ngram or none
    width: int = 2
    rule: str = "rejection"
    controls: dict[str, Any] = field(default_factory=dict)
    target: MockConfig = TARGET
    draft_config: MockConfig = DRAFT
    arrays: str = "numpy"
    draft_arrays: str = "numpy"
    prefill_chunk: int = 512
    max_batch: int = 1000

    def params(self, seed: int = 5) -> SamplingParams:
        return SamplingParams(seed=seed, accept=self.rule, **self.controls)

    def engine(self) -> Engine:
        drafts = {
            "none": lambda: "none",
            "ngram": lambda: "ngram",
            "scripted": lambda: ScriptedDrafter(scripted),
            "model": lambda: MockBackend(self.draft_config, arrays=self.draft_arrays),
        }
        return Engine.load(
            MockBackend(self.target, arrays=self.arrays),
            draft=drafts[self.draft](),
            width=self.width,
            max_batch=self.max_batch,
            prefill_chunk=self.prefill_chunk,
        )

    def requests(self, count: int, seed: int = 5) -> list[Request]:
        params = self.params(seed)
        return [
            Request(prompt=PROMPT, sampling=params, max_tokens=LENGTH, choice=choice, width=self.width)
            for choice in range(count)
        ]

    def p_value(self, outputs: Sequence[Sequence[int]]) -> float:
        law = joint_law(MockBackend(self.target), PROMPT, self.params(), LENGTH)
        return law_p_value(outputs, law)


def measure(case: Case, count: int) -> float:
    """p-value of `count` generations against the enumerated law."""
    outputs = [result.token_ids for result in case.engine().generate(case.requests(count))]
    return case.p_value(outputs)


def grid() -> dict[str, Case]:
    """Every case of `make proofs`, by name."""
    cases = [Case("plain", draft="none", width=0)]
    for rule in ("rejection", "coupled"):
        for draft in ("model", "scripted", "ngram"):
            for width in (1, 2, 5):
                cases.append(Case(f"{draft}-k{width}-{rule}", draft, width, rule))
        for name, controls in CONTROLS.items():
            cases.append(Case(f"model-{name}-{rule}", "model", 2, rule, controls))
            cases.append(Case(f"scripted-{name}-{rule}", "scripted", 2, rule, controls))
        for width in (1, 5):
            cases.append(Case(f"model-together-k{width}-{rule}", "model", width, rule, CONTROLS["together"]))
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
    return {case.name: case for case in cases}
