"""Depthwise convolution over the last tokens of a row as a Triton kernel.

A program holds a tile of tokens of one row, for some channels. Inputs before the row's first token come from
its state. Where a row has several tiles, states are written by a second launch: they may replace the one that
is read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.state_batch import StateBatch
from triptych_kernels.triton.rows import find_row

_ROWS_PER_SEARCH = 256
_TOKENS_PER_TILE = 16
_CHANNELS_PER_TILE = 128


@triton.jit
def _inputs(
    x_ptr,
    states_ptr,
    token,
    channel,
    is_wanted,
    first_token,
    read_slot,
    x_stride,
    NUM_CHANNELS: tl.constexpr,
    NUM_KEPT: tl.constexpr,
):
    """Inputs of a row's tokens in fp32, where wanted: before its first token those that its state keeps."""
    is_new = token >= first_token
    x_start = x_ptr + token.to(tl.int64) * x_stride + channel
    new = tl.load(x_start, mask=is_wanted & is_new, other=0.0).to(tl.float32)
    kept = read_slot.to(tl.int64) * NUM_KEPT + NUM_KEPT + token - first_token
    old = tl.load(
        states_ptr + kept * NUM_CHANNELS + channel,
        mask=is_wanted & (token < first_token) & (read_slot >= 0),
        other=0.0,
    )
    return tl.where(is_new, new, old)


@triton.jit(do_not_specialize=["num_rows"])
def _causal_conv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    states_ptr,
    query_starts_ptr,
    read_slots_ptr,
    write_slots_ptr,
    out_ptr,
    x_stride,
    num_rows,
    COMPUTES: tl.constexpr,
    KEEPS: tl.constexpr,
    IS_DECODE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """COMPUTES: results of BLOCK_T tokens of a row.  KEEPS: the states after those that have a slot."""
    NUM_KEPT: tl.constexpr = WIDTH - 1
    if IS_DECODE:
        row, tile = tl.program_id(0), 0
        first_token = tl.load(query_starts_ptr + row)
    else:
        row = find_row(query_starts_ptr, num_rows, tl.program_id(0), BLOCK_T, BLOCK_R)
        first_token = tl.load(query_starts_ptr + row)
        tile = tl.program_id(0) - (first_token // BLOCK_T + row)
    end_token = tl.load(query_starts_ptr + row + 1)
    if first_token + tile * BLOCK_T >= end_token:
        return
    read_slot = tl.load(read_slots_ptr + row)
    token = first_token + tile * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = channel < NUM_CHANNELS
    is_number = (token < end_token)[:, None] & is_channel[None, :]
    if COMPUTES:
        total = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
        if HAS_BIAS:
            total += tl.load(bias_ptr + channel, mask=is_channel, other=0.0)[None, :]
        for k in tl.static_range(WIDTH):
            numbers = _inputs(
                x_ptr, states_ptr, token[:, None] - NUM_KEPT + k, channel[None, :], is_number,
                first_token, read_slot, x_stride, NUM_CHANNELS, NUM_KEPT,
            )  # fmt: skip
            weight = tl.load(weight_ptr + k * NUM_CHANNELS + channel, mask=is_channel, other=0.0)
            total += numbers * weight[None, :]
        if HAS_SILU:
            total = total / (1.0 + tl.exp(-total))
        out_start = out_ptr + token.to(tl.int64)[:, None] * NUM_CHANNELS + channel[None, :]
        tl.store(out_start, total.to(out_ptr.dtype.element_ty), mask=is_number)
    if KEEPS:
        slot = tl.load(write_slots_ptr + token, mask=token < end_token, other=-1)
        if tl.max(slot, axis=0) >= 0:
            index = tl.arange(0, BLOCK_W)[:, None, None]
            is_kept = (index < NUM_KEPT) & ((slot >= 0)[:, None] & is_channel[None, :])[None, :, :]
            last = _inputs(
                x_ptr, states_ptr, token[None, :, None] - NUM_KEPT + 1 + index, channel[None, None, :],
                is_kept, first_token, read_slot, x_stride, NUM_CHANNELS, NUM_KEPT,
            )  # fmt: skip
            # Every thread must have read the state before any replaces it: all tokens that need it are here.
            tl.debug_barrier()
            place = slot.to(tl.int64)[None, :, None] * NUM_KEPT + index
            tl.store(states_ptr + place * NUM_CHANNELS + channel[None, None, :], last, mask=is_kept)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batch: StateBatch, *, silu: bool
) -> Tensor:
    """y[t] = bias + sum over k of weight[k] * x[t - W + 1 + k], channel by channel, in fp32.

    With `silu`, the result is silu(y).
    x: [T, C], rows contiguous.  weight: [W, C] fp32, contiguous: the last one is of the token itself.
    bias: [C] fp32.  states: [slots, W - 1, C] fp32, contiguous, written: a row's last inputs, oldest first.
    Returns [T, C] in x's dtype; tokens that belong to no row are left unwritten.
    """
    (num_tokens, num_channels), width = x.shape, weight.shape[0]
    if weight.shape != (width, num_channels) or states.shape[1:] != (width - 1, num_channels):
        raise ValueError(
            f"weight {tuple(weight.shape)} and states {tuple(states.shape)} do not fit"
            f" {num_channels} channels"
        )
    if x.stride(1) != 1 or not (weight.is_contiguous() and states.is_contiguous()):
        raise ValueError("channels, weight and states must be contiguous")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0 or batch.num_rows == 0:
        return out
    is_decode = batch.max_query_length == 1
    tokens = 1 if is_decode else max(_TOKENS_PER_TILE, triton.next_power_of_2(width))
    num_tiles = batch.num_rows if is_decode else num_tokens // tokens + batch.num_rows
    block = min(_CHANNELS_PER_TILE, triton.next_power_of_2(num_channels))
    keeps = width > 1
    launches = [(True, keeps)] if is_decode else [(True, False), (False, True)][: 1 + keeps]
    for computes, keeps in launches:
        _causal_conv_kernel[(num_tiles, triton.cdiv(num_channels, block))](
            x,
            weight,
            bias,
            states,
            batch.query_starts,
            batch.read_slots,
            batch.write_slots,
            out,
            x.stride(0),
            batch.num_rows,
            COMPUTES=computes,
            KEEPS=keeps,
            IS_DECODE=is_decode,
            HAS_BIAS=bias is not None,
            HAS_SILU=silu,
            NUM_CHANNELS=num_channels,
            WIDTH=width,
            BLOCK_R=_ROWS_PER_SEARCH,
            BLOCK_T=tokens,
            BLOCK_C=block,
            BLOCK_W=triton.next_power_of_2(max(1, width - 1)),
        )
    return out
