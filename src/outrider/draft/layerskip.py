"""Layer skip: the target's own first layers draft for it. No second model, no second cache, nothing to read first.

Keys and values of the first layers are the target's own, so a proposal starts where the target's cache ends; what it
writes there the target writes over in its next pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.backends.base import Backend, Spans
from outrider.draft.base import Drafter, DrafterInfo
from outrider.draft.growth import Sprout, grow
from outrider.draft.rolling import roll
from outrider.types import Array, Drafts, Job, Slot


class LayerSkipDrafter(Drafter):
    """`view` is the target's first layers (`Backend.view`), under the target's slots."""

    info = DrafterInfo(name="layerskip")

    def __init__(self, view: Backend) -> None:
        self.view = view

    @property
    def profile_name(self) -> str:
        return self.view.info.name

    def lag(self, job: Job) -> int:
        return max(0, len(job.tokens) - job.cached - 1)  # what the target has not read, it reads for both

    def propose(self, jobs: Sequence[Job], widths: Sequence[int], trees: Sequence[bool]) -> Drafts:
        drafts = Drafts(counts=[], tokens=None)
        rooms = [0 if self.lag(job) else width for job, width in zip(jobs, widths, strict=True)]
        branching = [tree and self.view.info.trees for tree in trees]
        try:
            if any(branching) or not hasattr(self.view, "roll") or not self._roll(jobs, rooms, drafts):
                grow(self.view.ops, jobs, rooms, branching, self._read, drafts)
        finally:
            for job in jobs:
                self.forget(job)
        return drafts

    def _roll(self, jobs: Sequence[Job], rooms: Sequence[int], drafts: Drafts) -> bool:
        """The same for chains, by layers that go on by themselves."""
        active = [job for job, room in zip(jobs, rooms, strict=True) if room]
        slots = [_slot(job) for job in active]
        once, tokens = [1] * len(active), self.view.ops.fed([job.tokens[-1] for job in active])
        starts = [self.view.length(slot) for slot in slots]
        return roll(self.view, jobs, rooms, Spans(slots, starts, once, once, tokens), drafts)

    def forget(self, job: Job) -> None:
        if job.slot is not None:
            self.view.close(job.slot)

    def _read(self, sprouts: Sequence[Sprout]) -> Array:
        """One row per tip. [tips, V]"""
        slots = [_slot(sprout.job) for sprout in sprouts]
        starts, fed, parents = [], [], {}
        for index, (sprout, slot) in enumerate(zip(sprouts, slots, strict=True)):
            starts.append(self.view.length(slot))
            if sprout.tips == [-1]:
                fed.append(sprout.job.tokens[sprout.job.cached :])
                continue
            fed.append(sprout.feed())
            if sprout.is_tree:
                parents[index] = sprout.fed_parents
        tokens = self.view.ops.fed([token for tokens in fed for token in tokens])
        counts = [len(tokens) for tokens in fed]
        rows = [len(sprout.tips) for sprout in sprouts]
        scores = self.view.score(Spans(slots, starts, counts, rows, tokens, parents))
        return scores.logits[:, : self.view.info.vocab_size]


def _slot(job: Job) -> Slot:
    assert job.slot is not None, f"job {job.id} drafts without a slot"
    return job.slot
