"""One request to a server that speaks OpenAI's language: streamed, timed, and never an exception but a finding.

Tokens are counted by the server's own `usage` where it gives one, otherwise by the chunks that brought text.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from outrider.bench.traffic import Call
from outrider.errors import ConfigError, MissingPackageError

Outcome = Literal["ok", "refused", "error"]

REFUSALS = (429, 503)  # the server says that it has too much to do
LOCAL = ("localhost", "127.0.0.1", "::1")
LONGEST_MESSAGE = 200
TEXTS = ("content", "text", "reasoning_content", "reasoning")  # where servers put what the model says


@dataclass(frozen=True, slots=True)
class Place:
    """A server, and how it is asked."""

    base: str  # with the version, such as http://127.0.0.1:8000/v1
    model: str = ""
    key: str | None = None
    temperature: float | None = 0.0
    patience_s: float = 600.0  # without a word
    seed: int = 0
    is_chat: bool = True
    has_usage: bool = True  # knows `stream_options`
    is_own: bool = False  # it is ours: it can decode plainly, and tells what speculation did
    drafts: bool = False

    def body(self, call: Call, is_plain: bool) -> dict[str, Any]:
        """What is sent; a seed makes plain decoding and speculation say the same."""
        said = [{"role": "user", "content": call.prompt}]
        body: dict[str, Any] = {"messages": said} if self.is_chat else {"prompt": call.prompt}
        body |= {"model": self.model, "max_tokens": call.max_tokens, "stream": True}
        if self.has_usage:
            body["stream_options"] = {"include_usage": True}
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.temperature != 0.0:
            body["seed"] = self.seed + call.number
        if self.is_own and is_plain:
            body["speculation"] = {"off": True}
        return body


@dataclass(slots=True)
class Sample:
    """What came of one request. Times are seconds of the clock; `due` is when it should have been sent."""

    due: float
    started: float
    first: float | None = None  # when the first text came
    last: float | None = None
    ended: float = 0.0
    outcome: Outcome = "error"
    status: int = 0
    problem: str = ""
    wait_s: float | None = None  # how long a server that refuses wants to be left alone
    chunks: int = 0  # with text
    counted: int | None = None  # tokens, as the server counts them
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    is_over: bool = False  # the server said that the answer is complete

    @property
    def tokens(self) -> int:
        return self.chunks if self.counted is None else self.counted

    @property
    def ttft(self) -> float | None:
        return None if self.first is None else self.first - self.due

    @property
    def per_token(self) -> float | None:
        """Seconds between tokens after the first; None when there is no second one."""
        if self.first is None or self.last is None or self.tokens < 2:
            return None
        return (self.last - self.first) / (self.tokens - 1)

    @property
    def latency(self) -> float:
        return self.ended - self.due


def open_client(place: Place) -> Any:
    """Connections without limit: who has to wait for one would be measured, not the server."""
    httpx = import_httpx()
    if place.key is not None and not re.fullmatch("[!-~]+", place.key):
        raise ConfigError("an API key has letters, digits and signs only, no blanks", param="api_key")
    return httpx.AsyncClient(
        timeout=httpx.Timeout(30.0, read=place.patience_s, pool=None),
        # Idle connections are left before the server would close them, maybe just when they are used again
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0),
        trust_env=urlsplit(place.base).hostname not in LOCAL,  # no proxy stands between this machine and itself
    )


async def ask(client: Any, place: Place, call: Call, *, is_plain: bool, due: float | None = None) -> Sample:
    """One streamed request."""
    httpx = import_httpx()
    started = time.perf_counter()
    sample = Sample(started if due is None else due, started)
    path = "/chat/completions" if place.is_chat else "/completions"
    sending = client.stream("POST", place.base + path, json=place.body(call, is_plain), headers=headers_of(place))
    try:
        async with sending as response:
            sample.status = response.status_code
            if response.status_code == 200:
                await _read(response, sample)
            else:
                _take_refusal(sample, response.headers, await response.aread())
    except httpx.ReadTimeout:
        sample.problem = f"nothing came for {place.patience_s:g} s"
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:  # the last: half a surrogate pair in a prompt
        sample.problem = f"{type(error).__name__}: {error}".rstrip(": ")
    sample.ended = time.perf_counter()
    if not sample.problem:
        sample.outcome = "ok"
    return sample


async def _read(response: Any, sample: Sample) -> None:
    """The events of a stream, as they come."""
    rest, is_stream = b"", False
    async for part in response.aiter_bytes():
        now = time.perf_counter()
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            is_stream |= line.startswith(b"data:")
            _take_line(line, sample, now)
    _take_line(rest, sample, time.perf_counter())
    if not sample.problem and not sample.is_over:
        sample.problem = (
            "the stream ended early" if is_stream else "the answer is no stream of events, as OpenAI's servers send it"
        )


def _take_line(line: bytes, sample: Sample, now: float) -> None:
    if not line.startswith(b"data:"):
        return
    data = line[5:].strip()
    if data == b"[DONE]":
        sample.is_over = True
        return
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError):
        chunk = None
    if not isinstance(chunk, dict):
        sample.problem = sample.problem or "an event of the stream is no JSON object"
    elif chunk.get("error"):
        sample.problem = sample.problem or message_of(chunk) or "the server ended the stream with an error"
    else:
        _take_chunk(chunk, sample, now)


def _take_chunk(chunk: dict[str, Any], sample: Sample, now: float) -> None:
    for choice in dicts_of(chunk.get("choices")):
        has_ended = bool(choice.get("finish_reason"))
        said = {**choice, **(choice["delta"] if isinstance(choice.get("delta"), dict) else {})}
        has_text = any(said.get(name) for name in TEXTS)
        sample.is_over |= has_ended
        sample.chunks += has_text
        if has_text or has_ended:
            sample.first = now if sample.first is None else sample.first
            sample.last = now
    usage = chunk.get("usage")
    if isinstance(usage, dict):
        _take_usage(usage, sample)


def _take_usage(usage: dict[str, Any], sample: Sample) -> None:
    counted = usage.get("completion_tokens")
    if isinstance(counted, int) and counted >= 0:
        sample.counted = counted
    speculation = usage.get("speculation")
    if isinstance(speculation, dict):
        for name in ("rounds", "drafted", "accepted"):
            value = speculation.get(name)
            setattr(sample, name, value if isinstance(value, int) else 0)


def _take_refusal(sample: Sample, headers: Any, content: bytes) -> None:
    sample.outcome = "refused" if sample.status in REFUSALS else "error"
    try:
        said = message_of(json.loads(content))
    except (ValueError, RecursionError):  # a page in HTML
        said = ""
    wanted = headers.get("Retry-After", "")
    sample.wait_s = float(wanted) if wanted.isdecimal() else None  # it may be a date as well
    sample.problem = f"{sample.status}: {said}" if said else f"the server answered {sample.status}"


def headers_of(place: Place) -> dict[str, str]:
    return {} if place.key is None else {"Authorization": f"Bearer {place.key}"}


def message_of(content: Any) -> str:
    """What an error's body says, in OpenAI's shape or a similar one."""
    error = content.get("error", content) if isinstance(content, dict) else None
    said = error if isinstance(error, str) else (error.get("message") if isinstance(error, dict) else None)
    return " ".join(str(said or "").split())[:LONGEST_MESSAGE]


def dicts_of(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def import_httpx() -> Any:
    try:
        import httpx
    except ImportError:
        raise MissingPackageError("this bench needs httpx; install it with pip install 'outrider[serve]'") from None
    return httpx
