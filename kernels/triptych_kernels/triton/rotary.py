"""Rotary positions, preceding norms of heads, and stores of the rotated keys, as one Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_NUMBERS_PER_PROGRAM = 1024


@triton.jit
def _rotary_kv_write_kernel(
    qkv_ptr,
    positions_ptr,
    cos_sin_ptr,
    slot_mapping_ptr,
    key_cache_ptr,
    value_cache_ptr,
    query_norm_ptr,
    key_norm_ptr,
    qkv_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """BLOCK_H heads of one token, queries, keys or values: two halves to rotate, and an unrotated rest."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    half: tl.constexpr = ROTARY_DIM // 2
    half_offset = tl.arange(0, BLOCK_HALF)[None, :]
    rest_offset = ROTARY_DIM + tl.arange(0, BLOCK_REST)[None, :]
    is_query = head < NUM_HEADS
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
    is_half = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (half_offset < half)
    is_rest = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (rest_offset < HEAD_DIM)

    head_start = qkv_ptr + token * qkv_stride + head * HEAD_DIM
    dtype = qkv_ptr.dtype.element_ty
    first = tl.load(head_start + half_offset, mask=is_half, other=0.0).to(tl.float32)
    second = tl.load(head_start + half + half_offset, mask=is_half, other=0.0).to(tl.float32)
    rest = tl.load(head_start + rest_offset, mask=is_rest, other=0.0).to(tl.float32)
    first_value, second_value, rest_value = first, second, rest
    if HAS_NORMS:
        squares = (
            tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1) + tl.sum(rest * rest, axis=1)
        )
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        # The norm of queries or of keys, depending on the head; rounded as a separate norm would be.
        weight = tl.where(
            is_query,
            tl.load(query_norm_ptr + half_offset, mask=half_offset < half, other=0.0).to(tl.float32),
            tl.load(key_norm_ptr + half_offset, mask=half_offset < half, other=0.0).to(tl.float32),
        )
        first = (first * scale * weight).to(dtype).to(tl.float32)
        weight = tl.where(
            is_query,
            tl.load(query_norm_ptr + half + half_offset, mask=half_offset < half, other=0.0).to(tl.float32),
            tl.load(key_norm_ptr + half + half_offset, mask=half_offset < half, other=0.0).to(tl.float32),
        )
        second = (second * scale * weight).to(dtype).to(tl.float32)
        weight = tl.where(
            is_query,
            tl.load(query_norm_ptr + rest_offset, mask=rest_offset < HEAD_DIM, other=0.0).to(tl.float32),
            tl.load(key_norm_ptr + rest_offset, mask=rest_offset < HEAD_DIM, other=0.0).to(tl.float32),
        )
        rest = (rest * scale * weight).to(dtype).to(tl.float32)

    angle_start = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * ROTARY_DIM
    cos = tl.load(angle_start + half_offset, mask=half_offset < half, other=0.0)
    sin = tl.load(angle_start + half + half_offset, mask=half_offset < half, other=0.0)
    first_turned = first * cos - second * sin
    second_turned = second * cos + first * sin

    tl.store(head_start + half_offset, first_turned.to(dtype), mask=is_query & is_half)
    tl.store(head_start + half + half_offset, second_turned.to(dtype), mask=is_query & is_half)
    if HAS_NORMS:
        tl.store(head_start + rest_offset, rest.to(dtype), mask=is_query & is_rest)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot >= 0:
        first_row = slot // BLOCK_SIZE * NUM_KV_HEADS * BLOCK_SIZE + slot % BLOCK_SIZE
        key_row = first_row + (head - NUM_HEADS) * BLOCK_SIZE
        key_start = key_cache_ptr + key_row * HEAD_DIM
        tl.store(key_start + half_offset, first_turned.to(dtype), mask=is_key & is_half)
        tl.store(key_start + half + half_offset, second_turned.to(dtype), mask=is_key & is_half)
        tl.store(key_start + rest_offset, rest.to(dtype), mask=is_key & is_rest)
        value_row = first_row + (head - NUM_HEADS - NUM_KV_HEADS) * BLOCK_SIZE
        value_start = value_cache_ptr + value_row * HEAD_DIM
        tl.store(value_start + half_offset, first_value.to(dtype), mask=is_value & is_half)
        tl.store(value_start + half + half_offset, second_value.to(dtype), mask=is_value & is_half)
        tl.store(value_start + rest_offset, rest_value.to(dtype), mask=is_value & is_rest)


def rotary_kv_write(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    num_heads: int,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Rotate queries and keys by their positions; store keys and values. Queries are changed in place.

    Each head's first rotary_dim values are rotated in halves: (a, b) -> (a cos - b sin, b cos + a sin), in
    fp32. With query_norm and key_norm ([D]) each head is first normed (rms_norm), and rounded.
    qkv: [T, (H + 2 G) D], rows contiguous, heads of q, then of k, then of v.  positions: [T] int64.
    cos_sin: [max_positions, rotary_dim] fp32 contiguous, cosines in the first half.  slot_mapping: [T] int64;
    a negative slot stores nothing.  key_cache, value_cache: [B, G, S, D] contiguous, of qkv's dtype, written.
    Source: Su et al. 2021, eq. 34, in the half-split form of GPT-NeoX.
    """
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    num_tokens, total_heads = qkv.shape[0], num_heads + 2 * num_kv_heads
    rotary_dim = cos_sin.shape[1]
    _check(qkv, cos_sin, key_cache, value_cache, total_heads, positions, slot_mapping)
    if num_tokens == 0:
        return
    has_norms = query_norm is not None and key_norm is not None
    heads = max(1, _NUMBERS_PER_PROGRAM // triton.next_power_of_2(head_dim))
    heads = min(heads, triton.next_power_of_2(total_heads))
    _rotary_kv_write_kernel[(num_tokens, triton.cdiv(total_heads, heads))](
        qkv,
        positions,
        cos_sin,
        slot_mapping,
        key_cache,
        value_cache,
        query_norm if has_norms else None,
        key_norm if has_norms else None,
        qkv.stride(0),
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        HAS_NORMS=has_norms,
        BLOCK_H=heads,
        BLOCK_HALF=triton.next_power_of_2(rotary_dim // 2),
        BLOCK_REST=triton.next_power_of_2(max(1, head_dim - rotary_dim)),
    )


def _check(
    qkv: Tensor,
    cos_sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    total_heads: int,
    positions: Tensor,
    slot_mapping: Tensor,
) -> None:
    head_dim, rotary_dim = key_cache.shape[-1], cos_sin.shape[1]
    if qkv.shape[1] != total_heads * head_dim or qkv.stride(1) != 1:
        raise ValueError(
            f"qkv is {tuple(qkv.shape)} with strides {qkv.stride()}, not rows of {total_heads} x {head_dim}"
        )
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise ValueError(f"{rotary_dim} values of {head_dim} cannot be turned in halves")
    if value_cache.shape != key_cache.shape or not {qkv.dtype} == {key_cache.dtype, value_cache.dtype}:
        raise ValueError(
            f"the caches are {tuple(key_cache.shape)} of {key_cache.dtype} and {tuple(value_cache.shape)} of "
            f"{value_cache.dtype}; qkv is of {qkv.dtype}"
        )
    for tensor in (cos_sin, key_cache, value_cache, positions, slot_mapping):
        if not tensor.is_contiguous():
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous")
