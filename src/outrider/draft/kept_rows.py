"""Which rows of a pass belong to tokens that stay: what heads read of the target's hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from outrider.types import Batch, Job, Scores, Verdicts


class Kept(NamedTuple):
    """A job's tokens of a pass that are in the target's cache for good: places `start` and on, and where they stood."""

    job: Job
    start: int
    rows: Sequence[int]
    decided: bool  # whether the last of them gave the job's last token


def kept_rows(batch: Batch, scores: Scores, verdicts: Verdicts) -> Iterator[Kept]:
    """For every job of the plan that goes on. One whose answer was cut short of its verdict has ended."""
    first = 0
    for job, chunk in zip(batch.prefill, batch.chunks, strict=True):
        if not job.done:
            yield Kept(job, job.cached - chunk, range(first, first + chunk), False)
        first += chunk
    fed, following = scores.fed[len(batch.prefill) :], verdicts.next.tolist()
    for place, (job, num_fed, count) in enumerate(zip(batch.decode, fed, scores.counts, strict=True)):
        pending = first + num_fed - (count - 1)  # the others are drafts
        rows: Sequence[int] = range(first, pending)
        if count > 1:
            rows = [*rows, *(pending + node for node in verdicts.kept(place))]
        first += num_fed
        is_cut = job.cached != len(job.tokens) - 1 or job.tokens[-1] != following[place] or job.cached < len(rows)
        if not (job.done or place in verdicts.faults or is_cut):
            yield Kept(job, job.cached - len(rows), rows, True)
