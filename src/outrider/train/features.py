"""What the target knows at each place of some texts: hidden states for the head to read, and what it would say next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from outrider.backends.base import Backend, HeadHost, Spans
from outrider.errors import BackendError

ALIGNED = 64  # entries of a batch are a multiple of it: attention with a mask is faster then
HELD = 0.5  # of the memory that is free may be held by states of texts, which are needed again


class Batch(NamedTuple):
    """Texts filled up to one size. `counts`: tokens of each; `firsts`: how many of those are its prompt."""

    tokens: Tensor  # [B, N]
    states: Tensor  # [B, N, (features + 1) * width], the last of them after the output norm
    counts: list[int]
    firsts: list[int]


class Features:
    """Of one target, by its own passes. `layers` as `EagleSpec.layers_of` counts. `steps`: places that follow the last
    entry of a batch."""

    def __init__(self, target: Backend, layers: Sequence[int], steps: int = 0) -> None:
        self.target: Any = cast(HeadHost, target)
        self.layers = tuple(layers)
        self._steps = steps
        self._last = self.target.spec.num_layers + 1
        self.device: torch.device = self.target.device
        self._held: dict[int, Tensor] = {}  # states of texts, by number
        # On a CPU a state's bits depend on what else was in its pass, and what was broken off could not end the same
        self._room = int(HELD * torch.cuda.mem_get_info(self.device)[0]) if self.device.type == "cuda" else 0

    def of(self, texts: Sequence[Sequence[int]], firsts: Sequence[int], numbers: Sequence[int] | None = None) -> Batch:
        """numbers: under which their states may be kept."""
        keys: Sequence[int | None] = numbers if numbers is not None else [None] * len(texts)
        missing = [place for place, key in enumerate(keys) if key not in self._held]
        fresh = dict(zip(missing, self._computed([texts[place] for place in missing]), strict=True)) if missing else {}
        states = [fresh[place] if place in fresh else self._held[cast(int, keys[place])] for place in range(len(texts))]
        for place, state in fresh.items():
            key, size = keys[place], state.numel() * state.element_size()
            if key is not None and size <= self._room:
                self._held[key] = state.clone()
                self._room -= size
        counts = [len(text) for text in texts]
        size = -(-(max(counts) - 2) // ALIGNED) * ALIGNED + 1 + self._steps
        size = max(size, max(counts))
        tokens = np.zeros((len(texts), size), dtype=np.int64)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        padded = states[0].new_zeros(len(texts), size, states[0].shape[1])
        for row, state in enumerate(states):
            padded[row, : len(state)] = state
        return Batch(torch.from_numpy(tokens).to(self.device), padded, counts, list(firsts))

    def _computed(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        counts = [len(text) for text in texts]
        slots = [self.target.open((), count) for count in counts]
        flat = np.concatenate([np.asarray(text, dtype=np.int64) for text in texts])
        nothing = [0] * len(texts)
        try:
            if any(slot is None for slot in slots):
                raise BackendError("the cache has no room for a batch of texts; train with fewer tokens an update")
            spans = Spans(slots, nothing, counts, nothing, self.target.ops.fed(flat))
            hidden = self.target.score(spans, (*self.layers, self._last)).hidden
        finally:
            for slot in slots:
                if slot is not None:
                    self.target.close(slot)
        states = torch.cat([torch.as_tensor(hidden[layer]) for layer in (*self.layers, self._last)], dim=-1)
        return list(states.to(self.device).split_with_sizes(counts))

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, N] -> [B, N, width]"""
        embedded: Tensor = self.target.embed(tokens.flatten())
        return embedded.view(*tokens.shape, -1)
