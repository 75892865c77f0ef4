"""What the networks of draft heads in torch share: the model they sit on, and the tokens they choose among."""

from __future__ import annotations

import torch

from outrider.backends.base import HeadHost
from outrider.backends.head_base import draft_ids
from outrider.models.heads import HeadFile

COMPARED_ROWS = 4096  # of an embedding, at a time: a model that keeps it quantised unpacks them
COMPARED_COLUMNS = 16  # of an output matrix
PARTS = 256  # rows of one, turned over, that are computed at a time


def like(target: HeadHost) -> torch.Tensor:
    """Nothing, in the precision that heads compute in and where they do."""
    nothing: torch.Tensor = target.embed(torch.empty(0, dtype=torch.int64, device=target.device))
    return nothing


def load(file: HeadFile, name: str, target: HeadHost) -> torch.Tensor:
    """One tensor as the target's are: see `like`."""
    return file.read(name).to(like(target))


def is_embedding(matrix: torch.Tensor, target: HeadHost) -> bool:
    """Whether this is a copy of the target's own. [tokens, width]"""
    if matrix.shape != (target.spec.num_columns, target.spec.width):
        return False
    tokens = torch.arange(len(matrix), device=target.device)
    parts = [slice(start, start + COMPARED_ROWS) for start in range(0, len(matrix), COMPARED_ROWS)]
    return all(torch.equal(matrix[part], target.embed(tokens[part])) for part in parts)


def is_output(matrix: torch.Tensor, target: HeadHost) -> bool:
    """Whether this is a copy of the target's own, to judge by some of its columns, as many as no other matrix would
    share. A hidden state with a single one gives a column. [tokens, width]"""
    if matrix.shape != (target.spec.num_columns, target.spec.width):
        return False
    ones = torch.eye(min(COMPARED_COLUMNS, target.spec.width), target.spec.width).to(matrix)
    return torch.equal(target.unembed(ones), matrix[:, : len(ones)].t().float())


def output_of(target: HeadHost, ids: torch.Tensor | None = None) -> torch.Tensor:
    """The target's output matrix, turned over: a row times it gives logits of all tokens, or of some. [width, n]"""
    ones = torch.eye(target.spec.width).to(like(target))
    parts: list[torch.Tensor] = []
    for start in range(0, len(ones), PARTS):
        part = target.unembed(ones[start : start + PARTS])
        parts.append(part if ids is None else part[:, ids])  # of a large vocabulary only what is needed is held
    return torch.cat(parts)


class DraftVocabulary:
    """The tokens a head chooses among: all of the target's, or some, by their ids there."""

    def __init__(self, file: HeadFile, target: HeadHost) -> None:
        self._size = target.info.vocab_size
        ids = draft_ids(file, target)
        self.ids = None if ids is None else torch.from_numpy(ids).to(target.device)
        self._columns = self._size if ids is None else max(self._size, int(ids.max()) + 1)

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows over its own tokens as rows over the target's, minus infinity for others. [n, own] -> [n, V]"""
        if self.ids is None:
            return rows[:, : self._size]
        whole = rows.new_full((len(rows), self._columns), -torch.inf)
        return whole.index_copy_(1, self.ids, rows)[:, : self._size]
