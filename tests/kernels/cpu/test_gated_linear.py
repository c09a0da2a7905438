"""Gated projections: the bits of a projection and an activation one after the other, in every batch."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cpu.test_linear import ALL_KINDS, BATCHES, noise, packed, weight_and_bias
from triptych_kernels import REFERENCE
from triptych_kernels.ops import Ops


@pytest.mark.parametrize(("K", "F"), [(1, 1), (63, 31), (320, 864), (129, 33), (576, 48)])
@pytest.mark.parametrize(("dtype", "kind"), ALL_KINDS)
@pytest.mark.parametrize("has_bias", [False, True], ids=["no-bias", "bias"])
def test_bits_are_those_of_the_two_ops(ops: Ops, K: int, F: int, dtype, kind: str, has_bias: bool):
    linear = packed(ops.pack_linear, K, 2 * F, dtype, kind, has_bias=has_bias)
    x = noise(200, K, dtype=dtype) * 3.0
    for gate, activate in (("silu", ops.silu_and_mul), ("gelu_tanh", ops.gelu_tanh_and_mul)):
        gated = packed(ops.pack_gated_linear, K, 2 * F, dtype, kind, has_bias=has_bias, gate=gate)
        assert (gated.in_features, gated.out_features) == (K, F)
        for size in BATCHES:
            assert torch.equal(gated(x[:size]), activate(linear(x[:size]))), f"{gate} of {size} rows"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
def test_result_is_that_of_the_reference_up_to_rounding(ops: Ops, gate: str, dtype):
    weight, bias = weight_and_bias(320, 130, dtype)
    x = noise(31, 320, dtype=dtype)
    expected = REFERENCE.pack_gated_linear(weight, bias, gate=gate)(x)
    tolerance = 2.0**-6 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(
        ops.pack_gated_linear(weight, bias, gate=gate)(x), expected, atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize(("dtype", "kind"), ALL_KINDS)
def test_the_number_of_threads_changes_no_bit(ops, use_threads, dtype, kind):
    gated = packed(ops.pack_gated_linear, 320, 2 * 865, dtype, kind)
    for size in (1, 8, 13, 200):
        x = noise(size, 320, dtype=dtype)
        alone = gated(x)
        use_threads(2)
        assert torch.equal(gated(x), alone), f"{size} rows"
        use_threads(1)


def test_other_dtypes_go_to_the_reference(ops: Ops):
    weight, x = noise(6, 4, dtype=torch.float16), noise(3, 4, dtype=torch.float16)
    assert torch.equal(ops.pack_gated_linear(weight)(x), REFERENCE.pack_gated_linear(weight)(x))


@pytest.mark.parametrize(("dtype", "kind"), ALL_KINDS)
@pytest.mark.parametrize("pack", ["pack_linear", "pack_gated_linear"])
def test_rows_of_long_prompts_are_each_row_alone_where_weights_come_in_slices(
    ops: Ops, pack: str, dtype, kind: str
):
    # With AMX 768 numbers are two slices, and 300 rows two groups of blocks.
    linear = packed(getattr(ops, pack), 768, 2 * 65, dtype, kind)
    x = noise(300, 768, dtype=dtype)
    alone = torch.cat([linear(row) for row in x.split(1)])
    for size in (33, 47, 64, 65, 80, 81, 256, 257, 273, 300):
        assert torch.equal(linear(x[:size]), alone[:size]), f"{size} rows"
