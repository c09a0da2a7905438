"""Norms, rotary positions, activations and projections, against the plainest way to write them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from triptych_kernels import REFERENCE, ExpertBiases, ops_for
from triptych_kernels.reference.activation import gelu_tanh_and_mul, sigmoid_and_mul, silu_and_mul
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


def test_a_gate_lets_through_by_its_gelu():
    x = noise(5, 14)
    gate, up = x[:, :7].double(), x[:, 7:]
    slope = torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
    torch.testing.assert_close(gelu_tanh_and_mul(x), (0.5 * gate * (1 + slope) * up).float())


def test_a_gate_lets_through_by_its_sigmoid():
    x = noise(5, 14)
    torch.testing.assert_close(sigmoid_and_mul(x), x[:, 7:] / (1 + torch.exp(-x[:, :7])))


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
                cached = key_cache[slots[token] // 2, head - num_heads, slots[token] % 2]
                torch.testing.assert_close(cached, expected)
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


# The reference of mixtures of experts against one token and one expert at a time.

_GENERATOR_SEED = 5


def naive_token(x, gate_up, down, expert_ids, expert_weights, first_expert, biases):
    num_features = down.shape[2]
    output = [0.0] * down.shape[1]
    for expert, weight in zip(expert_ids, expert_weights, strict=True):
        local = expert - first_expert
        if not 0 <= local < down.shape[0]:
            continue
        projected = [sum(w * v for w, v in zip(row, x, strict=True)) for row in gate_up[local].tolist()]
        if biases is not None:
            projected = [p + b for p, b in zip(projected, biases.gate_up[local].tolist(), strict=True)]
        pairs = zip(projected[:num_features], projected[num_features:], strict=True)
        if biases is None:
            hidden = [gate / (1 + math.exp(-gate)) * up for gate, up in pairs]
        else:
            clamped = [(min(gate, 7.0), max(-7.0, min(up, 7.0))) for gate, up in pairs]
            hidden = [gate / (1 + math.exp(-1.702 * gate)) * (up + 1) for gate, up in clamped]
        for cached, row in enumerate(down[local].tolist()):
            added = 0.0 if biases is None else biases.down[local, cached].item()
            output[cached] += weight * (sum(w * h for w, h in zip(row, hidden, strict=True)) + added)
    return output


@pytest.mark.parametrize("first_expert", [0, 2])
@pytest.mark.parametrize("is_clamped", [False, True], ids=["silu", "clamped with biases"])
@pytest.mark.parametrize(("num_tokens", "num_per_token"), [(1, 1), (7, 2), (12, 4)])
def test_experts_equal_the_naive_loop(num_tokens, num_per_token, is_clamped, first_expert):
    generator = torch.Generator().manual_seed(_GENERATOR_SEED)
    x = torch.randn(num_tokens, 6, generator=generator)
    gate_up = torch.randn(4, 10, 6, generator=generator)
    down = torch.randn(4, 6, 5, generator=generator)
    ids = torch.stack([torch.randperm(6, generator=generator)[:num_per_token] for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, num_per_token, generator=generator)

    biases, gate = None, "silu"
    if is_clamped:
        wide = 8.0 * torch.randn(4, 10, generator=generator)
        biases, gate = ExpertBiases(wide, torch.randn(4, 6, generator=generator)), "clamped_swiglu"

    experts = REFERENCE.pack_experts(gate_up, down, biases=biases, gate=gate, first_expert=first_expert)
    output = experts(x, ids, weights)

    expected = [
        naive_token(row.tolist(), gate_up, down, row_ids.tolist(), row_weights.tolist(), first_expert, biases)
        for row, row_ids, row_weights in zip(x, ids, weights, strict=True)
    ]
    torch.testing.assert_close(output, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_the_sum_over_experts_is_rounded_once():
    x = torch.ones(1, 1, dtype=torch.bfloat16)
    gate_up = torch.ones(3, 2, 1, dtype=torch.bfloat16)
    down = torch.ones(3, 1, 1, dtype=torch.bfloat16)
    # Each of the small parts alone would vanish when it is added to the first in bf16.
    weights = torch.tensor([[1.0, 2**-9, 2**-9]])
    part = float(torch.sigmoid(torch.tensor(1.0)).to(torch.bfloat16))
    output = REFERENCE.pack_experts(gate_up, down)(x, torch.tensor([[0, 1, 2]]), weights)
    assert output.item() == float(torch.tensor(part * (1 + 2**-8)).to(torch.bfloat16))
    assert output.item() > part


def test_num_bytes_is_what_the_weights_take():
    experts = REFERENCE.pack_experts(torch.zeros(2, 8, 3), torch.zeros(2, 3, 4))
    assert experts.num_bytes == 4 * (2 * 8 * 3 + 2 * 3 * 4)


def test_experts_taken_and_joined_are_those_that_were_packed_together():
    generator = torch.Generator().manual_seed(_GENERATOR_SEED)
    gate_up, down = torch.randn(4, 10, 6, generator=generator), torch.randn(4, 6, 5, generator=generator)
    experts = REFERENCE.pack_experts(gate_up, down, first_expert=2)
    x, ids, weights = torch.ones(1, 6), torch.tensor([[2, 5]]), torch.ones(1, 2)
    again = experts.take(2, 3).join(experts.take(3, 6))
    assert again.expert_range == experts.expert_range == (2, 6)
    assert torch.equal(again(x, ids, weights), experts(x, ids, weights))
    with pytest.raises(ValueError, match="do not follow"):
        experts.take(2, 3).join(experts.take(4, 6))


# The reference of low-rank additions against one number at a time.

SLOTS = [2, -1, 0, 0, 1, 2, -1]
RANKS = {0: (4, 4), 1: (None, 1), 2: (3, 7)}


def values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_additions_equal_the_naive_loop(dtype):
    low_rank = REFERENCE.make_low_rank(5, (6, 2), 3, 7, dtype, torch.device("cpu"))
    x, expected = values(7, 5).to(dtype), torch.zeros(7, 8)
    for slot, ranks in RANKS.items():
        parts = []
        for rank, columns in zip(ranks, (range(6), range(6, 8)), strict=True):
            if rank is None:
                parts.append(None)
                continue
            down, up = (
                values(rank, 5, seed=rank).to(dtype),
                values(len(columns), rank, seed=slot + 9).to(dtype),
            )
            parts.append(REFERENCE.pack_low_rank(down, up, 0.5 + slot))
            for token in (index for index, each in enumerate(SLOTS) if each == slot):
                shrunk = [
                    sum(float(a * b) for a, b in zip(x[token].float(), row.float(), strict=True))
                    for row in down
                ]
                for column, row in zip(columns, up.float(), strict=True):
                    expected[token, column] = (0.5 + slot) * sum(
                        float(a) * b for a, b in zip(row, shrunk, strict=True)
                    )
        low_rank.put(slot, parts)
    torch.testing.assert_close(low_rank(x, torch.tensor(SLOTS)), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pack", [REFERENCE.pack_linear, REFERENCE.pack_gated_linear])
def test_a_row_whose_addend_is_zero_keeps_its_bits(pack):
    linear, x = pack(values(6, 5, seed=1).bfloat16()), values(4, 5).bfloat16()
    addend = values(4, 6, seed=2)
    addend[1:3] = 0.0
    assert torch.equal(linear(x, addend)[1:3], linear(x)[1:3])
    assert not torch.equal(linear(x, addend), linear(x))
    assert linear(x, addend).dtype is torch.bfloat16


# The reference of token masks against one bit at a time.


def packed(allowed: list[set[int]], vocab_size: int) -> torch.Tensor:
    """Masks in which exactly these tokens are allowed."""
    rows = []
    for tokens in allowed:
        words = [0] * -(-vocab_size // 32)
        for token in tokens:
            words[token // 32] |= 1 << (token % 32)
        rows.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 63, 64, 129])
def test_exactly_the_allowed_tokens_keep_their_logits(vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(4, vocab_size, generator=generator)
    allowed = [
        set(),
        set(range(vocab_size)),
        {vocab_size - 1},
        set(torch.randperm(vocab_size, generator=generator)[: vocab_size // 2].tolist()),
    ]
    before = logits.clone()
    REFERENCE.apply_token_mask(logits, packed(allowed, vocab_size))
    for row, tokens in enumerate(allowed):
        for token in range(vocab_size):
            expected = float(before[row, token]) if token in tokens else float("-inf")
            assert float(logits[row, token]) == expected


def test_the_sign_bit_of_a_word_is_a_token_too():
    logits = torch.zeros(1, 64)
    REFERENCE.apply_token_mask(logits, torch.tensor([[-(2**31), 0]], dtype=torch.int32))
    assert logits.isfinite().nonzero().tolist() == [[0, 31]]
