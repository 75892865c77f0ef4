"""How a Triton kernel is launched: overlapped where the GPU can, as large as its shared memory allows."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from triton.compiler.compiler import max_shared_mem

from outrider.backends.cuda import novelty

INTERPRETED = bool(triton.knobs.runtime.interpret)
triton.knobs.runtime.kernel_load_end_hook.add(novelty.note)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, overlap: bool | None = True, **options: Any) -> None:
    """overlap: whether it may start before the kernel ahead of it is done; None: it knows nothing of that."""
    if INTERPRETED:
        for name in ("num_warps", "num_stages"):
            options.pop(name, None)
    if overlap is not None:
        options["OVERLAP"] = overlap = overlap and not INTERPRETED and _can_overlap(args[0].device)
    if overlap:
        options["launch_pdl"] = True
    kernel[grid](*args, **options)


@cache
def _can_overlap(device: torch.device) -> bool:
    """Kernels that wait for the one before them came with Hopper."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def fitted(device: torch.device, fixed: int, per_input: int, wide: int, stages: int) -> tuple[int, int]:
    if device.type != "cuda":
        return wide, stages
    return fitting(max_shared_mem(device.index or 0), fixed, per_input, wide, stages)


def fitting(room: int, fixed: int, per_input: int, wide: int, stages: int) -> tuple[int, int]:
    """Inputs of a step and stages, as far as a program's shared memory goes. The tables are for 227 KB and two bytes.

    fixed: bytes a program needs anyway. per_input: bytes of one input in a stage.
    """
    while fixed + per_input * wide * stages > room and wide > 16:
        if stages > 2:
            stages -= 1
        else:
            wide //= 2
    return wide, stages
