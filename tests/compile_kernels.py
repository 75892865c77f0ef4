"""Compile the GPU's kernels for some generations of GPUs, which needs none: do they compile, and how much shared memory
do they take? Needs Triton:

python tests/compile_kernels.py
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from outrider.backends.cuda import attending, choosing, judging, launching, products

SHARED = {80: 166_912, 86: 101_376, 90: 232_448}  # bytes a program may have: A100, 30xx, H100
INTEGERS = "i32"


def compiled(kernel: Any, kind: str, capability: int, constants: dict[str, Any], options: dict[str, int]) -> int:
    """The shared memory of a kernel whose tensors are of this type."""
    fp32 = {"sums", "peaks", "weights", "turns", "head_norm", "weight", "logits", "scores", "settings", "masses"}
    fp32 |= {"probs", "left"}
    ints = {"firsts", "counts", "lengths", "splits", "tables", "roots", "paths", "seats", "lasts", "low_bits"}
    ints |= {"high_bits", "table", "groups", "places", "ids", "asked", "chosen", "rows", "jobs", "positions"}
    floats = {"floor", "scale"}
    numbers = {"num_rows", "num_outputs", "num_inputs", "width", "held_width", "num_splits", "window", "page_size"}
    numbers |= {"max_splits", "stride", "out_stride", "asked_width", "columns", "blocks", "num_jobs"}
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in numbers:
            signature[name] = INTEGERS
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif name in floats:
            signature[name] = "fp32"
        else:
            samples = kernel.fn.__module__.endswith(("choosing", "judging")) and kernel is not choosing._spread
            whole = name in ints or (samples and name == "out")
            drafted = samples and name == "tokens"
            signature[name] = "*i64" if drafted else "*i32" if whole else "*fp32" if name in fp32 else f"*{kind}"
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return int(made.metadata.shared)


def few_rows(capability: int) -> None:
    for kind, sizes in products.TILES.items():
        for rows, (per, wide, warps, stages) in sizes.items():
            per_input = (per * (2 if kind == "gated" else 1) + rows) * 2
            wide, stages = launching.fitting(SHARED[capability], 0, per_input, wide, stages)
            constants = {
                "NORM": kind != "plain",
                "GATED": kind == "gated",
                "ADD": kind == "plain",
                "BIAS": kind == "norm",
                "ROWS": rows,
                "OUTPUTS": per,
                "INPUTS": wide,
                "OVERLAP": capability >= 90,
            }
            options = {"num_warps": warps, "num_stages": stages}
            shared = compiled(products._product, "bf16", capability, constants, options)
            check(f"product, {kind}, {rows} rows", capability, shared)


def attention(capability: int) -> None:
    for pairs, (keys, warps, stages) in attending.LOOKING.items():
        keys, stages = launching.fitting(SHARED[capability], pairs * 128 * 2, 2 * 128 * 2, keys, stages)
        for tree in ("", "masks", "paths"):
            constants = {
                "HEADS": 32,
                "KV_HEADS": 8,
                "DIM": 128,
                "DIM_BLOCK": 128,
                "PAIRS": pairs,
                "KEYS": keys,
                "TREE": tree,
                "WINDOWED": tree == "",
                "SKIP": int(tree == ""),
                "OVERLAP": capability >= 90,
            }
            options = {"num_warps": warps, "num_stages": stages}
            shared = compiled(attending._attend, "bf16", capability, constants, options)
            check(f"attention, {pairs} pairs, {tree or 'chains'}", capability, shared)


def others(capability: int) -> None:
    overlap = {"OVERLAP": capability >= 90}
    shape = {"HEADS": 32, "DIM": 128, "DIM_BLOCK": 128}
    few = {"num_warps": 4}
    check(
        "combine", capability, compiled(attending._combine, "bf16", capability, {**shape, "SPLITS": 32, **overlap}, few)
    )
    turn = {"HEADS": 32, "KV_HEADS": 8, "PAIRS": 64, "PAIR_BLOCK": 64, "TURNING": 64, "NORM": True, **overlap}
    check("turn", capability, compiled(attending._turn, "bf16", capability, turn, {"num_warps": 1}))
    norm = {"WEIGHTED": True, "BLOCK": 4096, **overlap}
    check("norm", capability, compiled(products._norm, "bf16", capability, norm, few))
    check("gate", capability, compiled(products._gate, "bf16", capability, {"BLOCK": 1024}, few))
    moved = {"PER": 2, "STEP": 128, "BLOCK": 512}
    check("advance", capability, compiled(attending._advance, "i32", capability, moved, few))
    check("peaks", capability, compiled(choosing._peaks, "fp32", capability, {"BLOCK": 4096}, few))
    long = {"BLOCK": 4096, "BLOCKS": 32}
    check("race", capability, compiled(choosing._race, "fp32", capability, long, few))
    check("best", capability, compiled(choosing._best, "fp32", capability, {"BLOCKS": 32}, few))
    check("spread", capability, compiled(choosing._spread, "fp32", capability, long, few))
    for weighed in (False, True):
        judged = {**long, "WEIGHED": weighed}
        check("walk", capability, compiled(judging._walk, "fp32", capability, judged, few))
        check("rest", capability, compiled(judging._rest, "fp32", capability, judged, few))
    check("last", capability, compiled(judging._last, "fp32", capability, {"BLOCKS": 32}, few))


def check(name: str, capability: int, shared: int) -> None:
    print(f"sm_{capability} {name:<32}{shared:>8} bytes of shared memory", flush=True)
    assert shared <= SHARED[capability], f"{name} takes more than sm_{capability} has"


if __name__ == "__main__":
    for generation in SHARED:
        few_rows(generation)
        attention(generation)
        others(generation)
