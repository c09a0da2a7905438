"""Projections, through torch: packed for oneDNN on a CPU that has it, plain elsewhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych_kernels.gated_linear import GatedLinear
from triptych_kernels.quantized import Weight, as_tensor
from triptych_kernels.reference.activation import GATED

# The layout is chosen for this number of rows; it serves any number.
_EXPECTED_ROWS = 32


class PlainLinear:
    """x W^T + b by torch's own call."""

    def __init__(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._weight, self._bias, self._out_dtype = weight.contiguous(), bias, out_dtype

    def __call__(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        return _rounded(F.linear(x, self._weight, self._bias), addend, self._out_dtype)


class _PackedLinear:
    """x W^T + b with W in oneDNN's layout: faster, and the same bits for a row in every batch."""

    def __init__(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _EXPECTED_ROWS)
        self._bias, self._out_dtype = bias, out_dtype
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        return _rounded(self._multiply(x, self._packed, self._bias, "none", [], ""), addend, self._out_dtype)


def _rounded(product: Tensor, addend: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """The sum. Torch has rounded the product already, so a row whose addend is 0 keeps its bits."""
    if addend is not None:
        return (product + addend).to(product.dtype if out_dtype is None else out_dtype)
    return product if out_dtype is None else product.to(out_dtype)


def pack_linear(
    weight: Weight,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    quantization: str = "",
    activations: str = "exact",
) -> PlainLinear | _PackedLinear:
    """See ops.PackLinear. int8 weights are not supported here; rows are multiplied as they are."""
    if quantization:
        raise ValueError(f"quantization {quantization!r} needs native kernels, which are not available")
    weight = as_tensor(weight)
    if weight.device.type == "cpu" and _can_pack(weight.dtype):
        return _PackedLinear(weight, bias, out_dtype)
    return PlainLinear(weight, bias, out_dtype)


def pack_gated_linear(
    weight: Weight,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    quantization: str = "",
    activations: str = "exact",
    gate: str = "silu",
) -> GatedLinear:
    """The gate's op of pack_linear's projection to gates over ups: [T, F] of a weight [2 F, K]."""
    gate_up = pack_linear(weight, bias, out_dtype=out_dtype, quantization=quantization)
    return GatedLinear(gate_up, GATED[gate])


def round_to_int8(x: Tensor, group_size: int) -> Tensor:
    """What a product multiplies if its rows [T, K] are rounded to int8: [T, K] fp32.

    Of each group of a row, whole numbers times a scale, which makes the largest of them 127 or -127.
    """
    parts = []
    for group in x.float().split(group_size, 1):
        size = group.abs().amax(1, keepdim=True)
        # A number divided by a tensor is a product with its reciprocal, which rounds once more.
        scale = torch.full_like(size, 127.0) / size
        parts.append((group * scale).round().nan_to_num() * (size / 127.0))
    return torch.cat(parts, 1)


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype is torch.float32
