"""Native projections: right, and the same bits for a row whatever it is batched with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from triptych_kernels.ops import Ops

SHAPES = [(1, 1), (2, 33), (63, 129), (129, 63), (31, 500), (320, 640), (576, 96)]
BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 31, 33, 64, 71, 200)
KINDS = [
    pytest.param(torch.bfloat16, "", id="bf16"),
    pytest.param(torch.float32, "", id="fp32"),
    pytest.param(torch.bfloat16, "int8", id="int8-bf16"),
    pytest.param(torch.float32, "int8", id="int8-fp32"),
]
# Of a sum of about 1 in fp32, from bf16 products or fp32 ones; and of one rounding to bf16.
FP32_TOLERANCE = 3e-5
BF16_TOLERANCE = 2.0**-8


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight_and_bias(K: int, N: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return noise(N, K, dtype=dtype, seed=1) / K**0.5, noise(N, dtype=dtype, seed=2)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


@pytest.mark.parametrize(("K", "N"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["no-bias", "bias"])
def test_product_is_that_of_fp64_up_to_rounding(ops, K, N, dtype, has_bias):
    weight, bias = weight_and_bias(K, N, dtype)
    chosen = bias if has_bias else None
    x = noise(77, K, dtype=dtype)
    expected = exact(x, weight, chosen)
    torch.testing.assert_close(
        ops.pack_linear(weight, chosen, out_dtype=torch.float32)(x).double(),
        expected,
        atol=FP32_TOLERANCE,
        rtol=FP32_TOLERANCE,
    )
    rounded = ops.pack_linear(weight, chosen)(x)
    assert rounded.dtype is dtype
    torch.testing.assert_close(rounded.double(), expected, atol=BF16_TOLERANCE, rtol=BF16_TOLERANCE)


@pytest.mark.parametrize(("K", "N"), [(63, 129), (320, 640), (2, 33)])
@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
def test_a_row_has_the_same_bits_in_every_batch_and_position(ops, K, N, dtype, quantization):
    linear = ops.pack_linear(
        *weight_and_bias(K, N, dtype), quantization=quantization, out_dtype=torch.float32
    )
    x = noise(200, K, dtype=dtype)
    together = linear(x)
    for size in BATCHES:
        assert torch.equal(linear(x[:size]), together[:size]), f"first {size} rows"
        assert torch.equal(linear(x[-size:]), together[-size:]), f"last {size} rows"


@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
def test_the_number_of_threads_changes_no_bit(ops, use_threads, dtype, quantization):
    linear = ops.pack_linear(*weight_and_bias(320, 801, dtype), quantization=quantization)
    for size in (1, 8, 13, 200):
        x = noise(size, 320, dtype=dtype)
        use_threads(1)
        alone = linear(x)
        for num_threads in (2, 3, 5):
            use_threads(num_threads)
            assert torch.equal(linear(x), alone), f"{size} rows, {num_threads} threads"


def test_numbers_too_small_for_full_precision_have_the_same_bits_in_every_batch(ops: Ops) -> None:
    weight, x = noise(33, 64, dtype=torch.bfloat16) * 1e-19, noise(48, 64, dtype=torch.bfloat16) * 1e-19
    linear = ops.pack_linear(weight, out_dtype=torch.float32)
    whole = linear(x)
    assert all(torch.equal(linear(x[row : row + 1]), whole[row : row + 1]) for row in range(len(x)))


def test_a_batch_larger_than_what_is_taken_at_once_is_complete(ops: Ops) -> None:
    weight, _ = weight_and_bias(2048, 40, torch.bfloat16)
    x = noise(500, 2048, dtype=torch.bfloat16)
    linear = ops.pack_linear(weight, out_dtype=torch.float32)
    product = linear(x)
    torch.testing.assert_close(product.double(), exact(x, weight), atol=FP32_TOLERANCE, rtol=FP32_TOLERANCE)
    assert torch.equal(linear(x[499:]), product[499:])


@pytest.mark.parametrize(("K", "N"), [(1, 1), (63, 129), (320, 640)])
@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
def test_int8_is_as_near_as_half_a_step_an_input(ops, K, N, dtype, quantization):
    weight, bias = weight_and_bias(K, N, dtype)
    x = noise(20, K, dtype=dtype)
    product = ops.pack_linear(weight, bias, quantization=quantization, out_dtype=torch.float32)(x)
    half_a_step = weight.float().abs().amax(1) / 127 / 2 if quantization else torch.zeros(N)
    bound = x.double().abs().sum(1, keepdim=True) * half_a_step.double() * 1.01 + 2 * FP32_TOLERANCE
    assert ((product.double() - exact(x, weight, bias)).abs() <= bound * (1 + product.double().abs())).all()


def test_int8_represents_its_own_numbers_exactly(ops: Ops) -> None:
    values = torch.arange(-127, 128).to(torch.float32)
    weight = torch.cat([values, values.flip(0)]).reshape(2, 255)
    for dtype in (torch.bfloat16, torch.float32):
        linear = ops.pack_linear(weight.to(dtype), quantization="int8", out_dtype=torch.float32)
        assert torch.equal(linear(torch.eye(255, dtype=dtype)), weight.T.contiguous())


def test_int8_rounds_each_row_to_its_own_steps(ops: Ops) -> None:
    from triptych_kernels.cpu.linear import quantize_int8

    weight = noise(300, 1000, dtype=torch.float32) * torch.logspace(-3, 3, 300)[:, None]
    quantized, scales = quantize_int8(weight)
    torch.testing.assert_close(scales, weight.abs().amax(1) / 127)
    assert quantized.abs().amax(1).eq(127).all()
    assert ((quantized * scales[:, None] - weight).abs() <= scales[:, None] * 0.5001).all()


def test_int8_takes_a_row_of_zeros(ops: Ops) -> None:
    linear = ops.pack_linear(torch.zeros(3, 64), quantization="int8")
    assert torch.equal(linear(torch.ones(2, 64)), torch.zeros(2, 3))


def test_int8_keeps_about_half_the_bytes_of_bf16(ops: Ops) -> None:
    weight, _ = weight_and_bias(320, 640, torch.bfloat16)
    wide, narrow = ops.pack_linear(weight), ops.pack_linear(weight, quantization="int8")
    assert wide.num_bytes == weight.nbytes
    assert narrow.num_bytes == weight.nbytes // 2 + 640 * 4


@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
def test_numbers_that_are_not_finite_stay_in_their_row(ops, dtype, quantization):
    linear = ops.pack_linear(*weight_and_bias(63, 65, dtype), quantization=quantization)
    x = noise(30, 63, dtype=dtype)
    clean = linear(x)
    x[4, 3], x[17, 62], x[29, 0] = torch.nan, torch.inf, -torch.inf
    poisoned = linear(x)
    others = [row for row in range(30) if row not in (4, 17, 29)]
    assert torch.equal(poisoned[others], clean[others])
    assert not poisoned[[4, 17, 29]].isfinite().any(1).all() and poisoned[4].isnan().all()


@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
def test_rows_may_lie_apart_and_what_lies_between_is_not_read(ops, dtype, quantization):
    linear = ops.pack_linear(*weight_and_bias(63, 65, dtype), quantization=quantization)
    apart = torch.full((14, 80), torch.nan, dtype=dtype)
    for size in (1, 14):
        x = noise(size, 63, dtype=dtype)
        apart[:size, 5:68] = x
        assert torch.equal(linear(apart[:size, 5:68]), linear(x))


@pytest.mark.parametrize("num_rows", [1, 3, 8, 12, 13, 17, 40])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=["to-bf16", "to-fp32"])
def test_every_output_is_written_and_nothing_behind_it(isa, num_rows, out_dtype):
    from triptych_kernels.cpu.linear import pack_panels, packed_bytes
    from triptych_kernels.cpu.panel_memory import own_panels

    weight = noise(65, 31, dtype=torch.bfloat16)
    panels = own_panels(packed_bytes(isa, weight))
    pack_panels(isa, weight, panels)
    plan = isa.native.make_linear(
        0, False, out_dtype is torch.bfloat16, 65, 31, panels.data_ptr(), 0, 0, 0, isa.with_amx
    )
    x = noise(num_rows, 31, dtype=torch.bfloat16)
    out = torch.full((num_rows + 2, 65), torch.nan, dtype=out_dtype)
    isa.native.linear(plan, x.data_ptr(), 31, out[1].data_ptr(), num_rows, 0)
    assert out[0].isnan().all() and out[-1].isnan().all()
    torch.testing.assert_close(
        out[1:-1].double(), exact(x, weight), atol=BF16_TOLERANCE * 16, rtol=BF16_TOLERANCE
    )


def test_a_weight_of_several_large_pages_is_whole(ops: Ops) -> None:
    weight, bias = weight_and_bias(1030, 1100, torch.float32)
    x = noise(2, 1030, dtype=torch.float32)
    linear = ops.pack_linear(weight, bias)
    assert linear.num_bytes > 4 << 20
    torch.testing.assert_close(
        linear(x).double(), exact(x, weight, bias), atol=FP32_TOLERANCE, rtol=FP32_TOLERANCE
    )


def test_no_rows_give_no_rows(ops: Ops) -> None:
    linear = ops.pack_linear(torch.ones(5, 7))
    assert linear(torch.empty(0, 7)).shape == (0, 5)


def test_a_transposed_weight_is_read_as_it_is(ops: Ops) -> None:
    weight = noise(40, 33, dtype=torch.float32)
    x = noise(3, 40, dtype=torch.float32)
    assert torch.equal(ops.pack_linear(weight.T)(x), ops.pack_linear(weight.T.contiguous())(x))


def test_fp16_is_served_by_the_reference(ops: Ops) -> None:
    weight, x = noise(5, 7, dtype=torch.float16), noise(2, 7, dtype=torch.float16)
    torch.testing.assert_close(ops.pack_linear(weight)(x).double(), exact(x, weight), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(torch.ones(2, 8), id="width"),
        pytest.param(torch.ones(2, 7, dtype=torch.bfloat16), id="dtype"),
        pytest.param(torch.ones(7, 2).T, id="columns-apart"),
        pytest.param(torch.ones(7), id="one-dimension"),
        pytest.param(torch.ones(1, 2, 7), id="three-dimensions"),
    ],
)
def test_an_input_of_another_form_is_refused(ops: Ops, x: Tensor) -> None:
    linear = ops.pack_linear(torch.ones(5, 7))
    with pytest.raises(ValueError, match=r"expected torch\.float32 \[T, 7\]"):
        linear(x)


def test_what_cannot_be_packed_is_refused_by_name(ops: Ops) -> None:
    with pytest.raises(ValueError, match="'int4'"):
        ops.pack_linear(torch.ones(5, 7), quantization="int4")
    for shape in ((3, 0), (0, 3), (3,)):
        with pytest.raises(ValueError, match=r"N and K >= 1"):
            ops.pack_linear(torch.ones(shape))
    with pytest.raises(ValueError, match=r"\(5, 7\), bias \(7,\)"):
        ops.pack_linear(torch.ones(5, 7), torch.ones(7))
