"""Norms, rotary positions, activations and projections, against the plainest way to write them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from triptych_kernels import ops_for
from triptych_kernels.reference.activation import silu_and_mul
from triptych_kernels.reference.linear import pack_linear
from triptych_kernels.reference.norm import add_rms_norm, rms_norm
from triptych_kernels.reference.rotary import rotary_kv_write


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("width", [1, 63, 129])
def test_a_row_is_divided_by_its_root_mean_square(width):
    x, weight = noise(3, width), noise(width, seed=1)
    for row, normed in zip(x.tolist(), rms_norm(x, weight, 1e-5).tolist(), strict=True):
        scale = 1 / math.sqrt(sum(value * value for value in row) / width + 1e-5)
        expected = [value * scale * each for value, each in zip(row, weight.tolist(), strict=True)]
        assert normed == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_what_is_added_stays_in_the_residual_as_rounded():
    x, residual, weight = (
        noise(4, 32, dtype=torch.bfloat16),
        noise(4, 32, seed=1).bfloat16(),
        noise(32, seed=2).bfloat16(),
    )
    expected = x + residual
    normed = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, expected)
    assert torch.equal(normed, rms_norm(expected, weight, 1e-6))


def test_a_gate_lets_through_by_its_silu():
    x = noise(5, 14)
    gate, up = x[:, :7], x[:, 7:]
    torch.testing.assert_close(silu_and_mul(x), gate * torch.sigmoid(gate) * up)


@pytest.mark.parametrize("has_norms", [False, True], ids=["plain", "normed"])
def test_queries_and_keys_are_turned_by_their_positions_and_values_are_not(has_norms):
    num_heads, num_kv_heads, dim, num_tokens = 4, 2, 8, 5
    qkv = noise(num_tokens, (num_heads + 2 * num_kv_heads) * dim)
    positions, slots = torch.tensor([3, 0, 7, 2, 9]), torch.tensor([4, 1, -1, 7, 0])
    angles = torch.arange(10.0)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.01])
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    norms = (
        {"query_norm": noise(dim, seed=4), "key_norm": noise(dim, seed=5), "eps": 1e-6} if has_norms else {}
    )
    key_cache, value_cache = torch.zeros(4, num_kv_heads, 2, dim), torch.zeros(4, num_kv_heads, 2, dim)
    before = qkv.clone().view(num_tokens, -1, dim)
    rotary_kv_write(qkv, positions, table, slots, key_cache, value_cache, num_heads=num_heads, **norms)
    after = qkv.view(num_tokens, -1, dim)
    for token in range(num_tokens):
        for head in range(num_heads + num_kv_heads):
            source = before[token, head]
            if has_norms:
                source = rms_norm(source, norms["query_norm" if head < num_heads else "key_norm"], 1e-6)
            pairs = torch.complex(source[: dim // 2], source[dim // 2 :])
            turned = pairs * torch.polar(torch.ones(dim // 2), angles[positions[token]])
            expected = torch.cat([turned.real, turned.imag])
            if head < num_heads:
                torch.testing.assert_close(after[token, head], expected)
            elif slots[token] >= 0:
                place = key_cache[slots[token] // 2, head - num_heads, slots[token] % 2]
                torch.testing.assert_close(place, expected)
    assert torch.equal(value_cache[3, 1, 1], before[3, num_heads + num_kv_heads + 1])
    # Four of the five tokens are stored, in both caches.
    assert int(key_cache.any(-1).sum()) == 4 * num_kv_heads
    assert int(value_cache.any(-1).sum()) == 4 * num_kv_heads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_packed_projection_is_the_projection(dtype):
    weight, bias, x = (
        noise(24, 40, dtype=dtype),
        noise(24, seed=1, dtype=dtype),
        noise(7, 40, seed=2, dtype=dtype),
    )
    linear = pack_linear(weight, bias)
    assert (linear.in_features, linear.out_features) == (40, 24)
    assert linear.num_bytes == (24 * 40 + 24) * dtype.itemsize
    torch.testing.assert_close(linear(x), F.linear(x, weight, bias), rtol=2e-2, atol=2e-2)
    assert pack_linear(weight, out_dtype=torch.float32)(x).dtype is torch.float32


def test_the_reference_has_no_quantization_and_says_so():
    with pytest.raises(ValueError, match="'int8' needs native kernels"):
        pack_linear(noise(4, 4), quantization="int8")


def test_the_door_offers_ops_for_this_machine():
    assert ops_for(torch.device("cpu")).name in (
        "reference",
        "native-cpu-avx2",
        "native-cpu",
        "native-cpu-amx",
    )
