"""Storing keys and values in the paged cache as a Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_NUMBERS_PER_PROGRAM = 2048


@triton.jit
def _kv_write_kernel(
    keys_ptr,
    values_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    key_token_stride,
    key_head_stride,
    key_dim_stride,
    value_token_stride,
    value_head_stride,
    value_dim_stride,
    num_kv_heads,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """BLOCK_G heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot >= 0:
        head = (tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)).to(tl.int64)[:, None]
        cache_row = (slot // BLOCK_SIZE * num_kv_heads + head) * BLOCK_SIZE + slot % BLOCK_SIZE
        d = tl.arange(0, BLOCK_D)[None, :]
        is_key = (head < num_kv_heads) & (d < KEY_DIM)
        key_start = keys_ptr + token * key_token_stride + head * key_head_stride + d * key_dim_stride
        keys = tl.load(key_start, mask=is_key, other=0.0)
        tl.store(
            key_cache_ptr + cache_row * KEY_DIM + d, keys.to(key_cache_ptr.dtype.element_ty), mask=is_key
        )
        e = tl.arange(0, BLOCK_E)[None, :]
        is_value = (head < num_kv_heads) & (e < VALUE_DIM)
        value_start = (
            values_ptr + token * value_token_stride + head * value_head_stride + e * value_dim_stride
        )
        values = tl.load(value_start, mask=is_value, other=0.0)
        value_type = value_cache_ptr.dtype.element_ty
        tl.store(value_cache_ptr + cache_row * VALUE_DIM + e, values.to(value_type), mask=is_value)


def kv_write(
    keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Store this step's keys and values at their slots.

    keys: [T, G, D], values: [T, G, E], any strides.
    key_cache: [B, G, S, D], value_cache: [B, G, S, E], contiguous, written.
    slot_mapping: [T] int64 contiguous, slot = block_id * S + offset, all different; a negative slot stores
    nothing.
    """
    _, num_kv_heads, block_size, key_dim = key_cache.shape
    value_dim = value_cache.shape[-1]
    num_tokens = slot_mapping.shape[0]
    if keys.shape != (num_tokens, num_kv_heads, key_dim) or values.shape != (*keys.shape[:2], value_dim):
        raise ValueError(
            f"{num_tokens} slots have keys {tuple(keys.shape)} and values {tuple(values.shape)}, the caches "
            f"{num_kv_heads} heads of {key_dim} and {value_dim}"
        )
    if not (key_cache.is_contiguous() and value_cache.is_contiguous() and slot_mapping.is_contiguous()):
        raise ValueError("the caches and the slot mapping must be contiguous")
    if num_tokens == 0:
        return
    block_d, block_e = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
    heads = max(1, _NUMBERS_PER_PROGRAM // max(block_d, block_e))
    heads = min(heads, triton.next_power_of_2(num_kv_heads))
    _kv_write_kernel[(num_tokens, triton.cdiv(num_kv_heads, heads))](
        keys,
        values,
        key_cache,
        value_cache,
        slot_mapping,
        *keys.stride(),
        *values.stride(),
        num_kv_heads,
        BLOCK_SIZE=block_size,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_G=heads,
        BLOCK_D=block_d,
        BLOCK_E=block_e,
    )
