"""Who takes part in a comparison, and what they are asked: the contestants of our own engine.

Time is counted alike for everybody: from asking to the last token, reading the prompt included, which is what somebody
waits for. One engine holds all drafters, so weights, prompts and code path are the same. Every answer has a tenant of
its own: it finds neither pages nor past text of another.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, Protocol

from outrider.engine.engine import Engine
from outrider.engine.methods import METHODS, DraftSpec, parse_drafts
from outrider.engine.presets import PRESETS
from outrider.engine.stream import Stream
from outrider.errors import ConfigError
from outrider.models.source import ModelSource
from outrider.tokenizer.base import ChatTokenizer
from outrider.types import Request, SamplingParams

PLAIN = "plain"
AUTO: Final = "auto"  # as a draft: all drafts that were named, in turn; as a width: what the engine chooses
OWN_ENGINE = "outrider"


@dataclass(frozen=True, slots=True)
class Task:
    """What everybody is asked at one time: one prompt, or several of a kind together."""

    kind: str
    prompts: tuple[tuple[int, ...], ...]
    seeds: tuple[int, ...]  # one for each prompt; of no use when the temperature is 0
    max_tokens: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a task. What a contestant cannot tell is None, or empty."""

    tokens: list[list[int]]
    seconds: float
    first_s: float  # to the first token; of several prompts together, the mean
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    rounds_by_depth: Mapping[int, int] = field(default_factory=dict)
    rounds_by_accepted: Mapping[int, int] = field(default_factory=dict)
    split: Mapping[str, float] | None = None  # seconds of drafting, scoring and judging

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))


class Style(NamedTuple):
    """One way to decode, as the rows of the table name it."""

    engine: str
    method: str
    width: int | Literal["auto"]
    is_tree: bool = False

    @property
    def name(self) -> str:
        if self.method == PLAIN:
            return f"{self.engine} {PLAIN}"
        shape = f"tree of {self.width}" if self.is_tree else f"width {self.width}"
        return f"{self.engine} {self.method}, {shape}"


class Contestant(Protocol):
    """One way to decode that can be asked. `is_coupled`: at a temperature above 0 its answers are plain's, too."""

    style: Style
    is_coupled: bool

    def answer(self, task: Task) -> Answer: ...


class OwnContestant:
    """Our engine with one method and width."""

    is_coupled = True

    def __init__(
        self,
        engine: Engine,
        style: Style,
        *,
        method: str,
        tenants: Iterator[int],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.style = style
        self._engine, self._method, self._tenants, self._now = engine, method, tenants, now

    def answer(self, task: Task) -> Answer:
        engine, now = self._engine, self._now
        requests = [self._request(task, prompt, seed) for prompt, seed in zip(task.prompts, task.seeds, strict=True)]
        before = _split(engine)
        started = now()
        streams = engine.open_streams(requests)
        firsts: dict[Stream, float] = {}
        try:
            while not all(stream.is_over for stream in streams):
                engine.step()
                moment = now()
                for stream in streams:
                    if stream not in firsts and stream.tokens:
                        firsts[stream] = moment - started
            seconds = now() - started
        finally:
            for stream in streams:
                stream.close()
        return _answer(streams, seconds, list(firsts.values()), before, _split(engine))

    def _request(self, task: Task, prompt: Sequence[int], seed: int) -> Request:
        sampling = SamplingParams(temperature=task.temperature, seed=seed if task.temperature else None)
        width = self.style.width
        return Request(
            prompt=prompt,
            sampling=sampling,
            max_tokens=task.max_tokens,
            ignore_eos=True,
            method=self._method,
            width=None if width == AUTO else int(width),
            tree=True if self.style.is_tree else None,
            tenant=f"bench-{next(self._tenants)}",
        )


def _split(engine: Engine) -> dict[str, float]:
    counts = engine.statistics
    return {"draft": counts.draft_s, "score": counts.score_s, "judge": counts.judge_s}


def _answer(
    streams: Sequence[Stream],
    seconds: float,
    firsts: Sequence[float],
    before: Mapping[str, float],
    after: Mapping[str, float],
) -> Answer:
    by_depth: dict[int, int] = {}
    by_accepted: dict[int, int] = {}
    tokens, rounds, drafted, accepted = [], 0, 0, 0
    for stream in streams:
        if stream.error is not None:
            raise stream.error
        assert stream.result is not None, "what is over has a result or an error"
        counts = stream.result.statistics
        tokens.append(stream.result.token_ids)
        rounds, drafted, accepted = rounds + counts.rounds, drafted + counts.drafted, accepted + counts.accepted
        for total, part in ((by_depth, counts.rounds_by_depth), (by_accepted, counts.rounds_by_accepted)):
            for length, times in part.items():
                total[length] = total.get(length, 0) + times
    return Answer(
        tokens=tokens,
        seconds=seconds,
        first_s=sum(firsts) / len(firsts),
        rounds=rounds,
        drafted=drafted,
        accepted=accepted,
        rounds_by_depth=by_depth,
        rounds_by_accepted=by_accepted,
        split={name: after[name] - before[name] for name in after},
    )


class Drafts(NamedTuple):
    """What `--draft` of a comparison means: what to load, what rows call it, and whether all in turn is a method."""

    load: list[Any]
    names: list[str | None]  # None: as the engine calls it
    with_auto: bool
    assistant: str | None = None  # the first that is a model of its own, for peers that take one


def drafts_of(model: str, draft: str | None) -> Drafts:
    """Nothing is loaded for this. Left out, the model's usual drafts; `auto` among others adds all of them in turn."""
    parts = [part.strip() for part in draft.split(",")] if draft else [AUTO]
    named: Any = ",".join(part for part in parts if part != AUTO)
    if not named:
        named = PRESETS[model].draft if model in PRESETS else None
        if named is None:
            raise ConfigError(
                f"{model} has no usual draft; name what to compare, like --draft ngram,suffix,auto", param="draft"
            )
        if not isinstance(named, str):
            return Drafts([named], [None], with_auto=False)
    specs = parse_drafts(named)
    for spec in specs:
        _check_model(spec)
    models = [str(spec.value) for spec in specs if spec.method == "model"]
    return Drafts(
        load=[_written(spec) for spec in specs],
        names=[_label(spec) for spec in specs],
        with_auto=AUTO in parts and len(specs) > 1,
        assistant=models[0] if models else None,
    )


def _check_model(spec: DraftSpec) -> None:
    """What is no method must be a model; a name that is neither is told before the target is fetched."""
    if spec.method != "model" or spec.value in PRESETS:
        return
    source = ModelSource.parse(spec.value)
    if source.kind == "path" and source.cached() is None:
        methods = ", ".join(method.written for method in METHODS.values())
        raise ConfigError(f"there is no draft {spec.value!r}; choose {methods} (a path or a name)", param="draft")


def _written(spec: DraftSpec) -> str:
    """As `draft=` takes it."""
    if spec.method == "model" or spec.value is None:
        return str(spec.value or spec.method)
    return f"{spec.method}:{spec.value}"


def _label(spec: DraftSpec) -> str | None:
    """What tells drafts of one method apart: a number of layers, a model's name."""
    return _written(spec) if spec.method in ("layerskip", "model") else None


def own_contestants(
    engine: Engine,
    drafts: Drafts,
    widths: Sequence[int | Literal["auto"]],
    trees: Sequence[int] = (),
    now: Callable[[], float] = time.perf_counter,
) -> list[OwnContestant]:
    """Plain decoding first, then every draft at every width, then all drafts in turn."""
    methods = [name for name in engine.methods if name != "none"]
    tenants = itertools.count()
    styles = [("none", Style(OWN_ENGINE, PLAIN, 0))]
    for method, name in zip(methods, drafts.names, strict=True):
        label = name or method
        styles += [(method, Style(OWN_ENGINE, label, width)) for width in widths]
        styles += [(method, Style(OWN_ENGINE, label, size, True)) for size in trees]
    if drafts.with_auto:
        styles.append((engine.method, Style(OWN_ENGINE, AUTO, AUTO)))
    return [OwnContestant(engine, style, method=method, tenants=tenants, now=now) for method, style in styles]


def encode(engine: Engine, prompt: str) -> list[int]:
    """The prompt as a first turn of a chat, where the model has a template for that."""
    if isinstance(engine.tokenizer, ChatTokenizer):
        return engine.encode_chat([{"role": "user", "content": prompt}])
    return engine.encode(prompt)
