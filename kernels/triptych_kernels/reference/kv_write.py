"""Storing keys and values in the paged cache, in plain torch."""

from __future__ import annotations

from torch import Tensor


def kv_write(
    keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Store this step's keys and values at their slots.

    keys: [T, G, D], values: [T, G, E], any strides.
    key_cache: [B, G, S, D], value_cache: [B, G, S, E], written.
    slot_mapping: [T] int64, slot = block_id * S + offset, all different; a negative slot stores nothing.
    """
    is_stored = slot_mapping >= 0
    if not is_stored.all():
        keys, values, slot_mapping = keys[is_stored], values[is_stored], slot_mapping[is_stored]
    block_size = key_cache.shape[2]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    key_cache[blocks, :, offsets] = keys
    value_cache[blocks, :, offsets] = values
