"""Verdicts over chains as a graph: to launch the kernels of `judging` one by one takes the host longer than the device
needs for them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from outrider.backends.cuda.graphs import RECORDED, Graphs
from outrider.backends.cuda.judging import rule


class Kind(NamedTuple):
    """Verdicts that one graph is for."""

    rows: int
    columns: int
    drafted: int
    jobs: int


class JudgedChains:
    """For chains that only the device knows, and that nobody judges by rejection. `run` may be called again and again;
    what it returned last is overwritten."""

    def __init__(self, kind: Kind, about: tuple[torch.Tensor, torch.Tensor], graphs: Graphs | None) -> None:
        """about: rows and jobs as `judging` takes them. graphs: None where there are none."""
        rows, jobs = about
        self._graphs, self._runs = graphs, 0
        self._logits = torch.empty(kind.rows, kind.columns, device=rows.device)
        self._tokens = torch.empty(kind.drafted, dtype=torch.int32, device=rows.device)
        self._settings = torch.empty(kind.rows, 2, device=rows.device)
        self._rows, self._jobs = torch.empty_like(rows), torch.empty_like(jobs)
        self._known: tuple[torch.Tensor, ...] = ()  # what was copied last of that which seldom changes
        self._numbers = torch.empty(0, dtype=torch.int32)
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        jobs: torch.Tensor,
        settings: torch.Tensor,
    ) -> torch.Tensor:
        """What `judging.rule` says of each job, and then the tokens that were judged. [B * 5 + N] int32"""
        there, here, seldom = [self._logits, self._tokens], [logits, tokens], (rows, jobs, settings)
        if len(self._known) != 3 or any(new is not old for new, old in zip(seldom, self._known, strict=True)):
            there, here, self._known = [*there, self._rows, self._jobs, self._settings], [*here, *seldom], seldom
        torch._foreach_copy_(there, here)
        self._runs += 1
        if self._graph is not None:
            self._graph.replay()
            return self._numbers
        self._compute()
        numbers = self._numbers
        if self._graphs is not None and self._runs >= RECORDED:
            self._graph = self._graphs.record(self._compute)  # `_numbers` are the graph's now, and not yet computed
        return numbers

    def _compute(self) -> None:
        tokens = self._tokens.clamp(min=0)  # -1: a row that could not be used
        out, _ = rule(self._logits, tokens, None, self._rows, self._jobs, self._settings, rejects=False, branches=False)
        self._numbers = torch.cat([out.flatten(), self._tokens])
