"""The command `tune`: what is tried on the terminal, and the file that comes of it."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

import typer

from outrider.bench.tune import Tuned, tune
from outrider.bench.work import read_work
from outrider.cli import settings_file
from outrider.engine.methods import parse_drafts

SHOWN = 8  # of the ways that were tried


def show_tuning(
    model: str, draft: str, prompts: Path | None, minutes: float, max_tokens: int, out: Path, threads: int | None
) -> None:
    drafts = [part.strip() for part in draft.split(",") if part.strip()]
    parse_drafts(draft)  # a misspelled one is told before anything is loaded
    work = None if prompts is None else read_work(prompts)
    found = tune(
        model,
        drafts=drafts,
        work=work,
        limit_s=minutes * 60,
        num_tokens=max_tokens,
        threads=threads,
        progress=_progress,
    )
    if sys.stderr.isatty():
        typer.echo("\r" + " " * 70 + "\r", nl=False, err=True)
    for standing in found.standings[:SHOWN]:
        what = "measured anew" if standing.is_final else "in the contest"
        numbers = f"{standing.ratio:>6.2f}x of plain  ({len(standing.ratios)} prompts {what})"
        typer.echo(f"{standing.way.name:<34}{numbers}")
    _save(found, out, threads)
    best = "plain decoding is best here" if found.way is None else f"{found.way.name}: {found.ratio:.2f}x of plain"
    early = "" if found.is_complete else " (interrupted: this is what was known)"
    typer.echo(f"{best}{early}; written to {out}: outrider serve --config {out}")


def _save(found: Tuned, out: Path, threads: int | None) -> None:
    settings: dict[str, object] = {"model": found.model}
    if found.way is None:
        settings |= {"draft": "none"}
    else:
        settings |= {"draft": found.way.draft, "width": "auto" if found.way.width is None else found.way.width}
        if found.way.width is not None:
            settings |= {"tree": found.way.tree}
    if threads is not None:
        settings |= {"threads": threads}
    today = datetime.date.today().isoformat()
    settings_file.write(
        out,
        settings,
        [f"Written by outrider tune on {today}, after {found.seconds:.0f} s. Measured: speed over plain decoding."],
        {
            f"{standing.way.name}{' (final)' if standing.is_final else ''}, {len(standing.ratios)} prompts": round(
                standing.ratio, 3
            )
            for standing in found.standings
        },
    )


def _progress(share: float, what: str) -> None:
    """Drawn between two runs, so that nothing of it is measured."""
    if sys.stderr.isatty():
        filled = int(min(share, 1.0) * 30)
        typer.echo(f"\r[{'=' * filled}{' ' * (30 - filled)}] {what:<34}", nl=False, err=True)
