"""What a head drafts behind a verdict that only the device knows: one graph, from the hidden states of the pass that
was judged to the last token drawn. Where sequences lie the host writes down now and then; from one round to the next it
says how far they have come since, and the device moves its notes on. A verdict that the host knows already is a case of
that: its hidden states may be fused.

    judged    t  d1 d2 d3      the target's rows, hidden states h0 .. h3; d1 stays, then comes f
    read      (h0,d1) (h1,f) (h2,f) (h3,f)    all of them: what lies behind the last true one is written over
    step      (o1,g1)          behind the second, which only the device knows: `advance` moves it there
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from outrider.backends.cuda import novelty
from outrider.backends.cuda.choosing import choose
from outrider.backends.cuda.graphs import RECORDED
from outrider.backends.cuda.head_program import HeadProgram
from outrider.backends.cuda.layout import Rows
from outrider.backends.eagle_head import EagleHead
from outrider.backends.torch_common import sent
from outrider.kv.pages import Page
from outrider.types import Slot

MOST_RECORDED = 8  # jobs: larger batches come in more shapes, and their passes take longer than launching does


class ChainShape(NamedTuple):
    """Chains of `judged` drafts each were judged, and `steps` tokens are drawn for each."""

    jobs: int
    judged: int
    steps: int
    is_fused: bool = False  # the hidden states it is given are what entries take


class _Places(NamedTuple):
    """Where the sequences lie that it stands in, as they were written down, and where it began to read last."""

    slots: list[Slot]
    firsts: list[int]
    pages: list[list[Page]]
    starts: list[int]


class HeadChain:
    """For rounds of one shape; `run` may be called again and again."""

    def __init__(self, head: EagleHead, read: HeadProgram, step: HeadProgram, shape: ChainShape) -> None:
        self.read, self.step, self.shape, self._head = read, step, shape, head
        jobs, rows = shape.jobs, shape.jobs * (shape.judged + 1)
        like, device = read.given, read.given.device

        def integers(*sizes: int) -> torch.Tensor:
            return torch.zeros(sizes, dtype=torch.int32, device=device)

        states = [like.shape[1]] if shape.is_fused else [head.spec.target_width] * len(head.hidden)
        self._states = [like.new_empty(rows, width) for width in states]
        self.fused = like.new_empty(rows, like.shape[1])  # of the rows that were read last
        self._accepted, self._following = integers(jobs), integers(jobs)
        self._drafted = integers(jobs, shape.judged + 1)  # the last column is nobody's
        self._asked, self._drawn = integers(shape.steps, jobs, 3), integers(jobs, shape.steps)
        self._settings = torch.zeros(jobs, 2, device=device)
        self._ones = torch.ones(jobs, dtype=torch.int32, device=device)
        self._numbers = torch.arange(shape.judged + 1, device=device)
        self._firsts = torch.arange(0, rows, shape.judged + 1, device=device)
        self._moved, self._back = integers(jobs), integers(jobs)  # since the last run; of the steps in it
        self._known: tuple[torch.Tensor, torch.Tensor] | None = None  # what was asked last
        self._places = _Places([], [], [], [])
        self._runs = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def goes_on(
        self, slots: Sequence[Slot], firsts: Sequence[int], pages: Sequence[Sequence[Page]], ends: Sequence[int]
    ) -> bool:
        """Whether it stands in these sequences already, on these pages, up to `ends`."""
        places, size = self._places, self.read.model.constants.page_size
        if places.slots != slots or places.firsts != firsts:
            return False
        used = [-(-end // size) for end in ends]
        return all(
            len(noted) >= count and noted[:count] == now[:count]
            for noted, now, count in zip(places.pages, pages, used, strict=True)
        )

    def begin(
        self, slots: Sequence[Slot], firsts: Sequence[int], pages: Sequence[Sequence[Page]], read: Rows, step: Rows
    ) -> None:
        """It stands elsewhere from here on."""
        self.read.stage(read)
        self.step.stage(step)
        self._places = _Places(list(slots), list(firsts), [list(ids) for ids in pages], [])

    def run(
        self,
        starts: Sequence[int],
        states: Sequence[torch.Tensor],
        drafted: torch.Tensor,
        accepted: torch.Tensor,
        following: torch.Tensor,
        asked: tuple[torch.Tensor, torch.Tensor],
        *,
        graphs: bool,
    ) -> torch.Tensor:
        """What was drawn. [jobs, steps]; starts: of the first entries, all where it stands or a little further. asked:
        as `choose` takes it, for each step, and settings."""
        before, self._places = self._places.starts, self._places._replace(starts=list(starts))
        if before:
            moved = [now - then for now, then in zip(starts, before, strict=True)]
            self._moved.copy_(sent(moved, np.int32, self._moved.device))
        else:
            for program in (self.read, self.step):
                program.upload()
            self._moved.zero_()
            self._back.zero_()
        there = [*self._states, self._accepted, self._following, self._drafted[:, :-1]]
        here = [*states, accepted, following, drafted.view(self.shape.jobs, self.shape.judged)]
        if self._known is None or self._known[0] is not asked[0] or self._known[1] is not asked[1]:
            there, here, self._known = [*there, self._asked, self._settings], [*here, *asked], asked
        torch._foreach_copy_(there, here)
        self.read.work.holder = self.read
        try:
            self._go(graphs=graphs and self.shape.jobs <= MOST_RECORDED)
        except BaseException:
            self._places = _Places([], [], [], [])  # nobody knows how far it came
            raise
        return self._drawn.clone()

    def _go(self, *, graphs: bool) -> None:
        self._runs += 1
        if self._graph is not None:
            self._graph.replay()
            return
        self._compute()
        if graphs and self._runs >= RECORDED:
            assert self.read.model.graphs is not None, "this model has no graphs"
            self._graph = self.read.model.graphs.record(self._compute)
        elif graphs:
            novelty.note()  # it will not go on like this

    def _compute(self) -> None:
        head, read, step, shape = self._head, self.read, self.step, self.shape
        is_kept = self._numbers < self._accepted[:, None]
        tokens = torch.where(is_kept, self._drafted, self._following[:, None]).clamp(min=0)
        read.move(tokens.flatten(), self._moved)
        self.fused.copy_(self._states[0] if shape.is_fused else head.fuse(self._states))
        read.given[: len(self.fused)].copy_(self.fused)
        lasts = self._firsts + self._accepted
        read.compute(lasts)
        token = self._draw(0, read)
        step.given[: shape.jobs].copy_(read.given.index_select(0, lasts))
        by = self._moved + self._accepted - self._back
        for number in range(1, shape.steps):
            step.move(token, by)
            step.compute()
            token, by = self._draw(number, step), self._ones
        torch.add(self._accepted, shape.steps - 2, out=self._back)  # so far it is from where it began

    def _draw(self, number: int, program: HeadProgram) -> torch.Tensor:
        tokens = choose(program.rows[: self.shape.jobs], self._asked[number], self._settings).tokens
        program.rows = program.given  # there are many shapes, and logits take more memory than all else of one
        self._drawn[:, number] = tokens
        return tokens.clamp(min=0)  # -1: a row that cannot be used; the host will see
