"""Codes, values and groups of quantized weights from the tensors that formats store."""

from __future__ import annotations

import torch
from torch import Tensor

from engine_svc.model.errors import CheckpointError
from engine_svc.model.loading.formats.stored import WORD_BITS
from triptych_kernels import QuantizedWeight

_FP8_EXPONENT_AND_MANTISSA = 0x7F  # all ones: not a number


def codes_of_words(words: Tensor, bits: int) -> Tensor:
    """[N, W * 32 / bits] uint8 of words [N, W] int32, whose lowest bits come first; bits divides 8."""
    packed = words.contiguous().view(torch.uint8)
    if bits == 8:
        return packed
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(1)


def with_ones_added(words: Tensor, bits: int) -> Tensor:
    """The words with 1 added to each field of `bits` bits, and carries into the next one."""
    ones = sum(1 << shift for shift in range(0, WORD_BITS, bits))
    return (words.long() + ones).to(torch.int32)


def integers(bits: int, zero: float = 0.0) -> Tensor:
    """[2 ** bits] fp32: code - zero."""
    return torch.arange(1 << bits, dtype=torch.float32) - zero


def codes_of_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [N, K] uint8 and values [256] of a weight in int8."""
    return weight.view(torch.uint8) ^ 0x80, integers(8, 128.0)


def codes_of_fp8(name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [N, K] uint8 and values [256] of a weight in float8_e4m3fn, which has to be all numbers."""
    codes = weight.view(torch.uint8)
    if ((codes & _FP8_EXPONENT_AND_MANTISSA) == _FP8_EXPONENT_AND_MANTISSA).any():
        raise CheckpointError(f"{name} has values that are not numbers")
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    # Of codes that no weight has; tables are compared, and NaN equals nothing.
    return codes, values.nan_to_num(0.0)


def by_rows(numbers: Tensor, grid: tuple[int, int], rows_of_block: int, num_rows: int) -> Tensor:
    """[num_rows, G] fp32 of numbers of blocks, which each have `rows_of_block` rows."""
    numbers = numbers.float().reshape(grid)
    return numbers.repeat_interleave(rows_of_block, 0)[:num_rows] if rows_of_block > 1 else numbers


def groups_of(name: str, order: Tensor, group_size: int, num_groups: int) -> Tensor | None:
    """[K] int64, the group of each column; None where they follow each other."""
    groups = order.long()
    if torch.equal(groups, torch.arange(len(groups)) // group_size):
        return None
    if not 0 <= int(groups.min()) <= int(groups.max()) < num_groups:
        wrong = int(groups.min()) if int(groups.min()) < 0 else int(groups.max())
        raise CheckpointError(f"{name} has group {wrong}, there are {num_groups}")
    return groups


def quantized(
    codes: Tensor,
    bits: int,
    values: Tensor,
    scales: Tensor,
    group_size: int,
    dtype: torch.dtype,
    *,
    zeros: Tensor | None = None,
    groups: Tensor | None = None,
) -> QuantizedWeight:
    """The weight. A zero that is the same in all groups is part of the values: symmetric ones are alike."""
    if zeros is not None and (zeros == zeros[0, 0]).all():
        values, zeros = values - zeros[0, 0], None
    return QuantizedWeight(codes, bits, values, scales, group_size, dtype, zeros=zeros, groups=groups)
