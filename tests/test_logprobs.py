"""Log-probabilities: the target's own, before any control, right inside accepted blocks; and answers held open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider import Engine, MockBackend, MockConfig
from outrider.backends.mock import mock_tokenizer
from outrider.backends.paged_mock import PagedMock
from outrider.config import SchedulerConfig
from outrider.errors import RequestError
from outrider.kv.pages import Pages
from outrider.sched.policies import Policy
from outrider.types import Job, Request, SamplingParams, TokenLogprob

from cases import TreeDrafter

TARGET = MockConfig(vocab_size=24, padding=3, seed=5, sharpness=1.5, eos_ids=(23,))
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def truth(target: MockBackend, context: list[int], token: int, top: int) -> TokenLogprob:
    row = np.asarray(target.logits_after(context)[: TARGET.vocab_size], dtype=np.float64)
    row = row - np.log(np.exp(row - row.max()).sum()) - row.max()
    best = sorted(range(len(row)), key=lambda other: (-row[other], other))[:top]
    return TokenLogprob(token, float(row[token]), [(other, float(row[other])) for other in best])


def same(told: Any, known: TokenLogprob) -> bool:
    tops = [(token, pytest.approx(value, abs=1e-4)) for token, value in known.top]
    return told.token == known.token and told.logprob == pytest.approx(known.logprob, abs=1e-4) and told.top == tops


class Bold(Policy):
    """Lets anybody in, so that pages run out later."""

    def reserve(self, job: Job) -> int:
        return 1


WAYS: list[dict[str, Any]] = [
    {"width": 0},
    {"width": 4, "method": "model"},
    {"width": 8, "method": "model", "tree": True},
    {"width": 8, "method": "trees", "tree": True},
    {"width": 3, "method": "ngram"},
]


@pytest.mark.parametrize("arrays", ["numpy", "torch"])
@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 1.2, "top_k": 5, "presence_penalty": 0.7}])
def test_of_every_token_in_every_kind_of_round(settings: dict[str, Any], arrays: Any) -> None:
    target = MockBackend(TARGET, arrays=arrays)
    draft = MockBackend(replace(TARGET, drift=0.4), arrays=arrays)
    engine = Engine.load(target, draft=[draft, TreeDrafter(24), "ngram"], width=4)
    requests = [
        Request(prompt=PROMPT, max_tokens=20, ignore_eos=True, logprobs=3, sampling=SamplingParams(**settings), **way)
        for way in WAYS
    ]
    results = engine.generate(requests)
    assert any(result.statistics.accepted for result in results)
    for result in results:
        assert result.logprobs is not None and len(result.logprobs) == len(result.token_ids) == 20
        context = list(PROMPT)
        for token, told in zip(result.token_ids, result.logprobs, strict=True):
            assert same(told, truth(target, context, token, 3))
            context.append(token)


def test_events_carry_those_of_their_round() -> None:
    engine = Engine.load(MockBackend(TARGET), draft=MockBackend(replace(TARGET, drift=0.2)), width=4)
    events = list(engine.stream(PROMPT, max_tokens=15, logprobs=0, temperature=0, ignore_eos=True))
    for event in events:
        assert event.logprobs is not None
        assert [told.token for told in event.logprobs] == event.tokens and all(not told.top for told in event.logprobs)
    assert [told for event in events for told in event.logprobs or []] == events[-1].result.logprobs  # type: ignore[union-attr]
    assert engine.generate(PROMPT, max_tokens=3).logprobs is None


@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_the_whole_prompt_can_be_scored(chunk: int) -> None:
    target = MockBackend(TARGET)
    engine = Engine.load(target, draft="ngram", width=3, prefill_chunk=chunk)
    others = [Request(prompt=[7, 7, 2], max_tokens=9)]
    scored = Request(prompt=PROMPT, max_tokens=4, logprobs=2, prompt_logprobs=True)
    result = engine.generate([*others, scored])[1]
    told = result.prompt_logprobs
    assert told is not None and told[0] is None and len(told) == len(PROMPT)
    for place, entry in enumerate(told[1:], 1):
        assert same(entry, truth(target, PROMPT[:place], PROMPT[place], 2))
    assert engine.generate([5], max_tokens=1, prompt_logprobs=True).prompt_logprobs == [None]


def test_a_known_beginning_is_scored_all_the_same() -> None:
    target = PagedMock(TARGET, Pages(32, 4))
    engine = Engine(target)
    engine.generate(PROMPT, max_tokens=3)
    assert engine.generate(PROMPT, max_tokens=3) and engine.metrics.cached_tokens > 0
    told = engine.generate(PROMPT, max_tokens=3, prompt_logprobs=True).prompt_logprobs
    assert told is not None
    for place, entry in enumerate(told[1:], 1):
        assert same(entry, truth(target, PROMPT[:place], PROMPT[place], 0))


def test_more_alternatives_than_there_are() -> None:
    engine = Engine.load(MockBackend(MockConfig(vocab_size=5)))
    told = engine.generate([1], max_tokens=2, logprobs=20).logprobs
    assert told is not None and [len(entry.top) for entry in told] == [5, 5]
    assert sum(np.exp(value) for _, value in told[0].top) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("wrong", [-1, 21, 1.5, True, "2"])
def test_wrong_numbers_of_alternatives(wrong: Any) -> None:
    with pytest.raises(RequestError, match="logprobs"):
        Request(prompt=[1], logprobs=wrong)


@pytest.mark.parametrize("way", [{"width": 0}, {"width": 4}, {"width": 8, "tree": True}])
def test_an_answer_does_not_end_before_its_time(way: dict[str, Any]) -> None:
    engine = Engine.load(MockBackend(TARGET), draft=MockBackend(replace(TARGET, drift=0.3)), width=4)
    hurried: dict[str, Any] = {"logit_bias": {23: 6.0}, "seed": 3}
    free = engine.generate(PROMPT, max_tokens=40, **hurried)
    assert len(free.token_ids) < 12 and free.finish_reason == "stop"
    held = engine.generate(PROMPT, max_tokens=40, min_tokens=12, **hurried, **way)
    assert len(held.token_ids) >= 12 and 23 not in held.token_ids[:12]
    assert held.token_ids == engine.generate(PROMPT, max_tokens=40, min_tokens=12, width=0, **hurried).token_ids


def test_stop_strings_wait_too() -> None:
    engine = Engine.load(MockBackend(MockConfig(seed=7)), tokenizer=mock_tokenizer(32))
    whole = engine.generate(" the rider", max_tokens=30, seed=2)
    pieces = [mock_tokenizer(32).token_bytes(token).decode(errors="replace") for token in whole.token_ids]
    repeated = next(piece for piece in pieces[8:] if piece in pieces[:8] and piece.strip())
    early = engine.generate(" the rider", max_tokens=30, seed=2, stop=[repeated])
    late = engine.generate(" the rider", max_tokens=30, seed=2, stop=[repeated], min_tokens=8)
    assert len(early.token_ids) <= 8 < len(late.token_ids) <= 30
    with pytest.raises(RequestError, match="more than max_tokens"):
        Request(prompt=[1], min_tokens=5, max_tokens=4)


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_a_prompt_is_scored_through_preemption(preempt: Any) -> None:
    target = PagedMock(TARGET, Pages(20, 4))
    engine = Engine(target, scheduling=SchedulerConfig(prefill_chunk=3, preempt=preempt, policy=Bold()))
    requests = [
        Request(prompt=PROMPT, max_tokens=60, logprobs=1, prompt_logprobs=True, ignore_eos=True, choice=index)
        for index in range(4)
    ]
    results = engine.generate(requests)
    assert engine.statistics.preemptions > 0
    for result in results:
        assert result.prompt_logprobs is not None
        for place, entry in enumerate(result.prompt_logprobs[1:], 1):
            assert same(entry, truth(target, PROMPT[:place], PROMPT[place], 1))
