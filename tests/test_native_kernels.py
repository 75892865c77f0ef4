"""The native kernels against plain arithmetic: every type, every instruction set of this machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from outrider.native.library import library, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}")

Array = np.ndarray[Any, Any]
BY_BLOCK = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
BY_SUPER = ("Q4_K", "Q5_K", "Q6_K")
PLAIN = ("F16", "F32")
# Where half-precision scales stand in a stored block.
SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)}
SCALES |= {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def stored(kind: str, rows: int, columns: int, seed: int = 0) -> tuple[Array, Array]:
    """A matrix of random bits as a file has it, and its values."""
    random = np.random.default_rng(seed)
    if kind in PLAIN:
        values = random.normal(size=(rows, columns)).astype(np.float16 if kind == "F16" else np.float32)
        return values.view(np.uint8).reshape(-1), values.astype(np.float32)
    size, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, size=(rows * columns // size, num_bytes), dtype=np.uint8)
    for at in SCALES[kind]:
        scales = random.normal(scale=0.02, size=(len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    raw = blocks.reshape(rows, -1)
    return raw.reshape(-1), quants.dequantize(raw, GGMLQuantizationType[kind])


def rounded(x: Array, kind: str) -> Array:
    """Activations as the kernels see them: int8 with a scale for every 32 or 256."""
    if kind in PLAIN:
        return x.astype(np.float64)
    parts = x.reshape(len(x), -1, 256 if kind in BY_SUPER else 32)
    most = np.abs(parts).max(axis=-1, keepdims=True)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
    return (np.rint(parts * inverse).astype(np.float64) * (most / np.float32(127))).reshape(x.shape)


@pytest.mark.parametrize("kind", [*BY_BLOCK, *BY_SUPER, *PLAIN])
def test_the_files_own_values(isa: str, kind: str) -> None:
    from outrider.native.binding import Packed

    raw, values = stored(kind, rows=37, columns=512)
    packed = Packed(kind, raw, 37, 512)
    assert np.array_equal(packed.rows(np.arange(37)), values)
    padding = -37 % library().outrider_lanes() * len(raw) // 37  # the last tile is filled up
    assert packed.memory.nbytes <= 1.1 * len(raw) + 1.1 * padding


@pytest.mark.parametrize("kind", [*BY_BLOCK, *BY_SUPER, *PLAIN])
def test_some_rows_of_a_matrix(isa: str, kind: str) -> None:
    """In any order, and with the bits of the whole."""
    from outrider.native.binding import Packed

    raw, values = stored(kind, rows=37, columns=512)
    packed, chosen = Packed(kind, raw, 37, 512), np.array([36, 0, 17, 18, 3, 35, 1])
    taken = packed.take(chosen)
    assert taken.matrix.rows == 7 and taken.is_sound
    assert np.array_equal(taken.rows(np.arange(7)), values[chosen])
    x = np.random.default_rng(1).normal(size=(3, 512)).astype(np.float32)
    assert np.array_equal(taken.multiply(x), packed.multiply(x)[:, chosen])


@pytest.mark.parametrize("kind", [*BY_BLOCK, *BY_SUPER, *PLAIN])
def test_products(isa: str, kind: str) -> None:
    from outrider.native.binding import Packed

    columns = 768 if kind in BY_SUPER else 96
    raw, values = stored(kind, rows=41, columns=columns)
    packed = Packed(kind, raw, 41, columns)
    random = np.random.default_rng(1)
    x = (random.normal(size=(21, columns)) * np.exp(random.normal(size=(21, columns)))).astype(np.float32)
    x[3] = 0.0
    got = packed.multiply(x)
    exact = rounded(x, kind) @ values.T.astype(np.float64)
    scale = np.abs(rounded(x, kind)) @ np.abs(values.T.astype(np.float64)) + 1e-6
    assert np.abs((got - exact) / scale).max() < 2e-6
    for count in range(1, 21):  # each row alone, and in any company
        assert np.array_equal(packed.multiply(x[:count]), got[:count])
        assert np.array_equal(packed.multiply(x[count : count + 1]), got[count : count + 1])


@pytest.mark.parametrize("columns", [1, 3, 6, 7, 50])
def test_floats_of_any_width(isa: str, columns: int) -> None:
    from outrider.native.binding import Packed

    raw, values = stored("F32", rows=5, columns=columns)
    x = np.random.default_rng(2).normal(size=(9, columns)).astype(np.float32)
    assert np.allclose(Packed("F32", raw, 5, columns).multiply(x), x @ values.T, atol=1e-5)


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K"])
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_what_is_broken_is_seen(isa: str, kind: str, broken: float) -> None:
    """A NaN or an infinity in a row is not rounded away, and stays in its row."""
    from outrider.native.binding import Packed

    raw, _ = stored(kind, rows=8, columns=512)
    x = np.ones((3, 512), dtype=np.float32)
    x[1, 300] = broken
    got = Packed(kind, raw, 8, 512).multiply(x)
    assert np.isnan(got[1]).all() and np.isfinite(got[[0, 2]]).all()


def as_numbers(stored: Array, rows: int) -> Array:
    values: Array = quants.dequantize(stored.reshape(rows, -1), GGMLQuantizationType.Q4_1)
    return values


def test_numbers_in_four_bits() -> None:
    """Closer than the range of each block cut in 15 steps, and what has 16 levels comes back as it was."""
    from outrider.native.binding import as_q4_1

    random = np.random.default_rng(0)
    x = random.normal(size=(40, 96)).astype(np.float32)
    usual = quants.quantize(x, GGMLQuantizationType.Q4_1)
    errors = [np.square(as_numbers(one, 40) - x).sum() for one in (as_q4_1(x), usual)]
    assert errors[0] < 0.9 * errors[1] < 0.9 * 0.01 * np.square(x).sum()
    levels = random.integers(0, 16, size=(9, 64)).astype(np.float32)
    levels[:, ::32], levels[:, 1::32] = 0, 15
    for scale, low in ((0.25, -2.0), (1.0, 0.0), (2.0**-20, 3 * 2.0**-20), (0.0, 5.5), (0.0, 0.0)):
        assert np.array_equal(as_numbers(as_q4_1(low + scale * levels), 9), low + scale * levels)


def test_columns_that_count_more_are_closer() -> None:
    from outrider.native.binding import as_q4_1

    random = np.random.default_rng(1)
    x, counts = random.normal(size=(64, 64)).astype(np.float32), np.exp(2 * random.normal(size=64)).astype(np.float32)
    errors = [np.square(as_numbers(as_q4_1(x, by), 64) - x).mean(axis=0) for by in (counts, None)]
    assert (counts * errors[0]).sum() < 0.8 * (counts * errors[1]).sum()
    assert errors[0].sum() > errors[1].sum()


def test_threads_round_alike() -> None:
    from outrider.native.binding import as_q4_1

    x, found = np.random.default_rng(2).normal(size=(301, 64)).astype(np.float32), []
    for threads in (1, 3):
        library().outrider_set_threads(threads)
        found.append(as_q4_1(x).tobytes())
    library().outrider_set_threads(1)
    assert found[0] == found[1]
