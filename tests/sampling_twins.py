"""What the kernels of `backends/cuda/choosing.py` and `judging.py` compute, by the reference: the interpreter takes its
time, and tests of engines are about other things."""

from __future__ import annotations

from typing import Any

import array_api_compat.torch as xp
import pytest
import torch

from outrider.backends.cuda import head_chain, sampling
from outrider.backends.cuda.choosing import Chosen
from outrider.sampling.noise import Noise
from outrider.sampling.tree import TreeLayout, match_tree, reject_tree

NOISE = Noise(xp)


def shaped(logits: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
    temperature, floor = settings[:, :1], settings[:, 1:]
    x = logits - logits.max(-1, keepdim=True).values
    x = torch.where(temperature > 0, x / temperature.clamp(min=1e-30), x)
    return torch.where((temperature > 0) & (x < floor), -torch.inf, x)


def choose(logits: torch.Tensor, asked: torch.Tensor, settings: torch.Tensor) -> Chosen:
    words, counter = asked[:, :2].t().contiguous(), asked[:, 2].contiguous()
    sampled = (settings[:, :1] > 0).float()
    tokens = NOISE.draw(shaped(logits, settings), words, counter // 4, counter % 4, sampled)
    usable = logits.max(-1).values.isfinite()
    nothing: Any = None
    return Chosen(torch.where(usable, tokens, -1).int(), nothing, nothing)


def spread(logits: torch.Tensor, chosen: Chosen, settings: torch.Tensor, out: torch.Tensor) -> None:
    certain = torch.nn.functional.one_hot(chosen.tokens.long().clamp(min=0), logits.shape[1]).float()
    out.copy_(torch.where(settings[:, :1] > 0, shaped(logits, settings).softmax(-1), certain))


def rule(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    probs: torch.Tensor | None,
    rows: torch.Tensor,
    jobs: torch.Tensor,
    settings: torch.Tensor,
    *,
    rejects: bool,
    branches: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = choose(logits, rows, settings).tokens
    draft, child, sibling, rank = (rows[:, place].long() for place in (3, 4, 5, 6))
    layout = TreeLayout(
        owner=rank, depth=rank, first=jobs[:, 0].long(), draft=draft, child=child, sibling=sibling, rank=rank.int(),
        steps=len(rows), parent=[],
    )  # fmt: skip
    found = match_tree(xp, chosen.long(), tokens.long(), layout)
    ends, following = found.rows, found.next
    if rejects:
        words, positions = rows[:, :2].t().contiguous(), rows[:, 2] // 4
        other = reject_tree(xp, shaped(logits, settings), tokens.long(), probs, layout, NOISE, words, positions)
        is_rejecting = jobs[:, 1] > 0
        ends = torch.where(is_rejecting, other.rows, ends)
        following = torch.where(is_rejecting, other.next, following)
    out = torch.zeros(len(jobs), 5, dtype=torch.int32)
    out[:, 0], out[:, 1], out[:, 2] = ends.int(), following.int(), (chosen[ends] < 0).int()
    return out, chosen


@pytest.fixture
def by_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling on the device by these, and rows as a GPU hands them over."""
    for twin in (choose, spread, rule):
        monkeypatch.setattr(sampling, twin.__name__, twin)
    monkeypatch.setattr(head_chain, "choose", choose)
    monkeypatch.setattr("outrider.backends.cuda.judged_chains.rule", rule)
    monkeypatch.setattr("outrider.backends.cuda.passes.array_of", lambda tensor: tensor)
    monkeypatch.setattr("outrider.backends.eagle_head.array_of", lambda tensor: tensor)
