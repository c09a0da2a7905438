"""Projections with weights packed for the native kernels. A row's result has the same bits in every batch.

A gated one is silu(gate) * up of a projection to both, with the same bits as the two ops one after the other.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych_kernels.cpu.loader import Isa
from triptych_kernels.cpu.panel_memory import PanelMemory
from triptych_kernels.ops import Linear
from triptych_kernels.quantized import Weight, as_tensor
from triptych_kernels.reference import REFERENCE

_KIND_OF = {torch.bfloat16: 0, torch.float32: 1, torch.int8: 2}
_MAX_INT8 = 127
_QUANTIZED_AT_ONCE = 1 << 16

_panel_memory = PanelMemory()


class NativeLinear:
    """x W^T + b over packed panels of W: bf16, fp32, or int8 with one scale per output."""

    __slots__ = (
        "_dtype",
        "_greedy_linear",
        "_linear",
        "_num_columns",
        "_out_dtype",
        "_tensors",
        "in_features",
        "num_bytes",
        "out_features",
        "plan",
        "rows_at_once",
    )

    def __init__(
        self,
        isa: Isa,
        weight: Tensor,
        bias: Tensor | None,
        scales: Tensor | None,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        num_gated: int = 0,
    ) -> None:
        """weight: [N, K] in bf16, fp32 or int8.  dtype: of x.  scales: [N] fp32 of an int8 weight.

        num_gated: the number of gates, if weight, bias and scales are `alternating`.
        isa: the instruction set of the kernels.
        """
        num_outputs, self.in_features = weight.shape
        self.out_features = num_gated or num_outputs
        panels = _panel_memory.take(packed_bytes(isa, weight))
        pack_panels(isa, weight, panels)
        self._tensors = [panels, *(_padded(isa, vector) for vector in (bias, scales) if vector is not None)]
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        self.num_bytes = sum(tensor.nbytes for tensor in self._tensors)
        self._dtype, self._out_dtype = dtype, out_dtype
        self._num_columns = 2 * num_gated or num_outputs
        self._linear, self._greedy_linear = isa.native.linear, isa.native.greedy_linear
        self.plan = isa.native.make_linear(
            _KIND_OF[weight.dtype],
            dtype is torch.float32,
            out_dtype is torch.bfloat16,
            num_outputs,
            self.in_features,
            addresses[0],
            0 if bias is None else addresses[1],
            0 if scales is None else addresses[-1],
            num_gated,
            isa.with_amx and dtype is torch.bfloat16,
        )
        # The maximum number of rows that are multiplied together: as many as the caches keep.
        self.rows_at_once: int = isa.native.rows_at_once(self.plan)

    def __call__(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        """See ops.Linear.

        x: in the dtype it was packed for, on the CPU, the last dimension contiguous.
        """
        row_stride = self._checked_stride(x)
        num_rows = x.shape[0]
        added = 0 if addend is None else self._checked_addend(addend, num_rows)
        out = torch.empty((num_rows, self.out_features), dtype=self._out_dtype)
        self._linear(self.plan, x.data_ptr(), row_stride, out.data_ptr(), num_rows, added)
        return out

    def greedy(self, x: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See the reference of greedy_linear; for a linear whose results are fp32. x: as for a call."""
        row_stride = self._checked_stride(x)
        num_rows, num_kept = x.shape[0], kept.shape[0]
        products = torch.empty((num_kept, self.out_features), dtype=torch.float32)
        highest = torch.empty(num_rows, dtype=torch.float32)
        tokens = torch.empty(num_rows, dtype=torch.int64)
        out_rows = None
        if num_kept:
            out_rows = torch.full((num_rows,), -1, dtype=torch.int32)
            out_rows[kept] = torch.arange(num_kept, dtype=torch.int32)
        self._greedy_linear(
            self.plan,
            x.data_ptr(),
            row_stride,
            num_rows,
            products.data_ptr(),
            0 if out_rows is None else out_rows.data_ptr(),
            highest.data_ptr(),
            tokens.data_ptr(),
        )
        return products, highest, tokens

    def keeps(self, dtype: torch.dtype) -> bool:
        """Whether rows of this dtype give rows of the same dtype."""
        return self._dtype is dtype and self._out_dtype is dtype

    @property
    def is_fp32(self) -> bool:
        return self._out_dtype is torch.float32

    def _checked_addend(self, addend: Tensor, num_rows: int) -> int:
        """Its address."""
        wanted = (num_rows, self._num_columns)
        if (
            addend.shape != wanted
            or addend.dtype is not torch.float32
            or not (addend.is_contiguous() and addend.is_cpu)
        ):
            raise ValueError(
                f"the addend is {addend.dtype} {tuple(addend.shape)}: expected torch.float32 {wanted}, "
                "contiguous on the CPU"
            )
        return addend.data_ptr()

    def _checked_stride(self, x: Tensor) -> int:
        try:
            width, (row_stride, stride) = x.shape[1], x.stride()
        except (IndexError, ValueError):
            raise ValueError(_complaint(x, self.in_features, self._dtype)) from None
        if (
            width != self.in_features
            or x.dtype is not self._dtype
            or (stride != 1 and width > 1)
            or not x.is_cpu
        ):
            raise ValueError(_complaint(x, self.in_features, self._dtype))
        return row_stride


def greedy_linear(linear: Linear, x: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See the reference. The products of rows that are not kept are never written."""
    if isinstance(linear, NativeLinear) and linear.is_fp32:
        return linear.greedy(x, kept)
    return REFERENCE.greedy_linear(linear, x, kept)


def pack_linear(
    isa: Isa,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    quantization: str = "",
) -> Linear:
    """See ops.PackLinear.  bf16 and fp32 weights, int8 from either; the reference serves other dtypes.

    isa: the instruction set of the kernels.
    """
    weight = as_tensor(weight)
    out_dtype = weight.dtype if out_dtype is None else out_dtype
    if not _is_served(weight, bias, out_dtype, quantization):
        return REFERENCE.pack_linear(weight, bias, out_dtype=out_dtype, quantization=quantization)
    narrow, scales = quantize_int8(weight) if quantization else (weight, None)
    return NativeLinear(isa, narrow, bias, scales, weight.dtype, out_dtype)


def pack_gated_linear(
    isa: Isa,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    quantization: str = "",
) -> Linear:
    """See ops.Ops.pack_gated_linear; otherwise as pack_linear."""
    weight = as_tensor(weight)
    out_dtype = weight.dtype if out_dtype is None else out_dtype
    if not _is_served(weight, bias, out_dtype, quantization) or weight.shape[0] % 2:
        return REFERENCE.pack_gated_linear(weight, bias, out_dtype=out_dtype, quantization=quantization)
    num_gated = weight.shape[0] // 2
    narrow, scales = quantize_int8(weight) if quantization else (weight, None)
    bias, scales = (
        None if vector is None else alternating(isa, vector.detach()[:, None])[:, 0]
        for vector in (bias, scales)
    )
    return NativeLinear(
        isa, alternating(isa, narrow.detach()), bias, scales, weight.dtype, out_dtype, num_gated
    )


def _is_served(weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, quantization: str) -> bool:
    """Whether the kernels compute it. ValueError for what no implementation computes."""
    if quantization not in ("", "int8"):
        raise ValueError(f"quantization is {quantization!r}: the CPU has 'int8' or none")
    if weight.dim() != 2 or not weight.numel() or (bias is not None and bias.shape != weight.shape[:1]):
        shape = None if bias is None else tuple(bias.shape)
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}, bias {shape}: expected [N, K] and [N], N and K >= 1"
        )
    served = (torch.bfloat16, torch.float32)
    if quantization and weight.dtype not in served:
        raise ValueError(f"int8 on a CPU needs bf16 or fp32 weights, not {weight.dtype}")
    return weight.dtype in served and out_dtype in served and weight.is_cpu


def alternating(isa: Isa, gate_up: Tensor) -> Tensor:
    """[2 F, K] as panels of gates alternating with those of the same columns' ups, F padded to whole ones."""
    width = isa.native.panel_columns
    halves = gate_up.unflatten(0, (2, -1))
    halves = F.pad(halves, (0, 0, 0, -halves.shape[1] % width))
    return halves.unflatten(1, (-1, width)).transpose(0, 1).flatten(0, 2)


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] as int8 within -127 to 127, with [N] fp32 scales: the largest of each row over 127."""
    quantized = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0], dtype=torch.float32)
    # As many rows at a time as stay in a cache in fp32.
    num_rows = max(1, _QUANTIZED_AT_ONCE // weight.shape[1])
    for rows, out, scale in zip(
        weight.detach().split(num_rows), quantized.split(num_rows), scales.split(num_rows), strict=True
    ):
        wide = rows.float()
        torch.div(wide.abs().amax(1), _MAX_INT8, out=scale)
        # A row of zeros may have any scale.
        scale.masked_fill_(scale == 0, 1.0)
        out.copy_((wide / scale[:, None]).round_().clamp_(-_MAX_INT8, _MAX_INT8))
    return quantized, scales


def packed_bytes(isa: Isa, weight: Tensor) -> int:
    """The packed size of [N, K] in bf16, fp32 or int8."""
    return isa.native.packed_bytes(_KIND_OF[weight.dtype], *weight.shape)


def pack_panels(isa: Isa, weight: Tensor, panels: Tensor) -> None:
    """Pack [N, K] for the kernels.  panels: its `packed_bytes`, 64-byte aligned."""
    weight = weight.detach()
    if weight.stride(1) != 1 and weight.shape[1] > 1:
        weight = weight.contiguous()
    isa.native.pack_weight(
        _KIND_OF[weight.dtype], *weight.shape, weight.data_ptr(), weight.stride(0), panels.data_ptr()
    )


def _padded(isa: Isa, vector: Tensor) -> Tensor:
    """[N] as fp32, with zeros to whole panels."""
    width = isa.native.panel_columns
    padded = torch.zeros(-(-vector.numel() // width) * width, dtype=torch.float32)
    padded[: vector.numel()] = vector.detach()
    return padded


def _complaint(x: Tensor, in_features: int, dtype: torch.dtype) -> str:
    return (
        f"x is {x.dtype} {tuple(x.shape)} with strides {x.stride()} on {x.device}: "
        f"expected {dtype} [T, {in_features}] on the CPU, its last dimension contiguous"
    )
