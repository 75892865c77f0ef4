"""The native library with checks of memory and undefined behaviour compiled in: its tests, then random models.

`make sanitize` runs this. The first thing that is wrong ends it, with the line of the source. It needs gcc.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outrider.backends.native import NativeBackend
from outrider.kv.pages import Pages
from outrider.models.gguf import GGUFFile
from outrider.native.binding import Packed
from outrider.native.build import build, find_compiler
from outrider.native.library import FOLDER, library

from native_models import BY_BLOCK, BY_SUPER, Shape, Truth, Walk, save_model, stored

TESTS = ("test_native_kernels.py", "test_native_sampling.py", "test_native.py", "test_native_head.py")
FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1", "-fno-omit-frame-pointer")
NUM_MODELS = 200


def main(arguments: Sequence[str]) -> int:
    if arguments == ["fuzz"]:
        return fuzz(NUM_MODELS)
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        built = build(FOLDER, Path(folder) / "checked.so", FLAGS)
        sys.stdout.write(f"built for {', '.join(built.instruction_sets)}\n")
        sys.stdout.flush()
        environment = {
            **os.environ,
            "OUTRIDER_NATIVE_LIBRARY": str(built.path),
            "LD_PRELOAD": _runtime(),
            "ASAN_OPTIONS": "detect_leaks=0",  # Python's own are many
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "OMP_NUM_THREADS": "1",
        }
        # What is wrong is written by the library itself: nothing may catch it.
        pytest = ["-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "--capture=no"]
        for command in ([*pytest, *(str(here / test) for test in TESTS)], [__file__, "fuzz"]):
            code = subprocess.run([sys.executable, *command], env=environment, cwd=here.parent).returncode
            if code:
                return code
    return 0


def _runtime() -> str:
    """Of the address checks: it must be loaded before Python, and with it what other libraries throw by."""
    checks, throwing = (_found(name) for name in ("libasan.so", "libstdc++.so.6"))
    if checks is None:
        sys.exit("libasan.so was not found; install gcc, and set CXX=g++ if another compiler comes first")
    return f"{checks} {throwing or ''}".strip()


def _found(name: str) -> str | None:
    asked = subprocess.run([*find_compiler(), f"-print-file-name={name}"], capture_output=True, text=True)
    path = asked.stdout.strip()
    return path if Path(path).is_absolute() else None


def fuzz(count: int) -> int:
    sets = library().outrider_isas().decode().split(",")
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(count):
            random = np.random.default_rng(seed)
            library().outrider_select(sets[seed % len(sets)].encode())
            shape = random_shape(random)
            try:
                _walk(Path(folder), shape, seed)
                _multiply(random)
            except BaseException:
                sys.stdout.write(f"\nmodel {seed}: {shape}\n")
                raise
            if seed % 20 == 19:
                sys.stdout.write(f"{seed + 1} models\n")
                sys.stdout.flush()
    return 0


def random_shape(random: np.random.Generator) -> Shape:
    """Any sizes for floats; whole blocks where weights are quantised."""

    def number(low: int, high: int) -> int:
        return int(random.integers(low, high + 1))

    kinds = [("F32",), ("F16", "F32"), ("F16", "F32", *BY_BLOCK), ("F16", *BY_BLOCK, *BY_SUPER)][number(0, 3)]
    block = 256 if "Q4_K" in kinds else 32 if "Q4_0" in kinds else 1
    kv_heads, group, layers, head_dim = number(1, 3), number(1, 9), number(2, 3), 2 * number(1, 45)
    if block > 1:  # all heads together are inputs of a quantised matrix
        head_dim = int(random.choice([8, 16, 32]))
        heads = block * (number(1, 4) if block == 32 else 1) // head_dim
        kv_heads = int(random.choice([one for one in (1, 2, 3, 4) if heads % one == 0]))
        group = heads // kv_heads
    return Shape(
        family=str(random.choice(["llama", "qwen2", "qwen3", "phi3"])),
        width=block if block > 1 else number(1, 90),
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary=2 * number(1, head_dim // 2),
        ffn=block if block > 1 else number(1, 90),
        layers=layers,
        vocab=number(2, 140),
        tied=bool(number(0, 1)),
        window=number(0, 1) * number(1, 30),
        slides=tuple(bool(number(0, 1)) for _ in range(layers)),
        kinds=kinds,
        page_size=number(1, 40),
    )


def _walk(folder: Path, shape: Shape, seed: int) -> None:
    path = save_model(folder / "model.gguf", shape, seed)
    pages = Pages(1000 // shape.page_size, shape.page_size)
    target, draft = (NativeBackend(GGUFFile(path), pages) for _ in range(2))
    alone = NativeBackend(GGUFFile(path), Pages(40, 16))
    truths = {"target": Truth(alone), "view": Truth(alone.view(1), alone)}
    truths["draft"] = truths["target"]

    def check(who: str, text: Sequence[int], row: Any, states: Mapping[int, Any]) -> None:
        wanted, wanted_states = truths[who].after(text)
        assert row is None or np.array_equal(row, wanted), f"{who} after {text}"
        assert all(np.array_equal(state, wanted_states[layer]) for layer, state in states.items()), f"{who}: {text}"

    Walk(target, draft, check, seed, threads=2, most=40).run(rounds=1)


def _multiply(random: np.random.Generator) -> None:
    """Single matrices, whose memory ends where they do: nothing behind them may be read."""
    for kind in ("F32", "F16", *BY_BLOCK, *BY_SUPER):
        block = 256 if kind in BY_SUPER else 32 if kind in BY_BLOCK else 1
        rows, columns = int(random.integers(1, 50)), block * int(random.integers(1, 4))
        raw = stored(kind, rows, columns, 0.1, random)
        packed = Packed(kind, raw.view(np.uint8).reshape(-1), rows, columns)
        packed.rows(np.arange(rows))
        packed.multiply(random.normal(size=(int(random.integers(1, 20)), columns)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
