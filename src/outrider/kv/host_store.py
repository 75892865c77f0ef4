"""Where a model of the native backend keeps keys and values: single precision in the host's memory, page by page."""

from __future__ import annotations

import math
import mmap
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

        whole  [pages, layers, keys | values, heads, padded_dim * padded_size]
        keys   ... [padded_dim, padded_size]
        values ... [padded_size, padded_dim]
    """

    def __init__(self, num_layers: int, num_pages: int, num_heads: int, head_dim: int, page_size: int) -> None:
        self.page_size, self._num_heads, self._head_dim = page_size, num_heads, head_dim
        size, dim = _padded(page_size), _padded(head_dim)
        self.whole = _untouched((num_pages, num_layers, 2, num_heads, dim * size))
        front = self.whole.shape[:4]
        self._keys = self.whole.reshape(*front, dim, size)[:, :, 0, :, :head_dim]  # [pages, layers, heads, dim, size]
        self._values = self.whole.reshape(*front, size, dim)[:, :, 1, ..., :head_dim]

    @staticmethod
    def bytes_of_page(num_layers: int, num_heads: int, head_dim: int, page_size: int) -> int:
        """Memory that a page takes."""
        return 2 * num_layers * num_heads * _padded(head_dim) * _padded(page_size) * np.dtype(np.float32).itemsize

    def copy_page(self, source: Page, target: Page) -> None:
        self.whole[target] = self.whole[source]

    def move_places(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.write(targets, self.read(sources))

    def save_places(self, places: Sequence[int]) -> Any:
        return self.read(places)

    def restore_places(self, places: Sequence[int], contents: Any) -> None:
        self.write(places, contents)

    def read(self, places: Sequence[int]) -> Array:
        """Contents of these places, [layers, places, keys | values]."""
        pages, within = self._split(places)
        both = np.stack([self._keys[pages, ..., within], self._values[pages, :, :, within]], axis=2)
        flat = 2 * self._num_heads * self._head_dim
        return np.ascontiguousarray(both.swapaxes(0, 1)).reshape(self.whole.shape[1], len(pages), flat)

    def write(self, places: Sequence[int], contents: Array) -> None:
        pages, within = self._split(places)
        shape = (*contents.shape[:2], 2, self._num_heads, self._head_dim)
        both = np.asarray(contents).reshape(shape).swapaxes(0, 1)
        self._keys[pages, ..., within] = both[:, :, 0]
        self._values[pages, :, :, within] = both[:, :, 1]

    def _split(self, places: Sequence[int]) -> tuple[Array, Array]:
        return np.divmod(np.asarray(places, dtype=np.int64), self.page_size)


def _padded(number: int) -> int:
    return -(-number // GROUP) * GROUP


def _untouched(shape: tuple[int, ...]) -> Array:
    """Zeros that take memory when they are written to, in large pages where the system has them: keys are read from all
    over, and with small pages looking up where they are takes longer than the arithmetic."""
    memory = mmap.mmap(-1, max(1, math.prod(shape)) * np.dtype(np.float32).itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.float32)[: math.prod(shape)].reshape(shape)
