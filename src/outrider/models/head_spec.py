"""What a head file tells: the shape of the head (`MedusaSpec`, `EagleSpec`), and names for its tensors.

Our names are GGUF's where it has one (see `models.base`): `blk.0.attn_q.weight`, `token_embd.weight`, `output.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from outrider.errors import ModelFileError
from outrider.models.base import TransformerSpec
from outrider.models.head_tensors import Tensors

IDS, OFFSETS = "ids", "d2t"  # whole numbers: the target's id of each draft token, or what to add to the draft's
NUMBER = r"(0|[1-9]\d{0,2})"  # of a layer or a head, within the pattern of a name


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaSpec:
    """Head k guesses the token k + 2 places after a hidden state: blocks of x + silu(Wx + b), then a matrix.

    `output` says whose matrix that is: each head has its own, they share one, or it is the target's.
    """

    num_heads: int
    num_layers: int  # blocks of a head
    width: int
    output: Literal["own", "shared", "target"]
    num_columns: int | None  # rows of the matrices in the file
    draft_vocab_size: int | None  # tokens it chooses among, where those are not all


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleSpec:
    """A small transformer over pairs of the target's hidden state and the token after it.

    version 1 (EAGLE-2 has the same files) reads the last hidden state after the output norm and fuses it with the
    embedding; version 3 fuses hidden states of several layers, and its first layer sees them beside the embedding.
    """

    version: Literal[1, 3]
    layer: TransformerSpec  # its own layers, width and positions; `num_columns` is the vocabulary it was made for
    target_width: int
    features: tuple[int, ...] | None  # hidden states it reads, as `ModelInfo.num_hidden` counts; None: as usual
    draft_vocab_size: int
    norm_before_residual: bool = False  # what passes its first layer by is normed, too
    norm_output: bool = False  # what it is fed of its own is normed

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """Hidden states it wants of a target with so many layers."""
        if self.version == 1:
            return (num_layers + 1,)
        return self.features or (2, num_layers // 2, num_layers - 3)


HeadSpec = MedusaSpec | EagleSpec


def rename(tensors: Tensors, short: Callable[[str], str | None], unused: re.Pattern[str]) -> dict[str, str]:
    """Ours -> theirs. A tensor nobody would read means a head this is not."""
    names: dict[str, str] = {}
    for theirs in tensors.shapes:
        if unused.fullmatch(theirs):
            continue
        ours = short(theirs)
        if ours is None or ours in names:
            problem = "is of a kind that cannot be computed" if ours is None else "is there twice"
            raise ModelFileError(f"{tensors.path}: the tensor {theirs[:80]!r} {problem}")
        names[ours] = theirs
    return names
