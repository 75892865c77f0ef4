"""Passes of our engine beside llama.cpp's in one run: the same file and threads, in turn, each in its own process.

    pass      some tokens behind others, with logits of all of them: what a round of speculation asks for
    prefill   a prompt, with logits of its last token
    decode    one token after another, greedily: ours through the whole engine, theirs with numpy's argmax
    together  several sequences decoding at once; ours only

Times are per pass, or per token. Beside them stands what the machine allows: every weight, and every key and value of
the context, is read once a pass (memory), and every row is multiplied with every weight (arithmetic).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal, Protocol

import numpy as np

from outrider.backends.base import Backend, Spans
from outrider.bench.kernels import Limits, measured_limits
from outrider.bench.machine import machine, versions
from outrider.bench.passes_peer import PASSES, common
from outrider.bench.peers import PeerError, PeerProcess, Wish, why_missing, why_unable
from outrider.config import MockConfig
from outrider.engine.engine import Engine
from outrider.engine.presets import PRESETS
from outrider.errors import ConfigError, OutriderError
from outrider.models.source import ModelSource
from outrider.native.binding import num_cores
from outrider.types import Request, SamplingParams, Slot

OWN = "outrider"
PEER = "llama-cpp"
PEER_COMMAND = (sys.executable, "-m", "outrider.bench.passes_peer")
ROWS = (1, 2, 4, 8)
CONTEXTS = (64, 1024, 4096)
DECODED = 64  # tokens
PROMPTS = (64, 2048)  # tokens before them
PREFILL = 512
TOGETHER = 8
SHORT_PROMPT = 16  # of each of them
SETTLE_S = 0.05  # threads of a library spin for a while after their last work; the next engine shall not feel it
BUSY = 0.5  # programs that run beside ours

Kind = Literal["pass", "prefill", "decode", "together"]
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Task:
    """What is timed. `rows` are tokens with logits; of decoding, tokens to make; of `together`, sequences."""

    name: str
    kind: Kind
    tokens: tuple[int, ...]
    rows: int
    context: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """Milliseconds of a task by one engine: median and range; `ratio` is how much longer it takes than ours, repeat by
    repeat."""

    engine: str
    task: str
    kind: Kind
    rows: int
    context: int
    ms: float
    low: float
    high: float
    ratio: float
    ratio_low: float
    ratio_high: float

    def limits_ms(self, limits: Limits) -> tuple[float, float]:
        """The least that memory and arithmetic allow: of a pass, or of a token that is decoded alone.

        No limit is above the fastest pass: a reading of the memory's speed can be too low.
        """
        tokens, context = (1, self.context) if self.kind == "decode" else (self.rows, self.context)
        found = (1e3 * limits.memory(context), 1e3 * limits.arithmetic(tokens))
        return min(found[0], self.low), min(found[1], self.low)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSettings:
    model: str
    peers: tuple[str, ...] = ()
    threads: int | None = None
    repeats: int = 7

    def __post_init__(self) -> None:
        for name in self.peers:
            if name != PEER:
                raise ConfigError(f"passes can be compared with {PEER} only, not with {name!r}", param="peer")


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that is told, as plain data."""

    rows: list[Row]
    limits: Limits | None
    settings: dict[str, Any]
    versions: dict[str, str | None]

    def row(self, engine: str, task: str) -> Row | None:
        return next((row for row in self.rows if (row.engine, row.task) == (engine, task)), None)

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": machine(),
            "versions": self.versions,
            "settings": self.settings,
            "limits": None if self.limits is None else asdict(self.limits),
            "rows": [asdict(row) for row in self.rows],
        }


class Timed(Protocol):
    """An engine with a model loaded."""

    name: str
    kinds: Sequence[Kind]

    def seconds(self, task: Task) -> float: ...


class OwnPasses:
    """Our engine without a draft."""

    name = OWN
    kinds: Sequence[Kind] = ("pass", "prefill", "decode", "together")

    def __init__(self, engine: Engine, longest: int) -> None:
        """longest: of the passes' sequences, in tokens."""
        self._engine = engine
        self._target: Backend = engine.loop.target
        self._longest = longest
        self._slot: Slot | None = None  # what passes stand behind stays from task to task
        self._held: list[int] = []

    def seconds(self, task: Task) -> float:
        if task.kind == "pass":
            return self._pass(task.tokens, task.rows)
        self.let_go()  # nobody but the engine holds anything while it decodes
        if task.kind == "prefill":
            return self._prefill(task.tokens)
        return self._decoding([task.tokens], task.rows) if task.kind == "decode" else self._together(task)

    def let_go(self) -> None:
        """Give back what passes stood behind."""
        if self._slot is not None:
            self._target.close(self._slot)
        self._slot, self._held = None, []

    def _open(self, limit: int) -> Slot:
        slot = self._target.open((), limit)
        assert slot is not None, "an idle model has room"
        return slot

    def _pass(self, tokens: Sequence[int], rows: int) -> float:
        """The median of a few."""
        context = len(tokens) - rows
        known = common(self._held, tokens[:context])
        self._slot = slot = self._open(self._longest) if self._slot is None else self._slot
        self._target.rewind(slot, known)
        if known < context:
            self._feed(slot, known, tokens[known:context], 1)
        self._held = list(tokens[:context])
        seconds = []
        for _ in range(PASSES + 1):  # the first is not counted
            seconds.append(self._feed(slot, context, tokens[context:], rows))
            self._target.rewind(slot, context)
        return median(seconds[1:])

    def _prefill(self, tokens: Sequence[int]) -> float:
        slot = self._open(len(tokens))
        try:
            return self._feed(slot, 0, tokens, 1)
        finally:
            self._target.close(slot)

    def _feed(self, slot: Slot, start: int, tokens: Sequence[int], rows: int) -> float:
        """Seconds of one pass."""
        started = time.perf_counter()
        fed = self._target.ops.integers(list(tokens))
        self._target.score(Spans([slot], [start], [len(tokens)], [rows], fed))
        return time.perf_counter() - started

    def _together(self, task: Task) -> float:
        """Sequences that differ from their first token on."""
        size = len(task.tokens) // task.rows
        return self._decoding([task.tokens[at * size : (at + 1) * size] for at in range(task.rows)], DECODED)

    def _decoding(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Per token of all sequences, from when each has its first. Their prompts may be in the prefix cache."""
        requests = [
            Request(
                prompt=list(prompt),
                sampling=SamplingParams(temperature=0.0),
                max_tokens=num_tokens + 1,
                ignore_eos=True,
            )
            for prompt in prompts
        ]
        streams = [iter(stream) for stream in self._engine.open_streams(requests)]
        for stream in streams:
            next(stream)
        started = time.perf_counter()
        for stream in streams:
            for _ in stream:
                pass
        return (time.perf_counter() - started) / (num_tokens * len(prompts))


class PeerPasses:
    """Another library, asked in its process."""

    kinds: Sequence[Kind] = ("pass", "prefill", "decode")

    def __init__(self, process: PeerProcess) -> None:
        self.name, self._process = process.name, process

    def seconds(self, task: Task) -> float:
        told = self._process.ask({"kind": task.kind, "tokens": task.tokens, "rows": task.rows})
        try:
            return float(told["seconds"])
        except (KeyError, TypeError, ValueError) as error:
            raise PeerError(f"it left out or misspelt {error}") from None


def tasks_of(vocab_size: int, context: int) -> list[Task]:
    """What is asked of everybody. The tokens are random: a pass takes the same time whatever they are."""
    longest = max(*CONTEXTS, *PROMPTS, PREFILL) + max(ROWS)
    tokens: list[int] = np.random.default_rng(0).integers(0, vocab_size, longest).tolist()
    found = [
        Task(_name_of_pass(rows, before), "pass", tuple(tokens[: before + rows]), rows, before)
        for before in CONTEXTS
        for rows in ROWS
    ]
    found += [
        Task(f"decoding behind {prompt} tokens", "decode", tuple(tokens[:prompt]), DECODED, prompt)
        for prompt in PROMPTS
    ]
    found.append(Task(f"prefill of {PREFILL} tokens", "prefill", tuple(tokens[:PREFILL]), 1))
    together = tuple(tokens[: SHORT_PROMPT * TOGETHER])
    found.append(Task(f"decoding, a token of {TOGETHER} x {DECODED}", "together", together, TOGETHER))
    return [task for task in found if len(task.tokens) + DECODED < context]


def _name_of_pass(rows: int, context: int) -> str:
    return f"{rows} {'row' if rows == 1 else 'rows'} behind {context} tokens"


def measure(
    engines: Sequence[Timed],
    tasks: Sequence[Task],
    repeats: int,
    tell: Tell = lambda _: None,
    settle: Callable[[float], None] = time.sleep,
) -> list[Row]:
    """Engines take turns on every task, in an order that is turned round. Who fails takes no further part.

    Tasks of one kind and context are repeated together, so that a long context is read once.
    """
    seconds: dict[tuple[str, Task], list[float]] = {}
    left = list(engines)
    groups: dict[tuple[Kind, int], list[Task]] = {}
    for task in tasks:
        groups.setdefault((task.kind, task.context), []).append(task)
    rounds = [(group, repeat) for group in groups.values() for repeat in range(repeats + 1)]
    for group, repeat in rounds:  # the first of a group warms up and is not counted
        if not repeat:
            tell(group[0].name if len(group) == 1 else f"{group[0].name} and more")
        for task in group:
            for engine in left[::-1] if repeat % 2 else list(left):
                if task.kind not in engine.kinds:
                    continue
                if len(left) > 1:
                    settle(SETTLE_S)
                try:
                    found = engine.seconds(task)
                except OutriderError as error:
                    if engine.name == OWN:
                        raise
                    tell(f"{engine.name} takes no further part: {error.message}")
                    left.remove(engine)
                    continue
                if repeat:
                    seconds.setdefault((engine.name, task), []).append(found)
    return [
        _row(engine.name, task, seconds[engine.name, task], seconds[OWN, task])
        for task in tasks
        for engine in engines
        if (engine.name, task) in seconds
    ]


def _row(engine: str, task: Task, times: Sequence[float], ours: Sequence[float]) -> Row:
    ratios = [theirs / own for theirs, own in zip(times, ours, strict=False)]  # one that failed has fewer
    return Row(
        engine,
        task.name,
        task.kind,
        task.rows,
        task.context,
        ms=1e3 * median(times),
        low=1e3 * min(times),
        high=1e3 * max(times),
        ratio=median(ratios),
        ratio_low=min(ratios),
        ratio_high=max(ratios),
    )


def compare(settings: PassSettings, tell: Tell = lambda _: None) -> Report:
    """Load the model, and the peers that can take part; measure all of it."""
    if settings.model in PRESETS and isinstance(PRESETS[settings.model].target, MockConfig):
        raise ConfigError("a mock has no passes worth timing; name a real model", param="model")
    threads, load = settings.threads or num_cores(), _load_average()
    tell(f"loading {settings.model}")
    engine = Engine.load(settings.model, draft="none", device="cpu", threads=threads, threaded=False)
    processes: list[PeerProcess] = []
    try:
        tasks = tasks_of(engine.info.vocab_size, engine.context)
        longest = max(len(task.tokens) for task in tasks) + DECODED
        for name in settings.peers:
            process = _invite(name, settings.model, threads, longest, tell)
            processes += [] if process is None else [process]
        ours = OwnPasses(engine, longest)
        rows = measure([ours, *map(PeerPasses, processes)], tasks, settings.repeats, tell)
        ours.let_go()
        tell("the memory's bandwidth")
        limits = measured_limits(engine.loop.target, threads)
    finally:
        for process in processes:
            process.close()
        engine.close()
    told = {"model": settings.model, "threads": threads, "repeats": settings.repeats, "load": load}
    return Report(rows, limits, told, versions({process.name: process.version for process in processes}))


def _load_average() -> float | None:
    """Programs that ran in the last minute, on average."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def _invite(name: str, model: str, threads: int, context: int, tell: Tell) -> PeerProcess | None:
    """Start a peer; one that cannot take part is told about, and our own part goes on."""
    path = ModelSource.parse(model).fetch()
    reason = why_missing(name) or why_unable(name, path, 1)
    if reason is None:
        tell(f"loading {model} with {name}")
        try:
            return PeerProcess(name, Wish(path, None, threads, context), PEER_COMMAND)
        except OutriderError as error:
            reason = error.message
    tell(reason)
    return None


def remarks(report: Report) -> list[str]:
    """What the numbers are worth, and what they say: the limit of memory, the gap to it, what four rows cost."""
    found = []
    load, limits = report.settings.get("load"), report.limits
    if load is not None and load > BUSY:
        found.append(f"OTHER PROGRAMS were running (load {load:.1f} at the start): these numbers are worth little")
    one = report.row(OWN, _name_of_pass(1, CONTEXTS[0]))
    if limits is not None:
        least = 1e3 * limits.memory()
        found.append(
            f"weights: {limits.weight_bytes / 1e6:.1f} MB are read in every pass; memory: {limits.bandwidth / 1e9:.1f} "
            f"GB/s as measured with {report.settings.get('threads')} threads; so a pass takes at least {least:.2f} ms"
        )
        if one is not None:
            above = one.ms - least
            found.append(f"{one.task} takes {one.ms / least:.2f} times that, {above:.2f} ms more")
    for context in CONTEXTS:
        parts = []
        for engine in dict.fromkeys(row.engine for row in report.rows):
            single, four = (report.row(engine, _name_of_pass(rows, context)) for rows in (1, 4))
            if single is not None and four is not None:
                parts.append(f"{engine} {four.ms / single.ms:.2f}x")
        if parts:
            found.append(f"four rows over one behind {context} tokens: {', '.join(parts)}")
    ours = {row.kind: row for row in reversed(report.rows) if row.engine == OWN}  # decoding with the shorter prompt
    alone, together = ours.get("decode"), ours.get("together")
    if alone is not None and together is not None:
        found.append(
            f"{together.rows} sequences decoding at once: {1e3 / together.ms:.1f} tokens/s, one: {1e3 / alone.ms:.1f}, "
            f"so {alone.ms / together.ms:.2f}x"
        )
    return found
