"""What rounds will cost, where a device can say so beforehand.

On a device that is given work ahead, a round's price shows only among others like it, and a try is dear: what came
before and what comes after cannot be queued. So passes and draft steps are measured when the engine is built, as the
device runs them when nobody keeps it waiting; rounds say how much longer they take.

Kernels and graphs, too, are built when they are first needed, and that takes as long as dozens of rounds. What a single
request needs is built here, by measuring it and by an answer to nonsense.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import count
from typing import Any, cast

from outrider.backends.base import Backend, Measured
from outrider.config import SchedulerConfig
from outrider.draft.base import Drafter, Priced
from outrider.engine.engine import Engine
from outrider.errors import OutriderError
from outrider.spec.width import Prices

log = logging.getLogger("outrider")

ROWS = (*range(1, 9), 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # of passes
JOBS = (1, 4, 16, 64, 256)  # that are drafted for
STEPS = {1: (1, 2, 3, 4, 5, 6, 7)}  # of chains, for so many jobs
FEW_STEPS = (1, 4)  # for others
PROMPTS = (9, 20, 40, 60, 70, 90, 120, 180, 250, 300, 380, 500, 600)  # tokens: passes of each size are a graph
DRAFTED = 100  # of one whose answer is drafted


def measure(target: Backend, drafters: Sequence[Drafter], max_batch: int, max_width: int) -> Prices | None:
    """None where there is nothing to measure: the device is given no work ahead, or no drafter can be."""
    if not drafters or not target.ops.queues or not hasattr(target, "pass_s"):
        return None
    hidden = tuple(sorted({layer for drafter in drafters for layer in drafter.hidden}))
    passes = _passes(target, max_batch, max_width, hidden)
    priced = [drafter for drafter in drafters if hasattr(drafter, "draft_s")]
    drafts = {drafter.name: found for drafter in priced if (found := _steps(drafter, max_batch, max_width))}
    reading = {drafter.name: getattr(drafter, "read_s", lambda: None)() for drafter in priced}
    reads = {name: seconds for name, seconds in reading.items() if seconds is not None}
    built = [drafter.name for drafter in priced if getattr(drafter, "is_built_by_length", False)]
    longest = {name: max(steps for _, steps in drafts[name]) for name in built if name in drafts}
    return Prices(passes, drafts, reads, longest) if drafts else None


def _steps(drafter: Drafter, max_batch: int, max_width: int) -> dict[tuple[int, int], float]:
    found: dict[tuple[int, int], float] = {}
    for jobs in sorted({min(jobs, max_batch) for jobs in JOBS}):
        for steps in sorted({min(steps, max_width) for steps in STEPS.get(jobs, FEW_STEPS)}):
            seconds = cast(Priced, drafter).draft_s(jobs, steps)
            if seconds is not None:
                found[jobs, steps] = seconds
    return found


def _passes(target: Backend, max_batch: int, max_width: int, hidden: Sequence[int]) -> dict[int, float]:
    found: dict[int, float] = {}
    for rows in ROWS:  # of one request as far as it may have drafts, then of several
        each = rows if rows <= 1 + max_width else -(-rows // max_batch)
        jobs = rows // each
        if each <= 1 + max_width and jobs * each not in found:
            seconds = cast(Measured, target).pass_s(jobs, each, hidden=hidden)
            if seconds is not None:
                found[jobs * each] = seconds
    return found


def rehearse(target: Backend, drafters: Sequence[Drafter], scheduling: SchedulerConfig) -> None:
    """Answers to nonsense, plainly and by every draft whose price can be told: with chains and with trees. What goes
    wrong there will be told to who asks for something."""
    if not target.ops.queues or not hasattr(target, "pass_s"):
        return
    forgetful = [drafter for drafter in drafters if hasattr(drafter, "draft_s")]
    beginnings = count()  # never the same one: what is remembered would not be read again
    for some in [[drafter] for drafter in forgetful] or [[]]:
        with Engine(target, some, scheduling=scheduling) as engine:  # what it learns is forgotten with it
            for length in PROMPTS:
                _answer(engine, begun := next(beginnings), length, max_tokens=2, width=0)
            _answer(engine, begun, 2 * PROMPTS[-1], max_tokens=2, width=0)  # half of it is known
            if some:
                _answer(engine, next(beginnings), DRAFTED, max_tokens=16, width=4)
                _answer(engine, next(beginnings), DRAFTED, max_tokens=16, width=8, tree=target.info.trees)


def _answer(engine: Engine, first: int, length: int, **settings: Any) -> None:
    info = engine.loop.target.info
    prompt = [(first + place) % info.vocab_size for place in range(min(length, info.context // 4))]
    try:
        engine.generate(prompt, temperature=0.0, ignore_eos=True, **settings)
    except OutriderError as error:  # a context or a cache that is too small even for that
        log.info("nothing was rehearsed with %s: %s", settings, error)
