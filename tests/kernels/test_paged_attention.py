"""paged_attention against its one-token-at-a-time twin."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.fakes import PagedCase, paged_case
from tests.kernels.naive import naive_attention
from triptych_kernels import AttentionBatch
from triptych_kernels.reference.paged_attention import paged_attention

DECODE = [(1, 1), (1, 5), (1, 64), (1, 65), (1, 129), (1, 200)]
PREFILL = [(7, 7), (3, 63), (2, 2), (63, 129)]
MIXED = [(1, 9), (5, 5), (1, 70), (4, 33), (1, 1), (2, 130)]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def assert_matches(case: PagedCase, **options: object) -> None:
    output = paged_attention(
        case.query, case.key_cache, case.value_cache, case.batch, scale=case.scale, **options
    )
    expected = naive_attention(
        case.query, case.key_cache, case.value_cache, case.batch, case.scale, **options
    )
    assert output.dtype == case.query.dtype
    torch.testing.assert_close(
        output.double(), expected, rtol=0.0, atol=TOLERANCE[case.query.dtype], check_dtype=False
    )


@pytest.mark.parametrize("lengths", [DECODE, PREFILL, MIXED, [(1, 1)], [(3, 3)]], ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_every_mix_of_rows_matches_the_twin(lengths, dtype):
    assert_matches(paged_case(lengths, dtype=dtype))


@pytest.mark.parametrize("window", [1, 4, 10, 64, 500])
@pytest.mark.parametrize("lengths", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
def test_a_window_hides_older_tokens(lengths, window):
    assert_matches(paged_case(lengths), window=window)


@pytest.mark.parametrize("chunk", [4, 12, 64, 500])
@pytest.mark.parametrize("lengths", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
def test_a_local_chunk_hides_the_tokens_before_it(lengths, chunk):
    case = paged_case(lengths)
    batch = case.batch.in_local_chunks(chunk)
    assert batch is case.batch.in_local_chunks(chunk), "layers share it"
    output = paged_attention(case.query, case.key_cache, case.value_cache, batch, scale=case.scale)
    expected = naive_attention(
        case.query, case.key_cache, case.value_cache, case.batch, case.scale, chunk=chunk
    )
    torch.testing.assert_close(output.double(), expected, rtol=0.0, atol=2e-6)


def test_local_chunks_are_whole_blocks():
    with pytest.raises(ValueError, match="chunks of 6 tokens are no whole blocks of 4"):
        paged_case([(1, 9)]).batch.in_local_chunks(6)


@pytest.mark.parametrize(
    "options", [{"soft_cap": 0.7}, {"sinks": torch.tensor([0.5, -2.0, 3.0, 0.0])}], ids=["cap", "sinks"]
)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("lengths", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
def test_soft_cap_and_sinks(lengths, window, options):
    assert_matches(paged_case(lengths), window=window, **options)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 2), (5, 1)], ids=str)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_shapes(heads, block_size):
    num_heads, num_kv_heads = heads
    assert_matches(
        paged_case(
            MIXED,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            key_dim=5,
            value_dim=7,
            block_size=block_size,
        )
    )


def test_a_chunk_longer_than_a_tile():
    assert_matches(paged_case([(300, 310), (1, 40)], num_heads=1, num_kv_heads=1))
    assert_matches(paged_case([(520, 520)], num_heads=1, num_kv_heads=1), window=100)


def test_query_with_strides_of_a_transposed_projection():
    case = paged_case(MIXED)
    case.query = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert_matches(case)


def test_an_empty_step_gives_an_empty_output():
    case = paged_case([(1, 1)])
    empty = AttentionBatch.of(case.batch.block_tables[:0], [], [], 4)
    output = paged_attention(case.query[:0], case.key_cache, case.value_cache, empty, scale=1.0)
    assert output.shape == (0, 4, 8)


def test_a_decode_row_is_bitwise_the_same_alone_and_in_company():
    for dtype in TOLERANCE:
        case = paged_case(DECODE, dtype=dtype)
        together = paged_attention(case.query, case.key_cache, case.value_cache, case.batch, scale=case.scale)
        for row in range(len(DECODE)):
            alone = AttentionBatch.of(
                case.batch.block_tables[row : row + 1],
                case.batch.query_lengths[row : row + 1].tolist(),
                case.batch.total_lengths[row : row + 1].tolist(),
                case.batch.block_size,
            )
            output = paged_attention(
                case.query[row : row + 1], case.key_cache, case.value_cache, alone, scale=case.scale
            )
            assert torch.equal(output[0], together[row])


def test_a_row_with_nan_reaches_no_other():
    case = paged_case(DECODE)
    clean = paged_attention(case.query, case.key_cache, case.value_cache, case.batch, scale=case.scale)
    poisoned = int(case.batch.block_tables[3, 0])
    case.key_cache[poisoned] = float("nan")
    case.value_cache[poisoned] = float("nan")
    output = paged_attention(case.query, case.key_cache, case.value_cache, case.batch, scale=case.scale)
    assert output[3].isnan().all()
    assert torch.equal(output[[0, 1, 2, 4, 5]], clean[[0, 1, 2, 4, 5]])
