"""Attention over the paged cache as Triton kernels: prompts, chunks and decodes in one launch.

A program holds a tile of queries of one row, for all heads of one KV head, and iterates over the keys they
see in tiles that begin at multiples of their size. If few rows have many keys, these are split among
programs, and a second kernel combines their parts.
Source: Dao 2023, FlashAttention-2, algorithm 1; Dao et al. 2023, Flash-Decoding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.attention_batch import AttentionBatch
from triptych_kernels.triton.rows import find_row

_LOG2_E = tl.constexpr(1.4426950408889634)
_MIN_DOT = 16  # the minimum number of rows and columns of a product on tensor cores
_ROWS_PER_SEARCH = 256
_MIN_KEYS_PER_SPLIT = 512
_MAX_SPLITS = 64


@triton.jit
def _keys_of_split(first_key, end_key, split, NUM_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Begin and end of the split's share of the keys, in whole tiles."""
    num_tiles = (end_key - first_key + BLOCK_N - 1) // BLOCK_N
    split_keys = (num_tiles + NUM_SPLITS - 1) // NUM_SPLITS * BLOCK_N
    first_key += split * split_keys
    return first_key, tl.minimum(end_key, first_key + split_keys)


@triton.jit
def _visible_scores(
    products, key, position, scale, soft_cap, WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr
):
    """Scores to the base 2 of keys at [1, N] for queries at [M, 1]; -inf where a key is not visible."""
    scores = products * scale
    if HAS_SOFT_CAP:
        # The scale includes the cap's reciprocal; tanh is written with functions that every target has.
        scores = (1.0 - 2.0 / (tl.exp(2.0 * scores) + 1.0)) * soft_cap
    is_visible = key <= position
    if WINDOW > 0:
        is_visible = is_visible & (key > position - WINDOW)
    return tl.where(is_visible, scores, float("-inf"))


# No specialization on numbers of rows and widths of tables, which change from step to step, and with them the
# alignment of the tables of a second group of layers.
@triton.jit(
    do_not_specialize=["num_rows", "table_stride"], do_not_specialize_on_alignment=["block_tables_ptr"]
)
def _paged_attention_kernel(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    sinks_ptr,
    block_tables_ptr,
    query_starts_ptr,
    total_lengths_ptr,
    out_ptr,
    parts_ptr,
    part_maxima_ptr,
    part_sums_ptr,
    query_token_stride,
    query_head_stride,
    query_dim_stride,
    table_stride,
    num_rows,
    scale,
    soft_cap,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IS_DECODE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """A tile of queries of one row and KV head, over all keys they see or over one split of them.

    WINDOW is 0 for none. With splits, sums that are not divided yet go to `parts`.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // SHARE
    kv_head, split = tl.program_id(1), tl.program_id(2)
    if IS_DECODE:
        row, tile = tl.program_id(0), 0
        first_token = tl.load(query_starts_ptr + row)
    else:
        row = find_row(query_starts_ptr, num_rows, tl.program_id(0), BLOCK_Q, BLOCK_R)
        first_token = tl.load(query_starts_ptr + row)
        tile = tl.program_id(0) - (first_token // BLOCK_Q + row)
    num_tokens = tl.load(query_starts_ptr + row + 1) - first_token
    if tile * BLOCK_Q >= num_tokens:
        return

    m, d, e = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    query = tile * BLOCK_Q + m // SHARE
    head = kv_head * SHARE + m % SHARE
    is_query = (m < BLOCK_Q * SHARE) & (query < num_tokens)
    token = (first_token + query).to(tl.int64)
    query_start = query_ptr + token * query_token_stride + head * query_head_stride
    is_q = is_query[:, None] & (d < KEY_DIM)[None, :]
    q = tl.load(query_start[:, None] + d[None, :] * query_dim_stride, mask=is_q, other=0.0)

    first_position = tl.load(total_lengths_ptr + row) - num_tokens
    position = first_position + query
    end_key = first_position + tl.minimum((tile + 1) * BLOCK_Q, num_tokens)
    # Tiles of keys begin at the same multiples for every query; keys that no query here sees are not read.
    first_seen = 0
    if WINDOW > 0:
        first_seen = tl.maximum(first_position + tile * BLOCK_Q - WINDOW + 1, 0)
    first_key = first_seen // BLOCK_N * BLOCK_N
    if NUM_SPLITS > 1:
        first_key, end_key = _keys_of_split(first_key, end_key, split, NUM_SPLITS, BLOCK_N)

    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if HAS_SINKS:
        # A sink is a first key without a value; it belongs to the first split.
        sinks = tl.load(sinks_ptr + head, mask=is_query, other=0.0).to(tl.float32)
        maximum = tl.where(split == 0, sinks * _LOG2_E, maximum)
        total = tl.where(split == 0, 1.0, total)
    attended = tl.zeros((BLOCK_M, BLOCK_E), dtype=tl.float32)
    table = block_tables_ptr + row.to(tl.int64) * table_stride
    key_head = key_cache_ptr + kv_head * BLOCK_SIZE * KEY_DIM
    value_head = value_cache_ptr + kv_head * BLOCK_SIZE * VALUE_DIM
    # One tile ahead: Triton prefetches keys and values only if their addresses are not loaded in the same
    # iteration.
    key = first_key + tl.arange(0, BLOCK_N)
    block = tl.load(table + key // BLOCK_SIZE, mask=(key >= first_seen) & (key < end_key), other=0)
    for start in range(first_key, end_key, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        is_key = (key >= first_seen) & (key < end_key)
        # Relative to the head's first slot in block 0: a block has the slots of all heads.
        slot = block.to(tl.int64) * (NUM_HEADS // SHARE * BLOCK_SIZE) + key % BLOCK_SIZE
        block = tl.load(table + (key + BLOCK_N) // BLOCK_SIZE, mask=key + BLOCK_N < end_key, other=0)
        is_k = is_key[None, :] & (d < KEY_DIM)[:, None]
        k = tl.load(key_head + slot[None, :] * KEY_DIM + d[:, None], mask=is_k, other=0.0)
        scores = tl.dot(q, k, input_precision="ieee")
        scores = _visible_scores(
            scores, key[None, :], position[:, None], scale, soft_cap, WINDOW, HAS_SOFT_CAP
        )
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        # Rows that have not seen a key yet must not subtract infinity from infinity.
        finite_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - finite_maximum[:, None])
        shrink = tl.exp2(maximum - finite_maximum)
        total = total * shrink + tl.sum(weights, axis=1)
        is_v = is_key[:, None] & (e < VALUE_DIM)[None, :]
        v = tl.load(value_head + slot[:, None] * VALUE_DIM + e[None, :], mask=is_v, other=0.0)
        attended = attended * shrink[:, None]
        attended = tl.dot(weights.to(v.dtype), v, attended, input_precision="ieee")
        maximum = new_maximum

    is_out = is_query[:, None] & (e < VALUE_DIM)[None, :]
    if NUM_SPLITS == 1:
        out_start = out_ptr + (token * NUM_HEADS + head)[:, None] * VALUE_DIM + e[None, :]
        total = tl.where(is_query, total, 1.0)
        tl.store(out_start, (attended / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_out)
    else:
        part = (row.to(tl.int64) * NUM_HEADS + head) * NUM_SPLITS + split
        tl.store(parts_ptr + part[:, None] * VALUE_DIM + e[None, :], attended, mask=is_out)
        tl.store(part_maxima_ptr + part, maximum, mask=is_query)
        tl.store(part_sums_ptr + part, total, mask=is_query)


@triton.jit
def _join_splits_kernel(
    parts_ptr,
    part_maxima_ptr,
    part_sums_ptr,
    query_starts_ptr,
    out_ptr,
    NUM_SPLITS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One head of one row's single token, combined from its splits."""
    row, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_starts_ptr + row)
    if tl.load(query_starts_ptr + row + 1) == token:
        return
    split, e = tl.arange(0, NUM_SPLITS), tl.arange(0, BLOCK_E)
    part = (row.to(tl.int64) * NUM_HEADS + head) * NUM_SPLITS + split
    maxima, sums = tl.load(part_maxima_ptr + part), tl.load(part_sums_ptr + part)
    highest = tl.max(maxima, axis=0)
    # A split without keys has the maximum -inf and the weight 0.
    weights = tl.exp2(maxima - tl.where(highest == float("-inf"), 0.0, highest))
    is_value = e < VALUE_DIM
    parts = tl.load(parts_ptr + part[:, None] * VALUE_DIM + e[None, :], mask=is_value[None, :], other=0.0)
    attended = tl.sum(parts * weights[:, None], axis=0) / tl.sum(sums * weights, axis=0)
    out_start = out_ptr + (token.to(tl.int64) * NUM_HEADS + head) * VALUE_DIM + e
    tl.store(out_start, attended.to(out_ptr.dtype.element_ty), mask=is_value)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Tile sizes of one program, and its launch options."""

    queries: int  # times heads that share a KV head
    keys: int
    num_warps: int
    num_stages: int


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
    num_splits: int | None = None,
) -> Tensor:
    """Causal attention of each row's tokens over the KV in its blocks, this step's included.

    softmax(cap(scale * q k^T)) v, softmax in fp32; token p of a row sees tokens max(0, p - window + 1) .. p;
    cap(x) = soft_cap * tanh(x / soft_cap); a sink adds exp(sinks[h]) to the denominator of head h.
    query: [T, H, D], any strides; head h reads KV head h // (H / G).  sinks: [H].  Returns [T, H, E] in
    query's dtype; tokens that belong to no row are left unwritten.
    key_cache: [B, G, S, D], value_cache: [B, G, S, E], contiguous. What no token sees is not read.
    num_splits: the number of programs that share the keys of a row's only token. None chooses it without
    waiting for the device; else a power of two. Only with 1 does a token have the same bits in every batch.
    """
    _check(query, key_cache, value_cache, batch, num_splits)
    (num_tokens, num_heads, key_dim), value_dim = query.shape, value_cache.shape[-1]
    out = torch.empty(num_tokens, num_heads, value_dim, dtype=query.dtype, device=query.device)
    if num_tokens == 0 or batch.num_rows == 0:
        return out
    is_fixed, is_decode = num_splits == 1, batch.max_query_length == 1
    num_kv_heads, share = key_cache.shape[1], num_heads // key_cache.shape[1]
    tile = _tile_for(
        query.dtype, max(key_dim, value_dim), share, None if is_fixed else batch.max_query_length
    )
    if not is_decode:
        num_splits = 1
    elif num_splits is None:
        num_visible = min(batch.max_total_length, window or batch.max_total_length)
        num_splits = choose_num_splits(batch.num_rows * num_kv_heads, num_visible, _num_processors(query))
    parts, maxima, sums = _room_for_parts(query, batch.num_rows, num_splits, value_dim)
    is_searched = is_fixed or not is_decode
    num_tiles = num_tokens // (tile.queries // share) + batch.num_rows if is_searched else batch.num_rows
    _paged_attention_kernel[(num_tiles, num_kv_heads, num_splits)](
        query,
        key_cache,
        value_cache,
        sinks,
        batch.block_tables,
        batch.query_starts,
        batch.total_lengths,
        out,
        parts,
        maxima,
        sums,
        *query.stride(),
        batch.block_tables.stride(0),
        batch.num_rows,
        scale * _LOG2_E.value if soft_cap is None else scale / soft_cap,
        0.0 if soft_cap is None else soft_cap * _LOG2_E.value,
        WINDOW=window or 0,
        HAS_SINKS=sinks is not None,
        HAS_SOFT_CAP=soft_cap is not None,
        # The search for the row is done even where it is not needed: the same code gives the same bits.
        IS_DECODE=not is_searched,
        NUM_SPLITS=num_splits,
        **_constants(query, key_cache, value_cache, tile),
    )
    if parts is not None and maxima is not None:
        _join_splits(parts, maxima, sums, batch, out)
    return out


def _constants(query: Tensor, key_cache: Tensor, value_cache: Tensor, tile: _Tile) -> dict[str, int]:
    """The constants of a kernel: the same for all calls of a model with this tile."""
    num_heads, key_dim = query.shape[1:]
    _, num_kv_heads, block_size, value_dim = value_cache.shape
    return {
        "NUM_HEADS": num_heads,
        "SHARE": num_heads // num_kv_heads,
        "BLOCK_SIZE": block_size,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_R": _ROWS_PER_SEARCH,
        "BLOCK_M": tile.queries,
        "BLOCK_N": tile.keys,
        "BLOCK_D": max(_MIN_DOT, triton.next_power_of_2(key_dim)),
        "BLOCK_E": max(_MIN_DOT, triton.next_power_of_2(value_dim)),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def choose_num_splits(num_programs: int, num_keys: int, num_processors: int) -> int:
    """The number of splits of a row's keys that gives work to every processor.

    num_programs: without splits.  num_keys: of the longest row.  Returns a power of two.
    """
    wanted = min(2 * num_processors // num_programs, num_keys // _MIN_KEYS_PER_SPLIT, _MAX_SPLITS)
    return 1 if wanted < 2 else 1 << (wanted.bit_length() - 1)


def _num_processors(query: Tensor) -> int:
    """The number of the GPU's processors; 1 for the interpreter."""
    if not query.is_cuda:
        return 1
    return torch.cuda.get_device_properties(query.device).multi_processor_count


def _tile_for(dtype: torch.dtype, head_dim: int, share: int, max_query_length: int | None) -> _Tile:
    """Tiles of keys depend only on the model; without `max_query_length` also those of queries."""
    row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
    keys = max(_MIN_DOT, min(64, 64 * 256 // row_bytes))
    least = max(_MIN_DOT, triton.next_power_of_2(share))
    # fp32 is multiplied without tensor cores: the accumulators of a large tile would not fit in registers.
    largest = 16 if dtype is torch.float32 or row_bytes > 512 else 128 if row_bytes <= 256 else 64
    wanted = 64 if max_query_length is None else triton.next_power_of_2(max_query_length * share)
    queries = max(least, min(wanted, largest))
    # With three stages such tiles exceed the 99 KiB of shared memory of small GPUs.
    is_wide = row_bytes > 256 and queries > 32
    return _Tile(queries, keys, num_warps=8 if queries > 64 else 4, num_stages=2 if is_wide else 3)


def _room_for_parts(
    query: Tensor, num_rows: int, num_splits: int, value_dim: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """fp32 [R, H, splits, E] for attended values, [R, H, splits] for maxima and sums; none for one split."""
    if num_splits == 1:
        return None, None, None
    shape = (num_rows, query.shape[1], num_splits)
    maxima, sums = torch.empty(2, *shape, dtype=torch.float32, device=query.device)
    return torch.empty(*shape, value_dim, dtype=torch.float32, device=query.device), maxima, sums


def _join_splits(
    parts: Tensor, maxima: Tensor, sums: Tensor | None, batch: AttentionBatch, out: Tensor
) -> None:
    _, num_heads, value_dim = out.shape
    _join_splits_kernel[(batch.num_rows, num_heads)](
        parts,
        maxima,
        sums,
        batch.query_starts,
        out,
        NUM_SPLITS=maxima.shape[-1],
        NUM_HEADS=num_heads,
        VALUE_DIM=value_dim,
        BLOCK_E=triton.next_power_of_2(value_dim),
    )


def _check(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, num_splits: int | None
) -> None:
    num_heads, key_dim = query.shape[1:]
    if num_heads % key_cache.shape[1] or key_cache.shape[-1] != key_dim:
        raise ValueError(
            f"{num_heads} heads of {key_dim} cannot read a key cache of shape {tuple(key_cache.shape)}"
        )
    if value_cache.shape[:-1] != key_cache.shape[:-1]:
        raise ValueError(
            f"the key cache is {tuple(key_cache.shape)}, the value cache {tuple(value_cache.shape)}"
        )
    if not {query.dtype} == {key_cache.dtype, value_cache.dtype}:
        raise ValueError(
            f"the query is of {query.dtype}, the caches of {key_cache.dtype} and {value_cache.dtype}"
        )
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        raise ValueError("the caches must be contiguous")
    if batch.block_tables.stride(-1) != 1:
        raise ValueError(f"columns of the block tables have stride {batch.block_tables.stride(-1)}, not 1")
    if num_splits is not None and (num_splits < 1 or num_splits & (num_splits - 1)):
        raise ValueError(f"{num_splits} splits are no power of two")
