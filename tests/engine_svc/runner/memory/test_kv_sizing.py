"""How large the KV cache becomes, and how long a request may then be."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch

from engine_svc.model.facts import KVShape, ModelFacts, StateShape
from engine_svc.runner.memory.free_memory import free_host_memory
from engine_svc.runner.memory.kv_sizing import (
    FreeMemory,
    KVCacheOptions,
    fit_max_model_len,
    size_kv_cache,
    size_states,
    warn_if_cut,
    without_states,
)
from engine_svc.runner.memory.kv_tensors import (
    KVCapacityError,
    KVSizing,
    KVTensors,
    assign_layers,
    bytes_per_block,
)

# 3 layers of 2 heads with 8 + 8 values, 16 tokens a block, 2 bytes each.
BYTES_PER_BLOCK = 3 * 2 * 16 * 16 * 2
FREE = FreeMemory(1 << 20, "25% of 4 MiB free memory")


def options_of(**options: int) -> KVCacheOptions:
    return KVCacheOptions(**{"block_size": 16, "max_num_seqs": 10, "max_num_batched_tokens": 32, **options})


def size(
    facts: ModelFacts | None = None, *, max_model_len: int = 64, free: FreeMemory = FREE, **options: int
) -> KVSizing:
    return size_kv_cache(facts or facts_of(), options_of(**options), max_model_len=max_model_len, free=free)


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


def test_a_stated_size_that_is_cut_is_a_warning_with_both_sizes(caplog):
    caplog.set_level(logging.WARNING)
    sizing = size(kv_cache_memory=40 * BYTES_PER_BLOCK)
    warn_if_cut(2 * 41 * BYTES_PER_BLOCK - 1, [sizing, sizing])
    assert caplog.text == ""
    sizing = size(kv_cache_memory=1 << 40, free=FreeMemory(1 << 41, "all"))
    warn_if_cut(2 << 40, [sizing, sizing])
    [record] = caplog.records
    assert record.message.startswith("kv_cache_memory is cut to what max_num_seqs requests")
    assert (record.asked_mib, record.used_mib) == (2 << 20, 2 * 40 * BYTES_PER_BLOCK >> 20)


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
    options = {"max_model_len": 16_384, "max_num_seqs": 8}
    assert size(large, kv_cache_memory=8 << 30, **options).num_blocks == 1024
    with pytest.raises(KVCapacityError):
        size(large, kv_cache_memory=(8 << 30) - 1, **options)
    # One and a half requests of full length.
    assert size(large, kv_cache_memory=12 << 30, **options).num_blocks == 1536


def test_the_longest_sequence_is_fitted_to_the_memory_with_a_warning_that_names_the_numbers(caplog):
    caplog.set_level(logging.WARNING)
    assert fit_max_model_len(facts_of(), options_of(num_kv_blocks=10), FREE) == 160
    assert "max_model_len is 160 instead of the model's 4096: num_kv_blocks is 10" in caplog.text
    caplog.clear()
    assert fit_max_model_len(facts_of(), options_of(num_kv_blocks=256), FREE) == 4096
    assert caplog.text == ""
    with pytest.raises(KVCapacityError, match="hold 0 blocks, too few for any request"):
        fit_max_model_len(facts_of(), options_of(), FreeMemory(100, "25% of 0 MiB free memory"))


def test_a_window_needs_no_more_blocks_than_it_and_the_step_cover():
    windowed = facts_of(*(KVShape(2, 8, 8, window=20),) * 3)
    # 19 tokens of the window and 32 in flight, which need not begin with a block.
    assert size(windowed, max_model_len=4096, num_kv_blocks=5).num_blocks == 5
    with pytest.raises(KVCapacityError, match="needs 5 blocks"):
        size(windowed, max_model_len=4096, num_kv_blocks=4)
    mixed = facts_of(KVShape(2, 8, 8), KVShape(2, 8, 8, window=20))
    with pytest.raises(KVCapacityError, match="needs 261 blocks"):
        size(mixed, max_model_len=4096, num_kv_blocks=260)


def test_a_chunk_of_attention_needs_no_more_blocks_than_it_and_the_step_cover():
    chunked = facts_of(*(KVShape(2, 8, 8, chunk=48),) * 3)
    assert size(chunked, max_model_len=4096, num_kv_blocks=5).num_blocks == 5
    with pytest.raises(KVCapacityError, match="needs 5 blocks"):
        size(chunked, max_model_len=4096, num_kv_blocks=4)
    assert size(chunked, max_model_len=64, num_kv_blocks=4).num_blocks == 4


def test_chunks_of_attention_that_are_no_whole_blocks_are_refused():
    with pytest.raises(ValueError, match="block_size is 32, it must divide 48"):
        size(facts_of(KVShape(2, 8, 8), KVShape(2, 8, 8, chunk=48)), block_size=32)


def test_a_container_that_has_less_left_than_the_machine_is_heeded(tmp_path):
    (tmp_path / "memory.max").write_text("1073741824\n")
    (tmp_path / "memory.current").write_text("536870912\n")
    free = free_host_memory(tmp_path)
    assert free.num_bytes == (512 << 20) // 4
    assert free.how == "25% of 512 MiB that the container has left"
    # What files occupy is freed on demand.
    (tmp_path / "memory.stat").write_text("anon 7\ninactive_file 268435456\nactive_file 0\n")
    assert free_host_memory(tmp_path).num_bytes == (768 << 20) // 4
    (tmp_path / "memory.max").write_text("max\n")
    assert "free memory" in free_host_memory(tmp_path).how
    assert "free memory" in free_host_memory(tmp_path / "none").how


# The tensors of the KV cache, and which of them each layer has.


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


def test_a_cache_that_no_machine_can_hold_is_refused_in_words():
    facts = facts_of(*(KVShape(8, 128, 128),) * 32)
    with pytest.raises(KVCapacityError, match="MiB of the KV cache cannot be allocated"):
        KVTensors(facts, KVSizing(1 << 30, 16, 0))


def test_every_layer_has_caches_of_its_shape():
    facts = facts_of(KVShape(2, 8, 4), KVShape(1, 8, 8), KVShape(2, 8, 4))
    kv = KVTensors(facts, KVSizing(5, 16, 0))
    assert [tuple(layer.key_cache.shape) for layer in kv.layers] == [
        (5, 2, 16, 8),
        (5, 1, 16, 8),
        (5, 2, 16, 8),
    ]
    assert [tuple(layer.value_cache.shape) for layer in kv.layers] == [
        (5, 2, 16, 4),
        (5, 1, 16, 8),
        (5, 2, 16, 4),
    ]
    assert all(layer.key_cache.is_contiguous() and layer.value_cache.is_contiguous() for layer in kv.layers)
    assert {layer.key_cache.dtype for layer in kv.layers} == {torch.bfloat16}


def test_memory_is_taken_by_use_and_not_by_size():
    facts = facts_of(KVShape(2, 64, 64), KVShape(2, 64, 64))
    before = psutil.Process().memory_info().rss
    kv = KVTensors(facts, KVSizing(1 << 15, 16, 1 << 14))
    assert kv.sizing.total_bytes == 1 << 29
    assert psutil.Process().memory_info().rss - before < 1 << 26


def test_clearing_zeroes_the_blocks_in_every_layer_and_no_other():
    facts = facts_of(KVShape(2, 8, 4), KVShape(1, 8, 8), KVShape(2, 8, 4))
    kv = KVTensors(facts, KVSizing(5, 16, 0))
    for stack in kv.stacks:
        stack.fill_(float("nan"))
    kv.clear([4, 1])
    for cache in [cache for layer in kv.layers for cache in (layer.key_cache, layer.value_cache)]:
        assert not cache[[1, 4]].any()
        assert cache[[0, 2, 3]].isnan().all()


def test_layers_of_one_group_have_memory_of_their_own_and_those_of_different_groups_share_it():
    wide, narrow = KVShape(2, 8, 8), KVShape(2, 8, 8, window=6)
    facts = facts_of(narrow, narrow, wide, narrow, narrow, wide)
    assert [(group.window, group.layers) for group in facts.groups] == [
        (None, (2, 5)),
        (6, (0, 1)),
        (6, (3, 4)),
    ]
    kv = KVTensors(facts, KVSizing(5, 16, 0))
    assert [layer.group for layer in kv.layers] == [1, 1, 0, 2, 2, 0]
    starts = [layer.key_cache.data_ptr() for layer in kv.layers]
    assert starts[0] == starts[2] == starts[3]
    assert starts[1] == starts[4] == starts[5]
    assert starts[0] != starts[1]
    assert bytes_per_block(facts, 16) == 2 * 2 * 16 * 16 * 2


def test_shapes_that_differ_never_share_memory():
    counts, places = assign_layers(
        (KVShape(4, 8, 8), KVShape(2, 8, 8, window=5), KVShape(2, 8, 8, chunk=8)),
        facts_of(KVShape(4, 8, 8), KVShape(2, 8, 8, window=5), KVShape(2, 8, 8, chunk=8)).groups,
    )
    assert counts == {KVShape(4, 8, 8): 1, KVShape(2, 8, 8): 1}
    assert places == [0, 0, 0]


def test_a_few_layers_more_of_a_kind_make_no_group_of_their_own():
    facts = facts_of(*(KVShape(1, 8, 8),) * 5, *(KVShape(1, 8, 8, window=4),) * 6)
    assert [len(group.layers) for group in facts.groups] == [5, 6]


def test_a_model_without_kv_has_one_block_without_memory():
    facts = replace(facts_of(), kv_shapes=())
    assert fit_max_model_len(facts, options_of(), FreeMemory(0, "nothing")) == facts.max_position
    sizing = size(facts, free=FreeMemory(0, "nothing"))
    assert (sizing.num_blocks, sizing.total_bytes) == (1, 0)
    assert KVTensors(facts, sizing).layers == []


# 2 layers, each with 6 + 8 values of 4 bytes.
STATES = (StateShape(((2, 3), (8,))), StateShape(((2, 3), (8,))))
BYTES_PER_STATE = 2 * 14 * 4


def slots(free: int = 1 << 20, **options: Any) -> int:
    facts = replace(facts_of(), state_shapes=STATES)
    return size_states(facts, options_of(**options), FreeMemory(free, "25% of 4 MiB free memory"))


def test_a_model_without_states_has_no_slots_for_them():
    assert size_states(facts_of(), options_of(state_cache_memory=1), FREE) == 0
    assert without_states(facts_of(), FREE, 0) is FREE


def test_slots_of_states_are_those_of_rows_and_a_share_of_free_memory():
    assert slots(100 * BYTES_PER_STATE) == 11 + 25
    assert slots(100 * BYTES_PER_STATE, keeps_states=False) == 11
    # Not more than 16 for each row, and not more than there is memory for.
    assert slots(1 << 30) == 11 + 160
    assert slots(12 * BYTES_PER_STATE) == 12


def test_configured_memory_for_states_is_turned_into_whole_slots():
    assert slots(state_cache_memory=40 * BYTES_PER_STATE + 5) == 40


def test_memory_that_does_not_hold_the_states_of_all_rows_is_refused_with_the_numbers():
    needs = "max_num_seqs of 10 needs 11 states of 112 bytes, 1232 bytes, but"
    with pytest.raises(KVCapacityError, match=f"{needs} state_cache_memory of 1231 bytes holds 10 states"):
        slots(state_cache_memory=1231)
    with pytest.raises(KVCapacityError, match=f"{needs} 25% of 4 MiB free memory hold 10 states; lower"):
        slots(1231)


def test_blocks_have_the_memory_beside_the_states():
    facts = replace(facts_of(), state_shapes=STATES)
    left = without_states(facts, FREE, 1000)
    assert (left.num_bytes, left.how) == (
        FREE.num_bytes - 1000 * BYTES_PER_STATE,
        "25% of 4 MiB free memory, less 0 MiB for states,",
    )


def test_states_are_tensors_of_slots_and_a_part_of_all_memory():
    facts = replace(facts_of(), state_shapes=STATES)
    kv = KVTensors(facts, KVSizing(5, 16, 0, num_state_slots=7))
    shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in kv.states.layers]
    assert shapes == [[(7, 2, 3), (7, 8)]] * 2
    assert {tensor.dtype for tensor in kv.states.stacks} == {torch.float32}
    assert len(kv.stacks) == len(KVTensors(facts_of(), KVSizing(5, 16, 0)).stacks) + 4
    # Clearing blocks leaves states alone.
    kv.states.layers[0][1].fill_(3.0)
    kv.clear([1])
    assert kv.states.layers[0][1][1, 0] == 3.0
