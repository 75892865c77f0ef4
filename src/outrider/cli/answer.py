"""One answer on the terminal: text as it comes, tinted where it was drafted and kept, and what it took."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from outrider.cli.options import USUAL_LENGTH
from outrider.engine.engine import Engine
from outrider.engine.stream import Stream
from outrider.types import Event, FinishReason, Result

REPORTED = (
    "rounds drafted accepted rejected bonus unread acceptance_rate tokens_per_round accepted_by_position drafters "
    "widths reasons fallbacks advice"
)


@dataclass(slots=True)
class Timing:
    """Seconds. The first round belongs to reading the prompt: it is what one waits for."""

    load_s: float
    prefill_s: float
    decode_s: float
    tokens_per_s: float


@dataclass(slots=True)
class Answer:
    result: Result
    method: str
    timing: Timing
    reason: str  # why it ended, or that it was saved

    def as_json(self) -> dict[str, Any]:
        result = self.result
        report = result.statistics.report()
        return {
            "text": result.text,
            "token_ids": result.token_ids,
            "finish_reason": self.reason,
            "usage": {"prompt_tokens": result.num_prompt_tokens, "completion_tokens": len(result.token_ids)},
            "seed": result.seed,
            "accept": result.rule,
            "speculation": {"method": self.method, **{name: report[name] for name in REPORTED.split()}},
            "timing": {name: round(getattr(self.timing, name), 6) for name in Timing.__slots__},
        }


def answer_once(
    prompt: str,
    loading: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    chat: bool,
    as_json: bool,
    save_after: tuple[int, Path] | None = None,
) -> None:
    """The command `generate`."""
    from outrider.cli.resume import Saver

    started = time.perf_counter()
    engine = load(loading)
    load_s = time.perf_counter() - started
    tokens = engine.encode_chat([{"role": "user", "content": prompt}]) if chat else engine.encode(prompt)
    saver = None if save_after is None else Saver(engine, *save_after, loading)
    answer = ask(engine, tokens, settings, load_s, show=not as_json, watch=saver)
    is_saved = saver is not None and saver.is_saved
    if is_saved:
        answer.reason = "saved"
    if as_json:
        typer.echo(json.dumps(answer.as_json()))
    else:
        summarise(answer)
    if saver is not None:
        saver.tell()
    if answer.result.finish_reason == FinishReason.CANCELLED and not is_saved:
        raise typer.Exit(130)


def load(loading: Mapping[str, Any], *, threaded: bool = False) -> Engine:
    """Without a thread, reading an answer drives it: what was read is all there is, and can be saved."""
    options = dict(loading)
    return Engine.load(options.pop("target"), threaded=threaded, **options)


def ask(
    engine: Engine,
    tokens: list[int],
    settings: Mapping[str, Any],
    load_s: float,
    *,
    show: bool,
    watch: Callable[[Stream, Event], None] | None = None,
) -> Answer:
    """Ask, and follow the answer. `watch` is told of every round."""
    stream = engine.stream(tokens, **_with_length(engine, tokens, settings))
    return follow(engine, stream, load_s, show=show, watch=watch)


def follow(
    engine: Engine,
    stream: Stream,
    load_s: float,
    *,
    show: bool,
    watch: Callable[[Stream, Event], None] | None = None,
) -> Answer:
    """Show what comes and take the time. Ctrl-C ends the answer and not the program."""
    started = time.perf_counter()
    first: tuple[float, int] | None = None
    num_tokens = 0
    with _interrupts_cancel(stream):
        for event in stream:
            if event.tokens and first is None:
                first = (time.perf_counter(), len(event.tokens))
            num_tokens += len(event.tokens)
            if show:
                tint(event.text, len("".join(event.pieces[: event.accepted])))
            if watch is not None:
                watch(stream, event)
    assert event.result is not None, "the last event carries the result"
    ended = time.perf_counter()
    if show:
        typer.echo()
    first_at, num_first = first or (ended, 0)
    rest, decode_s = num_tokens - num_first, ended - first_at
    speed = rest / decode_s if rest and decode_s else 0.0
    timing = Timing(load_s, first_at - started, decode_s, speed)
    return Answer(event.result, engine.method, timing, event.result.finish_reason)


@contextmanager
def _interrupts_cancel(stream: Stream) -> Iterator[None]:
    """Ctrl-C ends the answer when its pass is done; raised inside a pass it would tear the cache. Twice is for good."""

    def cancel(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        stream.cancel()

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _with_length(engine: Engine, tokens: list[int], settings: Mapping[str, Any]) -> dict[str, Any]:
    """An answer nobody gave a length for is as long as usual, or as the context allows."""
    if settings["max_tokens"] is not None:
        return dict(settings)
    return {**settings, "max_tokens": max(1, min(USUAL_LENGTH, engine.info.context - len(tokens)))}


def tint(text: str, num_kept: int) -> None:
    """A round's text: its first letters were drafted and kept, and get another colour."""
    if num_kept:
        colour = False if "NO_COLOR" in os.environ else None  # None: only on a terminal
        typer.secho(text[:num_kept], fg="green", nl=False, color=colour)
    typer.echo(text[num_kept:], nl=False)
    sys.stdout.flush()


def summarise(answer: Answer) -> None:
    """What the answer took, on standard error: standard output is the text's."""
    timing, counts = answer.timing, answer.result.statistics
    line = f"{counts.tokens} tokens, {timing.tokens_per_s:.1f} a second; first after {timing.prefill_s:.2f} s"
    line += f" ({answer.result.num_prompt_tokens} of prompt)"
    if timing.load_s:
        line += f", loaded in {timing.load_s:.1f} s"
    lines = [f"{line}; finish {answer.reason}; seed {answer.result.seed}, {answer.result.rule}"]
    if counts.drafted:
        lines.append(
            f"{answer.method}: {counts.tokens_per_round:.2f} tokens a round; {counts.drafted} drafted, "
            f"{counts.accepted} kept ({counts.acceptance_rate:.0%}), {counts.rejected} refused, {counts.bonus} bonus"
        )
    lines += [f"fallback ({times}x): {reason}" for reason, times in counts.fallbacks.items()]
    if counts.advice:
        lines.append(counts.advice)
    for text in lines:
        typer.secho(text, dim=True, err=True)
