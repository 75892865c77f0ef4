"""Talking with a server (`chat --url`): the same conversation and the same colours, by HTTP."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import typer

from outrider.cli.answer import tint
from outrider.cli.conversation import Message
from outrider.errors import MissingPackageError, NotReadyError, OutriderError, RequestError

HELD = (
    "backend",
    "device",
    "run_ahead",
    "strict",
    "dtype",
    "kv_type",
    "threads",
    "context",
)  # of loading: the server has decided them


class RemotePartner:
    """A server that answers. Settings are those of `chat`; what is not given is the server's choice."""

    def __init__(self, url: str, key: str | None, loading: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        self._httpx = _httpx()
        self._url = url.rstrip("/").removesuffix("/v1")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        # Reading has no limit: a long prompt takes its time, and the server sends signs of life
        timeout = self._httpx.Timeout(10.0, read=None)
        self._client = self._httpx.Client(headers=headers, timeout=timeout)
        self._body = _body(loading, settings)
        self._last: dict[str, Any] | None = None  # usage of the last answer
        self._times = (0.0, 0.0)  # seconds to its first token, and from there to its end
        served = self._get("/v1/models")["data"][0]
        self.name: str = served["id"]
        if not served["chat"]:
            raise RequestError(f"{self.name} at {self._url} has no chat template; use a model that can chat")

    def ask(self, messages: list[Message]) -> str:
        """Show the answer as it comes; Ctrl-C leaves, and the server stops too."""
        body = {**self._body, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        text, self._last = "", None
        started = time.perf_counter()
        first: float | None = None
        try:
            for chunk in self._chunks(body):
                if chunk.get("usage"):
                    self._last = chunk["usage"]
                for choice in chunk["choices"]:
                    piece = choice["delta"].get("content") or ""
                    if piece and first is None:
                        first = time.perf_counter()
                    _show(chunk, piece)
                    text += piece
        except KeyboardInterrupt:
            pass
        typer.echo()
        self._times = (first or started) - started, time.perf_counter() - (first or started)
        return text

    def summarise(self) -> None:
        """What the last answer took, on standard error."""
        if self._last is None:
            return
        usage, counts = self._last, self._last["speculation"]
        waited, took = self._times
        speed = f", {(usage['completion_tokens'] - 1) / took:.1f} tokens/s" if took else ""
        lines = [
            f"{usage['completion_tokens']} tokens{speed}; first after {waited:.2f} s; seed {counts['seed']}, "
            f"{counts['accept']}"
        ]
        if counts["drafted"]:
            lines.append(
                f"{counts['method']}: {counts['tokens_per_round']:.2f} tokens a round; {counts['drafted']} drafted, "
                f"{counts['accepted']} kept ({counts['acceptance_rate']:.0%})"
            )
        if counts.get("advice"):
            lines.append(counts["advice"])
        for line in lines:
            typer.secho(line, dim=True, err=True)

    def _chunks(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            with self._client.stream("POST", f"{self._url}/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise _refused(response)
                for line in response.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        chunk = json.loads(line.removeprefix("data: "))
                        if "error" in chunk:
                            raise RequestError(chunk["error"]["message"])
                        yield chunk
        except self._httpx.HTTPError as error:
            raise self._lost(error) from None

    def _get(self, path: str) -> Any:
        try:
            response = self._client.get(self._url + path)
        except (self._httpx.HTTPError, self._httpx.InvalidURL) as error:
            raise self._lost(error) from None
        if response.status_code != 200:
            raise _refused(response)
        try:
            return response.json()
        except ValueError:
            raise RequestError(f"{self._url} is no server of outrider's; check --url") from None

    def _lost(self, error: Exception) -> NotReadyError:
        return NotReadyError(f"cannot talk with {self._url} ({error}); is `outrider serve` running there?")


def _body(loading: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What of the command line a request can carry."""
    for name in HELD:
        if loading[name] not in (None, False, "auto"):
            option = name.replace("_", "-")
            raise typer.BadParameter(
                "is the server's choice, which --url names; leave it out", param_hint=f"--{option}"
            )
    speculation = {"trace": True, "draft": loading["draft"], "width": loading["width"], "tree": loading["tree"]}
    return {
        **{name: value for name, value in settings.items() if value is not None},
        "speculation": {name: value for name, value in speculation.items() if value is not None},
    }


def _show(chunk: Mapping[str, Any], piece: str) -> None:
    """A round's text, what was drafted and kept in another colour."""
    tokens = chunk.get("speculation", {}).get("tokens", [])
    kept = "".join(token["text"] for token in tokens if token["origin"] == "kept")
    tint(piece, len(kept) if piece.startswith(kept) else 0)


def _refused(response: Any) -> OutriderError:
    try:
        said = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        said = f"the server answered {response.status_code}; check --url"
    if response.status_code == 401 and "OUTRIDER_API_KEY" not in os.environ:
        said += "; give it with --api-key or $OUTRIDER_API_KEY"
    return RequestError(said)


def _httpx() -> Any:
    try:
        import httpx
    except ImportError:
        raise MissingPackageError("--url needs httpx; install it with pip install 'outrider[serve]'") from None
    return httpx
