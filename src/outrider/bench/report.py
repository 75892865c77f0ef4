"""A comparison for people and for programs: tables as text or markdown, JSON, and a picture."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from outrider.bench.compare import Report
from outrider.bench.contest import PLAIN, Style
from outrider.bench.plots import save
from outrider.bench.rows import ALL, Row
from outrider.errors import ConfigError, MissingPackageError

PLOTS = (".png", ".svg", ".pdf")
POSITIONS = 5  # places of a draft that a table has room for
NONE = "-"


class Table(NamedTuple):
    title: str
    heads: list[str]
    lines: list[list[str]]


def as_json(report: Report) -> dict[str, Any]:
    """The stable schema: machine, versions, settings, rows. Rows may get more fields, never fewer."""
    return {
        "machine": report.machine,
        "versions": report.versions,
        "settings": report.settings,
        "rows": [asdict(row) for row in report.rows],
    }


def write_json(report: Report, path: Path) -> None:
    """A crash leaves the old file or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(as_json(report), indent=2) + "\n", encoding="utf-8")
    beside.replace(path)


def as_text(report: Report) -> str:
    """For the terminal."""
    return "\n\n".join([*(_text(table) for table in tables(report)), "\n".join(remarks(report))])


def as_markdown(report: Report) -> str:
    parts = [_markdown(table) for table in tables(report)]
    return "\n\n".join([*parts, "\n".join(f"- {remark}" for remark in remarks(report))])


def tables(report: Report) -> list[Table]:
    """The whole, then by kind of work, then where the time went."""
    if not report.rows:
        return []
    by_style: dict[Style, dict[str, Row]] = {}
    for row in report.rows:
        by_style.setdefault(row.style, {})[row.category] = row
    kinds = list(dict.fromkeys(row.category for row in report.rows))
    whole = kinds[0] if len(kinds) == 1 else ALL
    found = [_overview(whole, by_style)]
    if len(kinds) > 1:
        found.append(_by_kind("By kind of work, of plain", kinds, by_style, lambda row: row.ratio_to_plain))
        if any(row.ratio_after_first for row in report.rows):
            title = "The same, after the first token"
            found.append(_by_kind(title, kinds, by_style, lambda row: row.ratio_after_first))
    return [*found, _insides(whole, by_style)]


def _overview(whole: str, by_style: dict[Style, dict[str, Row]]) -> Table:
    heads = ["engine", "method", "width", "of plain", "interval", "tokens/s", "first token", "tokens/round", "kept"]
    lines = []
    for style, rows in by_style.items():
        row = rows.get(whole)
        if row is not None:
            span = NONE if row.ratio_to_plain is None or style.method == PLAIN or row.repeats < 2 else _span(row)
            lines.append(
                [
                    *_names(style),
                    _number(row.ratio_to_plain, "{:.2f}x"),
                    span,
                    f"{row.tokens_per_s:.1f}",
                    f"{1e3 * row.first_token_s:.0f} ms",
                    _number(row.tokens_per_round, "{:.2f}"),
                    _number(row.acceptance_rate, "{:.0%}"),
                    _sameness(row),
                ]
            )
    title = "Beside plain decoding of the same engine" + ("" if whole == ALL else f", {whole}")
    return Table(title, [*heads, "plain's text"], lines)


def _by_kind(
    title: str, kinds: Sequence[str], by_style: dict[Style, dict[str, Row]], ratio: Callable[[Row], float | None]
) -> Table:
    lines = [
        [*_names(style), *(_of(rows.get(kind), lambda row: _number(ratio(row), "{:.2f}x")) for kind in kinds)]
        for style, rows in by_style.items()
        if style.method != PLAIN
    ]
    return Table(title, ["engine", "method", "width", *kinds], lines)


def _insides(whole: str, by_style: dict[Style, dict[str, Row]]) -> Table:
    places = [f"{place}." for place in range(1, POSITIONS + 1)]
    lines = []
    for style, rows in by_style.items():
        row = rows.get(whole)
        if row is not None and row.time_split is not None:
            kept = row.acceptance_by_position or []
            shares = [f"{row.time_split[part]:.0%}" for part in ("draft", "score", "judge", "other")]
            kept_shares = [f"{kept[place]:.0%}" if place < len(kept) else NONE for place in range(POSITIONS)]
            lines.append([*_names(style), *shares, *kept_shares])
    heads = ["engine", "method", "width", "drafting", "scoring", "judging", "other", *places]
    return Table("Where the time went, and how many drafts were kept by their place", heads, lines)


def _names(style: Style) -> list[str]:
    width = NONE if style.method == PLAIN else f"tree {style.width}" if style.is_tree else str(style.width)
    return [style.engine, style.method, width]


def _number(value: float | None, shape: str) -> str:
    return NONE if value is None else shape.format(value)


def _of(row: Row | None, shown: Callable[[Row], str]) -> str:
    return NONE if row is None else shown(row)


def _span(row: Row) -> str:
    return f"{row.ratio_to_plain_low:.2f} - {row.ratio_to_plain_high:.2f}"


def _sameness(row: Row) -> str:
    """Plain's own row says whether it repeated itself."""
    if row.identical is None:
        return NONE
    return "yes" if row.identical else f"NO, {row.differences} differ, first at token {row.first_difference}"


def remarks(report: Report) -> list[str]:
    """What the numbers were measured with, and what a reader must know."""
    settings, machine = report.settings, report.machine
    memory = machine.get("memory_bytes")
    hardware = [machine.get("gpu"), machine.get("cpu"), f"{machine.get('usable_cores')} cores"]
    hardware += [None if memory is None else f"{memory / 2**30:.0f} GiB", machine.get("os")]
    found = [
        "; ".join(str(part) for part in hardware if part is not None),
        ", ".join(f"{name} {version}" for name, version in report.versions.items() if version is not None),
    ]
    known = ("model", "max_tokens", "temperature", "threads", "batch", "repeats")
    found.append(", ".join(f"{name} {settings[name]}" for name in known if name in settings))
    for name in ("time", "interval", "all"):
        if name in settings:
            found.append(f"{name}: {settings[name]}")
    if not settings.get("complete", True):
        told = "it shows what was measured until then" if report.rows else "nothing was measured yet"
        found.append(f"STOPPED before the end: {told}")
    return [*found, *settings.get("notes", [])]


def _text(table: Table) -> str:
    columns = [[head, *cells] for head, cells in zip(table.heads, _columns(table), strict=True)]
    widths = [max(map(len, column)) for column in columns]
    lines = [table.title]
    for cells in (table.heads, *table.lines):
        padded = [
            cell.ljust(width) if at < 3 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _columns(table: Table) -> list[list[str]]:
    return [[line[at] for line in table.lines] for at in range(len(table.heads))]


def _markdown(table: Table) -> str:
    rule = [":--" if at < 3 else "--:" for at in range(len(table.heads))]
    lines = ["| " + " | ".join(cells) + " |" for cells in (table.heads, rule, *table.lines)]
    return f"**{table.title}**\n\n" + "\n".join(lines)


def check_plot(path: Path) -> None:
    """Whether a picture can be written there: told before anything is measured."""
    if path.suffix.lower() not in PLOTS:
        raise ConfigError(f"a plot is a file of {', '.join(PLOTS)}, got {path.name!r}", param="plot")
    check_folder(path, "plot")
    if find_spec("matplotlib") is None:
        raise MissingPackageError("a plot needs matplotlib; install it with pip install 'outrider[bench]'")


def check_folder(path: Path, param: str) -> None:
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {str(path.parent)!r} for {path.name}; make it first", param=param)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file in it", param=param)


def plot(report: Report, path: Path) -> None:
    """Every way to decode as a line: its kinds of work as dots, all of them as a mark with its interval."""
    check_plot(path)
    from matplotlib.figure import Figure

    shown = [row for row in report.rows if row.method != PLAIN and row.ratio_to_plain is not None]
    styles = list(dict.fromkeys(row.style for row in shown))
    kinds = list(dict.fromkeys(row.category for row in shown))
    whole = kinds[0] if len(kinds) == 1 else ALL
    height = {style: len(styles) - at for at, style in enumerate(styles)}
    figure = Figure(figsize=(10.0, 1.8 + 0.42 * max(1, len(styles))), layout="constrained")
    axes: Any = figure.add_subplot()
    axes.axvline(1.0, color="0.35", linewidth=1.2)
    axes.annotate(
        "plain", (1.0, 1.0), (3, -3), xycoords=("data", "axes fraction"), textcoords="offset points", va="top"
    )
    for at, kind in enumerate(kind for kind in kinds if kind != whole):
        rows = [row for row in shown if row.category == kind]
        axes.scatter(
            [row.ratio_to_plain for row in rows],
            [height[row.style] for row in rows],
            s=26,
            alpha=0.75,
            color=f"C{at % 10}",
            marker="os^Dv"[at // 10 % 5],
            label=kind,
        )
    for row in (row for row in shown if row.category == whole):
        middle, low, high = row.ratio_to_plain, row.ratio_to_plain_low, row.ratio_to_plain_high
        spread = [[middle - low], [high - middle]]  # type: ignore[operator]
        axes.errorbar([middle], [height[row.style]], xerr=spread, fmt="|", color="black", markersize=14, capsize=3)
    axes.set_yticks(list(height.values()), [style.name for style in height])
    axes.set_ylim(0.4, len(styles) + 0.6)
    axes.set_xlabel("speed beside plain decoding of the same engine (right of the line is quicker)")
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    settings = report.settings
    meaning = (
        "dots: kinds of work; bar: all of them, with its interval" if len(kinds) > 1 else f"{whole}, with intervals"
    )
    axes.set_title(f"{settings.get('model', '')}, whole answers ({meaning})", fontsize=11)
    if len(kinds) > 1:
        figure.legend(loc="outside right upper", fontsize=8)
    small = "\n".join(remarks(report)[:3])
    figure.supxlabel(small, fontsize=7, color="0.35")
    save(figure, path)
