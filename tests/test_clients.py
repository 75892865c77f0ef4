"""The clients people have, against a server process as people start it."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.bench.process import ServerProcess, running_server

openai = pytest.importorskip("openai")
ROOT = Path(__file__).parent.parent
QUESTION: list[dict[str, str]] = [{"role": "user", "content": "What did the rider see?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 10}, "people": {"type": "integer", "maximum": 9999}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server("mock-text", "--api-key", "secret", "--quiet") as started:
        yield started


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as made:
        yield made


def test_openai_chat(client: Any) -> None:
    answer = client.chat.completions.create(model="mock-text", messages=QUESTION, max_tokens=20, seed=1)
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].message.content
    assert answer.usage.completion_tokens == 20 and answer.choices[0].finish_reason == "length"
    assert answer.usage.speculation["drafted"] > 0 and answer.usage.speculation["accept"] == "coupled"
    again = client.chat.completions.create(
        model="mock-text", messages=QUESTION, max_tokens=20, seed=1, extra_body={"speculation": {"off": True}}
    )
    assert again.choices[0].message.content == answer.choices[0].message.content
    assert again.usage.speculation["drafted"] == 0


def test_openai_streaming(client: Any) -> None:
    settings: dict[str, Any] = {"model": "mock-text", "messages": QUESTION, "max_tokens": 30, "seed": 2}
    whole = client.chat.completions.create(**settings, logprobs=True, top_logprobs=2)
    chunks = list(
        client.chat.completions.create(
            **settings, logprobs=True, top_logprobs=2, stream=True, stream_options={"include_usage": True}
        )
    )
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content and len(texts) > 3
    told = [entry for chunk in chunks if chunk.choices and chunk.choices[0].logprobs
            for entry in chunk.choices[0].logprobs.content or []]  # fmt: skip
    assert told == whole.choices[0].logprobs.content and len(told) == 30
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 30
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


def test_openai_asynchronous(server: ServerProcess) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret") as client:

            async def one(seed: int) -> str:
                stream = await client.chat.completions.create(
                    model="mock-text", messages=QUESTION, max_tokens=25, seed=seed, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return list(await asyncio.gather(*(one(seed) for seed in (1, 2, 1))))

    first, second, third = asyncio.run(ask())
    assert first == third != second


def test_openai_completions(client: Any) -> None:
    answer = client.completions.create(
        model="mock-text",
        prompt=["The rider", "A river"],
        n=2,
        max_tokens=8,
        seed=1,
        logprobs=1,
        echo=True,
        stop=["zz"],
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text.startswith("The rider") and answer.choices[2].text.startswith("A river")
    told = answer.choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.text_offset)
    assert told.token_logprobs[0] is None and "".join(told.tokens) == answer.choices[0].text


def test_openai_structured_output(client: Any) -> None:
    answer = client.chat.completions.create(
        model="mock-text",
        messages=QUESTION,
        temperature=1.0,
        max_tokens=100,
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}},
    )
    value = json.loads(answer.choices[0].message.content)
    assert value.keys() == {"city", "people"} and answer.choices[0].finish_reason == "stop"


def test_openai_sees_errors_as_it_knows_them(client: Any, server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError, match="tools") as caught:
        client.chat.completions.create(
            model="mock-text",
            messages=QUESTION,
            tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
        )
    assert caught.value.param == "tools"
    with pytest.raises(openai.NotFoundError, match="mock-text"):
        client.chat.completions.create(model="gpt-4", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="4096"):
        client.chat.completions.create(model="mock-text", messages=QUESTION, max_tokens=100_000)
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    assert [model.id for model in client.models.list()] == ["mock-text"]


def test_langchain(server: ServerProcess) -> None:
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="secret", model="mock-text", max_tokens=12, seed=3, temperature=0.7
    )
    answer = model.invoke("What did the rider see?")
    assert answer.content and answer.response_metadata["finish_reason"] == "length"
    streamed = [chunk.content for chunk in model.stream("What did the rider see?")]
    assert "".join(streamed) == answer.content and len(streamed) > 2
    patient = model.model_copy(update={"max_tokens": 100})
    place = patient.with_structured_output(SCHEMA | {"title": "place"}, method="json_schema").invoke("Where?")
    assert set(place) == {"city", "people"}


def test_the_readmes_curl_commands() -> None:
    """As they stand there, on the default model."""
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    commands = re.findall(r"^(curl .*?[^\\])$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(commands) >= 4
    with running_server("smollm2", "--quiet") as server:
        for command in commands:
            words = shlex.split(command.replace("\\\n", " ").replace("http://localhost:8000", server.url))
            done = subprocess.run([*words, "--silent", "--fail-with-body"], capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, f"{command}: {done.stdout} {done.stderr}"
            assert done.stdout.strip(), command
            if "stream" in command:
                assert done.stdout.rstrip().endswith("data: [DONE]")


def test_chat_with_a_server(server: ServerProcess) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "outrider", "chat", "--url", server.url, "--max-tokens", "10", "--seed", "1"],
        input="Hello\n/stats\nAnd then?\n",
        capture_output=True,
        text=True,
        env={"PATH": "", "OUTRIDER_API_KEY": "secret"},
        timeout=60,
    )
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2 and "10 tokens" in done.stderr
