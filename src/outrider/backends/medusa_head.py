"""Medusa heads in torch: from one hidden state of the target, a row for each of the places after the next token."""

from __future__ import annotations

import torch
from torch.nn import functional

from outrider.backends.base import HeadHost
from outrider.backends.head_base import settle_on
from outrider.backends.heads import DraftVocabulary, like, load
from outrider.models.head_spec import MedusaSpec
from outrider.models.heads import HeadFile


class MedusaHead:
    """All heads at once: matrices of one kind lie in one tensor, [heads, inputs, outputs]."""

    def __init__(self, file: HeadFile, target: HeadHost) -> None:
        spec = file.spec
        assert isinstance(spec, MedusaSpec), f"{file.path} holds no Medusa heads"
        settle_on(file, target)
        self.target = target
        self._like = like(target)
        self.name = file.name
        self.num_heads = spec.num_heads
        self.hidden = (target.info.num_hidden - 1,)  # of the target: after its output norm
        self.vocabulary = DraftVocabulary(file, target)
        heads, biased = range(spec.num_heads), "head.0.block.0.bias" in file.shapes

        def stack(names: list[str]) -> torch.Tensor:
            return torch.stack([load(file, name, target) for name in names])

        self._blocks = [
            (
                stack([f"head.{head}.block.{block}.weight" for head in heads]).mT,
                stack([f"head.{head}.block.{block}.bias" for head in heads]).unsqueeze(1) if biased else None,
            )
            for block in range(spec.num_layers)
        ]
        outputs = {"own": [f"head.{head}.output.weight" for head in heads], "shared": ["output.weight"], "target": []}
        self._output: torch.Tensor | None = None  # [heads or 1, width, columns]
        if spec.output != "target":
            matrices = stack(outputs[spec.output])
            if self.vocabulary.ids is not None and matrices.shape[1] > len(self.vocabulary.ids):
                matrices = matrices.index_select(1, self.vocabulary.ids)
            self._output = matrices.mT

    def rows(self, hidden: torch.Tensor, count: int) -> torch.Tensor:
        """The first `count` heads' logits over the target's tokens. [n, width] -> [n, count, V]"""
        with torch.inference_mode():
            x = hidden.to(self._like).expand(count, *hidden.shape)
            for weight, bias in self._blocks:
                products = torch.bmm(x, weight[:count])
                x = x + functional.silu(products if bias is None else products + bias[:count])
            flat = self._logits(x).flatten(0, 1)
            return self.vocabulary.spread(flat).view(count, len(hidden), -1).transpose(0, 1)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """[count, n, width] -> [count, n, tokens it chooses among]"""
        if self._output is not None:
            return torch.matmul(x, self._output[: len(x)]).float()
        rows: torch.Tensor = self.target.unembed(x.flatten(0, 1)).view(*x.shape[:2], -1)
        return rows if self.vocabulary.ids is None else rows.index_select(2, self.vocabulary.ids)
