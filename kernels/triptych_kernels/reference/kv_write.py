"""Storing keys and values in the paged cache, in plain torch."""

from __future__ import annotations

from torch import Tensor


def kv_write(
    keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Store this step's keys and values at their slots.

    keys: [T, G, D], values: [T, G, E], any strides.
    key_cache: [G, B, S, D], value_cache: [G, B, S, E], contiguous, written.
    slot_mapping: [T] int64, slot = block_id * S + offset, all different; a negative slot stores nothing.
    """
    is_stored = slot_mapping >= 0
    if not is_stored.all():
        keys, values, slot_mapping = keys[is_stored], values[is_stored], slot_mapping[is_stored]
    num_kv_heads, _, _, key_dim = key_cache.shape
    key_cache.view(num_kv_heads, -1, key_dim).index_copy_(1, slot_mapping, keys.transpose(0, 1))
    value_dim = value_cache.shape[-1]
    value_cache.view(num_kv_heads, -1, value_dim).index_copy_(1, slot_mapping, values.transpose(0, 1))
