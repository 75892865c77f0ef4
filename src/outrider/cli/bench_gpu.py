"""`outrider bench gpu` on the terminal, and as a page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import date
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from outrider.bench.machine import machine, versions
from outrider.bench.report import check_folder
from outrider.engine.runner import require_torch
from outrider.errors import ConfigError
from outrider.models.random_file import PREFIX
from outrider.models.source import ModelSource

if TYPE_CHECKING:
    from outrider.bench.gpu import Line
    from outrider.bench.gpu_checks import Check

CHECKED = "smollm2-135m"  # random weights whose logits are looked at, where no model is named


def show_gpu(shape: str, model: str | None, device: str, quick: bool, as_json: bool, out: Path | None) -> None:
    _require_gpu()
    if out is not None:
        check_folder(out, "out")
    from outrider.bench import gpu, gpu_checks

    checked = str(ModelSource.parse(model).fetch()) if model is not None else PREFIX + CHECKED
    checks: list[Check] = []
    for check in gpu_checks.checks(checked, device, quick):
        checks.append(check)
        if as_json:
            typer.echo(json.dumps({**check._asdict(), "good": check.is_good}))
        else:
            word = "" if check.limit is None else "ok" if check.is_good else "WRONG"
            typer.echo(f"{word:<5} {check.name:<72}{check.value:>10.2g}")
    measured = [gpu.readings(PREFIX + shape, device, quick)]
    if model is not None:
        measured.append(gpu.texts(checked, device, quick))
    lines: list[Line] = []
    _print_lines(chain.from_iterable(measured), as_json, lines)
    if out is not None:
        out.write_text("\n".join(_page(shape, checked, checks, lines)) + "\n", encoding="utf-8")
    failed = sum(not check.is_good for check in checks)
    if failed:
        raise ConfigError(f"{failed} checks failed; the numbers mean nothing until they are right")


def show_rounds(
    shape: str, draft: str, device: str, sizes: list[int], peer: bool, quick: bool, as_json: bool, out: Path | None
) -> None:
    _require_gpu()
    if out is not None:
        check_folder(out, "out")
    from outrider.bench import gpu_peers, gpu_rounds

    measured = [
        gpu_rounds.rounds(shape, draft, device, quick),
        gpu_rounds.batches(shape, draft, device, quick, sizes),
    ]
    if peer:
        length = gpu_peers.QUICK if quick else gpu_rounds.BATCHED
        measured.append(gpu_peers.transformers_batches(shape, device, sizes, gpu_rounds.CONTEXT, length))
    lines: list[Line] = []
    try:
        _print_lines(chain.from_iterable(measured), as_json, lines)
    finally:  # what was measured is not lost when the rest fails
        if out is not None:
            out.write_text("\n".join(_rounds_page(shape, draft, lines)) + "\n", encoding="utf-8")


def _require_gpu() -> None:
    require_torch("bench gpu")
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("there is no GPU that torch can use; bench gpu measures one, bench kernels measures a CPU")


def _print_lines(measured: Iterable[Line], as_json: bool, lines: list[Line]) -> None:
    for line in measured:
        lines.append(line)
        if as_json:
            typer.echo(json.dumps(asdict(line)))
        else:
            typer.echo(f"{line.name:<50}{line.value:>9.4g} {line.unit:<9}{_span(line):>16}  {line.note}")


def _span(line: Line) -> str:
    return "" if line.low is None else f"{line.low:.4g} - {line.high:.4g}"


def _limit(check: Check) -> str:
    return "" if check.limit is None else f"{check.limit:.2g}"


def _page(shape: str, checked: str, checks: list[Check], lines: list[Line]) -> Iterator[str]:
    yield "# On a GPU\n"
    yield from _written("bench gpu")
    yield f"Speed is of random weights of the shape {shape}; checks and texts are of {Path(checked).name}.\n"
    yield "| checked first | found | limit |\n| :-- | --: | --: |"
    yield from (f"| {check.name} | {check.value:.2g} | {_limit(check)} |" for check in checks)
    yield from _table(lines)


def _rounds_page(shape: str, draft: str, lines: list[Line]) -> Iterator[str]:
    yield "# Speculation on a GPU\n"
    yield from _written("bench gpu-rounds")
    yield f"Random weights: the target has the shape {shape} and counts, the draft has the shape {draft} and is right"
    yield "as often as it is told (`docs/architecture.md`). Greedy; prompts are random tokens."
    yield from _table(lines)


def _written(command: str) -> Iterator[str]:
    found, versioned = machine(), versions()
    yield f"Written by `outrider {command} --out` on {date.today()}, commit {versioned.pop('commit') or 'unknown'}."
    yield f"{found['gpu']}; {', '.join(f'{name} {version}' for name, version in versioned.items() if version)}."


def _table(lines: list[Line]) -> Iterator[str]:
    yield "\n| | | range | |\n| :-- | --: | --: | :-- |"
    yield from (f"| {line.name} | {line.value:.4g} {line.unit} | {_span(line)} | {line.note} |" for line in lines)
