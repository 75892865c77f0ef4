"""Plain decoding, every way to draft and other libraries in one run, by kind of work: `outrider bench`.

All take turns on every prompt, in an order that is turned round from one repeat to the next, after a warm-up that is
not counted. What is headline is the ratio to plain decoding of the same engine (see `rows`), not the absolute speed.
`Comparison.report` can be asked at any time: what a stopped run has measured is not lost.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import cycle, islice
from typing import Any, NamedTuple, Self

from outrider.bench.compare_settings import CompareSettings
from outrider.bench.contest import Contestant, Drafts, Style, Task, drafts_of, encode, own_contestants
from outrider.bench.machine import machine, versions
from outrider.bench.peers import PeerProcess, Wish, why_missing, why_unable
from outrider.bench.rows import Record, Row
from outrider.bench.work import OWN, Work, read_work
from outrider.engine.engine import Engine
from outrider.engine.presets import PRESETS
from outrider.errors import ConfigError, OutriderError
from outrider.models.source import ModelSource
from outrider.native.library import library, num_threads

Progress = Callable[[int, int, str], None]  # (done, total, what comes next); called between answers only
SETTLE_S = 0.05  # threads of a library spin for a while after their last work; the next engine shall not feel it
WARM_UP = "warm-up"


class Report(NamedTuple):
    """Everything that is told, as plain data (see `report`)."""

    machine: dict[str, Any]
    versions: dict[str, str | None]
    settings: dict[str, Any]
    rows: list[Row]


class Comparison:
    """A contest that is under way. `open` makes one from settings; `close` ends the peers' processes."""

    def __init__(
        self,
        contestants: Sequence[Contestant],
        tasks: Sequence[Task],
        *,
        repeats: int,
        settings: dict[str, Any] | None = None,
        settle: Callable[[float], None] = time.sleep,
    ) -> None:
        self.contestants = list(contestants)
        self.tasks = list(tasks)
        self.notes: list[str] = []
        self.versions: dict[str, str] = {}
        self.is_complete = False
        self._repeats = repeats
        self._settings = settings or {}
        self._settle = settle
        self._record = Record([task.kind for task in tasks], is_greedy=all(task.temperature == 0 for task in tasks))
        self._uncoupled: set[Style] = set()  # whose answers are left to chance
        self._engine: Engine | None = None
        self._peers: list[PeerProcess] = []
        self._last = ""  # the engine that answered last
        self._started = datetime.now(UTC)

    @classmethod
    def open(cls, settings: CompareSettings, tell: Callable[[str], None] = lambda what: None) -> Comparison:
        """Load the model and the peers. `tell` hears what is being loaded, and who takes no part and why.

        What can be wrong about the settings is told before anything is loaded.
        """
        drafts = drafts_of(settings.model, settings.draft)
        work = OWN if settings.prompts is None else read_work(settings.prompts)
        missing = [reason for name in settings.peers if (reason := why_missing(name)) is not None]
        for reason in missing:  # before the model is loaded: somebody may want to install it first
            tell(reason)
        tell(f"loading {settings.model}")
        engine = Engine.load(
            settings.model,
            draft=drafts.load or "none",
            device="cpu" if settings.peers and not _is_mock(settings.model) else "auto",
            threads=settings.threads,
            max_batch=max(64, settings.batch),
            threaded=False,
        )
        try:
            tasks, notes = tasks_of(engine, work, settings)
            contestants = own_contestants(engine, drafts, settings.widths, settings.trees)
            comparison = cls(contestants, tasks, repeats=settings.repeats, settings=settings.told())
        except BaseException:
            engine.close()
            raise
        comparison._engine = engine
        comparison.notes += [*missing, *notes]
        try:
            comparison._invite(settings, drafts, tell)
        except BaseException:
            comparison.close()
            raise
        return comparison

    def _invite(self, settings: CompareSettings, drafts: Drafts, tell: Callable[[str], None]) -> None:
        """Start the peers that can take part; those that cannot are told about, and the others go on."""
        path = None if _is_mock(settings.model) else ModelSource.parse(settings.model).fetch()
        assistant = None if drafts.assistant is None or _is_mock(drafts.assistant) else drafts.assistant
        longest = max(len(prompt) for task in self.tasks for prompt in task.prompts)
        self._settings["threads"] = threads = settings.threads or _threads()
        for name in settings.peers:
            if why_missing(name) is not None:
                continue
            reason = why_unable(name, path, settings.batch)
            if reason is not None or path is None:
                self._note(reason or f"{name} takes no part", tell)
                continue
            tell(f"loading {settings.model} with {name}")
            wish = Wish(
                path,
                None if assistant is None else ModelSource.parse(assistant).fetch(),
                threads,
                longest + settings.max_tokens + 32,
            )
            try:
                self.add_peer(PeerProcess(name, wish))
            except OutriderError as error:
                self._note(error.message, tell)

    def add_peer(self, peer: PeerProcess) -> None:
        """Its methods take part from now on, and it is closed with the comparison."""
        self._peers.append(peer)
        self.contestants += peer.contestants()
        self.versions[peer.name] = peer.version
        self.notes += [f"{peer.name} {note}" for note in peer.notes]

    def _note(self, sentence: str, tell: Callable[[str], None]) -> None:
        self.notes.append(sentence)
        tell(sentence)

    def run(self, progress: Progress = lambda done, total, what: None) -> None:
        """Ask everybody everything. An interrupt passes through; `report` then tells what there is."""
        plan = list(self._plan())
        for done, (repeat, index, contestant) in enumerate(plan):
            what = WARM_UP if repeat == 0 else f"repeat {repeat} of {self._repeats}"
            progress(done, len(plan), f"{what}, {self.tasks[index].kind}: {contestant.style.name}")
            if contestant in self.contestants:
                self._ask(contestant, repeat, index)
        progress(len(plan), len(plan), "done")
        self.is_complete = True

    def _plan(self) -> Iterator[tuple[int, int, Contestant]]:
        """Repeat, task and contestant, in order. Warming up takes the first prompt of every kind."""
        kinds = [task.kind for task in self.tasks]
        for repeat in range(self._repeats + 1):
            order = self.contestants[::-1] if repeat % 2 else list(self.contestants)
            for index, kind in enumerate(kinds):
                if repeat > 0 or index == kinds.index(kind):
                    yield from ((repeat, index, contestant) for contestant in order)

    def _ask(self, contestant: Contestant, repeat: int, index: int) -> None:
        """One answer. Who fails takes no further part, and what it has answered stays."""
        style, task = contestant.style, self.tasks[index]
        if style.engine != self._last:
            self._settle(SETTLE_S)
        self._last = style.engine
        try:
            answer = contestant.answer(task)
            lengths = {len(tokens) for tokens in answer.tokens}
            if lengths != {task.max_tokens}:
                raise OutriderError(f"it gave {sorted(lengths)} tokens where {task.max_tokens} were asked for")
        except OutriderError as error:
            self.contestants.remove(contestant)
            self.notes.append(f"{style.name} takes no further part: {error.message}")
            return
        if task.temperature > 0 and not contestant.is_coupled:
            self._uncoupled.add(style)
        self._record.add(style, repeat, index, answer)

    def report(self) -> Report:
        """What is known now."""
        settings = {
            **self._settings,
            "tasks": len(self.tasks),
            "complete": self.is_complete,
            "started": self._started.isoformat(timespec="seconds"),
            "notes": list(self.notes),
        }
        rows = list(self._record.rows(self._uncoupled))
        return Report(machine(), versions(self.versions), settings, rows)

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        if self._engine is not None:
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tasks_of(engine: Engine, work: Work, settings: CompareSettings) -> tuple[list[Task], list[str]]:
    """Prompts encoded once, for everybody, and sentences about those that are too long."""
    tasks: list[Task] = []
    notes: list[str] = []
    most = engine.context - settings.max_tokens
    if most < 1:
        raise ConfigError(
            f"max_tokens={settings.max_tokens} leaves no room for a prompt in the context of {engine.context}",
            param="max_tokens",
        )
    seed = 0
    for kind, texts in work.items():
        encoded = [encode(engine, text) for text in texts[: settings.limit]]
        fitting = [tuple(prompt) for prompt in encoded if 0 < len(prompt) <= most]
        if len(fitting) < len(encoded):
            notes.append(
                f"{len(encoded) - len(fitting)} prompts of {kind} do not fit into the context, and are left out"
            )
        for start in range(0, len(fitting), settings.batch):
            group = tuple(islice(cycle(fitting), start, start + settings.batch))
            seeds = tuple(range(seed, seed + len(group)))
            seed += len(group)
            tasks.append(Task(kind, group, seeds, settings.max_tokens, settings.temperature))
    if not tasks:
        raise ConfigError(
            f"no prompt fits into the context of {engine.context} tokens; lower max_tokens", param="prompts"
        )
    return tasks, notes


def _is_mock(model: str) -> bool:
    return model in PRESETS and not isinstance(PRESETS[model].target, str)


def _threads() -> int:
    """That our own engine computes with."""
    if library.cache_info().currsize:
        return num_threads()
    torch = sys.modules.get("torch")
    with suppress(AttributeError):
        return int(torch.get_num_threads())  # type: ignore[union-attr]
    return os.cpu_count() or 1
