"""From a request to a job: everything that can be wrong with a request is said here, before it costs a pass."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from numbers import Integral
from typing import Any

from outrider.backends.base import ModelInfo
from outrider.config import SpeculationConfig
from outrider.errors import (
    BackendError,
    ContextLengthError,
    EmptyPromptError,
    OutriderError,
    RequestError,
    TokenRangeError,
    UnknownMethodError,
)
from outrider.sampling.grammar import Grammars
from outrider.sampling.noise import seed_words
from outrider.tokenizer.base import ChatTokenizer, TextStream, Tokenizer
from outrider.types import FORCED, Constraint, Job, Prompt, Request, SamplingParams

LEAST = 16  # letters that the longest token of a vocabulary has at least, as far as we are concerned


class Intake:
    """Turns requests into jobs for one engine."""

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: Tokenizer | None,
        methods: Sequence[str],
        method: str,
        speculation: SpeculationConfig,
    ) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._methods = methods
        self._method = method
        self._speculation = speculation

    def job(self, request: Request, request_id: str, now: float) -> Job:
        """A job for the request, or a RequestError that says what to change."""
        tokens = self._encode(request.prompt)
        sampling = self._own(request.sampling)
        self._check_ids(request.stop_ids, "stop_ids")
        if request.stop and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer; give the engine one, or use stop_ids", param="stop")
        seed = fresh_seed() if sampling.seed is None else int(sampling.seed)
        eos = () if request.ignore_eos else self._info.eos_ids
        drafters = self._drafters(request)
        width, max_width, tree = self._shape(request)
        return Job(
            request=request,
            request_id=request_id,
            params=sampling,
            tokens=tokens,
            num_prompt=len(tokens),
            seed=seed,
            rule=sampling.rule,
            words=seed_words(seed, int(request.choice)),
            limit=self._limit(len(tokens), request.max_tokens),
            stop_ids=frozenset([*eos, *map(int, request.stop_ids)]),
            drafters=() if width == 0 or request.method == "none" else self._with_forced(request, drafters),
            width=width,
            max_width=max_width,
            tree=tree,
            arrival=now,
            deadline=None if request.deadline_s is None else now + request.deadline_s,
            text=None if self._tokenizer is None else TextStream(self._tokenizer, request.stop),
            min_length=len(tokens) + request.min_tokens if request.min_tokens else 0,
            grammar=None if request.constraint is None else self._grammars.matcher(request.constraint),
            logprobs=None if request.logprobs is None else [],
            prompt_logprobs=[None] * len(tokens) if request.prompt_logprobs else None,
            counts=dict.fromkeys(tokens, 0) if sampling.penalised else None,
        )

    @property
    def context(self) -> int:
        """The most tokens that a prompt and its answer may have."""
        return self._info.context

    def encode(self, text: str) -> list[int]:
        """The ids of a text prompt."""
        if self._tokenizer is None:
            raise RequestError("a text prompt needs a tokenizer; give token ids instead", param="prompt")
        self.check_text(text)
        return list(self._encode_text(self._tokenizer, text))

    def check_text(self, text: str) -> None:
        """Refuse what cannot fit whatever its tokens are, before the time is spent to find them."""
        if not isinstance(text, str) or len(text) <= 4 * LEAST * self._info.context:
            return  # the longest token need not be looked for, which takes a tenth of a second
        most = self._info.context * self._longest_token
        if len(text) > most:
            raise ContextLengthError(
                f"the prompt has {len(text)} letters; the context of {self._info.context} tokens holds at most {most}",
                param="prompt",
            )

    @cached_property
    def _longest_token(self) -> int:
        """Letters that one token can stand for, and some more: a tokenizer may drop spaces or join signs."""
        assert self._tokenizer is not None, "asked only where text is encoded"
        try:
            return 4 * max(LEAST, *(len(self._tokenizer.token_bytes(token)) for token in range(self._info.vocab_size)))
        except Exception:  # a tokenizer of somebody's own that cannot tell: encoding will
            return 1 << 32

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            prompt = self.encode(prompt)
        self._check_ids(prompt, "prompt")
        tokens = [int(token) for token in prompt]
        if not tokens:
            raise EmptyPromptError("the prompt has no tokens; give at least one", param="prompt")
        if len(tokens) >= self._info.context:
            raise ContextLengthError(
                f"the prompt has {len(tokens)} tokens and the context holds {self._info.context}, answer included; "
                f"shorten it to at most {self._info.context - 1}",
                param="prompt",
            )
        return tokens

    def _encode_text(self, tokenizer: Tokenizer, text: str) -> Sequence[int]:
        try:
            tokens = tokenizer.encode(text)
            len(tokens)
        except OutriderError:
            raise
        except Exception as error:
            raise BackendError(f"the tokenizer failed on the prompt: {type(error).__name__}: {error}") from error
        return tokens

    def _own(self, sampling: SamplingParams) -> SamplingParams:
        """Settings checked against the vocabulary, in collections nobody else can change."""
        self._check_ids(sampling.logit_bias, "logit_bias")
        self._check_ids(sampling.banned, "banned")
        if not sampling.logit_bias and isinstance(sampling.banned, tuple) and isinstance(sampling.processors, tuple):
            return sampling  # the usual case: nothing to copy, and jobs share one object
        return replace(
            sampling,
            logit_bias={int(token): float(bias) for token, bias in sampling.logit_bias.items()},
            banned=tuple({int(token) for token in sampling.banned}),
            processors=tuple(sampling.processors),
        )

    def _limit(self, prompt: int, max_tokens: int | None) -> int:
        """The length at which the answer ends."""
        context = self._info.context
        if max_tokens is None:
            return context
        if prompt + max_tokens > context:
            raise ContextLengthError(
                f"{prompt} prompt tokens and max_tokens={max_tokens} exceed the context of {context}; "
                f"ask for at most {context - prompt}",
                param="max_tokens",
            )
        return prompt + max_tokens

    def _drafters(self, request: Request) -> tuple[str, ...]:
        """Who drafts for the request."""
        method = self._method if request.method is None else request.method
        names = [name.strip() for name in method.split(",")] if isinstance(method, str) else [method]
        if len(set(names)) < len(names):
            raise RequestError(f"method names a draft twice: {method!r}; leave one out", param="method")
        if not all(name in self._methods for name in names) or ("none" in names and len(names) > 1):
            offered = " or ".join(self._methods)
            cure = "; load a draft with draft=" if self._method == "none" else ""
            raise UnknownMethodError(
                f"this engine drafts by {self._method}, not by {method!r}; ask for {offered}{cure}", param="method"
            )
        if self._method == "none" and request.width:
            raise RequestError(
                f"width={request.width} needs a draft and this engine has none; load one with draft=, or drop width",
                param="width",
            )
        return tuple(dict.fromkeys(name for name in names if name != "none"))

    def _shape(self, request: Request) -> tuple[int | None, int | None, bool | None]:
        """Width, cap and tree of the request, or else the engine's."""
        given, tree = self._speculation, self._speculation.tree if request.tree is None else request.tree
        if request.width is not None:
            return request.width, None, tree
        if request.max_width is not None and given.width is not None:
            return min(given.width, request.max_width), None, tree
        return given.width, request.max_width, tree

    def _with_forced(self, request: Request, drafters: tuple[str, ...]) -> tuple[str, ...]:
        """Of a constrained answer, what must come is proposed before anybody guesses."""
        return drafters if request.constraint is None else (FORCED, *drafters)

    def compile(self, constraint: Constraint) -> None:
        """Get a constraint ready, which may take a while. Any thread may do it, before it asks for a job."""
        self._grammars.compile(constraint)

    @cached_property
    def _grammars(self) -> Grammars:
        tokenizer, info = self._tokenizer, self._info
        if tokenizer is None:
            raise RequestError("a constraint needs a tokenizer; give the engine one", param="constraint")
        encode = tokenizer.encode
        if isinstance(tokenizer, ChatTokenizer):
            encode = partial(tokenizer.encode, add_special=False)
        return Grammars(tokenizer.token_bytes, encode, info.vocab_size, info.eos_ids)

    def _check_ids(self, ids: Iterable[Any], param: str) -> None:
        size = self._info.vocab_size
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, Integral):
                raise TokenRangeError(f"{param} takes token ids (whole numbers), got {token!r}", param=param)
            if not 0 <= int(token) < size:
                raise TokenRangeError(
                    f"{param} has token id {token}; this vocabulary runs from 0 to {size - 1}", param=param
                )


def fresh_seed() -> int:
    """A seed for a request that brings none. 53 bits: readers of JSON round larger numbers."""
    return secrets.randbits(53)


def is_one_prompt(prompt: object) -> bool:
    """A text, a Request or a sequence of ids is one prompt; a sequence of those is several."""
    if isinstance(prompt, (str, Request)) or not isinstance(prompt, Sequence):
        return True
    return not prompt or isinstance(prompt[0], Integral)
