"""How large the KV cache becomes, and how long a request may then be."""

from __future__ import annotations

import logging

import psutil
import pytest

from engine_svc.model.facts import KVShape, ModelFacts
from engine_svc.runner.memory.free_memory import free_host_memory
from engine_svc.runner.memory.kv_sizing import FreeMemory, KVWishes, fit_max_model_len, size_kv_cache
from engine_svc.runner.memory.kv_tensors import KVCapacityError, KVSizing
from tests.engine_svc.runner.memory.test_kv_tensors import facts_of

# 3 layers of 2 heads with 8 + 8 values, 16 tokens a block, 2 bytes each.
BYTES_PER_BLOCK = 3 * 2 * 16 * 16 * 2
FREE = FreeMemory(1 << 20, "25% of 4 MiB free memory")


def wishes_of(**wishes: int) -> KVWishes:
    return KVWishes(**{"block_size": 16, "max_num_seqs": 10, "max_num_batched_tokens": 32, **wishes})


def size(
    facts: ModelFacts | None = None, *, max_model_len: int = 64, free: FreeMemory = FREE, **wishes: int
) -> KVSizing:
    return size_kv_cache(facts or facts_of(), wishes_of(**wishes), max_model_len=max_model_len, free=free)


def test_bytes_of_a_block_are_those_of_all_layers():
    assert size(num_kv_blocks=9).bytes_per_block == BYTES_PER_BLOCK
    assert size(facts_of(dtype="float32"), num_kv_blocks=9).bytes_per_block == 2 * BYTES_PER_BLOCK
    uneven = facts_of(KVShape(4, 16, 8), KVShape(1, 8, 8))
    assert size(uneven, num_kv_blocks=9).bytes_per_block == (4 * 24 + 16) * 16 * 2


def test_memory_is_turned_into_whole_blocks():
    sizing = size(kv_cache_memory=7 * BYTES_PER_BLOCK + 5)
    assert (sizing.num_blocks, sizing.total_bytes) == (7, 7 * BYTES_PER_BLOCK)


def test_a_stated_number_of_blocks_wins_and_is_not_capped():
    assert size(num_kv_blocks=500, kv_cache_memory=1).num_blocks == 500


def test_more_than_all_requests_can_use_is_never_taken():
    assert size(kv_cache_memory=1 << 40).num_blocks == 10 * 4
    assert size().num_blocks == 10 * 4


def test_by_default_a_quarter_of_free_memory_is_taken():
    free = free_host_memory()
    assert 0.2 < free.num_bytes / psutil.virtual_memory().available < 0.3
    large = facts_of(*(KVShape(8, 128, 128),) * 32)
    sizing = size(large, max_num_seqs=1 << 20, max_model_len=4096, free=free)
    assert free.num_bytes - sizing.bytes_per_block < sizing.total_bytes <= free.num_bytes


def test_too_little_memory_for_one_request_is_refused_with_the_numbers():
    with pytest.raises(KVCapacityError) as caught:
        size(kv_cache_memory=3 * BYTES_PER_BLOCK)
    message = str(caught.value)
    assert "max_model_len 64 needs 4 blocks of 16 tokens" in message
    assert "holds 3" in message
    assert "at most 48" in message
    with pytest.raises(KVCapacityError, match="num_kv_blocks is 3"):
        size(num_kv_blocks=3)


def test_a_cache_larger_than_free_memory_is_warned_of(caplog):
    caplog.set_level(logging.WARNING)
    size(num_kv_blocks=100)
    assert caplog.text == ""
    size(num_kv_blocks=1 << 30)
    assert "larger than free memory" in caplog.text


def test_memory_for_not_even_one_block_is_refused_without_advice_that_cannot_help():
    with pytest.raises(KVCapacityError) as caught:
        size(kv_cache_memory=100)
    assert "of 100 bytes holds 0 blocks; give the cache" in str(caught.value)


def test_63_eight_gib_hold_one_request_of_16384_tokens_and_not_a_byte_less():
    # 32 layers of 32 heads of 128, fp16: 8 MiB a block of 16 tokens.
    large = facts_of(*(KVShape(32, 128, 128),) * 32, dtype="float16")
    wishes = {"max_model_len": 16_384, "max_num_seqs": 8}
    assert size(large, kv_cache_memory=8 << 30, **wishes).num_blocks == 1024
    with pytest.raises(KVCapacityError):
        size(large, kv_cache_memory=(8 << 30) - 1, **wishes)
    # One and a half requests of full length.
    assert size(large, kv_cache_memory=12 << 30, **wishes).num_blocks == 1536


def test_the_longest_sequence_is_fitted_to_the_memory_with_a_warning_that_names_the_numbers(caplog):
    caplog.set_level(logging.WARNING)
    assert fit_max_model_len(facts_of(), wishes_of(num_kv_blocks=10), FREE) == 160
    assert "max_model_len is 160 instead of the model's 4096: num_kv_blocks is 10" in caplog.text
    caplog.clear()
    assert fit_max_model_len(facts_of(), wishes_of(num_kv_blocks=256), FREE) == 4096
    assert caplog.text == ""
    with pytest.raises(KVCapacityError, match="hold 0 blocks, too few for any request"):
        fit_max_model_len(facts_of(), wishes_of(), FreeMemory(100, "25% of 0 MiB free memory"))


def test_a_window_needs_no_more_blocks_than_it_and_the_step_cover():
    windowed = facts_of(*(KVShape(2, 8, 8, window=20),) * 3)
    # 19 tokens of the window and 32 in flight, which need not begin with a block.
    assert size(windowed, max_model_len=4096, num_kv_blocks=5).num_blocks == 5
    with pytest.raises(KVCapacityError, match="needs 5 blocks"):
        size(windowed, max_model_len=4096, num_kv_blocks=4)
    mixed = facts_of(KVShape(2, 8, 8), KVShape(2, 8, 8, window=20))
    with pytest.raises(KVCapacityError, match="needs 261 blocks"):
        size(mixed, max_model_len=4096, num_kv_blocks=260)


def test_a_container_that_has_less_left_than_the_machine_is_heeded(tmp_path):
    (tmp_path / "memory.max").write_text("1073741824\n")
    (tmp_path / "memory.current").write_text("536870912\n")
    free = free_host_memory(tmp_path)
    assert free.num_bytes == (512 << 20) // 4
    assert free.how == "25% of 512 MiB that the container has left"
    (tmp_path / "memory.max").write_text("max\n")
    assert "free memory" in free_host_memory(tmp_path).how
    assert "free memory" in free_host_memory(tmp_path / "none").how
