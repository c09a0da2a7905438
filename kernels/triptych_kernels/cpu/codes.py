"""How the native kernels store a quantized weight: codes of 4, 6 or 8 bits, with scales and minima of groups.

groups.h has the arithmetic. Rows are multiplied as they are, or rounded to int8 by groups, which is faster
and needs codes that stand for whole numbers. Weights keep their numbers, except scales that fp16 does not
hold: if rows are bf16 or int8 they are rounded to it, an eighth of what rounding a number to bf16 changes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from triptych_kernels.cpu.loader import Isa
from triptych_kernels.quantized import QuantizedWeight

_GROUP_STEP, _STEP_OF_6_BITS = 8, 16  # a group has a multiple of these inputs
_MIN_GROUP = 16
_ROW_DTYPES = (torch.bfloat16, torch.float32)
_MAX_INT8_GROUP = 128
_INT8_GROUP = 64  # where the weight has one group
_NUM_MAGNITUDES = 128
# Scales are multiplied by a power of two, so that the largest of a row is below 2 ** 15.
_FP16_EXPONENT = 15


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """What codes stand for, and how kernels store them."""

    bits: int  # of a stored code: 4, 8 or, for rows of int8, 6
    stored: Tensor  # [256] uint8: the code that is stored for each of a checkpoint
    table: Tensor | None = None  # of the stored codes; None: they are the numbers themselves
    step: float = 1.0  # the numbers are as many steps
    base: int = 0  # how many more they are
    rows_are_int8: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """[N, K] of number[code] * scale - minimum, times the scale of the row.

    Scale and minimum are those of the row, and of the column's group.
    """

    codes: Tensor  # [N, K] uint8, as in the checkpoint, columns in the order of their groups
    numbers: Numbers
    group_size: int  # a multiple of 8; the last may have fewer
    scales: Tensor  # [N, G] fp16 or fp32, as minima
    minima: Tensor | None
    row_scales: Tensor | None  # [N] fp32; None: all are 1
    order: Tensor | None  # [K] int32: the columns in the order of their groups; None: in their own

    def by_rows(self, change: Callable[[Tensor], Tensor]) -> Codes:
        """With other rows: `change` is applied to each tensor [N, ...]."""
        return replace(
            self,
            codes=change(self.codes),
            scales=change(self.scales),
            minima=None if self.minima is None else change(self.minima),
            row_scales=None if self.row_scales is None else change(self.row_scales[:, None])[:, 0],
        )


def find_codes(isa: Isa, weight: QuantizedWeight, activations: str) -> Codes | str:
    """The weight [N, K] as codes, or why kernels cannot store it.

    activations: see ops.PackLinear.  isa: the instruction set of the kernels.
    """
    if weight.dtype not in _ROW_DTYPES or weight.device.type != "cpu":
        return f"rows are {weight.dtype} on {weight.device}"
    num_columns, size = weight.shape[1], weight.group_size
    if weight.scales.shape[1] == 1:
        size = num_columns + -num_columns % _GROUP_STEP
    if size % _GROUP_STEP or (size < _MIN_GROUP and size < num_columns):
        return f"groups have {size} inputs"
    order = None
    if weight.groups is not None:
        order = weight.groups.argsort(stable=True)
        if not torch.equal(weight.groups[order], torch.arange(num_columns) // size):
            return "groups differ in their numbers of inputs"
    lowest, highest = (int(code) for code in weight.codes.aminmax())
    part = 0 if activations == "exact" else _int8_group(weight, size)
    exact, for_int8 = (_EXACT_ON_AVX2, _FOR_INT8_ON_AVX2) if isa.name == "avx2" else (_EXACT, _FOR_INT8)
    forms = [(form, part) for form in for_int8 if part] + [(form, size) for form in exact]
    for (find_numbers, group_size), zero in itertools.product(forms, _zeros(weight)):
        values = (weight.values - zero)[: highest + 1]
        values[:lowest] = 0.0
        numbers = find_numbers(values, weight.bits)
        if numbers is not None and (numbers.bits != 6 or group_size % _STEP_OF_6_BITS == 0):
            chosen = weight if group_size == size else _in_parts(weight, size, group_size)
            return _as_codes(chosen, numbers, zero, group_size, order)
    return "kernels cannot look up what codes stand for"


def _zeros(weight: QuantizedWeight) -> list[float]:
    """What may be subtracted from the values of all codes, the best first.

    That is what the zeros are, or their middle: minima should be small, as products are what remains after
    they are subtracted. 256 whole numbers less the half between two of them are 128 magnitudes of two signs.
    """
    values = weight.values
    middle = float(values.min() + values.max()) / 2
    found = [middle + 0.5, middle] if middle % 1 == 0.5 else [middle] if math.isfinite(middle) else []
    if weight.zeros is None:
        return [0.0, *found]
    first = float(weight.zeros[0, 0])
    return [first, *found] if bool((weight.zeros == first).all()) else found


def _exact(values: Tensor, bits: int) -> Numbers | None:
    """Sixteen numbers, or 128 magnitudes of two signs, that are looked up in bf16."""
    if not torch.equal(values.bfloat16().float().nan_to_num(), values.nan_to_num()):
        return None
    if bits <= 4:
        return Numbers(4, _stored(torch.arange(16), 4), _padded(values, 16))
    sizes = values.abs()
    is_nan = sizes.isnan()
    magnitudes = sizes[~is_nan].unique()
    indices = torch.searchsorted(magnitudes, sizes).masked_fill(is_nan, len(magnitudes))
    if is_nan.any():
        magnitudes = torch.cat([magnitudes, sizes[is_nan][:1]])
    if len(magnitudes) > _NUM_MAGNITUDES:
        return None
    signs = values.signbit().to(torch.int64) << 7
    low_and_high = _padded(magnitudes, _NUM_MAGNITUDES).bfloat16().view(torch.uint8).view(-1, 2)
    return Numbers(8, _stored(indices | signs, 8), low_and_high.T.contiguous())


def _signed(values: Tensor, bits: int, stored_bits: int) -> Numbers | None:
    """Whole numbers with a sign."""
    half, step = 1 << (stored_bits - 1), _step_of(values)
    if step is None or stored_bits < bits or not _are_within(values / step, -half, half - 1):
        return None
    return Numbers(stored_bits, _stored(values / step, stored_bits), step=step)


def _unsigned(values: Tensor, bits: int, stored_bits: int) -> Numbers | None:
    """For rows of int8: whole numbers less the lowest."""
    step = _step_of(values)
    if step is None or stored_bits < bits:
        return None
    base = int((values / step).min())
    if not _are_within(values / step - base, 0, (1 << stored_bits) - 1):
        return None
    stored = _stored(values / step - base, stored_bits)
    return Numbers(stored_bits, stored, step=step, base=base, rows_are_int8=True)


def _looked_up(values: Tensor, bits: int) -> Numbers | None:
    """For rows of int8: sixteen whole numbers less the lowest."""
    found = _unsigned(values, bits, 8)
    if found is None or bits > 4:
        return None
    return replace(found, bits=4, stored=_stored(torch.arange(16), 4), table=found.stored[:16].clone())


def _signed_for_int8(values: Tensor, bits: int) -> Numbers | None:
    found = _signed(values, bits, 8)
    return None if found is None else replace(found, rows_are_int8=True)


_Form = Callable[[Tensor, int], Numbers | None]
# The narrowest first.
_EXACT: list[_Form] = [_exact]
_EXACT_ON_AVX2: list[_Form] = [functools.partial(_signed, stored_bits=bits) for bits in (4, 8)]
_FOR_INT8: list[_Form] = [_looked_up, *(functools.partial(_unsigned, stored_bits=bits) for bits in (6, 8))]
_FOR_INT8_ON_AVX2: list[_Form] = [
    *(functools.partial(_unsigned, stored_bits=bits) for bits in (4, 6)),
    _signed_for_int8,
]


def _step_of(values: Tensor) -> float | None:
    """A number of which all values are multiples, if there is one that is known."""
    return next((step for step in (1.0, 0.5) if torch.equal(values / step, (values / step).round())), None)


def _are_within(values: Tensor, lowest: int, highest: int) -> bool:
    return bool(((values >= lowest) & (values <= highest)).all())


def _stored(numbers: Tensor, bits: int) -> Tensor:
    """[256] bytes: the number of each code, in its lowest bits."""
    return _padded((numbers.to(torch.int64) & ((1 << bits) - 1)).to(torch.uint8), 256)


def _as_codes(
    weight: QuantizedWeight, numbers: Numbers, zero: float, size: int, order: Tensor | None
) -> Codes:
    """zero: what was subtracted from the values of codes.  size: of a group."""
    minima = torch.zeros_like(weight.scales) if weight.minima is None else weight.minima
    minima = minima + ((0.0 if weight.zeros is None else weight.zeros) - zero) * weight.scales
    scales, num_groups = weight.scales * numbers.step, weight.scales.shape[1]
    has_minima = bool(minima.any())
    narrow, row_scales = _narrowed(
        torch.cat([scales, minima], 1) if has_minima else scales,
        is_exact=weight.dtype is torch.float32 and not numbers.rows_are_int8,
    )
    return Codes(
        codes=weight.codes if order is None else weight.codes[:, order],
        numbers=numbers,
        group_size=size,
        scales=narrow[:, :num_groups].contiguous(),
        minima=narrow[:, num_groups:].contiguous() if has_minima else None,
        row_scales=row_scales,
        order=None if order is None else order.to(torch.int32),
    )


def _int8_group(weight: QuantizedWeight, size: int) -> int:
    """The inputs of a group that a row is rounded by: those of one of the weight, or of a part of one.

    0 if there is none.  size: of a group of the weight.
    """
    if size <= _MAX_INT8_GROUP:
        return size
    if weight.scales.shape[1] == 1:
        return _INT8_GROUP
    parts = range(_MAX_INT8_GROUP, _MIN_GROUP - 1, -_GROUP_STEP)
    return next((part for part in parts if size % part == 0), 0)


def _in_parts(weight: QuantizedWeight, size: int, part: int) -> QuantizedWeight:
    """The same numbers, in the order of their groups, which have `part` inputs instead of `size`."""
    num_groups = -(-weight.shape[1] // part)

    def repeated(numbers: Tensor | None) -> Tensor | None:
        return None if numbers is None else numbers.repeat_interleave(-(-size // part), 1)[:, :num_groups]

    scales = repeated(weight.scales)
    assert scales is not None
    zeros, minima = repeated(weight.zeros), repeated(weight.minima)
    return replace(weight, scales=scales, zeros=zeros, minima=minima, group_size=part, groups=None)


def _narrowed(numbers: Tensor, *, is_exact: bool) -> tuple[Tensor, Tensor | None]:
    """[N, ...] in fp16, with scales of rows if fp16 needs them; or as they are, to keep all bits."""
    narrow = numbers.half()
    if torch.equal(narrow.float(), numbers):
        return narrow, None
    largest = numbers.abs().amax(1, keepdim=True)
    exponents = _FP16_EXPONENT - largest.frexp().exponent.clamp(-100, 100)
    wide = numbers * _power_of_two(exponents)
    narrow = wide.half()
    if not is_exact or torch.equal(narrow.float(), wide):
        return narrow, _power_of_two(-exponents)[:, 0]
    return numbers, None


def _power_of_two(exponents: Tensor) -> Tensor:
    """Exactly."""
    return ((exponents.to(torch.int32) + 127) << 23).view(torch.float32)


def _padded(numbers: Tensor, size: int) -> Tensor:
    """With zeros behind them."""
    padded = torch.zeros(size, dtype=numbers.dtype)
    padded[: len(numbers)] = numbers
    return padded
