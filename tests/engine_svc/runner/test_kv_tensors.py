"""How large the KV cache becomes, and the tensors it is made of."""

from __future__ import annotations

import logging

import psutil
import pytest
import torch

from engine_svc.model.facts import KVShape, ModelFacts
from engine_svc.runner.kv_tensors import KVCapacityError, KVTensors, size_kv_cache


def facts_of(*shapes: KVShape, dtype: str = "bfloat16") -> ModelFacts:
    return ModelFacts(
        architecture="TestForCausalLM",
        kv_shapes=shapes or (KVShape(2, 8, 8),) * 3,
        vocab_size=100,
        max_position=4096,
        eos_token_ids=(),
        dtype=dtype,
        num_parameters=0,
        weights_digest="",
    )


# 3 layers of 2 heads with 8 + 8 values, 16 tokens a block, 2 bytes each.
BYTES_PER_BLOCK = 3 * 2 * 16 * 16 * 2


def size(facts: ModelFacts | None = None, **wishes: int):
    defaults = {"block_size": 16, "max_model_len": 64, "max_num_seqs": 10}
    return size_kv_cache(facts or facts_of(), **{**defaults, **wishes})


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
    large = facts_of(*(KVShape(8, 128, 128),) * 32)
    sizing = size(large, max_num_seqs=1 << 20, max_model_len=4096)
    assert 0.2 < sizing.total_bytes / psutil.virtual_memory().available < 0.3


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
    size(num_kv_blocks=1000)
    assert caplog.text == ""
    size(num_kv_blocks=1 << 30)
    assert "larger than free memory" in caplog.text


def test_memory_for_not_even_one_block_is_refused_without_advice_that_cannot_help():
    with pytest.raises(KVCapacityError) as caught:
        size(kv_cache_memory=100)
    assert "of 100 bytes holds 0; give the cache" in str(caught.value)


def test_a_cache_that_no_machine_can_hold_is_refused_in_words():
    facts = facts_of(*(KVShape(8, 128, 128),) * 32)
    with pytest.raises(KVCapacityError, match="MiB of the KV cache cannot be allocated"):
        KVTensors(facts, size(facts, num_kv_blocks=1 << 30))


def test_every_layer_has_caches_of_its_shape():
    facts = facts_of(KVShape(2, 8, 4), KVShape(1, 8, 8), KVShape(2, 8, 4))
    kv = KVTensors(facts, size(facts, num_kv_blocks=5))
    assert [tuple(cache.shape) for cache in kv.key_caches] == [(2, 5, 16, 8), (1, 5, 16, 8), (2, 5, 16, 8)]
    assert [tuple(cache.shape) for cache in kv.value_caches] == [(2, 5, 16, 4), (1, 5, 16, 8), (2, 5, 16, 4)]
    assert all(cache.is_contiguous() for cache in kv.key_caches + kv.value_caches)
    assert {cache.dtype for cache in kv.key_caches} == {torch.bfloat16}


def test_memory_is_taken_by_use_and_not_by_size():
    facts = facts_of(KVShape(2, 64, 64), KVShape(2, 64, 64))
    before = psutil.Process().memory_info().rss
    kv = KVTensors(facts, size(facts, num_kv_blocks=1 << 15))
    assert kv.sizing.total_bytes == 1 << 29
    assert psutil.Process().memory_info().rss - before < 1 << 26


def test_clearing_zeroes_the_blocks_in_every_layer_and_no_other():
    facts = facts_of(KVShape(2, 8, 4), KVShape(1, 8, 8), KVShape(2, 8, 4))
    kv = KVTensors(facts, size(facts, num_kv_blocks=5))
    for cache in kv.key_caches + kv.value_caches:
        cache.fill_(float("nan"))
    kv.clear([4, 1])
    for cache in kv.key_caches + kv.value_caches:
        assert not cache[:, [1, 4]].any()
        assert cache[:, [0, 2, 3]].isnan().all()


def test_63_eight_gib_hold_one_request_of_16384_tokens_and_not_a_byte_less():
    # 32 layers of 32 heads of 128, fp16: 8 MiB a block of 16 tokens.
    large = facts_of(*(KVShape(32, 128, 128),) * 32, dtype="float16")
    wishes = {"max_model_len": 16_384, "max_num_seqs": 8}
    assert size(large, kv_cache_memory=8 << 30, **wishes).num_blocks == 1024
    with pytest.raises(KVCapacityError):
        size(large, kv_cache_memory=(8 << 30) - 1, **wishes)
    # One and a half requests of full length.
    assert size(large, kv_cache_memory=12 << 30, **wishes).num_blocks == 1536
