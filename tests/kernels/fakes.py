"""Paged KV with rows laid over shuffled blocks, and numbers that may not be read everywhere else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triptych_kernels import AttentionBatch


@dataclass
class PagedCase:
    """Arguments of `paged_attention`, filled with noise."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    batch: AttentionBatch
    scale: float


def paged_case(
    lengths: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    key_dim: int = 8,
    value_dim: int = 8,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> PagedCase:
    """Rows as (tokens to compute, total length). Blocks without a row are NaN, places behind a row 0."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-total // block_size) for _, total in lengths]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=generator).tolist()
    tables = torch.full((len(lengths), max(counts, default=0) + 2), num_blocks - 1, dtype=torch.int64)
    caches = [
        torch.full((num_blocks, num_kv_heads, block_size, dim), float("nan")) for dim in (key_dim, value_dim)
    ]
    for row, (_, total) in enumerate(lengths):
        blocks = [order.pop() for _ in range(counts[row])]
        tables[row, : len(blocks)] = torch.tensor(blocks)
        for cache in caches:
            noise = torch.randn(num_kv_heads, len(blocks) * block_size, cache.shape[-1], generator=generator)
            noise[:, total:] = 0.0
            cache[blocks] = noise.view(num_kv_heads, len(blocks), block_size, -1).transpose(0, 1)
    num_tokens = sum(count for count, _ in lengths)
    return PagedCase(
        query=torch.randn(num_tokens, num_heads, key_dim, generator=generator).to(dtype),
        key_cache=caches[0].to(dtype),
        value_cache=caches[1].to(dtype),
        batch=AttentionBatch.of(
            tables, [count for count, _ in lengths], [total for _, total in lengths], block_size
        ),
        scale=key_dim**-0.5,
    )
