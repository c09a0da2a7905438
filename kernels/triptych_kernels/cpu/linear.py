"""Projections with weights packed for the native kernels. A row's result has the same bits in every batch.

A gated one is the activation of gates times ups of a projection to both, with the bits of the two ops one
after the other.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych_kernels.cpu.codes import Codes, find_codes
from triptych_kernels.cpu.elementwise import GATES, gate_and_mul
from triptych_kernels.cpu.loader import Isa
from triptych_kernels.cpu.panel_memory import PanelMemory
from triptych_kernels.gated_linear import GatedLinear
from triptych_kernels.ops import Linear
from triptych_kernels.quantized import JoinedWeight, QuantizedWeight, Weight, as_tensor
from triptych_kernels.reference import REFERENCE

logger = logging.getLogger(__name__)

_KIND_OF = {torch.bfloat16: 0, torch.float32: 1, torch.int8: 2}
# By bits, and whether rows are int8.
_KIND_OF_CODES = {(4, False): 3, (8, False): 4, (4, True): 5, (6, True): 6, (8, True): 7}
_MAX_INT8 = 127
_QUANTIZED_AT_ONCE = 1 << 16

_panel_memory = PanelMemory()


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Rows of a weight, all in one form, as the kernels read them."""

    layout: tuple[int, ...]  # see packed_bytes in linear.cpp
    panels: Tensor
    scales: Tensor | None = None  # [N] fp32, in whole panels: of int8 weights and some codes
    table: Tensor | None = None  # what codes stand for
    base: int = 0  # see codes.Numbers
    order: Tensor | None = None  # [K] int32: the inputs in the order of their groups
    bias: Tensor | None = None  # [N] fp32, in whole panels: of an expert

    @property
    def tensors(self) -> list[Tensor]:
        """Those that the kernels read."""
        tensors = (self.panels, self.scales, self.table, self.order, self.bias)
        return [tensor for tensor in tensors if tensor is not None]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def num_rows(self) -> int:
        return self.layout[1]

    @property
    def num_columns(self) -> int:
        return self.layout[2]


class NativeLinear:
    """x W^T + b over packed panels of W: bf16, fp32, int8 with one scale per output, or codes in groups."""

    __slots__ = (
        "_dtype",
        "_greedy_linear",
        "_linear",
        "_num_columns",
        "_num_parts",
        "_out_dtype",
        "_tensors",
        "_weight_rows",
        "arguments",
        "has_rows",
        "in_features",
        "num_bytes",
        "out_features",
        "plan",
        "rows_at_once",
    )

    def __init__(
        self,
        isa: Isa,
        parts: Sequence[Packed],
        bias: Tensor | None,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        num_gated: int = 0,
        gate: str = "silu",
    ) -> None:
        """parts: of the weight, one below the other.  dtype: of x.

        num_gated: the number of gates, if there is one part, and it and bias are `alternating`.
        gate: of elementwise.GATES.  isa: the instruction set of the kernels.
        """
        # By name, so that the same can be made of them again: see parts.py.
        self.arguments = {name: value for name, value in locals().items() if name not in ("self", "isa")}
        num_outputs, self.in_features = sum(part.num_rows for part in parts), parts[0].num_columns
        self.out_features = num_gated or num_outputs
        self._tensors: list[Tensor] = []
        numbers: list[int] = []
        first_row = 0
        for part in parts:
            rows = slice(first_row, first_row + part.num_rows)
            padded_bias = None if bias is None else in_panels(isa, bias[rows])
            read = (part.panels, padded_bias, part.scales, part.table)
            numbers += [*part.layout, *map(address_of, read), part.base, address_of(part.order)]
            self._tensors += [*part.tensors, *([] if padded_bias is None else [padded_bias])]
            first_row = rows.stop
        self.num_bytes = sum(tensor.nbytes for tensor in self._tensors)
        self._dtype, self._out_dtype = dtype, out_dtype
        self._num_columns, self._num_parts = 2 * num_gated or num_outputs, len(parts)
        # Whether `rows` is there for it.
        self.has_rows = len(parts) == 1 and not num_gated and parts[0].layout[0] in _KIND_OF_CODES.values()
        self._linear, self._greedy_linear = isa.native.linear, isa.native.greedy_linear
        self._weight_rows = isa.native.weight_rows
        self.plan = isa.native.make_linear(
            dtype is torch.float32,
            out_dtype is torch.bfloat16,
            num_gated,
            isa.with_amx and dtype is torch.bfloat16,
            GATES[gate],
            *numbers,
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
        """See the reference of greedy_linear; for a linear that `finds_largest`. x: as for a call."""
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

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight, [T, in_features] in the dtype of inputs.  indices: [T] int64."""
        indices = indices.contiguous()
        if indices.dim() != 1 or indices.dtype is not torch.int64 or not indices.is_cpu:
            raise ValueError(
                f"indices are {indices.dtype} {tuple(indices.shape)}: expected int64 [T] on the CPU"
            )
        out = torch.empty((indices.shape[0], self.in_features), dtype=self._dtype)
        self._weight_rows(self.plan, indices.data_ptr(), indices.shape[0], out.data_ptr())
        return out

    def keeps(self, dtype: torch.dtype) -> bool:
        """Whether rows of this dtype give rows of the same dtype."""
        return self._dtype is dtype and self._out_dtype is dtype

    @property
    def finds_largest(self) -> bool:
        """Whether `greedy` is there for it."""
        return self._out_dtype is torch.float32 and self._num_parts == 1

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
    if isinstance(linear, NativeLinear) and linear.finds_largest:
        return linear.greedy(x, kept)
    return REFERENCE.greedy_linear(linear, x, kept)


def look_up(linear: Linear) -> Callable[[Tensor], Tensor] | None:
    """See ops.Ops.look_up: for a weight of codes, all of one kind."""
    return linear.rows if isinstance(linear, NativeLinear) and linear.has_rows else None


def pack_linear(
    isa: Isa,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    quantization: str = "",
    activations: str = "exact",
) -> Linear:
    """See ops.PackLinear.  bf16 and fp32 weights, int8 from either, codes; the reference serves other dtypes.

    isa: the instruction set of the kernels.
    """
    out_dtype = weight.dtype if out_dtype is None else out_dtype
    if not _is_served(weight, bias, out_dtype, quantization):
        return REFERENCE.pack_linear(weight, bias, out_dtype=out_dtype, quantization=quantization)
    parts = weight.parts if isinstance(weight, JoinedWeight) and not quantization else (weight,)
    packed = [_packed(isa, part, quantization, activations) for part in parts]
    return NativeLinear(isa, packed, bias, weight.dtype, out_dtype)


def pack_gated_linear(
    isa: Isa,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    quantization: str = "",
    activations: str = "exact",
    gate: str = "silu",
) -> Linear:
    """See ops.PackGatedLinear; otherwise as pack_linear."""
    out_dtype = weight.dtype if out_dtype is None else out_dtype
    if not _is_served(weight, bias, out_dtype, quantization) or weight.shape[0] % 2:
        return REFERENCE.pack_gated_linear(
            weight, bias, out_dtype=out_dtype, quantization=quantization, gate=gate
        )
    if isinstance(weight, JoinedWeight) and not quantization:
        # Gates and ups of different kinds, whose panels cannot alternate.
        linear = pack_linear(isa, weight, bias, out_dtype=out_dtype, activations=activations)
        return GatedLinear(linear, functools.partial(gate_and_mul, isa, gate))
    packed = _packed(isa, weight, quantization, activations, is_gated=True)
    if bias is not None:
        bias = alternating(isa, bias.detach()[:, None])[:, 0]
    return NativeLinear(isa, [packed], bias, weight.dtype, out_dtype, weight.shape[0] // 2, gate)


def _packed(isa: Isa, weight: Weight, quantization: str, activations: str, is_gated: bool = False) -> Packed:
    """is_gated: the rows are gates over ups, and are to alternate."""

    def in_order(rows: Tensor) -> Tensor:
        return alternating(isa, rows.detach()) if is_gated else rows.detach()

    if isinstance(weight, QuantizedWeight) and not quantization:
        found = find_codes(isa, weight, activations)
        if not isinstance(found, str):
            return pack(isa, found.by_rows(in_order), _panel_memory)
        log_dequantized(found)
    wide = as_tensor(weight)
    if not quantization:
        return pack(isa, in_order(wide), _panel_memory)
    narrow, scales = quantize_int8(wide)
    return pack(isa, in_order(narrow), _panel_memory, in_order(scales[:, None])[:, 0])


@functools.cache
def log_dequantized(reason: str) -> None:
    """Once for each reason."""
    logger.warning(
        "quantized weights are dequantized at load: they take more memory", extra={"reason": reason}
    )


def _is_served(weight: Weight, bias: Tensor | None, out_dtype: torch.dtype, quantization: str) -> bool:
    """Whether the kernels compute it. ValueError for what no implementation computes."""
    if quantization not in ("", "int8"):
        raise ValueError(f"quantization is {quantization!r}: the CPU has 'int8' or none")
    if len(weight.shape) != 2 or not weight.numel() or (bias is not None and bias.shape != weight.shape[:1]):
        shape = None if bias is None else tuple(bias.shape)
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}, bias {shape}: expected [N, K] and [N], N and K >= 1"
        )
    served = (torch.bfloat16, torch.float32)
    if quantization and weight.dtype not in served:
        raise ValueError(f"int8 on a CPU needs bf16 or fp32 weights, not {weight.dtype}")
    return weight.dtype in served and out_dtype in served and weight.device.type == "cpu"


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


def pack(isa: Isa, weight: Tensor | Codes, memory: PanelMemory, scales: Tensor | None = None) -> Packed:
    """Lay [N, K] in bf16, fp32, int8 or codes out for the kernels.  scales: [N] fp32 of an int8 weight."""
    table, order, base = None, None, 0
    of_codes: tuple[Tensor | None, ...] = (None, None, None)
    if isinstance(weight, Tensor):
        rows = weight.detach()
        layout = (_KIND_OF[rows.dtype], *rows.shape, 0, 0, 0)
    else:
        rows, of_codes = weight.codes, (weight.numbers.stored, weight.scales, weight.minima)
        are_fp32 = weight.scales.dtype is torch.float32
        kind = _KIND_OF_CODES[weight.numbers.bits, weight.numbers.rows_are_int8]
        layout = (kind, *rows.shape, weight.group_size, int(weight.minima is not None), int(are_fp32))
        scales, order = weight.row_scales, weight.order
        table, base = weight.numbers.table, weight.numbers.base
    if rows.stride(1) != 1 and rows.shape[1] > 1:
        rows = rows.contiguous()
    panels = memory.take(isa.native.packed_bytes(*layout))
    addresses = map(address_of, of_codes)
    isa.native.pack_weight(*layout, panels.data_ptr(), rows.data_ptr(), rows.stride(0), *addresses)
    return Packed(layout, panels, None if scales is None else in_panels(isa, scales), table, base, order)


def address_of(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def in_panels(isa: Isa, vector: Tensor) -> Tensor:
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
