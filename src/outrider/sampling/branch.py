"""Drawing several children from a row, for drafts that are trees.

Children of a row are drawn without replacement, each from what its earlier siblings left: the same noise, with their
tokens taken out, gives the next best of the race (Gumbel-top-k). How many children a row gets may depend on the row,
and must be settled before they are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from outrider.errors import OutriderError
from outrider.sampling.noise import Noise
from outrider.sampling.warp import Controls, Shaped, diagnose, softmax
from outrider.types import Array


class Children(NamedTuple):
    """Drawn tokens, row after row, siblings in draw order. Everything but `probs` is on the host."""

    rows: list[int]  # the row each child comes from
    tokens: list[int]
    confidences: list[float]  # log of how likely the draft thinks each is
    probs: Array | None  # [N, V] the rows they were drawn from; None: all one-hot


class DraftRows:
    """Some rows of a draft, shaped as their requests ask, ready to be drawn from.

    Under `coupled` noise decides who wins, and the draft's first choice is right about as often whatever its
    probability: there, promises and confidences go by rank.
    """

    def __init__(
        self, xp: Any, noise: Noise, shaped: Shaped, controls: Controls, positions: Array, by_rank: Sequence[bool]
    ) -> None:
        self.faults: dict[int, OutriderError] = shaped.faults
        self._xp, self._noise, self._controls, self._positions = xp, noise, controls, positions
        self._by_rank = by_rank
        self._x = shaped.logits
        self._logs: Array | None = None

    def promises(self, count: int) -> list[list[float]]:
        """For each row, log of how likely its best `count` children are, best first."""
        xp, logs = self._xp, self._log_probs()
        count = min(count, logs.shape[1])
        best = -xp.sort(-_highest(xp, logs, count), axis=-1)
        ranks = [-(rank + 1.0) for rank in range(count)]
        return [ranks if by_rank else row for row, by_rank in zip(best.tolist(), self._by_rank, strict=True)]

    def draw(self, counts: Sequence[int], *, certain: bool = False) -> Children:
        """`counts[r]` children of row r, fewer where it has no more. `certain` takes the likeliest, one-hot."""
        xp, controls = self._xp, self._controls
        logs, x = self._log_probs(), xp.asarray(self._x, copy=True)
        weighed = [] if certain or controls.all_greedy else controls.weighed
        drawn: list[tuple[int, int, int]] = []  # row, rank, token
        confidences: list[float] = []
        parts: list[Array] = []
        for rank in range(max(counts, default=0)):
            rows = [row for row, count in enumerate(counts) if count > rank]
            at = xp.asarray(rows, dtype=xp.int64, device=x.device)
            left = x[at, ...]
            tokens = self._choose(left, at, certain)
            chances = logs[at, tokens].tolist()
            possible = xp.max(left, axis=-1) > -xp.inf  # a row may run out of tokens
            alive = [index for index, is_possible in enumerate(possible.tolist()) if is_possible]
            values = tokens.tolist()
            for index in alive:
                drawn.append((rows[index], rank, values[index]))
                confidences.append(-(rank + 1.0) if self._by_rank[rows[index]] else chances[index])
            if any(weighed):
                sources = self._sources(left, tokens, [weighed[row] for row in rows])
                parts.append(sources[xp.asarray(alive, dtype=xp.int64, device=x.device), ...])
            x[at, tokens] = -xp.inf
        order = sorted(range(len(drawn)), key=drawn.__getitem__)
        probs = xp.concat(parts)[xp.asarray(order, dtype=xp.int64, device=x.device), ...] if parts else None
        return Children(
            [drawn[index][0] for index in order],
            [drawn[index][2] for index in order],
            [confidences[index] for index in order],
            probs,
        )

    def _choose(self, left: Array, at: Array, certain: bool) -> Array:
        controls = self._controls
        if certain or controls.all_greedy:
            return left.argmax(-1)
        sampled = None if controls.sampled is None else controls.sampled[at, ...]
        return self._noise.draw(left, controls.words[:, at], self._positions[at], controls.draft_stream[at], sampled)

    def _sources(self, left: Array, tokens: Array, weighed: Sequence[bool]) -> Array:
        """The rows drawn from: distributions where the judge weighs them, one-hot elsewhere. [n, V]"""
        xp = self._xp
        ids = xp.arange(left.shape[1], device=left.device)
        one_hot = xp.astype(tokens[:, None] == ids, xp.float32)
        finite = xp.where(xp.max(left, axis=-1, keepdims=True) > -xp.inf, left, xp.zeros_like(left))
        return xp.where(xp.asarray(weighed, device=left.device)[:, None], softmax(xp, finite), one_hot)

    def _log_probs(self) -> Array:
        if self._logs is None:
            xp, x = self._xp, self._x
            shifted = x - xp.max(x, axis=-1, keepdims=True)
            self._logs = shifted - xp.log(xp.sum(xp.exp(shifted), axis=-1, keepdims=True))
        return self._logs


class OwnRows:
    """Rows over a draft's own tokens, of which only the likeliest are wanted: nothing is as long as the vocabulary.

    rows: [n, own], warps: temperature and the logarithm of min_p of each, ids: the token of each column, where they
    are not the same. For numpy's arrays.
    """

    def __init__(self, rows: Array, warps: Sequence[tuple[float, float]], ids: Array | None) -> None:
        warp = np.asarray(warps, dtype=np.float32)
        with np.errstate(invalid="ignore"):
            x = (rows - rows.max(axis=1, keepdims=True)) / warp[:, :1]
            x[x < warp[:, 1:]] = -np.inf
            self._logs = np.log(np.exp(x).sum(axis=1))
        self._x, self._ids = x, ids
        unusable = np.flatnonzero(np.isnan(self._logs)).tolist()
        self.faults: dict[int, OutriderError] = {row: diagnose(np, rows[row], rows[row]) for row in unusable}

    def draw(self, counts: Sequence[int], *, certain: bool) -> Children:
        """As `DraftRows.draw`; always the likeliest."""
        assert certain, "nothing is drawn from these"
        x, every, found = self._x.copy(), np.arange(len(counts)), []
        for _ in range(max(counts, default=0)):
            best = x.argmax(axis=1)
            found.append((best, x[every, best] - self._logs))
            x[every, best] = -np.inf
        children = Children([], [], [], None)
        for row, count in enumerate(counts):
            for best, logs in found[: 0 if row in self.faults else count]:
                if logs[row] > -np.inf:  # a row may run out of tokens
                    children.rows.append(row)
                    children.tokens.append(int(best[row] if self._ids is None else self._ids[best[row]]))
                    children.confidences.append(float(logs[row]))
        return children


def _highest(xp: Any, x: Array, count: int) -> Array:
    """The `count` highest of each row, in any order."""
    if hasattr(x, "topk"):
        return x.topk(count, dim=-1).values
    return xp.partition(x, x.shape[1] - count, axis=-1)[:, x.shape[1] - count :]
