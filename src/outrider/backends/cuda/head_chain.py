"""What a head drafts behind a verdict that only the device knows: one graph, from the hidden states of the pass that
was judged to the last token drawn. The host writes down where sequences lie, and that is all it does.

    judged    t  d1 d2 d3      the target's rows, hidden states h0 .. h3; d1 stays, then comes f
    read      (h0,d1) (h1,f) (h2,f) (h3,f)    all of them: what lies behind the last true one is written over
    step      (o1,g1)          behind the second, which only the device knows: `advance` moves it there
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from outrider.backends.cuda.choosing import choose
from outrider.backends.cuda.head_program import HeadProgram
from outrider.backends.cuda.program import recorded
from outrider.backends.eagle_head import EagleHead


class ChainShape(NamedTuple):
    """Chains of `judged` drafts each were judged, and `steps` tokens are drawn for each."""

    jobs: int
    judged: int
    steps: int


class HeadChain:
    """For rounds of one shape; `run` may be called again and again."""

    def __init__(self, head: EagleHead, read: HeadProgram, step: HeadProgram, shape: ChainShape) -> None:
        self.read, self.step, self.shape, self._head = read, step, shape, head
        jobs, rows = shape.jobs, shape.jobs * (shape.judged + 1)
        like, device = read.given, read.given.device

        def integers(*sizes: int) -> torch.Tensor:
            return torch.zeros(sizes, dtype=torch.int32, device=device)

        self._states = [like.new_empty(rows, head.spec.target_width) for _ in head.hidden]
        self.fused = like.new_empty(rows, like.shape[1])  # of the rows that were read last
        self._accepted, self._following = integers(jobs), integers(jobs)
        self._drafted = integers(jobs, shape.judged + 1)  # the last column is nobody's
        self._asked, self._drawn = integers(shape.steps, jobs, 3), integers(jobs, shape.steps)
        self._settings = torch.zeros(jobs, 2, device=device)
        self._ones = torch.ones(jobs, dtype=torch.int32, device=device)
        self._numbers = torch.arange(shape.judged + 1, device=device)
        self._firsts = torch.arange(0, rows, shape.judged + 1, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(
        self,
        states: Sequence[torch.Tensor],
        drafted: torch.Tensor,
        accepted: torch.Tensor,
        following: torch.Tensor,
        asked: tuple[torch.Tensor, torch.Tensor],
        *,
        graphs: bool,
    ) -> torch.Tensor:
        """What was drawn. [jobs, steps]; asked: as `choose` takes it, for each step, and settings."""
        drafts = drafted.view(self.shape.jobs, self.shape.judged)
        torch._foreach_copy_(
            [*self._states, self._accepted, self._following, self._drafted[:, :-1], self._asked, self._settings],
            [*states, accepted, following, drafts, *asked],
        )
        for program in (self.read, self.step):
            program.upload()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._compute()
            if graphs:
                self._graph = recorded(self.read.model, self._compute)
        return self._drawn.clone()

    def _compute(self) -> None:
        head, read, step, shape = self._head, self.read, self.step, self.shape
        is_kept = self._numbers < self._accepted[:, None]
        tokens = torch.where(is_kept, self._drafted, self._following[:, None]).clamp(min=0)
        read.layout["tokens"][: tokens.numel()].copy_(tokens.flatten())
        self.fused.copy_(head.fuse(self._states))
        read.given[: len(self.fused)].copy_(self.fused)
        read.compute()
        lasts = self._firsts + self._accepted
        token = self._draw(0, read.rows.index_select(0, lasts))
        step.given[: shape.jobs].copy_(read.given.index_select(0, lasts))
        by = self._accepted
        for number in range(1, shape.steps):
            step.move(token, by)
            step.compute()
            token, by = self._draw(number, step.rows[: shape.jobs]), self._ones

    def _draw(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        tokens = choose(rows, self._asked[number], self._settings).tokens
        self._drawn[:, number] = tokens
        return tokens.clamp(min=0)  # -1: a row that cannot be used; the host will see
