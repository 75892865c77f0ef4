"""Other libraries in the same comparison: same weights, prompts, threads and number of tokens, each in its own process.

One process at a time has something to do: a peer waits for its next question while others compute. xllamacpp is not
among them: it offers a server instead of a function that takes tokens, so it is compared with `outrider bench serve`.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

from outrider.bench.contest import Answer, Style, Task
from outrider.errors import ConfigError, OutriderError

LOAD_PATIENCE_S = 600.0
ANSWER_PATIENCE_S = 1800.0
LEAVE_PATIENCE_S = 2.0


class PeerKind(NamedTuple):
    """What must be installed, and what it can read."""

    module: str
    package: str
    only_gguf: bool = False


KINDS = {
    "transformers": PeerKind("transformers", "'outrider[hf]'"),
    "llama-cpp": PeerKind("llama_cpp", "llama-cpp-python", only_gguf=True),
}


class PeerError(OutriderError):
    """A peer that cannot take part, or no longer."""

    code = "peer_failed"


@dataclass(frozen=True, slots=True)
class Wish:
    """What a peer is to load. `context` is the longest prompt and its answer."""

    path: Path
    assistant: Path | None
    threads: int
    context: int


def check_names(names: Sequence[str]) -> None:
    for name in names:
        if name not in KINDS:
            raise ConfigError(f"there is no peer {name!r}; known are {', '.join(KINDS)}", param="peer")
    if len(set(names)) < len(names):
        raise ConfigError("a peer is named twice; leave one out", param="peer")


def why_missing(name: str) -> str | None:
    """A sentence when the peer is not installed."""
    kind = KINDS[name]
    if find_spec(kind.module) is not None:
        return None
    return f"{name} is not installed, so it takes no part; install it with pip install {kind.package}"


def why_unable(name: str, path: Path | None, batch: int) -> str | None:
    """A sentence when the peer cannot do what is asked. `path` is None where there are no weights."""
    if path is None:
        return f"{name} takes no part: a mock has no weights that others could load"
    if batch > 1:
        return f"{name} takes no part: peers answer one prompt at a time, and {batch} were asked for"
    if KINDS[name].only_gguf and path.suffix != ".gguf":
        return f"{name} takes no part: it reads GGUF files only, and the model is {path.name}"
    return None


class PeerProcess:
    """One peer with its model loaded. It lives until `close`, and dies with this process."""

    def __init__(self, name: str, wish: Wish, command: Sequence[str] | None = None) -> None:
        """command: another program that speaks as `peer_process` does."""
        self.name = name
        self._said = TemporaryFile(mode="w+", errors="replace")  # noqa: SIM115 - open as long as the process
        environment = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            command or [sys.executable, "-m", "outrider.bench.peer_process", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            encoding="utf-8",
            env={**os.environ, **environment},
            start_new_session=True,  # Ctrl-C is for us; the peer is told
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)  # sleeps in a read while others compute
        self._listener.start()
        try:
            about = self._ask(_wish(wish), LOAD_PATIENCE_S)
            self.version = str(about["version"])
            self.methods: list[tuple[str, Any]] = [(str(method), width) for method, width in about["methods"]]
            self.notes = [str(note) for note in about["notes"]]
        except BaseException as error:
            self.close()
            if isinstance(error, PeerError):
                raise PeerError(f"{name} takes no part: {error.message}") from None
            raise

    def contestants(self) -> list[PeerContestant]:
        return [PeerContestant(self, Style(self.name, method, width)) for method, width in self.methods]

    def ask(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._ask(question, ANSWER_PATIENCE_S)

    def _ask(self, question: Mapping[str, Any], patience_s: float) -> Mapping[str, Any]:
        line: str | None = None
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=patience_s)
        except queue.Empty:
            self._process.kill()  # an answer that comes late would be taken for the next one
            raise PeerError(f"it did not answer within {patience_s:g} seconds") from None
        except (OSError, ValueError):  # it is gone, and so is the pipe
            pass
        if line is None:
            raise PeerError(f"its process ended: {self._last_words()}")
        try:
            told = json.loads(line)
        except ValueError:
            told = None
        if not isinstance(told, dict):
            self._process.kill()
            raise PeerError(f"it answered {line.strip()[:80]!r}, which is no answer")
        if "error" in told:
            raise PeerError(f"it failed with {told['error']}")
        return told

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _last_words(self) -> str:
        self._leave()
        self._said.seek(0)
        lines = [line.strip() for line in self._said if line.strip()]
        return lines[-1][:300] if lines else f"it said nothing (exit code {self._process.returncode})"

    def close(self) -> None:
        """Tell it to leave, and make it when it is in the middle of something."""
        with suppress(OSError):  # it may be gone already
            if self._process.stdin is not None:
                self._process.stdin.close()
        self._leave()
        self._listener.join()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._said.close()

    def _leave(self) -> None:
        try:
            self._process.wait(LEAVE_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _wish(wish: Wish) -> dict[str, Any]:
    assistant = None if wish.assistant is None else str(wish.assistant)
    return {"path": str(wish.path), "assistant": assistant, "threads": wish.threads, "context": wish.context}


class PeerContestant:
    """One method of a peer."""

    is_coupled = False  # none of them promises it

    def __init__(self, peer: PeerProcess, style: Style) -> None:
        self.style, self._peer = style, peer

    def answer(self, task: Task) -> Answer:
        [prompt], [seed] = task.prompts, task.seeds
        told = self._peer.ask(
            {
                "method": self.style.method,
                "width": self.style.width,
                "prompt": prompt,
                "max_tokens": task.max_tokens,
                "temperature": task.temperature,
                "seed": seed,
            }
        )
        try:
            return Answer(
                tokens=[[int(token) for token in told["tokens"]]],
                seconds=float(told["seconds"]),
                first_s=float(told["first_s"]),
                rounds=int(told["rounds"]),
                drafted=int(told["drafted"]),
                accepted=int(told["accepted"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PeerError(f"it left out or misspelt {error}") from None
