"""Benchmarks on the terminal, printed as they come: a progress bar's thread would be measured too."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from outrider.models.names import DEFAULT

if TYPE_CHECKING:
    from outrider.bench.fresh import Reading


def show_engine(quick: bool, as_json: bool) -> None:
    """What the engine itself costs per emitted token, on a mock whose passes are nearly free.

    Wall time includes the mock's own passes, engine time does not.
    """
    from outrider.bench.overhead import readings
    from outrider.native.library import why_not

    if (reason := why_not()) is not None:
        typer.echo(f"sampling is by array functions alone: {reason}", err=True)
    if not as_json:
        typer.echo(f"{'us per emitted token':<60}{'engine':>9}{'range':>20}{'wall':>9}{'tokens/round':>14}")
    for reading in readings(quick=quick):
        if as_json:
            typer.echo(json.dumps(asdict(reading)))
            continue
        span = f"{reading.low_us:.1f} - {reading.high_us:.1f}"
        numbers = f"{reading.median_us:>9.1f}{span:>20}{reading.wall_us:>9.1f}{reading.tokens_per_round:>14.2f}"
        typer.echo(f"{reading.name:<60}{numbers}")


def show_model(quick: bool, as_json: bool, model: str = DEFAULT, threads: int | None = None) -> None:
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


def show_lookups(quick: bool, as_json: bool) -> None:
    """What ngram and suffix cost at 8,000 tokens of context and 1,000,000 of past text."""
    from outrider.bench.lookups import readings

    if not as_json:
        typer.echo(f"{'':<58}{'median':>9}{'p99':>9}{'range':>20}")
    for reading in readings(quick=quick):
        if as_json:
            typer.echo(json.dumps(asdict(reading)))
        else:
            span = f"{reading.low:.4g} - {reading.high:.4g}"
            typer.echo(f"{reading.name:<58}{reading.median:>9.4g}{reading.p99:>9.4g}{span:>20}  {reading.unit}")


def show_width(quick: bool, as_json: bool, seed: int | None) -> None:
    """Auto beside plain decoding and the best fixed width, over acceptance, draft cost, pass cost and batch size."""
    from outrider.bench import never_slower

    found = never_slower.readings(quick=quick) if seed is None else never_slower.random_readings(seed, quick=quick)
    readings: list[never_slower.Reading] = []
    for reading in found:
        readings.append(reading)
        if as_json:
            typer.echo(json.dumps({**asdict(reading), "holds": reading.holds}))
        elif not reading.holds:
            typer.echo(
                f"{reading.cell.name}: {reading.of_plain:.3f} of plain, {reading.of_best:.3f} of width "
                f"{reading.best_width}; chose {dict(reading.widths)}"
            )
    if not as_json:
        typer.echo(never_slower.summary(readings))


def show_auto(
    as_json: bool,
    model: str,
    draft: str,
    prompts: Path | None,
    limit: int,
    max_tokens: int,
    mixed: bool,
    threads: int | None,
) -> None:
    """Plain decoding, the engine's choice and fixed widths by turns on a real model."""
    from outrider.bench.auto import FIXED, readings
    from outrider.bench.work import OWN, read_work

    work = OWN if prompts is None else read_work(prompts)
    for reading in readings(model, draft, work, limit=limit, max_tokens=max_tokens, mixed=mixed, threads=threads):
        if as_json:
            typer.echo(json.dumps({**asdict(reading), "of_best": reading.of_best}))
            continue
        fixed = "".join(f"  width {width}: {reading.speed(width):.3f}" for width in FIXED)
        differing = f", {reading.differing} answers differ" if reading.differing else ""
        typer.echo(
            f"{reading.kind:<16}auto {reading.speed(None):.3f}x plain{fixed}  "
            f"({reading.of_best:.3f} of width {reading.best_width}{differing})"
        )


def show_policies(
    quick: bool, as_json: bool, trace: Path | None = None, load: float | None = None, plot: Path | None = None
) -> None:
    """Every policy on one trace of arrivals, in virtual time: first with patient callers, then with deadlines."""
    from outrider.bench import policies
    from outrider.bench.trace import read_trace

    num_requests = policies.QUICK if quick else policies.Setting().num_requests
    setting = policies.Setting(load=policies.LOAD if load is None else load, num_requests=num_requests)
    arrivals = None if trace is None else read_trace(trace, num_requests)
    taken: list[policies.Reading] = []
    for reading in policies.readings(arrivals, setting):
        if as_json:
            typer.echo(json.dumps(asdict(reading)))
        else:
            if not taken or taken[-1].is_patient is not reading.is_patient:
                typer.echo(policies.heading(reading))
            typer.echo(policies.line(reading))
        taken.append(reading)
    if plot is not None:
        plot.write_text(policies.plot(taken), encoding="utf-8")


def show_ahead(
    quick: bool, as_json: bool, model: str | None = None, draft: str | None = None, threads: int | None = None
) -> None:
    """Running ahead beside drafting in order; on mocks also beside what the overlap should bring."""
    from outrider.bench.ahead import mock_readings, pair_readings

    if (model is None) != (draft is None):
        raise typer.BadParameter("give a model and a draft model, or neither")
    found = (
        mock_readings(quick=quick)
        if model is None or draft is None
        else pair_readings(model, draft, quick=quick, threads=threads)
    )
    for reading in found:
        if as_json:
            typer.echo(json.dumps(asdict(reading)))
            continue
        expected = "" if reading.expected is None else f", expected {reading.expected:.2f}"
        told = "equal answers" if reading.same else "OTHER ANSWERS"
        span = f"({reading.low:.2f} - {reading.high:.2f})" if reading.low < reading.high else ""
        typer.echo(f"{reading.name}: {reading.gain:.2f}x {span}{expected}; {reading.fresh:.0%} fresh, {told}")


def show_batch(quick: bool, as_json: bool, model: str = DEFAULT, threads: int | None = None) -> None:
    """Several requests together beside one after another."""
    from outrider.bench.batch import readings

    for reading in readings(model, quick=quick, threads=threads):
        if as_json:
            typer.echo(json.dumps(asdict(reading)))
        else:
            typer.echo(f"{reading.name:<46}{reading.median:>9.2f}  ({reading.low:.2f} - {reading.high:.2f})")


def show_fresh(
    as_json: bool,
    model: str,
    draft: str | None,
    prompts: Path | None,
    limit: int,
    max_tokens: int,
    temperature: float,
    threads: int | None,
) -> None:
    """Each prompt once, with drafts and without."""
    from outrider.bench.fresh import Reading, readings
    from outrider.bench.work import OWN, read_work

    whole = Reading("all")
    settings: dict[str, Any] = {"limit": limit, "max_tokens": max_tokens, "temperature": temperature}
    if threads is not None:
        settings["threads"] = threads
    for reading in readings(model, draft, OWN if prompts is None else read_work(prompts), **settings):
        whole.gains += reading.gains
        whole.tokens += reading.tokens
        whole.plain_s += reading.plain_s
        whole.drafted_s += reading.drafted_s
        whole.differing += reading.differing
        _show_fresh(reading, as_json)
    _show_fresh(whole, as_json)


def _show_fresh(reading: Reading, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({**asdict(reading), "gain": reading.gain}))
        return
    low, high = min(reading.gains), max(reading.gains)
    differing = f", {reading.differing} differ" if reading.differing else ""
    typer.echo(
        f"{reading.kind:<20}{reading.gain:>7.3f}x plain  (single prompts {low:.2f} - {high:.2f}; "
        f"{len(reading.gains)} prompts, {reading.tokens} tokens{differing})"
    )


def show_load(
    quick: bool, as_json: bool, model: str = "mock-cost", clients: int | None = None, seconds: float | None = None
) -> None:
    """Many clients at a server of its own, every token checked."""
    from outrider.bench.load import Scene, under_load

    scene = Scene(model, clients or (20 if quick else 200), seconds or (10.0 if quick else 120.0))
    typer.secho(f"{scene.clients} clients for {scene.seconds:g} s on {scene.model}", dim=True, err=True)
    report = under_load(scene)
    if as_json:
        typer.echo(json.dumps({**asdict(report), "is_good": report.is_good}))
    else:
        typer.echo(
            f"{report.requests} requests: {report.whole} whole, {report.left} left in the middle, "
            f"{report.refused} refused (429); {report.tokens} tokens, {report.tokens_per_second:.0f} tokens/s"
        )
        pages = "" if report.pages_held is None else f", {report.pages_held:.0f} pages held"
        typer.echo(f"afterwards {report.still_open:.0f} requests open{pages}")
        typer.echo(f"event loop late: p99 below {report.delay_p99_below * 1e3:g} ms")
        typer.echo(f"memory since the first quarter: {report.memory_growth / 1e6:+.1f} MB")
        for what, said in (("wrong", report.wrong), ("failed", report.problems)):
            typer.echo(f"{len(said)} {what}" + (f", first: {said[0]}" if said else ""))
    if not report.is_good:
        raise typer.Exit(1)


def show_server(quick: bool, as_json: bool, model: str = "mock-cost", clients: int | None = None) -> None:
    """The same requests through a server and without it."""
    from statistics import median

    from outrider.bench.load import throughput

    readings = []
    for reading in throughput(model, clients or 16, 32 if quick else 128, 2 if quick else 5):
        readings.append(reading)
        if as_json:
            typer.echo(json.dumps({**asdict(reading), "ratio": reading.ratio}))
        else:
            typer.echo(
                f"{reading.clients} clients: server {reading.server:.1f} tokens/s, engine {reading.engine:.1f}: "
                f"{reading.ratio:.3f}"
            )
    if not as_json:
        ratios = sorted(reading.ratio for reading in readings)
        typer.echo(f"server over engine: {median(ratios):.3f} ({ratios[0]:.3f} - {ratios[-1]:.3f})")
