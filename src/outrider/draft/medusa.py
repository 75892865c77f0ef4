"""Drafting with Medusa heads: from the hidden state that gave a job's last token, one row for each token after it.

    tokens    ... t5  t6          t6 was drawn from the target's row after t5
    hidden        h5              from which the heads guess t7, t8, ...

Heads know nothing of one another's tokens, so a proposal costs one pass however long it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

from outrider.backends.base import Backend, HeadHost
from outrider.backends.medusa_head import MedusaHead
from outrider.backends.torch_common import array_of
from outrider.draft.base import Drafter, DrafterInfo
from outrider.draft.growth import Sprout
from outrider.draft.kept_rows import kept_rows
from outrider.draft.ranked import grow_heads
from outrider.errors import ConfigError
from outrider.models.head_spec import MedusaSpec
from outrider.models.heads import open_head
from outrider.types import Array, Batch, Drafts, Job, Scores, Verdicts


class MedusaDrafter(Drafter):
    """Trees are cartesian: at each depth the same few tokens, and the nodes with the largest products stay."""

    def __init__(self, head: MedusaHead) -> None:
        self.head = head
        self.info = DrafterInfo(name="medusa", hidden_layers=head.hidden)
        self.states: dict[int, tuple[int, torch.Tensor]] = {}  # job -> its length, and the hidden state to guess from
        self._rows: dict[int, torch.Tensor] = {}  # of the proposals under way, [depth, V] each

    @classmethod
    def load(cls, path: Path | str, target: Backend) -> MedusaDrafter:
        assert target.info.heads, f"heads cannot sit on {target.info.name}"
        file = open_head(path)
        if not isinstance(file.spec, MedusaSpec):
            raise ConfigError(f"{path} is an EAGLE head; write eagle:{path}", param="draft")
        return cls(MedusaHead(file, cast(HeadHost, target)))

    def lag(self, job: Job) -> int:
        """Until the target has read the prompt there is nothing to guess from."""
        return 0 if self._is_ready(job) else max(1, len(job.tokens) - 1 - job.cached)

    def propose(self, jobs: Sequence[Job], widths: Sequence[int], trees: Sequence[bool]) -> Drafts:
        drafts = Drafts(counts=[], tokens=None)
        most = self.head.num_heads
        rooms = [width if self._is_ready(job) else 0 for job, width in zip(jobs, widths, strict=True)]
        rooms = [room if tree else min(room, most) for room, tree in zip(rooms, trees, strict=True)]
        depth = min(most, max(rooms, default=0))
        if depth:
            asking = [job for job, room in zip(jobs, rooms, strict=True) if room]
            rows = self.head.rows(torch.stack([self.states[job.id][1] for job in asking]), depth)
            self._rows = {job.id: row for job, row in zip(asking, rows, strict=True)}
        drafts = grow_heads(self.head.target.ops, jobs, rooms, rooms, trees, self._read, drafts, depth=depth)
        self._rows = {}
        drafts.steps = int(depth > 0)
        return drafts

    def observe(self, batch: Batch, scores: Scores, verdicts: Verdicts) -> int:
        for kept in kept_rows(batch, scores, verdicts):
            job = kept.job
            if self.name in job.drafters and kept.decided:
                state = torch.as_tensor(scores.hidden[self.info.hidden_layers[0]][kept.rows[-1]])
                self.states[job.id] = (len(job.tokens), state.clone())
        return 0

    def forget(self, job: Job) -> None:
        self.states.pop(job.id, None)

    def _is_ready(self, job: Job) -> bool:
        return self.states.get(job.id, (0, None))[0] == len(job.tokens)

    def _read(self, sprouts: Sequence[Sprout]) -> Array:
        """The row of the next depth, once per tip. [tips, V]"""
        rows = [self._rows[sprout.job.id][sprout.depth] for sprout in sprouts for _ in sprout.tips]
        return array_of(torch.stack(rows))
