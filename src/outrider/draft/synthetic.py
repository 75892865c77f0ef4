"""For measuring: a draft that is right as often as it is told, at the price of a real one.

The target counts (`random:SHAPE:counting`), so what it will say is known. The draft's model runs as it would for real
work; then its tokens are replaced by the right ones, some of them spoiled. Whether a place is spoiled depends on the
request and the place alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.backends.base import Backend
from outrider.draft.model import ModelDrafter
from outrider.sampling.ops import Drawing, Drawn, SamplingOps
from outrider.types import Array, Job, Watch

PLACES = 4096  # after so many, what is spoiled comes again


class SyntheticDrafter(ModelDrafter):
    """`share` of its tokens are what a greedy target says, each by itself."""

    method = "synthetic"

    def __init__(self, backend: Backend, share: float, *, chunk: int = 512, shares_slots: bool = False) -> None:
        super().__init__(backend, chunk=chunk, shares_slots=shares_slots)
        self._spoiling = Spoiling(backend.ops, share, backend.info.vocab_size)
        backend.ops = self._spoiling  # type: ignore[assignment]

    def be_right(self, share: float) -> None:
        """As often as this from now on."""
        self._spoiling.spoil(share)


class Spoiling:
    """The sampling of a draft whose tokens are replaced."""

    def __init__(self, ops: SamplingOps, share: float, vocab_size: int) -> None:
        self._ops, self._size = ops, vocab_size
        self.spoil(share)

    def spoil(self, share: float) -> None:
        chances = np.random.default_rng(0).random(PLACES)
        self._wrong = self._ops.xp.asarray((chances >= share).astype(np.int64), device=self._ops.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def draft(self, jobs: Sequence[Job], drafted: Sequence[Sequence[int]], logits: Array) -> Drawn:
        drawn = self._ops.draft(jobs, drafted, logits)
        before = [[*job.tokens[-1:], *line][-1] for job, line in zip(jobs, drafted, strict=True)]
        ends = [len(job.tokens) + len(line) for job, line in zip(jobs, drafted, strict=True)]
        # certain, whatever rows were drawn from: so a sampled request keeps its law
        return drawn._replace(tokens=self._said(jobs, before, ends, 1)[:, 0], probs=None)

    def drawing(self, jobs: Sequence[Job], steps: int, further: Array | None = None) -> Drawing | None:
        inner = self._ops.drawing(jobs, steps, further)
        if inner is None:
            return None
        lasts, ends = [job.tokens[-1] for job in jobs], [len(job.tokens) for job in jobs]
        return SpoiledDrawing(inner, self._said(jobs, lasts, ends, steps, further), self._ops)

    def _said(
        self, jobs: Sequence[Job], lasts: Sequence[int], ends: Sequence[int], steps: int, further: Array | None = None
    ) -> Array:
        """What follows so many tokens, of which these are the last. [B, steps]"""
        xp, ops = self._ops.xp, self._ops
        places = xp.arange(steps, device=ops.device) + (0 if further is None else further[:, None])
        right = ops.integers(lasts)[:, None] + places + 1
        keys = ops.integers([end + 997 * job.id for end, job in zip(ends, jobs, strict=True)])
        said = (right + self._wrong[(keys[:, None] + places) % PLACES]) % self._size
        return xp.astype(said, xp.int32)


class SpoiledDrawing:
    """Draws for the price of it, and gives what it was told."""

    def __init__(self, inner: Drawing, said: Array, ops: SamplingOps) -> None:
        self._inner, self._said, self._ops, self._step = inner, said, ops, 0

    @property
    def watch(self) -> Watch | None:
        return self._inner.watch

    @property
    def drawn(self) -> Array:
        return self._said

    def step(self, logits: Array) -> Array:
        self._inner.step(logits)
        self._step += 1
        return self._said[:, self._step - 1]

    def result(self, counts: Sequence[int]) -> tuple[Array, Array | None]:
        steps, whole = self._said.shape[1], self._said.reshape(-1)
        if any(count != steps for count in counts):
            kept = [job * steps + step for job, count in enumerate(counts) for step in range(count)]
            whole = whole[self._ops.integers(kept)]  # a list would wait for all that the device has to do
        return whole, None
