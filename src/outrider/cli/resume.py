"""Stopping an answer on the disk (`generate --save-after`) and going on with it (`resume`)."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from outrider.cli.answer import Answer, follow, load, summarise
from outrider.engine.engine import Engine
from outrider.engine.methods import BARE, WITH_PATH
from outrider.engine.presets import PRESETS
from outrider.engine.snapshot import Snapshot
from outrider.engine.stream import Stream
from outrider.errors import SnapshotError
from outrider.models.names import NAMES
from outrider.types import Event, FinishReason


class Saver:
    """Watches an answer: after the round that brings its token number `after`, it is written and ended."""

    def __init__(self, engine: Engine, after: int, path: Path, loading: Mapping[str, Any]) -> None:
        self.path = path
        self.is_saved = False
        self._engine = engine
        self._missing = after
        self._notes = {"loading": _from_anywhere(loading)}

    def __call__(self, stream: Stream, event: Event) -> None:
        self._missing -= len(event.tokens)
        if self._missing <= 0 and event.result is None and not self.is_saved:
            self._engine.snapshot(self.path, [stream.request_id], notes=self._notes)
            self.is_saved = True
            stream.cancel()

    def tell(self) -> None:
        """What became of it, on standard error."""
        said = f"saved: outrider resume {self.path} goes on"
        if not self.is_saved:
            said = "the answer ended before it was to be saved; nothing was written"
        typer.secho(said, dim=True, err=True)


def resume_file(path: Path, model: str | None, draft: str | None, *, as_json: bool) -> None:
    """The command `resume`: the answers of the file, from their beginning on."""
    taken = Snapshot.read(path)
    loading = taken.notes.get("loading")
    if loading is None and model is None:
        raise SnapshotError(f"{path} does not say where its model came from; name it with --model")
    started = time.perf_counter()
    given = {"target": model, "draft": draft}
    engine = load({**(loading or {}), **{name: value for name, value in given.items() if value is not None}})
    load_s = time.perf_counter() - started
    streams = engine.resume(taken)
    beginnings = [stream.text for stream in streams]  # before one answer moves the others along
    answers = [
        _go_on(engine, stream, beginning, load_s, as_json=as_json)
        for stream, beginning in zip(streams, beginnings, strict=True)
    ]
    if any(answer.result.finish_reason == FinishReason.CANCELLED for answer in answers):
        raise typer.Exit(130)


def _go_on(engine: Engine, stream: Stream, beginning: str, load_s: float, *, as_json: bool) -> Answer:
    if not as_json:
        typer.echo(beginning, nl=False)
    answer = follow(engine, stream, load_s, show=not as_json)
    if as_json:
        typer.echo(json.dumps(answer.as_json()))
    else:
        summarise(answer)
    return answer


def _from_anywhere(loading: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `Engine.load` that mean the same in another working folder."""
    draft = loading["draft"]
    if draft is not None and (whole := _absolute(draft)) != draft:  # a path may have commas of its own
        draft = whole
    elif draft is not None:
        draft = ",".join(_absolute(part.strip()) for part in draft.split(","))
    return {**loading, "target": _absolute(loading["target"]), "draft": draft}


def _absolute(name: str) -> str:
    method, colon, rest = name.partition(":")
    if colon and method in WITH_PATH:
        return f"{method}:{_absolute(rest)}"
    path = Path(name).expanduser()
    return name if name in (*PRESETS, *NAMES, *BARE) or not path.exists() else str(path.absolute())
