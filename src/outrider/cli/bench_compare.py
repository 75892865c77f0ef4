"""The comparison on the terminal: progress between answers, tables at the end, also of an interrupted run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import typer

from outrider.bench.compare import Comparison
from outrider.bench.compare_settings import CompareSettings
from outrider.bench.document import Plan
from outrider.bench.document import write as document
from outrider.bench.report import as_markdown, as_text, check_folder, check_plot, plot, write_json


def show_comparison(settings: CompareSettings, json_file: Path | None, picture: Path | None, markdown: bool) -> None:
    """The command `bench`. Ctrl-C ends it, and what was measured is shown and written."""
    if picture is not None:
        check_plot(picture)
    if json_file is not None:
        check_folder(json_file, "json")
    with Comparison.open(settings, _tell) as comparison:
        is_whole = True
        try:
            comparison.run(_progress)
        except KeyboardInterrupt:
            is_whole = False
        report = comparison.report()
    _clear()
    if not is_whole:
        typer.secho("interrupted: this is what was measured", dim=True, err=True)
    typer.echo(as_markdown(report) if markdown else as_text(report))
    if json_file is not None:
        write_json(report, json_file)
    if picture is not None:
        plot(report, picture)
    if not is_whole:
        raise typer.Exit(130)


def write_document(plan: Plan) -> None:
    """The command `bench document`. Ctrl-C leaves the parts that were measured."""
    check_folder(plan.out, "out")
    check_plot(plan.out.with_suffix(".svg"))
    shown = replace(plan, command=" ".join(["outrider", *sys.argv[1:]]))
    try:
        document(shown, _tell, _progress)
    except KeyboardInterrupt:
        _tell("interrupted: the parts that were measured are written")
        raise typer.Exit(130) from None
    _tell(f"written to {plan.out}")


def _tell(sentence: str) -> None:
    _clear()
    typer.secho(sentence, dim=True, err=True)


def _progress(done: int, total: int, what: str) -> None:
    """Drawn between two answers, so that nothing of it is measured."""
    if sys.stderr.isatty():
        filled = 30 * done // max(total, 1)
        typer.echo(f"\r[{'=' * filled}{' ' * (30 - filled)}] {done}/{total} {what:<40.40}", nl=False, err=True)


def _clear() -> None:
    if sys.stderr.isatty():
        typer.echo("\r" + " " * 90 + "\r", nl=False, err=True)
