"""kv_write stores each token at its slot and touches nothing else."""

from __future__ import annotations

import pytest
import torch

from triptych_kernels.reference.kv_write import kv_write


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_token_lands_at_its_slot(num_tokens, dtype):
    generator = torch.Generator().manual_seed(num_tokens)
    key_cache = torch.full((8, 2, 3, 5), float("nan"), dtype=dtype)
    value_cache = torch.full((8, 2, 3, 4), float("nan"), dtype=dtype)
    slots = torch.randperm(24, generator=generator)[:num_tokens]
    keys = torch.randn(num_tokens, 2, 5, generator=generator).to(dtype)
    values = torch.randn(num_tokens, 2, 4, generator=generator).to(dtype)

    kv_write(keys, values, key_cache, value_cache, slots)

    written = torch.zeros(8, 3, dtype=torch.bool)
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, 3)
        written[block, offset] = True
        assert torch.equal(key_cache[block, :, offset], keys[token])
        assert torch.equal(value_cache[block, :, offset], values[token])
    assert key_cache.transpose(1, 2)[~written].isnan().all()
    assert value_cache.transpose(1, 2)[~written].isnan().all()


def test_keys_may_be_a_transposed_view():
    key_cache, value_cache = torch.zeros(4, 2, 2, 3), torch.zeros(4, 2, 2, 3)
    keys = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)).transpose(0, 1)
    kv_write(keys, keys * 2, key_cache, value_cache, torch.tensor([7, 0, 3, 2, 5]))
    assert torch.equal(key_cache[3, :, 1], keys[0])
    assert torch.equal(value_cache[2, :, 1], keys[4] * 2)


def test_a_negative_slot_stores_nothing():
    generator = torch.Generator().manual_seed(3)
    keys, values = torch.randn(3, 2, 5, generator=generator), torch.randn(3, 2, 4, generator=generator)
    key_cache, value_cache = torch.full((4, 2, 3, 5), 7.0), torch.full((4, 2, 3, 4), 7.0)
    kv_write(keys, values, key_cache, value_cache, torch.tensor([5, -1, 2]))
    assert torch.equal(key_cache[1, :, 2], keys[0])
    assert torch.equal(value_cache[0, :, 2], values[2])
    assert int((key_cache == 7.0).all(-1).sum()) == 2 * (12 - 2)
