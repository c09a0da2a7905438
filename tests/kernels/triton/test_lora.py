"""Low-rank additions in Triton against the reference."""

from __future__ import annotations

import pytest
import torch

from triptych_kernels import REFERENCE
from triptych_kernels.triton.lora import lora_expand, lora_shrink

# (tokens, adapters, rank, hidden or outputs)
SHAPES = [(1, 1, 8, 63), (19, 4, 16, 129), (33, 3, 1, 1), (7, 5, 70, 64)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def mixed_adapters(num_tokens, num_adapters, device, dtype=torch.int64):
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randint(-1, num_adapters, (num_tokens,), generator=generator).to(device, dtype)


def noise(*shape, device, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lora_shrink_equals_the_reference(shape, dtype, device):
    num_tokens, num_adapters, rank, hidden = shape
    x = noise(num_tokens, hidden, device=device, dtype=dtype)
    weights = noise(num_adapters, rank, hidden, device=device, dtype=dtype, seed=1)
    adapters = mixed_adapters(num_tokens, num_adapters, device)
    shrunk = lora_shrink(x, weights, adapters)
    assert shrunk.dtype is torch.float32
    torch.testing.assert_close(shrunk, REFERENCE.lora_shrink(x, weights, adapters), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lora_expand_equals_the_reference(shape, dtype, device):
    num_tokens, num_adapters, rank, num_outputs = shape
    x = noise(num_tokens, rank, device=device)
    weights = noise(num_adapters, num_outputs, rank, device=device, dtype=dtype, seed=1)
    scales = noise(num_adapters, device=device, seed=2)
    adapters = mixed_adapters(num_tokens, num_adapters, device)
    out = noise(num_tokens, num_outputs, device=device, dtype=dtype, seed=3)
    expected = out.clone()
    lora_expand(x, weights, adapters, scales, out)
    REFERENCE.lora_expand(x, weights, adapters, scales, expected)
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_adapters_in_fp32_serve_activations_in_bf16(device):
    x, weights = noise(5, 40, device=device, dtype=torch.bfloat16), noise(2, 8, 40, device=device)
    adapters = torch.tensor([0, 1, -1, 1, 0], device=device)
    expected = REFERENCE.lora_shrink(x, weights, adapters)
    torch.testing.assert_close(lora_shrink(x, weights, adapters), expected, rtol=1e-5, atol=1e-5)


def test_tokens_without_an_adapter_are_left_as_they_were(device):
    adapters = torch.full((20,), -1, dtype=torch.int32, device=device)
    x, weights = noise(20, 32, device=device), torch.full((2, 8, 32), float("nan"), device=device)
    shrunk = lora_shrink(x, weights, adapters)
    assert torch.equal(shrunk, torch.zeros(20, 8, device=device))
    out = noise(20, 32, device=device)
    before = out.clone()
    lora_expand(shrunk, weights.transpose(1, 2).contiguous(), adapters, torch.ones(2, device=device), out)
    assert torch.equal(out, before)


def test_a_token_has_the_same_bits_alone_and_in_company(device):
    x, weights = noise(40, 33, device=device), noise(3, 8, 33, device=device, seed=1)
    ups, scales = noise(3, 50, 8, device=device, seed=2), noise(3, device=device, seed=3)
    adapters = mixed_adapters(40, 3, device)
    shrunk = lora_shrink(x, weights, adapters)
    out = torch.zeros(40, 50, device=device)
    lora_expand(shrunk, ups, adapters, scales, out)
    for token in (0, 7, 16, 39):
        own = slice(token, token + 1)
        alone = lora_shrink(x[own], weights, adapters[own])
        out_alone = torch.zeros(1, 50, device=device)
        lora_expand(alone, ups, adapters[own], scales, out_alone)
        assert torch.equal(alone, shrunk[own])
        assert torch.equal(out_alone, out[own])


def test_a_broken_adapter_harms_only_its_own_tokens(device):
    x, weights = noise(20, 32, device=device), noise(3, 8, 32, device=device, seed=1)
    adapters = mixed_adapters(20, 3, device)
    clean = lora_shrink(x, weights, adapters)
    weights[1] = float("nan")
    shrunk = lora_shrink(x, weights, adapters)
    assert shrunk[adapters == 1].isnan().all()
    assert torch.equal(shrunk[adapters != 1], clean[adapters != 1])


def test_columns_of_a_wider_result_may_be_added_to(device):
    x, weights = noise(6, 8, device=device), noise(2, 20, 8, device=device, seed=1)
    adapters, scales = mixed_adapters(6, 2, device), noise(2, device=device, seed=2)
    wide = torch.zeros(6, 50, device=device)
    lora_expand(x, weights, adapters, scales, wide[:, 10:30])
    expected = torch.zeros(6, 50, device=device)
    REFERENCE.lora_expand(x, weights, adapters, scales, expected[:, 10:30])
    torch.testing.assert_close(wide, expected, rtol=1e-5, atol=1e-5)


def test_an_empty_step_adds_nothing(device):
    none = torch.zeros(0, dtype=torch.int32, device=device)
    weights, out = noise(2, 8, 32, device=device), torch.zeros(0, 8, device=device)
    assert lora_shrink(torch.zeros(0, 32, device=device), weights, none).shape == (0, 8)
    lora_expand(torch.zeros(0, 32, device=device), weights, none, torch.ones(2, device=device), out)


def test_what_does_not_fit_together_is_refused(device):
    x, weights = noise(3, 32, device=device), noise(2, 8, 32, device=device)
    adapters = torch.zeros(3, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="not contiguous rows of 31"):
        lora_shrink(x[:, :31], weights, adapters)
    with pytest.raises(ValueError, match="their stride is 3"):
        lora_shrink(x.t().contiguous().t(), weights, adapters)
    with pytest.raises(ValueError, match="3 tokens have"):
        lora_shrink(x, weights, adapters[:2])
    with pytest.raises(ValueError, match="not rows of 8"):
        lora_expand(x, weights, adapters, torch.ones(2, device=device), torch.zeros(3, 7, device=device))
