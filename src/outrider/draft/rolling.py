"""Chains drafted without a look of the host: the model goes on by itself where it can (`backends.base.Rolling`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from outrider.backends.base import Backend, HeadHost, Rolling, Spans
from outrider.sampling.ops import Drawing
from outrider.types import Drafts, Job


def roll(backend: Backend, jobs: Sequence[Job], rooms: Sequence[int], spans: Spans, drafts: Drafts) -> bool:
    """Fill `drafts` with rooms[b] tokens for each job. spans: of those with a room, what was not read, with one row.

    All of them go as far as the widest: a step costs about the same for fewer. False: somebody must look, and nothing
    was read.
    """
    steps = max(rooms, default=0)
    if steps == 0:
        return False
    active = [job for job, room in zip(jobs, rooms, strict=True) if room]
    drawing = backend.ops.drawing(active, steps)
    if drawing is None or not cast(Rolling, backend).roll(spans, steps, drawing):
        return False
    fill(drafts, rooms, [room for room in rooms if room], steps, drawing, backend)
    return True


def fill(
    drafts: Drafts,
    rooms: Sequence[int],
    counts: Sequence[int],
    steps: int,
    drawing: Drawing,
    backend: Backend | HeadHost,
) -> None:
    """What was drawn as drafts. counts: how many tokens are wanted of each that it was drawn for."""
    drafts.counts = list(rooms)
    drafts.tokens, drafts.probs = drawing.result(counts)
    drafts.steps, drafts.device.drawn_from, drafts.device.watch = steps, backend.info.vocab_size, drawing.watch
    drafts.device.source = drawing.drawn
