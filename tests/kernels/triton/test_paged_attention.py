"""Attention over the paged cache in Triton against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.fakes import PagedCase, paged_case
from tests.kernels.triton.fresh_memory import with_nan_memory
from triptych_kernels import REFERENCE, AttentionBatch
from triptych_kernels.triton.paged_attention import choose_num_splits, paged_attention

DECODE = [(1, 1), (1, 63), (1, 65), (1, 200)]
PREFILL = [(7, 7), (3, 63), (2, 2), (63, 129)]
MIXED = [(1, 9), (5, 5), (1, 70), (4, 33), (1, 1), (2, 130)]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
SINKS = torch.tensor([0.5, -2.0, 3.0, 0.0])
# (rows, options of the case)
SHAPES = {
    "decode": (DECODE, {}),
    "prefill": (PREFILL, {}),
    "mixed": (MIXED, {"block_size": 16}),
    "one token": ([(1, 1)], {"num_heads": 1, "num_kv_heads": 1, "key_dim": 1, "value_dim": 1}),
    "odd dims": (MIXED, {"num_heads": 6, "num_kv_heads": 2, "key_dim": 5, "value_dim": 7, "block_size": 3}),
    "wide": ([(1, 40), (9, 20)], {"key_dim": 129, "value_dim": 63, "block_size": 32}),
    "one head for all": ([(1, 33), (5, 33)], {"num_heads": 20, "num_kv_heads": 1, "block_size": 1}),
}


def moved(case: PagedCase, device: torch.device) -> PagedCase:
    """The case on `device`, with NaN behind its rows' last tokens, too."""
    key_cache, value_cache = case.key_cache.clone(), case.value_cache.clone()
    batch = case.batch
    for row, total in enumerate(batch.total_lengths.tolist()):
        if total % batch.block_size:
            block = batch.block_tables[row, total // batch.block_size]
            for cache in (key_cache, value_cache):
                cache[block, :, total % batch.block_size :] = float("nan")
    tables, starts, totals = (
        tensor.to(device) for tensor in (batch.block_tables, batch.query_starts, batch.total_lengths)
    )
    return replace(
        case,
        query=case.query.to(device),
        key_cache=key_cache.to(device),
        value_cache=value_cache.to(device),
        batch=replace(batch, block_tables=tables, query_starts=starts, total_lengths=totals, derived={}),
    )


def attend(case: PagedCase, **options: object) -> Tensor:
    options = {"scale": case.scale} | options
    return with_nan_memory(
        paged_attention, case.query, case.key_cache, case.value_cache, case.batch, **options
    )


def assert_matches(
    case: PagedCase, device: torch.device, num_splits: int | None = None, **options: object
) -> None:
    expected = REFERENCE.paged_attention(
        case.query.float(),
        case.key_cache.float(),
        case.value_cache.float(),
        case.batch,
        scale=case.scale,
        **options,
    )
    there = {
        name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()
    }
    output = attend(moved(case, device), num_splits=num_splits, **there)
    assert output.dtype is case.query.dtype
    tolerance = TOLERANCE[case.query.dtype]
    torch.testing.assert_close(output.float().cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "num_splits"), [(torch.float32, 1), (torch.bfloat16, None), (torch.float16, None)], ids=str
)
@pytest.mark.parametrize("shape", list(SHAPES))
def test_paged_attention_equals_the_reference(shape, dtype, num_splits, device):
    lengths, options = SHAPES[shape]
    assert_matches(paged_case(lengths, dtype=dtype, **options), device, num_splits)


@pytest.mark.parametrize(
    ("lengths", "num_splits", "windows"),
    [
        (DECODE, None, [1, 64]),
        (DECODE, 1, [4, 63]),
        (DECODE, 4, [1, 65, 500]),
        (MIXED, None, [1, 64]),
        (MIXED, 1, [4, 63, 65, 500]),
    ],
    ids=["decode", "decode in one part", "decode in four parts", "mixed", "mixed in tiles of one size"],
)
def test_a_window_hides_older_tokens(lengths, num_splits, windows, device):
    for window in windows:
        assert_matches(paged_case(lengths), device, num_splits, window=window)


@pytest.mark.parametrize(
    ("lengths", "num_splits"), [(DECODE, 4), (MIXED, None), (MIXED, 1)], ids=["decode", "mixed", "one split"]
)
def test_a_local_chunk_hides_the_tokens_before_it(lengths, num_splits, device):
    case = paged_case(lengths)
    expected = REFERENCE.paged_attention(
        case.query, case.key_cache, case.value_cache, case.batch.in_local_chunks(12), scale=case.scale
    )
    there = moved(case, device)
    output = attend(replace(there, batch=there.batch.in_local_chunks(12)), num_splits=num_splits)
    torch.testing.assert_close(output.cpu(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("lengths", "num_splits"),
    [([(count, 150), (1, 90)], splits) for count, splits in [(1, None), (1, 1), (1, 4), (3, None), (3, 1)]],
    ids=str,
)
def test_blocks_that_fell_out_of_the_window_are_not_read(lengths, num_splits, device):
    case = moved(paged_case(lengths), device)
    expected = attend(case, num_splits=num_splits, window=10)
    for row, (num_tokens, total) in enumerate(lengths):
        num_freed = (total - num_tokens - 10 + 1) // case.batch.block_size
        freed = case.batch.block_tables[row, :num_freed].long()
        case.key_cache[freed] = case.value_cache[freed] = float("nan")
        case.batch.block_tables[row, :num_freed] = 10**8
    assert torch.equal(attend(case, num_splits=num_splits, window=10), expected)


@pytest.mark.parametrize("options", [{"soft_cap": 0.7}, {"sinks": SINKS}], ids=["cap", "sinks"])
@pytest.mark.parametrize(
    ("lengths", "num_splits", "window"),
    [(DECODE, None, None), (DECODE, 4, 6), (PREFILL, None, 6)],
    ids=["decode", "decode in four parts", "prefill"],
)
def test_soft_cap_and_sinks(lengths, num_splits, window, options, device):
    assert_matches(paged_case(lengths), device, num_splits, window=window, **options)


@pytest.mark.parametrize(
    ("dtype", "num_splits"), [(torch.float32, 2), (torch.bfloat16, 16), (torch.float16, 2)], ids=str
)
def test_keys_shared_out_among_programs_give_the_same(dtype, num_splits, device):
    assert_matches(paged_case([(1, 1), (1, 65), (1, 700)], dtype=dtype, block_size=16), device, num_splits)


def test_large_scores_do_not_overflow(device):
    case = paged_case(MIXED)
    case.query *= 100.0
    case.query[3] *= 1e30
    arguments = (case.query, case.key_cache, case.value_cache, case.batch)
    for options in ({}, {"soft_cap": 30.0}):
        expected = REFERENCE.paged_attention(*arguments, scale=case.scale, **options)
        output = attend(moved(case, device), **options)
        torch.testing.assert_close(output.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_the_query_may_have_any_strides(device):
    case = moved(paged_case(MIXED), device)
    expected = attend(case)
    case.query = case.query.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert torch.equal(attend(case), expected)


def test_rows_without_tokens_and_tokens_without_a_row_are_padding(device):
    case = moved(paged_case([(1, 20), (3, 9)], block_size=4), device)
    batch = case.batch
    expected = attend(case)
    # As in a recorded step: rows are padded with ones without tokens whose tables and lengths are stale.
    starts = torch.cat([batch.query_starts, batch.query_starts[-1:].expand(3)])
    totals = torch.cat([batch.total_lengths, torch.tensor([0, 77, 1], dtype=torch.int32, device=device)])
    tables = torch.cat([batch.block_tables, torch.full_like(batch.block_tables[:1], 10**8).expand(3, -1)])
    case.batch = replace(batch, block_tables=tables, query_starts=starts, total_lengths=totals)
    case.query = torch.cat([case.query, torch.full_like(case.query, float("nan"))])
    assert torch.equal(attend(case)[:4], expected)


@pytest.mark.parametrize("num_splits", [None, 1, 4])
def test_a_decode_batch_may_be_padded(num_splits, device):
    case = moved(paged_case(DECODE, block_size=4), device)
    batch = case.batch
    expected = attend(case, num_splits=num_splits)
    starts = torch.cat([batch.query_starts, batch.query_starts[-1:].expand(2)])
    totals = torch.cat([batch.total_lengths, torch.tensor([0, 50], dtype=torch.int32, device=device)])
    tables = torch.cat([batch.block_tables, torch.full_like(batch.block_tables[:1], 10**8).expand(2, -1)])
    case.batch = replace(batch, block_tables=tables, query_starts=starts, total_lengths=totals)
    # What is known of lengths without asking the device may be far more than they are.
    case.batch.max_total_length = 100_000
    case.query = torch.cat([case.query, case.query[:2]])
    assert torch.equal(attend(case, num_splits=num_splits)[: len(DECODE)], expected)


def test_more_rows_than_one_search_reads(device, monkeypatch):
    # The package has a function of the module's name.
    monkeypatch.setitem(paged_attention.__globals__, "_ROWS_PER_SEARCH", 16)
    lengths = [(2, 3) if row % 9 == 0 else (1, 2) for row in range(37)]
    assert_matches(paged_case(lengths, num_heads=1, num_kv_heads=1), device)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {}), (torch.bfloat16, {"window": 40}), (torch.float32, {"sinks": SINKS})],
    ids=str,
)
def test_a_deterministic_token_has_the_same_bits_alone_in_a_chunk_and_in_company(dtype, options, device):
    options = {name: value.to(device) if name == "sinks" else value for name, value in options.items()}
    case = moved(paged_case([(100, 100), (1, 140)], dtype=dtype), device)
    together = attend(case, num_splits=1, **options)
    for first, end in ((0, 30), (30, 31), (31, 90), (64, 65), (99, 100)):
        part = replace(
            case,
            query=case.query[first:end],
            batch=AttentionBatch.of(case.batch.block_tables[:1], [end - first], [end], 4),
        )
        assert torch.equal(attend(part, num_splits=1, **options), together[first:end])
    alone = replace(
        case, query=case.query[100:], batch=AttentionBatch.of(case.batch.block_tables[1:], [1], [140], 4)
    )
    assert torch.equal(attend(alone, num_splits=1, **options), together[100:])


@pytest.mark.filterwarnings("ignore:All-NaN")
@pytest.mark.parametrize("num_splits", [None, 1, 4])
def test_a_row_with_nan_reaches_no_other(num_splits, device):
    case = moved(paged_case(DECODE), device)
    clean = attend(case, num_splits=num_splits)
    poisoned = int(case.batch.block_tables[2, 0])
    case.key_cache[poisoned] = float("nan")
    case.value_cache[poisoned] = float("nan")
    output = attend(case, num_splits=num_splits)
    assert output[2].isnan().all()
    assert torch.equal(output[[0, 1, 3]], clean[[0, 1, 3]])


def test_an_empty_step_gives_an_empty_output(device):
    case = moved(paged_case([(1, 1)]), device)
    case.batch = AttentionBatch.of(case.batch.block_tables[:0], [], [], 4)
    case.query = case.query[:0]
    assert attend(case).shape == (0, 4, 8)


@pytest.mark.parametrize(
    ("num_programs", "num_keys", "num_splits"),
    [(1, 100_000, 64), (8, 100_000, 32), (8, 8_192, 16), (8, 1_023, 1), (132, 100_000, 2), (264, 100_000, 1)],
    ids=str,
)
def test_keys_are_shared_out_until_every_processor_has_some(num_programs, num_keys, num_splits):
    assert choose_num_splits(num_programs, num_keys, num_processors=132) == num_splits


def test_what_does_not_fit_together_is_refused(device):
    case = moved(paged_case([(1, 1)]), device)
    with pytest.raises(ValueError, match="3 heads of 8 cannot read"):
        attend(replace(case, query=case.query[:, :3]))
    with pytest.raises(ValueError, match="the value cache"):
        attend(replace(case, value_cache=case.value_cache[:1]))
    with pytest.raises(ValueError, match="the caches of"):
        attend(replace(case, query=case.query.half()))
    with pytest.raises(ValueError, match="must be contiguous"):
        attend(replace(case, key_cache=case.key_cache[..., :4], query=case.query[..., :4]))
    with pytest.raises(ValueError, match="3 splits"):
        attend(case, num_splits=3)
