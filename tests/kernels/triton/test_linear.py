"""Projections in Triton against torch's own, and their promise of fixed bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from triptych_kernels import REFERENCE
from triptych_kernels.triton import linear as kernel
from triptych_kernels.triton.linear import matmul, pack_gated_linear, pack_linear

# (rows, inputs, outputs)
SHAPES = [(1, 63, 129), (63, 129, 1), (129, 64, 63), (17, 1, 130)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def operands(shape, dtype, device):
    """x, weight and bias whose products are of the order of one."""
    num_rows, num_inputs, num_outputs = shape
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, num_inputs, generator=generator)
    weight = torch.randn(num_outputs, num_inputs, generator=generator) / num_inputs**0.5
    bias = torch.randn(num_outputs, generator=generator)
    return [part.to(device, dtype) for part in (x, weight, bias)]


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pack_linear_equals_the_reference(shape, dtype, deterministic, device):
    x, weight, bias = operands(shape, dtype, device)
    linear = pack_linear(weight, bias, deterministic=deterministic)
    expected = REFERENCE.pack_linear(weight, bias)(x)
    assert (linear.in_features, linear.out_features) == (shape[1], shape[2])
    assert linear.num_bytes == weight.nbytes + bias.nbytes
    torch.testing.assert_close(linear(x), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", [(1, 63, 130), (63, 129, 2), (129, 64, 62)], ids=str)
def test_pack_gated_linear_equals_the_reference(shape, dtype, deterministic, device):
    x, weight, bias = operands(shape, dtype, device)
    gated = pack_gated_linear(weight, bias, deterministic=deterministic)
    expected = REFERENCE.pack_gated_linear(weight, bias)(x)
    assert (gated.in_features, gated.out_features) == (shape[1], shape[2] // 2)
    assert gated.num_bytes == weight.nbytes + bias.nbytes
    torch.testing.assert_close(gated(x), expected, rtol=2 * TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_an_addend_is_added_before_the_activation(dtype, deterministic, device):
    x, weight, bias = operands((17, 63, 130), dtype, device)
    addend = torch.randn(17, 130, generator=torch.Generator().manual_seed(1)).to(device)
    addend[3] = 0.0
    for pack, reference in (
        (pack_linear, REFERENCE.pack_linear),
        (pack_gated_linear, REFERENCE.pack_gated_linear),
    ):
        linear = pack(weight, bias, deterministic=deterministic)
        expected = reference(weight.float(), bias.float())(x.float(), addend).to(dtype)
        tolerance = 2 * TOLERANCE[dtype]
        torch.testing.assert_close(linear(x, addend), expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(linear(x, addend)[3], linear(x)[3])


def test_an_addend_that_does_not_fit_is_refused(device):
    x, weight, _ = operands((3, 8, 5), torch.float32, device)
    with pytest.raises(ValueError, match=r"the addend is \(3, 4\), not contiguous \(3, 5\)"):
        matmul(x, weight, addend=torch.zeros(3, 4, device=device))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (3, 128, 128)], ids=str)
def test_the_kernel_masks_every_edge(shape, dtype, device):
    x, weight, bias = operands(shape, dtype, device)
    # What lies behind the last row and the last weight is not a number.
    room = torch.full((x.shape[0] + 1, x.shape[1] + 1), float("nan"), dtype=dtype, device=device)
    room[:-1, :-1] = x
    memory = torch.full((weight.numel() + 64,), float("nan"), dtype=dtype, device=device)
    memory[: weight.numel()] = weight.flatten()
    product = matmul(room[:-1, :-1], memory[: weight.numel()].view_as(weight), bias=bias)
    expected = F.linear(x, weight, bias)
    torch.testing.assert_close(product, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_narrow_weights_multiply_as_what_they_stand_for(shape, dtype, quantization, device):
    x, weight, bias = operands(shape, dtype, device)
    linear = pack_linear(weight, bias, quantization=quantization)
    if quantization == "int8":
        scales = weight.float().abs().amax(1, keepdim=True) / 127
        meant = (weight.float() / scales).round() * scales
    else:
        scales = weight.float().abs().amax(1, keepdim=True) / 448
        meant = (weight.float() / scales).to(torch.float8_e4m3fn).float() * scales
    expected = F.linear(x.float(), meant, bias.float())
    torch.testing.assert_close(linear(x).float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert linear.num_bytes == weight.numel() + 4 * shape[2] + bias.nbytes


@pytest.mark.parametrize("quantization", ["", "int8", "fp8"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_deterministic_row_has_the_same_bits_in_every_batch(dtype, quantization, device):
    x, weight, bias = operands((129, 70, 33), dtype, device)
    linear = pack_linear(weight, bias, quantization=quantization, deterministic=True)
    together = linear(x)
    for rows in (slice(0, 1), slice(5, 6), slice(60, 70), slice(64, 129)):
        assert torch.equal(linear(x[rows]), together[rows])


def test_a_wide_weight_has_larger_tiles_and_as_fixed_bits(device, monkeypatch):
    monkeypatch.setattr(kernel, "_MIN_OUTPUTS_OF_LARGE_TILES", 128)
    x, weight, bias = operands((130, 40, 130), torch.bfloat16, device)
    linear = pack_linear(weight, bias, deterministic=True)
    together = linear(x)
    torch.testing.assert_close(together, F.linear(x, weight, bias), rtol=2e-2, atol=2e-2)
    for rows in (slice(7, 8), slice(100, 130)):
        assert torch.equal(linear(x[rows]), together[rows])


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"quantization": "int8"}], ids=str)
def test_logits_may_be_wider_than_the_weights(options, device):
    x, weight, _ = operands((5, 32, 40), torch.bfloat16, device)
    logits = pack_linear(weight, out_dtype=torch.float32, **options)(x)
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, F.linear(x.float(), weight.float()), rtol=2e-2, atol=2e-2)


def test_a_row_of_zero_weights_gives_its_bias(device):
    x, weight, bias = operands((3, 32, 4), torch.float32, device)
    weight[2] = 0.0
    for quantization in ("int8", "fp8"):
        product = pack_linear(weight, bias, quantization=quantization)(x)
        assert torch.equal(product[:, 2], bias[2].expand(3))


def test_a_row_with_nan_reaches_no_other(device):
    x, weight, _ = operands((20, 32, 16), torch.float32, device)
    clean = matmul(x, weight)
    x[7] = float("nan")
    product = matmul(x, weight)
    assert product[7].isnan().all()
    others = torch.arange(20, device=device) != 7
    assert torch.equal(product[others], clean[others])


def test_an_empty_batch_gives_an_empty_result(device):
    x, weight, bias = operands((1, 8, 4), torch.float32, device)
    for options in ({}, {"deterministic": True}, {"quantization": "int8"}):
        assert pack_linear(weight, bias, **options)(x[:0]).shape == (0, 4)


def test_what_the_kernel_cannot_multiply_is_refused_by_its_numbers(device):
    x, weight, _ = operands((2, 8, 4), torch.float32, device)
    with pytest.raises(ValueError, match="x has 7 columns, the weight takes 8"):
        matmul(x[:, :7], weight)
    with pytest.raises(ValueError, match="their stride is 2"):
        matmul(x.t().contiguous().t(), weight)
    with pytest.raises(ValueError, match="'int3' is not one of int8, fp8"):
        pack_linear(weight, quantization="int3")
