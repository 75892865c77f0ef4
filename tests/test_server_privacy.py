"""What clients learn of each other: nothing, by memory, by ids or by records."""

from __future__ import annotations

import asyncio
import gc
import socket
from typing import Any

import pytest

from outrider.backends.mock import mock_tokenizer
from outrider.backends.paged_mock import PagedMock
from outrider.config import SuffixConfig
from outrider.draft.suffix import SuffixDrafter
from outrider.engine.presets import PRESETS
from outrider.kv.pages import Pages
from outrider.server import memory, run
from outrider.server.settings import ServerSettings
from test_server import TEXT, Json, Server, another

SECRET = {"prompt": "A letter to one reader only. " * 8, "temperature": 0, "max_tokens": 60, "ignore_eos": True}


def remembering(num_pages: int = 200, past_tokens: int = 1 << 16) -> dict[str, Any]:
    """What an engine is loaded with that has both kinds of memory."""
    config = PRESETS["mock-text"].target
    return {
        "model": PagedMock(config, Pages(num_pages, 16)),
        "loading": {
            "draft": SuffixDrafter(SuffixConfig(max_tokens=past_tokens)),
            "tokenizer": mock_tokenizer(config.vocab_size, text=True),
        },
    }


def reuse(server: Any) -> tuple[float, int]:
    """Tokens that the second of two equal requests found in the prefix cache, and how many more drafts it had kept."""
    cached, accepted = [], []
    for _ in range(2):
        before = server.worker.engine.metrics.cached_tokens
        figures = server.ask(TEXT, **SECRET)["usage"]["speculation"]
        cached.append(server.worker.engine.metrics.cached_tokens - before)
        accepted.append(figures["accepted"])
    return cached[1] - cached[0], accepted[1] - accepted[0]


@pytest.mark.parametrize("share", [False, True])
def test_without_keys_nothing_is_remembered_unless_it_is_shared(share: bool) -> None:
    with another(**remembering(), share_memory=share) as server:
        cached, accepted = reuse(server)
        assert (cached > 100 and accepted > 10) if share else (cached == 0 and accepted == 0)


def test_a_key_remembers_its_own() -> None:
    with another(**remembering(), api_keys=("one", "two")) as server:
        engine = server.worker.engine

        def cached(key: str) -> int:
            before = engine.metrics.cached_tokens
            assert server.post(TEXT, SECRET, headers={"Authorization": f"Bearer {key}"}).status_code == 200
            return engine.metrics.cached_tokens - before

        assert cached("one") == 0 and cached("two") == 0 and cached("one") > 100


def test_choices_of_one_call_share_their_prompt() -> None:
    with another(**remembering()) as server:
        server.ask(TEXT, **SECRET, n=3)
        tenants = set(server.worker.engine.loop.router.drafters["suffix"].past.tenants)
        assert len(tenants) == 1 and tenants.pop().startswith("\0")


def test_clients_without_keys_find_their_requests() -> None:
    with another(**remembering()) as server:
        answer = server.post(TEXT, SECRET, headers={"X-Request-Id": "mine"}).json()
        found = server.get("/v1/requests/mine").json()
        assert found["choices"][0]["text"] == answer["choices"][0]["text"]
        assert server.call("DELETE", "/v1/requests/mine").json()["cancelled"] is True


def test_tenants_of_one_call_leave_a_bounded_trace() -> None:
    with another(**remembering(num_pages=60, past_tokens=1024)) as server:
        engine = server.worker.engine
        past, pages = engine.loop.router.drafters["suffix"].past, engine.loop.target.pages
        for number in range(40):
            server.ask(TEXT, **{**SECRET, "prompt": f"{number} {SECRET['prompt']}"})
        gc.collect()
        assert 0 < past.num_tokens <= 1024 and len(past.tenants) <= 1024 // 64
        assert len(pages._page_of) <= 60 and not pages.leases


@pytest.mark.parametrize(
    ("address", "is_local"),
    [("127.0.0.1", True), ("127.8.9.10", True), ("::1", True), ("0.0.0.0", False), ("::", False), ("10.0.0.1", False)],
)
def test_loopback_shares(address: str, is_local: bool) -> None:
    settings = memory.at_address(ServerSettings(model_name="m"), address)
    assert settings.share_memory == is_local and memory.is_off(settings) != is_local
    assert memory.at_address(ServerSettings(model_name="m", share_memory=True), address).share_memory
    assert not memory.is_off(memory.at_address(ServerSettings(model_name="m", api_keys=("k",)), address))


@pytest.mark.parametrize(
    ("host", "settings", "says"),
    [("0.0.0.0", {}, True), ("localhost", {}, False), ("0.0.0.0", {"share_memory": True}, False),
     ("0.0.0.0", {"api_keys": ("k",)}, False)],
)  # fmt: skip
def test_a_start_without_memory_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, host: str, settings: Any, says: bool
) -> None:
    started: list[ServerSettings] = []

    class NoProcess:
        def __init__(self, _: object, settings: ServerSettings, *__: object) -> None:
            started.append(settings)

        async def run(self, listener: socket.socket) -> int:
            listener.close()
            return 0

    monkeypatch.setattr(run, "Process", NoProcess)
    place = run.Place(host=host, port=0)
    assert run.serve(None, ServerSettings(model_name="m", **settings), place, print) == 0  # type: ignore[arg-type]
    assert ("--share-memory" in caplog.text) == says
    assert memory.is_off(started[0]) == says


# Ids


ONE, TWO = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
SAME = {"X-Request-Id": "same"}
LONG_ONE = {"prompt": "a" * 3000, "max_tokens": 60, "ignore_eos": True}  # too long a body to be handed over at once


def at_once(server: Server, calls: list[tuple[Json, Json]]) -> list[Any]:
    """Answers to bodies with headers that are sent at the same time."""

    async def send() -> list[Any]:
        return await asyncio.gather(*(server.client.post(TEXT, json=body, headers=head) for body, head in calls))

    return server.do(send())


def texts(choices: list[Json]) -> list[str]:
    return [choice["text"] for choice in choices]


def test_an_id_of_another_key_is_as_good_as_none() -> None:
    with another(model="mock-cost", api_keys=("one", "two")) as server:
        heads = [{**SAME, **key} for key in (ONE, TWO)]
        answers = at_once(server, [({**LONG_ONE, "seed": seed}, head) for seed, head in enumerate(heads)])
        assert [answer.status_code for answer in answers] == [200, 200]
        assert {answer.json()["id"] for answer in answers} == {"same"}
        for answer, key in zip(answers, (ONE, TWO), strict=True):
            found = server.get("/v1/requests/same", headers=key).json()
            assert found["id"] == "same" and texts(found["choices"]) == texts(answer.json()["choices"])
        assert texts(answers[0].json()["choices"]) != texts(answers[1].json()["choices"])


def test_of_two_requests_with_one_id_one_is_accepted() -> None:
    with another(model="mock-cost") as server:
        answers = at_once(server, [({**LONG_ONE, "n": n}, SAME) for n in (1, 2, 3)])
        (accepted,) = [answer for answer in answers if answer.status_code == 200]
        for refused in (answer for answer in answers if answer is not accepted):
            error = refused.json()["error"]
            assert refused.status_code == 400 and error["param"] == "X-Request-Id" and "in use" in error["message"]
        found = server.get("/v1/requests/same").json()
        assert texts(found["choices"]) == texts(accepted.json()["choices"])
        assert server.post(TEXT, LONG_ONE, headers=SAME).status_code == 200, "an id is free when its request is over"


def test_a_refused_request_leaves_its_id_free() -> None:
    with another() as server:
        first = server.post(TEXT, {"prompt": "a"}, headers=SAME).json()
        assert server.post(TEXT, {"prompt": "a", "max_tokens": 9999}, headers=SAME).status_code == 400
        assert texts(server.get("/v1/requests/same").json()["choices"]) == texts(first["choices"])
        assert server.post(TEXT, {"prompt": "a"}, headers=SAME).status_code == 200
