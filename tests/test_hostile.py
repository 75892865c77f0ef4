"""Bad input and bad clients against server processes: never a 500, never a stuck request, and nothing stays behind.

Three servers: an open one as people start it, a small one whose queue is soon full, and a `tight` one with keys, pages
and short patience. After every test each that was used must be well, idle and without pages in use, and must not have
answered 500 or written a traceback meanwhile.
"""

from __future__ import annotations

import concurrent.futures
import gzip
import http.client
import io
import json
import re
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import pytest

from outrider.bench.process import ServerProcess

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

Json = dict[str, Any]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
LONG = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True}
SHORT = {"prompt": "a", "max_tokens": 2}
PATIENCE_S = 5.0  # for everything of a request to be gone after its end
LATE_S = 1.0  # an event loop that answers /health later than this was blocked

# Keys, pages, short patience and a model that takes its time: things that `outrider serve` has no options for.
TIGHT = """
from dataclasses import replace

from outrider.backends.mock import mock_tokenizer
from outrider.backends.paged_mock import PagedMock
from outrider.config import SchedulerConfig, SuffixConfig
from outrider.draft.model import ModelDrafter
from outrider.draft.suffix import SuffixDrafter
from outrider.engine.engine import Engine
from outrider.engine.presets import PRESETS
from outrider.kv.pages import Pages
from outrider.server.run import Place, serve
from outrider.server.settings import ServerSettings

preset, pages = PRESETS["mock-cost"], Pages(1500, 16)
target = PagedMock(replace(preset.target, seconds_per_pass=0.004), pages)
draft = PagedMock(replace(preset.draft, seconds_per_pass=0.0), pages)
drafters = [ModelDrafter(draft, shares_slots=True), SuffixDrafter(SuffixConfig())]
tokenizer = mock_tokenizer(preset.target.vocab_size, text=True)
scheduling = SchedulerConfig(max_batch=4, max_queue=8)
engine = Engine(target, drafters, tokenizer=tokenizer, scheduling=scheduling, defaults=preset.defaults)
keys = ("first", "s\\u00e9cond")
settings = ServerSettings(model_name="tight", api_keys=keys, body_timeout_s=1.0, send_timeout_s=1.0)
raise SystemExit(serve(engine, settings, Place(port=0), lambda url: print(f"answers at {url}", flush=True)))
"""
FIRST, SECOND = ({"Authorization": "Bearer first"}, {"Authorization": "Bearer sécond".encode()})

HTTP = httpx.Client(timeout=20, limits=httpx.Limits(max_keepalive_connections=0), verify=False, trust_env=False)


class Target:
    """A server under attack."""

    def __init__(self, process: ServerProcess) -> None:
        self.process, self.url = process, process.url
        self.port = int(self.url.rsplit(":", 1)[1])

    def get(self, path: str, **options: Any) -> Any:
        return HTTP.get(f"{self.url}{path}", **options)

    def send(self, path: str, body: Json | bytes, headers: Any = None, **options: Any) -> Any:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **(headers or {})}
        return HTTP.post(f"{self.url}{path}", content=raw, headers=headers, **options)

    def refusal(
        self, path: str, body: Json | bytes, status: int = 400, headers: Any = None, timeout: float = 20
    ) -> Json:
        response = self.send(path, body, headers, timeout=timeout)
        assert response.status_code == status, (response.status_code, response.text[:500])
        return error_of(response.content)

    def connect(self, data: bytes = b"", *, small: bool = False) -> socket.socket:
        """`small`: as little as possible is buffered on our side."""
        connection = socket.socket()
        if small:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(10)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(data)
        return connection

    def exchange(self, data: bytes) -> list[Reply]:
        """Send bytes; everything that comes back until the server closes."""
        with self.connect() as connection:
            with suppress(ConnectionError):  # it may have closed before the end
                connection.sendall(data)
            return replies(everything(connection))

    def figures(self) -> dict[str, float]:
        lines = [line for line in self.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def num_failures(self) -> float:
        """Answers of 500 so far."""
        told = self.figures()
        return sum(count for name, count in told.items() if re.match(r'outrider_http_requests_total.*status="5', name))

    def wait_for(self, is_so: Callable[[dict[str, float]], bool], what: str, patience_s: float = PATIENCE_S) -> None:
        until = time.monotonic() + patience_s
        while not is_so(told := self.figures()):
            assert time.monotonic() < until, (what, {name: told[name] for name in told if "requests_" in name})
            time.sleep(0.02)

    def wait_until_idle(self) -> None:
        self.wait_for(is_idle, "something is still there")


def is_idle(told: dict[str, float]) -> bool:
    held = told.get('outrider_pages{state="held"}', 0)
    return told["outrider_requests_running"] == told["outrider_requests_waiting"] == held == 0


@contextmanager
def unharmed(target: Target) -> Iterator[Target]:
    """Whatever is done inside, it is well afterwards."""
    failures, said = target.num_failures(), len(target.process.errors())
    yield target
    target.wait_until_idle()
    assert target.get("/health").status_code == 200
    assert target.num_failures() == failures, "it answered 500"
    assert "Traceback" not in target.process.errors()[said:], target.process.errors()[said:]


class ScriptProcess(ServerProcess):
    """A server started by a script instead of the command."""

    def __init__(self, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
        start = subprocess.Popen
        monkeypatch.setattr(subprocess, "Popen", lambda _, **more: start([sys.executable, "-c", script], **more))
        super().__init__(())


@contextmanager
def attacked(make: Callable[[], ServerProcess]) -> Iterator[Target]:
    process = make()
    try:
        yield Target(process)
    finally:
        assert process.end() == 0


@pytest.fixture(scope="module")
def one_open() -> Iterator[Target]:
    with attacked(lambda: ServerProcess(("mock-text", "--quiet"))) as target:
        yield target


@pytest.fixture(scope="module")
def one_small() -> Iterator[Target]:
    with attacked(lambda: ServerProcess(("mock-cost", "--max-batch", "1", "--max-queue", "1", "--quiet"))) as target:
        yield target


@pytest.fixture(scope="module")
def one_tight() -> Iterator[Target]:
    def make() -> ServerProcess:
        with pytest.MonkeyPatch.context() as patch:
            return ScriptProcess(TIGHT, patch)

    with attacked(make) as target:
        yield target


@pytest.fixture
def server(one_open: Target) -> Iterator[Target]:
    with unharmed(one_open):
        yield one_open


@pytest.fixture
def small(one_small: Target) -> Iterator[Target]:
    with unharmed(one_small):
        yield one_small


@pytest.fixture
def tight(one_tight: Target) -> Iterator[Target]:
    with unharmed(one_tight):
        yield one_tight


# Bytes by hand


class Reply(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes


class Bytes(io.BytesIO):
    """Reads as a socket does, and stays open for the next answer."""

    def makefile(self, *_: Any) -> Bytes:
        return self

    def close(self) -> None:
        pass


def replies(data: bytes) -> list[Reply]:
    source, found = Bytes(data), []
    while source.tell() < len(data):
        response = http.client.HTTPResponse(source)  # type: ignore[arg-type]
        response.begin()
        found.append(Reply(response.status, response.headers, response.read()))
    return found


def everything(connection: socket.socket) -> bytes:
    """Until the other side closes."""
    parts = []
    with suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def request(
    body: Json | bytes, *headers: str | bytes, path: str = TEXT, version: str = "1.1", length: Any = None
) -> bytes:
    """A request as it goes over the wire. `length`: what it says of its body; "" is nothing."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "Host: 127.0.0.1", "Content-Type: application/json", *headers]
    if length != "":
        lines.append(f"Content-Length: {len(raw) if length is None else length}")
    return b"\r\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\r\n\r\n" + raw


def line(method: str, path: str, *headers: str) -> bytes:
    """A request without a body."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *headers, "", ""]).encode()


def chunked(parts: Iterable[bytes]) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


CLOSE = "Connection: close"


def error_of(raw: bytes) -> Json:
    """OpenAI's body, and nothing else."""
    told = json.loads(raw)
    assert told.keys() == {"error"} and told["error"].keys() == {"message", "type", "param", "code"}, told
    error: Json = told["error"]
    assert isinstance(error["message"], str) and "\n" not in error["message"] and len(error["message"]) < 500, error
    assert isinstance(error["code"], str) and (error["param"] is None or isinstance(error["param"], str))
    return error


def reset(connection: socket.socket) -> None:
    """Leave without a farewell."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


# Bodies

BODIES: dict[str, bytes] = {
    "empty": b"",
    "blank": b"   ",
    "broken": b'{"prompt": "a",}',
    "single quotes": b"{'prompt': 'a'}",
    "truncated": b'{"prompt": "a", "max_to',
    "truncated escape": b'{"prompt": "\\ud8',
    "rest after the end": b'{"prompt": "a"} {"prompt": "b"}',
    "comment": b'{"prompt": "a" /* hello */}',
    "null": b"null",
    "number": b"5",
    "text": b'"a"',
    "list": b'[{"prompt": "a"}]',
    "true": b"true",
    "form": b"prompt=a&max_tokens=2",
    "nan": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "temperature": Infinity}',
    "minus infinity": b'{"prompt": "a", "presence_penalty": -Infinity}',
    "1e999": b'{"prompt": "a", "temperature": 1e999}',
    "1e999 as a whole number": b'{"prompt": "a", "max_tokens": 1e999}',
    "huge whole number": b'{"prompt": "a", "max_tokens": 1' + b"0" * 400 + b"}",
    "huge negative seed": b'{"prompt": "a", "seed": -1' + b"0" * 400 + b"}",
    "huge id": b'{"prompt": [1' + b"0" * 5000 + b"]}",
    "huge float": b'{"prompt": "a", "top_p": 0.' + b"0" * 100_000 + b"1}",
    "long exponent": b'{"prompt": "a", "top_p": 1e-' + b"9" * 100_000 + b"}",
    "deep arrays": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep arrays without an end": b'{"prompt": ' + b"[" * 100_000,
    "deep objects": b'{"prompt": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    "deep at the edge": b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
    "deep schema": b'{"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": '
    + b'{"items":' * 800 + b"{}" + b"}" * 800 + b"}}}",
    "deep surrogate": b'{"a":' * 800 + b'"\\ud800"' + b"}" * 800,
    "surrogate in a prompt": b'{"prompt": "a\\ud800"}',
    "surrogate in ids": b'{"prompt": ["\\udfff"]}',
    "surrogate in a stop": b'{"prompt": "a", "stop": ["b", "\\udc00"]}',
    "surrogate in a model": b'{"prompt": "a", "model": "\\ud800"}',
    "surrogate in a user": b'{"prompt": "a", "user": "\\ud800\\ud800"}',
    "surrogate in a regex": b'{"prompt": "a", "regex": "\\udbff"}',
    "surrogate in a grammar": b'{"prompt": "a", "grammar": "start: \\"\\ud800\\""}',
    "surrogate in a draft": b'{"prompt": "a", "speculation": {"draft": "\\ud800"}}',
    "surrogate in a name": b'{"prompt": "a", "\\ud800": 1}',
    "surrogate in a bias": b'{"prompt": "a", "logit_bias": {"\\ud800": 1}}',
    "surrogate in a schema": b'{"prompt": "a", "response_format": {"type": "json_schema", "json_schema": '
    b'{"schema": {"enum": ["\\ud800"]}}}}',
    "pair in the wrong order": b'{"prompt": "\\ude00\\ud83d"}',
    "surrogate as bytes": b'{"prompt": "\xed\xa0\x80"}',
    "bad utf-8": b'{"prompt": "\xff\xfe"}',
    "overlong utf-8": b'{"prompt": "\xc0\xaf"}',
    "cut utf-8": b'{"prompt": "\xe2\x82"}',
    "utf-16": '{"prompt": "a"}'.encode("utf-16"),
    "latin-1": '{"prompt": "é"}'.encode("latin-1"),
    "raw nul": b'{"prompt": "a\x00b"}',
    "nul around": b'\x00{"prompt": "a"}\x00',
    "gzip": gzip.compress(b'{"prompt": "a"}', mtime=0),
    "a wrong second key": b'{"prompt": "a", "prompt": 5}',
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_a_bad_body_is_refused(server: Target, name: str) -> None:
    for path in (TEXT, CHAT, "/tokenize", "/detokenize"):
        started = time.monotonic()
        error = server.refusal(path, BODIES[name])
        assert error["type"] == "invalid_request_error" and time.monotonic() - started < 2


def test_odd_bodies_that_are_valid_json(server: Target) -> None:
    for raw in (
        b'{"prompt": "a\\u0000b", "max_tokens": 2}',
        b'{"prompt": "\\ud83d\\ude00", "max_tokens": 2}',
        b'{"prompt": "\\uffff\\ufffe\\u202e", "max_tokens": 2, "user": "\\u0000\\n", "stop": "\\u0000"}',
        b'{"max_tokens": "x", "prompt": "a", "max_tokens": 2}',
        b'{"prompt": "a", "max_tokens": 2, "temperature": 1e-400, "top_p": 0.1e1, "seed": -0}',
        b'\r\n\t {"prompt": "a", "max_tokens": 2}\r\n',
    ):
        response = server.send(TEXT, raw)
        assert response.status_code == 200 and response.json()["choices"], response.text
    bom = server.send(TEXT, b'\xef\xbb\xbf{"prompt": "a", "max_tokens": 2}')  # RFC 8259: may be ignored, or an error
    assert bom.status_code in (200, 400), bom.text


def test_wrong_content_types(server: Target) -> None:
    body = json.dumps(SHORT).encode()
    for kind in (
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "é",
        "a" * 5000,
    ):
        response = HTTP.post(f"{server.url}{TEXT}", content=body, headers={"Content-Type": kind.encode()})
        assert response.status_code == 400 and "Content-Type" in error_of(response.content)["message"]


WHOLE = (
    "max_tokens", "min_tokens", "n", "seed", "top_k", "logprobs", "speculation.width", "stop_token_ids[]", "banned[]"
)  # fmt: skip
NUMBERS = (
    "temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "deadline_ms", "logit_bias.5"
)  # fmt: skip
FLAGS = ("ignore_eos", "stream", "echo", "speculation.off", "speculation.tree", "speculation.trace")
TEXTS = ("model", "grammar", "regex", "user", "priority", "accept", "speculation.draft", "response_format.type")
LISTS = ("stop_token_ids", "banned")
OBJECTS = ("stream_options", "speculation", "logit_bias", "response_format")
WRONG: dict[tuple[str, ...], tuple[Any, ...]] = {
    WHOLE: (True, "1", 1.5, 1.0, [1], {}, -(10**19)),
    NUMBERS: (True, "1", [1], {}, "NaN", 1e300),
    FLAGS: (0, 1, "true", [], {}),
    TEXTS: (0, True, [], {}, ["a"]),
    LISTS: ("1", 1, True, {}, [None], ["1"], [1.0], [[1]], [-1], [1 << 40]),
    OBJECTS: ("a", 1, True, [], [[]], [["a", 1]]),
    ("stop",): (0, True, {}, [1], [None], [[]], "", [""], ["a"] * 17, "a" * 1001),
    ("prompt",): (0, True, None, {}, [], "", [""], [[]], [None], [True], [1.5], [-1], [384], [1 << 40], ["a", 1],
                  [1, "a"], ["a", [1]], [[1], "a"], [[1], 1], [[[1]]], ["a"] * 129),
}  # fmt: skip


def with_field(name: str, value: Any) -> Json:
    if name.endswith("[]"):
        return {**SHORT, name[:-2]: [value]}
    outer, _, inner = name.partition(".")
    return {**SHORT, outer: {inner: value} if inner else value}


@pytest.mark.parametrize("names", WRONG, ids=lambda names: names[0])
def test_wrong_types_name_their_field(server: Target, names: tuple[str, ...]) -> None:
    for name in names:
        for value in WRONG[names]:
            error = server.refusal(TEXT, with_field(name, value))
            param = (error["param"] or "").replace("[0]", "[]")
            assert param == name or name.startswith(param) or param.startswith(name), (name, value, error)


STORM: tuple[Any, ...] = (
    None, True, 0, -1, 0.5, 2**31, 2**64 - 1, 1e308, "", "\x00", "x" * 70_000, [], [[]], ["a"], [1], {}, {"": None},
    {"a": {"a": {"a": []}}}, {"type": "json_object"},
)  # fmt: skip


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_any_value_in_any_field(server: Target, path: str) -> None:
    """What a field takes is others' business; here: every answer is quick, and either is one or says what is wrong."""
    told = server.get("/openapi.json").json()["components"]["schemas"]
    fields = told["CompletionBody"]["properties"].keys()
    if path == CHAT:  # what both have is the same code
        fields = told["ChatBody"]["properties"].keys() - fields | {"stream", "logprobs", "stop", "n"}
    plain: Json = {"max_tokens": 2, **({"messages": HELLO} if path == CHAT else {"prompt": "a"})}
    assert len(fields) > (10 if path == CHAT else 40)
    for field in fields:
        for value in STORM:
            if (field, value) in (("max_tokens", None), ("n", 1)):
                continue
            response = server.send(path, {**plain, field: value}, timeout=5)
            assert response.status_code in (200, 400, 404), (field, value, response.text)
            if response.status_code != 200:
                error_of(response.content)


MESSAGES: tuple[Any, ...] = (
    [], {}, "a", None, 5, [[]], ["a"], [None], [{}],
    [{"role": "user"}], [{"content": "a"}], [{"role": "user", "content": None}], [{"role": "user", "content": 5}],
    [{"role": "wizard", "content": "a"}], [{"role": "tool", "content": "a", "tool_call_id": "x"}],
    [{"role": ["user"], "content": "a"}], [{"role": "user", "content": []}], [{"role": "user", "content": [[]]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
    [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}],
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"type": "text", "text": 5}]}],
    [{"role": "user", "content": "a", "name": "Bo"}], [{"role": "user", "content": "\ud800"}],
    [*HELLO, {"role": "assistant", "content": "a", "tool_calls": [{"id": "x"}]}],
    HELLO * 20_000,
)  # fmt: skip


def test_bad_messages(server: Target) -> None:
    for messages in MESSAGES:
        error = server.refusal(CHAT, {"messages": messages, "max_tokens": 2})
        assert (error["param"] or "").startswith("messages"), (messages, error)


# Limits


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"prompt": ["a"] * 65, "n": 2}, "n"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 4096}, "max_tokens"),
        ({"max_tokens": 2**31 - 1}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"prompt": [384]}, "prompt"),
        ({"prompt": [384], "echo": True}, "prompt"),
        ({"prompt": [2**31 - 1]}, "prompt"),
        ({"prompt": "a" * 5000}, "prompt"),
        ({"prompt": [97] * 4096}, "prompt"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
        ({"logit_bias": {"dog": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {"384": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1e7}}, "logit_bias.5"),
        ({"banned": [384]}, "banned"),
        ({"banned": list(range(384))}, "banned"),
        ({"stop_token_ids": [384]}, "stop_token_ids"),
        ({"speculation": {"draft": "nothing"}}, "speculation.draft"),
        ({"speculation": {"draft": "/etc/passwd"}}, "speculation.draft"),
        ({"speculation": {"draft": "model:../x"}}, "speculation.draft"),
        ({"speculation": {"draft": "model,/etc/passwd"}}, "speculation.draft"),
        ({"speculation": {"draft": "http://127.0.0.1:1/"}}, "speculation.draft"),
        ({"speculation": {"draft": ","}}, "speculation.draft"),
        ({"speculation": {"model": "x"}}, "speculation.model"),
        ({"speculation": {"width": 65}}, "speculation.width"),
        ({"speculation": {"width": -1}}, "speculation.width"),
        ({"priority": "urgent"}, "priority"),
        ({"deadline_ms": -1}, "deadline_ms"),
        ({"deadline_ms": 1e13}, "deadline_ms"),
        ({"user": "a" * 501}, "user"),
        ({"regex": "a" * 70_000}, "regex"),
        ({"regex": "("}, "regex"),
        ({"regex": "("*5000 + ")" * 5000}, "regex"),
        ({"regex": r"(a)\1"}, "regex"),
        ({"grammar": "start"}, "grammar"),
        ({"grammar": 'start: "a"\n%import common.NOTHING'}, "grammar"),
        ({"grammar": '%import "/etc/passwd"\nstart: "a"'}, "grammar"),
        ({"grammar": "start: " + "(" * 10_000 + '"a"' + ")" * 10_000}, "grammar"),
        ({"regex": "a", "grammar": 'start: "a"'}, None),
    ],
    ids=lambda value: (value or "-") if isinstance(value, str | None) else json.dumps(value)[:40],
)  # fmt: skip
def test_limits_are_named(server: Target, change: Json, param: str | None) -> None:
    error = server.refusal(TEXT, {**SHORT, **change})
    assert param is None or error["param"] == param, error


def test_the_greatest_that_is_allowed(server: Target) -> None:
    for change in (
        {"n": 128},
        {"prompt": ["a"] * 128},
        {"prompt": ["a", "b"] * 16, "n": 4},
        {"stop": ["zz"] * 16},
        {"logprobs": 20, "echo": True},
        {"prompt": "a" * 4094},
        {"prompt": [97] * 4095, "max_tokens": 1, "logprobs": 20, "echo": True},
        {"max_tokens": 4095},
        {"banned": list(range(383))},
        {"deadline_ms": 0},
        {"deadline_ms": 1, "max_tokens": 4000, "ignore_eos": True},
        {"speculation": {"width": 64, "tree": True}},
        {"temperature": 1e6},
        {"temperature": 1e-300},
        {"repetition_penalty": 1e-6, "presence_penalty": 1e6, "frequency_penalty": -1e6},
        {"logit_bias": {str(token): -1e6 for token in range(384)}},
        {"top_k": 1, "top_p": 1e-300, "min_p": 1.0, "typical_p": 1e-300},
    ):
        response = server.send(TEXT, {**SHORT, **change})
        assert response.status_code == 200, (change, response.text[:300])
        assert all(choice["finish_reason"] for choice in response.json()["choices"])


# Rules that are meant to take for ever


def schema(told: Any) -> Json:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": told}}}


RULES: dict[str, Json] = {
    "a power of repeats": {"regex": "(a{1,1000}){1,1000}"},
    "three powers": {"regex": "((a{1,100}){1,100}){1,100}"},
    "backtracking": {"regex": "(x+x+)+y"},
    "many states": {"regex": "[ab]*a[ab]{30}", "max_tokens": 100},
    "letters of the world": {"regex": r"(\p{L}{1,100}){1,100}", "max_tokens": 20},
    "long regex": {"regex": "|".join(f"word{number}x" for number in range(6000))[:65_000]},
    "two thousand rules": {
        "grammar": "start: " + " | ".join(f"r{number}" for number in range(2500)) + "\n"
        + "\n".join(f'r{number}: "a{number}"' for number in range(2500)),
    },
    "six thousand words": {"grammar": "start: " + " | ".join(f'"a{number}"' for number in range(6000))},
    "ambiguous": {"grammar": 'start: start start | "a" | ""', "max_tokens": 100},
    "twice ambiguous": {"grammar": 'start: a*\na: "x" | a a | ', "max_tokens": 100},
    "nothing but itself": {"grammar": "start: start"},
    "right recursive": {"grammar": 'start: "a" start | "b"', "max_tokens": 400, "logit_bias": {"97": 100}},
    "a schema that is itself": schema({"$ref": "#"}),
    "a circle of schemas": schema(
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    ),
    "a tree of itself": schema({"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"$ref": "#"}}}),
    "a schema elsewhere": schema({"$ref": "http://127.0.0.1:1/x.json"}),
    "a schema in a file": schema({"$ref": "file:///etc/passwd"}),
    "a broken schema": schema({"type": "what"}),
    "a schema of nothing": schema({"not": {}}),
    "contradiction": schema({"type": "integer", "minimum": 5, "maximum": 4}),
    "many values": schema({"enum": [f"v{number}" for number in range(100_000)]}),
    "many properties": schema({"type": "object", "properties": {f"v{number}": {} for number in range(8_000)}}),
    "a billion items": schema({"type": "array", "minItems": 10**9, "items": {"type": "integer"}}),
    "a billion letters": schema({"type": "string", "minLength": 10**9}),
    "a pattern of repeats": schema({"type": "string", "pattern": "^(a{1,1000}){1,1000}$"}),
    "all of any of": schema(
        {"allOf": [{"anyOf": [{"required": [f"a{n}"]}, {"required": [f"b{n}"]}]} for n in range(30)]}
    ),
    "deep items": schema(json.loads('{"type":"array","items":' * 200 + "{}" + "}" * 200)),
}  # fmt: skip


class Watch(threading.Thread):
    """How late /health is, asked all the time."""

    def __init__(self, target: Target) -> None:
        super().__init__(daemon=True)
        self._target = target
        self._is_over = threading.Event()
        self.delays: list[float] = []

    def run(self) -> None:
        while not self._is_over.wait(0.005):
            started = time.monotonic()
            status = self._target.get("/health").status_code
            self.delays.append(time.monotonic() - started if status == 200 else float("inf"))

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.join()


@pytest.mark.parametrize("name", RULES)
def test_rules_that_are_meant_to_take_for_ever(server: Target, name: str) -> None:
    """Refused or followed, soon, and everybody else is answered meanwhile."""
    with Watch(server) as watch:
        response = server.send(TEXT, {**SHORT, **RULES[name]})
        stream = server.send(TEXT, {**SHORT, **RULES[name], "stream": True})
    assert response.status_code in (200, 400), response.text[:300]
    assert response.elapsed.total_seconds() < 5 and stream.elapsed.total_seconds() < 5
    if response.status_code == 400:
        assert error_of(response.content)["param"] in ("regex", "grammar", "response_format")
    if stream.status_code == 200:
        last = stream.text.strip().split("\n\n")[-1].removeprefix("data: ")
        assert last == "[DONE]" or error_of(last.encode())["type"] == "invalid_request_error"
    assert max(watch.delays, default=0.0) < LATE_S


@pytest.mark.slow
def test_many_large_schemas_at_once_keep_nobody_waiting(server: Target) -> None:
    def ask(number: int) -> int:
        properties = {f"v{number}-{name}": {} for name in range(4000)}
        rules = schema({"type": "object", "properties": properties})
        return int(server.send(TEXT, {**SHORT, **rules}, timeout=100).status_code)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        statuses = pool.map(ask, range(8))
        time.sleep(1)
        started = time.monotonic()
        assert server.send(TEXT, SHORT, timeout=100).status_code == 200
        waited = time.monotonic() - started
        assert set(statuses) <= {200, 400}
    assert waited < 3


# Large and wrong bodies on the wire

LARGE = b'{"prompt": "' + b"a" * (10 << 20) + b'"}'


def test_ten_megabytes(server: Target) -> None:
    memory = server.process.memory()
    announced = request(LARGE, CLOSE)
    in_parts = request(b"", CLOSE, "Transfer-Encoding: chunked", length="") + chunked(
        LARGE[at : at + 65_536] for at in range(0, len(LARGE), 65_536)
    )
    with Watch(server) as watch:
        for data in (announced, in_parts):
            (reply,) = server.exchange(data)
            assert reply.status == 413 and error_of(reply.body)["code"] == "body_too_large"
            assert reply.headers["Connection"] == "close"
    assert max(watch.delays) < LATE_S
    assert server.process.memory() - memory < 100 << 20
    for body in (LARGE, (LARGE[at : at + 1000] for at in range(0, len(LARGE), 1000))):
        response = HTTP.post(f"{server.url}{TEXT}", content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 413  # a client that sends first and reads then sees it too


def test_ten_megabytes_where_no_body_belongs(server: Target) -> None:
    for method, path, status in (("GET", "/health", 200), ("DELETE", "/v1/requests/x", 404), ("PUT", "/health", 413)):
        response = HTTP.request(method, f"{server.url}{path}", content=LARGE)
        assert response.status_code == status


def test_who_expects_an_answer_before_the_body_gets_one(server: Target) -> None:
    with server.connect(request(b"", "Expect: 100-continue", length=10 << 20)) as connection:
        (reply,) = replies(everything(connection))
    assert reply.status == 413
    body = json.dumps(SHORT).encode()
    with server.connect(request(b"", "Expect: 100-continue", CLOSE, length=len(body))) as connection:
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        (reply,) = replies(everything(connection))
    assert reply.status == 200


WIRE: dict[str, tuple[bytes, set[int]]] = {
    "shorter than it is": (request(SHORT, length=5), {400}),
    "negative length": (request(SHORT, length=-5), {400}),
    "length in words": (request(SHORT, length="five"), {400}),
    "length with a plus": (request(SHORT, length="+5"), {400}),
    "length in hexadecimal": (request(SHORT, length="0x1e"), {400}),
    "endless length": (request(SHORT, length="9" * 40), {400, 413}),
    "two lengths": (request(SHORT, "Content-Length: 3"), {400}),
    "length and chunks": (request(SHORT, "Transfer-Encoding: chunked"), {400}),
    "no length": (request(SHORT, CLOSE, length=""), {400}),
    "bad chunk": (request(b"ZZ\r\nabc\r\n0\r\n\r\n", "Transfer-Encoding: chunked", length=""), {400}),
    "unknown coding": (request(SHORT, CLOSE, "Transfer-Encoding: rot13", length=""), {400, 501}),
    "gzip that is none": (request(SHORT, CLOSE, "Content-Encoding: gzip"), {200, 400, 415}),
    "gzip": (request(gzip.compress(b'{"prompt": "a"}', mtime=0), CLOSE, "Content-Encoding: gzip"), {400, 415}),
    "http/1.0": (request(SHORT, version="1.0"), {200}),
    "http/1.0 stream": (request({**SHORT, "stream": True}, version="1.0"), {200}),
    "http/9.9": (request(SHORT, CLOSE, version="9.9"), {200, 400, 505}),
    "long path": (line("GET", "/" + "a" * 50_000, CLOSE), {400, 404, 414}),
    "very long path": (line("GET", "/" + "a" * 1_000_000, CLOSE), {400, 404, 414}),
    "long query": (line("GET", "/health?" + "a" * 50_000, CLOSE), {200, 400, 414}),
    "long header": (line("GET", "/health", "X-Long: " + "a" * 1_000_000, CLOSE), {200, 400, 431}),
    "many headers": (line("GET", "/health", *(f"X-{number}: a" for number in range(20_000)), CLOSE), {200, 400, 431}),
    "no host": (b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n", {400}),
    "another host": (b"GET /health HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n", {400}),
    "whole address": (line("GET", "http://evil.example/health", CLOSE), {200, 400}),
    "nul in the path": (line("GET", "/v1/models/\x00", CLOSE), {400}),
    "nul in a header": (line("GET", "/health", "X-Request-Id: a\x00b", CLOSE), {400}),
    "odd bytes in the path": (line("GET", "/v1/models/%ff%fe%00%0d%0a", CLOSE), {404}),
    "odd bytes in an id": (line("GET", "/v1/requests/%ff%00%0d%0aX-Evil:1", CLOSE), {404}),
    "up and out": (line("GET", "/page/../../../../etc/passwd", CLOSE), {404}),
    "up and out in disguise": (line("GET", "/page/%2e%2e%2f%2e%2e%2fsettings.py", CLOSE), {404}),
    "unknown method": (line("BREW", "/v1/models", CLOSE), {400, 405}),
    "connect": (line("CONNECT", "127.0.0.1:22", CLOSE), {400, 404, 405}),
    "star": (line("OPTIONS", "*", CLOSE), {404, 405}),
    "websocket": (line("GET", CHAT, "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13",
                       "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="), {400, 403, 404, 405, 426}),
    "http/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 405, 505}),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500, {400}),
    "noise": (bytes(range(256)) * 40, {400}),
    "a folded header": (line("GET", "/health", "X-A: b\r\n c", CLOSE), {200, 400}),
}  # fmt: skip


@pytest.mark.parametrize("name", WIRE)
def test_odd_requests_on_the_wire(server: Target, name: str) -> None:
    data, statuses = WIRE[name]
    (reply, *_) = server.exchange(data)
    assert reply.status in statuses, reply
    if reply.headers["Content-Type"] == "application/json" and reply.status != 200:
        error_of(reply.body)
    assert "X-Evil" not in reply.headers


def test_a_body_that_ends_too_early(server: Target) -> None:
    """Longer on paper than in truth, and then the client leaves, in either way."""
    for leave in (socket.socket.close, reset, lambda connection: connection.shutdown(socket.SHUT_WR)):
        connection = server.connect(request(SHORT, length=10_000))
        time.sleep(0.05)
        leave(connection)
        with suppress(OSError):
            assert b" 200 OK" not in everything(connection)
        connection.close()


def test_pipelined_requests_are_answered_in_order(server: Target) -> None:
    names = [f"piped-{number}" for number in range(5)]
    data = b"".join(request({**SHORT, "stream": at == 2}, f"X-Request-Id: {name}") for at, name in enumerate(names))
    data += request(b"{", "X-Request-Id: broken") + line("GET", "/health", CLOSE)
    *answered, broken, health = server.exchange(data)
    assert [reply.headers["X-Request-Id"] for reply in answered] == names
    assert broken.status == 400 and error_of(broken.body) and health.body == b'{"status":"ok"}'


def test_unknown_paths_and_methods(server: Target) -> None:
    for method, path, status in (
        ("GET", "/v2/models", 404),
        ("POST", "/v1", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/chat", 404),
        ("GET", "/V1/MODELS", 404),
        ("GET", "//v1/models", 404),
        ("GET", "/.env", 404),
        ("GET", "/docs", 404),
        ("GET", "/page/", 404),
        ("GET", CHAT, 405),
        ("PUT", CHAT, 405),
        ("PATCH", "/tokenize", 405),
        ("DELETE", "/v1/models", 405),
        ("OPTIONS", "/v1/models", 405),
        ("TRACE", "/health", 405),
        ("POST", "/v1/requests/x", 405),
        ("GET", "/v1/requests/x", 404),
        ("DELETE", "/v1/requests/x", 404),
        ("DELETE", "/v1/requests/" + "x" * 5000, 404),
        ("GET", "/v1/models/" + "x" * 5000, 404),
    ):
        response = HTTP.request(method, f"{server.url}{path}")
        assert response.status_code == status, (method, path, response.text)
        assert error_of(response.content)["type"] == "invalid_request_error"
        assert (status == 405) == ("allow" in response.headers)


def test_names_of_requests(server: Target) -> None:
    for name in (b"", b"a b", b"x" * 65, b"\xc3\xbc", b"\xff", b"../x", b"a/b", b'"', b"a;b", b"%41", b"x" * 10_000):
        error = server.refusal(TEXT, SHORT, headers={"X-Request-Id": name})
        assert error["param"] == "X-Request-Id"
    twice = server.exchange(request(SHORT, "X-Request-Id: one", "X-Request-Id: two", CLOSE))
    assert twice[0].status in (200, 400)


def test_a_name_that_runs_cannot_be_used_again(tight: Target) -> None:
    body = {**LONG, "stream": True}
    with tight.connect(request(body, "X-Request-Id: mine", "Authorization: Bearer first")) as connection:
        assert b"data:" in read_until(connection, b"data:")
        assert tight.refusal(TEXT, SHORT, headers={**FIRST, "X-Request-Id": "mine"})["param"] == "X-Request-Id"
        assert tight.send(TEXT, SHORT, {**SECOND, "X-Request-Id": "mine"}).status_code == 200
    tight.wait_until_idle()
    assert tight.send(TEXT, SHORT, {**FIRST, "X-Request-Id": "mine"}).status_code == 200


def test_a_name_that_is_used_at_the_same_time(tight: Target) -> None:
    """Many at once: one of each key has it. Choices of one call do not take the names of others."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        body = {"prompt": "a", "max_tokens": 60, "ignore_eos": True}
        calls = [
            pool.submit(tight.send, TEXT, body, {**(FIRST, SECOND)[number % 2], "X-Request-Id": "same"})
            for number in range(8)
        ]
        statuses = Counter(call.result().status_code for call in calls)
        assert statuses == {200: 2, 400: 6}
        calls = [
            pool.submit(tight.send, TEXT, {**body, "n": n}, {**headers, "X-Request-Id": name})
            for name, n, headers in (
                ("job", 2, FIRST),
                ("job.0", 1, SECOND),
                ("job.1", 2, FIRST),
                ("job.1.0", 1, SECOND),
            )
        ]
        answers = [call.result() for call in calls]
        assert {answer.status_code for answer in answers} == {200}
    for answer, headers in zip(answers, (FIRST, SECOND, FIRST, SECOND), strict=True):
        found = tight.get(f"/v1/requests/{answer.json()['id']}", headers=headers).json()
        assert [one["text"] for one in found["choices"]] == [one["text"] for one in answer.json()["choices"]]


def test_answers_on_a_kept_connection_come_at_once(server: Target) -> None:
    """Small packets are not held back until the other side acknowledges (40 ms a call)."""
    with httpx.Client(verify=False, trust_env=False) as client:
        times = [client.get(f"{server.url}/health").elapsed.total_seconds() for _ in range(15)]
    assert statistics.median(times) < 0.03, times


# Clients that are slow, or leave


def read_until(connection: socket.socket, what: bytes, times: int = 1) -> bytes:
    data = b""
    while data.count(what) < times:
        part = connection.recv(1 << 16)
        assert part, f"it ended with {data[-500:]!r}"
        data += part
    return data


KEY = "Authorization: Bearer first"


def test_a_body_that_comes_byte_by_byte(tight: Target) -> None:
    started = time.monotonic()
    with tight.connect(request(b"", KEY, length=500)) as connection:
        connection.settimeout(0.1)
        data = b""
        while time.monotonic() - started < 5 and not data:
            with suppress(ConnectionError):
                connection.sendall(b" ")
            with suppress(TimeoutError):
                data = connection.recv(1 << 16)
        connection.settimeout(5)
        data += everything(connection)
    (reply,) = replies(data)
    assert reply.status == 408 and error_of(reply.body)["code"] == "body_timeout"
    assert 0.9 < time.monotonic() - started < 4


def test_bodies_that_never_come(tight: Target) -> None:
    """Announced or in chunks, with a key or too large: the connection ends, soon."""
    started = time.monotonic()
    waiting = [
        tight.connect(data)
        for data in (
            request(b"", KEY, length=500),
            request(b"", KEY, "Transfer-Encoding: chunked", length=""),
            request(b"5\r\nab", KEY, "Transfer-Encoding: chunked", length=""),
        )
    ]
    with Watch(tight) as watch:
        for connection in waiting:
            (reply,) = replies(everything(connection))
            assert reply.status == 408
            connection.close()
    assert time.monotonic() - started < 4 and max(watch.delays) < LATE_S


def test_a_client_that_never_reads_is_dropped(tight: Target) -> None:
    """What it would get is far more than all buffers hold. Others are served meanwhile, and afterwards it is gone."""
    body = {
        "messages": HELLO,
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": True,
        "logprobs": True,
        "top_logprobs": 20,
        "n": 4,
    }
    name = 'outrider_requests_finished_total{reason="cancelled"}'
    finished = tight.figures().get(name, 0)
    with tight.connect(request(body, KEY, path=CHAT), small=True):
        tight.wait_for(lambda told: told["outrider_requests_running"] == 4, "it never began")
        assert tight.send(TEXT, SHORT, FIRST).status_code == 200
        tight.wait_for(lambda told: told["outrider_requests_running"] == 0, "it runs on", 3 * PATIENCE_S)
        assert tight.figures()[name] - finished == 4, "it was not dropped, but finished"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_half_closed_socket(tight: Target, stream: bool, n: int) -> None:
    """Whether it counts as a client or as none is the server's choice, but it ends."""
    with tight.connect(request({**LONG, "max_tokens": 100, "stream": stream, "n": n}, KEY)) as connection:
        connection.shutdown(socket.SHUT_WR)
        data = everything(connection)
    assert data == b"" or data.startswith(b"HTTP/1.1 200")  # a stream may have been cut
    with tight.connect(request({**LONG, "stream": stream, "n": n}, KEY)) as connection:
        tight.wait_for(lambda told: told["outrider_requests_running"] == n, "it never began")
        connection.shutdown(socket.SHUT_WR)
        tight.wait_until_idle()


@pytest.mark.parametrize("leave", [reset, socket.socket.close], ids=["reset", "close"])
@pytest.mark.parametrize("n", [1, 4])
def test_a_client_that_leaves(tight: Target, leave: Callable[[socket.socket], None], n: int) -> None:
    """In the middle of a stream, before its first byte, before the whole answer, and before the request is whole."""
    body = {**LONG, "n": n}
    streaming = tight.connect(request({**body, "stream": True}, KEY))
    read_until(streaming, b"data:", 3)
    leave(streaming)
    tight.wait_until_idle()
    for stream in (True, False):
        leave(tight.connect(request({**body, "stream": stream}, KEY)))
        tight.wait_until_idle()
        waiting = tight.connect(request({**body, "stream": stream}, KEY))
        tight.wait_for(lambda told: told["outrider_requests_running"] == n, "it never began")
        leave(waiting)
        tight.wait_until_idle()
    whole = request(body, KEY)
    leave(tight.connect(whole[:50]))
    leave(tight.connect(whole[:-5]))


def test_clients_that_leave_all_the_time(tight: Target) -> None:
    """At every moment of a request, many at once, with pages that are shared."""

    def come_and_go(number: int) -> None:
        body = {**LONG, "prompt": "abcdefgh" * 20, "max_tokens": 300, "stream": bool(number % 2), "n": 1 + number % 3}
        connection = tight.connect(request(body, KEY if number % 3 else "Authorization: Bearer wrong"))
        time.sleep(number % 10 * 0.01)
        (reset, socket.socket.close)[number % 2](connection)

    with concurrent.futures.ThreadPoolExecutor(8) as pool, Watch(tight) as watch:
        list(pool.map(come_and_go, range(120)))
    tight.wait_until_idle()
    assert max(watch.delays) < LATE_S
    assert tight.send(TEXT, SHORT, FIRST).status_code == 200


def test_connections_that_say_nothing(server: Target) -> None:
    """They cost the others nothing."""
    silent = [server.connect(b"" if number % 2 else b"POST /v1/comp") for number in range(200)]
    assert server.send(TEXT, SHORT, timeout=2).status_code == 200
    for connection in silent:
        connection.close()


def test_cancelling_by_id_while_the_client_is_there(tight: Target) -> None:
    with tight.connect(request({**LONG, "stream": True, "n": 2}, KEY, "X-Request-Id: long", CLOSE)) as connection:
        read_until(connection, b"data:")
        for _ in range(3):
            assert HTTP.delete(f"{tight.url}/v1/requests/long", headers=FIRST).status_code == 200
        assert b"[DONE]" in everything(connection)


# A full queue


def test_a_full_queue(small: Target) -> None:
    body = {**LONG, "stream": True}
    with small.connect(request(body)) as running:
        read_until(running, b"data:")
        waiting = small.connect(request({**LONG, "max_tokens": 5}))
        small.wait_for(lambda told: told["outrider_requests_waiting"] == 1, "it does not wait")
        for stream in (True, False):
            response = small.send(TEXT, {**LONG, "stream": stream})
            assert response.status_code == 429 and 1 <= int(response.headers["retry-after"]) <= 30
            error = error_of(response.content)
            assert error["type"] == "rate_limit_error" and error["code"] == "queue_full"
        assert small.get("/health").status_code == 200
        for leave in (reset, socket.socket.close):  # who leaves the line makes room for another
            leave(waiting)
            small.wait_for(lambda told: told["outrider_requests_waiting"] == 0, "it still waits")
            waiting = small.connect(request({**LONG, "max_tokens": 5}, CLOSE))
            small.wait_for(lambda told: told["outrider_requests_waiting"] == 1, "its place was not given on")
        hopeless = small.send(TEXT, {**SHORT, "deadline_ms": 1})
        assert hopeless.status_code == 429
    (reply,) = replies(everything(waiting))  # who ran has left: it is its turn
    waiting.close()
    assert reply.status == 200 and json.loads(reply.body)["usage"]["completion_tokens"] == 5


def test_a_deadline_that_passes_in_the_queue(small: Target) -> None:
    with small.connect(request({**LONG, "stream": True})) as running:
        read_until(running, b"data:")
        response = small.send(TEXT, {**SHORT, "deadline_ms": 50}, timeout=5)
    assert response.status_code in (200, 408, 429, 503), response.text
    if response.status_code == 200:
        assert response.json()["choices"][0]["stop_reason"] == "deadline"


# Keys


def test_keys_in_every_wrong_form(tight: Target) -> None:
    for headers in (
        (),
        ("Authorization:",),
        ("Authorization: first",),
        ("Authorization: Bearer",),
        ("Authorization: Bearer ",),
        ("Authorization: Bearer wrong",),
        ("Authorization: Bearer First",),
        ("Authorization: Bearer first first",),
        ("Authorization: Bearer firs",),
        ("Authorization: Bearer " + "first" * 20_000,),
        ("Authorization: Basic Zmlyc3Q6",),
        ("Authorization: Token first",),
        ("Authorization: Bearer:first",),
        (b"Authorization: Bearer \xff\xfe\x80",),
        (b"Authorization: Bearer s\xe9cond",),  # the key in Latin-1 is another one
        (b"Authorization: B\xe9arer first",),
        ("X-Api-Key: first",),
        ("Authorization: Bearer wrong", "Authorization: Bearer first"),
    ):
        for path in (TEXT, CHAT, "/tokenize", "/v1/nothing"):
            (reply,) = tight.exchange(request(SHORT, CLOSE, *headers, path=path))
            assert reply.status == 401, (headers, path, reply)
            error = error_of(reply.body)
            assert error["code"] == "invalid_api_key" and error["type"] == "invalid_request_error"
            assert reply.headers["WWW-Authenticate"] == "Bearer" and "first" not in error["message"]
    for headers in ((KEY,), ("Authorization: bearer first",), ("authorization:Bearer   first  ",)):
        assert tight.exchange(request(SHORT, CLOSE, *headers))[0].status == 200


def test_no_way_around_the_keys(tight: Target) -> None:
    for path in (
        "/v1/models", "/v1/models/", "/v1/models/tight", "//v1/models", "/v1//models", "/./v1/models", "/V1/models",
        "/x/../v1/models", "/v1/models?key=first", "/v1%2fmodels", "/%76%31/models", "/v1/models%00", "/v1/models#x",
        "http://127.0.0.1/v1/models", "/v1;/models", "/v1\\models", "/page/../v1/models", "/health/../v1/models",
    ):  # fmt: skip
        (reply,) = tight.exchange(line("GET", path, CLOSE))
        assert reply.status in (400, 401, 404), (path, reply)
    for path in ("/tokenize/", "/detokenize/", "/v1/completions/", "//tokenize", "/tokenize%2f"):
        (reply, *_) = tight.exchange(request(SHORT, CLOSE, path=path))
        assert reply.status in (400, 401, 404, 405), (path, reply)


def test_a_request_without_a_key_is_not_read(tight: Target) -> None:
    """It is refused before its body comes, however long it says that is."""
    with tight.connect(request(b"", CLOSE, length=1 << 20)) as connection:
        started = time.monotonic()
        data = connection.recv(1 << 16)
    assert data.startswith(b"HTTP/1.1 401") and time.monotonic() - started < 0.8


def test_requests_belong_to_their_key(tight: Target) -> None:
    body = {**LONG, "stream": True, "user": "Ada"}
    with tight.connect(request(body, KEY, "X-Request-Id: private", CLOSE)) as connection:
        read_until(connection, b"data:", 2)
        for method in ("GET", "DELETE"):
            for headers, status in ((SECOND, 404), ({}, 401), ({"Authorization": "Bearer x"}, 401)):
                response = HTTP.request(method, f"{tight.url}/v1/requests/private", headers=headers)
                assert response.status_code == status
                assert "Ada" not in response.text
        nobody = HTTP.get(f"{tight.url}/v1/requests/unheard-of", headers=SECOND).json()["error"]
        theirs = HTTP.get(f"{tight.url}/v1/requests/private", headers=SECOND).json()["error"]
        assert theirs["message"].replace("private", "unheard-of") == nobody["message"], "it tells that there is one"
        mine = tight.get("/v1/requests/private", headers=FIRST).json()
        assert mine["status"] == "running" and mine["choices"][0]["token_ids"]
    tight.wait_until_idle()
    assert tight.get("/v1/requests/private", headers=FIRST).json()["status"] == "done"
    assert tight.get("/v1/requests/private", headers=SECOND).status_code == 404


def test_beginnings_are_shared_within_a_key_only(tight: Target) -> None:
    def cached(headers: Any) -> float:
        before = tight.figures()["outrider_cached_tokens_total"]
        assert tight.send(TEXT, {**SHORT, "prompt": "A letter to nobody else. " * 20}, headers).status_code == 200
        return tight.figures()["outrider_cached_tokens_total"] - before

    assert cached(FIRST) == 0 and cached(FIRST) > 50
    assert cached(SECOND) == 0 and cached(SECOND) > 50


def test_past_text_drafts_within_a_key_only(tight: Target) -> None:
    body = {"prompt": "Tell me a secret", "temperature": 0, "max_tokens": 80, "ignore_eos": True}

    def accepted(headers: Any) -> int:
        answer = tight.send(TEXT, {**body, "speculation": {"draft": "suffix", "width": 8}}, headers).json()
        return int(answer["usage"]["speculation"]["accepted"])

    alone, again = accepted(FIRST), accepted(FIRST)
    assert again > alone + 40, "its own past is drafted from"
    assert accepted(SECOND) < alone + 20, "another's past is drafted from"  # a few words its own past may have
    assert accepted(SECOND) > alone + 40


# By the description

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
    "negative_data_rejection", "unsupported_method", "allow_header_conformance",
)  # fmt: skip
LENGTH = 4  # of answers, so that a thousand of them take no time


def described(target: Target, max_examples: int) -> tuple[Counter[tuple[str, int]], list[str]]:
    """All that schemathesis thinks of: good and bad data at every path. Answers by status, and what was wrong."""
    schemathesis = pytest.importorskip("schemathesis")
    from schemathesis.config import SchemathesisConfig
    from schemathesis.engine import events, from_schema

    config = SchemathesisConfig.from_dict(
        {
            "seed": 1,
            "base-url": target.url,
            "headers": {"Connection": "close"},
            "request-timeout": 10,
            "continue-on-failure": True,
            "generation": {
                "mode": "all",
                "max-examples": max_examples,
                "deterministic": True,
                "no-shrink": True,
                "database": "none",
            },
            "checks": {"enabled": False, **{name: {"enabled": True} for name in CHECKS}},
            "phases": {"stateful": {"enabled": False}},
            "cache": {"enabled": False},
        }
    )
    told = target.get("/openapi.json").json()
    for name in ("ChatBody", "CompletionBody"):
        told["components"]["schemas"][name]["properties"]["max_tokens"]["anyOf"][0]["maximum"] = LENGTH
    statuses: Counter[tuple[str, int]] = Counter()
    wrong: list[str] = []
    for event in from_schema(schemathesis.openapi.from_dict(told, config=config)).execute():
        if isinstance(event, events.NonFatalError | events.FatalError):
            wrong.append(str(getattr(event, "info", None) or event.exception))
        if not isinstance(event, events.ScenarioFinished):
            continue
        for interaction in event.recorder.interactions.values():
            statuses[event.label or "", interaction.response.status_code if interaction.response else 0] += 1
        for checks in event.recorder.checks.values():
            wrong += [
                f"{check.name}: {check.failure_info.failure} {check.failure_info.code_sample}"
                for check in checks
                if check.failure_info is not None
            ]
    return statuses, wrong


@pytest.fixture(scope="module")
def one_brief() -> Iterator[Target]:
    with attacked(lambda: ServerProcess(("mock-text", "--max-output", str(LENGTH), "--quiet"))) as target:
        yield target


@pytest.mark.parametrize("max_examples", [5, pytest.param(300, marks=pytest.mark.slow)])
def test_everything_answers_as_it_is_described(one_brief: Target, max_examples: int) -> None:
    with unharmed(one_brief):
        statuses, wrong = described(one_brief, max_examples)
    assert not wrong, f"{len(wrong)} faults; the first: {wrong[:3]}"
    assert sum(statuses.values()) > max(500, 12 * max_examples)
    assert not any(status in (0, 500) for _, status in statuses)
    for path in (CHAT, TEXT, "/tokenize", "/detokenize"):
        assert statuses[f"POST {path}", 200] >= 3 and statuses[f"POST {path}", 400] > 20, statuses
    assert {label for label, _ in statuses} >= {"GET /v1/models", "GET /metrics", "DELETE /v1/requests/{request_id}"}


# Last, because it leaves the server busy for a while where it fails


def test_a_prompt_that_is_far_too_long_is_refused_soon(server: Target) -> None:
    """Before it is read as tokens: three megabytes of text cannot be 4096 of them."""
    with Watch(server) as watch:
        error = server.refusal(TEXT, {"prompt": "a" * (3 << 20), "max_tokens": 2}, timeout=4)
    assert error["param"] == "prompt" and max(watch.delays, default=0.0) < LATE_S
