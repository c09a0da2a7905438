"""The two tables of Triton ops: what the deterministic one promises, and what both give."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from tests.kernels.fakes import PagedCase, paged_case
from tests.kernels.state_cases import StateCase, state_case
from tests.kernels.triton.fresh_memory import with_nan_memory
from triptych_kernels import REFERENCE, AttentionBatch, Ops, StateBatch
from triptych_kernels.triton import triton_ops


def attended(ops: Ops, case: PagedCase, device: torch.device, **options: object) -> torch.Tensor:
    """[T, H, E] of the case, computed on the device."""
    batch = case.batch
    moved = AttentionBatch(
        block_tables=batch.block_tables.to(device),
        query_starts=batch.query_starts.to(device),
        total_lengths=batch.total_lengths.to(device),
        block_size=batch.block_size,
        max_query_length=batch.max_query_length,
        max_total_length=batch.max_total_length,
    )
    caches = case.key_cache.to(device), case.value_cache.to(device)
    return ops.paged_attention(case.query.to(device), *caches, moved, scale=case.scale, **options).cpu()


def rows_of(case: PagedCase, row: int, first: int, end: int) -> PagedCase:
    """The case with tokens first to end - 1 of one row alone."""
    batch = case.batch
    tokens = slice(int(batch.query_starts[row]) + first, int(batch.query_starts[row]) + end)
    start = int(batch.total_lengths[row]) - int(batch.query_lengths[row])
    alone = AttentionBatch.of(
        batch.block_tables[row : row + 1], [end - first], [start + end], batch.block_size
    )
    return dataclasses.replace(case, query=case.query[tokens], batch=alone)


def test_the_tables_have_titles():
    fast, fixed = triton_ops(), triton_ops(deterministic=True)
    assert not fast.is_batch_invariant
    assert fixed.is_batch_invariant
    assert fast.name != fixed.name


@pytest.mark.parametrize("is_deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("num_rows", [1, 17, 40])
def test_every_row_of_a_decode_is_computed_however_many_there_are(num_rows, is_deterministic, device):
    case = paged_case([(1, 5 + row) for row in range(num_rows)])
    output = attended(triton_ops(deterministic=is_deterministic), case, device)
    expected = attended(REFERENCE, case, torch.device("cpu"))
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [None, 9])
def test_a_deterministic_token_has_the_same_bits_in_every_chunk_and_batch(window, device):
    ops = triton_ops(deterministic=True)
    case = paged_case([(1, 40), (70, 90), (1, 3), (12, 12)])
    together = attended(ops, case, device, window=window)
    for first, end in ((0, 70), (0, 1), (33, 34), (16, 69), (5, 40)):
        alone = attended(ops, rows_of(case, 1, first, end), device, window=window)
        assert torch.equal(alone, together[1 + first : 1 + end])


def advanced(ops: Ops, case: StateCase, borders: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Output and last state of one row, computed in steps that end at these borders."""
    states = torch.full((2, *case.state_shape), float("nan"), device=device)
    parts = []
    for start, end in itertools.pairwise([0, *borders]):
        batch = StateBatch.of([end - start], [end], [1 if start else -1], [1], device=device)
        parts.append(case.part(slice(start, end)).run(ops, states, batch))
    return torch.cat(parts), states[1]


STATE_OPS = [("causal_conv", (37, 4)), ("ssd_scan", (1, 1, 16, 8)), ("gated_delta_rule", (1, 1, 16, 8))]


@pytest.mark.parametrize(("op", "shape"), STATE_OPS, ids=str)
def test_a_deterministic_row_has_the_same_bits_and_state_in_every_chunk(op, shape, device):
    ops, case = triton_ops(deterministic=True), state_case(op, shape, 40, device=device)
    whole = advanced(ops, case, [40], device)
    for borders in ([1, 2, 40], [33, 39, 40]):
        parts = advanced(ops, case, borders, device)
        assert torch.equal(parts[0], whole[0])
        assert torch.equal(parts[1], whole[1])


@pytest.mark.parametrize(("op", "shape"), STATE_OPS, ids=str)
def test_a_prompt_has_the_same_bits_in_chunks_that_end_at_multiples_of_64(op, shape, device):
    ops, case = triton_ops(), state_case(op, shape, 150, device=device)
    whole = advanced(ops, case, [150], device)
    for borders in ([128, 150], [64, 128, 150]):
        parts = advanced(ops, case, borders, device)
        assert torch.equal(parts[0], whole[0])
        assert torch.equal(parts[1], whole[1])


# Fresh memory is as the other tests need it.


def test_fresh_memory_is_nan_within_the_call_alone(device):
    fresh = with_nan_memory(torch.empty, 1000, device=device)
    assert fresh.isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
