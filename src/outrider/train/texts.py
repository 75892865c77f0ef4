"""Texts to train on: prompts from files or invented, and what the target itself says to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from outrider.config import SchedulerConfig
from outrider.engine.engine import Engine
from outrider.errors import ConfigError, OutriderError
from outrider.train.settings import TrainSettings
from outrider.types import FinishReason, Request, SamplingParams

FILE = "texts.npz"
AT_ONCE = 2048  # prompts that the engine is given together
SCHEDULING = SchedulerConfig(max_batch=256, prefill_chunk=8192, together=64)  # nobody waits for a first token
MOST_INVENTED = 96  # tokens of a prompt
SHORTEST = 12  # letters of one
LEAST_SAID = 8  # tokens of an answer that teaches something
MARK = "@@@"  # where the user's words stand in a rendered template

Told = Callable[[int, int], None]  # how many of how many are done


class Texts(NamedTuple):
    """Prompts with their answers. The last `held_out` are not trained on."""

    tokens: list[list[int]]
    num_prompts: list[int]  # tokens of each that are its prompt

    def save(self, path: Path) -> None:
        flat = np.concatenate([np.asarray(text, dtype=np.int32) for text in self.tokens])
        lengths = np.asarray([len(text) for text in self.tokens], dtype=np.int32)
        beside = path.with_suffix(".tmp.npz")
        np.savez(beside, flat=flat, lengths=lengths, prompts=np.asarray(self.num_prompts, dtype=np.int32))
        beside.replace(path)

    @classmethod
    def load(cls, path: Path) -> Texts:
        with np.load(path) as held:
            ends = np.cumsum(held["lengths"])
            flat = held["flat"]
            tokens = [part.tolist() for part in np.split(flat, ends[:-1])]
            return cls(tokens, held["prompts"].tolist())


def prompts_from(engine: Engine, files: Sequence[str], count: int) -> list[list[int]]:
    """The first `count` prompts of some files, as tokens. A line of .jsonl holds one under one of KEYS, where `tokens`
    are ids; any other file has a prompt a line."""
    prompts: list[list[int]] = []
    for name in files:
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"there is no file of prompts at {path}", param="prompts")
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            if len(prompts) == count:
                return prompts
            if line.strip():
                prompts.append(_encoded(engine, _parsed(path, number, line)))
    if not prompts:
        raise ConfigError("the files hold no prompts", param="prompts")
    return prompts


def _parsed(path: Path, number: int, line: str) -> Any:
    """A text, messages, or token ids."""
    if path.suffix not in (".jsonl", ".json"):
        return line
    try:
        value = json.loads(line)
        if isinstance(value, dict):
            value = next(value[key] for key in KEYS if value.get(key))
        if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
            value = value[0]  # turns of a conversation: the first is asked
        if not _is_prompt(value):
            raise ValueError("neither a text nor messages nor token ids")
    except (ValueError, StopIteration) as error:
        raise ConfigError(
            f"{path}, line {number}: wanted a text, or an object with one of {', '.join(KEYS)}", param="prompts"
        ) from error
    return value


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value)
    if not isinstance(value, list) or not value:
        return False
    are_ids = all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in value)
    return are_ids or all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
        for one in value
    )


KEYS = ("messages", "turns", "prompt", "text", "question", "tokens")


def _encoded(engine: Engine, prompt: Any) -> list[int]:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if engine.tokenizer is not None and getattr(engine.tokenizer, "has_chat", False):
        return engine.encode_chat(messages)
    return engine.encode(" ".join(message["content"] for message in messages))


def invented(
    engine: Engine,
    count: int,
    seed: int,
    told: Told = lambda done, of: None,
    beginnings: Sequence[str] = ("",),
) -> list[list[int]]:
    """Prompts that an instruct model makes up: its chat template up to where the user speaks is all it is given, and
    the first words, where there are `beginnings`."""
    tokenizer: Any = engine.tokenizer
    if tokenizer is None or not tokenizer.has_chat:
        raise ConfigError("the model has no chat template to invent prompts from; name files with --prompts")
    before, _, after = tokenizer.chat([{"role": "user", "content": MARK}], add_generation_prompt=False).partition(MARK)
    bare, end = [tokenizer.encode(before + one, add_special=False) for one in beginnings], after.strip()
    found: dict[str, None] = {}  # in order, each once
    number = 0
    while len(found) < count and number < 4 * count:
        numbers = range(number, number + min(AT_ONCE, count - len(found) + 4))
        number += len(numbers)
        requests = [
            Request(
                prompt=bare[one % len(bare)],
                max_tokens=MOST_INVENTED,
                sampling=SamplingParams(temperature=1.0, top_p=0.95, seed=seed + one),
                stop=(end,) if end else (),
                width=0,
            )
            for one in numbers
        ]
        for one, result in zip(numbers, engine.generate(requests), strict=True):
            text = f"{beginnings[one % len(bare)]}{result.text}".strip()
            if len(text) >= SHORTEST and result.finish_reason == FinishReason.STOP:
                found[text] = None
        told(min(count, len(found)), count)
    if len(found) < min(count, 2):
        raise OutriderError("the model invents no prompts from its bare chat template; name files with --prompts")
    return [engine.encode_chat([{"role": "user", "content": text}]) for text in list(found)[:count]]


def longest_prompt(settings: TrainSettings) -> int:
    """Tokens: a text has room for a few more, which are said to it."""
    return settings.length - LEAST_SAID


def answer(
    engine: Engine, prompts: Sequence[Sequence[int]], settings: TrainSettings, told: Told = lambda done, of: None
) -> Texts:
    """The target's own answers: every second greedy, the others sampled."""
    texts = Texts([], [])
    prompts = [prompt for prompt in prompts if len(prompt) <= longest_prompt(settings)]
    for start in range(0, len(prompts), AT_ONCE):
        some = prompts[start : start + AT_ONCE]
        requests = [
            Request(
                prompt=list(prompt),
                max_tokens=settings.max_tokens,
                sampling=SamplingParams(
                    temperature=settings.temperature if number % 2 else 0.0, seed=settings.seed + number
                ),
                width=0,
            )
            for number, prompt in enumerate(some, start)
        ]
        for request, result in zip(requests, engine.generate(requests), strict=True):
            if len(result.token_ids) >= LEAST_SAID:
                texts.tokens.append([*request.prompt, *result.token_ids][: settings.length])
                texts.num_prompts.append(len(request.prompt))
        told(min(len(prompts), start + AT_ONCE), len(prompts))
    if not texts.tokens:
        raise OutriderError(
            f"the target said next to nothing to all of the prompts that have less than {settings.length} tokens; "
            "give it others, or a larger --length"
        )
    return texts
