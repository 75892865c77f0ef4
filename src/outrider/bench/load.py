"""Many clients at one server: every token they get is compared with what the engine says alone, disconnects included.

Each client asks again and again, with a seed, and sometimes leaves in the middle. A seed means reproducible, so what
the server streamed must be the beginning of what an engine of our own says to the same prompt, plainly decoded.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from outrider.bench.asking import import_httpx
from outrider.bench.process import ServerProcess, running_server
from outrider.engine.engine import Engine
from outrider.types import Request, SamplingParams

PROMPTS = (
    "The rider",
    "Once upon a time there was",
    "List three rivers.",
    "What did the scout see under the open sky?",
)
SEEDS = range(40)
LEAVING = 0.25  # share of the requests that end in the middle


@dataclass(frozen=True, slots=True)
class Scene:
    """What is done to the server."""

    model: str = "mock-cost"
    clients: int = 200
    seconds: float = 120.0
    max_tokens: int = 120


@dataclass(slots=True)
class Answer:
    """What one request got."""

    prompt: str
    seed: int
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    left: bool = False
    problem: str | None = None


@dataclass(slots=True)
class Report:
    """What came of it."""

    requests: int = 0
    whole: int = 0
    left: int = 0
    refused: int = 0
    tokens: int = 0
    tokens_per_second: float = 0.0
    wrong: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    still_open: float = 0.0
    pages_held: float | None = None
    delay_p99_below: float = 0.0  # seconds
    memory_growth: int = 0  # bytes, after the first quarter

    @property
    def is_good(self) -> bool:
        return not self.wrong and not self.problems and not self.still_open and not self.pages_held


async def stream(client: Any, url: str, answer: Answer, leave_after: int | None) -> None:
    """One streamed request; `leave_after` so many rounds the client is gone."""
    body = _body(answer, speculation={"trace": True})
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            await response.aread()
            answer.problem = f"{response.status_code} {response.text[:200]}"
            return
        rounds = 0
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            _take(json.loads(line.removeprefix("data: ")), answer)
            rounds += 1
            if rounds == leave_after:
                answer.left = True
                return


def _take(chunk: dict[str, Any], answer: Answer) -> None:
    if "error" in chunk:
        answer.problem = chunk["error"]["message"]
        return
    answer.tokens += [token["id"] for token in chunk.get("speculation", {}).get("tokens", [])]
    for choice in chunk["choices"]:
        answer.text += choice["text"]
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason


async def crowd(url: str, scene: Scene, server: ServerProcess) -> tuple[list[Answer], Report]:
    """All clients for the whole time."""
    httpx = import_httpx()
    until = time.monotonic() + scene.seconds
    answers: list[Answer] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=scene.clients)
    report, memory = Report(), 0
    async with httpx.AsyncClient(timeout=60.0, limits=limits) as client:

        async def one(number: int) -> None:
            dice = random.Random(number)
            await asyncio.sleep(dice.random())
            while time.monotonic() < until:
                answer = Answer(dice.choice(PROMPTS), dice.choice(SEEDS), dice.randint(3, scene.max_tokens))
                leave_after = dice.randint(1, 12) if dice.random() < LEAVING else None
                try:
                    await stream(client, url, answer, leave_after)
                except httpx.HTTPError as error:
                    answer.problem = f"{type(error).__name__}: {error}"
                answers.append(answer)

        async def weigh() -> None:
            nonlocal memory
            await asyncio.sleep(scene.seconds / 4)
            memory = server.memory()

        started = time.monotonic()
        await asyncio.gather(weigh(), *(one(number) for number in range(scene.clients)))
        report.tokens_per_second = sum(len(answer.tokens) for answer in answers) / (time.monotonic() - started)
        report.memory_growth = server.memory() - memory
        await _settle(client, url, report)
    return answers, report


async def _settle(client: Any, url: str, report: Report) -> None:
    """Wait until nothing is open any more, and read what the server says of itself."""
    for _ in range(100):
        page = (await client.get(f"{url}/metrics")).text
        report.still_open = _value(page, "outrider_requests_running") + _value(page, "outrider_requests_waiting")
        if not report.still_open:
            break
        await asyncio.sleep(0.1)
    held = re.search(r'^outrider_pages\{state="held"\} (\S+)', page, re.MULTILINE)
    report.pages_held = None if held is None else float(held[1])
    report.delay_p99_below = quantile_bound(page, "outrider_event_loop_delay_seconds", 0.99)


def _value(page: str, name: str) -> float:
    found = re.search(rf"^{name} (\S+)", page, re.MULTILINE)
    return float(found[1]) if found else 0.0


def quantile_bound(page: str, name: str, share: float) -> float:
    """The lowest bound of a Prometheus histogram that at least `share` of the values are below."""
    buckets = re.findall(rf'^{name}_bucket{{le="([^"]+)"}} (\d+)', page, re.MULTILINE)
    total = int(buckets[-1][1]) if buckets else 0
    return next((float(bound) for bound, count in buckets if int(count) >= share * total), 0.0)


def judge(answers: list[Answer], report: Report, engine: Engine) -> None:
    """Compare every answer with the engine's own."""
    asked = sorted({(answer.prompt, answer.seed) for answer in answers})
    longest = max((answer.max_tokens for answer in answers), default=1)
    known = {
        pair: result.token_ids
        for pair, result in zip(
            asked, engine.generate([_request(prompt, seed, longest) for prompt, seed in asked]), strict=True
        )
    }
    for answer in answers:
        report.requests += 1
        report.tokens += len(answer.tokens)
        report.left += answer.left
        if answer.problem is not None:
            if answer.problem.startswith("429"):
                report.refused += 1
            else:
                report.problems.append(answer.problem)
            continue
        expected = known[answer.prompt, answer.seed][: answer.max_tokens]
        is_whole = not answer.left
        report.whole += is_whole
        if answer.tokens != (expected if is_whole else expected[: len(answer.tokens)]):
            report.wrong.append(f"seed {answer.seed} of {answer.prompt!r}: {answer.tokens} instead of {expected}")
        elif is_whole and answer.finish_reason is None:
            report.wrong.append(f"seed {answer.seed} of {answer.prompt!r} has no end")


def _request(prompt: str, seed: int, max_tokens: int) -> Request:
    return Request(prompt=prompt, max_tokens=max_tokens, width=0, sampling=SamplingParams(temperature=1.0, seed=seed))


def under_load(scene: Scene) -> Report:
    """The whole play, on a server process of its own."""
    quiet = "mock-text" if scene.model == "mock-cost" else scene.model  # says the same without the waiting
    # What is over is forgotten soon, so that memory that stays is a leak
    with running_server(scene.model, "--quiet", "--keep", "5") as server:
        answers, report = asyncio.run(crowd(server.url, scene, server))
    judge(answers, report, Engine.load(quiet, max_batch=256 if quiet.startswith("mock") else 16))
    return report


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens per second of the same requests, through the server and without it."""

    clients: int
    server: float
    engine: float

    @property
    def ratio(self) -> float:
        return self.server / self.engine


def throughput(model: str, clients: int, max_tokens: int, repeats: int) -> Iterator[Throughput]:
    """The two take turns. Decoded plainly: what a drafter has learned of the answers would not be the same in both."""
    engine = Engine.load(model)
    answers = [Answer(PROMPTS[number % len(PROMPTS)], number, max_tokens) for number in range(clients)]
    requests = [
        Request(
            prompt=answer.prompt,
            max_tokens=max_tokens,
            ignore_eos=True,
            width=0,
            sampling=SamplingParams(temperature=1.0, seed=answer.seed),
        )
        for answer in answers
    ]
    with running_server(model, "--quiet") as server:
        for repeat in range(repeats + 1):  # the first warms up and is not counted
            started = time.perf_counter()
            engine.generate(requests)
            alone = clients * max_tokens / (time.perf_counter() - started)
            served = clients * max_tokens / asyncio.run(_ask_all(server.url, answers))
            if repeat:
                yield Throughput(clients, served, alone)


async def _ask_all(url: str, answers: list[Answer]) -> float:
    """Seconds until all have their streams whole."""
    httpx = import_httpx()
    async with httpx.AsyncClient(timeout=600.0, limits=httpx.Limits(max_connections=None)) as client:

        async def one(answer: Answer) -> None:
            body = _body(answer, speculation={"off": True}, ignore_eos=True)
            async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                async for _ in response.aiter_raw():
                    pass

        started = time.perf_counter()
        await asyncio.gather(*(one(answer) for answer in answers))
        return time.perf_counter() - started


def _body(answer: Answer, **more: Any) -> dict[str, Any]:
    """What is asked: everything that decides about the tokens is said."""
    asked = {"prompt": answer.prompt, "seed": answer.seed, "max_tokens": answer.max_tokens}
    return {**asked, "temperature": 1.0, "top_p": 1.0, "stream": True, **more}
