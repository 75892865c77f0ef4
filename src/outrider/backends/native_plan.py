"""A pass of native code in its own words: which keys each row sees, and how positions turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.errors import BackendError
from outrider.models.base import Rope

Array = np.ndarray[Any, Any]
TURNS_AT_ONCE = 1024  # positions whose turns are computed together: a position's numbers never depend on who asks


class Turns:
    """Cosines and sines of positions, computed when they are first needed."""

    def __init__(self, rope: Rope) -> None:
        self._rope = rope
        self._known = np.empty((0, len(rope.frequencies), 2), dtype=np.float32)

    def reach(self, position: int) -> Array:
        """Those up to this position at least. [positions, pairs, 2]"""
        known = len(self._known)
        if position < known:
            return self._known
        more = -(-(position + 1 - known) // TURNS_AT_ONCE) * TURNS_AT_ONCE
        frequencies = np.array(self._rope.frequencies, dtype=np.float32)
        tables = [self._known]
        for start in range(known, known + more, TURNS_AT_ONCE):
            angles = np.arange(start, start + TURNS_AT_ONCE, dtype=np.float32)[:, None] * frequencies
            tables.append(np.stack([np.cos(angles), np.sin(angles)], axis=-1) * np.float32(self._rope.scale))
        self._known = np.concatenate(tables)
        return self._known


class Plan:
    """Which keys each row of a pass sees, span after span, in the words of `forward.h`.

    chain, start 5, fed 3      runs 6 7 8                no extras
    tree  t a b c, start 5     runs 5 5 5 5              extras t | t a | t b | t a c   (indices 5, 6, ...)
    """

    def __init__(self) -> None:
        self.positions: list[int] = []
        self.places: list[int] = []
        self.pages: list[int] = []
        self.tables: list[int] = []
        self.firsts: list[int] = []
        self.runs: list[int] = []
        self.extra_ends: list[int] = []
        self.extras: list[int] = []

    def add(
        self,
        start: int,
        count: int,
        pages: Sequence[int],
        parents: Sequence[int] | None,
        size: int,
        *,
        skipped: int = 0,
    ) -> None:
        """A span of a sequence that lies in `pages` of this size. It does not see the first `skipped` places, and
        positions count from there."""
        self.firsts += [skipped] * count
        self.tables += [len(self.pages)] * count
        self.pages += pages
        self.places += [pages[index // size] * size + index % size for index in range(start, start + count)]
        if parents is None:
            self.positions += range(start - skipped, start - skipped + count)
            self.runs += range(start + 1, start + count + 1)
            self.extra_ends += [len(self.extras)] * count
        else:
            self._add_tree(start, count, parents, skipped)

    def _add_tree(self, start: int, count: int, parents: Sequence[int], skipped: int) -> None:
        size = len(parents)
        if not count <= size <= start + count or not all(-1 <= parent < node for node, parent in enumerate(parents)):
            raise BackendError(
                f"{count} tokens at {start} with parents {list(parents)}; each must come after its parent, -1 or more"
            )
        root = start + count - size  # the first place of the tree, some of which may have been fed before
        paths: list[list[int]] = []
        for node, parent in enumerate(parents):
            paths.append([*(paths[parent] if parent >= 0 else []), node])
        for path in paths[size - count :]:
            self.positions.append(root - skipped + len(path) - 1)
            self.runs.append(root)
            self.extras += [root + node for node in path]
            self.extra_ends.append(len(self.extras))
