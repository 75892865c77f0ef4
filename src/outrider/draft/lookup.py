"""Drafters without a model: their proposals are certain (one-hot), so the target alone decides what is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from outrider.config import NgramConfig
from outrider.types import Drafts, Job, Plan, Scores, Verdicts

Script = Callable[[Sequence[int], int], Sequence[int]]  # (tokens so far, width) -> at most width tokens


def certain(proposals: Sequence[Sequence[int]]) -> Drafts:
    """One-hot drafts from one list of tokens per job."""
    tokens = np.asarray([token for proposal in proposals for token in proposal], dtype=np.int64)
    return Drafts([len(proposal) for proposal in proposals], tokens)


class NoDrafter:
    """Plain decoding: never has anything to say."""

    name = "none"

    def lag(self, job: Job) -> int:
        return 0

    def propose(self, jobs: Sequence[Job], widths: Sequence[int]) -> Drafts:
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

    def propose(self, jobs: Sequence[Job], widths: Sequence[int]) -> Drafts:
        return certain(
            [self._script(job.tokens, width)[:width] if width else () for job, width in zip(jobs, widths, strict=True)]
        )


class NgramDrafter(NoDrafter):
    """Prompt lookup: where did the last n tokens occur before, and what followed? The longest n first, then the latest.

    The index of a job maps an n-gram to the position after its latest occurrence, and grows by the new tokens only.
    """

    name = "ngram"

    def __init__(self, config: NgramConfig | None = None) -> None:
        self.config = config or NgramConfig()
        self._indices: dict[int, dict[tuple[int, ...], int]] = {}
        self._indexed: dict[int, int] = {}

    def propose(self, jobs: Sequence[Job], widths: Sequence[int]) -> Drafts:
        return certain([self._lookup(job, width) for job, width in zip(jobs, widths, strict=True)])

    def forget(self, job: Job) -> None:
        self._indices.pop(job.id, None)
        self._indexed.pop(job.id, None)

    def _lookup(self, job: Job, width: int) -> list[int]:
        if width == 0:
            return []
        tokens, index = job.tokens, self._refresh(job)
        for n in range(min(self.config.max_n, len(tokens) - 1), self.config.min_n - 1, -1):
            after = index.get(tuple(tokens[-n:]))
            if after is not None:
                drafts: list[int] = []
                for at in range(after, after + width):  # past the end it goes on with its own drafts: a loop repeats
                    drafts.append(tokens[at] if at < len(tokens) else drafts[at - len(tokens)])
                return drafts
        return []

    def _refresh(self, job: Job) -> dict[tuple[int, ...], int]:
        """Index the n-grams that end before the last token: those have a continuation."""
        index = self._indices.setdefault(job.id, {})
        tokens = job.tokens
        for end in range(max(1, self._indexed.get(job.id, 1)), len(tokens)):
            for n in range(self.config.min_n, min(self.config.max_n, end) + 1):
                index[tuple(tokens[end - n : end])] = end
        self._indexed[job.id] = len(tokens)
        return index
