"""A conversation on the terminal. The model's cache keeps what was said, so each turn reads only what is new."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any, Protocol

import typer

from outrider.cli.answer import Answer, ask, load, summarise
from outrider.errors import NotReadyError, RequestError

HELP = """/reset   forget the conversation
/system TEXT   set what the model is told before it, and begin anew
/stats   what the last answer took
/exit    leave (or Ctrl-D)
Ctrl-C stops an answer; what was said so far stays."""


Message = dict[str, str]


class Partner(Protocol):
    """Who answers."""

    name: str

    def ask(self, messages: list[Message]) -> str:
        """Show the answer as it comes, and return it."""

    def summarise(self) -> None:
        """Tell what the last answer took."""


class LocalPartner:
    """A model in this process."""

    def __init__(self, loading: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        self._engine = load(loading)
        self._settings = settings
        self._last: Answer | None = None
        self.name = self._engine.info.name
        self._engine.encode_chat(
            [{"role": "user", "content": "?"}]
        )  # one that cannot chat says so before anybody types

    def ask(self, messages: list[Message]) -> str:
        self._last = ask(self._engine, self._engine.encode_chat(messages), self._settings, 0.0, show=True)
        return self._last.result.text

    def summarise(self) -> None:
        if self._last is not None:
            summarise(self._last)


def converse(partner: Partner, system: str | None) -> None:
    """The command `chat`."""
    talk = Talk(system)
    if sys.stdin.isatty():
        _edit_lines()
        typer.secho(f"{partner.name}. /help lists what can be typed.", dim=True, err=True)
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
            partner.summarise() if talk.turns else typer.secho("nothing was said yet", dim=True, err=True)
        elif word.startswith("/"):
            typer.secho(f"there is no {word}; /help lists what there is", dim=True, err=True)
        elif line:
            try:
                said = partner.ask(talk.with_question(line))
            except (RequestError, NotReadyError) as error:  # too long, most of the time: the conversation is not lost
                typer.secho(f"{error.message}; /reset begins anew", fg="red", err=True)
                continue
            talk.turns += [("user", line), ("assistant", said)]


class Talk:
    """What was said."""

    def __init__(self, system: str | None) -> None:
        self.system = system
        self.turns: list[tuple[str, str]] = []

    def with_question(self, question: str) -> list[Message]:
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
