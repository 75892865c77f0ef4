"""What the networks of draft heads share: the model they sit on, and the tokens they choose among."""

from __future__ import annotations

import torch

from outrider.backends.base import HeadHost
from outrider.errors import ModelFileError
from outrider.models.head_spec import IDS, OFFSETS
from outrider.models.heads import HeadFile, Host, check_fit

COMPARED_ROWS = 4096  # of an embedding, at a time: a model that keeps it quantised unpacks them
COMPARED_COLUMNS = 16  # of an output matrix
PARTS = 256  # rows of one, turned over, that are computed at a time


def settle_on(file: HeadFile, target: HeadHost) -> None:
    """A ModelFileError if the head was not made for a model like this."""
    spec, info = target.spec, target.info
    check_fit(file, Host(info.name, spec.width, spec.num_layers, info.vocab_size, info.num_columns))
    own = getattr(target, "fingerprint", None)
    if file.made_for is not None and own is not None and file.made_for != own:
        raise ModelFileError(
            f"{file.path}: the head was trained on other weights ({file.made_for[:12]}) than those of {info.name} "
            f"({own[:12]}); take one made for it, or train one: outrider train eagle",
            param="draft",
        )


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
        self.ids: torch.Tensor | None = None
        if IDS in file.shapes:
            self.ids = file.read(IDS).to(torch.int64)
        elif OFFSETS in file.shapes:
            offsets = file.read(OFFSETS).to(torch.int64)
            self.ids = offsets + torch.arange(len(offsets))
        if self.ids is not None:
            self._check(file, target.info.num_columns)
            self._columns = max(self._size, int(self.ids.max()) + 1)
            self.ids = self.ids.to(target.device)

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows over its own tokens as rows over the target's, minus infinity for others. [n, own] -> [n, V]"""
        if self.ids is None:
            return rows[:, : self._size]
        whole = rows.new_full((len(rows), self._columns), -torch.inf)
        return whole.index_copy_(1, self.ids, rows)[:, : self._size]

    def _check(self, file: HeadFile, num_columns: int) -> None:
        assert self.ids is not None
        if not len(self.ids) or int(self.ids.min()) < 0 or int(self.ids.max()) >= num_columns:
            raise ModelFileError(f"{file.path}: its tokens are not all among the target's {num_columns}")
        if len(set(self.ids.tolist())) < len(self.ids):
            raise ModelFileError(f"{file.path}: two of its tokens are the same token of the target")
        if int((self.ids < self._size).sum()) == 0:
            raise ModelFileError(f"{file.path}: none of its tokens is one of the target's {self._size}")
