"""The references of low-rank additions against one number at a time."""

from __future__ import annotations

import pytest
import torch

from triptych_kernels import REFERENCE

ADAPTERS = [2, -1, 0, 0, 1, 2, -1]


def noise(*shape, seed=0):
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
def test_shrink_equals_the_naive_loop(id_dtype):
    x, weights = noise(7, 5), noise(3, 4, 5, seed=1)
    shrunk = REFERENCE.lora_shrink(x, weights, torch.tensor(ADAPTERS, dtype=id_dtype))
    for token, adapter in enumerate(ADAPTERS):
        for place in range(4):
            expected = (
                0.0
                if adapter < 0
                else sum(float(a * b) for a, b in zip(x[token], weights[adapter, place], strict=True))
            )
            assert float(shrunk[token, place]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
def test_expand_equals_the_naive_loop(id_dtype):
    x, weights, scales, out = noise(7, 4), noise(3, 6, 4, seed=1), noise(3, seed=2), noise(7, 6, seed=3)
    before = out.clone()
    REFERENCE.lora_expand(x, weights, torch.tensor(ADAPTERS, dtype=id_dtype), scales, out)
    for token, adapter in enumerate(ADAPTERS):
        for place in range(6):
            added = (
                0.0
                if adapter < 0
                else float(scales[adapter])
                * sum(float(a * b) for a, b in zip(x[token], weights[adapter, place], strict=True))
            )
            assert float(out[token, place]) == pytest.approx(float(before[token, place]) + added, abs=1e-5)


def test_shrink_of_bf16_is_in_fp32():
    x, weights = noise(2, 64).bfloat16(), noise(1, 3, 64, seed=1).bfloat16()
    shrunk = REFERENCE.lora_shrink(x, weights, torch.tensor([0, 0]))
    torch.testing.assert_close(shrunk, x.float() @ weights[0].float().T, rtol=1e-6, atol=1e-5)


def test_an_adapter_that_nobody_uses_may_hold_anything():
    weights = torch.full((2, 3, 5), float("nan"))
    shrunk = REFERENCE.lora_shrink(noise(4, 5), weights, torch.full((4,), -1))
    assert torch.equal(shrunk, torch.zeros(4, 3))
    out = noise(4, 3)
    before = out.clone()
    expand = torch.full((2, 3, 3), float("nan"))
    REFERENCE.lora_expand(shrunk, expand, torch.full((4,), -1), torch.ones(2), out)
    assert torch.equal(out, before)
