"""`outrider train`: a draft made for a model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.engine.runner import require_torch
from outrider.models.source import ModelSource

if TYPE_CHECKING:
    from outrider.train.eagle import Report

app = typer.Typer(no_args_is_help=True, help="Train a draft for a model.")
EVERY = 5.0  # seconds between two lines


@app.callback()
def _group() -> None:
    """There may be other kinds later."""


@app.command()
def eagle(
    model: Annotated[str, typer.Option(help="The target: a path or a name.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where the head goes, with all that is needed to go on later; a folder where `eagle` finds it."
        ),
    ] = None,
    prompts: Annotated[
        list[str] | None, typer.Option(help="A file of prompts (.jsonl or lines); without any the model invents them.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Prompts to answer.")] = 8000,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 256,
    updates: Annotated[int, typer.Option(help="Updates of the head.")] = 4000,
    tokens: Annotated[int, typer.Option(help="Tokens of an update.")] = 16384,
    length: Annotated[int, typer.Option(help="Tokens of a text at most, its prompt counted in.")] = 640,
    steps: Annotated[int, typer.Option(help="Tokens it guesses on in training.")] = 5,
    vocabulary: Annotated[int | None, typer.Option(help="Tokens it chooses among, the most frequent; all.")] = None,
    start: Annotated[Path | None, typer.Option(help="A head of this model to begin with, a folder.")] = None,
    rate: Annotated[float, typer.Option(help="Of learning.")] = 5e-3,
    held_out: Annotated[int, typer.Option(help="Prompts kept for evaluation.")] = 64,
    seed: Annotated[int, typer.Option(help="The same seed gives the same head.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
) -> None:
    """An EAGLE-3 head: the model answers prompts, and the head learns to guess what it says. Broken off, the same
    command goes on."""
    require_torch("train")
    from outrider.models.own_heads import trained_heads
    from outrider.train.run import train as run
    from outrider.train.settings import TrainSettings

    path = ModelSource.parse(model).fetch()
    is_found = out is None  # by its fingerprint
    out = out or trained_heads() / path.stem
    settings = TrainSettings(
        model=str(path),
        prompts=tuple(prompts or ()),
        num_prompts=num_prompts,
        held_out=held_out,
        max_tokens=max_tokens,
        vocabulary=vocabulary,
        steps=steps,
        updates=updates,
        tokens=tokens,
        length=length,
        start=None if start is None else str(start),
        rate=rate,
        seed=seed,
    )
    found = run(settings, out, device=device, say=_say, report=_Lines(updates))
    typer.echo(f"{out}: a head for {model}; use it with --draft eagle{'' if is_found else f':{out}'}")
    if found is not None:
        places = " ".join(f"{share:.2f}" for share in found.kept_by_place)
        typer.echo(
            f"{found.tokens_per_round:.2f} tokens a round on {found.num_prompts} prompts that were held out, "
            f"greedy, chains of 5; kept by place: {places}"
        )


def _say(line: str) -> None:
    typer.echo(line, err=True)


class _Lines:
    """A line now and then."""

    def __init__(self, updates: int) -> None:
        self._updates, self._next = updates, 0.0

    def __call__(self, report: Report) -> None:
        if time.monotonic() < self._next and report.held is None:
            return
        self._next = time.monotonic() + EVERY
        kept = " ".join(f"{share:.2f}" for share in report.kept)
        if report.held is not None:
            kept += f" (held out {' '.join(f'{share:.2f}' for share in report.held)})"
        minutes, seconds = divmod(round(report.seconds_left), 60)
        _say(
            f"update {report.update}/{self._updates}: loss {report.loss:.3f}, "
            f"right up to each step {kept}, {minutes}:{seconds:02d} left"
        )
