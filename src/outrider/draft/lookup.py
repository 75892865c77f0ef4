"""Drafters without a model: their proposals are certain (one-hot), so the target alone decides what is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from outrider.draft.base import Drafter, DrafterInfo
from outrider.types import Drafts, Job

Script = Callable[[Sequence[int], int], Sequence[int]]  # (tokens so far, width) -> at most width tokens


def certain(proposals: Sequence[Sequence[int]]) -> Drafts:
    """One-hot drafts from one list of tokens per job."""
    tokens = np.asarray([token for proposal in proposals for token in proposal], dtype=np.int64)
    return Drafts([len(proposal) for proposal in proposals], tokens)


class NoDrafter(Drafter):
    """Never has anything to propose."""

    info = DrafterInfo(name="none")

    def propose(self, jobs: Sequence[Job], widths: Sequence[int], trees: Sequence[bool]) -> Drafts:
        return certain([()] * len(jobs))


class ScriptedDrafter(NoDrafter):
    """Proposes what a function of the tokens so far says."""

    info = DrafterInfo(name="scripted")

    def __init__(self, script: Script) -> None:
        self._script = script

    def propose(self, jobs: Sequence[Job], widths: Sequence[int], trees: Sequence[bool]) -> Drafts:
        return certain(
            [self._script(job.tokens, width)[:width] if width else () for job, width in zip(jobs, widths, strict=True)]
        )
