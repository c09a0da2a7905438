"""Storing keys and values in Triton against the reference."""

from __future__ import annotations

import pytest
import torch

from triptych_kernels import REFERENCE
from triptych_kernels.triton.kv_write import kv_write

# (tokens, KV heads, key dim, value dim, block size)
SHAPES = [(1, 1, 1, 1, 1), (19, 2, 5, 7, 4), (33, 3, 64, 63, 16), (9, 33, 129, 80, 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def noise(shape, device, dtype=torch.float32):
    """Keys, values, caches and slots, a few of which are negative."""
    num_tokens, num_heads, key_dim, value_dim, block_size = shape
    generator = torch.Generator().manual_seed(num_tokens)
    num_blocks = -(-num_tokens // block_size) + 3
    sizes = [(num_tokens, num_heads, dim) for dim in (key_dim, value_dim)]
    sizes += [(num_blocks, num_heads, block_size, dim) for dim in (key_dim, value_dim)]
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens]
    slots[2::5] = -1
    tensors = [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]
    return [*tensors, slots.to(device)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kv_write_equals_the_reference(shape, dtype, device):
    keys, values, key_cache, value_cache, slots = noise(shape, device, dtype)
    expected = key_cache.clone(), value_cache.clone()
    REFERENCE.kv_write(keys, values, *expected, slots)
    kv_write(keys, values, key_cache, value_cache, slots)
    assert torch.equal(key_cache, expected[0])
    assert torch.equal(value_cache, expected[1])


def test_keys_and_values_may_have_any_strides(device):
    keys, values, key_cache, value_cache, slots = noise((10, 3, 8, 8, 4), device)
    expected = key_cache.clone(), value_cache.clone()
    REFERENCE.kv_write(keys, values, *expected, slots)
    room = torch.full((10, 3, 24), float("nan"), device=device)
    room[..., 3:11] = keys
    kv_write(
        room[..., 3:11], values.permute(2, 1, 0).contiguous().permute(2, 1, 0), key_cache, value_cache, slots
    )
    assert torch.equal(key_cache, expected[0])
    assert torch.equal(value_cache, expected[1])


def test_negative_slots_store_nothing(device):
    keys, values, key_cache, value_cache, slots = noise((10, 3, 8, 8, 4), device)
    before = key_cache.clone(), value_cache.clone()
    kv_write(keys, values, key_cache, value_cache, torch.full_like(slots, -1))
    assert torch.equal(key_cache, before[0])
    assert torch.equal(value_cache, before[1])


def test_an_empty_step_stores_nothing(device):
    keys, values, key_cache, value_cache, slots = noise((3, 2, 8, 8, 4), device)
    before = key_cache.clone()
    kv_write(keys[:0], values[:0], key_cache, value_cache, slots[:0])
    assert torch.equal(key_cache, before)


def test_what_does_not_fit_together_is_refused(device):
    keys, values, key_cache, value_cache, slots = noise((3, 2, 8, 8, 4), device)
    with pytest.raises(ValueError, match="2 slots have keys \\(3, 2, 8\\)"):
        kv_write(keys, values, key_cache, value_cache, slots[:2])
    with pytest.raises(ValueError, match="must be contiguous"):
        kv_write(keys[..., :4], values, key_cache[..., :4], value_cache, slots)
