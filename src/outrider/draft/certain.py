"""What drafters that look up text share: they read along in portions, and their proposals are certain (one-hot).

A round must not wait until a long prompt is indexed: what is new of a job is read soon after, and what is missing all
the same (a beginning that the target remembered, say) is read a portion a round. Until then a lookup finds less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from outrider.draft.base import Drafter
from outrider.types import Batch, Drafts, Job, Scores, Verdicts

PORTION = 1024  # tokens read in one go, of all jobs together
SHARE = 64  # tokens every job may read however many there are: more than a round emits
LATER = 16  # tokens that wait to be read together, where nobody asks: a pass leaves nothing of this in the CPU's cache


class Proposal(NamedTuple):
    """Tokens and, where they branch, the index of the token each follows (-1: the job's last).

    matched: how many tokens before them match the place where they were found.
    borrowed: some of them come from the text of another request.
    """

    tokens: Sequence[int]
    parents: list[int] | None = None
    matched: int = 0
    borrowed: bool = False


NOTHING = Proposal(())


class Lookup(Protocol):
    """What there is to find for one job."""

    def missing(self, tokens: list[int]) -> int:
        """How many of the job's tokens it has not read. Notices tokens that were taken back."""

    def read(self, tokens: list[int], stop: int) -> None:
        """Read on up to `stop`."""

    def propose(self, tokens: list[int], width: int, branching: bool) -> Proposal:
        """What may follow the job's tokens."""

    def close(self) -> None:
        """The job is over."""


class LookupDrafter(Drafter):
    """Proposes what the lookup of each job finds. A subclass says what a lookup is (`open`), and for whom it reads."""

    def __init__(self) -> None:
        self.lookups: dict[int, Lookup] = {}

    def open(self, job: Job) -> Lookup:
        raise NotImplementedError

    def reads(self, job: Job) -> bool:
        """Whether it reads along with a job that it may never be asked about."""
        return self.name in job.drafters

    def propose(self, jobs: Sequence[Job], widths: Sequence[int], trees: Sequence[bool]) -> Drafts:
        self._read([job for job, width in zip(jobs, widths, strict=True) if width], least=1)
        counts: list[int] = []
        tokens: list[int] = []
        matched: list[int] = []
        parents: dict[int, list[int]] = {}
        borrowed: set[int] = set()
        for job, width, branching in zip(jobs, widths, trees, strict=True):
            if width == 0:
                counts.append(0)
                matched.append(0)
                continue
            proposal = self.lookups[job.id].propose(job.tokens, width, branching)
            if proposal.parents is not None:
                parents[len(counts)] = proposal.parents
            if proposal.borrowed:
                borrowed.add(len(counts))
            counts.append(len(proposal.tokens))
            matched.append(proposal.matched)
            tokens += proposal.tokens
        return Drafts(counts, np.asarray(tokens, dtype=np.int64), parents=parents, matched=matched, borrowed=borrowed)

    def observe(self, batch: Batch, scores: Scores, verdicts: Verdicts) -> int:
        self._read([job for job in batch.jobs if self.reads(job)], least=LATER)
        return 0

    def forget(self, job: Job) -> None:
        lookup = self.lookups.pop(job.id, None)
        if lookup is not None:
            if 0 < lookup.missing(job.tokens) < LATER:  # more, where it ended before it was read
                lookup.read(job.tokens, len(job.tokens))
            lookup.close()

    def pause(self, job: Job) -> None:
        """What was read of a job stays true, and costs no cache."""

    def _read(self, jobs: Sequence[Job], *, least: int) -> None:
        """What is missing of these, where that is so many tokens at least."""
        left = PORTION
        for job in jobs:
            lookup = self.lookups.get(job.id)
            if lookup is None:
                lookup = self.lookups[job.id] = self.open(job)
            missing = lookup.missing(job.tokens)
            if missing >= least:
                count = min(missing, max(left, SHARE))
                left -= count
                lookup.read(job.tokens, len(job.tokens) - missing + count)
