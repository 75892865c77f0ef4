"""A conversation on the terminal. The model's cache keeps what was said, so each turn reads only what is new."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

import typer

from outrider.cli.answer import ask, load, summarise
from outrider.errors import RequestError

HELP = """/reset   forget the conversation
/system TEXT   set what the model is told before it, and begin anew
/stats   what the last answer took
/exit    leave (or Ctrl-D)
Ctrl-C stops an answer; what was said so far stays."""


def converse(loading: Mapping[str, Any], settings: Mapping[str, Any], system: str | None) -> None:
    """The command `chat`."""
    engine = load(loading)
    talk = Talk(system)
    engine.encode_chat(talk.with_question("?"))  # a model that cannot chat says so before anybody types
    if sys.stdin.isatty():
        _edit_lines()
        typer.secho(f"{engine.info.name}. /help lists what can be typed.", dim=True, err=True)
    last = None
    while (line := _read()) is not None:
        word, _, rest = line.partition(" ")
        if word in ("/exit", "/quit"):
            break
        if word == "/help":
            typer.secho(HELP, dim=True, err=True)
        elif word == "/reset":
            talk = Talk(talk.system)
        elif word == "/system":
            talk = Talk(rest or None)
        elif word == "/stats":
            summarise(last) if last is not None else typer.secho("nothing was said yet", dim=True, err=True)
        elif word.startswith("/"):
            typer.secho(f"there is no {word}; /help lists what there is", dim=True, err=True)
        elif line:
            try:
                last = ask(engine, engine.encode_chat(talk.with_question(line)), settings, 0.0, show=True)
            except RequestError as error:  # too long, most of the time: the conversation is not lost for it
                typer.secho(f"{error.message}; /reset begins anew", fg="red", err=True)
                continue
            talk.turns += [("user", line), ("assistant", last.result.text)]


class Talk:
    """What was said."""

    def __init__(self, system: str | None) -> None:
        self.system = system
        self.turns: list[tuple[str, str]] = []

    def with_question(self, question: str) -> list[dict[str, str]]:
        """The messages that ask for the next answer."""
        turns = [*self.turns, ("user", question)]
        if self.system is not None:
            turns.insert(0, ("system", self.system))
        return [{"role": role, "content": content} for role, content in turns]


def _edit_lines() -> None:
    """Arrow keys and history, where Python was built with them."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401


def _read() -> str | None:
    """The next line; None at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:  # at the prompt it leaves, as in a shell of any other language
        typer.echo()
        return None
