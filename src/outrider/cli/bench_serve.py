"""`outrider bench serve` on the terminal: a line for every load and mode, and what speculation did to each load."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from outrider.bench.policies import Spread
    from outrider.bench.served import Reading

INTERRUPTED = 130  # the exit code of Ctrl-C
UNITS = {"clients": "clients", "rate": "requests/s", "trace": "times the speed of the trace"}


def show_serve(
    url: str | None = None,
    model: str | None = None,
    draft: str | None = None,
    serve_arguments: Sequence[str] = (),
    clients: str | None = None,
    rate: str | None = None,
    trace: Path | None = None,
    speed: str = "1",
    requests: int | None = None,
    seconds: float | None = None,
    prompts: Path | None = None,
    max_tokens: int = 64,
    temperature: float | None = 0.0,
    api_key: str | None = None,
    ttft: float | None = 2.0,
    tpot: float | None = 0.1,
    compare: bool = True,
    text: bool = False,
    warm_up: int = 4,
    patience: float = 600.0,
    seed: int = 0,
    as_json: bool = False,
) -> None:
    """A server under load, plainly and with speculation at the same arrivals."""
    from outrider.bench.serve import Target, readings
    from outrider.bench.served import Promise
    from outrider.bench.traffic import plan
    from outrider.bench.work import OWN, read_work

    traffics = plan(
        OWN if prompts is None else read_work(prompts),
        clients=clients,
        rate=rate,
        trace=trace,
        speed=speed,
        num_requests=requests,
        seconds=seconds,
        max_tokens=max_tokens,
        seed=seed,
    )
    target = Target(
        url=url,
        model=model,
        draft=draft,
        arguments=serve_arguments,
        key=api_key,
        temperature=temperature,
        as_text=text,
        patience_s=patience,
    )
    news, is_interrupted = News(), False
    taken: list[Reading] = []
    found = readings(traffics, target, promise=Promise(ttft, tpot), compare=compare, warm_up=warm_up, tell=news.tell)
    try:
        for reading in found:
            news.clear()
            if as_json:
                typer.echo(json.dumps(asdict(reading)))
            else:
                _show(reading, taken)
            taken.append(reading)
            is_interrupted |= reading.is_interrupted
    except KeyboardInterrupt:  # before a run had begun
        is_interrupted = True
    finally:
        news.clear()
    if not as_json:
        for note in notes(taken):
            typer.echo(note)
    if is_interrupted:
        raise typer.Exit(INTERRUPTED)


class News:
    """How far it is: one line that is written over, and only where somebody looks."""

    def __init__(self) -> None:
        self._length = 0

    def tell(self, words: str) -> None:
        if sys.stderr.isatty():
            self.clear()
            typer.secho(words, dim=True, err=True, nl=False)
            self._length = len(words)

    def clear(self) -> None:
        if self._length:
            typer.echo("\r" + " " * self._length + "\r", err=True, nl=False)
            self._length = 0


def _show(reading: Reading, before: Sequence[Reading]) -> None:
    if not before:
        typer.echo(heading(reading))
    typer.echo(line(reading))
    if before and (before[-1].mode, reading.mode) == ("plain", "speculation") and before[-1].load == reading.load:
        typer.echo(comparison(before[-1], reading))


def heading(reading: Reading) -> str:
    """What stands above the lines."""
    first = f"{reading.model}, load in {UNITS[reading.kind]}"
    groups = f"{'first token, s':>21}{'per token, ms':>21}{'whole':>7}{'':>6}{'tokens':>8}"
    rates = f"{'answered':>10}{'tokens/s':>9}{'requests/s':>11}{'goodput':>8}"
    spreads = "".join(f"{name:>7}" for name in ("p50", "p90", "p99", "p50", "p90", "p99", "p50, s"))
    return f"{first:<56}{groups}\n{'load':<6}{'mode':<12}{rates}{spreads}{'kept':>6}{'a round':>8}"


def line(reading: Reading) -> str:
    """The reading as a line of a table."""
    answered = f"{reading.ok}/{reading.requests}"
    rates = f"{reading.tokens_per_second:>9.1f}{reading.requests_per_second:>11.2f}{reading.goodput:>8.2f}"
    spreads = _cells(reading.ttft) + _cells(reading.per_token, 1e3) + _cells(reading.latency)[:7]
    kept = "-" if reading.acceptance is None else f"{reading.acceptance:.0%}"
    per_round = "-" if reading.tokens_per_round is None else f"{reading.tokens_per_round:.2f}"
    return f"{reading.load:<6g}{reading.mode:<12}{answered:>10}{rates}{spreads}{kept:>6}{per_round:>8}"


def _cells(spread: Spread | None, unit: float = 1.0) -> str:
    """Median, p90 and p99, seven places each."""
    if spread is None:
        return f"{'-':>7}" * 3
    values = (value * unit for value in (spread.p50, spread.p90, spread.p99))
    return "".join(f"{value:>7.{3 if value < 10 else 1 if value < 1000 else 0}f}" for value in values)


def comparison(plain: Reading, other: Reading) -> str:
    """What speculation did to a load, as ratios."""
    parts = [
        f"{name} {after / before:.2f}x"
        for name, before, after in (
            ("tokens/s", plain.tokens_per_second, other.tokens_per_second),
            ("first token p50", _median(plain.ttft), _median(other.ttft)),
            ("per token p50", _median(plain.per_token), _median(other.per_token)),
            ("whole answer p50", _median(plain.latency), _median(other.latency)),
        )
        if before and after
    ]
    return f"      speculation over plain: {', '.join(parts) or 'nothing to compare'}"


def _median(spread: Spread | None) -> float:
    return 0.0 if spread is None else spread.p50


def notes(taken: Sequence[Reading]) -> list[str]:
    """What has to be known to read the numbers."""
    if not taken:
        return []
    first = taken[0]
    promised = [
        f"the first token within {first.promised_ttft:g} s" if first.promised_ttft is not None else "",
        f"{first.promised_per_token * 1e3:g} ms per token" if first.promised_per_token is not None else "",
    ]
    said = [
        f"goodput: requests/s that were answered with {' and '.join(filter(None, promised))}"
        if any(promised)
        else "goodput: requests/s that were answered; --ttft and --tpot say what is good",
        "per token: from the first chunk to the last, over the tokens but one; a chunk may carry several tokens",
    ]
    if any(reading.tokens_from == "chunks" for reading in taken):
        said.append("the server does not count its tokens: chunks with text are counted instead")
    if not all(reading.is_fresh for reading in taken):
        said.append(
            "prompts were asked more than once of the same caches, which may help later runs; more prompts (--prompts) "
            "or fewer requests avoid it, and without --url every run has caches of its own"
        )
    for reading in taken:
        name = f"{reading.load:g} {UNITS[reading.kind]}, {reading.mode}"
        if reading.refused:
            said.append(f"{name}: refused " + ", ".join(f"{n} with {status}" for status, n in reading.refused.items()))
        said += [f"{name}: {count} failed: {problem}" for problem, count in reading.errors.items()]
        if reading.is_client_late:
            late = f"{reading.client_late_p99 * 1e3:.0f} ms"
            said.append(f"{name}: this client was {late} late at p99: the numbers are its own, not the server's")
        if reading.is_interrupted:
            said.append(f"{name}: interrupted, {reading.unfinished} requests were still running")
    return said
