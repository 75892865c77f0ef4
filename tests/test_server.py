"""The HTTP side, in process: what is accepted is honoured, what is not is refused by name, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from outrider.config import SchedulerConfig
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.server import sse
from outrider.server.answers import trace
from outrider.server.app import create_app
from outrider.server.settings import ServerSettings
from outrider.server.spelling import Spelling
from outrider.server.worker import Worker
from outrider.types import Event

Json = dict[str, Any]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello there"}]


class Server:
    """An application on an event loop of its own; calls wait for it."""

    def __init__(self, model: str = "mock-text", loading: Json | None = None, **settings: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.worker = Worker(Engine.load(model, **(loading or {})))
        self.app = create_app(self.worker, ServerSettings(model_name="mock-text", **settings))
        self._lifespan = self.app.router.lifespan_context(self.app)
        self.do(self._start())

    async def _start(self) -> None:
        self.worker.start()
        await self._lifespan.__aenter__()
        transport = httpx.ASGITransport(self.app)  # type: ignore[arg-type]
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    async def _stop(self) -> None:
        await self.client.aclose()
        await self._lifespan.__aexit__(None, None, None)
        await self.worker.close()
        await self.loop.shutdown_default_executor()

    def close(self) -> None:
        self.do(self._stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self.do(self.client.request(method, path, **options))

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.call("GET", path, **options)

    def post(self, path: str, body: Json, **options: Any) -> httpx.Response:
        headers = {"Content-Type": "application/json", **options.pop("headers", {})}
        return self.call("POST", path, content=json.dumps(body).encode(), headers=headers, **options)

    def ask(self, path: str, **body: Any) -> Json:
        """A whole answer."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, path: str, **body: Any) -> list[Json]:
        """The chunks of a streamed answer."""
        response = self.post(path, {"stream": True, **body})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = [part for part in response.text.split("\n\n") if part]
        assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def refusal(self, path: str, body: Json, status: int = 400) -> Json:
        response = self.post(path, body)
        assert response.status_code == status, response.text
        return response.json()["error"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@contextmanager
def another(**settings: Any) -> Iterator[Server]:
    server = Server(**settings)
    try:
        yield server
    finally:
        server.close()


def text_of(chunks: list[Json], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


# Answers


def test_chat(server: Server) -> None:
    answer = server.ask(CHAT, model="mock-text", messages=HELLO, max_tokens=12, seed=3)
    choice, usage = answer["choices"][0], answer["usage"]
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"]
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12
    told = usage["speculation"]
    assert told["method"] == "model" and told["seed"] == 3 and told["accept"] == "coupled"
    assert told["drafted"] >= told["accepted"] + told["rejected"] and told["rounds"] < 12
    assert told["tokens_per_round"] == pytest.approx(12 / told["rounds"])


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_says_what_the_whole_answer_says(server: Server, path: str, n: int) -> None:
    question = {"messages": HELLO} if path == CHAT else {"prompt": "Once upon"}
    settings = {**question, "n": n, "seed": 5, "temperature": 0.9, "max_tokens": 20}
    chunks = server.stream(path, **settings, stream_options={"include_usage": True})
    whole = server.ask(path, **settings)
    usage = chunks.pop()
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert usage["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert all(chunk["usage"] is None for chunk in chunks)
    texts = [choice["text"] if path == TEXT else choice["message"]["content"] for choice in whole["choices"]]
    assert [text_of(chunks, index) for index in range(n)] == texts
    assert len(set(texts)) == n, "choices of one seed differ"
    for index in range(n):
        ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert ends[-1] == whole["choices"][index]["finish_reason"] and set(ends[:-1]) == {None}
    if path == CHAT:
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_without_the_option_there_is_no_usage_in_a_stream(server: Server) -> None:
    chunks = server.stream(CHAT, messages=HELLO, max_tokens=4)
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


def test_several_prompts_in_every_form(server: Server) -> None:
    ids = server.ask("/tokenize", prompt="ab")["tokens"]
    settings = {"seed": 1, "max_tokens": 6, "n": 2}
    one = server.ask(TEXT, prompt="ab", **settings)
    for prompt, times in ((["ab"], 1), (ids, 1), ([ids], 1), (["ab", "ab"], 2), ([ids, ids], 2)):
        answer = server.ask(TEXT, prompt=prompt, **settings)
        expected = [choice["text"] for choice in one["choices"]] * times
        assert [choice["text"] for choice in answer["choices"]] == expected
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * times))
        assert answer["usage"]["prompt_tokens"] == 2 * times


def test_the_usual_lengths(server: Server) -> None:
    assert server.ask(TEXT, prompt="a", ignore_eos=True)["usage"]["completion_tokens"] == 16
    with another(max_output=5) as limited:
        for path, question in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "a"})):
            assert limited.ask(path, **question, ignore_eos=True)["usage"]["completion_tokens"] == 5
            error = limited.refusal(path, {**question, "max_tokens": 6})
            assert error["param"] == "max_tokens" and "at most 5" in error["message"]


def test_an_answer_nobody_gave_a_length_for_fits() -> None:
    with another(max_output=50, loading={"scheduling": SchedulerConfig(max_length=40)}) as short:
        assert short.get("/v1/models").json()["data"][0]["context"] == 40
        for path, question in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "a" * 30})):
            usage = short.ask(path, **question, ignore_eos=True)["usage"]
            assert usage["total_tokens"] == 40


def test_stop_texts_end_the_answer(server: Server) -> None:
    settings = {"prompt": "a", "seed": 2, "max_tokens": 20}
    plain = server.ask(TEXT, **settings)["choices"][0]["text"]
    word = plain.split()[3]
    for stop in (word, [word, "never said"]):
        choice = server.ask(TEXT, **settings, stop=stop)["choices"][0]
        assert choice["text"] == plain[: plain.index(word)] and choice["finish_reason"] == "stop"
        assert text_of(server.stream(TEXT, **settings, stop=stop)) == choice["text"]


def test_settings_reach_the_engine(server: Server) -> None:
    settings = {"prompt": "a", "max_tokens": 12, "temperature": 0}
    greedy = server.ask(TEXT, **settings)["choices"][0]["text"]
    first = server.ask("/tokenize", prompt=" " + greedy.split()[0])["tokens"]
    assert len(first) == 1, "words are tokens of this model"
    for change in ({"banned": first}, {"logit_bias": {str(first[0]): -100}}):
        assert not server.ask(TEXT, **settings, **change)["choices"][0]["text"].startswith(greedy[:3])
    assert server.ask(TEXT, **settings, stop_token_ids=first)["usage"]["completion_tokens"] == 1
    repeated = server.ask(TEXT, **{**settings, "max_tokens": 60}, frequency_penalty=2.0)["choices"][0]["text"].split()
    assert max(map(repeated.count, repeated)) <= 3
    assert server.ask(TEXT, **settings, top_k=1, seed=1)["choices"][0]["text"] == greedy
    assert server.ask(TEXT, **settings, priority="high", accept="rejection")["usage"]["speculation"]["accept"] == (
        "rejection"
    )


def test_speculation_is_the_callers_choice(server: Server) -> None:
    settings = {"prompt": "a", "seed": 4, "max_tokens": 24}
    plain = server.ask(TEXT, **settings, speculation={"off": True})
    assert plain["usage"]["speculation"]["drafted"] == 0 and plain["usage"]["speculation"]["method"] == "none"
    assert plain["usage"]["speculation"]["rounds"] == plain["usage"]["completion_tokens"]
    for speculation in ({"width": 2}, {"width": 6, "tree": True}, {"draft": "model"}, {"off": False, "width": 0}):
        answer = server.ask(TEXT, **settings, speculation=speculation)
        assert answer["choices"][0]["text"] == plain["choices"][0]["text"]
        assert bool(answer["usage"]["speculation"]["drafted"]) == (speculation.get("width") != 0)


def test_a_deadline_ends_the_answer_honestly() -> None:
    with another(model="mock-cost") as slow:
        choice = slow.ask(TEXT, prompt="a", max_tokens=4000, ignore_eos=True, deadline_ms=80)["choices"][0]
        assert choice["finish_reason"] == "length" and choice["stop_reason"] == "deadline"


# Logprobs


def test_logprobs_inside_accepted_blocks_are_those_of_plain_decoding(server: Server) -> None:
    chat = {"messages": HELLO, "seed": 8, "max_tokens": 20, "logprobs": True, "top_logprobs": 3}
    plain = server.ask(CHAT, **chat, speculation={"off": True})["choices"][0]["logprobs"]["content"]
    wide = server.ask(CHAT, **chat, speculation={"width": 5})
    entries = wide["choices"][0]["logprobs"]["content"]
    assert wide["usage"]["speculation"]["accepted"] > 3
    streamed = [
        entry
        for chunk in server.stream(CHAT, **chat, speculation={"width": 5})
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == entries
    assert [entry["token"] for entry in entries] == [entry["token"] for entry in plain]
    for ours, theirs in zip(entries, plain, strict=True):
        assert ours["logprob"] == pytest.approx(theirs["logprob"], abs=1e-5)
        assert len(ours["top_logprobs"]) == 3
        tops = [top["logprob"] for top in ours["top_logprobs"]]
        assert tops == sorted(tops, reverse=True)
        assert ours["bytes"] is None or bytes(ours["bytes"]).decode() == ours["token"]
    assert (
        "".join(bytes(entry["bytes"] or []).decode() for entry in entries) == wide["choices"][0]["message"]["content"]
    )


def test_logprobs_of_plain_completions(server: Server) -> None:
    settings = {"prompt": "a", "seed": 8, "max_tokens": 9, "logprobs": 2}
    whole = server.ask(TEXT, **settings)["choices"][0]
    told = whole["logprobs"]
    assert len({len(told[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}) == 1
    for token, logprob, top, offset in zip(
        told["tokens"], told["token_logprobs"], told["top_logprobs"], told["text_offset"], strict=True
    ):
        assert top[token] == logprob and len(top) in (2, 3)
        assert whole["text"][offset:].startswith(token) or token.startswith(("token_id", "<"))
    chunks = [chunk["choices"][0]["logprobs"] for chunk in server.stream(TEXT, **settings)]
    for name in told:
        assert [value for chunk in chunks for value in chunk[name]] == told[name]
    assert server.ask(TEXT, **{**settings, "logprobs": 0})["choices"][0]["logprobs"]["top_logprobs"] is None


@pytest.mark.parametrize("prompt", ["Hello wörld", [72, 101, 108]])
def test_echo(server: Server, prompt: str | list[int]) -> None:
    text = prompt if isinstance(prompt, str) else bytes(prompt).decode()
    settings = {"prompt": prompt, "echo": True, "seed": 1}
    bare = server.ask(TEXT, **settings, max_tokens=5)["choices"][0]
    assert bare["text"].startswith(text) and len(bare["text"]) > len(text)
    assert text_of(server.stream(TEXT, **settings, max_tokens=5)) == bare["text"]
    scored = server.ask(TEXT, **settings, max_tokens=5, logprobs=1)["choices"][0]
    told = scored["logprobs"]
    assert scored["text"] == bare["text"] and told["tokens"][:2] == ["H", "e"]
    assert told["token_logprobs"][0] is None and all(value < 0 for value in told["token_logprobs"][1:])
    assert told["text_offset"][-1] < len(scored["text"])
    (streamed,) = server.stream(TEXT, **settings, max_tokens=5, logprobs=1)
    assert streamed["choices"][0] == scored
    for stream in (False, True):
        only = {**settings, "max_tokens": 0}
        shown = text_of(server.stream(TEXT, **only)) if stream else server.ask(TEXT, **only)["choices"][0]["text"]
        assert shown == text
    silent = server.ask(TEXT, **settings, max_tokens=0, logprobs=1)
    assert silent["choices"][0]["logprobs"]["token_logprobs"] == told["token_logprobs"][: len(text.encode())]
    assert silent["usage"]["completion_tokens"] == 0


# Constraints


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [
        ("regex", "(yes|no), [0-9]{3}", "(yes|no), [0-9]{3}"),
        ("grammar", 'start: "left" | "right"', "left|right"),
        (
            "response_format",
            {
                "type": "json_schema",
                "json_schema": {"name": "age", "schema": {"type": "integer", "minimum": 10, "maximum": 19}},
            },
            "1[0-9]",
        ),
    ],
)
def test_constraints_hold(server: Server, field: str, value: Any, pattern: str) -> None:
    for seed in range(3):
        choice = server.ask(CHAT, messages=HELLO, seed=seed, **{field: value})["choices"][0]
        assert re.fullmatch(pattern, choice["message"]["content"]) and choice["finish_reason"] == "stop"


def test_a_bad_constraint_is_named(server: Server) -> None:
    for field, value in (("regex", "("), ("grammar", "start: missing")):
        error = server.refusal(CHAT, {"messages": HELLO, "response_format": {"type": "text"}, field: value})
        assert error["param"] == field and error["code"] == "invalid_request"
    for stream in (False, True):
        error = server.refusal(CHAT, {"messages": HELLO, "grammar": "start: start", "stream": stream})
        assert error["param"] == "grammar" and "no text satisfies it" in error["message"]
    both = server.refusal(CHAT, {"messages": HELLO, "regex": "a", "grammar": 'start: "a"'})
    assert "give one" in both["message"]


# Traces


def test_a_trace_says_where_tokens_came_from(server: Server) -> None:
    settings = {"messages": HELLO, "seed": 6, "max_tokens": 30, "stream_options": {"include_usage": True}}
    chunks = server.stream(CHAT, **settings, speculation={"trace": True, "width": 3})
    usage = chunks.pop()["usage"]["speculation"]
    rounds = [chunk["speculation"] for chunk in chunks if "speculation" in chunk]
    tokens = [token for one in rounds for token in one["tokens"]]
    assert "".join(token["text"] for token in tokens) == text_of(chunks)
    origins = [token["origin"] for token in tokens]
    assert set(origins) <= {"kept", "replaced", "bonus", "plain"}
    assert origins.count("kept") == usage["accepted"] and origins.count("bonus") == usage["bonus"]
    assert sum(one["drafted"] for one in rounds) == usage["drafted"]
    assert all(len(one["refused"]) == one["drafted"] - one["accepted"] for one in rounds)
    plain = server.stream(CHAT, **settings, speculation={"trace": True, "off": True})
    assert {token["origin"] for chunk in plain for token in chunk.get("speculation", {"tokens": []})["tokens"]} == {
        "plain"
    }


@pytest.mark.parametrize(
    ("accepted", "tokens", "origins", "refused"),
    [
        (2, [11, 13, 99], ["kept", "kept", "bonus"], 3),  # the path ends at a leaf
        (1, [11, 99], ["kept", "replaced"], 4),  # something was drafted after it
        (0, [99], ["replaced"], 5),
        (2, [11], ["kept"], 4),  # cut by a stop
    ],
)
def test_a_trace_of_a_tree(accepted: int, tokens: list[int], origins: list[str], refused: int) -> None:
    drafts, parents = [10, 11, 12, 13, 14], [-1, -1, 0, 1, 1]
    event = Event("r", tokens, "", drafts, accepted, parents, pieces=[""] * len(tokens))
    told = trace(event, Spelling(None))
    assert [token["origin"] for token in told["tokens"]] == origins and len(told["refused"]) == refused


# What is refused

GOOD_CHAT, GOOD_TEXT = {"messages": HELLO}, {"prompt": "a"}


@pytest.mark.parametrize(
    ("path", "change", "param", "words"),
    [
        (CHAT, {"max_tokens": "5"}, "max_tokens", "whole number, got '5'"),
        (CHAT, {"max_tokens": 5.0}, "max_tokens", "whole number, got 5.0"),
        (CHAT, {"max_tokens": True}, "max_tokens", "whole number"),
        (CHAT, {"max_tokens": 0}, "max_tokens", "echo only"),
        (CHAT, {"max_tokens": -1}, "max_tokens", "at least 0"),
        (CHAT, {"max_tokens": 5000}, "max_tokens", "context of 4096"),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "different"),
        (CHAT, {"min_tokens": 9, "max_tokens": 3}, "min_tokens", "more than"),
        (CHAT, {"n": 0}, "n", "at least 1"),
        (CHAT, {"n": 129}, "n", "at most 128"),
        (CHAT, {"seed": 1 << 64}, "seed", "at most"),
        (CHAT, {"seed": 10**30}, None, "64 bits"),
        (CHAT, {"temperature": -0.1}, "temperature", "at least 0"),
        (CHAT, {"top_p": 0}, "top_p", "above 0"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        (CHAT, {"logprobs": 3}, "logprobs", "true or false"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
        (TEXT, {"logprobs": 21}, "logprobs", "at most 20"),
        (TEXT, {"logprobs": True}, "logprobs", "whole number"),
        (CHAT, {"stop": ["a"] * 17}, "stop", "16"),
        (CHAT, {"stop": ""}, "stop", "1 to 1000"),
        (CHAT, {"logit_bias": {"dog": 1}}, "logit_bias", "token ids as keys"),
        (CHAT, {"logit_bias": {"99999": 1}}, "logit_bias", "vocabulary"),
        (CHAT, {"logit_bias": {"1": "x"}}, "logit_bias.1", "number"),
        (CHAT, {"banned": [384]}, "banned", "vocabulary"),
        (CHAT, {"stop_token_ids": [-1]}, "stop_token_ids[0]", "at least 0"),
        (CHAT, {"priority": "urgent"}, "priority", "'high'"),
        (CHAT, {"user": 5}, "user", "text"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "goes with"),
        (CHAT, {"speculation": {"widht": 3}}, "speculation.widht", "did you mean width?"),
        (CHAT, {"speculation": {"width": 65}}, "speculation.width", "at most 64"),
        (CHAT, {"speculation": {"off": True, "width": 3}}, "speculation.width", "contradict"),
        (CHAT, {"speculation": {"draft": "/etc/passwd"}}, "speculation.draft", "was not loaded"),
        (CHAT, {"speculation": {"draft": "model,model"}}, "speculation.draft", "twice"),
        (CHAT, {"speculation": {"trace": True}}, "speculation.trace", "stream"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools", "response_format"),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "tools"),
        (CHAT, {"store": True}, "store", "not stored"),
        (CHAT, {"temprature": 1}, "temprature", "did you mean temperature?"),
        (CHAT, {"xyzzy": 1}, "xyzzy", "not a known field"),
        (CHAT, {"prompt": "a"}, "prompt", TEXT),
        (TEXT, {"messages": HELLO}, "messages", CHAT),
        (TEXT, {"best_of": 2}, "best_of", "ask for several with n"),
        (TEXT, {"suffix": "end"}, "suffix", "prompt"),
        (CHAT, {"messages": []}, "messages", "not be empty"),
        (CHAT, {"messages": None}, "messages", "list"),
        (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'assistant'"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        (CHAT, {"messages": [{**HELLO[0], "name": "Bo"}]}, "messages[0].name", "content"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "'image_url'",
        ),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "surrogate"),
        (CHAT, {"user": "\ud800"}, "user", "surrogate"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 5000}]}, "messages", "4096"),
        (TEXT, {"prompt": ""}, "prompt", "empty"),
        (TEXT, {"prompt": []}, "prompt", "empty"),
        (TEXT, {"prompt": [[]]}, "prompt", "empty"),
        (TEXT, {"prompt": ["a", [1]]}, "prompt", "mixture"),
        (TEXT, {"prompt": [1, True]}, "prompt", "list of token ids"),
        (TEXT, {"prompt": [999]}, "prompt", "vocabulary"),
        (TEXT, {"prompt": [999], "echo": True}, "prompt", "vocabulary"),
        (TEXT, {"prompt": ["a"] * 65, "n": 2}, "n", "128"),
        (TEXT, {"prompt": {"text": "a"}}, "prompt", "takes a text"),
    ],
)
def test_bad_fields_are_named(server: Server, path: str, change: Json, param: str | None, words: str) -> None:
    error = server.refusal(path, {**(GOOD_CHAT if path == CHAT else GOOD_TEXT), **change})
    assert error["type"] == "invalid_request_error" and error["param"] == param
    assert words in error["message"] and "\n" not in error["message"] and len(error["message"]) < 300


@pytest.mark.parametrize(
    ("path", "harmless"),
    [
        (CHAT, {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "store": False, "metadata": None}),
        (CHAT, {"temperature": None, "n": None, "stop": None, "speculation": None, "stream": None, "user": None}),
        (CHAT, {"logprobs": False, "top_logprobs": None, "response_format": {"type": "text"}, "model": "default"}),
        (CHAT, {"messages": [{"role": "assistant", "content": "x", "refusal": None, "tool_calls": None}]}),
        (CHAT, {"messages": [{"role": "developer", "content": [{"type": "text", "text": "Be brief"}]}, *HELLO]}),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 3, "seed": -(1 << 63)}),
        (TEXT, {"best_of": 1, "suffix": None, "logprobs": False, "echo": False, "stop": []}),
        (TEXT, {"user": 'new\nline "quoted"', "deadline_ms": 60000, "top_k": 5, "min_p": 0.1, "typical_p": 0.9}),
    ],
)
def test_what_asks_for_nothing_is_let_through(server: Server, path: str, harmless: Json) -> None:
    server.ask(path, **{**(GOOD_CHAT if path == CHAT else GOOD_TEXT), "max_tokens": 3, **harmless})


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"temperature": NaN}', "NaN is not JSON"),
        (b'{"temperature": -Infinity}', "-Infinity is not JSON"),
        (b'{"temperature": 1e999}', "too large"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "5000 digits"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"\\ud800": 1}', "surrogate"),
    ],
)
def test_broken_bodies(server: Server, raw: bytes, words: str) -> None:
    for path in (CHAT, TEXT, "/tokenize", "/detokenize"):
        response = server.call("POST", path, content=raw, headers={"Content-Type": "application/json"})
        assert response.status_code == 400 and words in response.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_must_say_that_it_is_json(server: Server, kind: str) -> None:
    response = server.call("POST", TEXT, content=b'{"prompt": "a"}', headers={"Content-Type": kind} if kind else {})
    assert response.status_code == 400 and "application/json" in response.json()["error"]["message"]


def test_unknown_models_paths_and_methods(server: Server) -> None:
    error = server.refusal(CHAT, {**GOOD_CHAT, "model": "gpt-9"}, 404)
    assert error["code"] == "model_not_found" and "`gpt-9` does not exist" in error["message"]
    for method, path, status, code in (
        ("GET", "/v2", 404, "not_found"),
        ("GET", "/page/..%2Fapp.py", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/other/name", 404, "model_not_found"),
        ("GET", "/v1/requests/unknown", 404, "request_not_found"),
        ("DELETE", "/v1/requests/unknown", 404, "request_not_found"),
    ):
        response = server.call(method, path)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert server.call("GET", CHAT).headers["allow"] == "POST"
    assert server.call("PUT", "/v1/requests/x").headers["allow"] == "DELETE, GET"


def test_a_failure_nobody_foresaw_tells_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(server.worker.engine, "encode", fail)
    error = server.refusal(TEXT, GOOD_TEXT, 500)
    assert error["type"] == "server_error" and "secret" not in error["message"]
    assert "ZeroDivisionError: secret" in caplog.text


# Who may ask, and how much


def test_keys() -> None:
    with another(api_keys=("first", "sécond")) as closed:
        assert closed.get("/health").status_code == 200 and closed.get("/").status_code == 200
        for path in ("/v1/models", "/v1/anything", "/v1"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first"}):
                response = closed.get(path, headers=headers)
                assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
                assert response.json()["error"]["code"] == "invalid_api_key"
        assert closed.post("/tokenize", {"prompt": "a"}).status_code == 401
        for key in ("first", "sécond"):
            headers = [(b"Authorization", b"Bearer " + key.encode())]
            assert closed.get("/v1/models", headers=headers).status_code == 200


def test_requests_are_their_owners() -> None:
    with another(api_keys=("one", "two")) as closed:
        mine, yours = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        answer = closed.post(TEXT, {"prompt": "a", "user": "Ada"}, headers={**mine, "X-Request-Id": "letter-1"})
        assert answer.json()["id"] == answer.headers["x-request-id"] == "letter-1"
        found = closed.get("/v1/requests/letter-1", headers=mine).json()
        assert found["status"] == "done" and found["user"] == "Ada"
        assert found["choices"][0]["text"] == answer.json()["choices"][0]["text"]
        for method in ("GET", "DELETE"):
            assert closed.call(method, "/v1/requests/letter-1", headers=yours).status_code == 404
        again = closed.post(TEXT, {"prompt": "a"}, headers={**mine, "X-Request-Id": "letter-1"})
        assert again.status_code == 200


def test_names_of_requests(server: Server) -> None:
    for name in ("", "a b", "x" * 65, "ü"):
        response = server.post(TEXT, GOOD_TEXT, headers={"X-Request-Id": name.encode()})
        assert response.status_code == 400 and response.json()["error"]["param"] == "X-Request-Id"


async def chopped(parts: list[bytes], pause_s: float = 0.0) -> Any:
    for part in parts:
        await asyncio.sleep(pause_s)
        yield part


def test_bodies_have_a_limit() -> None:
    with another(max_body=1000, body_timeout_s=0.2) as limited:
        headers = {"Content-Type": "application/json"}
        announced = limited.call("POST", TEXT, content=b" " * 1001, headers=headers)
        counted = limited.call("POST", TEXT, content=chopped([b" " * 400] * 3), headers=headers)
        for response in (announced, counted):
            assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"
        slow = limited.call("POST", TEXT, content=chopped([b" "] * 5, 0.1), headers=headers)
        assert slow.status_code == 408 and slow.json()["error"]["code"] == "body_timeout"
        whole = json.dumps(GOOD_TEXT).encode()
        fine = limited.call("POST", TEXT, content=chopped([whole[:5], whole[5:]]), headers=headers)
        assert fine.status_code == 200


def test_hosts_and_origins() -> None:
    with another(hosts=("localhost", "::1"), origins=("https://app.example",)) as closed:
        for host, status in (("localhost:8000", 200), ("[::1]:8000", 200), ("evil.example", 400)):
            assert closed.get("/v1/models", headers={"Host": host}).status_code == status
        for origin, allowed in (("https://app.example", "https://app.example"), ("https://evil.example", None)):
            response = closed.get("/v1/models", headers={"Origin": origin})
            assert response.headers.get("access-control-allow-origin") == allowed


def test_a_full_queue_says_when_to_come_back() -> None:
    scheduling = SchedulerConfig(max_batch=1, max_queue=1)
    with another(model="mock-cost", loading={"scheduling": scheduling}) as small:
        never = small.refusal(TEXT, {"prompt": "a", "n": 3})
        assert never["param"] == "n" and "lower n" in never["message"]  # waiting would not help
        waiting = small.worker.engine.open_streams(["a", "b"], max_tokens=4000, ignore_eos=True)
        response = small.post(TEXT, {"prompt": "a"})
        assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "queue_full"
        for stream in waiting:
            stream.close()
        assert small.ask(TEXT, prompt="a", n=2)
        small.worker.refuse()
        response = small.post(TEXT, {"prompt": "a"})
        assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
        assert small.get("/health").status_code == small.get("/health/ready").status_code == 503
        assert small.get("/health/live").status_code == 200


# Clients that leave


class Client:
    """A connection by hand: it reads as much as it likes, and leaves when it likes."""

    def __init__(self, body: Json, when: Callable[[Client], bool], *, stuck: bool = False) -> None:
        self._body: list[bytes] = [json.dumps(body).encode()]
        self._when = when
        self._stuck = stuck
        self.gone = asyncio.Event()
        self.data = b""
        self.status: int | None = None

    async def receive(self) -> Json:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Json) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        self.data += message.get("body", b"")
        if self._when(self):
            if self._stuck:
                await asyncio.Event().wait()
            self.gone.set()

    async def call(self, server: Server, path: str) -> None:
        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        scope |= {"http_version": "1.1", "scheme": "http", "root_path": "", "server": None, "client": None}
        await server.app(scope, self.receive, self.send)


@pytest.fixture(scope="module")
def slow() -> Iterator[Server]:
    """A model that takes its time: an answer of thousands of tokens does not end by itself."""
    server = Server("mock-cost", send_timeout_s=0.2)
    yield server
    server.close()


LONG = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True}


def is_idle(server: Server) -> bool:
    """Whether the engine has nothing to do, within a few rounds."""
    until = time.monotonic() + 2.0
    while server.worker.engine.num_requests and time.monotonic() < until:
        time.sleep(0.005)
    return server.worker.engine.num_requests == 0


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_client_that_leaves_or_does_not_read_ends_its_stream(slow: Server, n: int, is_stuck: bool) -> None:
    client = Client({**LONG, "stream": True, "n": n}, lambda me: me.data.count(b"data:") >= 3, stuck=is_stuck)
    slow.do(client.call(slow, TEXT))
    assert client.status == 200 and is_idle(slow)
    assert 3 <= client.data.count(b"data:") < 20 and b"[DONE]" not in client.data


def test_a_client_that_leaves_ends_its_whole_answer(slow: Server) -> None:
    client = Client({**LONG, "n": 2}, lambda _: False)

    async def leave() -> None:
        calling = asyncio.create_task(client.call(slow, TEXT))
        while slow.worker.engine.num_requests < 2:
            await asyncio.sleep(0.001)
        client.gone.set()
        await calling

    slow.do(leave())
    assert client.status == 499 and is_idle(slow)


def test_a_request_can_be_cancelled_by_its_id(slow: Server) -> None:
    async def cancel() -> httpx.Response:
        headers = {"X-Request-Id": "long-one"}
        asking = asyncio.create_task(slow.client.post(TEXT, json=LONG, headers=headers))
        # Unknown until the server has read it, and waiting until a round has room for it.
        while (await slow.client.get("/v1/requests/long-one")).json().get("status") != "running":
            await asyncio.sleep(0.001)
        assert (await slow.client.delete("/v1/requests/long-one")).json()["cancelled"] is True
        return await asking

    choice = slow.do(cancel()).json()["choices"][0]
    assert choice["stop_reason"] == "cancelled" and choice["finish_reason"] == "length" and is_idle(slow)


def test_silence_is_filled(slow: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.001)
    client = Client({**LONG, "stream": True}, lambda me: b": still working" in me.data)
    slow.do(client.call(slow, TEXT))
    assert b": still working\n\n" in client.data and is_idle(slow)


def test_an_error_in_a_stream_is_its_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    with another() as server:
        target = server.worker.engine.loop.target
        monkeypatch.setattr(target, "score", lambda *_, **__: 1 / 0)
        response = server.post(TEXT, {**LONG, "stream": True})
        assert response.status_code == 200
        last = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert last["error"]["code"] == "backend_error" and last["error"]["type"] == "server_error"
        assert server.refusal(TEXT, GOOD_TEXT, 500)["code"] == "backend_error"


# The engine's thread


def test_a_scheduler_that_fails_ends_requests_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with another() as server:
        with monkeypatch.context() as patch:
            patch.setattr(server.worker.engine.loop.scheduler, "next_batch", lambda **_: 1 / 0)
            assert "the engine failed" in server.refusal(TEXT, GOOD_TEXT, 500)["message"]
        assert server.ask(TEXT, **GOOD_TEXT)


def test_a_server_needs_the_engines_thread() -> None:
    with Engine.load("mock", threaded=False) as engine, pytest.raises(ConfigError, match="threaded"):
        Worker(engine)


def test_one_call_wakes_all_readers_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with another(model="mock-cost") as server:
        calls: list[int] = []
        call_soon = server.worker._call_soon

        def count(function: Any, tickets: list[Any]) -> None:
            calls.append(len(tickets))
            call_soon(function, tickets)

        monkeypatch.setattr(server.worker, "_call_soon", count)
        server.ask(TEXT, prompt="a", n=8, max_tokens=30, ignore_eos=True)
        assert is_idle(server)
        assert len(calls) <= server.worker.engine.statistics.passes and max(calls) >= 8


def test_after_a_pause_readers_get_an_error_and_nothing_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    with another(model="mock-cost") as server:
        worker = server.worker
        open_streams = worker.engine.open_streams

        def open_slowly(requests: Any) -> Any:
            if len(requests[0].prompt) > 100:
                time.sleep(0.2)  # as long prompts take to be checked
            return open_streams(requests)

        monkeypatch.setattr(worker.engine, "open_streams", open_slowly)

        async def go_down() -> list[httpx.Response]:
            bodies = [LONG, {**LONG, "prompt": "a" * 3000, "max_tokens": 1000}]
            asking = [asyncio.create_task(server.client.post(TEXT, json=body)) for body in bodies]
            while not (worker._opening and worker.engine.num_requests):
                await asyncio.sleep(0.001)
            await worker.pause()
            passes = worker.engine.statistics.passes
            worker.suspend()
            responses = [await task for task in asking]
            assert worker.engine.statistics.passes == passes
            return responses

        for response in server.do(go_down()):
            assert response.status_code == 503 and "ask again" in response.json()["error"]["message"]


# The small paths


def test_models_and_statistics(server: Server) -> None:
    listed = server.get("/v1/models").json()
    (card,) = listed["data"]
    assert card["id"] == "mock-text" and card["context"] == 4096 and card["chat"] is True
    assert card["method"] in card["methods"] and server.get("/v1/models/mock-text").json() == card
    server.ask(TEXT, **GOOD_TEXT)  # the first request this server gets, where tests are shared out among workers
    told = server.get("/v1/statistics").json()
    assert told["speculation"]["rounds"] > 0 and told["serving"]["requests"]["received"] > 0


def test_tokens_and_back(server: Server) -> None:
    told = server.ask("/tokenize", prompt="Hello wörld")
    assert told["count"] == len(told["tokens"]) and told["context"] == 4096
    assert server.ask("/detokenize", tokens=told["tokens"]) == {"prompt": "Hello wörld"}
    chat = server.ask("/tokenize", messages=HELLO)["tokens"]
    assert len(chat) == server.ask(CHAT, messages=HELLO, max_tokens=1)["usage"]["prompt_tokens"]
    assert server.refusal("/tokenize", {})["param"] == "prompt"
    assert server.refusal("/tokenize", {"prompt": "a", "messages": HELLO})["param"] == "prompt"
    assert server.refusal("/detokenize", {"tokens": [9999]})["code"] == "token_out_of_range"


def test_control_tokens_in_content_are_text(server: Server) -> None:
    end = 256  # of the mock: "<end>"
    talk = [{"role": "user", "content": "a<end>b"}]
    assert end in server.ask("/tokenize", prompt="a<end>b")["tokens"], "a plain prompt may have control tokens"
    written = server.ask("/tokenize", messages=talk)
    assert end not in written["tokens"]
    assert "a<end>b" in server.ask("/detokenize", tokens=written["tokens"])["prompt"]
    assert server.ask(CHAT, messages=talk, max_tokens=1)["usage"]["prompt_tokens"] == written["count"]


def counters(server: Server) -> dict[str, float]:
    response = server.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = [line for line in response.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_metrics(server: Server) -> None:
    before = counters(server)
    told = server.ask(TEXT, prompt="a", max_tokens=20, speculation={"width": 4})["usage"]["speculation"]
    after = counters(server)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    name = "outrider_spec_decode_num_{}_total".format
    assert grown[name("draft_tokens")] == told["drafted"] and grown[name("accepted_tokens")] == told["accepted"]
    assert 0 < grown[name("drafts")] <= told["rounds"]
    places = [grown[key] for key in grown if "per_pos" in key]
    assert sum(places) == told["accepted"] and places == sorted(places, reverse=True)
    assert grown[f'outrider_http_requests_total{{path="{TEXT}",status="200"}}'] == 1
    count = "outrider_event_loop_delay_seconds_count"
    deadline = time.monotonic() + 30
    while after[count] == 0 and time.monotonic() < deadline:  # the server measures it every 100 ms
        time.sleep(0.02)
        after = counters(server)
    assert after[count] > 0 and after[count] == after['outrider_event_loop_delay_seconds_bucket{le="+Inf"}']
    assert any(name.startswith("outrider_info{version=") for name in after)
    assert all(value >= 0 for key, value in grown.items() if key.split("{")[0].endswith(("_total", "_count")))


def test_the_log_has_figures_and_no_text(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "outrider.server")
    for stream in (False, True):
        caplog.clear()
        body = {"prompt": "a secret", "user": "Bo\nb", "max_tokens": 5, "ignore_eos": True, "stream": stream}
        server.post(TEXT, body, headers={"X-Request-Id": f"logged-{stream}"})
        (line,) = [record.getMessage() for record in caplog.records if "logged" in record.getMessage()]
        assert re.fullmatch(
            rf'POST {TEXT} 200 [0-9.]+s id=logged-{stream} user="Bo\\nb" prompt=8 completion=5 acceptance=[0-9.]+', line
        )
        assert "secret" not in caplog.text


def test_the_page(server: Server) -> None:
    page = server.get("/")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    again = server.get("/", headers={"If-None-Match": page.headers["etag"]})
    assert again.status_code == 304 and not again.content
    for name in set(re.findall(r'(?:src|href)="page/([^"]+)"', page.text)):
        assert server.get(f"/page/{name}").status_code == 200, name
    assert server.get("/page/nothing.js").status_code == 404


def test_the_description_is_whole(server: Server) -> None:
    told = server.get("/openapi.json").json()
    assert {CHAT, TEXT, "/v1/models", "/tokenize", "/detokenize", "/health", "/metrics"} <= told["paths"].keys()
    for path, operations in told["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"], path
    fields = told["components"]["schemas"]["ChatBody"]["properties"]
    assert fields["tools"]["enum"] == [[], None] and "messages" in fields
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(told)))
    assert references <= told["components"]["schemas"].keys()
