"""Log-probabilities of tokens: the target's raw log-softmax, before any control."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from array_api_compat import is_torch_namespace

from outrider.types import Array, TokenLogprob

PORTION = 64  # rows at a time: a prompt of thousands of rows would be as many times the vocabulary


def token_logprobs(xp: Any, logits: Array, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """What each row thought of its token, and its `top` likeliest. logits [n, V], tokens [n]"""
    told: list[TokenLogprob] = []
    for start in range(0, len(tokens), PORTION):
        told += _portion(xp, logits[start : start + PORTION, ...], tokens[start : start + PORTION], top)
    return told


def _portion(xp: Any, logits: Array, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    x = xp.astype(logits, xp.float32)
    x = x - xp.max(x, axis=-1, keepdims=True)
    x = x - xp.log(xp.sum(xp.exp(x), axis=-1, keepdims=True))
    chosen = x[xp.arange(x.shape[0], device=x.device), xp.asarray(tokens, dtype=xp.int64, device=x.device)].tolist()
    best: list[list[tuple[int, float]]] = [[]] * len(tokens)
    if top:
        at = _highest(xp, x, min(top, x.shape[1]))
        values = xp.take_along_axis(x, at, axis=-1).tolist()
        best = [
            sorted(zip(ids, row, strict=True), key=lambda pair: (-pair[1], pair[0]))
            for ids, row in zip(at.tolist(), values, strict=True)
        ]
    return [TokenLogprob(*entry) for entry in zip(tokens, chosen, best, strict=True)]


def _highest(xp: Any, x: Array, count: int) -> Array:
    """Where the `count` highest of each row are, in any order. [n, count]"""
    if is_torch_namespace(xp):
        return x.topk(count, dim=-1).indices
    return xp.argpartition(x, x.shape[1] - count, axis=-1)[:, x.shape[1] - count :]
