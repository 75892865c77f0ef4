"""Each prompt once: an engine that drafts as it sees fit beside one that has no draft at all, by turns.

Within one engine (`bench`) a prompt that comes again is known already, and plain decoding pays for what drafts keep.
Here nothing is shared but the machine: what is measured is what somebody gains who turns drafting on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from outrider.bench.work import Work
from outrider.config import MockConfig, ModelConfig
from outrider.engine.engine import Engine
from outrider.engine.presets import PRESETS
from outrider.engine.runner import device_name

CACHE = 2**15  # tokens that each engine has room for on a GPU, where the first would else take nearly all memory
WARM = "Tell me about the weather in a place that you know."  # asked of both, before it counts


class Answered(NamedTuple):
    seconds: float  # a token
    tokens: list[int]


@dataclass(slots=True)
class Reading:
    """One kind of work. `gains` are of single prompts; `gain` is that of all of them together."""

    kind: str
    gains: list[float] = field(default_factory=list)
    tokens: int = 0
    plain_s: float = 0.0
    drafted_s: float = 0.0
    differing: int = 0  # answers that are not the same: where numbers of two passes of another size are as good

    @property
    def gain(self) -> float:
        return self.plain_s / self.drafted_s


def readings(
    model: str, draft: str | None, work: Work, *, limit: int, max_tokens: int, temperature: float, **loading: Any
) -> Iterator[Reading]:
    """draft: None for what the model comes with. loading: as for `Engine.load`."""
    named: dict[str, Any] = {} if draft is None else {"draft": draft}
    if _is_on_gpu(model):
        loading = {"cache_tokens": CACHE, **loading}
    settings = {"max_tokens": max_tokens, "temperature": temperature}
    with (
        Engine.load(model, draft="none", **loading) as plain,
        Engine.load(model, **named, **loading) as drafting,
    ):
        for engine in (plain, drafting):
            _ask(engine, WARM, 0, settings)
        for kind, prompts in work.items():
            reading = Reading(kind)
            for number, prompt in enumerate(islice(prompts, limit)):
                order = (plain, drafting) if number % 2 else (drafting, plain)
                found = {engine is drafting: _ask(engine, prompt, number, settings) for engine in order}
                _count(reading, found[False], found[True])
            yield reading


def _is_on_gpu(model: str) -> bool:
    is_mock = model in PRESETS and isinstance(PRESETS[model].target, MockConfig)
    return not is_mock and device_name(ModelConfig()) != "cpu"


def _count(reading: Reading, plain: Answered, drafted: Answered) -> None:
    count = len(drafted.tokens)
    reading.gains.append(plain.seconds / drafted.seconds)
    reading.tokens += count
    reading.plain_s += plain.seconds * count
    reading.drafted_s += drafted.seconds * count
    reading.differing += plain.tokens != drafted.tokens


def _ask(engine: Engine, prompt: str, seed: int, settings: dict[str, Any]) -> Answered:
    has_chat = engine.tokenizer is not None and getattr(engine.tokenizer, "has_chat", False)
    tokens = engine.encode_chat([{"role": "user", "content": prompt}]) if has_chat else engine.encode(prompt)
    started = time.perf_counter()
    result = engine.generate(tokens, seed=seed, **settings)
    return Answered((time.perf_counter() - started) / max(1, len(result.token_ids)), result.token_ids)
