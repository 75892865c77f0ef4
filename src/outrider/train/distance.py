"""How far guesses are from what the target would say, and which way is nearer.

A row over tokens is a guess times the output matrix, which is not trained. So what a distribution pulls at a guess is
the mean of the matrix's rows under it: of the target's distribution that is computed once for all steps, and rows over
tokens, which take more memory than all else, are never kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

AT_ONCE = 2**28  # numbers of rows over tokens that are computed together


def at_once(num_tokens: int) -> int:
    """Rows over so many tokens that are computed together."""
    return max(1, AT_ONCE // num_tokens)


def pull_of(states: Tensor, matrix: Tensor, certain: float = 0.0) -> Tensor:
    """Where the distributions of some states pull guesses to; `certain` of that is their likeliest token's alone.
    [n, width] -> [n, width]"""
    pulls = []
    for part in torch.split(states, at_once(len(matrix))):
        rows = functional.linear(part, matrix)
        pull = torch.mm(rows.softmax(-1).to(matrix.dtype), matrix)
        pulls.append(torch.lerp(pull, matrix[rows.argmax(-1)], certain) if certain else pull)
    return torch.cat(pulls)


class Missed(NamedTuple):
    """What guesses missed, all in all, and each one's likeliest token (of the matrix's)."""

    total: Tensor
    guessed: Tensor  # [n]


def missed_by(guesses: Tensor, wanted: Tensor, matrix: Tensor, weights: Tensor) -> Missed:
    """Cross entropies between guesses and the distributions that `wanted` is the pull of. [n, width], weights [n]"""
    return Missed(*_Missed.apply(guesses, wanted, matrix, weights))  # type: ignore[no-untyped-call]


class _Missed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, guesses: Tensor, wanted: Tensor, matrix: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        nearer, missed = torch.empty_like(guesses), -(guesses.float() * wanted.float()).sum(-1)
        guessed = torch.empty(len(guesses), dtype=torch.int64, device=guesses.device)
        for part, out, more, best in zip(
            *(torch.split(one, at_once(len(matrix))) for one in (guesses, nearer, missed, guessed)), strict=True
        ):
            rows = functional.linear(part.to(matrix.dtype), matrix)
            likely, most = rows.softmax(-1), rows.max(-1)
            more += most.values.float() - likely.gather(1, most.indices[:, None])[:, 0].float().log()
            out.copy_(torch.mm(likely, matrix))
            best.copy_(most.indices)
        ctx.save_for_backward((nearer - wanted.to(nearer.dtype)) * weights[:, None].to(nearer.dtype))
        ctx.mark_non_differentiable(guessed)
        return (missed * weights).sum(), guessed

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None, None, None]:
        (nearer,) = ctx.saved_tensors
        return nearer * grad, None, None, None
