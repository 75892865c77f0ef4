"""Sampling where the model computes: the device chooses, the host is told one number per row.

Rounds of greedy and `coupled` requests, and plain rounds under any rule, are judged by the target's own token in every
row. Three kernels choose those, one small copy brings them to the host, and what follows from them is integers.
Controls that need more (top-k, top-p, penalties, constraints, ...) and rejection of drafts are the reference's, on the
device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch

from outrider.backends.cuda.choosing import choose
from outrider.backends.torch_common import on
from outrider.sampling.accept import match
from outrider.sampling.noise import Stream
from outrider.sampling.ops import SamplingOps, remember
from outrider.sampling.tree import match_tree, path_to
from outrider.types import Array, Drafts, Job, Scores, Verdicts


class DeviceSampling(SamplingOps):
    """`SamplingOps` for torch on a GPU."""

    def __init__(self, device: torch.device) -> None:
        import array_api_compat.torch as xp

        super().__init__(xp, device)
        self._nothing = super().integers([])
        self._host = SamplingOps(np)  # layouts of rounds that are decided there
        self.foresee: Callable[[torch.Tensor], None] | None = None  # told what plain rows chose, before the host knows
        self.known: tuple[torch.Tensor, Array] | None = None  # what rows chose last: there, and on the host
        self._arrived = torch.empty(1024, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._has_arrived: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._settings: dict[Hashable, tuple[torch.Tensor, Array]] = {}

    def integers(self, values: Sequence[int]) -> Array:
        return self._nothing if len(values) == 0 else super().integers(values)  # most rounds ask for nothing: no copy

    def fed(self, tokens: Sequence[int]) -> Array:
        """On the host: they travel with everything else a pass is told."""
        return np.asarray(tokens, dtype=np.int64)

    def adopt(self, drafts: Drafts) -> Drafts:
        drafts._proposals = drafts.proposals()  # looked at by the host several times in a round, copied once
        return super().adopt(drafts)

    def judge(self, jobs: Sequence[Job], drafts: Drafts, scores: Scores) -> Verdicts:
        with on(self.device):
            return self._judged(jobs, drafts, scores)

    def _judged(self, jobs: Sequence[Job], drafts: Drafts, scores: Scores) -> Verdicts:
        if not jobs or not self._can_choose(jobs, drafts, scores):
            return super().judge(jobs, drafts, scores)
        proposals = drafts.proposals()
        tokens = np.asarray([token for proposal in proposals for token in proposal], dtype=np.int64)
        if drafts.parents:
            parents = [drafts.parents.get(index, range(-1, len(p) - 1)) for index, p in enumerate(proposals)]
            tree = self._host.tree_layout([list(line) for line in parents])
            chosen = self._choose_rows(jobs, scores, tree.owner, tree.depth)
        else:
            layout = self._host.layout(drafts.counts, scores.counts)
            chosen = self._choose_rows(jobs, scores, layout.owner, layout.depth)
        if (chosen < 0).any():  # a row without a usable number: the reference says whose and why
            return super().judge(jobs, drafts, scores)
        if not drafts.parents:
            accepted, following = match(np, chosen, tokens, layout)
            return Verdicts(accepted, following)
        ruling = match_tree(np, chosen, tokens, tree)
        ends, roots = ruling.rows.tolist(), tree.first.tolist()
        paths = [path_to(tree, end, root) for end, root in zip(ends, roots, strict=True)]
        kept = {index: path for index, path in enumerate(paths) if index in drafts.parents}
        return Verdicts(np.asarray([len(path) for path in paths]), ruling.next, {}, kept)

    def _can_choose(self, jobs: Sequence[Job], drafts: Drafts, scores: Scores) -> bool:
        if scores.counts != [count + 1 for count in drafts.counts]:
            return False
        controls = self._controls_of(jobs, scores.counts)
        if controls.changes_logits or controls.ranked is not None or controls.typical is not None:
            return False
        if not any(drafts.counts):
            return True
        return all(job.rule == "coupled" or job.params.temperature == 0.0 for job in jobs)

    def _choose_rows(self, jobs: Sequence[Job], scores: Scores, owner: Array, depth: Array) -> Array:
        """The target's own token in every row, on the host. [R]"""
        key = (tuple([job.id for job in jobs]), tuple(scores.counts))
        settings, words = remember(self._settings, key, lambda: self._settings_of(jobs, owner))
        positions = np.asarray([len(job.tokens) for job in jobs], dtype=np.int32)[owner] + depth
        asked = np.column_stack([words, 4 * positions + int(Stream.TARGET)]).astype(np.int32)
        chosen = choose(
            torch.as_tensor(scores.logits), torch.from_numpy(asked).to(self.device, non_blocking=True), settings
        )
        if len(chosen) > len(self._arrived):
            self._arrived = torch.empty(2 * len(chosen), dtype=torch.int32, pin_memory=chosen.is_cuda)
        arrived = self._arrived[: len(chosen)]
        arrived.copy_(chosen, non_blocking=True)
        if self._has_arrived is not None:
            self._has_arrived.record()
        if self.foresee is not None and len(chosen) == len(jobs):
            self.foresee(chosen)
        if self._has_arrived is not None:
            self._has_arrived.synchronize()
        known = arrived.numpy().astype(np.int64)
        self.known = chosen, known
        return known

    def _settings_of(self, jobs: Sequence[Job], owner: Array) -> tuple[torch.Tensor, Array]:
        """What does not change while the batch is the same: settings on the device, words of seeds on the host."""
        rows = []
        for job in jobs:
            temperature, min_p = job.params.temperature, job.params.min_p
            cold = temperature == 0.0
            # a denormal would become 0 in float32, and 0 / 0 is no number
            rows.append((0.0 if cold else max(temperature, 1e-30), math.log(min_p) if min_p > 0.0 else -math.inf))
        settings = np.asarray(rows, dtype=np.float32)[owner]
        words = np.asarray([job.words for job in jobs], dtype=np.int32)[owner]
        return torch.from_numpy(settings).to(self.device), words
