"""docs/benchmarks.md: everything that is measured about one model on one machine, in one document.

Parts are written as they come, so an interrupted run leaves what there is.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.bench import kernels, plots, simulate
from outrider.bench.compare import Comparison, Report
from outrider.bench.compare_settings import CompareSettings
from outrider.bench.machine import commit
from outrider.bench.report import as_markdown, plot, write_json
from outrider.bench.work import OWN

Tell = Callable[[str], None]
WIDTHS = (1, 3, 6)  # that the simulator is compared at
WORK = {kind: OWN[kind] for kind in ("extraction", "code", "summary", "chat")}  # where lookups find something, or not
INTRODUCTION = """Written by `{command}` on {day}, commit {commit}. Ratios are to plain decoding of the same engine,
measured in turn in the same run, so a noisy machine hits both alike. Speeds are of this machine on this day.
On a GPU: [benchmarks-gpu.md](benchmarks-gpu.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What goes into the document, and how much time is spent on it."""

    out: Path
    compare: CompareSettings
    simulated: Sequence[str] = ("ngram", "suffix")
    repeats: int = 5
    command: str = "outrider bench document"


def write(plan: Plan, tell: Tell, progress: Callable[[int, int, str], None]) -> None:
    """Measure and write, part after part."""
    parts = [f"# Benchmarks\n\n{_introduction(plan)}"]

    def add(part: str) -> None:
        parts.append(part)
        plan.out.write_text("\n\n".join(parts) + "\n", encoding="utf-8")

    compared, is_whole = _compared(plan, tell, progress)
    add(compared)
    if not is_whole:
        raise KeyboardInterrupt
    tell("passes by their number of rows")
    add(_curve(plan))
    tell("the simulator beside what is measured")
    add(_simulated(plan))


def _introduction(plan: Plan) -> str:
    return INTRODUCTION.format(
        command=plan.command, day=datetime.date.today().isoformat(), commit=commit() or "unknown"
    )


def _compared(plan: Plan, tell: Tell, progress: Callable[[int, int, str], None]) -> tuple[str, bool]:
    """The part, and whether it is whole."""
    with Comparison.open(plan.compare, tell) as comparison:
        is_whole = True
        try:
            comparison.run(progress)
        except KeyboardInterrupt:
            is_whole = False
        report: Report = comparison.report()
    picture, data = _beside(plan, "ratios.svg"), _beside(plan, "json")
    plot(report, picture)
    write_json(report, data)
    part = f"## Every way to draft, and peers\n\n![ratios]({picture.name})\n\n{as_markdown(report)}\n\n"
    return f"{part}All rows: [{data.name}]({data.name}).", is_whole


def _curve(plan: Plan) -> str:
    points = list(kernels.readings(plan.compare.model, repeats=plan.repeats, threads=plan.compare.threads))
    picture = _beside(plan, "curve.svg")
    plots.plot_curve(points, plan.compare.model, picture)
    rows = (
        (
            point.context,
            point.rows,
            f"{point.ms:.1f} ({point.low:.1f} - {point.high:.1f})",
            f"{point.ratio:.2f}",
            "" if point.limit_ms is None else f"{point.limit_ms:.1f}",
            "" if point.rows == 1 else "never" if point.needed is None else f"{point.needed:.0%}",
        )
        for point in points
    )
    heads = ("context", "rows", "ms (range)", "of one row", "limit, ms", "rows - 1 free drafts pay from")
    return (
        "## What a pass costs by its rows\n\nThe curve decides whether drafting can pay: a round must emit more tokens "
        "than its pass costs, in units of a one-row pass. The limit is what memory and arithmetic of this machine "
        f"allow, as measured.\n\n![curve]({picture.name})\n\n{_table(heads, rows)}"
    )


def _simulated(plan: Plan) -> str:
    settings = [simulate.Setting(draft, width) for draft in plan.simulated for width in WIDTHS]
    verdicts = list(
        simulate.measured(
            plan.compare.model,
            settings,
            work=WORK,
            num_tokens=plan.compare.max_tokens,
            repeats=plan.repeats,
            threads=plan.compare.threads,
        )
    )
    rows = (
        (
            one.setting.name,
            f"{one.predicted:.3f}",
            f"{one.measured:.3f} ({one.low:.3f} - {one.high:.3f})",
            f"{one.error:+.1%}",
        )
        for one in verdicts
    )
    return (
        "## The simulator beside what was measured\n\n`outrider bench simulate` predicts the ratio to plain decoding "
        "from acceptance by place, the curve above, and what drafting and judging cost, each measured by itself.\n\n"
        + _table(("setting", "predicted", "measured (range)", "error"), rows)
    )


def _beside(plan: Plan, name: str) -> Path:
    return plan.out.with_name(f"{plan.out.stem}.{name}" if "." not in name else f"{plan.out.stem}-{name}")


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
