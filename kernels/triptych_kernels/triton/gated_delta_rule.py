"""Linear attention whose state forgets and is corrected, as Triton kernels: token by token, and in chunks.

As in ssd_scan.py, with changes that depend on those before them in their chunk, by a triangular system.
Source: Yang et al. 2024, Gated Delta Networks, section 3.3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.state_batch import StateBatch
from triptych_kernels.triton.ssd_scan import end_of_chunk, softplus

_MIN_DOT = 16  # the minimum number of rows and columns of a product on tensor cores
_COLUMNS_PER_PROGRAM = 64
_CHUNK = 32
_NORM_EPS = tl.constexpr(1e-6)


@triton.jit
def _delta_recurrent_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    a_ptr,
    b_ptr,
    states_ptr,
    out_ptr,
    rates_ptr,
    biases_ptr,
    query_starts_ptr,
    total_lengths_ptr,
    read_slots_ptr,
    write_slots_ptr,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    a_stride,
    b_stride,
    scale,
    NUM_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """BLOCK_E columns of one head's state through the tokens of a row, one by one."""
    row, head = tl.program_id(0), tl.program_id(1)
    first_token, end_token = tl.load(query_starts_ptr + row), tl.load(query_starts_ptr + row + 1)
    if first_token == end_token:
        return
    d = tl.arange(0, BLOCK_D)
    e = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    is_d, is_e = d < KEY_DIM, e < VALUE_DIM
    is_state = is_d[:, None] & is_e[None, :]
    own = states_ptr + head.to(tl.int64) * KEY_DIM * VALUE_DIM + d[:, None] * VALUE_DIM + e[None, :]
    slot_size = NUM_HEADS * KEY_DIM * VALUE_DIM
    read_slot = tl.load(read_slots_ptr + row).to(tl.int64)
    state = tl.load(own + read_slot * slot_size, mask=is_state & (read_slot >= 0), other=0.0)
    rate, bias = tl.load(rates_ptr + head), tl.load(biases_ptr + head)
    group = head // SHARE
    begin = first_token.to(tl.int64)
    for token in range(first_token, end_token):
        at = begin + (token - first_token)
        query_start = query_ptr + at * query_token_stride + group * query_head_stride + d
        key_start = key_ptr + at * key_token_stride + group * key_head_stride + d
        query = tl.load(query_start, mask=is_d, other=0.0).to(tl.float32)
        key = tl.load(key_start, mask=is_d, other=0.0).to(tl.float32)
        query *= scale * tl.rsqrt(tl.sum(query * query, axis=0) + _NORM_EPS)
        key *= tl.rsqrt(tl.sum(key * key, axis=0) + _NORM_EPS)
        value_start = value_ptr + at * value_token_stride + head * value_head_stride + e
        value = tl.load(value_start, mask=is_e, other=0.0).to(tl.float32)
        decay = tl.exp(rate * softplus(tl.load(a_ptr + at * a_stride + head).to(tl.float32) + bias))
        beta = 1.0 / (1.0 + tl.exp(-tl.load(b_ptr + at * b_stride + head).to(tl.float32)))
        state *= decay
        change = beta * (value - tl.sum(state * key[:, None], axis=0))
        state += key[:, None] * change[None, :]
        out = tl.sum(state * query[:, None], axis=0)
        out_start = out_ptr + (at * NUM_HEADS + head) * VALUE_DIM + e
        tl.store(out_start, out.to(out_ptr.dtype.element_ty), mask=is_e)
        slot = tl.load(write_slots_ptr + token).to(tl.int64)
        tl.store(own + slot * slot_size, state, mask=is_state & (slot >= 0))


@triton.jit
def _delta_chunked_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    a_ptr,
    b_ptr,
    states_ptr,
    out_ptr,
    rates_ptr,
    biases_ptr,
    query_starts_ptr,
    total_lengths_ptr,
    read_slots_ptr,
    write_slots_ptr,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    a_stride,
    b_stride,
    scale,
    NUM_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """BLOCK_E columns of one head's state through the tokens of a row, chunk by chunk."""
    row, head = tl.program_id(0), tl.program_id(1)
    first_token, end_token = tl.load(query_starts_ptr + row), tl.load(query_starts_ptr + row + 1)
    if first_token == end_token:
        return
    d = tl.arange(0, BLOCK_D)
    e = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    is_d, is_e = d < KEY_DIM, e < VALUE_DIM
    is_state = is_d[:, None] & is_e[None, :]
    own = states_ptr + head.to(tl.int64) * KEY_DIM * VALUE_DIM + d[:, None] * VALUE_DIM + e[None, :]
    slot_size = NUM_HEADS * KEY_DIM * VALUE_DIM
    read_slot = tl.load(read_slots_ptr + row).to(tl.int64)
    state = tl.load(own + read_slot * slot_size, mask=is_state & (read_slot >= 0), other=0.0)
    rate, bias = tl.load(rates_ptr + head), tl.load(biases_ptr + head)
    total_length = tl.load(total_lengths_ptr + row)
    dtype = value_ptr.dtype.element_ty
    group = head // SHARE
    i = tl.arange(0, CHUNK)
    token = first_token
    while token < end_token:
        end, slot = end_of_chunk(write_slots_ptr, token, end_token, total_length, CHUNK)
        at = (token + i).to(tl.int64)
        is_token = token + i < end
        is_row = is_token[:, None] & is_d[None, :]
        query_start = query_ptr + at[:, None] * query_token_stride + group * query_head_stride + d[None, :]
        key_start = key_ptr + at[:, None] * key_token_stride + group * key_head_stride + d[None, :]
        query = tl.load(query_start, mask=is_row, other=0.0).to(tl.float32)
        key = tl.load(key_start, mask=is_row, other=0.0).to(tl.float32)
        query = (query * (scale * tl.rsqrt(tl.sum(query * query, axis=1) + _NORM_EPS))[:, None]).to(dtype)
        key = key * tl.rsqrt(tl.sum(key * key, axis=1) + _NORM_EPS)[:, None]
        is_value = is_token[:, None] & is_e[None, :]
        value_start = value_ptr + at[:, None] * value_token_stride + head * value_head_stride + e[None, :]
        value = tl.load(value_start, mask=is_value, other=0.0).to(tl.float32)
        a = tl.load(a_ptr + at * a_stride + head, mask=is_token, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + at * b_stride + head, mask=is_token, other=0.0).to(tl.float32)
        beta = 1.0 / (1.0 + tl.exp(-b))
        # Logarithms of the decay from the chunk's begin until after each token.
        log_decay = tl.where(is_token, rate * softplus(a + bias), 0.0)
        decay, whole = tl.cumsum(log_decay, axis=0), tl.sum(log_decay, axis=0)
        narrow_key, narrow_state = key.to(dtype), state.to(dtype)
        between = tl.exp(tl.where(i[:, None] >= i[None, :], decay[:, None] - decay[None, :], float("-inf")))
        # change = (1 + lower)^-1 (beta (value - what the key finds in the state at the chunk's begin)).
        lower = tl.dot(narrow_key, tl.trans(narrow_key), input_precision="ieee") * between * beta[:, None]
        inverse = tl.where(i[:, None] > i[None, :], -lower, 0.0)
        for index in range(1, CHUNK):
            line = tl.sum(tl.where((i == index)[:, None], inverse, 0.0), axis=0)
            line += tl.sum(line[:, None] * inverse, axis=0)
            inverse = tl.where((i == index)[:, None], line[None, :], inverse)
        inverse += tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        known = tl.dot(narrow_key, narrow_state, input_precision="ieee") * tl.exp(decay)[:, None]
        wanted = beta[:, None] * (value - known)
        change = tl.dot(inverse.to(dtype), wanted.to(dtype), input_precision="ieee").to(dtype)
        weights = tl.dot(query, tl.trans(narrow_key), input_precision="ieee") * between
        out = tl.dot(query, narrow_state, input_precision="ieee") * tl.exp(decay)[:, None]
        out += tl.dot(weights.to(dtype), change, input_precision="ieee")
        out_start = out_ptr + (at[:, None] * NUM_HEADS + head) * VALUE_DIM + e[None, :]
        tl.store(out_start, out.to(dtype), mask=is_value)
        aged = (key * tl.exp(whole - decay)[:, None]).to(dtype)
        state = state * tl.exp(whole) + tl.dot(tl.trans(aged), change, input_precision="ieee")
        tl.store(own + slot.to(tl.int64) * slot_size, state, mask=is_state & (slot >= 0))
        token = end


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    a: Tensor,
    b: Tensor,
    states: Tensor,
    batch: StateBatch,
    *,
    A: Tensor,
    dt_bias: Tensor,
    chunked: bool = True,
) -> Tensor:
    """S = g S, then S = S + k (beta (v - S^T k))^T and o = S^T q, token by token and head by head, in fp32.

    g = e^(A softplus(a + dt_bias)) and beta = sigmoid(b); q and k are divided by their lengths,
    sqrt(sum of squares + 1e-6), and q also by sqrt(D).
    query, key: [T, G, D], value: [T, H, E], a, b: [T, H], of one dtype, the last dimension contiguous; head h
    reads key head h // (H / G).  A, dt_bias: [H] fp32.  states: [slots, H, D, E] fp32, contiguous, written.
    chunked: prompts by products of chunks, in the inputs' dtype. Without it a token has the same bits
    however its row is cut.
    Returns [T, H, E] in the value's dtype; tokens that belong to no row are left unwritten.
    """
    (_, num_heads, value_dim), (_, num_groups, key_dim) = value.shape, key.shape
    if (
        num_heads % num_groups
        or query.shape != key.shape
        or states.shape[1:] != (num_heads, key_dim, value_dim)
    ):
        raise ValueError(
            f"states {tuple(states.shape)} do not fit query {tuple(query.shape)}, key {tuple(key.shape)},"
            f" value {tuple(value.shape)}"
        )
    if any(tensor.stride(-1) != 1 for tensor in (query, key, value, a, b)) or not states.is_contiguous():
        raise ValueError("states, and the last dimension of query, key, value, a and b, must be contiguous")
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    if out.numel() == 0 or batch.num_rows == 0:
        return out
    block = min(_COLUMNS_PER_PROGRAM, max(_MIN_DOT, triton.next_power_of_2(value_dim)))
    is_chunked = chunked and batch.max_query_length > 1
    kernel = _delta_chunked_kernel if is_chunked else _delta_recurrent_kernel
    kernel[(batch.num_rows, num_heads, triton.cdiv(value_dim, block))](
        query,
        key,
        value,
        a,
        b,
        states,
        out,
        A,
        dt_bias,
        batch.query_starts,
        batch.total_lengths,
        batch.read_slots,
        batch.write_slots,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        a.stride(0),
        b.stride(0),
        key_dim**-0.5,
        NUM_HEADS=num_heads,
        SHARE=num_heads // num_groups,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        CHUNK=_CHUNK,
        BLOCK_D=max(_MIN_DOT, triton.next_power_of_2(key_dim)),
        BLOCK_E=block,
    )
    return out
