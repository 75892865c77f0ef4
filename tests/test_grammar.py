"""Constraints under speculation: the joint law of the masked target, identity with plain decoding, valid answers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider import Constraint, Engine, MockBackend, MockConfig
from outrider.backends.mock import mock_tokenizer
from outrider.draft.lookup import ScriptedDrafter
from outrider.engine.snapshot import Snapshot
from outrider.errors import RequestError
from outrider.sampling import warp
from outrider.spec import router
from outrider.types import Drafts, Request, SamplingParams

from cases import MixedDrafter, TreeDrafter, repeatable_seeds
from oracle import SIGNIFICANCE, distribution, p_value

A, B, C, D, E, END = range(6)  # letters of a small vocabulary; the last token ends an answer
VOCAB = 6
PROMPT = [A, E, C]
LENGTH = 6
TARGET = MockConfig(vocab_size=VOCAB, seed=3, sharpness=1.2, eos_ids=(END,))
DRAFT = replace(TARGET, drift=1.0)
PATTERN = "(a(b|cc)[de]?)+"
# The same by hand: what may follow in each state, and where it leads. 2 and 4 may end; 0 and 3 leave no choice.
MACHINE: dict[int, dict[int, int]] = {
    0: {A: 1},
    1: {B: 2, C: 3},
    2: {D: 4, E: 4, A: 1, END: 5},
    3: {C: 2},
    4: {A: 1, END: 5},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "bare": {},
    "shaped": {"temperature": 1.4, "top_p": 0.9, "repetition_penalty": 1.3, "logit_bias": {A: -1.0}},
}


def scripted(tokens: Sequence[int], width: int) -> list[int]:
    """Often against the pattern."""
    return [(tokens[-1] + place + 1) % VOCAB for place in range(width)]


DRAFTERS: dict[str, Any] = {
    "model": lambda: MockBackend(DRAFT),
    "scripted": lambda: ScriptedDrafter(scripted),
    "mixed": lambda: MixedDrafter(VOCAB),  # samples from rows that know nothing of the constraint
    "trees": lambda: TreeDrafter(VOCAB),
    "ngram": lambda: "ngram",
}


def engine_of(drafter: str, *, arrays: str = "numpy", **settings: Any) -> Engine:
    draft = MockBackend(DRAFT, arrays=arrays) if drafter == "model" else DRAFTERS[drafter]()  # type: ignore[arg-type]
    return Engine.load(
        MockBackend(TARGET, arrays=arrays),  # type: ignore[arg-type]
        draft=draft,
        tokenizer=mock_tokenizer(VOCAB),
        max_batch=1000,
        **settings,
    )


@cache
def masked_law(name: str, min_tokens: int = 0) -> np.ndarray:
    """P(t1, ..., t6) of the masked target, by enumeration; END fills up what ended early."""
    target, params = MockBackend(TARGET), SamplingParams(**SETTINGS[name])
    law = np.zeros((VOCAB,) * LENGTH)

    def walk(state: int, output: tuple[int, ...], chance: float) -> None:
        if len(output) == LENGTH or state == 5:
            law[output + (END,) * (LENGTH - len(output))] += chance
            return
        allowed = MACHINE[state]
        row = target.logits_after([*PROMPT, *output])
        masked = [float(x) if token in allowed else -np.inf for token, x in enumerate(row)]
        if len(output) < min_tokens:
            masked[END] = -np.inf
        for token, p in enumerate(distribution(masked, params, PROMPT, output)):
            if p > 0:
                walk(allowed[token], (*output, token), chance * float(p))

    walk(0, (), 1.0)
    return law


def measure(
    drafter: str,
    rule: str,
    width: int,
    tree: bool,
    count: int,
    settings: str = "bare",
    arrays: str = "numpy",
    min_tokens: int = 0,
) -> float:
    engine = engine_of(drafter, arrays=arrays, width=width)
    params = SamplingParams(seed=9, accept=rule, **SETTINGS[settings])  # type: ignore[arg-type]
    constraint = Constraint.regex(PATTERN)
    requests = [
        Request(
            prompt=PROMPT,
            sampling=params,
            max_tokens=LENGTH,
            min_tokens=min_tokens,
            choice=choice,
            tree=tree,
            constraint=constraint,
        )
        for choice in range(count)
    ]
    with repeatable_seeds():
        outputs = [result.token_ids for result in engine.generate(requests)]
    assert engine.statistics.drafted > count / 2, "plain decoding proves nothing"
    padded = [output + [END] * (LENGTH - len(output)) for output in outputs]
    law = masked_law(settings, min_tokens)
    ends = (
        p_value([o[:4] for o in padded], law.sum(axis=(4, 5))),
        p_value([o[2:] for o in padded], law.sum(axis=(0, 1))),
    )
    return min(ends)


CASES = [
    ("model", "rejection", 4, False, "bare"),
    ("model", "coupled", 4, False, "shaped"),
    ("scripted", "rejection", 3, False, "bare"),
    ("mixed", "rejection", 5, False, "bare"),
    ("mixed", "rejection", 8, True, "bare"),
    ("trees", "rejection", 8, True, "shaped"),
    ("model", "rejection", 8, True, "shaped"),
]


@pytest.mark.parametrize(("drafter", "rule", "width", "tree", "settings"), CASES)
def test_the_law_is_that_of_the_masked_target(drafter: str, rule: str, width: int, tree: bool, settings: str) -> None:
    assert measure(drafter, rule, width, tree, 4_000, settings) > SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.parametrize("arrays", ["numpy", "torch"])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_whole_grid(drafter: str, rule: str, tree: bool, settings: str, arrays: str) -> None:
    assert measure(drafter, rule, 6, tree, 20_000, settings, arrays) > SIGNIFICANCE


@pytest.mark.parametrize("drafter", ["model", "mixed"])
def test_the_law_when_an_answer_may_not_end_early(drafter: str) -> None:
    assert measure(drafter, "rejection", 4, False, 4_000, min_tokens=4) > SIGNIFICANCE


def test_a_sampled_token_cut_because_it_is_forbidden_would_break_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 16: the cut of certain proposals, done to sampled ones."""

    def cut_anything(self: Any, name: str, *rest: Any) -> Drafts:
        drafts = ask(self, name, *rest)
        target, jobs, _, _ = rest
        probs, drafts.probs = drafts.probs, None
        counts = list(drafts.counts)
        router._cut(target, drafts, router._allowed(jobs, drafts))
        starts = np.cumsum(counts) - counts
        kept = [start + place for start, count in zip(starts, drafts.counts, strict=True) for place in range(count)]
        drafts.probs = None if probs is None else probs[kept]
        return drafts

    ask = router.Router._ask
    monkeypatch.setattr(router.Router, "_ask", cut_anything)
    assert measure("mixed", "rejection", 5, False, 4_000) < SIGNIFICANCE


def test_a_mask_of_another_position_would_break_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    constrain = warp._constrain

    def late(xp: Any, x: Any, rows: Any, history: Any, faults: Any) -> None:
        constrain(xp, x, [row for row in rows if not history(row)[1]], history, faults)

    monkeypatch.setattr(warp, "_constrain", late)
    with pytest.raises(Exception, match="against the constraint"):
        measure("scripted", "rejection", 3, False, 100)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["near", "far"]}, "maxItems": 3},
        "at": {"type": ["boolean", "null"]},
    },
    "required": ["name", "age", "tags", "at"],
    "additionalProperties": False,
}


def check_schema(text: str) -> None:
    value = json.loads(text)
    assert value.keys() == {"name", "age", "tags", "at"}
    assert len(value["name"]) <= 12 and 0 <= value["age"] <= 150
    assert len(value["tags"]) <= 3 and set(value["tags"]) <= {"near", "far"} and value["at"] in (True, False, None)


def test_json_of_a_schema_is_valid_every_time() -> None:
    engine = Engine.load("mock-text", max_batch=200)
    request = Request(
        prompt="Who?",
        sampling=SamplingParams(temperature=1.0),
        max_tokens=300,
        constraint=Constraint.json_schema(SCHEMA),
    )
    results = engine.generate([request] * 200)
    for result in results:
        assert result.finish_reason == "stop"
        check_schema(result.text)
    assert engine.statistics.drafters["forced"].accepted > 1000
    assert engine.statistics.drafters["model"].accepted > 100
    assert len({result.text for result in results}) > 190


WAYS: list[dict[str, Any]] = [
    {"width": 1},
    {"width": 5},
    {"width": 8, "tree": True},
    {},
    {"method": "ngram", "width": 4},
    {"method": "suffix", "width": 4},
    {"method": "none"},
]
CONSTRAINTS = [
    Constraint.json_schema(SCHEMA),
    Constraint.regex(r"(yes|no|maybe)( [a-z]{2,5}){3,6}\."),
    Constraint.grammar('start: item ("," item)* "!"\nitem: "x" NUMBER\nNUMBER: /[0-9]{1,3}/'),
]


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda constraint: constraint.kind)
@pytest.mark.parametrize("run_ahead", [False, True])
def test_the_same_tokens_as_plain_decoding(constraint: Constraint, run_ahead: bool) -> None:
    engine = Engine.load(
        "mock-text", draft=["ngram", "suffix", MockBackend(_draft())], run_ahead="always" if run_ahead else False
    )
    for settings in ({"temperature": 0}, {"temperature": 1.0, "seed": 4}, {"temperature": 1.0, "seed": 5, "top_k": 9}):
        common = {"max_tokens": 120, "constraint": constraint, "logprobs": 2, **settings}
        plain = engine.generate("Hello", width=0, **common)
        for way in WAYS:
            result = engine.generate("Hello", **common, **way)
            assert result.token_ids == plain.token_ids and result.text == plain.text, way
            assert result.logprobs == plain.logprobs


def _draft() -> MockConfig:
    from outrider.engine.presets import PRESETS

    config = PRESETS["mock-text"].draft
    assert isinstance(config, MockConfig)
    return config


def test_the_end_of_what_a_constraint_allows_is_the_end_of_the_answer() -> None:
    engine = Engine.load("mock-text")
    result = engine.generate("?", constraint=Constraint.regex("(yes|no)"), max_tokens=50)
    assert result.text in ("yes", "no") and result.finish_reason == "stop"
    free = engine.generate("?", constraint=Constraint.regex("( [a-z]+)+"), max_tokens=400, seed=2, logit_bias={256: 3})
    assert re.fullmatch("( [a-z]+)+", free.text) and free.token_ids[-1] == 256  # it chose to end
    cut = engine.generate("?", constraint=Constraint.json_schema(SCHEMA), max_tokens=5)
    assert cut.finish_reason == "length" and len(cut.token_ids) == 5


def test_any_json_object() -> None:
    engine = Engine.load("mock-text")
    for seed in range(5):
        result = engine.generate("?", constraint=Constraint.json(), max_tokens=400, seed=seed)
        if result.finish_reason == "stop":
            assert isinstance(json.loads(result.text), dict)


def test_a_model_without_an_end_stops_where_nothing_may_follow() -> None:
    engine = Engine.load("mock", width=3)
    assert engine.info.eos_ids == ()
    for rule in ("rejection", "coupled"):
        for result in engine.generate(
            [" the"] * 30, constraint=Constraint.regex("[ab]{4}"), max_tokens=20, accept=rule
        ):
            assert re.fullmatch("[ab]{4}", result.text) and result.finish_reason == "stop"


@pytest.mark.parametrize(
    ("constraint", "said"),
    [
        (lambda: Constraint.regex("["), "regular expression cannot be used: unclosed"),
        (lambda: Constraint.json_schema({"type": "thing"}), "JSON schema cannot be used: Invalid type: thing"),
        (lambda: Constraint("json_schema", "{"), "JSON schema cannot be used"),
        (lambda: Constraint.grammar("start: missing"), "grammar cannot be used"),
        (lambda: Constraint("xml", "x"), "json, json_schema, regex or grammar"),  # type: ignore[arg-type]
        (lambda: Constraint.regex(""), "takes its text"),
        (lambda: Constraint.grammar("start: start"), "no text satisfies it"),
    ],
)
def test_wrong_constraints_are_told(constraint: Any, said: str) -> None:
    engine = Engine.load("mock-text")
    with pytest.raises(RequestError, match=said) as caught:
        engine.generate("?", constraint=constraint(), max_tokens=5)
    assert caught.value.param == "constraint" and "\n" not in caught.value.message
    assert engine.generate("?", max_tokens=3, ignore_eos=True).token_ids  # still serving


def test_constraints_need_a_tokenizer_and_an_end() -> None:
    engine = Engine.load(MockBackend(TARGET))
    with pytest.raises(RequestError, match="needs a tokenizer"):
        engine.generate(PROMPT, constraint=Constraint.json())
    with pytest.raises(RequestError, match="drop one"):
        Engine.load("mock-text").generate("?", constraint=Constraint.json(), ignore_eos=True)


def test_a_constraint_that_leaves_nothing_ends_the_request_alone() -> None:
    engine = Engine.load("mock-text")
    with pytest.raises(RequestError, match="no token to choose from"):
        engine.generate("?", constraint=Constraint.regex("[a-z]"), banned=list(range(256)), max_tokens=5)
    assert engine.num_requests == 0


def test_an_answer_goes_on_inside_its_constraint_after_a_snapshot(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "constraint": Constraint.json_schema(SCHEMA),
        "max_tokens": 200,
        "seed": 3,
        "logprobs": 1,
    }
    whole = Engine.load("mock-text").generate("?", **settings)
    engine = Engine.load("mock-text")
    stream = engine.stream("?", **settings)
    for _ in range(3):
        next(stream)
    engine.snapshot(tmp_path / "state")
    resumed = Engine.load("mock-text").resume(Snapshot.read(tmp_path / "state"))[0]
    last = list(resumed)[-1].result
    assert last is not None and last.token_ids == whole.token_ids
    assert last.logprobs == whole.logprobs and not last.statistics.fallbacks


def test_forced_tokens_are_judged() -> None:
    """They are drafts like any other: a target that finds them impossible still has the last word."""
    seen: list[int] = []

    class Watching(MockBackend):
        def score(self, spans: Any, hidden: Sequence[int] = ()) -> Any:
            seen.extend(spans.rows)
            return super().score(spans, hidden)

    engine = Engine.load(
        Watching(replace(_draft(), drift=0.0)), tokenizer=mock_tokenizer(384, text=True), draft="ngram", width=6
    )
    result = engine.generate("?", constraint=Constraint.regex("wonderful( [a-c])+"), max_tokens=30, temperature=1.0)
    assert result.text.startswith("wonderful")
    assert result.statistics.drafters["forced"].accepted >= 6 and max(seen) > 1  # each had its row
