"""Norms in Triton against the reference."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton.fresh_memory import with_nan_memory
from triptych_kernels import REFERENCE
from triptych_kernels.triton.rms_norm import add_rms_norm, rms_norm

SHAPES = [(1, 1), (1, 129), (63, 64), (129, 63), (5, 1100)]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
EPS = 1e-5


def operands(shape, dtype, device):
    generator = torch.Generator().manual_seed(shape[0])
    x, residual = torch.randn(2, *shape, generator=generator) * 3
    weight = torch.randn(shape[1], generator=generator)
    return [part.to(device, dtype) for part in (x, residual, weight)]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_equals_the_reference(shape, dtype, device):
    x, _, weight = operands(shape, dtype, device)
    output = with_nan_memory(rms_norm, x, weight, EPS)
    assert output.dtype is dtype
    expected = REFERENCE.rms_norm(x, weight, EPS)
    torch.testing.assert_close(output, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_weight_may_be_more_precise_than_rows(device):
    x, _, weight = operands((63, 129), torch.bfloat16, device)
    weight = weight.float() + 1.0
    exact = (REFERENCE.rms_norm(x.float(), weight, EPS)).to(x.dtype)
    assert (rms_norm(x, weight, EPS) != exact).float().mean() < 0.01


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_rms_norm_equals_the_reference(shape, dtype, device):
    x, residual, weight = operands(shape, dtype, device)
    residual_of_reference = residual.clone()
    output = with_nan_memory(add_rms_norm, x, residual, weight, EPS)
    expected = REFERENCE.add_rms_norm(x, residual_of_reference, weight, EPS)
    assert torch.equal(residual, residual_of_reference)
    torch.testing.assert_close(output, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_what_is_normed_is_the_residual_as_it_was_rounded(device):
    x, residual, weight = operands((50, 300), torch.bfloat16, device)
    output = add_rms_norm(x, residual, weight, EPS)
    assert (output != rms_norm(residual, weight, EPS)).float().mean() < 0.01


def test_rows_may_lie_apart_with_nan_between_them(device):
    x, residual, weight = operands((7, 33), torch.float32, device)
    room = torch.full((2, 7, 40), float("nan"), device=device)
    room[:, :, 2:35] = torch.stack([x, residual])
    expected = REFERENCE.rms_norm(x, weight, EPS)
    torch.testing.assert_close(rms_norm(room[0, :, 2:35], weight, EPS), expected)
    expected = REFERENCE.add_rms_norm(x, residual, weight, EPS)
    torch.testing.assert_close(add_rms_norm(room[0, :, 2:35], room[1, :, 2:35], weight, EPS), expected)
    assert torch.equal(room[1, :, 2:35], residual)
    assert room[:, :, :2].isnan().all() and room[:, :, 35:].isnan().all()


def test_heads_of_a_projection_are_normed_each(device):
    x, _, _ = operands((6, 5 * 16), torch.float32, device)
    heads = x.view(6, 5, 16)[:, 1:4]
    weight = torch.linspace(0.5, 2.0, 16, device=device)
    torch.testing.assert_close(rms_norm(heads, weight, EPS), REFERENCE.rms_norm(heads, weight, EPS))


def test_a_row_has_the_same_bits_in_every_batch_and_nan_reaches_no_other(device):
    x, _, weight = operands((50, 70), torch.bfloat16, device)
    together = rms_norm(x, weight, EPS)
    for rows in (slice(0, 1), slice(7, 8), slice(20, 41)):
        assert torch.equal(rms_norm(x[rows], weight, EPS), together[rows])
    x[11] = float("nan")
    output = rms_norm(x, weight, EPS)
    assert output[11].isnan().all()
    others = torch.arange(50, device=device) != 11
    assert torch.equal(output[others], together[others])


def test_an_empty_step_gives_an_empty_output(device):
    x, residual, weight = operands((1, 8), torch.float32, device)
    assert rms_norm(x[:0], weight, EPS).shape == (0, 8)
    assert add_rms_norm(x[:0], residual[:0], weight, EPS).shape == (0, 8)


def test_what_does_not_fit_together_is_refused(device):
    x, residual, weight = operands((3, 8), torch.float32, device)
    with pytest.raises(ValueError, match="rows have 8 numbers, the weight is \\(7,\\)"):
        rms_norm(x, weight[:7], EPS)
    with pytest.raises(ValueError, match="the residual \\(2, 8\\)"):
        add_rms_norm(x, residual[:2], weight, EPS)
    with pytest.raises(ValueError, match="their strides are 3, 1"):
        add_rms_norm(x.t().contiguous().t(), residual, weight, EPS)
