"""Drafters without a model: their proposals are certain (one-hot), so the target alone decides what is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from outrider.types import Drafts, Job, Plan, Scores, Verdicts

Script = Callable[[Sequence[int], int], Sequence[int]]  # (tokens so far, width) -> at most width tokens


def certain(proposals: Sequence[Sequence[int]]) -> Drafts:
    """One-hot drafts from one list of tokens per job."""
    tokens = np.asarray([token for proposal in proposals for token in proposal], dtype=np.int64)
    return Drafts([len(proposal) for proposal in proposals], tokens)


class NoDrafter:
    """Plain decoding: never has anything to say."""

    name = "none"
    hidden = ()

    def lag(self, job: Job) -> int:
        return 0

    def propose(self, jobs: Sequence[Job], widths: Sequence[int], trees: Sequence[bool]) -> Drafts:
        return certain([()] * len(jobs))

    def observe(self, plan: Plan, scores: Scores, verdicts: Verdicts) -> int:
        return 0

    def forget(self, job: Job) -> None:
        pass


class ScriptedDrafter(NoDrafter):
    """Proposes what a function of the tokens so far says."""

    name = "scripted"

    def __init__(self, script: Script) -> None:
        self._script = script

    def propose(self, jobs: Sequence[Job], widths: Sequence[int], trees: Sequence[bool]) -> Drafts:
        return certain(
            [self._script(job.tokens, width)[:width] if width else () for job, width in zip(jobs, widths, strict=True)]
        )
