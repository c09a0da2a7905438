"""Projections on a GPU: cuBLAS for speed, one Triton kernel for narrow weights and for fixed tiles.

Knows no layer: a weight is packed once and multiplied by any rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.gated_linear import GatedLinear
from triptych_kernels.quantized import Weight, as_tensor
from triptych_kernels.reference.linear import PlainLinear
from triptych_kernels.triton.activation import GATED

_FP8_MAX = 448.0
_INT8_MAX = 127.0


# No specialization on the number of rows, which changes from step to step.
@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    addend_ptr,
    out_ptr,
    x_stride,
    num_rows,
    num_outputs,
    num_inputs,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of x W^T * scales + bias + addend.

    One program sums all of K, in steps of BLOCK_K from the left.
    """
    # Tiles of rows are neighbours, so that programs that read the same weights run together.
    row = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    column = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    offset = tl.arange(0, BLOCK_K)
    is_row, is_column = row < num_rows, column < num_outputs
    x_start = x_ptr + row[:, None] * x_stride + offset[None, :]
    weight_start = weight_ptr + column[None, :] * num_inputs + offset[:, None]
    total = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for start in range(0, num_inputs, BLOCK_K):
        is_in_range = offset < num_inputs - start
        x = tl.load(x_start + start, mask=is_row[:, None] & is_in_range[None, :], other=0.0)
        weight = tl.load(weight_start + start, mask=is_column[None, :] & is_in_range[:, None], other=0.0)
        total = tl.dot(x, weight.to(x.dtype), total, input_precision="ieee")
    if HAS_SCALES:
        total *= tl.load(scales_ptr + column, mask=is_column, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    offsets, is_out = row[:, None] * num_outputs + column[None, :], is_row[:, None] & is_column[None, :]
    if HAS_ADDEND:
        total += tl.load(addend_ptr + offsets, mask=is_out, other=0.0)
    tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=is_out)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Tile sizes of one program of the kernel, and its launch options."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


# A row's sum has one order because the shape depends only on the weight, not on the number of rows.
# Weights with few outputs are cut into narrow tiles, so that a few rows occupy all processors too.
_FIXED_TILE = _Tile(rows=64, outputs=32, inputs=64, num_warps=4, num_stages=4)
_MIN_OUTPUTS_OF_LARGE_TILES = 16_384
# By rows: few rows need many narrow programs to use all of the memory's bandwidth.
_TILES = (
    (16, _Tile(rows=16, outputs=32, inputs=128, num_warps=4, num_stages=4)),
    (64, _Tile(rows=64, outputs=64, inputs=64, num_warps=4, num_stages=4)),
)
_LARGE_TILE = _Tile(rows=128, outputs=128, inputs=64, num_warps=8, num_stages=3)


def matmul(
    x: Tensor,
    weight: Tensor,
    *,
    scales: Tensor | None = None,
    bias: Tensor | None = None,
    addend: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    is_fixed: bool = False,
) -> Tensor:
    """x W^T * scales + bias + addend, in fp32 up to one rounding at the end.

    x: [T, K], rows contiguous; fp32, fp16 or bf16.  weight: [N, K] contiguous, of x's dtype or a narrower one
    whose numbers x's dtype holds exactly.  scales: [N] fp32.  bias: [N].  addend: [T, N] fp32 contiguous.
    out_dtype: None is x's.
    is_fixed: tiles of one shape whatever T is, so that a row has the same bits in every batch.
    Returns [T, N].
    """
    num_rows, num_inputs = x.shape
    num_outputs = weight.shape[0]
    if weight.shape[1] != num_inputs:
        raise ValueError(f"x has {num_inputs} columns, the weight takes {weight.shape[1]}")
    if x.stride(-1) != 1:
        raise ValueError(f"the columns of x must be contiguous; their stride is {x.stride(-1)}")
    if addend is not None and (addend.shape != (num_rows, num_outputs) or not addend.is_contiguous()):
        raise ValueError(f"the addend is {tuple(addend.shape)}, not contiguous {(num_rows, num_outputs)}")
    out = x.new_empty(num_rows, num_outputs, dtype=out_dtype or x.dtype)
    if num_rows == 0:
        return out
    tile = _fixed_tile(num_outputs, x.dtype) if is_fixed else _tile_for(num_rows, x.dtype)
    grid = (triton.cdiv(num_rows, tile.rows), triton.cdiv(num_outputs, tile.outputs))
    _linear_kernel[grid](
        x,
        weight,
        scales,
        bias,
        addend,
        out,
        x.stride(0),
        num_rows,
        num_outputs,
        num_inputs,
        HAS_SCALES=scales is not None,
        HAS_BIAS=bias is not None,
        HAS_ADDEND=addend is not None,
        BLOCK_T=tile.rows,
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def _fixed_tile(num_outputs: int, dtype: torch.dtype) -> _Tile:
    if num_outputs < _MIN_OUTPUTS_OF_LARGE_TILES or dtype is torch.float32:
        return _FIXED_TILE
    return _LARGE_TILE


def _tile_for(num_rows: int, dtype: torch.dtype) -> _Tile:
    for most_rows, tile in _TILES:
        if num_rows <= most_rows:
            return tile
    # Three stages of two fp32 tiles of the largest shape do not fit in shared memory.
    return _TILES[-1][1] if dtype is torch.float32 else _LARGE_TILE


class _TritonLinear:
    """x W^T * scales + b + addend by the kernel of this file."""

    def __init__(
        self,
        weight: Tensor,
        scales: Tensor | None,
        bias: Tensor | None,
        out_dtype: torch.dtype | None,
        is_fixed: bool,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.num_bytes = sum(part.nbytes for part in (weight, scales, bias) if part is not None)
        self._weight, self._scales, self._bias = weight.contiguous(), scales, bias
        self._out_dtype, self._is_fixed = out_dtype, is_fixed

    def __call__(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        return matmul(
            x,
            self._weight,
            scales=self._scales,
            bias=self._bias,
            addend=addend,
            out_dtype=self._out_dtype,
            is_fixed=self._is_fixed,
        )


def pack_linear(
    weight: Weight,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    quantization: str = "",
    activations: str = "exact",
    deterministic: bool = False,
) -> PlainLinear | _TritonLinear:
    """See ops.PackLinear. "fp8" stores e4m3 with one fp32 scale per output (absolute maximum over 448).

    Both quantizations apply to weights only: products are of x's dtype, which no `activations` change.
    deterministic: a row's result has the same bits in every batch.
    """
    weight = as_tensor(weight)
    if quantization:
        narrow, scales = _quantize(weight, quantization)
        return _TritonLinear(narrow, scales, bias, out_dtype, deterministic)
    if deterministic:
        return _TritonLinear(weight, None, bias, out_dtype, is_fixed=True)
    return PlainLinear(weight, bias, out_dtype)


def pack_gated_linear(
    weight: Weight,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    quantization: str = "",
    activations: str = "exact",
    gate: str = "silu",
    deterministic: bool = False,
) -> GatedLinear:
    """The gate's op of pack_linear's projection to gates over ups: [T, F] of a weight [2 F, K]."""
    gate_up = pack_linear(
        weight, bias, out_dtype=out_dtype, quantization=quantization, deterministic=deterministic
    )
    return GatedLinear(gate_up, GATED[gate])


def _quantize(weight: Tensor, quantization: str) -> tuple[Tensor, Tensor]:
    """The weight in 8 bits, and the fp32 scale of each output."""
    limits = {"int8": _INT8_MAX, "fp8": _FP8_MAX}
    if quantization not in limits:
        raise ValueError(f"quantization {quantization!r} is not one of {', '.join(limits)}")
    if quantization == "fp8" and weight.is_cuda and torch.cuda.get_device_capability(weight.device) < (8, 9):
        raise ValueError("quantization 'fp8' needs a GPU of compute capability 8.9 or more")
    wide = weight.float()
    # A row of zeros may have any scale but zero.
    scales = (wide.abs().amax(dim=1) / limits[quantization]).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = wide / scales[:, None]
    if quantization == "int8":
        return scaled.round().to(torch.int8), scales
    return scaled.to(torch.float8_e4m3fn), scales
