"""Rotary positions, and stores of the rotated keys, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.reference.kv_write import kv_write
from triptych_kernels.reference.norm import rms_norm


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
    qkv: [T, (H + 2 G) D], heads of q, then of k, then of v.  positions: [T] int64.
    cos_sin: [max_positions, rotary_dim] fp32, cosines in the first half.  slot_mapping: [T] int64; a negative
    slot stores nothing.  key_cache, value_cache: [B, G, S, D], written.
    Source: Su et al. 2021, eq. 34, in the half-split form of GPT-NeoX.
    """
    num_kv_heads, head_dim = key_cache.shape[1], key_cache.shape[-1]
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    queries, keys, values = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if query_norm is not None and key_norm is not None:
        queries, keys = rms_norm(queries, query_norm, eps), rms_norm(keys, key_norm, eps)
    cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
    heads[:, :num_heads] = _turned(queries, cos, sin)
    kv_write(_turned(keys, cos, sin), values, key_cache, value_cache, slot_mapping)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary_dim = 2 * cos.shape[-1]
    first, second = x[..., :rotary_dim].float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
    return torch.cat([turned, x[..., rotary_dim:]], dim=-1)
