"""After every step of every engine in every test: target cache, draft cache and emitted tokens agree."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from outrider.backends.mock import MockBackend
from outrider.draft.layerskip import LayerSkipDrafter
from outrider.draft.model import ModelDrafter
from outrider.engine.engine import Engine
from outrider.native.build import NAME
from outrider.native.library import FOLDER, library, why_not

settings.register_profile("outrider", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("outrider")

os.environ.setdefault("TRITON_INTERPRET", "1")  # triton looks when kernels are declared; GPUs have tests of their own


def drafter_of(engine: Engine) -> Any:
    """The engine's first drafter, if it has one."""
    return next(iter(engine.loop.router.drafters.values()), None)


def check_caches(engine: Engine) -> None:
    """The target holds tokens[:-1] (a prefix while it reads, again after it gave way), the draft a prefix, and nobody
    else any."""
    loop = engine.loop
    loop.check()
    pages = getattr(loop.target, "pages", None)
    if pages is not None:
        pages.check()
        assert pages.leases.keys() == {job.slot for job in loop.scheduler.running}, "pages are held by nobody"
    if isinstance(loop.target, MockBackend):
        assert loop.target.num_slots == len(loop.scheduler.running), "the target holds slots of nobody"
        for job in loop.scheduler.running:
            held = loop.target.cached(job.slot)
            assert held == job.tokens[: len(held)], f"target holds {held}, tokens are {job.tokens}"
            if len(job.tokens) > job.num_prompt and not job.statistics.preemptions:
                assert held == job.tokens[:-1], f"target holds {held}, tokens are {job.tokens}"
    running, here = {job.id for job in loop.scheduler.running}, {job.id for job in loop.jobs.values()}
    for drafter in loop.router.drafters.values():
        for held in ("seats", "states"):
            assert getattr(drafter, held, {}).keys() <= running, f"{drafter.name} keeps {held} of jobs that do not run"
        assert getattr(drafter, "lookups", {}).keys() <= here, f"{drafter.name} keeps lookups of jobs that are over"
        if isinstance(drafter, ModelDrafter):
            check_draft(engine, drafter)
        elif isinstance(drafter, LayerSkipDrafter):
            for job in loop.scheduler.running:
                assert drafter.view.length(job.slot) == job.cached, "what the first layers guessed is still there"


def check_draft(engine: Engine, drafter: ModelDrafter) -> None:
    for seat in drafter.seats.values():
        held = seat.length + len(seat.ahead)  # ahead: only with run-ahead
        assert drafter.backend.length(seat.slot) == held, "the draft holds more or less than its seat says"
        assert not seat.ahead or engine.loop.ahead is not None, "the draft keeps what was not emitted"
    if isinstance(drafter.backend, MockBackend):
        num_slots, num_seats = drafter.backend.num_slots, len(drafter.seats)
        assert num_slots == num_seats or (drafter.shares_slots and num_slots < num_seats), (
            "the draft holds others' slots"
        )
        running = {job.id: job for job in engine.loop.scheduler.running}
        assert drafter.seats.keys() <= running.keys(), "the draft holds slots of jobs that are over"
        for job_id, seat in drafter.seats.items():
            held = drafter.backend.cached(seat.slot)[: seat.length]
            tokens = running[job_id].tokens
            assert held == tokens[: len(held)], f"draft holds {held}, tokens are {tokens}"


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Models this small run several times as quick on one thread while others want the second."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def caches_agree(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("blind"):
        return
    step = Engine.step

    def checked(engine: Engine):
        events = step(engine)
        check_caches(engine)
        return events

    monkeypatch.setattr(Engine, "step", checked)


def pytest_configure() -> None:
    """Tests of native code are skipped where no library can be built, never because an old one lies there."""
    reason = why_not()
    if reason is not None and (FOLDER / NAME).exists():
        pytest.exit(f"{reason}", returncode=1)


def instruction_sets() -> list[str]:
    return [] if why_not() else library().outrider_isas().decode().split(",")


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set in turn; what is packed for one is of no use to another."""
    before = library().outrider_selected()
    assert library().outrider_select(request.param.encode()) == 0
    yield request.param
    library().outrider_select(before)
