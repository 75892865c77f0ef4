"""Where a model of the native backend keeps keys and values: single precision in the host's memory, page by page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.kv.pages import Page

GROUP = 16  # the kernels read so many keys, and so many dimensions of a value, at a time
Array = np.ndarray[Any, Any]


class HostStore:
    """Keys and values of every layer. Memory is reserved and not touched: unused pages cost nothing.

    A page has the keys of a head side by side, dimension after dimension, since a query is compared with many keys at
    once; values lie token after token. Both are padded to what the kernels read at a time.

        whole  [layers, pages, keys | values, heads, padded_dim * padded_size]
        keys   ... [padded_dim, padded_size]
        values ... [padded_size, padded_dim]
    """

    def __init__(self, num_layers: int, num_pages: int, num_heads: int, head_dim: int, page_size: int) -> None:
        self.page_size, self._num_heads, self._head_dim = page_size, num_heads, head_dim
        size, dim = (-(-number // GROUP) * GROUP for number in (page_size, head_dim))
        self.whole = np.zeros((num_layers, num_pages, 2, num_heads, dim * size), dtype=np.float32)
        front = self.whole.shape[:4]
        self._keys = self.whole.reshape(*front, dim, size)[:, :, 0, :, :head_dim]
        self._values = self.whole.reshape(*front, size, dim)[:, :, 1, ..., :head_dim]

    def copy_page(self, source: Page, target: Page) -> None:
        self.whole[:, target] = self.whole[:, source]

    def move_places(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.write(targets, self.read(sources))

    def save_places(self, places: Sequence[int]) -> Any:
        return self.read(places)

    def restore_places(self, places: Sequence[int], contents: Any) -> None:
        self.write(places, contents)

    def read(self, places: Sequence[int]) -> Array:
        """Contents of these places, [layers, places, keys | values]."""
        pages, within = self._split(places)
        both = np.stack([self._keys[:, pages, :, :, within], self._values[:, pages, :, within]])
        flat = 2 * self._num_heads * self._head_dim
        return np.ascontiguousarray(both.transpose(2, 1, 0, 3, 4)).reshape(len(self.whole), len(pages), flat)

    def write(self, places: Sequence[int], contents: Array) -> None:
        pages, within = self._split(places)
        shape = (*contents.shape[:2], 2, self._num_heads, self._head_dim)
        both = np.asarray(contents).reshape(shape).transpose(2, 1, 0, 3, 4)
        self._keys[:, pages, :, :, within] = both[0]
        self._values[:, pages, :, within] = both[1]

    def _split(self, places: Sequence[int]) -> tuple[Array, Array]:
        return np.divmod(np.asarray(places, dtype=np.int64), self.page_size)
