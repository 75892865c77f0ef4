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
    passes: dict[int, float] = {}
    drafts: dict[str, dict[tuple[int, int], float]] = {}
    for rows in ROWS:
        each = -(-rows // max_batch)  # tokens of one sequence
        if each > 1 + max_width:
            break
        seconds = cast(Measured, target).pass_s(rows // each, each)
        if seconds is not None:
            passes[rows // each * each] = seconds
    for drafter in priced:
        found: dict[tuple[int, int], float] = {}
        for jobs in sorted({min(jobs, max_batch) for jobs in JOBS}):
            for steps in STEPS:
                seconds = cast(Priced, drafter).draft_s(jobs, min(steps, max_width))
                if seconds is not None:
                    found[jobs, min(steps, max_width)] = seconds
        if found:
            drafts[drafter.name] = found
    return Prices(passes, drafts) if drafts else None
