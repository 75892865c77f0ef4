"""After every step of every engine in every test: target cache, draft cache and emitted tokens agree."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from outrider.backends.mock import MockBackend
from outrider.draft.base import Drafter
from outrider.draft.layerskip import LayerSkipDrafter
from outrider.draft.model import ModelDrafter
from outrider.draft.run_ahead import RunAheadDrafter
from outrider.engine.engine import Engine
from outrider.engine.loop import Loop
from outrider.native.build import NAME
from outrider.native.library import FOLDER, library, why_not
from outrider.types import Event

settings.register_profile("outrider", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("outrider")

os.environ.setdefault("TRITON_INTERPRET", "1")  # triton looks when kernels are declared; GPUs have tests of their own


def drafter_of(engine: Engine) -> Any:
    """The engine's first drafter, if it has one."""
    return next(iter(engine.loop.router.drafters.values()), None)


def inner_of(drafter: Drafter) -> Drafter:
    """The drafter itself, without run-ahead around it."""
    return drafter.inner if isinstance(drafter, RunAheadDrafter) else drafter


def check_caches(loop: Loop) -> None:
    """The target holds tokens[:-1] (a prefix while it reads, and again after a preemption), the draft a prefix. Only
    running jobs hold any."""
    loop.check()
    pages = getattr(loop.target, "pages", None)
    if pages is not None:
        pages.check()
        assert pages.leases.keys() == {job.slot for job in loop.scheduler.running}, "pages of jobs that do not run"
    if isinstance(loop.target, MockBackend):
        assert loop.target.num_slots == len(loop.scheduler.running), "the target holds slots of jobs that do not run"
        for job in loop.scheduler.running:
            held = loop.target.cached(job.slot)
            assert held == job.tokens[: len(held)], f"target holds {held}, tokens are {job.tokens}"
            if len(job.tokens) > job.num_prompt and not job.statistics.preemptions:
                assert held == job.tokens[:-1], f"target holds {held}, tokens are {job.tokens}"
    running, here = {job.id for job in loop.scheduler.running}, {job.id for job in list(loop.jobs.values())}
    for outer in loop.router.drafters.values():
        drafter = inner_of(outer)
        for held in ("seats", "states"):
            assert getattr(drafter, held, {}).keys() <= running, f"{drafter.name} keeps {held} of jobs that do not run"
        assert getattr(drafter, "lookups", {}).keys() <= here, f"{drafter.name} keeps lookups of jobs that are over"
        if isinstance(drafter, ModelDrafter):
            check_draft(loop, drafter, runs_ahead=drafter is not outer)
        elif isinstance(drafter, LayerSkipDrafter):
            for job in loop.scheduler.running:
                assert drafter.view.length(job.slot) == job.cached, "what the first layers guessed is still there"


def check_draft(loop: Loop, drafter: ModelDrafter, *, runs_ahead: bool) -> None:
    for seat in drafter.seats.values():
        held = seat.length + len(seat.ahead)  # ahead: only with run-ahead
        assert drafter.backend.length(seat.slot) == held, "the draft holds more or less than its seat says"
        assert not seat.ahead or runs_ahead, "the draft keeps what was not emitted"
    if isinstance(drafter.backend, MockBackend):
        num_slots, num_seats = drafter.backend.num_slots, len(drafter.seats)
        assert num_slots == num_seats or (drafter.shares_slots and num_slots < num_seats), (
            "the draft holds others' slots"
        )
        running = {job.id: job for job in loop.scheduler.running}
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
def caches_agree(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Checks after every step. A failure on an engine's thread is raised when the test ends: the thread must go on, or
    the test would wait for it forever."""
    if request.node.get_closest_marker("blind"):
        yield
        return
    step, failures = Loop.step, list[AssertionError]()

    def checked(loop: Loop) -> list[Event]:
        events = step(loop)
        try:
            check_caches(loop)
        except AssertionError as error:
            if threading.current_thread().name != "outrider-engine":
                raise
            failures.append(error)
        return events

    monkeypatch.setattr(Loop, "step", checked)
    yield
    if failures:
        raise failures[0]


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
