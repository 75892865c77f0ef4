"""The tensors that pages live in, for one transformer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.kv.pages import Page


class PageStore:
    """Keys and values by place: one tensor [places, 2 * kv width] per layer, keys first.

    Memory is reserved, not touched: on a CPU the pages nobody used cost nothing.
    """

    def __init__(
        self, num_layers: int, num_pages: int, page_size: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.page_size = page_size
        self.layers = [
            torch.empty(num_pages * page_size, 2 * width, dtype=dtype, device=device) for _ in range(num_layers)
        ]

    def copy_page(self, source: Page, target: Page) -> None:
        size = self.page_size
        for layer in self.layers:
            layer[target * size : (target + 1) * size] = layer[source * size : (source + 1) * size]

    def move_places(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        device = self.layers[0].device
        read, write = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        for layer in self.layers:
            layer.index_copy_(0, write, layer.index_select(0, read))

    def read(self, places: Sequence[int]) -> torch.Tensor:
        """Contents of these places, [layers, places, 2 * width]; for saving."""
        index = torch.tensor(places, dtype=torch.int64, device=self.layers[0].device)
        return torch.stack([layer.index_select(0, index) for layer in self.layers])

    def write(self, places: Sequence[int], contents: torch.Tensor) -> None:
        index = torch.tensor(places, dtype=torch.int64, device=self.layers[0].device)
        for layer, content in zip(self.layers, contents, strict=True):
            layer.index_copy_(0, index, content.to(layer))
