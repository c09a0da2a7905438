"""Low-rank additions to projections as Triton kernels, a different adapter for each token.

Tokens are cut into tiles. Among a tile's tokens with the same adapter the first is the leader: its program
computes all of them in one product, and the programs of the others exit. So a prompt reads its adapter once
per tile, different adapters run in parallel, and a token's result does not depend on its neighbours.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# The minimum number of rows of a product on tensor cores.
_TOKENS_PER_TILE = 16


@triton.jit
def _led_tokens(adapter_ids_ptr, num_tokens, BLOCK_T: tl.constexpr):
    """(adapter, tokens [BLOCK_T], which of them this program computes): the adapter is -1 for none."""
    leader = tl.program_id(0).to(tl.int64)
    token = leader // BLOCK_T * BLOCK_T + tl.arange(0, BLOCK_T)
    adapters = tl.load(adapter_ids_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
    adapter = tl.load(adapter_ids_ptr + leader).to(tl.int64)
    is_led = (adapters == adapter) & (token < num_tokens)
    num_before = tl.sum((is_led & (token < leader)).to(tl.int32), axis=0)
    return tl.where(num_before == 0, adapter, -1), token, is_led


@triton.jit(do_not_specialize=["num_tokens"])
def _lora_shrink_kernel(
    x_ptr,
    weights_ptr,
    adapter_ids_ptr,
    out_ptr,
    x_stride,
    num_tokens,
    rank,
    hidden,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One leader's tokens times BLOCK_R rows of its adapter's A."""
    adapter, token, is_led = _led_tokens(adapter_ids_ptr, num_tokens, BLOCK_T)
    if adapter >= 0:
        row = (tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
        offset = tl.arange(0, BLOCK_K)
        x_start = x_ptr + token[:, None] * x_stride + offset[None, :]
        weight_start = weights_ptr + (adapter * rank + row[None, :]) * hidden + offset[:, None]
        total = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
        for start in range(0, hidden, BLOCK_K):
            is_in_range = offset < hidden - start
            x = tl.load(x_start + start, mask=is_led[:, None] & is_in_range[None, :], other=0.0)
            weight = tl.load(
                weight_start + start, mask=(row < rank)[None, :] & is_in_range[:, None], other=0.0
            )
            if x.dtype != weight.dtype:
                x, weight = x.to(tl.float32), weight.to(tl.float32)
            total = tl.dot(x, weight, total, input_precision="ieee")
        out_start = out_ptr + token[:, None] * rank + row[None, :]
        tl.store(out_start, total, mask=is_led[:, None] & (row < rank)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _lora_expand_kernel(
    x_ptr,
    weights_ptr,
    adapter_ids_ptr,
    scales_ptr,
    out_ptr,
    x_stride,
    out_stride,
    num_tokens,
    num_outputs,
    rank,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Adds one leader's tokens times BLOCK_N rows of its adapter's B. BLOCK_R is the whole rank."""
    adapter, token, is_led = _led_tokens(adapter_ids_ptr, num_tokens, BLOCK_T)
    if adapter >= 0:
        column = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        offset = tl.arange(0, BLOCK_R)
        is_column, is_in_range = column < num_outputs, offset < rank
        x_start = x_ptr + token[:, None] * x_stride + offset[None, :]
        x = tl.load(x_start, mask=is_led[:, None] & is_in_range[None, :], other=0.0)
        weight_start = weights_ptr + (adapter * num_outputs + column[None, :]) * rank + offset[:, None]
        weight = tl.load(weight_start, mask=is_column[None, :] & is_in_range[:, None], other=0.0)
        product = tl.dot(x, weight.to(tl.float32), input_precision="ieee") * tl.load(scales_ptr + adapter)
        out_start = out_ptr + token[:, None] * out_stride + column[None, :]
        is_out = is_led[:, None] & is_column[None, :]
        out_type = out_ptr.dtype.element_ty
        before = tl.load(out_start, mask=is_out, other=0.0).to(tl.float32)
        tl.store(out_start, (before + product.to(out_type).to(tl.float32)).to(out_type), mask=is_out)


def lora_shrink(x: Tensor, weights: Tensor, adapter_ids: Tensor) -> Tensor:
    """x A^T of each token's own adapter, in fp32.

    x: [T, hidden], rows contiguous.  weights: [adapters, rank, hidden] contiguous.  adapter_ids: [T] int32 or
    int64, -1 is none and gives 0.  Returns [T, rank] fp32.
    """
    num_tokens, hidden = x.shape
    rank = weights.shape[1]
    _check_layout(x, weights, adapter_ids, hidden)
    out = x.new_zeros(num_tokens, rank, dtype=torch.float32)
    if num_tokens == 0:
        return out
    block = min(64, max(16, triton.next_power_of_2(rank)))
    _lora_shrink_kernel[(num_tokens, triton.cdiv(rank, block))](
        x,
        weights,
        adapter_ids,
        out,
        x.stride(0),
        num_tokens,
        rank,
        hidden,
        BLOCK_T=_TOKENS_PER_TILE,
        BLOCK_R=block,
        BLOCK_K=128,
    )
    return out


def lora_expand(x: Tensor, weights: Tensor, adapter_ids: Tensor, scales: Tensor, out: Tensor) -> None:
    """out += scale * x B^T of each token's own adapter, in place; the product is in fp32 and rounded once.

    x: [T, rank] fp32, rows contiguous.  weights: [adapters, N, rank] contiguous.  adapter_ids: [T], -1 adds
    nothing.  scales: [adapters] fp32.  out: [T, N], rows contiguous, written.
    """
    num_tokens, rank = x.shape
    num_outputs = weights.shape[1]
    _check_layout(x, weights, adapter_ids, rank)
    if out.shape != (num_tokens, num_outputs) or out.stride(-1) != 1:
        raise ValueError(f"out is {tuple(out.shape)} with strides {out.stride()}, not rows of {num_outputs}")
    if num_tokens == 0:
        return
    block = 64
    _lora_expand_kernel[(num_tokens, triton.cdiv(num_outputs, block))](
        x,
        weights,
        adapter_ids,
        scales,
        out,
        x.stride(0),
        out.stride(0),
        num_tokens,
        num_outputs,
        rank,
        BLOCK_T=_TOKENS_PER_TILE,
        BLOCK_N=block,
        BLOCK_R=max(16, triton.next_power_of_2(rank)),
    )


def _check_layout(x: Tensor, weights: Tensor, adapter_ids: Tensor, num_inputs: int) -> None:
    if weights.shape[2] != num_inputs or not weights.is_contiguous():
        raise ValueError(f"the weights are {tuple(weights.shape)}, not contiguous rows of {num_inputs}")
    if x.stride(-1) != 1:
        raise ValueError(f"the columns of x must be contiguous; their stride is {x.stride(-1)}")
    if adapter_ids.shape != x.shape[:1]:
        raise ValueError(f"{x.shape[0]} tokens have {tuple(adapter_ids.shape)} adapter ids")
