"""Bodies that are meant to take long: refused by their size, soon, and while others are answered."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from outrider.errors import RequestError
from outrider.server.parse import parse
from outrider.server.schema import ChatBody, CompletionBody, DetokenizeBody
from test_server import TEXT, Json, another

SOON_S = 1.5  # a body of a few megabytes is read in about 0.3 s, and describing its faults took 3 to 11 s
LATE_S = 0.8  # an event loop that answers /health later than this was blocked
MANY = 240_000
PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}] * 1025}


@pytest.mark.parametrize(
    ("model", "body", "param", "words"),
    [
        (CompletionBody, {"logit_bias": {str(i): "x" for i in range(MANY)}}, "logit_bias", "240000 entries"),
        (CompletionBody, {"logit_bias": {f"x{i}": 1 for i in range(MANY)}}, "logit_bias", "at most 1024"),
        (CompletionBody, {"banned": [-1] * 3 * MANY}, "banned", "at most 262144"),
        (CompletionBody, {"banned": [-1] * MANY}, "banned[0]", "at least 0, got -1"),
        (CompletionBody, {"stop_token_ids": ["x"] * 3 * MANY}, "stop_token_ids", "at most 262144"),
        (CompletionBody, {"stop": [1] * MANY}, "stop", "240000 entries, and takes up to 16"),
        (ChatBody, {"messages": [{}] * MANY}, "messages", "at most 16384"),
        (ChatBody, {"messages": [{}] * 16384}, "messages[0].role", "required"),
        (ChatBody, {"messages": [PARTS]}, "messages[0].content", "at most 1024"),
        (DetokenizeBody, {"tokens": [-1] * 5 * MANY}, "tokens", "at most 1048576"),
        (DetokenizeBody, {"tokens": [-1] * 4 * MANY}, "tokens[0]", "at least 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_size_is_refused_soon(model: Any, body: Json, param: str, words: str) -> None:
    raw = json.dumps(body | ({"prompt": "a"} if model is CompletionBody else {})).encode()
    started = time.monotonic()
    with pytest.raises(RequestError) as refused:
        parse(model, raw)
    assert time.monotonic() - started < SOON_S
    assert refused.value.param == param and words in refused.value.message and len(refused.value.message) < 300


def test_what_fits_is_taken() -> None:
    with another() as server:
        for change in ({"banned": [5] * 200_000}, {"stop_token_ids": [5] * 200_000}):
            assert server.ask(TEXT, prompt="a", max_tokens=2, **change)
            error = server.refusal(TEXT, {"prompt": "a", "n": 6, **change})
            assert error["param"] in change and "200000 ids for each of 6 answers" in error["message"]
        bias = {str(token): -1.0 for token in range(384)}
        assert server.ask(TEXT, prompt="a", max_tokens=2, n=128, logit_bias=bias)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"logit_bias": {str(token): "x" for token in range(MANY)}}, 400),
        ({"logit_bias": {str(token): 1.0 for token in range(MANY)}}, 400),
        ({"banned": [-1] * 4 * MANY}, 400),
        ({"banned": [5] * MANY}, 200),
        ({"prompt": [5] * 5 * MANY}, 400),
        ({"prompt": [5] * 5 * MANY, "echo": True, "logprobs": 0, "n": 128}, 400),
    ],
    ids=["bad biases", "many biases", "bad bans", "bans", "a long prompt", "a long echo"],
)
def test_others_are_answered_meanwhile(body: Json, status: int) -> None:
    raw = json.dumps({"prompt": "a", "max_tokens": 2, **body}).encode()
    delays: list[float] = []
    with another() as server:

        async def watch() -> Any:
            headers = {"Content-Type": "application/json"}
            asking = asyncio.create_task(server.client.post(TEXT, content=raw, headers=headers))
            while not asking.done():
                started = time.monotonic()
                await asyncio.sleep(0.005)
                assert (await server.client.get("/health")).status_code == 200
                delays.append(time.monotonic() - started)
            return await asking

        response = server.do(watch())
    assert response.status_code == status, response.text[:300]
    assert max(delays) < LATE_S, delays
