"""Benchmarks on the terminal, printed as they come: a progress bar's thread would be measured too."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer


def show_overhead(quick: bool, as_json: bool) -> None:
    """What the engine itself costs per emitted token, on a mock whose passes are nearly free.

    Wall time includes the mock's own passes, engine time does not.
    """
    from outrider.bench.overhead import readings

    if not as_json:
        typer.echo(f"{'us per emitted token':<46}{'engine':>9}{'range':>20}{'wall':>9}{'tokens/round':>14}")
    for reading in readings(quick=quick):
        if as_json:
            typer.echo(json.dumps(asdict(reading)))
            continue
        span = f"{reading.low_us:.1f} - {reading.high_us:.1f}"
        numbers = f"{reading.median_us:>9.1f}{span:>20}{reading.wall_us:>9.1f}{reading.tokens_per_round:>14.2f}"
        typer.echo(f"{reading.name:<46}{numbers}")


def show_model_speed(model: str, quick: bool, as_json: bool, threads: int | None) -> None:
    """Plain decoding and prefill of one model, beside transformers and beside the matrix products themselves."""
    from outrider.bench.plain import readings

    if not as_json:
        typer.echo(f"{'':<46}{'median':>9}{'range':>20}")
    for reading in readings(model, quick=quick, threads=threads):
        if as_json:
            typer.echo(json.dumps(asdict(reading)))
        else:
            span = f"{reading.low:.4g} - {reading.high:.4g}"
            typer.echo(f"{reading.name:<46}{reading.median:>9.4g}{span:>20}  {reading.unit}")
