"""The tensors that pages live in, for one transformer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from outrider.kv.pages import Page


class PageStore:
    """Keys and values of every layer, by place. Memory is reserved and not touched: unused pages cost nothing on a CPU.

    whole: [layers, places, keys | values], of any content
    """

    def __init__(self, whole: torch.Tensor, num_heads: int, page_size: int) -> None:
        self.page_size = page_size
        self.whole = whole
        self.layers = list(whole.unbind(0))
        halves = whole.view(*whole.shape[:2], 2, num_heads, -1).transpose(1, 3)
        self._keys, self._values = halves.unsqueeze(1).unbind(3)  # [layers, 1, heads, places, head_dim]

    def run(self, places: slice) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Keys and values of neighbouring places, layer by layer, without a copy. [1, heads, places, head_dim]"""
        return list(self._keys[..., places, :].unbind(0)), list(self._values[..., places, :].unbind(0))

    def copy_page(self, source: Page, target: Page) -> None:
        size = self.page_size
        self.whole[:, target * size : (target + 1) * size] = self.whole[:, source * size : (source + 1) * size]

    def move_places(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.whole.index_copy_(1, self._index(targets), self.read(sources))

    def save_places(self, places: Sequence[int]) -> Any:
        return self.read(places).float().cpu().numpy()

    def restore_places(self, places: Sequence[int], contents: Any) -> None:
        self.write(places, torch.from_numpy(contents))

    def read(self, places: Sequence[int]) -> torch.Tensor:
        """Contents of these places, [layers, places, keys | values]."""
        return self.whole.index_select(1, self._index(places))

    def write(self, places: Sequence[int], contents: torch.Tensor) -> None:
        self.whole.index_copy_(1, self._index(places), contents.to(self.whole))

    def _index(self, places: Sequence[int]) -> torch.Tensor:
        # `torch.tensor` would wait until everything queued on the device is done
        return torch.from_numpy(np.asarray(places, dtype=np.int64)).to(self.whole.device, non_blocking=True)
