"""The state space recurrence of Mamba-2 as Triton kernels: token by token, and in chunks.

A program holds some columns of one head's state for all tokens of a row. A chunk is computed by products of
matrices; it ends at the next multiple of its size in the row, and after a token whose state is stored.
Source: Dao and Gu 2024, Transformers are SSMs, section 6.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.state_batch import StateBatch

_MIN_DOT = 16  # the minimum number of rows and columns of a product on tensor cores
_COLUMNS_PER_PROGRAM = 64
_CHUNK = 64
_WIDE_CHUNK = 32  # of fp32, whose products take more shared memory


@triton.jit
def softplus(x):
    """ln(1 + e^x), exact to rounding where e^x is small, too."""
    shrunk = tl.exp(-tl.abs(x))
    grown = 1.0 + shrunk
    # The quotient makes up for the rounding of 1 + e.
    is_one = grown == 1.0
    quotient = shrunk / tl.where(is_one, 1.0, grown - 1.0)
    small = tl.where(is_one, shrunk, tl.log(grown) * quotient)
    return tl.maximum(x, 0.0) + small


@triton.jit
def end_of_chunk(write_slots_ptr, token, end_token, total_length, CHUNK: tl.constexpr):
    """The end of the chunk that begins at a row's token, and the slot of the state there, if any."""
    position = total_length - (end_token - token)
    border = tl.minimum(end_token, token + CHUNK - position % CHUNK)
    index = token + tl.arange(0, CHUNK)
    slots = tl.load(write_slots_ptr + index, mask=index < border, other=-1)
    end = tl.min(tl.where(slots >= 0, index + 1, border), axis=0)
    return end, tl.max(tl.where(index == end - 1, slots, -1), axis=0)


@triton.jit
def _ssd_recurrent_kernel(
    x_ptr,
    dt_ptr,
    b_ptr,
    c_ptr,
    states_ptr,
    out_ptr,
    rates_ptr,
    skips_ptr,
    biases_ptr,
    query_starts_ptr,
    total_lengths_ptr,
    read_slots_ptr,
    write_slots_ptr,
    x_token_stride,
    x_head_stride,
    dt_stride,
    b_token_stride,
    b_group_stride,
    c_token_stride,
    c_group_stride,
    least_step,
    most_step,
    HAS_SKIP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """BLOCK_P columns of one head's state through the tokens of a row, one by one."""
    row, head = tl.program_id(0), tl.program_id(1)
    first_token, end_token = tl.load(query_starts_ptr + row), tl.load(query_starts_ptr + row + 1)
    if first_token == end_token:
        return
    n = tl.arange(0, BLOCK_N)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    is_n, is_p = n < STATE_SIZE, p < HEAD_DIM
    is_state = is_n[:, None] & is_p[None, :]
    own = states_ptr + head.to(tl.int64) * STATE_SIZE * HEAD_DIM + n[:, None] * HEAD_DIM + p[None, :]
    slot_size = NUM_HEADS * STATE_SIZE * HEAD_DIM
    read_slot = tl.load(read_slots_ptr + row).to(tl.int64)
    state = tl.load(own + read_slot * slot_size, mask=is_state & (read_slot >= 0), other=0.0)
    rate, bias = tl.load(rates_ptr + head), tl.load(biases_ptr + head)
    begin = first_token.to(tl.int64)
    for token in range(first_token, end_token):
        at = begin + (token - first_token)
        step = softplus(tl.load(dt_ptr + at * dt_stride + head).to(tl.float32) + bias)
        step = tl.minimum(tl.maximum(step, least_step), most_step)
        group = head // SHARE
        key = tl.load(b_ptr + at * b_token_stride + group * b_group_stride + n, mask=is_n, other=0.0)
        query = tl.load(c_ptr + at * c_token_stride + group * c_group_stride + n, mask=is_n, other=0.0)
        x_start = x_ptr + at * x_token_stride + head * x_head_stride + p
        x = tl.load(x_start, mask=is_p, other=0.0).to(tl.float32)
        state = state * tl.exp(step * rate) + key.to(tl.float32)[:, None] * (step * x)[None, :]
        y = tl.sum(state * query.to(tl.float32)[:, None], axis=0)
        if HAS_SKIP:
            y += tl.load(skips_ptr + head) * x
        out_start = out_ptr + (at * NUM_HEADS + head) * HEAD_DIM + p
        tl.store(out_start, y, mask=is_p)
        slot = tl.load(write_slots_ptr + token).to(tl.int64)
        tl.store(own + slot * slot_size, state, mask=is_state & (slot >= 0))


@triton.jit
def _ssd_chunked_kernel(
    x_ptr,
    dt_ptr,
    b_ptr,
    c_ptr,
    states_ptr,
    out_ptr,
    rates_ptr,
    skips_ptr,
    biases_ptr,
    query_starts_ptr,
    total_lengths_ptr,
    read_slots_ptr,
    write_slots_ptr,
    x_token_stride,
    x_head_stride,
    dt_stride,
    b_token_stride,
    b_group_stride,
    c_token_stride,
    c_group_stride,
    least_step,
    most_step,
    HAS_SKIP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """BLOCK_P columns of one head's state through the tokens of a row, chunk by chunk."""
    row, head = tl.program_id(0), tl.program_id(1)
    first_token, end_token = tl.load(query_starts_ptr + row), tl.load(query_starts_ptr + row + 1)
    if first_token == end_token:
        return
    n = tl.arange(0, BLOCK_N)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    is_n, is_p = n < STATE_SIZE, p < HEAD_DIM
    is_state = is_n[:, None] & is_p[None, :]
    own = states_ptr + head.to(tl.int64) * STATE_SIZE * HEAD_DIM + n[:, None] * HEAD_DIM + p[None, :]
    slot_size = NUM_HEADS * STATE_SIZE * HEAD_DIM
    read_slot = tl.load(read_slots_ptr + row).to(tl.int64)
    state = tl.load(own + read_slot * slot_size, mask=is_state & (read_slot >= 0), other=0.0)
    rate, bias = tl.load(rates_ptr + head), tl.load(biases_ptr + head)
    total_length = tl.load(total_lengths_ptr + row)
    dtype = x_ptr.dtype.element_ty
    i = tl.arange(0, CHUNK)
    token = first_token
    while token < end_token:
        end, slot = end_of_chunk(write_slots_ptr, token, end_token, total_length, CHUNK)
        at = (token + i).to(tl.int64)
        is_token = token + i < end
        dt = tl.load(dt_ptr + at * dt_stride + head, mask=is_token, other=0.0).to(tl.float32)
        step = softplus(dt + bias)
        step = tl.where(is_token, tl.minimum(tl.maximum(step, least_step), most_step), 0.0)
        # Logarithms of the decay from the chunk's begin until after each token.
        decay = tl.cumsum(step * rate, axis=0)
        whole = tl.sum(step * rate, axis=0)
        group = head // SHARE
        is_row = is_token[:, None] & is_n[None, :]
        b_start = b_ptr + at[:, None] * b_token_stride + group * b_group_stride + n[None, :]
        c_start = c_ptr + at[:, None] * c_token_stride + group * c_group_stride + n[None, :]
        key, query = tl.load(b_start, mask=is_row, other=0.0), tl.load(c_start, mask=is_row, other=0.0)
        is_x = is_token[:, None] & is_p[None, :]
        x_start = x_ptr + at[:, None] * x_token_stride + head * x_head_stride + p[None, :]
        x = tl.load(x_start, mask=is_x, other=0.0).to(tl.float32)
        change = (step[:, None] * x).to(dtype)
        seen = tl.where(i[:, None] >= i[None, :], decay[:, None] - decay[None, :], float("-inf"))
        weights = tl.dot(query, tl.trans(key), input_precision="ieee") * tl.exp(seen)
        y = tl.dot(query, state.to(dtype), input_precision="ieee") * tl.exp(decay)[:, None]
        y += tl.dot(weights.to(dtype), change, input_precision="ieee")
        if HAS_SKIP:
            y += tl.load(skips_ptr + head) * x
        out_start = out_ptr + (at[:, None] * NUM_HEADS + head) * HEAD_DIM + p[None, :]
        tl.store(out_start, y, mask=is_x)
        aged = (key.to(tl.float32) * tl.exp(whole - decay)[:, None]).to(dtype)
        state = state * tl.exp(whole) + tl.dot(tl.trans(aged), change, input_precision="ieee")
        tl.store(own + slot.to(tl.int64) * slot_size, state, mask=is_state & (slot >= 0))
        token = end


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    states: Tensor,
    batch: StateBatch,
    *,
    A: Tensor,
    D: Tensor | None,
    dt_bias: Tensor,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    chunked: bool = True,
) -> Tensor:
    """S = e^(dt A) S + B (dt x)^T and y = C^T S + D x, token by token and head by head, in fp32.

    dt here is softplus(dt + dt_bias), within dt_limit.
    x: [T, H, P], dt: [T, H], B and C: [T, G, N], of one dtype, the last dimension contiguous; head h reads
    group h // (H / G).  A, D, dt_bias: [H] fp32.  states: [slots, H, N, P] fp32, contiguous, written.
    chunked: prompts by products of chunks, in the inputs' dtype. Without it a token has the same bits
    however its row is cut.
    Returns [T, H, P] fp32; tokens that belong to no row are left unwritten.
    """
    (_, num_heads, head_dim), (_, num_groups, size) = x.shape, B.shape
    if num_heads % num_groups or C.shape != B.shape or states.shape[1:] != (num_heads, size, head_dim):
        raise ValueError(
            f"states {tuple(states.shape)} do not fit x {tuple(x.shape)}, B {tuple(B.shape)},"
            f" C {tuple(C.shape)}"
        )
    if any(tensor.stride(-1) != 1 for tensor in (x, dt, B, C)) or not states.is_contiguous():
        raise ValueError("states, and the last dimension of x, dt, B and C, must be contiguous")
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if out.numel() == 0 or batch.num_rows == 0:
        return out
    block = min(_COLUMNS_PER_PROGRAM, max(_MIN_DOT, triton.next_power_of_2(head_dim)))
    is_chunked = chunked and batch.max_query_length > 1
    kernel = _ssd_chunked_kernel if is_chunked else _ssd_recurrent_kernel
    kernel[(batch.num_rows, num_heads, triton.cdiv(head_dim, block))](
        x,
        dt,
        B,
        C,
        states,
        out,
        A,
        D,
        dt_bias,
        batch.query_starts,
        batch.total_lengths,
        batch.read_slots,
        batch.write_slots,
        x.stride(0),
        x.stride(1),
        dt.stride(0),
        B.stride(0),
        B.stride(1),
        C.stride(0),
        C.stride(1),
        *dt_limit,
        HAS_SKIP=D is not None,
        NUM_HEADS=num_heads,
        SHARE=num_heads // num_groups,
        STATE_SIZE=size,
        HEAD_DIM=head_dim,
        CHUNK=_WIDE_CHUNK if x.dtype is torch.float32 else _CHUNK,
        BLOCK_N=max(_MIN_DOT, triton.next_power_of_2(size)),
        BLOCK_P=block,
    )
    return out
