"""What rounds will cost, where a device can say so beforehand.

On a device that is given work ahead, a round's price shows only among others like it, and a try is dear: what came
before and what comes after cannot be queued. So passes and draft steps are measured when the engine is built, as the
device runs them when nobody keeps it waiting; rounds correct that, if it is not so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from outrider.backends.base import Backend, Measured
from outrider.draft.base import Drafter, Priced
from outrider.spec.width import Prices

ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # of passes
JOBS = (1, 4, 16, 64, 256)  # that are drafted for
STEPS = (1, 4)


def measure(target: Backend, drafters: Sequence[Drafter], max_batch: int, max_width: int) -> Prices | None:
    """None where there is nothing to measure: the device is given no work ahead, or no drafter can be."""
    priced = [drafter for drafter in drafters if hasattr(drafter, "draft_s")]
    if not target.ops.queues or not hasattr(target, "pass_s") or not priced:
        return None
    drafts = {drafter.name: found for drafter in priced if (found := _steps(drafter, max_batch, max_width))}
    return Prices(_passes(target, max_batch, max_width), drafts) if drafts else None


def _steps(drafter: Drafter, max_batch: int, max_width: int) -> dict[tuple[int, int], float]:
    found: dict[tuple[int, int], float] = {}
    for jobs in sorted({min(jobs, max_batch) for jobs in JOBS}):
        for steps in sorted({min(steps, max_width) for steps in STEPS}):
            seconds = cast(Priced, drafter).draft_s(jobs, steps)
            if seconds is not None:
                found[jobs, steps] = seconds
    return found


def _passes(target: Backend, max_batch: int, max_width: int) -> dict[int, float]:
    found: dict[int, float] = {}
    for rows in ROWS:
        each = -(-rows // max_batch)  # tokens of one sequence
        seconds = cast(Measured, target).pass_s(rows // each, each) if each <= 1 + max_width else None
        if seconds is not None:
            found[rows // each * each] = seconds
    return found
