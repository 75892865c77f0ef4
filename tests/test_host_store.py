"""The KV cache of the native backend: contents are read back as they are, in every type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.kv.host_store import ELEMENTS, HostStore, round_scale

Array = np.ndarray[Any, Any]
LAYERS, HEADS, DIM, SIZE = 2, 3, 20, 5
STEPS = {"f32": 0.0, "f16": 2.0**-11, "q8": 1 / 127}  # relative to the largest of a head


def filled(kv_type: str, seed: int = 0) -> tuple[HostStore, Array, list[int]]:
    store = HostStore(LAYERS, 4, HEADS, DIM, SIZE, kv_type)
    places = [0, 4, 7, 19, 12]
    contents = np.random.default_rng(seed).normal(size=(LAYERS, len(places), 2 * HEADS * DIM)).astype(np.float32)
    store.write(places, contents)
    return store, contents, places


@pytest.mark.parametrize("kv_type", ELEMENTS)
def test_contents_are_close_to_what_was_written(kv_type: str) -> None:
    store, contents, places = filled(kv_type)
    assert np.abs(store.read(places) - contents).max() <= STEPS[kv_type] * np.abs(contents).max()


@pytest.mark.parametrize("kv_type", ELEMENTS)
def test_what_is_read_and_written_again_keeps_its_bits(kv_type: str) -> None:
    """Snapshots, swaps and moves must not change what a sequence sees, however often."""
    store, contents, places = filled(kv_type)
    contents[0, 1] = 0.0
    contents[1, 2, 3] = 1e4
    store.write(places, contents)
    before = store.whole.copy()
    other = HostStore(LAYERS, 4, HEADS, DIM, SIZE, kv_type)
    other.restore_places(places, store.save_places(places))
    assert np.array_equal(other.whole, before)
    store.move_places(places, [1, 2, 3, 5, 6])
    assert np.array_equal(store.read([1, 2, 3, 5, 6]), store.read(places))


def test_half_precision_saturates() -> None:
    store, contents, places = filled("f16")
    store.write(places, contents * 1e6)
    assert np.isfinite(store.read(places)).all() and store.read(places).max() == 65504


@pytest.mark.parametrize("kv_type", ELEMENTS)
def test_a_page_takes_what_is_said(kv_type: str) -> None:
    assert HostStore(LAYERS, 4, HEADS, DIM, SIZE, kv_type).whole.nbytes == 4 * HostStore.bytes_of_page(
        LAYERS, HEADS, DIM, SIZE, kv_type
    )


def test_scales_are_rounded_up_to_twelve_bits() -> None:
    scales = np.random.default_rng(0).exponential(size=1000).astype(np.float32)
    rounded = round_scale(scales)
    assert (rounded >= scales).all() and (rounded <= scales * (1 + 2.0**-10)).all()
    assert np.array_equal(round_scale(rounded), rounded)
    assert np.array_equal(rounded * np.float32(127) / np.float32(127), rounded)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="says how memory is mapped")
def test_its_memory_may_lie_in_large_pages() -> None:
    """Memory shared between processes gets none on most systems, whatever is asked for."""
    store = HostStore(2, 512, HEADS, 64, 16, "f16")
    at = store.whole.ctypes.data
    perms, flags = "", ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span, _, rest = line.partition(" ")
        if "-" in span and not span.endswith(":"):
            begin, end = (int(side, 16) for side in span.split("-"))
            if begin <= at < end:
                perms = rest[:4]
        elif span == "VmFlags:" and perms:
            flags = rest
            break
    assert perms == "rw-p" and "hg" in flags.split()
