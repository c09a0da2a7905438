"""Native projections: right, and the same bits for a row whatever it is batched with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from triptych_kernels import JoinedWeight, QuantizedWeight, Weight, as_tensor
from triptych_kernels.cpu.elementwise import GATES
from triptych_kernels.cpu.loader import Isa
from triptych_kernels.ops import Linear, Ops, PackLinear
from triptych_kernels.reference.linear import round_to_int8

SHAPES = [(1, 1), (2, 33), (63, 129), (129, 63), (31, 500), (320, 640), (576, 96)]
BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 31, 33, 64, 71, 200)
# Of stored numbers of 4 bits.
MXFP4 = [sign * size for sign in (1, -1) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
IQ4_NL = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
FP8 = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
WHOLE_4, WHOLE_6, WHOLE_8 = (torch.arange(1 << bits).float() for bits in (4, 6, 8))
# By name: what codes stand for, inputs of a group (0: all), and what a group has besides its scale.
CODES: dict[str, tuple[Tensor, int, str]] = {
    "4-bit": (WHOLE_4 - 8, 32, ""),
    "4-bit-minima": (WHOLE_4, 32, "minima"),
    "4-bit-zeros": (WHOLE_4, 128, "zeros"),
    "4-bit-zero": (WHOLE_4, 64, "zero"),
    "4-bit-order": (WHOLE_4, 32, "order"),
    "mxfp4": (torch.tensor(MXFP4), 32, ""),
    "iq4-nl": (torch.tensor(IQ4_NL).float(), 32, ""),
    "6-bit": (WHOLE_6 - 32, 16, ""),
    "8-bit": (WHOLE_8 - 128, 32, "high"),
    "8-bit-row": (WHOLE_8 - 128, 0, ""),
    "8-bit-zeros": (WHOLE_8, 64, "zeros"),
    "fp8": (FP8, 128, "low"),
}
JOINED = "joined"
# Behind the name of codes: rows are rounded to int8.
INT8_ROWS = " int8-rows"
NARROW = [
    pytest.param(dtype, name, id=f"{name}-{str(dtype)[6:]}")
    for name in (*CODES, JOINED)
    for dtype in (torch.bfloat16, torch.float32)
]
KINDS = [
    pytest.param(torch.bfloat16, "", id="bf16"),
    pytest.param(torch.float32, "", id="fp32"),
    pytest.param(torch.bfloat16, "int8", id="int8-bf16"),
    pytest.param(torch.float32, "int8", id="int8-fp32"),
]
# With these each path of the kernels is taken.
ALL_KINDS = [
    *KINDS,
    *(param for param in NARROW if param.values[1] in ("4-bit", "4-bit-minima", "8-bit-zeros")),
    pytest.param(torch.bfloat16, "4-bit-order", id="4-bit-order"),
    pytest.param(torch.bfloat16, "6-bit", id="6-bit"),
    pytest.param(torch.bfloat16, JOINED, id=JOINED),
    pytest.param(torch.bfloat16, "4-bit-minima" + INT8_ROWS, id="4-bit-minima-int8-rows"),
    pytest.param(torch.bfloat16, "6-bit" + INT8_ROWS, id="6-bit-int8-rows"),
    pytest.param(torch.float32, "8-bit-zeros" + INT8_ROWS, id="8-bit-zeros-int8-rows"),
]
# Of a sum of about 1 in fp32, from bf16 products or fp32 ones; and of one rounding to bf16.
FP32_TOLERANCE = 3e-5
BF16_TOLERANCE = 2.0**-8


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight_and_bias(K: int, N: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return noise(N, K, dtype=dtype, seed=1) / K**0.5, noise(N, dtype=dtype, seed=2)


def codes_of(K: int, N: int, dtype: torch.dtype, kind: str, seed: int = 1) -> QuantizedWeight:
    """A weight of codes, whose numbers are of the size of those of weight_and_bias."""
    values, size, form = CODES[kind]
    size, bits = size or K, (len(values) - 1).bit_length()
    generator = torch.Generator().manual_seed(seed)

    def drawn(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    num_groups = -(-K // size)
    first = int(form == "high")  # without the lowest number, which has no counterpart
    end = 127 if form == "low" else 1 << bits
    codes = drawn(first, end, N, K).to(torch.uint8)
    spread = float(values[first:end].std()) * K**0.5
    scales = (torch.rand(N, num_groups, generator=generator) + 0.5) / spread
    zeros = minima = groups = None
    if form == "zeros":
        zeros = drawn(0, 1 << bits, N, num_groups).float()
    elif form == "zero":
        zeros = torch.full((N, num_groups), 8.0)
    elif form in ("minima", "order"):
        minima = ((torch.rand(N, num_groups, generator=generator) + 0.5) * 8 / spread).half().float()
    if form == "order":
        groups = (torch.arange(K) // size)[torch.randperm(K, generator=generator)]
    return QuantizedWeight(codes, bits, values, scales.half().float(), size, dtype, zeros, minima, groups)


def weight_of(K: int, N: int, dtype: torch.dtype, kind: str) -> Weight:
    """kind: of CODES, or JOINED; else the numbers themselves."""
    if kind in CODES:
        return codes_of(K, N, dtype, kind)
    if kind != JOINED:
        return weight_and_bias(K, N, dtype)[0]
    sizes = (N // 3, N // 2, N - N // 3 - N // 2)
    kinds = ("4-bit-minima", "", "6-bit")
    return JoinedWeight(
        tuple(
            codes_of(K, size, dtype, each) if each else weight_and_bias(K, size, torch.bfloat16)[0].to(dtype)
            for size, each in zip(sizes, kinds, strict=True)
            if size
        )
    )


def packed(
    pack: PackLinear, K: int, N: int, dtype: torch.dtype, kind: str, *, has_bias: bool = True, **options
) -> Linear:
    """kind: as for weight_of, with or without INT8_ROWS, or a quantization at load."""
    bias = weight_and_bias(K, N, dtype)[1] if has_bias else None
    name = kind.removesuffix(INT8_ROWS)
    activations = "exact" if kind == name else "int8"
    quantization = "" if name in CODES or name == JOINED else name
    weight = weight_of(K, N, dtype, name)
    return pack(weight, bias, quantization=quantization, activations=activations, **options)


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


@pytest.mark.parametrize(("K", "N"), [(1, 1), (63, 129), (320, 640), (1000, 33)])
@pytest.mark.parametrize(("dtype", "kind"), NARROW)
def test_codes_give_the_product_of_what_they_stand_for(ops, K, N, dtype, kind):
    weight = as_tensor(weight_of(K, N, torch.float32, kind))
    bias = weight_and_bias(K, N, dtype)[1]
    x = noise(77, K, dtype=dtype)
    linear = packed(ops.pack_linear, K, N, dtype, kind, out_dtype=torch.float32)
    difference = linear(x).double() - exact(x, weight, bias)
    # Minima that are made of zeros are rounded to fp16; so are all on AVX2, where FP8 is dequantized.
    rounded = ["4-bit-zeros", "8-bit-zeros"]
    rounded += ["4-bit-minima", "4-bit-order", JOINED, "fp8"] if ops.name.endswith("avx2") else []
    is_rounded = dtype is torch.bfloat16 and kind in rounded
    sizes = exact(x.abs(), weight.abs())
    assert (difference.abs() <= 2 * FP32_TOLERANCE + (BF16_TOLERANCE if is_rounded else 0.0) * sizes).all()


@pytest.mark.parametrize(("K", "N"), [(1, 1), (63, 129), (320, 640)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kind", [kind for kind in CODES if kind not in ("fp8", "4-bit-order")])
def test_rows_of_int8_are_rounded_by_groups_and_no_further(ops, K, N, dtype, kind):
    weight, bias = codes_of(K, N, torch.float32, kind), weight_and_bias(K, N, dtype)[1]
    x = (noise(77, K, dtype=dtype) * torch.logspace(-3, 3, 77)[:, None]).to(dtype)
    x[5:9] = 0.0
    rounded = round_to_int8(x, CODES[kind][1] or min(K, 64))
    linear = packed(ops.pack_linear, K, N, dtype, kind + INT8_ROWS, out_dtype=torch.float32)
    difference = linear(x).double() - exact(rounded, weight.dequantize(), bias)
    sizes = exact(rounded.abs(), weight.dequantize().abs())
    tolerance = 2.0**-11 if "zeros" in kind else FP32_TOLERANCE
    assert (difference.abs() <= tolerance * (sizes + bias.double().abs())).all()
    assert ((rounded - x.float()).abs() <= x.float().abs().amax(1, keepdim=True) / 127 * 0.5001).all()


def test_rows_are_not_rounded_for_numbers_that_are_not_whole(ops: Ops) -> None:
    assert ops.activations == ("int8", "exact")
    weight, x = codes_of(320, 65, torch.bfloat16, "fp8"), noise(3, 320, dtype=torch.bfloat16)
    int8, exact = (ops.pack_linear(weight, activations=each)(x) for each in ops.activations)
    assert torch.equal(int8, exact)


@pytest.mark.parametrize("kind", [*CODES, *(kind + INT8_ROWS for kind in CODES)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_rows_of_the_weight_are_the_numbers(ops: Ops, kind: str, dtype: torch.dtype) -> None:
    weight = codes_of(100, 65, dtype, kind.removesuffix(INT8_ROWS))
    look_up = ops.look_up(packed(ops.pack_linear, 100, 65, dtype, kind))
    if kind.startswith("fp8") and ops.name.endswith("avx2"):
        assert look_up is None
        return
    assert look_up is not None
    indices = torch.tensor([64, 0, 33, 0, 31, 32, 7])
    rtol = BF16_TOLERANCE if dtype is torch.bfloat16 else FP32_TOLERANCE
    atol = rtol * 0.1
    expected, found = weight.dequantize()[indices].float(), look_up(indices)
    assert found.dtype is dtype
    if "zeros" in kind:
        # Minima that are made of zeros are rounded to fp16; a number may then be rounded to the next of bf16.
        rtol, atol = 2 * rtol, atol + 2.0**-11 * float(expected.abs().max())
    torch.testing.assert_close(found.float(), expected, rtol=rtol, atol=atol)
    assert look_up(indices[:0]).shape == (0, 100)
    with pytest.raises(IndexError, match="a row is not below 65"):
        look_up(torch.tensor([3, 65]))
    with pytest.raises(IndexError, match="a row is not below 65"):
        look_up(torch.tensor([-1]))


def test_only_weights_of_one_kind_of_codes_are_looked_up(ops: Ops) -> None:
    gated = packed(ops.pack_gated_linear, 100, 64, torch.bfloat16, "4-bit")
    joined, wide = (packed(ops.pack_linear, 100, 64, torch.bfloat16, kind) for kind in (JOINED, ""))
    assert [ops.look_up(each) for each in (gated, joined, wide)] == [None, None, None]


@pytest.mark.parametrize(("K", "N"), [(63, 129), (320, 640), (2, 33)])
@pytest.mark.parametrize(("dtype", "kind"), ALL_KINDS)
def test_a_row_has_the_same_bits_in_every_batch_and_position(ops, K, N, dtype, kind):
    linear = packed(ops.pack_linear, K, N, dtype, kind, out_dtype=torch.float32)
    x = noise(200, K, dtype=dtype)
    together = linear(x)
    for size in BATCHES:
        assert torch.equal(linear(x[:size]), together[:size]), f"first {size} rows"
        assert torch.equal(linear(x[-size:]), together[-size:]), f"last {size} rows"


@pytest.mark.parametrize(("dtype", "kind"), ALL_KINDS)
def test_the_number_of_threads_changes_no_bit(ops, use_threads, dtype, kind):
    linear = packed(ops.pack_linear, 320, 801, dtype, kind)
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


@pytest.mark.parametrize(("dtype", "kind"), ALL_KINDS)
def test_numbers_that_are_not_finite_stay_in_their_row(ops, dtype, kind):
    linear = packed(ops.pack_linear, 63, 65, dtype, kind)
    x = noise(30, 63, dtype=dtype)
    clean = linear(x)
    x[4, 3], x[17, 62], x[29, 0] = torch.nan, torch.inf, -torch.inf
    poisoned = linear(x)
    others = [row for row in range(30) if row not in (4, 17, 29)]
    assert torch.equal(poisoned[others], clean[others])
    assert not poisoned[[4, 17, 29]].isfinite().any(1).all() and poisoned[4].isnan().all()


@pytest.mark.parametrize(("dtype", "kind"), ALL_KINDS)
def test_rows_may_lie_apart_and_what_lies_between_is_not_read(ops, dtype, kind):
    linear = packed(ops.pack_linear, 63, 65, dtype, kind)
    apart = torch.full((14, 80), torch.nan, dtype=dtype)
    for size in (1, 14):
        x = noise(size, 63, dtype=dtype)
        apart[:size, 5:68] = x
        assert torch.equal(linear(apart[:size, 5:68]), linear(x))


@pytest.mark.parametrize("num_rows", [1, 3, 8, 12, 13, 17, 40])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=["to-bf16", "to-fp32"])
def test_every_output_is_written_and_nothing_behind_it(isa: Isa, num_rows: int, out_dtype: torch.dtype):
    from triptych_kernels.cpu.linear import pack
    from triptych_kernels.cpu.panel_memory import PanelMemory

    weight = noise(65, 31, dtype=torch.bfloat16)
    part = pack(isa, weight, PanelMemory())
    plan = isa.native.make_linear(
        False,
        out_dtype is torch.bfloat16,
        0,
        isa.with_amx,
        GATES["silu"],
        *(*part.layout, part.panels.data_ptr(), 0, 0, 0, 0, 0),
    )
    x = noise(num_rows, 31, dtype=torch.bfloat16)
    out = torch.full((num_rows + 2, 65), torch.nan, dtype=out_dtype)
    isa.native.linear(plan, x.data_ptr(), 31, out[1].data_ptr(), num_rows, 0)
    assert out[0].isnan().all() and out[-1].isnan().all()
    torch.testing.assert_close(
        out[1:-1].double(), exact(x, weight), atol=BF16_TOLERANCE * 16, rtol=BF16_TOLERANCE
    )


@pytest.mark.parametrize(
    ("kind", "bits_a_number"),
    [
        ("4-bit", 4.5),
        ("4-bit-minima", 5.0),
        ("4-bit-zero", 4.25),
        ("6-bit", 9.0),
        ("8-bit", 8.5),
        ("4-bit-minima" + INT8_ROWS, 5.0),
        ("6-bit" + INT8_ROWS, 7.0),
        ("8-bit" + INT8_ROWS, 8.5),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_codes_keep_their_width(ops: Ops, kind: str, bits_a_number: float, dtype: torch.dtype) -> None:
    linear = packed(ops.pack_linear, 1024, 640, dtype, kind, has_bias=False)
    if kind == "4-bit-minima" and dtype is torch.float32 and ops.name.endswith("avx2"):
        # Codes have a sign there, and minima the more bits.
        bits_a_number += 1.0
    most_others = 2 * 128 + 640 * 4  # a table, scales of rows
    assert 0 <= linear.num_bytes - 1024 * 640 * bits_a_number / 8 <= most_others


@pytest.mark.parametrize("kind", ["4-bit-minima", "6-bit"])
def test_scales_that_fp16_does_not_hold_are_kept_for_fp32_and_rounded_for_bf16(ops: Ops, kind: str) -> None:
    weight = codes_of(320, 65, torch.float32, kind)
    scales = weight.scales * torch.logspace(-12, 3, 65)[:, None] * 1.0001
    minima = None if weight.minima is None else scales * 7.3
    weight = replace(weight, scales=scales, minima=minima)
    for dtype, tolerance in ((torch.float32, FP32_TOLERANCE), (torch.bfloat16, 2.0**-11)):
        x = noise(9, 320, dtype=dtype)
        product = ops.pack_linear(weight.to(dtype=dtype), out_dtype=torch.float32)(x).double()
        expected, sizes = exact(x, weight.dequantize()), exact(x.abs(), weight.dequantize().abs())
        assert ((product - expected).abs() <= tolerance * sizes).all()


def test_codes_that_kernels_cannot_store_are_dequantized(ops: Ops) -> None:
    weight = codes_of(96, 65, torch.float32, "4-bit")
    odd = torch.rand(16, generator=torch.Generator().manual_seed(3))
    unequal = torch.arange(96) // 40
    for other in (replace(weight, values=odd), replace(weight, groups=unequal)):
        x = noise(5, 96, dtype=torch.float32)
        linear, dequantized = ops.pack_linear(other), ops.pack_linear(other.dequantize())
        assert linear.num_bytes == dequantized.num_bytes
        assert torch.equal(linear(x), dequantized(x))


def test_codes_of_small_groups_are_dequantized(ops: Ops) -> None:
    weight = codes_of(96, 65, torch.float32, "4-bit")
    small = replace(weight, group_size=8, scales=weight.scales.repeat_interleave(4, 1))
    x = noise(5, 96, dtype=torch.float32)
    assert torch.equal(ops.pack_linear(small)(x), ops.pack_linear(weight.dequantize())(x))


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
