"""Norms as Triton kernels: one program holds whole rows, so that each row is read once.

Knows no layer and no batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# The minimum number of elements per program, if there are enough rows.
_NUMBERS_PER_PROGRAM = 1024
_NUMBERS_PER_WARP = 512
_MAX_WARPS = 16


# No specialization on the number of rows, which changes from step to step.
@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    residual_stride,
    num_rows,
    eps,
    HIDDEN: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """BLOCK_T rows, normed; with a residual, x is first added to it, in place and rounded."""
    row = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    column = tl.arange(0, BLOCK_H)
    is_in_range = column < HIDDEN
    is_number = (row < num_rows)[:, None] & is_in_range[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=is_number, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_start = residual_ptr + row[:, None] * residual_stride + column[None, :]
        sums = x + tl.load(residual_start, mask=is_number, other=0.0).to(tl.float32)
        rounded = sums.to(residual_ptr.dtype.element_ty)
        tl.store(residual_start, rounded, mask=is_number)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=is_in_range, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / HIDDEN + eps)
    normed = x * scale[:, None] * weight[None, :]
    out_start = out_ptr + row[:, None] * HIDDEN + column[None, :]
    tl.store(out_start, normed.to(out_ptr.dtype.element_ty), mask=is_number)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight, row by row, in fp32 up to one rounding at the end.

    x: [..., hidden].  weight: [hidden] contiguous.  Returns x's shape and dtype, contiguous.
    Source: Zhang and Sennrich 2019, eq. 4.
    """
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous()
    return _launch(rows, None, weight, eps).view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x, in place and rounded to its dtype; returns rms_norm(residual).

    x, residual: [T, hidden] of one dtype, rows contiguous; residual is written.  Returns [T, hidden].
    """
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"x is {tuple(x.shape)} of {x.dtype}, the residual {tuple(residual.shape)} of {residual.dtype}"
        )
    if x.stride(1) != 1 or residual.stride(1) != 1:
        raise ValueError(f"columns must be contiguous; their strides are {x.stride(1)}, {residual.stride(1)}")
    return _launch(x, residual, weight, eps)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    num_rows, hidden = x.shape
    if weight.shape != (hidden,) or not weight.is_contiguous():
        raise ValueError(f"rows have {hidden} numbers, the weight is {tuple(weight.shape)}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    block = triton.next_power_of_2(hidden)
    # Depends only on the row's size: a row is summed alike in every batch.
    rows_per_program = max(1, _NUMBERS_PER_PROGRAM // block)
    _rms_norm_kernel[(triton.cdiv(num_rows, rows_per_program),)](
        x,
        residual,
        weight,
        out,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        num_rows,
        eps,
        HIDDEN=hidden,
        HAS_RESIDUAL=residual is not None,
        BLOCK_T=rows_per_program,
        BLOCK_H=block,
        num_warps=min(_MAX_WARPS, max(1, rows_per_program * block // _NUMBERS_PER_WARP)),
    )
    return out
