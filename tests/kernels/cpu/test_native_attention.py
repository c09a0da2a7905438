"""Native attention: right, and the same bits for a token however its row is cut, placed and accompanied."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.fakes import PagedCase, paged_case
from tests.kernels.naive import naive_attention
from triptych_kernels import REFERENCE, AttentionBatch
from triptych_kernels.ops import Ops

MIXED = [(1, 63), (5, 5), (0, 3), (1, 129), (4, 33), (1, 1), (63, 70), (1, 16), (2, 130)]
DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2e-2}
# (heads, kv heads), key_dim, value_dim, block_size
SHAPES = [
    ((1, 1), 8, 8, 16),
    ((4, 2), 32, 32, 16),
    ((9, 3), 64, 64, 32),
    ((4, 1), 128, 128, 16),
    ((8, 1), 40, 40, 4),
    ((6, 3), 80, 24, 16),
    ((3, 3), 192, 128, 32),
    ((14, 2), 64, 96, 16),
    ((20, 1), 64, 64, 16),
    ((5, 1), 5, 7, 3),
    ((2, 2), 17, 33, 1),
]
OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "window-1": {"window": 1},
    "window-23": {"window": 23},
    "window-64": {"window": 64},
    "cap": {"soft_cap": 0.7},
    "sinks": {"sinks": torch.tensor([0.5, -2.0, 30.0, 0.0]), "window": 40},
}


def attend(ops: Ops, case: PagedCase, **options: object) -> Tensor:
    return ops.paged_attention(
        case.query, case.key_cache, case.value_cache, case.batch, scale=case.scale, **options
    )


def naive(case: PagedCase, **options: object) -> Tensor:
    return naive_attention(case.query, case.key_cache, case.value_cache, case.batch, case.scale, **options)


def assert_matches(ops: Ops, case: PagedCase, atol: float | None = None, **options: object) -> None:
    assert_is(naive(case, **options), ops, case, atol, **options)


def assert_is(
    expected: Tensor, ops: Ops, case: PagedCase, atol: float | None = None, **options: object
) -> None:
    output = attend(ops, case, **options)
    assert output.dtype == case.query.dtype
    atol = TOLERANCE[case.query.dtype] if atol is None else atol
    torch.testing.assert_close(output.double(), expected, rtol=0.0, atol=atol)


def shaped_case(shape: tuple[tuple[int, int], int, int, int], dtype: torch.dtype) -> PagedCase:
    (num_heads, num_kv_heads), key_dim, value_dim, block_size = shape
    return paged_case(
        MIXED,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        block_size=block_size,
        dtype=dtype,
    )


@functools.cache
def twin(shape: tuple[tuple[int, int], int, int, int], dtype: torch.dtype, options: str) -> Tensor:
    """What all instruction sets have to give."""
    return naive(shaped_case(shape, dtype), **OPTIONS[options])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_matches_the_twin(ops, shape, dtype):
    assert_is(twin(shape, dtype, "plain"), ops, shaped_case(shape, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("block_size", [4, 32])
def test_every_option_matches_the_twin(ops, options, block_size, dtype):
    shape = ((4, 2), 32, 32, block_size)
    assert_is(twin(shape, dtype, options), ops, shaped_case(shape, dtype), **OPTIONS[options])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [16, 48])
def test_a_token_in_local_chunks_matches_the_twin_and_has_the_same_bits_in_every_step(ops, chunk, dtype):
    case = shaped_case(((4, 2), 32, 32, 16), dtype)
    assert_is(naive(case, chunk=chunk), ops, replace(case, batch=case.batch.in_local_chunks(chunk)))
    case = one_row(((4, 2), 32, 32, 16), dtype)
    whole = attend(ops, replace(case, batch=case.batch.in_local_chunks(chunk)))
    for start, end in ((0, 150), (0, 1), (7, 8), (15, 65), (47, 48), (149, 150)):
        batch = AttentionBatch.of(case.batch.block_tables, [end - start], [end], 16).in_local_chunks(chunk)
        assert torch.equal(
            attend(ops, replace(case, query=case.query[start:end], batch=batch)), whole[start:end]
        )


def test_large_and_tiny_scores_keep_their_weights(ops):
    case = paged_case([(1, 40), (20, 40)], key_dim=16, value_dim=16)
    case.query *= 40.0
    # A score of some hundreds in fp32 is off by 1e-5, and so is its weight.
    assert_matches(ops, case, atol=3e-5)
    assert_matches(ops, case, soft_cap=20.0)
    case.query *= 1e-6
    assert_matches(ops, case, soft_cap=20.0)


def test_queries_may_lie_in_a_packed_projection(ops):
    case = shaped_case(((9, 3), 64, 64, 16), torch.bfloat16)
    plain = attend(ops, case)
    packed = torch.full((case.query.shape[0], 9 + 6, 64), float("nan"), dtype=torch.bfloat16)
    packed[:, :9] = case.query
    assert torch.equal(attend(ops, replace(case, query=packed[:, :9])), plain)
    turned = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(attend(ops, replace(case, query=turned)), plain)


def test_what_the_kernel_does_not_know_goes_to_the_reference(ops):
    case = paged_case([(1, 9), (1, 30)], dtype=torch.float16)
    assert torch.equal(attend(ops, case), attend(REFERENCE, case))
    case = paged_case([(1, 9), (1, 30)])
    scattered = torch.stack([case.query, case.query], dim=-1)[..., 0]
    assert scattered.stride(-1) == 2
    assert torch.equal(attend(ops, replace(case, query=scattered)), attend(REFERENCE, case))


def test_tokens_behind_the_last_row_are_zero(ops):
    case = paged_case([(1, 9), (3, 30)])
    padded = torch.cat([case.query, torch.full_like(case.query, float("nan"))])
    output = attend(ops, replace(case, query=padded))
    assert torch.equal(output[:4], attend(ops, case))
    assert torch.equal(output[4:], torch.zeros_like(output[4:]))


def test_an_empty_step_gives_an_empty_output(ops):
    case = paged_case([(1, 1)])
    empty = AttentionBatch.of(case.batch.block_tables[:0], [], [], 4)
    assert attend(ops, replace(case, query=case.query[:0], batch=empty)).shape == (0, 4, 8)


# One row of LENGTH tokens, all of whose KV is there: its tokens are then computed in many ways.
LENGTH = 150
INVARIANCE = [
    pytest.param(((2, 2), 32, 32, 16), {}, id="share-1"),
    pytest.param(((4, 2), 32, 32, 16), {"window": 23}, id="share-2-window"),
    pytest.param(((9, 3), 64, 64, 32), {"soft_cap": 0.7}, id="share-3-cap"),
    pytest.param(((4, 1), 40, 80, 4), {"sinks": torch.tensor([0.5, -2.0, 3.0, 0.0])}, id="share-4-sinks"),
    pytest.param(((8, 1), 128, 128, 16), {"window": 64}, id="share-8"),
    pytest.param(((20, 1), 48, 96, 32), {"window": 39}, id="share-20"),
]


def one_row(shape, dtype, length: int = LENGTH) -> PagedCase:
    (num_heads, num_kv_heads), key_dim, value_dim, block_size = shape
    return paged_case(
        [(length, length)],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        block_size=block_size,
        dtype=dtype,
    )


def in_chunks(ops: Ops, case: PagedCase, size: int, options: dict[str, object]) -> Tensor:
    """The tokens of a case of one row, `size` a step."""
    length = case.query.shape[0]
    parts = []
    for start in range(0, length, size):
        end = min(start + size, length)
        batch = AttentionBatch.of(case.batch.block_tables, [end - start], [end], case.batch.block_size)
        parts.append(attend(ops, replace(case, query=case.query[start:end], batch=batch), **options))
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "options"), INVARIANCE)
def test_a_token_has_the_same_bits_alone_and_in_chunks_of_every_size(ops, shape, options, dtype):
    case = one_row(shape, dtype)
    whole = attend(ops, case, **options)
    for size in (1, 7, 16, 37, 64, 149):
        assert torch.equal(in_chunks(ops, case, size, options), whole), size


def test_a_long_prompt_has_the_same_bits_alone_in_chunks_and_whole(ops):
    case = one_row(((3, 1), 64, 64, 16), torch.bfloat16, length=1100)
    whole = attend(ops, case)
    for size in (1, 16, 512):
        assert torch.equal(in_chunks(ops, case, size, {}), whole), size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "options"), INVARIANCE)
def test_a_row_has_the_same_bits_in_every_company(ops, shape, options, dtype):
    case = one_row(shape, dtype)
    whole = attend(ops, case, **options)
    table, block_size = case.batch.block_tables, case.batch.block_size
    # The row's tokens as rows of one step, some alone and some in chunks, in an order of their own.
    pieces = [(140, 150), (3, 4), (0, 3), (77, 78), (4, 60), (149, 150), (16, 17)]
    batch = AttentionBatch.of(
        table.expand(len(pieces), -1),
        [end - start for start, end in pieces],
        [end for _, end in pieces],
        block_size,
    )
    query = torch.cat([case.query[start:end] for start, end in pieces])
    output = attend(ops, replace(case, query=query, batch=batch), **options)
    assert torch.equal(output, torch.cat([whole[start:end] for start, end in pieces]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "options"), INVARIANCE)
def test_where_blocks_lie_changes_no_bit(ops, shape, options, dtype):
    case = shaped_case(shape, dtype)
    order = torch.randperm(case.key_cache.shape[0], generator=torch.Generator().manual_seed(5))
    new_blocks = order.argsort()
    moved = AttentionBatch.of(
        new_blocks[case.batch.block_tables.long()],
        case.batch.query_lengths.tolist(),
        case.batch.total_lengths.tolist(),
        case.batch.block_size,
    )
    elsewhere = replace(
        case,
        key_cache=case.key_cache[order].clone(),
        value_cache=case.value_cache[order].clone(),
        batch=moved,
    )
    assert torch.equal(attend(ops, elsewhere, **options), attend(ops, case, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "options"), INVARIANCE)
def test_threads_change_no_bit(ops, use_threads, shape, options, dtype):
    case = shaped_case(shape, dtype)
    alone = attend(ops, case, **options)
    for num_threads in (2, 3):
        use_threads(num_threads)
        assert torch.equal(attend(ops, case, **options), alone)


def sharing_case(shape, dtype, num_tokens: int, lengths: list[tuple[int, int]]) -> PagedCase:
    """Rows that all begin with the blocks of `num_tokens` tokens."""
    (num_heads, num_kv_heads), key_dim, value_dim, block_size = shape
    case = paged_case(
        lengths,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        block_size=block_size,
        dtype=dtype,
    )
    tables = case.batch.block_tables
    tables[:, : num_tokens // block_size] = tables[0, : num_tokens // block_size].clone()
    return case


def joined(case: PagedCase, num_tokens: int) -> PagedCase:
    return replace(
        case, batch=replace(case.batch, num_common_blocks=num_tokens // case.batch.block_size, derived={})
    )


SHARING = {
    "decodes": [(1, 97 + 5 * row) for row in range(13)],
    "mixed": [
        (1, 98),
        (1, 160),
        (3, 131),
        (1, 97),
        (40, 140),
        (1, 112),
        (1, 113),
        (1, 129),
        (0, 100),
        (1, 99),
    ],
    "two": [(1, 200), (1, 97)],
    "chunks": [(3, 131), (40, 140)],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", SHARING)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_that_read_common_blocks_together_have_the_same_bits(ops, use_threads, shape, rows, dtype):
    case = sharing_case(shape, dtype, 96, SHARING[rows])
    alone = attend(ops, case)
    for num_threads in (1, 3):
        use_threads(num_threads)
        assert torch.equal(attend(ops, joined(case, 96)), alone)
    # The count may be lower than the true one: a part of a tile, or of a block, is each row's own.
    assert torch.equal(attend(ops, joined(case, 60)), alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_common_blocks_change_no_bit_with_any_option(ops, options, dtype):
    case = sharing_case(((4, 2), 32, 32, 16), dtype, 96, SHARING["mixed"])
    alone = attend(ops, case, **OPTIONS[options])
    assert torch.equal(attend(ops, joined(case, 96), **OPTIONS[options]), alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_rows_than_fit_in_a_task_have_the_same_bits(ops, dtype):
    case = sharing_case(((6, 2), 64, 64, 16), dtype, 512, [(1, 513 + 7 * row % 90) for row in range(101)])
    assert torch.equal(attend(ops, joined(case, 512)), attend(ops, case))


def test_common_blocks_that_are_not_common_are_refused(ops):
    case = sharing_case(((4, 2), 32, 32, 16), torch.bfloat16, 96, SHARING["decodes"])
    case.batch.block_tables[7, 5] = case.batch.block_tables[7, 6]
    with pytest.raises(ValueError, match="rows do not begin with the same blocks"):
        attend(ops, joined(case, 96))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_a_rows_own_blocks_reaches_no_row_that_reads_common_blocks_with_it(ops, dtype):
    case = sharing_case(((4, 2), 32, 32, 16), dtype, 96, SHARING["decodes"])
    clean = attend(ops, case)
    block = int(case.batch.block_tables[4, 6])
    case.key_cache[block] = case.value_cache[block] = float("nan")
    output = attend(ops, joined(case, 96))
    assert output[4].isnan().all()
    output[4] = clean[4]
    assert torch.equal(output, clean)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [4, 16, 32])
@pytest.mark.parametrize("poisoned", [0, 3, 6])
def test_a_row_with_nan_reaches_no_other(ops, poisoned, block_size, dtype):
    case = shaped_case(((4, 2), 32, 32, block_size), dtype)
    clean = attend(ops, case)
    block = int(case.batch.block_tables[poisoned, 0])
    case.key_cache[block] = float("nan")
    case.value_cache[block] = float("nan")
    starts = case.batch.query_starts.tolist()
    own = slice(starts[poisoned], starts[poisoned + 1])
    output = attend(ops, case)
    assert output[own].isnan().all()
    output[own] = clean[own]
    assert torch.equal(output, clean)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 23])
@pytest.mark.parametrize("position", [21, 22, 32])
def test_a_position_that_a_token_does_not_see_may_hold_anything(ops, position, window, dtype):
    shape = ((9, 3), 64, 64, 16)
    case = one_row(shape, dtype)
    clean = attend(ops, case, window=window)
    block, offset = int(case.batch.block_tables[0, position // 16]), position % 16
    case.key_cache[block, :, offset] = float("nan")
    case.value_cache[block, :, offset] = float("inf")
    output = attend(ops, case, window=window)
    end = LENGTH if window is None else position + window
    assert torch.equal(output[:position], clean[:position])
    assert torch.equal(output[end:], clean[end:])
    assert output[position:end].isnan().all()


@pytest.mark.parametrize("block_id", [-1, 99])
def test_a_block_that_does_not_exist_is_refused(ops, block_id):
    case = paged_case([(1, 9), (3, 30)])
    case.batch.block_tables[1, 2] = block_id
    with pytest.raises(ValueError, match="a block table names a block that does not exist"):
        attend(ops, case)


def test_blocks_that_left_the_window_need_not_exist(ops):
    case = paged_case([(1, 9), (3, 30)])
    expected = attend(ops, case, window=6)
    case.batch.block_tables[1, :5] = -1
    assert torch.equal(attend(ops, case, window=6), expected)


@pytest.mark.parametrize(
    ("counts", "totals", "message"),
    [
        ([1, 3], [9, 90], "a row is longer than its block table"),
        ([1, 3], [9, 2], "a row computes more tokens than it has"),
        ([1, 4], [9, 30], "query_starts do not fit the query"),
        ([1], [9], "2 block tables with 2 query_starts and 1 total_lengths"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(ops, counts, totals, message):
    case = paged_case([(1, 9), (3, 30)])
    batch = AttentionBatch.of(case.batch.block_tables, counts, totals, 4)
    with pytest.raises(ValueError, match=message):
        attend(ops, replace(case, batch=batch))


def test_caches_that_do_not_serve_the_heads_are_refused(ops):
    case = paged_case([(1, 9)], num_heads=5)
    with pytest.raises(ValueError, match="do not serve 5 heads in blocks of 4"):
        attend(ops, case)
