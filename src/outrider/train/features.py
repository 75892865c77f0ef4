"""What the target knows at each place of some texts: hidden states for the head to read, and what it would say next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from outrider.backends.base import Backend, HeadHost, Spans
from outrider.errors import BackendError

ROWS = 4096  # whose likeliest token is looked up at a time


class Batch(NamedTuple):
    """Texts of one length, filled up; `told[b, i]`: the token at i was said by the target (and is not filling)."""

    tokens: Tensor  # [B, N]
    told: Tensor  # [B, N] bool
    features: Tensor  # [B, N, features * width]
    final: Tensor  # [B, N, width] after the output norm
    likeliest: Tensor  # [B, N] what the target would say next, greedily


class Features:
    """Of one target, by its own passes. `layers` as `EagleSpec.layers_of` counts."""

    def __init__(self, target: Backend, layers: Sequence[int]) -> None:
        self.target: Any = cast(HeadHost, target)
        self.layers = tuple(layers)
        self._last = self.target.spec.num_layers + 1
        self.device: torch.device = self.target.device

    def of(self, texts: Sequence[Sequence[int]], num_prompts: Sequence[int]) -> Batch:
        """num_prompts: tokens of each text that are its prompt."""
        counts = [len(text) for text in texts]
        slots = [self.target.open((), count) for count in counts]
        flat = np.concatenate([np.asarray(text, dtype=np.int64) for text in texts])
        nothing = [0] * len(texts)
        try:
            if any(slot is None for slot in slots):
                raise BackendError("the cache has no room for a batch of texts; train with a smaller batch")
            spans = Spans(slots, nothing, counts, nothing, self.target.ops.fed(flat))
            hidden = self.target.score(spans, (*self.layers, self._last)).hidden
        finally:
            for slot in slots:
                if slot is not None:
                    self.target.close(slot)
        states = {layer: torch.as_tensor(state).to(self.device) for layer, state in hidden.items()}
        final = states[self._last]
        likeliest = torch.cat(
            [self.target.unembed(final[start : start + ROWS]).argmax(-1) for start in range(0, len(final), ROWS)]
        )
        features = torch.cat([states[layer] for layer in self.layers], dim=-1)
        told = np.concatenate([np.arange(count) >= first for count, first in zip(counts, num_prompts, strict=True)])
        size = max(counts)
        return Batch(
            *(
                _padded(values, counts, size)
                for values in (
                    torch.from_numpy(flat).to(self.device),
                    torch.from_numpy(told).to(self.device),
                    features,
                    final,
                    likeliest,
                )
            )
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, N] -> [B, N, width]"""
        embedded: Tensor = self.target.embed(tokens.flatten())
        return embedded.view(*tokens.shape, -1)


def _padded(values: Tensor, counts: Sequence[int], size: int) -> Tensor:
    whole = values.new_zeros(len(counts), size, *values.shape[1:])
    for row, part in enumerate(values.split_with_sizes(list(counts))):
        whole[row, : len(part)] = part
    return whole
