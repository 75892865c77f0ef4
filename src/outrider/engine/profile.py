"""The profile at load: what passes and draft steps cost on this machine, so that nothing is discovered by losing.

Rounds with dummy prompts go through an engine of their own and teach its cost model, the same way requests will. They
and passes of several sizes follow a plan, until the time is up: half a second or twelve one-row passes, the longer. A
profile is kept in the cache folder, as a prior: it is measured again where a one-row pass differs by a quarter, and
dropped when rounds turn out to.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from outrider.backends.base import Backend, Spans
from outrider.clock import Clock
from outrider.config import SchedulerConfig
from outrider.draft.base import Drafter
from outrider.engine.engine import Engine
from outrider.errors import OutriderError
from outrider.models.cache import cache_folder
from outrider.spec.cost_model import DRIFT, CostModel

log = logging.getLogger("outrider")

SECONDS = 0.5
PASSES = 12  # one-row passes, where those take longer
PLAN: tuple[int | tuple[int, int], ...] = (  # a pass of so many rows, or a prompt of so many tokens and a width
    *(7, (1, 1), (1, 4), 4, (32, 1), 16, 2, 64),
    *(1, 3, 8, (1, 1), 4, 2, 6, 1, 3, 4, 2, 8, 6, 32, 128, 256),  # what is measured again: the quickest counts
)
TENANT = "\0profile"  # its prompts are found by no request
WARM_PROMPTS = (9, 20, 40, 60, 70, 90, 120, 180, 250, 300, 380, 500, 600)  # tokens: each size of a pass is a graph
WARM_WIDTHS = (1, 2, 3, 4, 5, 7)  # that a device has graphs for
WARM_BATCHES = (1, 4, 16, 64)


def profile(target: Backend, drafters: Sequence[Drafter], scheduling: SchedulerConfig, clock: Clock) -> CostModel:
    """The costs of an engine with this target and these drafters: stored ones if they still hold, else measured."""
    path = _path(target, drafters)
    profiler = Profiler(target, drafters, scheduling, clock)
    try:
        stored = _load(path)
        if stored is not None and profiler.confirms(stored):
            costs = stored
        else:
            costs = profiler.measure()
            _store(path, costs)
        if path is not None:
            costs.on_drift = partial(_drop, path)
        return costs
    except OutriderError as error:  # a context or a cache that is too small even for that
        log.info("nothing was profiled: %s", error)
        return CostModel()


class Profiler:
    """Measures one target with its drafters. Drafters that look text up cost nothing and are left out."""

    def __init__(self, target: Backend, drafters: Sequence[Drafter], scheduling: SchedulerConfig, clock: Clock) -> None:
        self._target = target
        self._clock = clock
        self._drafters = [drafter for drafter in drafters if not drafter.info.lookup]
        self._engine = Engine(target, self._drafters, scheduling=scheduling, clock=clock, threaded=False)
        self._prompts = count()  # never the same one: a known prefix would not be read again

    def confirms(self, stored: CostModel) -> bool:
        """Whether one-row passes take what they took when the profile was stored."""
        self._rows_s(1)
        seconds = min(self._rows_s(1), self._rows_s(1))
        return abs(seconds - stored.pass_s(1)) <= DRIFT * stored.pass_s(1)

    def measure(self) -> CostModel:
        costs = self._engine.loop.controller.costs
        costs.is_profile = True
        self._measure(costs)
        costs.end_profile()
        return costs

    def _measure(self, costs: CostModel) -> None:
        self._rows_s(1)  # weights come into memory, kernels are built: not counted
        if self._target.info.prelaunch:
            self._warm_up()
            return
        began, one_row_s = self._clock.now(), self._rows_s(1)
        deadline = began + max(SECONDS, PASSES * one_row_s)
        costs.profile_pass(1, one_row_s)
        for item in PLAN:
            if isinstance(item, int):
                self._pass(costs, item, deadline)
                continue
            for drafter in self._drafters:
                self._rounds(costs, drafter, *item, deadline)

    def _pass(self, costs: CostModel, rows: int, deadline: float) -> None:
        """Measure a pass of so many rows, if it ends in time however dear rows are."""
        most_s = costs.pass_s(rows) if len(costs.curve.points) > 1 else rows * costs.pass_s(1)
        if rows < self._target.info.context and self._clock.now() + most_s <= deadline:
            costs.profile_pass(rows, self._rows_s(rows))

    def _rounds(self, costs: CostModel, drafter: Drafter, length: int, width: int, deadline: float) -> None:
        """Rounds of a dummy request until one drafts, if there is time: a head waits for the target's first hidden
        states."""
        draft_s = costs.draft_s(drafter.name, [1] * width) + costs.read_s(drafter.name, length, 1)
        if self._clock.now() + costs.pass_s(length) + costs.pass_s(width + 1) + draft_s > deadline:
            return
        prompt = self._prompt(length)
        stream = self._engine.stream(prompt, method=drafter.name, width=width, **_dummy(2 * width + 4))
        for _ in range(3):
            if any(event.drafts for event in self._engine.step()):
                break
        stream.close()
        if stream.error is not None:
            log.info("%s could not be profiled: %s", drafter.name, stream.error)

    def _rows_s(self, rows: int) -> float:
        """Seconds of a target pass of so many rows."""
        target, tokens = self._target, self._prompt(rows)
        slot = target.open((), rows, TENANT)
        if slot is None:
            raise OutriderError(f"the cache has no room for {rows} tokens")
        try:
            spans = Spans([slot], [0], [rows], [rows], target.ops.fed(tokens))
            started = self._clock.now()
            target.score(spans, self._engine.loop.router.hidden)
            return self._clock.now() - started
        finally:
            target.close(slot)

    def _warm_up(self) -> None:
        """Build kernels and graphs of a device and measure whole rounds: prompts of every size, the usual widths."""
        for length in WARM_PROMPTS:
            self._answer([self._prompt(length)], max_tokens=2, width=0)
        for batch in WARM_BATCHES:
            for width in (0, *WARM_WIDTHS) if self._drafters else (0,):
                self._answer([self._prompt(16) for _ in range(batch)], max_tokens=6 * (width + 1), width=width)

    def _answer(self, prompts: list[list[int]], max_tokens: int, width: int) -> None:
        try:
            self._engine.generate(prompts, width=width, **_dummy(max_tokens))
        except OutriderError as error:
            log.info("no warm-up with %d prompts at width %d: %s", len(prompts), width, error)

    def _prompt(self, length: int) -> list[int]:
        first, info = next(self._prompts), self._target.info
        return [(first + place) % info.vocab_size for place in range(min(length, info.context // 4 or 1))]


def _dummy(max_tokens: int) -> dict[str, Any]:
    return {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, "tenant": TENANT}


def _path(target: Backend, drafters: Sequence[Drafter]) -> Path | None:
    """Where the profile of a model, its drafters and this machine is kept; None for a model without a fingerprint."""
    if target.fingerprint is None:
        return None
    parts = (target.fingerprint, type(target).__name__, platform.machine(), platform.node(), target.num_threads)
    names = sorted(drafter.profile_name for drafter in drafters)
    key = hashlib.sha256(repr((parts, names)).encode()).hexdigest()[:24]
    return cache_folder() / "profiles" / f"{key}.json"


def _load(path: Path | None) -> CostModel | None:
    try:
        if path is None or not path.exists():
            return None
        content = json.loads(path.read_text(encoding="utf-8"))
        points = {int(rows): float(seconds) for rows, seconds in content["points"].items()}
        costs = CostModel(points, {str(name): float(seconds) for name, seconds in content["steps"].items()})
        costs.starts = {str(name): float(seconds) for name, seconds in content["starts"].items()}
        costs.reads = {str(name): float(share) for name, share in content["reads"].items()}
        return costs
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        log.info("the stored profile %s cannot be used: %s", path, error)
        return None


def _store(path: Path | None, costs: CostModel) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".part")
        content = {"points": costs.curve.points, "steps": costs.steps, "starts": costs.starts, "reads": costs.reads}
        temporary.write_text(json.dumps(content), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        log.info("the profile could not be stored: %s", error)


def _drop(path: Path) -> None:
    """The next engine measures again."""
    log.info("passes take other times than the stored profile says; it is measured again at the next start")
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.info("the stored profile could not be dropped: %s", error)
