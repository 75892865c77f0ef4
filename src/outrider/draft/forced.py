"""Drafting what a constraint leaves no choice about: the quotes, keys and brackets of JSON. Judged like any draft."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.draft.base import DrafterInfo
from outrider.draft.lookup import NoDrafter, certain
from outrider.types import FORCED, Drafts, Job


class ForcedDrafter(NoDrafter):
    """Proposes the tokens that must come next, for requests with a constraint."""

    info = DrafterInfo(name=FORCED, lookup=True)

    def propose(self, jobs: Sequence[Job], widths: Sequence[int], trees: Sequence[bool]) -> Drafts:
        return certain(
            [
                job.grammar.forced()[:width] if width and job.grammar is not None else ()
                for job, width in zip(jobs, widths, strict=True)
            ]
        )
