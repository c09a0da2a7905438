"""The references give on a GPU what they give on a CPU."""

from __future__ import annotations

import pytest
import torch

from triptych_kernels import kv_write, uniform_noise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_noise_is_the_same_on_every_device():
    seeds = torch.tensor([0, 1, -1, 2**62], dtype=torch.int64)
    positions = torch.tensor([0, 7, 4096, 2**31], dtype=torch.int64)
    there = uniform_noise(seeds.cuda(), positions.cuda(), 3)
    assert torch.equal(there.cpu(), uniform_noise(seeds, positions, 3))


def test_tokens_land_at_the_same_slots():
    generator = torch.Generator().manual_seed(1)
    keys, values = torch.randn(7, 2, 5, generator=generator), torch.randn(7, 2, 4, generator=generator)
    slots = torch.randperm(24, generator=generator)[:7]
    key_cache, value_cache = torch.zeros(2, 8, 3, 5), torch.zeros(2, 8, 3, 4)
    key_cache_there, value_cache_there = key_cache.cuda(), value_cache.cuda()

    kv_write(keys, values, key_cache, value_cache, slots)
    kv_write(keys.cuda(), values.cuda(), key_cache_there, value_cache_there, slots.cuda())

    assert torch.equal(key_cache_there.cpu(), key_cache)
    assert torch.equal(value_cache_there.cpu(), value_cache)
