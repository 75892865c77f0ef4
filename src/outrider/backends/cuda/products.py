"""Products of a few rows with a matrix, and what surrounds them, in Triton.

They are bound by reading weights, so a program takes some outputs of ALL rows and reads its weights once. What
surrounds a product is done on the way: the norm before it (a factor per row, since the norm's weight is in the matrix),
bias, residual, SiLU gate. For more rows cuBLAS is as fast as anybody.

A kernel may be launched while the one before it still runs and wait for it inside (`gdc_wait`): that hides the launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.backends.cuda.launching import fitted, launch

FEW = 32  # rows our own products are for; measured on an H200 against cuBLAS, as is the table
SIZES = (16, 32)
TILES = {  # outputs and inputs of a step, warps, stages
    "plain": {16: (16, 512, 2, 4), 32: (64, 256, 4, 4)},
    "norm": {16: (64, 256, 4, 4), 32: (64, 256, 4, 4)},
    "gated": {16: (64, 128, 4, 3), 32: (64, 128, 4, 3)},
}


@triton.jit(do_not_specialize=["num_rows"])  # or it would be compiled three times
def _product(
    x,
    w,
    out,
    added,
    bias,
    num_rows,
    num_outputs,
    num_inputs,
    floor,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out[r, n] = sum over k of x[r, k] w[n, k]. GATED: silu of that, times the same with the second half of w."""
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    r = tl.arange(0, ROWS)
    k = tl.arange(0, INPUTS)
    is_row = r < num_rows
    inside = tl.minimum(n, num_outputs - 1)
    w_at = w + inside[:, None].to(tl.int64) * num_inputs + k[None, :]
    up_at = w_at + num_outputs.to(tl.int64) * num_inputs
    x_at = x + r[None, :] * num_inputs + k[:, None]
    total = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    ups = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    squares = tl.zeros([INPUTS, ROWS], dtype=tl.float32)
    if OVERLAP:
        gdc_wait()
    for _ in range(0, num_inputs, INPUTS):
        weights = tl.load(w_at, eviction_policy="evict_first")
        fed = tl.load(x_at, mask=is_row[None, :], other=0.0)
        total = tl.dot(weights, fed, total, input_precision="ieee")
        if GATED:
            ups = tl.dot(tl.load(up_at, eviction_policy="evict_first"), fed, ups, input_precision="ieee")
            up_at += INPUTS
        if NORM:
            squares += fed.to(tl.float32) * fed.to(tl.float32)
        w_at += INPUTS
        x_at += INPUTS
    if OVERLAP:
        gdc_launch_dependents()
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(squares, axis=0) + floor)
        total *= scale[None, :]
        ups *= scale[None, :]
    if BIAS:
        total += tl.load(bias + inside).to(tl.float32)[:, None]
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * ups
    at = r[None, :] * num_outputs + n[:, None]
    kept = is_row[None, :] & (n < num_outputs)[:, None]
    if ADD:
        total += tl.load(added + at, mask=kept, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=kept)


@triton.jit
def _norm(x, out, weight, width, floor, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """out = x / |x|, times a weight. One row."""
    at = tl.program_id(0).to(tl.int64) * width + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < width
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    row *= 1.0 / tl.sqrt(tl.sum(row * row, axis=0) + floor)
    if WEIGHTED:
        row *= tl.load(weight + tl.arange(0, BLOCK), mask=inside, other=0.0)
    tl.store(out + at, row.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate(gate_up, out, width, BLOCK: tl.constexpr):
    """out = silu(gate) * up. One row and a block of it."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


def product(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    *,
    norm: float | None = None,
    bias: torch.Tensor | None = None,
    added: torch.Tensor | None = None,
    tile: int | None = None,
) -> None:
    """out = x w^T, perhaps of x / |x|, with a bias or a residual. x [rows, inputs], w [outputs, inputs].

    norm: eps times the inputs. tile: rows of the kernel, where it must be the same for any number of them.
    """
    if _is_cublas(x):
        _product_of_many(x, w, out, norm, bias, added)
    else:
        _product_of_few("plain" if norm is None else "norm", x, w, out, len(w), norm, bias, added, tile)


def gated_product(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, *, norm: float, tile: int | None = None) -> None:
    """out = silu(x g^T) * (x u^T) of x / |x|; w holds g and then u. [2 * outputs, inputs]"""
    rows, outputs = len(x), len(w) // 2
    if not _is_cublas(x):
        _product_of_few("gated", x, w, out, outputs, norm, None, None, tile)
        return
    gate_up = x.new_empty(rows, 2 * outputs)
    _product_of_many(x, w, gate_up, norm, None, None)
    launch(_gate, (rows, triton.cdiv(outputs, 1024)), gate_up, out, outputs, BLOCK=1024, overlap=None)


def _is_cublas(x: torch.Tensor) -> bool:
    """Whether this is not for our kernels: many rows, or inputs that the tensor cores' steps do not divide."""
    return len(x) > FEW or x.shape[1] % 16 != 0


def _product_of_few(
    kind: str,
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    outputs: int,
    norm: float | None,
    bias: torch.Tensor | None,
    added: torch.Tensor | None,
    tile: int | None,
) -> None:
    rows, inputs = x.shape
    padded = tile or next(size for size in SIZES if size >= rows)
    assert rows <= padded, f"{rows} rows in a tile of {padded}"
    per, wide, warps, stages = TILES[kind][padded]
    bytes_per_input = (per * (2 if kind == "gated" else 1) + padded) * w.element_size()
    wide, stages = fitted(x.device, 0, bytes_per_input, wide, stages)
    launch(
        _product,
        (triton.cdiv(outputs, per),),
        *(x, w, out, x if added is None else added, x if bias is None else bias, rows, outputs, inputs, norm or 0.0),
        NORM=norm is not None,
        GATED=kind == "gated",
        ADD=added is not None,
        BIAS=bias is not None,
        ROWS=padded,
        OUTPUTS=per,
        INPUTS=min(wide, inputs & -inputs),  # a power of two that divides the inputs
        num_warps=warps,
        num_stages=stages,
    )


def normed(x: torch.Tensor, out: torch.Tensor, *, norm: float, weight: torch.Tensor | None = None) -> None:
    """out = x / |x|, times a weight."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    launch(
        _norm, (rows,), x, out, x if weight is None else weight, width, norm,
        WEIGHTED=weight is not None, BLOCK=block, num_warps=4 if block <= 4096 else 8,
    )  # fmt: skip


def _product_of_many(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    norm: float | None,
    bias: torch.Tensor | None,
    added: torch.Tensor | None,
) -> None:
    if norm is not None:
        short = torch.empty_like(x)
        normed(x, short, norm=norm)
        x = short
    if out.dtype != x.dtype:
        out.copy_(torch.mm(x, w.t(), out_dtype=out.dtype) if x.is_cuda else x.to(out.dtype) @ w.t().to(out.dtype))
    elif bias is not None:
        torch.addmm(bias, x, w.t(), out=out)
    elif added is not None:
        torch.addmm(added, x, w.t(), out=out)
    else:
        torch.mm(x, w.t(), out=out)
