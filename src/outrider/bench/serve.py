"""A server under load: how soon and how quickly it answers, plainly and with speculation, at the same arrivals.

A server that is started here gives every run, and every pass through the prompts, a key of its own: its caches and the
text it drafts from are kept apart by key, so no answer is quick because it was given before. Requests of a rate or
a trace begin at their time however late others are, and all times count from there; how late this client itself was
is in the reading.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from outrider.bench.asking import Place, Sample, ask, open_client
from outrider.bench.looking import WARM_UP, base_of, look
from outrider.bench.process import running_server
from outrider.bench.served import Mode, Promise, Reading, Run, reading_of
from outrider.bench.traffic import Call, Traffic
from outrider.models.names import DEFAULT

Tell = Callable[[str], None]

MOST_KEYS = 64  # of one run
PAUSE_S = 0.25  # of a client whose request failed
LONGEST_PAUSE_S = 1.0  # of one that was told when to come back
PROBE_S = 0.02
NEWS_S = 0.5  # between two lines about the progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Whom to ask. Without a URL a server is started with `model`, `draft` and further arguments of `outrider serve`;
    with one, `model` is what the server there calls the model to ask."""

    url: str | None = None
    model: str | None = None
    draft: str | None = None
    arguments: Sequence[str] = ()
    key: str | None = None
    temperature: float | None = 0.0
    as_text: bool = False  # completions instead of chat
    patience_s: float = 600.0


def readings(
    traffics: Sequence[Traffic],
    target: Target,
    *,
    promise: Promise | None = None,
    compare: bool = True,
    warm_up: int = 4,
    tell: Tell = lambda words: None,
) -> Iterator[Reading]:
    """Every load, plainly and with speculation where the server can do both. Ctrl-C ends it with what there is."""
    with _server(traffics, target) as (place, keys):
        place = asyncio.run(_look(place))
        number = 0
        for traffic in traffics:
            for mode in _modes(place, compare):
                run = Run(keys[number] if keys else ())
                is_interrupted = False
                try:
                    asyncio.run(_play(place, traffic, mode, run, warm_up, tell))
                except KeyboardInterrupt:
                    if run.begun is None:
                        raise
                    is_interrupted = True
                # As many keys as passes through the prompts; elsewhere one cache sees all runs
                room = len(traffic.prompts) * (len(run.keys) if keys else int(number == 0))
                yield reading_of(
                    run,
                    traffic,
                    promise or Promise(),
                    model=place.model,
                    mode=mode,
                    is_fresh=run.num_started <= room,
                    is_interrupted=is_interrupted,
                )
                if is_interrupted:
                    return
                number += 1


@contextmanager
def _server(traffics: Sequence[Traffic], target: Target) -> Iterator[tuple[Place, list[list[str]]]]:
    """Where to ask, and the keys of each run where there are such."""
    asked = Place(
        base="",
        temperature=target.temperature,
        patience_s=target.patience_s,
        seed=traffics[0].seed,
        is_chat=not target.as_text,
    )
    if target.url is not None:
        yield replace(asked, base=base_of(target.url), model=target.model or "", key=target.key), []
        return
    keys = [[secrets.token_hex(8) for _ in range(_num_keys(traffic))] for traffic in traffics for _ in range(2)]
    with TemporaryDirectory(prefix="outrider-") as folder:
        file = Path(folder) / "keys"
        file.write_text("\n".join(key for some in keys for key in some), encoding="utf-8")
        draft = () if target.draft is None else ("--draft", target.draft)
        given = (*draft, *target.arguments, "--api-key-file", str(file), "--quiet")
        with running_server(target.model or DEFAULT, *given) as server:
            yield replace(asked, base=base_of(server.url), key=keys[0][0]), keys


def _num_keys(traffic: Traffic) -> int:
    """One for each pass through the prompts, as far as that is known."""
    expected = traffic.expected
    return MOST_KEYS if expected is None else min(MOST_KEYS, max(1, -(-expected // len(traffic.prompts))))


def _modes(place: Place, compare: bool) -> tuple[Mode, ...]:
    if not place.is_own:
        return ("as served",)
    if not place.drafts:
        return ("plain",)
    return ("plain", "speculation") if compare else ("speculation",)


async def _look(place: Place) -> Place:
    async with open_client(place) as client:
        return await look(client, place)


async def _play(place: Place, traffic: Traffic, mode: Mode, run: Run, warm_up: int, tell: Tell) -> None:
    """One run: warm up, then the traffic. What ends is in `run` at once."""
    async with open_client(place) as client:
        player = _Player(client, place, traffic, mode, run, tell)
        await player.warm_up(warm_up)
        run.begun = time.perf_counter()
        probing = asyncio.create_task(_probe(run))
        try:
            await (player.openly() if traffic.is_open else player.by_clients())
        finally:
            probing.cancel()


async def _probe(run: Run) -> None:
    """How late this process wakes: what it sees of the server is late by as much."""
    while True:
        wanted = time.perf_counter() + PROBE_S
        await asyncio.sleep(PROBE_S)
        run.delays.append(max(0.0, time.perf_counter() - wanted))


class _Player:
    """Sends the calls of one run."""

    def __init__(self, client: Any, place: Place, traffic: Traffic, mode: Mode, run: Run, tell: Tell) -> None:
        self._client, self._place, self._traffic = client, place, traffic
        self._is_plain = mode == "plain"
        self._run, self._tell, self._told = run, tell, 0.0
        self._expected = traffic.expected
        self._title = f"{mode}, {traffic.name}"

    async def warm_up(self, count: int) -> None:
        """Some requests that do not count, the first alone: it may have to load something."""
        if count > 0:
            self._tell(f"{self._title}: warming up")
            await self._ask(WARM_UP)
            await asyncio.gather(*(self._ask(WARM_UP) for _ in range(count - 1)))

    async def openly(self) -> None:
        """Every call at its time."""
        begun = self._run.begun or 0.0
        async with asyncio.TaskGroup() as group:
            for call in self._traffic.calls():
                due = begun + (call.at or 0.0)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(self._count(call, due))

    async def by_clients(self) -> None:
        """Clients that take the next call when their last one is answered."""
        begun, calls, seconds = self._run.begun or 0.0, self._traffic.calls(), self._traffic.seconds

        async def one() -> None:
            for call in calls:
                if seconds is not None and time.perf_counter() - begun >= seconds:
                    return
                sample = await self._count(call)
                if sample.outcome != "ok":
                    await asyncio.sleep(min(sample.wait_s or PAUSE_S, LONGEST_PAUSE_S))

        async with asyncio.TaskGroup() as group:
            for _ in range(int(self._traffic.load)):
                group.create_task(one())

    async def _count(self, call: Call, due: float | None = None) -> Sample:
        self._run.num_started += 1
        sample = await self._ask(call, due)
        self._run.samples.append(sample)
        self._report(sample.ended)
        return sample

    async def _ask(self, call: Call, due: float | None = None) -> Sample:
        keys, place = self._run.keys, self._place
        if keys:
            place = replace(place, key=keys[call.number // len(self._traffic.prompts) % len(keys)])
        return await ask(self._client, place, call, is_plain=self._is_plain, due=due)

    def _report(self, now: float) -> None:
        """The progress, now and then."""
        if now - self._told < NEWS_S:
            return
        self._told, ended = now, len(self._run.samples)
        of_all = "" if self._expected is None else f" of {self._expected}"
        failed = sum(sample.outcome != "ok" for sample in self._run.samples)
        trouble = f", {failed} refused or failed" if failed else ""
        self._tell(f"{self._title}: {ended}{of_all} ended, {self._run.num_started - ended} running{trouble}")
