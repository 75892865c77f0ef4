"""The KV cache of the native backend: keys and values in the host's memory, page by page."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.kv.pages import Page

GROUP = 16  # the kernels read so many keys, and so many dimensions of a value, at a time
ELEMENTS = {"f32": np.float32, "f16": np.float16, "q8": np.int8}  # by KV type
SCALE = np.dtype(np.float32)
Array = np.ndarray[Any, Any]


class HostStore:
    """Keys and values of every layer. Memory is reserved and not touched: unused pages cost nothing.

    A page has the keys of a head side by side, dimension after dimension, since a query is compared with many keys at
    once; values lie token after token. Both are padded to what the kernels read at a time. With "q8" the scales of the
    tokens come first, and contents are read and written as float32: their bits survive it (`round_scale`).

        whole  [pages, layers, keys | values, heads, bytes of a block]
        keys   [scales: padded_size], [padded_dim, padded_size]
        values [scales: padded_size], [padded_size, padded_dim]
    """

    def __init__(
        self, num_layers: int, num_pages: int, num_heads: int, head_dim: int, page_size: int, kv_type: str = "f16"
    ) -> None:
        self.page_size, self.kv_type = page_size, kv_type
        self._num_layers, self._num_heads, self._head_dim = num_layers, num_heads, head_dim
        size, dim = _padded(page_size), _padded(head_dim)
        block = _block_bytes(page_size, head_dim, kv_type)
        self.whole = _untouched((num_pages, num_layers, 2, num_heads, block))
        scales = size * SCALE.itemsize if kv_type == "q8" else 0
        elements = self.whole[..., scales:].view(ELEMENTS[kv_type])
        front = self.whole.shape[:4]
        # [pages, layers, heads, dim, size] and [pages, layers, heads, size, dim]
        self._keys = elements.reshape(*front, dim, size)[:, :, 0, :, :head_dim]
        self._values = elements.reshape(*front, size, dim)[:, :, 1, ..., :head_dim]
        self._scales = self.whole[..., :scales].view(SCALE)  # [pages, layers, keys | values, heads, size]

    @staticmethod
    def bytes_of_page(num_layers: int, num_heads: int, head_dim: int, page_size: int, kv_type: str = "f16") -> int:
        """Memory that a page takes."""
        return 2 * num_layers * num_heads * _block_bytes(page_size, head_dim, kv_type)

    @property
    def bytes_of_token(self) -> int:
        """Memory that one token takes of a page that is full."""
        return int(self.whole[0].nbytes) // self.page_size

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
        if self.kv_type == "q8":
            both = both * self._scales[pages, ..., within][..., None]
        flat = 2 * self._num_heads * self._head_dim
        return np.ascontiguousarray(both.swapaxes(0, 1)).reshape(self._num_layers, len(pages), flat)

    def write(self, places: Sequence[int], contents: Array) -> None:
        pages, within = self._split(places)
        shape = (*contents.shape[:2], 2, self._num_heads, self._head_dim)
        both = np.asarray(contents).reshape(shape).swapaxes(0, 1)
        if self.kv_type == "q8":
            scales = round_scale(np.abs(both).max(axis=-1) / np.float32(127))
            self._scales[pages, ..., within] = scales
            both = np.rint(both / np.where(scales > 0, scales, 1)[..., None])
        elif self.kv_type == "f16" and both.dtype != np.float16:
            both = np.clip(both, -65504, 65504)  # as the kernels do: the largest number instead of infinity
        self._keys[pages, ..., within] = both[:, :, 0]
        self._values[pages, :, :, within] = both[:, :, 1]

    def _split(self, places: Sequence[int]) -> tuple[Array, Array]:
        return np.divmod(np.asarray(places, dtype=np.int64), self.page_size)


def round_scale(scales: Array) -> Array:
    """Scales with 12 significant bits, rounded up, as `round_scale` of the kernels does.

    Products with int8 are exact then, so values that are read and written again get the same scale and bits.
    """
    bits = np.ascontiguousarray(scales, dtype=np.float32).view(np.uint32)
    return ((bits + np.uint32(0xFFF)) & ~np.uint32(0xFFF)).view(np.float32)


def _block_bytes(page_size: int, head_dim: int, kv_type: str) -> int:
    """Of the keys, or the values, of one page, layer and head."""
    size = _padded(page_size)
    elements = size * _padded(head_dim) * np.dtype(ELEMENTS[kv_type]).itemsize
    return elements + (size * SCALE.itemsize if kv_type == "q8" else 0)


def _padded(number: int) -> int:
    return -(-number // GROUP) * GROUP


def _untouched(shape: tuple[int, ...]) -> Array:
    """Zeroed bytes that take memory when they are written to, in large pages where the system has them: keys are read
    from all over, and with small pages looking up where they are takes longer than the arithmetic."""
    size = max(1, math.prod(shape))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Private: memory that is shared with children of the process gets no large pages on most systems.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    else:
        memory = mmap.mmap(-1, size)
    return np.frombuffer(memory, dtype=np.uint8)[: math.prod(shape)].reshape(shape)
