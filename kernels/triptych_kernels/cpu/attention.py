"""Attention over the paged cache by the native kernel.

Knows tensors and addresses; the arithmetic is in attention.cpp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.attention_batch import AttentionBatch
from triptych_kernels.cpu.loader import Isa
from triptych_kernels.reference import REFERENCE

_DTYPES = (torch.bfloat16, torch.float32)
_ADDRESSES = "cpu addresses"


def paged_attention(
    isa: Isa,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """See the reference. A token's result has the same bits in every batch, chunk and block order.

    isa: the instruction set of the kernels.

    fp16, and layouts that the kernel does not support, go to the reference. ValueError if the batch has
    tokens, lengths or blocks that do not fit the tensors.
    """
    num_tokens, num_heads, key_dim = query.shape
    num_blocks, num_kv_heads, block_size, value_dim = value_cache.shape
    token_stride, head_stride, stride = query.stride()
    dtype = query.dtype
    if (
        dtype not in _DTYPES
        or stride != 1
        or key_cache.dtype is not dtype
        or value_cache.dtype is not dtype
        or not key_cache.is_contiguous()
        or not value_cache.is_contiguous()
    ):
        return REFERENCE.paged_attention(
            query, key_cache, value_cache, batch, scale=scale, window=window, sinks=sinks, soft_cap=soft_cap
        )
    if (
        key_cache.shape != (num_blocks, num_kv_heads, block_size, key_dim)
        or batch.block_size != block_size
        or num_heads % num_kv_heads
    ):
        raise ValueError(
            f"caches {tuple(key_cache.shape)} and {tuple(value_cache.shape)} do not serve {num_heads} heads"
            f" in blocks of {batch.block_size}"
        )
    if sinks is not None:
        sinks = sinks.to(torch.float32).contiguous()
    output = torch.empty((num_tokens, num_heads, value_dim), dtype=dtype)
    isa.native.paged_attention(
        query.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        output.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        token_stride,
        head_stride,
        num_tokens,
        num_heads,
        num_kv_heads,
        num_blocks,
        block_size,
        key_dim,
        value_dim,
        dtype is torch.bfloat16,
        isa.with_amx,
        window or 0,
        *batch_numbers(batch),
        scale,
        soft_cap or 0.0,
    )
    return output


def batch_numbers(batch: AttentionBatch) -> tuple[int, ...]:
    """The kernel's arguments for a batch: the same for all layers."""
    return (batch.derived.get(_ADDRESSES) or _addresses(batch))[0]  # type: ignore[index]  # Ours alone.


def _addresses(batch: AttentionBatch) -> tuple[tuple[int, ...], tuple[Tensor, ...]]:
    """The arguments, kept together with the tensors whose addresses they contain."""
    tables, starts, totals = (
        tensor.to(torch.int32) for tensor in (batch.block_tables, batch.query_starts, batch.total_lengths)
    )
    starts, totals = starts.contiguous(), totals.contiguous()
    if tables.stride(1) != 1:
        tables = tables.contiguous()
    num_rows, num_columns = tables.shape
    if starts.shape[0] != num_rows + 1 or totals.shape[0] != num_rows:
        raise ValueError(
            f"{num_rows} block tables with {starts.shape[0]} query_starts and {totals.shape[0]} total_lengths"
        )
    numbers = (
        tables.data_ptr(),
        starts.data_ptr(),
        totals.data_ptr(),
        num_rows,
        num_columns,
        tables.stride(0),
        batch.num_common_blocks,
    )
    batch.derived[_ADDRESSES] = made = numbers, (tables, starts, totals)
    return made
