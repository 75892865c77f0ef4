"""Every error a caller can provoke: class, code, param, status and message; the engine serves the next request."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from outrider.backends.base import ModelInfo
from outrider.backends.mock import MockBackend
from outrider.config import MockConfig, NgramConfig, SchedulerConfig, SpeculationConfig
from outrider.engine.engine import Engine
from outrider.errors import (
    BackendError,
    ConfigError,
    ContextLengthError,
    DraftError,
    EmptyPromptError,
    MissingDraftError,
    ModelSourceError,
    NotReadyError,
    OutriderError,
    RequestError,
    TokenRangeError,
    UnknownMethodError,
    VocabularyError,
)
from outrider.types import Request, SamplingParams

CONFIG = MockConfig(vocab_size=8, context=32)


def refuses(error: type[OutriderError], code: str, param: str | None, message: str, call: Callable[..., Any]) -> Any:
    return pytest.param(error, code, param, message, call, id=message[:60])


REQUESTS = [
    refuses(EmptyPromptError, "empty_prompt", "prompt", "the prompt is empty", lambda e: e.generate([])),
    refuses(
        EmptyPromptError, "empty_prompt", "prompt", "the prompt is empty; give at least one", lambda e: e.generate("")
    ),
    refuses(
        ContextLengthError,
        "context_length_exceeded",
        "prompt",
        "the prompt has 40 tokens and the context holds 32, answer included; shorten it to at most 31",
        lambda e: e.generate([1] * 40),
    ),
    refuses(
        ContextLengthError,
        "context_length_exceeded",
        "max_tokens",
        "2 prompt tokens and max_tokens=31 exceed the context of 32; ask for at most 30",
        lambda e: e.generate([1, 2], max_tokens=31),
    ),
    refuses(
        RequestError,
        "invalid_request",
        "width",
        "width must be at least 0, got -1",
        lambda e: e.generate([1], width=-1),
    ),
    refuses(
        RequestError,
        "invalid_request",
        "max_width",
        "width fixes what max_width caps; give one of them",
        lambda e: e.generate([1], width=2, max_width=3),
    ),
    refuses(
        RequestError,
        "invalid_request",
        "tree",
        "tree is True, False or None, got 'yes'",
        lambda e: e.generate([1], tree="yes"),
    ),
    refuses(
        UnknownMethodError,
        "unknown_method",
        "method",
        "this engine drafts by ngram, not by 'eagle'; ask for none or ngram",
        lambda e: e.generate([1], method="eagle"),
    ),
    refuses(
        TokenRangeError,
        "token_out_of_range",
        "prompt",
        "prompt has token id 8; this vocabulary runs from 0 to 7",
        lambda e: e.generate([1, 8]),
    ),
    refuses(TokenRangeError, "token_out_of_range", "prompt", "prompt has token id -1", lambda e: e.generate([-1])),
    refuses(TokenRangeError, "token_out_of_range", "prompt", "got 'x'", lambda e: e.generate([1, "x"])),
    refuses(
        TokenRangeError, "token_out_of_range", "banned", "banned has token id 9", lambda e: e.generate([1], banned=[9])
    ),
    refuses(
        TokenRangeError,
        "token_out_of_range",
        "logit_bias",
        "token id 99",
        lambda e: e.generate([1], logit_bias={99: 1}),
    ),
    refuses(TokenRangeError, "token_out_of_range", "stop_ids", "token id 8", lambda e: e.generate([1], stop_ids=[8])),
    refuses(RequestError, "invalid_request", "prompt", "a text prompt needs a tokenizer", lambda e: e.generate("hi")),
    refuses(RequestError, "invalid_request", "prompt", "text or a list of token ids, got int", lambda e: e.generate(5)),
    refuses(
        RequestError, "invalid_request", "stop", "stop strings need a tokenizer", lambda e: e.generate([1], stop="x")
    ),
    refuses(RequestError, "invalid_request", "stop", "non-empty strings, got ''", lambda e: e.generate([1], stop=[""])),
    refuses(
        RequestError,
        "invalid_request",
        "temprature",
        "did you mean temperature?",
        lambda e: e.generate([1], temprature=1),
    ),
    refuses(RequestError, "invalid_request", "n", "n is not a setting", lambda e: e.generate([1], n=3)),
    refuses(
        RequestError,
        "invalid_request",
        "max_tokens",
        "max_tokens was given beside a Request",
        lambda e: e.generate(Request(prompt=[1]), max_tokens=3),
    ),
    refuses(
        RequestError,
        "invalid_request",
        "top_p",
        "top_p was given beside sampling=",
        lambda e: e.generate([1], sampling=SamplingParams(), top_p=0.5),
    ),
    refuses(
        RequestError, "invalid_request", "max_tokens", "at least 1, got 0", lambda e: e.generate([1], max_tokens=0)
    ),
    refuses(
        RequestError,
        "invalid_request",
        "max_tokens",
        "whole number, got 1.5",
        lambda e: e.generate([1], max_tokens=1.5),
    ),
    refuses(
        RequestError,
        "invalid_request",
        "banned",
        "bans, logit bias, min_tokens, a constraint or processors leave no token",
        lambda e: e.generate([1], banned=range(8)),
    ),
    refuses(
        TokenRangeError,
        "token_out_of_range",
        "prompt",
        "prompt 1: prompt has token id 8",
        lambda e: e.generate([[1], [8]]),
    ),
    refuses(
        RequestError,
        "invalid_request",
        "request_id",
        "request_id 'a' is in use",
        lambda e: e.generate([Request(prompt=[1], request_id="a"), Request(prompt=[1], request_id="a")]),
    ),
    *(
        refuses(RequestError, "invalid_request", name, message, lambda e, n=name, v=value: e.generate([1], **{n: v}))
        for name, value, message in [
            ("temperature", -0.1, "temperature must be at least 0 and at most 1e+06, got -0.1"),
            ("temperature", math.nan, "temperature must be at least 0 and at most 1e+06, got nan"),
            ("temperature", 1e39, "temperature must be at least 0 and at most 1e+06, got 1e+39"),
            ("temperature", "hot", "temperature must be a number, got 'hot'"),
            ("top_k", 0, "top_k must be at least 1 (None is off), got 0"),
            ("top_p", 0.0, "top_p must be above 0 and at most 1, got 0.0"),
            ("top_p", 1.1, "top_p must be above 0 and at most 1, got 1.1"),
            ("min_p", -1, "min_p must be at least 0 and at most 1, got -1"),
            ("typical_p", 2, "typical_p must be above 0 and at most 1, got 2"),
            ("repetition_penalty", 0, "repetition_penalty must be at least 1e-06 and at most 1e+06, got 0"),
            ("presence_penalty", math.inf, "presence_penalty must be at least -1e+06 and at most 1e+06, got inf"),
            ("frequency_penalty", math.nan, "frequency_penalty must be at least -1e+06 and at most 1e+06, got nan"),
            ("seed", 1.5, "seed must be a whole number, got 1.5"),
            ("seed", 1 << 64, "seed must fit into 64 bits"),
            ("accept", "greedy", "accept must be auto, rejection or coupled, got 'greedy'"),
            ("deadline_s", math.inf, "deadline_s must be at least 0 and finite, got inf"),
            ("choice", -1, "choice must be at least 0, got -1"),
        ]
    ),
    refuses(
        RequestError,
        "invalid_request",
        "logit_bias[2]",
        "must be at least -1e+06 and at most 1e+06, got inf",
        lambda e: e.generate([1], logit_bias={2: math.inf}),
    ),
]


@pytest.mark.parametrize(("error", "code", "param", "message", "call"), REQUESTS)
def test_bad_requests(
    error: type[OutriderError], code: str, param: str | None, message: str, call: Callable[[Engine], Any]
) -> None:
    engine = Engine.load(MockBackend(CONFIG), draft="ngram")
    expected = engine.generate([1, 2, 1], seed=1, max_tokens=6).token_ids
    with pytest.raises(OutriderError) as caught:
        call(engine)
    assert type(caught.value) is error
    assert message in caught.value.message and "\n" not in caught.value.message
    assert (caught.value.code, caught.value.param, caught.value.status) == (code, param, 400)
    assert engine.num_requests == 0
    assert engine.generate([1, 2, 1], seed=1, max_tokens=6).token_ids == expected


def mock(**changes: Any) -> MockBackend:
    return MockBackend(replace(CONFIG, **changes))


CONFIGS = [
    refuses(
        VocabularyError,
        "vocabulary_mismatch",
        "draft",
        "the target mock-0 has 8 tokens and the draft mock-0 has 9; choose a draft with the target's vocabulary",
        lambda: Engine.load(mock(), draft=mock(vocab_size=9)),
    ),
    refuses(
        ConfigError,
        "invalid_config",
        "draft",
        "'model' names no draft; choose none, ngram, suffix, layerskip[:N], medusa:PATH, eagle[:PATH], MODEL",
        lambda: Engine.load(mock(), draft="model"),
    ),
    refuses(ConfigError, "invalid_config", "draft", "'' names no draft", lambda: Engine.load(mock(), draft="ngram,")),
    refuses(
        ConfigError,
        "invalid_config",
        "draft",
        "none drafts nothing, so it goes with no other draft; leave it out",
        lambda: Engine.load(mock(), draft="none,ngram"),
    ),
    refuses(
        ConfigError,
        "invalid_config",
        "draft",
        "the draft names ngram twice; leave one out",
        lambda: Engine.load(mock(), draft="ngram,suffix,ngram"),
    ),
    refuses(
        ConfigError,
        "invalid_config",
        "draft",
        "layerskip takes a number of layers, got 'layerskip:x'; write layerskip:8",
        lambda: Engine.load(mock(), draft="layerskip:x"),
    ),
    refuses(
        ConfigError,
        "invalid_config",
        "draft",
        "layerskip needs a transformer of two layers or more that runs on our own backend, not mock-0",
        lambda: Engine.load(mock(), draft="layerskip"),
    ),
    refuses(
        ConfigError,
        "invalid_config",
        "draft",
        "eagle heads need a transformer that runs on our own backend, not mock-0",
        lambda: Engine.load(mock(), draft="eagle"),
    ),
    refuses(
        ConfigError,
        "invalid_config",
        "draft",
        "medusa heads need a transformer that runs on our own backend, not mock-0",
        lambda: Engine.load(mock(), draft="medusa:heads"),
    ),
    refuses(
        ModelSourceError,
        "model_not_found",
        "target",
        "there is no file or folder 'gpt'; give a path, hf:org/name, pypi:package or one of: llama-3.1-8b",
        lambda: Engine.load("gpt"),
    ),
    refuses(
        ModelSourceError,
        "model_not_found",
        "draft",
        "there is no file or folder 'x'",
        lambda: Engine.load(mock(), draft="x"),
    ),
    refuses(
        ConfigError, "invalid_config", "draft", "a backend or a drafter, got int", lambda: Engine.load(mock(), draft=5)
    ),
    refuses(
        ConfigError,
        "invalid_config",
        "width",
        "width must be at least 0, got -2",
        lambda: Engine.load(mock(), width=-2),
    ),
    refuses(
        MissingDraftError,
        "missing_draft",
        "draft",
        "width 3 needs a draft; name one as the draft, or leave it out",
        lambda: Engine.load(mock(), width=3),
    ),
    refuses(
        ConfigError,
        "invalid_config",
        "vocab_size",
        "odd has 3 columns for 4 tokens",
        lambda: ModelInfo(name="odd", vocab_size=4, num_columns=3, context=9),
    ),
    refuses(
        ConfigError,
        "invalid_config",
        "context",
        "odd has a context of 1",
        lambda: ModelInfo(name="odd", vocab_size=4, num_columns=4, context=1),
    ),
    *(
        refuses(
            ConfigError, "invalid_config", "draft", f"did you mean {cure}", partial(Engine.load, mock(), draft=typo)
        )
        for typo, cure in (
            ("ngramm", "ngram"),
            ("NGRAM", "ngram"),
            ("suffx", "suffix"),
            ("medussa", "medusa:PATH"),
            ("eagel:x", "eagle[:PATH]"),
            ("layerskp:3", "layerskip"),
        )
    ),
    refuses(
        ConfigError,
        "invalid_config",
        "draft",
        "ngram takes nothing after a colon, got 'ngram:3'; write ngram",
        lambda: Engine.load(mock(), draft="ngram:3"),
    ),
    refuses(
        ConfigError,
        "invalid_config",
        "ngram",
        "ngram takes NgramConfig, got 3",
        lambda: Engine.load(mock(), draft="ngram", ngram=3),
    ),
    refuses(
        ConfigError,
        "invalid_config",
        "suffix",
        "suffix takes SuffixConfig, got ''",
        lambda: Engine.load(mock(), draft="suffix", suffix=""),
    ),
    refuses(
        ConfigError,
        "invalid_config",
        "max_width",
        "give one of them",
        lambda: Engine.load(mock(), draft="ngram", width=2, max_width=4),
    ),
    refuses(
        MissingDraftError,
        "missing_draft",
        "draft",
        "a tree needs a draft",
        lambda: Engine.load(mock(), draft="none", tree=True),
    ),
    refuses(
        RequestError,
        "invalid_request",
        "method",
        "names a draft twice",
        lambda: Engine.load(mock(), draft="ngram").generate([1], method="ngram,ngram"),
    ),
    refuses(ConfigError, "invalid_config", "tree", "True, False or None", lambda: Engine.load(mock(), tree="yes")),
    refuses(ConfigError, "invalid_config", "max_width", "at least 0", lambda: Engine.load(mock(), max_width=-1)),
    refuses(
        MissingDraftError,
        "missing_draft",
        "draft",
        "width 2 needs a draft; name one",
        lambda: Engine.load(mock(), draft="none", width=2),
    ),
    refuses(ConfigError, "invalid_config", "target", "got MockConfig", lambda: Engine.load(CONFIG)),
    refuses(ConfigError, "invalid_config", "target", "a name or a backend, got NoneType", lambda: Engine.load(None)),
    refuses(ConfigError, "invalid_config", "width", "whole number, got '4'", lambda: Engine.load(mock(), width="4")),
    refuses(ConfigError, "invalid_config", "max_batch", "at least 1, got 0", lambda: SchedulerConfig(max_batch=0)),
    refuses(
        ConfigError, "invalid_config", "prefill_chunk", "at least 1, got 0", lambda: SchedulerConfig(prefill_chunk=0)
    ),
    refuses(ConfigError, "invalid_config", "width", "whole number, got 2.5", lambda: SpeculationConfig(width=2.5)),
    refuses(
        ConfigError,
        "invalid_config",
        "ngram.max_n",
        "at least ngram.min_n (3), got 2",
        lambda: NgramConfig(min_n=3, max_n=2),
    ),
    refuses(ConfigError, "invalid_config", "mock.eos_ids", "8 is not a token", lambda: mock(eos_ids=(8,))),
    refuses(ConfigError, "invalid_config", "mock.vocab_size", "at least 1, got 0", lambda: mock(vocab_size=0)),
    refuses(ConfigError, "invalid_config", "mock.max_rewind", "at least 0, got -1", lambda: mock(max_rewind=-1)),
    refuses(
        ConfigError,
        "invalid_config",
        "mock.seconds_per_pass",
        "must not be negative",
        lambda: mock(seconds_per_pass=-1.0),
    ),
]


@pytest.mark.parametrize(("error", "code", "param", "message", "call"), CONFIGS)
def test_bad_configs(
    error: type[OutriderError], code: str, param: str | None, message: str, call: Callable[[], Any]
) -> None:
    with pytest.raises(OutriderError) as caught:
        call()
    assert type(caught.value) is error
    assert message in caught.value.message
    assert (caught.value.code, caught.value.param, caught.value.status) == (code, param, 400)


def test_a_width_without_a_draft_is_no_silent_no_op() -> None:
    engine = Engine.load(mock())
    with pytest.raises(RequestError, match="width=3 needs a draft and this engine has none") as caught:
        engine.generate([1], width=3)
    assert caught.value.param == "width"
    assert len(engine.generate([1], width=0, max_tokens=4).token_ids) == 4


def test_ids_of_array_libraries_are_ids() -> None:
    engine = Engine.load(mock())
    ids = np.asarray([1, 2])
    expected = engine.generate([1, 2], seed=1, max_tokens=4).token_ids
    assert engine.generate(list(ids), seed=1, max_tokens=4).token_ids == expected
    with pytest.raises(RequestError, match="got ndarray; pass its tolist"):
        engine.generate(ids)
    with pytest.raises(RequestError, match="prompt 0: a prompt is text or a list of token ids, got ndarray"):
        engine.generate([ids, ids])
    numbers = {"seed": np.int64(1), "max_tokens": np.int32(4), "temperature": np.float32(1), "choice": np.int64(0)}
    assert engine.generate([1, 2], **numbers).token_ids == expected
    with pytest.raises(RequestError, match="got bytes"):
        engine.generate(b"abc")


def test_vocabularies_that_differ_only_by_padding_work() -> None:
    engine = Engine.load(mock(padding=5), draft=mock(padding=2, drift=0.5), width=3)
    result = engine.generate([1], seed=2, max_tokens=20)
    assert result.statistics.drafted > 0
    assert result.token_ids == engine.generate([1], seed=2, max_tokens=20, width=0).token_ids


def test_a_closed_engine_says_so() -> None:
    with Engine.load(mock()) as engine:
        assert engine.is_ready
    with pytest.raises(NotReadyError, match="the engine is closed; build a new one") as caught:
        engine.generate([1])
    assert (caught.value.status, caught.value.code) == (503, "not_ready")


def test_the_class_decides_the_status() -> None:
    assert [c.status for c in (OutriderError, BackendError, DraftError, NotReadyError)] == [500, 500, 500, 503]
    codes = [c.code for c in OutriderError.__subclasses__()]
    assert len(codes) == len(set(codes))


def test_a_tokenizer_that_fails_on_the_prompt_is_said() -> None:
    class Mute:
        def encode(self, text: str) -> None:
            return None

        def token_bytes(self, token: int) -> bytes:
            return b""

    with pytest.raises(BackendError, match="the tokenizer failed on the prompt"):
        Engine.load(mock(), tokenizer=Mute()).generate("hi")
