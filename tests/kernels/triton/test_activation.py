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


@pytest.mark.parametrize("op", [silu_and_mul, sigmoid_and_mul], ids=lambda op: op.__name__)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_silu_and_sigmoid_equal_the_reference(shape, dtype, op, device):
    x = gates_and_ups(shape, device, dtype)
    output = with_nan_memory(op, x)
    assert output.dtype is dtype
    expected = getattr(REFERENCE, op.__name__)(x)
    torch.testing.assert_close(output, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gelu_tanh_and_mul_equals_the_reference(shape, dtype, device):
    x = gates_and_ups(shape, device, dtype)
    output = with_nan_memory(gelu_tanh_and_mul, x)
    assert output.dtype is dtype
    expected = REFERENCE.gelu_tanh_and_mul(x)
    # Where 1 + tanh cancels in the reference, its error is relative to 1.
    torch.testing.assert_close(output, expected, rtol=TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])


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
