"""What passes cost, and what the simulator makes of it, on the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import typer

from outrider.bench import kernels, passes, simulate
from outrider.bench.report import check_folder
from outrider.cli.options import numbers


def show_kernels(
    model: str,
    rows: Sequence[int] | None,
    contexts: Sequence[int] | None,
    repeats: int,
    plot: Path | None,
    as_json: bool,
    threads: int | None,
) -> None:
    points: list[kernels.Point] = []
    chosen = sorted({1, *(rows or kernels.ROWS)})
    for point in kernels.readings(
        model, rows=chosen, contexts=contexts or kernels.CONTEXTS, repeats=repeats, threads=threads
    ):
        if as_json:
            typer.echo(json.dumps(asdict(point)))
        else:
            if not points or points[-1].context != point.context:
                typer.echo(f"\nbehind {point.context} tokens of context")
                typer.echo(f"{'rows':>5}{'ms':>9}{'range':>18}{'of one row':>12}{'limit ms':>10}  drafts pay from")
            typer.echo(_line(point))
        points.append(point)
    if plot is not None:
        from outrider.bench.plots import plot_curve

        plot_curve(points, model, plot)


def _line(point: kernels.Point) -> str:
    span = f"{point.low:.1f} - {point.high:.1f}"
    limit = "" if point.limit_ms is None else f"{point.limit_ms:.1f}"
    pays = "" if point.rows == 1 else "never" if point.needed is None else f"{point.needed:.0%} acceptance"
    width = "" if point.rows == 1 else f" (width {point.rows - 1})"
    return f"{point.rows:>5}{point.ms:>9.1f}{span:>18}{point.ratio:>12.2f}{limit:>10}  {pays}{width}"


def show_passes(settings: passes.PassSettings, json_file: Path | None) -> None:
    if json_file is not None:
        check_folder(json_file, "json")
    report = passes.compare(settings, lambda sentence: typer.secho(sentence, dim=True, err=True))
    head = f"{'ms, median and range':<34}{'engine':<11}{'ms':>9}{'range':>19}{'over ours':>11}{'range':>15}"
    typer.echo(f"{head}{'of memory':>12}{'of arithmetic':>15}")
    for row in report.rows:
        span = f"{row.low:.2f} - {row.high:.2f}"
        beside = "" if row.engine == passes.OWN else f"{row.ratio:.2f}x"
        between = "" if row.engine == passes.OWN else f"{row.ratio_low:.2f} - {row.ratio_high:.2f}"
        line = f"{row.task:<34}{row.engine:<11}{row.ms:>9.2f}{span:>19}{beside:>11}{between:>15}"
        if report.limits is not None and row.kind in ("pass", "decode"):
            memory, arithmetic = row.limits_ms(report.limits)
            line += f"{row.ms / memory:>11.2f}x" + (f"{row.ms / arithmetic:>14.2f}x" if arithmetic else "")
        typer.echo(line.rstrip())
    typer.echo()
    for remark in passes.remarks(report):
        typer.echo(remark)
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")


def show_simulation(acceptance: float, draft_cost: float, curve: str, widths: str, batches: str, as_json: bool) -> None:
    if curve not in simulate.CURVES:
        raise typer.BadParameter(f"choose one of {', '.join(simulate.CURVES)}, got {curve!r}", param_hint="--curve")
    costs = simulate.Costs(simulate.CURVES[curve], draft_cost)
    chosen = [None if width.strip() == "auto" else numbers(width, "--widths")[0] for width in widths.split(",")]
    sizes = numbers(batches, "--batches")
    if not as_json:
        typer.echo(f"{'width':>8}{'batch':>7}{'speed':>8}{'tokens/round':>14}")
    for batch in sizes:
        for width in chosen:
            most, name = (16, "auto") if width is None else (width, str(width))
            found = simulate.simulate(simulate.Case(simulate.constant(acceptance, most), costs, width, batch))
            if as_json:
                told = {"width": name, "batch": batch, "speed": found.speed, "tokens_per_round": found.tokens_per_round}
                typer.echo(json.dumps(told))
            else:
                typer.echo(f"{name:>8}{batch:>7}{found.speed:>8.2f}{found.tokens_per_round:>14.2f}")


def show_comparison(
    model: str,
    draft: str,
    widths: Sequence[int],
    batches: Sequence[int],
    quick: bool,
    as_json: bool,
    threads: int | None,
) -> None:
    settings = [
        simulate.Setting(one.strip(), width, batch) for batch in batches for one in draft.split(",") for width in widths
    ]
    if not as_json:
        typer.echo(f"{'':<34}{'predicted':>10}{'measured':>10}{'range':>15}{'error':>8}")
    worst = 0.0
    for one in simulate.measured(
        model, settings, num_tokens=24 if quick else 64, repeats=2 if quick else 5, threads=threads
    ):
        worst = max(worst, abs(one.error))
        if as_json:
            typer.echo(json.dumps({**asdict(one), "error": one.error}))
        else:
            span = f"{one.low:.2f} - {one.high:.2f}"
            shown = f"{one.predicted:>10.3f}{one.measured:>10.3f}{span:>15}{one.error:>+8.1%}"
            typer.echo(f"{one.setting.name:<34}{shown}")
    if not as_json:
        typer.echo(f"{len(settings)} settings, at most {worst:.1%} off")
