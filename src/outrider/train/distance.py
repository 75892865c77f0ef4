"""How far guesses are from what the target would say, and which way is nearer.

A row over tokens is a guess times the output matrix, which is not trained. So what a distribution pulls at a guess is
the mean of the matrix's rows under it: of the target's distribution that is computed once for all steps, and rows over
tokens, which take more memory than all else, are never kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

AT_ONCE = 2**28  # numbers of rows over tokens that are computed together


def at_once(num_tokens: int) -> int:
    """Rows over so many tokens that are computed together."""
    return max(1, AT_ONCE // num_tokens)


def pull_of(states: Tensor, matrix: Tensor) -> Tensor:
    """Where the distributions of some states pull guesses to. [n, width] -> [n, width]"""
    parts = [functional.linear(part, matrix).softmax(-1) for part in torch.split(states, at_once(len(matrix)))]
    return torch.cat([torch.mm(part.to(matrix.dtype), matrix) for part in parts])


def missed_by(guesses: Tensor, wanted: Tensor, matrix: Tensor) -> Tensor:
    """The sum of the cross entropies between guesses and the distributions that `wanted` is the pull of. [n, width]"""
    missed: Tensor = _Missed.apply(guesses, wanted, matrix)  # type: ignore[no-untyped-call]
    return missed


class _Missed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, guesses: Tensor, wanted: Tensor, matrix: Tensor) -> Tensor:
        nearer, total = torch.empty_like(guesses), -(guesses.float() * wanted.float()).sum()
        for part, out in zip(*(torch.split(one, at_once(len(matrix))) for one in (guesses, nearer)), strict=True):
            rows = functional.linear(part.to(matrix.dtype), matrix)
            likely, best = rows.softmax(-1), rows.max(-1)
            total += (best.values.float() - likely.gather(1, best.indices[:, None])[:, 0].float().log()).sum()
            out.copy_(torch.mm(likely, matrix))
        ctx.save_for_backward(nearer - wanted.to(nearer.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (nearer,) = ctx.saved_tensors
        return nearer * grad, None, None
