"""Plug-ins that raise at random, in mixed batches: the guilty fail with their own error, the others get their tokens.

A request is guilty when its prompt begins with POISON; its second token names the plug-in method that fails on it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from outrider.backends.base import Paths, Spans, State
from outrider.backends.mock import MockBackend
from outrider.backends.paged_mock import PagedMock
from outrider.config import MockConfig, SchedulerConfig
from outrider.draft.base import DrafterInfo
from outrider.draft.lookup import ScriptedDrafter
from outrider.draft.model import ModelDrafter
from outrider.draft.suffix import SuffixDrafter
from outrider.engine.engine import Engine
from outrider.errors import OutriderError
from outrider.kv.pages import Pages
from outrider.sched.policies import Policy
from outrider.spec.controller import WidthController
from outrider.types import Batch, Drafts, Job, Scores, Slot

TARGET = MockConfig(vocab_size=32, seed=7, sharpness=2.0, context=256)
DRAFT = MockConfig(vocab_size=32, seed=7, sharpness=2.0, drift=0.4, context=256)
POISON = 31
METHODS = (
    *("order", "reserve", "victim", "propose", "observe", "lag", "forget", "pause", "processor", "callback"),
    *("open", "length", "score", "score_after", "keep", "publish", "rewind", "close"),
    *("reserve_pages", "would_free", "trim"),
)


class Fault(Exception):  # noqa: N818
    """What a plug-in raises."""


def method_of(tokens: Sequence[int]) -> str | None:
    """The plug-in method that fails on a request with these tokens."""
    return METHODS[tokens[1]] if len(tokens) > 1 and tokens[0] == POISON else None


class Dice:
    """Whether a guilty call fails this time."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def fail(self, tokens: Sequence[int], method: str, chance: float = 0.5) -> None:
        if method_of(tokens) == method and self._random.random() < chance:
            raise Fault(method)


class FaultyPolicy(Policy):
    name = "faulty"

    def __init__(self, dice: Dice) -> None:
        self._dice = dice

    def order(self, job: Job) -> tuple[float, ...]:
        self._dice.fail(job.tokens, "order")
        return (job.arrival, float(job.id))

    def reserve(self, job: Job) -> int:
        self._dice.fail(job.tokens, "reserve")
        return super().reserve(job)

    def victim(self, candidates: Sequence[Job]) -> Job | None:
        return max(candidates, key=lambda job: (job.arrival, job.id))


class FaultyDrafter(ScriptedDrafter):
    """Drafts for guilty requests only, so that its failures are theirs."""

    info = DrafterInfo(name="faulty")

    def __init__(self, dice: Dice) -> None:
        super().__init__(lambda tokens, width: [(tokens[-1] + place) % 32 for place in range(width)])
        self._dice = dice

    def propose(self, jobs: Sequence[Job], widths: Sequence[int], trees: Sequence[bool]) -> Drafts:
        for job in jobs:
            self._dice.fail(job.tokens, "propose")
        return super().propose(jobs, widths, trees)

    def observe(self, batch: Batch, scores: Scores, verdicts: Any) -> int:
        for job in batch.jobs:
            self._dice.fail(job.tokens, "observe")
        return 0

    def lag(self, job: Job) -> int:
        self._dice.fail(job.tokens, "lag")
        return 0

    def forget(self, job: Job) -> None:
        self._dice.fail(job.tokens, "forget")

    def pause(self, job: Job) -> None:
        self._dice.fail(job.tokens, "pause")


class FaultyTarget(PagedMock):
    """Fails on slots of guilty requests, before or after it has done its work."""

    def __init__(self, dice: Dice) -> None:
        super().__init__(TARGET, Pages(40, 8))
        self._dice = dice
        self._guilty: dict[Slot, list[int]] = {}

    def fail(self, slot: Slot, method: str, chance: float = 0.5) -> None:
        self._dice.fail(self._guilty.get(slot, ()), method, chance)

    def open(self, tokens: Sequence[int] = (), limit: int | None = None, tenant: str = "") -> Slot | None:
        self._dice.fail(tokens, "open")
        slot = super().open(tokens, limit, tenant)
        if slot is not None and method_of(tokens) is not None:
            self._guilty[slot] = list(tokens[:2])
        return slot

    def length(self, slot: Slot) -> int:
        self.fail(slot, "length", 0.1)
        return super().length(slot)

    def score(self, spans: Spans, hidden: Sequence[int] = ()) -> Scores:
        for slot in spans.slots:
            self.fail(slot, "score")
        scores = super().score(spans, hidden)
        for slot in spans.slots:
            self.fail(slot, "score_after")
        return scores

    def keep(self, slots: Sequence[Slot], lengths: Sequence[int], paths: Paths | None = None) -> None:
        for slot in slots:
            self.fail(slot, "keep")
        super().keep(slots, lengths, paths)

    def publish(self, slot: Slot, tokens: Sequence[int]) -> None:
        self.fail(slot, "publish")
        super().publish(slot, tokens)

    def rewind(self, slot: Slot, length: int) -> None:
        self.fail(slot, "rewind")
        super().rewind(slot, length)

    def close(self, slot: Slot) -> None:
        self.fail(slot, "close")
        super().close(slot)
        self._guilty.pop(slot, None)

    def reserve(self, slot: Slot, length: int) -> bool:
        self.fail(slot, "reserve_pages", 0.1)
        return super().reserve(slot, length)

    def would_free(self, slot: Slot) -> int:
        self.fail(slot, "would_free")
        return super().would_free(slot)

    def trim(self, slot: Slot) -> bool:
        self.fail(slot, "trim")
        return super().trim(slot)

    def swap_out(self, slot: Slot) -> State:
        return super().swap_out(slot)


class FaultyController(WidthController):
    """Fails whoever the batch belongs to: that costs speed, and no request anything else."""

    dice = random.Random(5)

    def choose(self, batch: Batch) -> Any:
        if self.dice.random() < 0.1:
            raise Fault("choose")
        return super().choose(batch)

    def observe(self, *round: Any) -> Any:
        if self.dice.random() < 0.1:
            raise Fault("observe")
        return super().observe(*round)


def machine(seed: int, *, threaded: bool) -> Engine:
    dice = Dice(seed)
    target = FaultyTarget(dice)
    drafters = [SuffixDrafter(), ModelDrafter(MockBackend(DRAFT)), FaultyDrafter(dice)]
    infos = [drafter.info for drafter in drafters]
    return Engine(
        target,
        drafters,
        scheduling=SchedulerConfig(max_batch=8, prefill_chunk=16, policy=FaultyPolicy(dice)),
        controller=FaultyController(infos),
        threaded=threaded,
    )


def request(dice: random.Random) -> tuple[list[int], dict[str, Any]]:
    """A prompt and its settings; every third is guilty."""
    prompt = [dice.randrange(30) for _ in range(dice.randint(2, 24))]
    settings: dict[str, Any] = {"max_tokens": dice.randint(1, 40), "temperature": 0.0, "ignore_eos": True}
    settings["method"] = dice.choice(["suffix,model", "model", "suffix", "none"])
    if settings["method"] != "none":
        settings["width"] = dice.choice([None, None, 0, 1, 3, 6])
    if dice.random() < 0.33:
        method = dice.randrange(len(METHODS))
        prompt = [POISON, method, *prompt]
        settings["method"] = "faulty" if METHODS[method] in ("propose", "observe", "lag", "pause") else "model"
        settings["width"] = 3
        if METHODS[method] == "processor":
            settings["processors"] = [failing(dice.random())]
        if METHODS[method] == "callback":
            settings["on_token"] = failing(dice.random())
    return prompt, settings


def failing(seed: float) -> Callable[..., Any]:
    dice = random.Random(seed)

    def fail(first: Any, second: Any) -> Any:
        if dice.random() < 0.2:
            raise Fault("called back")
        return second if isinstance(second, np.ndarray) else None

    return fail


REFERENCE = Engine(MockBackend(TARGET), threaded=False)


def expected(prompt: list[int], settings: dict[str, Any]) -> list[int]:
    return REFERENCE.generate(prompt, max_tokens=settings["max_tokens"], temperature=0.0, ignore_eos=True).token_ids


def check(prompt: list[int], settings: dict[str, Any], tokens: list[int] | None, error: BaseException | None) -> None:
    if error is not None:
        assert method_of(prompt) is not None, f"an innocent request failed: {error!r}"
        assert isinstance(error, (OutriderError, Fault)), f"{error!r} is no error of its own"
    else:
        assert tokens == expected(prompt, settings), f"{prompt} with {settings} got other tokens"


def check_nothing_left(engine: Engine) -> None:
    loop = engine.loop
    assert not loop.jobs and not loop.scheduler.running and not loop.scheduler.waiting
    assert loop.target.pages is not None
    loop.target.pages.check()
    assert loop.target.pages.usage.held == 0, "pages are left behind"
    assert not loop.router.drafters["model"].seats, "the draft keeps jobs that are over"  # type: ignore[attr-defined]
    assert not loop.router.drafters["suffix"].lookups, "lookups keep jobs that are over"  # type: ignore[attr-defined]
    controller = loop.controller
    assert not controller._unread and not controller._found and not controller._widths
    assert not controller.acceptance._own, "the controller keeps jobs that are over"


@pytest.fixture(autouse=True)
def quiet() -> Any:
    logging.getLogger("outrider").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("outrider").setLevel(logging.NOTSET)


@pytest.mark.blind  # a slot that failed to close is held until the next step
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_random_faults_step_by_step(seed: int) -> None:
    dice, engine = random.Random(seed), machine(seed, threaded=False)
    open_streams: list[tuple[list[int], dict[str, Any], Any]] = []
    num_failed = num_done = 0
    for _ in range(2_500):
        while len(open_streams) < 10:
            prompt, settings = request(dice)
            open_streams.append((prompt, settings, engine.stream(prompt, **settings)))
        if dice.random() < 0.02:
            open_streams.pop(dice.randrange(len(open_streams)))[2].close()
        engine.step()
        for entry in [entry for entry in open_streams if entry[2].is_over]:
            open_streams.remove(entry)
            prompt, settings, stream = entry
            check(prompt, settings, stream.tokens, stream.error)
            num_failed += stream.error is not None
            num_done += stream.error is None
    for _, _, stream in open_streams:
        stream.close()
    for _ in range(20):  # what failed to close is tried again
        engine.step()
    check_nothing_left(engine)
    assert num_failed > 50 and num_done > 300, "too little happened to prove anything"


@pytest.mark.blind
@pytest.mark.parametrize("seed", range(2))
def test_random_faults_with_threads_streams_and_asyncio(seed: int) -> None:
    before, engine = threading.active_count(), machine(seed + 10, threaded=True)
    failures: list[BaseException] = []

    def generates(number: int) -> None:
        dice = random.Random(100 * seed + number)
        try:
            for _ in range(25):
                prompt, settings = request(dice)
                try:
                    check(prompt, settings, engine.generate(prompt, **settings).token_ids, None)
                except (OutriderError, Fault) as error:
                    check(prompt, settings, None, error)
        except BaseException as error:
            failures.append(error)

    async def streams(dice: random.Random) -> None:
        for _ in range(15):
            prompt, settings = request(dice)
            tokens: list[int] = []
            try:
                async for event in engine.astream(prompt, **settings):
                    tokens += event.tokens
                check(prompt, settings, tokens, None)
            except (OutriderError, Fault) as error:
                check(prompt, settings, None, error)

    async def all_streams() -> None:
        await asyncio.wait_for(asyncio.gather(*(streams(random.Random(number)) for number in range(4))), 120)

    lock, plain = threading.Lock(), REFERENCE.generate

    def one_at_a_time(*prompt: Any, **settings: Any) -> Any:
        with lock:
            return plain(*prompt, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(REFERENCE, "generate", one_at_a_time)
        clients = [threading.Thread(target=generates, args=(number,)) for number in range(4)]
        for client in clients:
            client.start()
        asyncio.run(all_streams())
        for client in clients:
            client.join()
    assert not failures, failures[0]
    for _ in range(20):
        engine.thread.call(engine.loop.step)  # type: ignore[union-attr]
    check_nothing_left(engine)
    engine.close()
    assert threading.active_count() <= before, "a thread is left behind"
