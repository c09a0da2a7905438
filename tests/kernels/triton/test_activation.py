"""Gated activations in Triton against the reference."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton.fresh_memory import with_nan_memory
from triptych_kernels import REFERENCE
from triptych_kernels.triton.activation import gelu_tanh_and_mul, sigmoid_and_mul, silu_and_mul

SHAPES = [(1, 1), (1, 129), (63, 64), (129, 63), (3, 1100)]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def gates_and_ups(shape, device, dtype=torch.float32):
    num_tokens, num_features = shape
    generator = torch.Generator().manual_seed(num_tokens)
    return (torch.randn(num_tokens, 2 * num_features, generator=generator) * 4).to(device, dtype)


def assert_equal(op, expected, x, *, absolute=1):
    """absolute: times the tolerance of the dtype, of numbers close to 0."""
    output, tolerance = with_nan_memory(op, x), TOLERANCE[x.dtype]
    assert output.dtype is x.dtype
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=absolute * tolerance)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_silu_and_mul_equals_the_reference(shape, dtype, device):
    x = gates_and_ups(shape, device, dtype)
    assert_equal(silu_and_mul, REFERENCE.silu_and_mul(x), x)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sigmoid_and_mul_equals_the_reference(shape, dtype, device):
    x = gates_and_ups(shape, device, dtype)
    assert_equal(sigmoid_and_mul, REFERENCE.sigmoid_and_mul(x), x)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gelu_tanh_and_mul_equals_the_reference(shape, dtype, device):
    x = gates_and_ups(shape, device, dtype)
    # Where 1 + tanh cancels in the reference, its error is relative to 1.
    assert_equal(gelu_tanh_and_mul, REFERENCE.gelu_tanh_and_mul(x), x, absolute=4)


def test_rows_may_lie_apart_with_nan_between_them(device):
    x = gates_and_ups((7, 33), device)
    room = torch.full((7, 70), float("nan"), device=device)
    room[:, 2:68] = x
    torch.testing.assert_close(silu_and_mul(room[:, 2:68]), REFERENCE.silu_and_mul(x))


def test_gates_far_from_zero_open_or_close(device):
    x = torch.tensor([[200.0, -200.0, -1e4, 2.0, 2.0, 2.0]], device=device)
    for op in (silu_and_mul, gelu_tanh_and_mul):
        assert op(x).tolist() == [[400.0, 0.0, 0.0]]
    assert sigmoid_and_mul(x).tolist() == [[2.0, 0.0, 0.0]]


def test_an_empty_step_gives_an_empty_output(device):
    assert silu_and_mul(torch.zeros(0, 8, device=device)).shape == (0, 4)


def test_rows_without_as_many_ups_as_gates_are_refused(device):
    with pytest.raises(ValueError, match="x is \\(2, 5\\)"):
        silu_and_mul(torch.zeros(2, 5, device=device))
