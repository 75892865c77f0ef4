"""The command line. Heavy modules load inside the commands, so `outrider --help` answers at once."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider import __version__
from outrider.errors import OutriderError

if TYPE_CHECKING:
    from outrider.types import Event, Result

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Speculative decoding: a draft guesses ahead, the target checks its guesses in one pass.",
)


def main() -> None:
    """Entry point: an error of ours is one line and exit code 1."""
    try:
        app()
    except OutriderError as error:
        print(f"outrider: {error.message}", file=sys.stderr)  # noqa: T201
        raise SystemExit(1) from None


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    prompt: Annotated[str, typer.Argument(help="Text in the mock's small vocabulary.")] = " the rider",
    draft: Annotated[str, typer.Option(help="model, ngram or none")] = "model",
    width: Annotated[int, typer.Option(help="Tokens drafted per round; 0 is plain decoding.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="Length of the answer.")] = 32,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
    seed: Annotated[int | None, typer.Option(help="Makes the text repeatable, whatever the width or draft.")] = 1,
    accept: Annotated[str, typer.Option(help="auto, rejection or coupled")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One object instead of text.")] = False,
) -> None:
    """Speculate on the built-in mock model and show which tokens were drafted and kept.

    The mock draws from a fixed random distribution, so its text means nothing; everything else is the real engine.
    """
    from outrider.engine.engine import Engine

    engine = Engine.load("mock", method=draft, width=None if draft == "none" else width)
    stream = engine.stream(prompt, max_tokens=max_tokens, temperature=temperature, seed=seed, accept=accept)
    events = list(stream)
    result = events[-1].result
    assert result is not None, "the last event carries the result"
    if as_json:
        typer.echo(json.dumps(_as_json(result)))
    else:
        _show(prompt, events, result)


@app.command()
def bench(
    quick: Annotated[bool, typer.Option(help="Fewer tokens and repeats.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One object per line.")] = False,
) -> None:
    """Measure what the engine itself costs per emitted token, on a mock whose passes are nearly free.

    Medians and ranges over repeats. Wall time includes the mock's own passes, engine time does not.
    """
    from outrider.bench.overhead import readings

    if not as_json:
        typer.echo(f"{'us per emitted token':<46}{'engine':>9}{'range':>20}{'wall':>9}{'tokens/round':>14}")
    for reading in readings(quick=quick):  # printed as they come, without a spinner: its thread would be measured too
        if as_json:
            typer.echo(json.dumps(asdict(reading)))
            continue
        span = f"{reading.low_us:.1f} - {reading.high_us:.1f}"
        numbers = f"{reading.median_us:>9.1f}{span:>20}{reading.wall_us:>9.1f}{reading.tokens_per_round:>14.2f}"
        typer.echo(f"{reading.name:<46}{numbers}")


def _as_json(result: Result) -> dict[str, Any]:
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "usage": {"prompt_tokens": result.num_prompt_tokens, "completion_tokens": len(result.token_ids)},
        "seed": result.seed,
        "accept": result.rule,
        "speculation": result.statistics.report(),
    }


def _show(prompt: str, events: list[Event], result: Result) -> None:
    """The text, a line per round, and the statistics."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from outrider.backends.mock import mock_tokenizer

    console = Console()
    piece = mock_tokenizer(32).token_bytes

    def words(tokens: list[int]) -> str:
        return " ".join(repr(piece(token).decode(errors="replace")) for token in tokens) or "-"

    text = Text(prompt, style="dim")
    rounds = Table("round", "drafted", "kept", "then", box=None, pad_edge=False)
    for number, event in enumerate(events, 1):
        shown = [piece(token).decode(errors="replace") for token in event.tokens]
        text.append("".join(shown[: event.accepted]), style="green")
        text.append("".join(shown[event.accepted :]), style="bold")
        kind = "plain" if not event.drafts else "bonus" if event.accepted == len(event.drafts) else "replacement"
        own = event.tokens[event.accepted :]
        rounds.add_row(
            str(number), words(event.drafts), str(event.accepted), f"{kind} {words(own)}" if own else "the answer ends"
        )
    console.print(text)
    console.print("\n(green: drafted and kept; bold: the target's own)\n", style="dim")
    console.print(rounds)
    counts = result.statistics
    console.print(
        f"\n{counts.tokens} tokens in {counts.rounds} rounds, {counts.tokens_per_round:.2f} a round; "
        f"{counts.drafted} drafted: {counts.accepted} kept, {counts.rejected} replaced, {counts.unread} unread; "
        f"{counts.bonus} bonus; acceptance {counts.acceptance_rate:.0%}",
        highlight=False,
    )
    by_position = " ".join(f"{share:.0%}" for share in counts.accepted_by_position) or "-"
    console.print(f"kept by position: {by_position}", highlight=False)
    draft_ms, score_ms, judge_ms = (1e3 * s for s in (counts.draft_s, counts.score_s, counts.judge_s))
    console.print(
        f"finish {result.finish_reason}; seed {result.seed}, rule {result.rule}; "
        f"draft {draft_ms:.1f} ms, score {score_ms:.1f} ms, judge {judge_ms:.1f} ms",
        highlight=False,
    )
    for reason, times in counts.fallbacks.items():
        console.print(f"fallback, {times} times: {reason}", highlight=False)
