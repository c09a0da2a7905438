"""The largest of each product, found within the projection: that of the written products, at every size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.cpu.test_linear import ALL_KINDS, packed
from triptych_kernels import REFERENCE
from triptych_kernels.ops import Linear, Ops

NAN = float("nan")
SHAPES = [(1, 1), (2, 33), (63, 129), (320, 640), (31, 5003)]


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(ops: Ops, linear: Linear, x: Tensor, kept: Tensor) -> None:
    found = ops.greedy_linear(linear, x, kept)
    for output, expected in zip(found, REFERENCE.greedy_linear(linear, x, kept), strict=True):
        assert torch.equal(output, expected)


@pytest.mark.parametrize(("K", "N"), SHAPES)
@pytest.mark.parametrize(("dtype", "kind"), ALL_KINDS)
@pytest.mark.parametrize("has_bias", [False, True], ids=["no-bias", "bias"])
def test_it_is_what_the_written_products_have(ops, K, N, dtype, kind, has_bias):
    linear = packed(ops.pack_linear, K, N, dtype, kind, has_bias=has_bias, out_dtype=torch.float32)
    for num_rows in (0, 1, 2, 7, 12, 13, 40, 200):
        x = noise(num_rows, K, dtype=dtype)
        for kept in (torch.arange(0), torch.arange(num_rows), torch.arange(num_rows)[1::3]):
            check(ops, linear, x, kept)


@pytest.mark.parametrize(("dtype", "kind"), ALL_KINDS)
def test_the_number_of_threads_changes_nothing(ops, use_threads, dtype, kind):
    linear = packed(ops.pack_linear, 96, 2100, dtype, kind, out_dtype=torch.float32)
    for num_threads in (1, 2, 3):
        use_threads(num_threads)
        for num_rows in (1, 13, 64):
            check(ops, linear, noise(num_rows, 96, dtype=dtype), torch.arange(0, num_rows, 2))


@pytest.mark.parametrize("use", [1, 3])
def test_of_equal_products_the_first_counts(ops, use_threads, use):
    use_threads(use)
    weight = noise(1, 40).expand(3000, 40).contiguous()
    weight[:700] -= 1.0
    x = noise(1, 40).abs().expand(30, 40).contiguous()
    highest, tokens = ops.greedy_linear(ops.pack_linear(weight), x, torch.arange(0))[1:]
    assert torch.equal(tokens, torch.full((30,), 700))
    assert (highest == highest[0]).all()


@pytest.mark.parametrize("column", [0, 70, 2046])
def test_only_the_row_with_nan_is_reported(ops, column):
    weight = noise(2047, 20)
    weight[column, 3] = float("inf")
    x = noise(15, 20)
    x[:, 3] = 1.0
    # Infinity less infinity.
    weight[column, 4] = float("inf")
    x[:, 4] = 1.0
    x[6, 4] = -1.0
    kept, highest, tokens = ops.greedy_linear(ops.pack_linear(weight), x, torch.tensor([6, 7]))
    assert highest.isnan().nonzero().flatten().tolist() == [6]
    others = torch.arange(15) != 6
    assert (tokens[others] == column).all()
    assert 0 <= int(tokens[6]) < 2047
    assert kept.isnan().sum(1).tolist() == [1, 0]


def test_rows_of_minus_infinity_have_the_first_token(ops):
    linear = ops.pack_linear(torch.full((65, 2), float("-inf")))
    highest, tokens = ops.greedy_linear(linear, torch.ones(3, 2), torch.arange(0))[1:]
    assert tokens.tolist() == [0, 0, 0]
    assert highest.tolist() == [float("-inf")] * 3


def test_products_in_bf16_are_those_that_are_compared(ops):
    linear = ops.pack_linear(noise(300, 20, dtype=torch.bfloat16))
    check(ops, linear, noise(9, 20, dtype=torch.bfloat16), torch.tensor([2, 5]))


def test_rows_of_another_width_are_refused(ops):
    with pytest.raises(ValueError, match=r"expected torch\.float32"):
        ops.greedy_linear(ops.pack_linear(noise(33, 20)), noise(4, 19), torch.arange(0))
