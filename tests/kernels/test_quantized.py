"""Quantized weights: what they stand for, and that parts of them stand for the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from triptych_kernels import REFERENCE, JoinedWeight, QuantizedWeight, as_tensor, join_rows

NUM_ROWS, NUM_COLUMNS = 6, 40


def make_weight(
    *, group_size: int = 16, bits: int = 4, form: str = "", seed: int = 0, num_rows: int = NUM_ROWS
) -> QuantizedWeight:
    """form: "zeros", "minima" or "order", or none of these."""
    generator = torch.Generator().manual_seed(seed)
    num_groups = -(-NUM_COLUMNS // group_size)
    codes = torch.randint(0, 1 << bits, (num_rows, NUM_COLUMNS), generator=generator, dtype=torch.uint8)
    scales = torch.rand(num_rows, num_groups, generator=generator) + 0.1
    extra = torch.randint(0, 1 << bits, (num_rows, num_groups), generator=generator).float()
    groups = torch.randint(0, num_groups, (NUM_COLUMNS,), generator=generator)
    return QuantizedWeight(
        codes,
        bits,
        torch.arange(1 << bits).float() - (0 if form in ("zeros", "minima") else 1 << (bits - 1)),
        scales,
        group_size,
        torch.float32,
        zeros=extra if form == "zeros" else None,
        minima=extra * 0.25 if form == "minima" else None,
        groups=groups if form == "order" else None,
    )


def one_by_one(weight: QuantizedWeight) -> Tensor:
    numbers = torch.empty(weight.shape)
    for row in range(weight.shape[0]):
        for column in range(weight.shape[1]):
            group = column // weight.group_size if weight.groups is None else int(weight.groups[column])
            number = weight.values[int(weight.codes[row, column])]
            if weight.zeros is not None:
                number = number - weight.zeros[row, group]
            number = number * weight.scales[row, group]
            if weight.minima is not None:
                number = number - weight.minima[row, group]
            numbers[row, column] = number
    return numbers


FORMS = ("", "zeros", "minima", "order")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group_size", [16, 8, NUM_COLUMNS])
def test_numbers_are_those_of_codes_and_groups(form: str, group_size: int) -> None:
    weight = make_weight(form=form, group_size=group_size)
    assert torch.equal(weight.dequantize(), one_by_one(weight))
    assert torch.equal(weight.to(dtype=torch.bfloat16).dequantize(), one_by_one(weight).bfloat16())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("first", "end"), [(0, 32), (16, 40), (3, 29), (16, 24)])
def test_parts_have_the_numbers_of_the_whole(form: str, first: int, end: int) -> None:
    weight = make_weight(form=form)
    whole = weight.dequantize()
    assert torch.equal(weight.columns(first, end).dequantize(), whole[:, first:end])
    assert torch.equal(weight.columns(first, end).columns(2, 6).dequantize(), whole[:, first + 2 : first + 6])
    assert torch.equal(weight.rows(2, 5).dequantize(), whole[2:5])


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_one_kind_are_joined_to_one_weight(form: str) -> None:
    whole = make_weight(form=form)
    joined = join_rows([whole.rows(0, 2), whole.rows(2, 6)])
    assert isinstance(joined, QuantizedWeight)
    assert torch.equal(joined.dequantize(), whole.dequantize())


@pytest.mark.parametrize(
    "other",
    [
        make_weight(bits=8, seed=1),
        make_weight(form="zeros", seed=1),
        make_weight(group_size=8),
        torch.ones(2, 40),
    ],
    ids=["bits", "zeros", "groups", "tensor"],
)
def test_rows_of_different_kinds_stay_parts(other: QuantizedWeight | Tensor) -> None:
    first = make_weight()
    joined = join_rows([first, other])
    assert isinstance(joined, JoinedWeight)
    assert joined.shape == (NUM_ROWS + other.shape[0], NUM_COLUMNS)
    assert torch.equal(as_tensor(joined), torch.cat([first.dequantize(), as_tensor(other)]))


def test_projections_take_quantized_weights() -> None:
    weight, x = make_weight(form="minima"), torch.rand(3, NUM_COLUMNS)
    assert torch.equal(REFERENCE.pack_linear(weight)(x), REFERENCE.pack_linear(weight.dequantize())(x))


def test_misshapen_numbers_are_refused() -> None:
    weight = make_weight()
    with pytest.raises(ValueError, match="scales have shape"):
        QuantizedWeight(weight.codes, 4, weight.values, weight.scales[1:], 16, torch.float32)
    with pytest.raises(ValueError, match="16 values of 3 bits"):
        QuantizedWeight(weight.codes, 3, weight.values, weight.scales, 16, torch.float32)
    with pytest.raises(ValueError, match="40 columns in groups of 8 have 3"):
        QuantizedWeight(weight.codes, 4, weight.values, weight.scales, 8, torch.float32)
    groups = torch.full((NUM_COLUMNS,), 3)
    with pytest.raises(ValueError, match="of group 3, there are 3"):
        QuantizedWeight(weight.codes, 4, weight.values, weight.scales, 16, torch.float32, groups=groups)
