"""Attention over the paged cache, in plain torch.

Written for the CPU: rows that compute one token are gathered and multiplied together, padded to a few fixed
lengths, so that no Python runs per row and a row's result does not depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych_kernels.attention_batch import AttentionBatch

_MIN_PADDED_LENGTH = 64
_QUERY_TILE = 256


def paged_attention(
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
    """Causal attention of each row's tokens over the KV in its blocks, this step's included.

    softmax(cap(scale * q k^T)) v, softmax in fp32; token p of a row sees tokens max(0, p - window + 1) .. p;
    cap(x) = soft_cap * tanh(x / soft_cap); a sink adds exp(sinks[h]) to the denominator of head h.
    query: [T, H, D]; head h reads KV head h // (H / G).  sinks: [H].  Returns [T, H, E] in query's dtype.
    key_cache: [B, G, S, D], value_cache: [B, G, S, E], contiguous. Blocks of other rows are never read;
    positions in a row's blocks after its last token must hold finite numbers.
    """
    output = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[-1])
    for group in _decode_groups(batch, window, key_cache.shape[1]):
        queries = query if group.tokens is None else query.index_select(0, group.tokens)
        attended = _attend_single_tokens(queries, key_cache, value_cache, group, scale, sinks, soft_cap)
        if group.tokens is None:
            return attended
        output.index_copy_(0, group.tokens, attended)
    for chunk in _chunks(batch, window):
        keys = key_cache.index_select(0, chunk.block_ids).transpose(0, 1).flatten(1, 2)
        values = value_cache.index_select(0, chunk.block_ids).transpose(0, 1).flatten(1, 2)
        for tile in chunk.tiles:
            queries = query[tile.first_token : tile.end_token]
            visible_keys = keys[:, tile.first_key : tile.end_key]
            visible_values = values[:, tile.first_key : tile.end_key]
            if sinks is None and soft_cap is None:
                attended = _attend_tile(queries, visible_keys, visible_values, tile.mask, scale)
            else:
                attended = _attend_tile_densely(
                    queries, visible_keys, visible_values, tile.mask, scale, sinks, soft_cap
                )
            output[tile.first_token : tile.end_token] = attended
    return output


@dataclass(slots=True)
class _DecodeGroup:
    """Rows with one token each whose visible KV pads to the same number of blocks."""

    tokens: Tensor | None  # [n], their indices in the step; None if they are all of it, in order
    gather: Tensor  # [G * n * padded blocks], rows of a cache seen as [B * G, S * D]
    bias: Tensor  # [n, 1, L] fp32, 0 where visible, else -inf


def _decode_groups(batch: AttentionBatch, window: int | None, num_kv_heads: int) -> list[_DecodeGroup]:
    key = ("decode", window, num_kv_heads)
    groups = batch.derived.get(key)
    if groups is None:
        groups = batch.derived[key] = _make_decode_groups(batch, window, num_kv_heads)
    return groups  # type: ignore[return-value]  # Only this function writes the key.


def _make_decode_groups(batch: AttentionBatch, window: int | None, num_kv_heads: int) -> list[_DecodeGroup]:
    single_rows = (batch.query_lengths == 1).nonzero().flatten()
    if single_rows.numel() == 0:
        return []
    size = batch.block_size
    lengths = batch.total_lengths[single_rows]
    first_visible = torch.zeros_like(lengths) if window is None else (lengths - window).clamp_(min=0)
    first_block, last_block = first_visible // size, (lengths - 1) // size
    ladder = _padded_block_counts(int((last_block - first_block).max()) + 1, size)
    rungs = torch.bucketize(last_block - first_block + 1, torch.tensor(ladder, device=lengths.device))
    tokens = (batch.query_starts[1:].long() - 1)[single_rows]
    heads = torch.arange(num_kv_heads, device=lengths.device)[:, None]
    groups = []
    for rung in rungs.unique().tolist():
        members = (rungs == rung).nonzero().flatten()
        is_whole_step = members.numel() == batch.num_rows
        # Padding repeats the row's own last block: NaN of other rows must not get into this one.
        steps = torch.arange(ladder[rung], device=lengths.device)
        columns = torch.minimum(first_block[members, None] + steps, last_block[members, None])
        block_ids = batch.block_tables[single_rows[members, None], columns].long()
        position = first_block[members, None] * size + torch.arange(
            ladder[rung] * size, device=lengths.device
        )
        is_visible = (position >= first_visible[members, None]) & (position < lengths[members, None])
        bias = torch.zeros(is_visible.shape, dtype=torch.float32, device=lengths.device)
        groups.append(
            _DecodeGroup(
                tokens=None if is_whole_step else tokens[members],
                gather=(block_ids.flatten() * num_kv_heads + heads).flatten(),
                bias=bias.masked_fill_(~is_visible, float("-inf")).unsqueeze(1),
            )
        )
    return groups


def _padded_block_counts(max_blocks: int, block_size: int) -> list[int]:
    """Lengths that rows are padded to, as blocks: 64 tokens, then powers of two and one step between them.

    A function of the row's own length alone, so its sums have one order in every batch.
    """
    ladder, length = [-(-_MIN_PADDED_LENGTH // block_size)], 2 * _MIN_PADDED_LENGTH
    while ladder[-1] < max_blocks:
        ladder += [-(-length // block_size), -(-3 * length // 2 // block_size)]
        length *= 2
    return ladder


def _attend_single_tokens(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    group: _DecodeGroup,
    scale: float,
    sinks: Tensor | None,
    soft_cap: float | None,
) -> Tensor:
    num_blocks, num_kv_heads, _, key_dim = key_cache.shape
    num_rows, num_heads, _ = query.shape
    length = group.bias.shape[-1]
    share = num_heads // num_kv_heads
    keys = key_cache.view(num_blocks * num_kv_heads, -1).index_select(0, group.gather)
    queries = query.reshape(num_rows, num_kv_heads, share, key_dim).transpose(0, 1)
    products = torch.bmm(
        queries.reshape(num_kv_heads * num_rows, share, key_dim),
        keys.view(num_kv_heads * num_rows, length, key_dim).transpose(1, 2),
    ).view(num_kv_heads, num_rows, share, length)
    del keys  # The values are gathered into memory that is still in the CPU's cache.
    head_sinks = None if sinks is None else sinks.view(num_kv_heads, 1, share, 1)
    weights = _softmax(products, group.bias, scale, head_sinks, soft_cap).to(query.dtype)
    values = value_cache.view(num_blocks * num_kv_heads, -1).index_select(0, group.gather)
    attended = torch.bmm(
        weights.reshape(num_kv_heads * num_rows, share, length),
        values.view(num_kv_heads * num_rows, length, -1),
    )
    return attended.view(num_kv_heads, num_rows, share, -1).transpose(0, 1).reshape(num_rows, num_heads, -1)


def _softmax(
    products: Tensor, bias: Tensor, scale: float, sinks: Tensor | None, soft_cap: float | None
) -> Tensor:
    """fp32 weights of raw products q k^T; bias and sinks are broadcast against them."""
    if soft_cap is None:
        scores = torch.add(bias, products, alpha=scale)
    else:
        scores = torch.tanh(products.float() * (scale / soft_cap)) * soft_cap + bias
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    column = sinks.float().expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]


@dataclass(slots=True)
class _Tile:
    """Consecutive tokens of one row, and indices of the gathered keys that any of them sees."""

    first_token: int
    end_token: int
    first_key: int
    end_key: int
    mask: Tensor | None  # [n, keys] bool, True where visible; None for a square causal tile


@dataclass(slots=True)
class _Chunk:
    """A row that computes more than one token."""

    block_ids: Tensor
    tiles: list[_Tile]


def _chunks(batch: AttentionBatch, window: int | None) -> list[_Chunk]:
    key = ("chunks", window)
    chunks = batch.derived.get(key)
    if chunks is None:
        chunks = batch.derived[key] = _make_chunks(batch, window)
    return chunks  # type: ignore[return-value]  # Only this function writes the key.


def _make_chunks(batch: AttentionBatch, window: int | None) -> list[_Chunk]:
    chunks, token = [], 0
    lengths = zip(batch.query_lengths.tolist(), batch.total_lengths.tolist(), strict=True)
    for row, (num_tokens, total) in enumerate(lengths):
        if num_tokens > 1:
            start = total - num_tokens
            first_block = 0 if window is None else max(0, start - window + 1) // batch.block_size
            block_ids = batch.block_tables[row, first_block : -(-total // batch.block_size)].long()
            tiles = [
                _make_tile(
                    token,
                    start,
                    first,
                    min(first + _QUERY_TILE, total),
                    first_block * batch.block_size,
                    window,
                    block_ids.device,
                )
                for first in range(start, total, _QUERY_TILE)
            ]
            chunks.append(_Chunk(block_ids, tiles))
        token += num_tokens
    return chunks


def _make_tile(
    chunk_token: int,
    chunk_start: int,
    first: int,
    end: int,
    gathered_from: int,
    window: int | None,
    device: torch.device,
) -> _Tile:
    """The tile of positions first .. end - 1 of a chunk that starts at token chunk_token."""
    first_key = 0 if window is None else max(0, first - window + 1)
    mask = None
    if first_key < first or (window is not None and window < end - first):
        position = torch.arange(first, end, device=device)[:, None]
        key_position = torch.arange(first_key, end, device=device)
        mask = key_position <= position
        if window is not None:
            mask &= key_position > position - window
    return _Tile(
        first_token=chunk_token + first - chunk_start,
        end_token=chunk_token + end - chunk_start,
        first_key=first_key - gathered_from,
        end_key=end - gathered_from,
        mask=mask,
    )


def _attend_tile(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    num_tokens, num_heads, key_dim = query.shape
    num_kv_heads, num_keys, _ = keys.shape
    share = num_heads // num_kv_heads
    attended = F.scaled_dot_product_attention(
        query.reshape(num_tokens, num_kv_heads, share, key_dim).permute(1, 2, 0, 3),
        keys.unsqueeze(1).expand(num_kv_heads, share, num_keys, key_dim),
        values.unsqueeze(1).expand(num_kv_heads, share, num_keys, values.shape[-1]),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return attended.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, -1)


def _attend_tile_densely(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    sinks: Tensor | None,
    soft_cap: float | None,
) -> Tensor:
    num_tokens, num_heads, key_dim = query.shape
    num_kv_heads, num_keys, _ = keys.shape
    share = num_heads // num_kv_heads
    if mask is None:
        mask = torch.ones(num_tokens, num_keys, dtype=torch.bool, device=query.device).tril_()
    bias = torch.zeros(mask.shape, device=query.device).masked_fill_(~mask, float("-inf"))
    queries = query.reshape(num_tokens, num_kv_heads, share, key_dim).permute(1, 2, 0, 3)
    products = torch.matmul(queries, keys.unsqueeze(1).transpose(2, 3))
    head_sinks = None if sinks is None else sinks.view(num_kv_heads, share, 1, 1)
    weights = _softmax(products, bias, scale, head_sinks, soft_cap).to(query.dtype)
    attended = torch.matmul(weights, values.unsqueeze(1))
    return attended.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, -1)
