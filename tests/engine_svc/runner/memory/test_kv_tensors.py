"""The tensors of the KV cache, and which of them each layer has."""

from __future__ import annotations

import psutil
import pytest
import torch

from engine_svc.model.facts import KVShape, ModelFacts
from engine_svc.runner.memory.kv_tensors import (
    KVCapacityError,
    KVSizing,
    KVTensors,
    bytes_per_block,
    place_layers,
)


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
    counts, places = place_layers(
        (KVShape(4, 8, 8), KVShape(2, 8, 8, window=5), KVShape(2, 8, 8, window=5)),
        facts_of(KVShape(4, 8, 8), KVShape(2, 8, 8, window=5), KVShape(2, 8, 8, window=5)).groups,
    )
    assert counts == {KVShape(4, 8, 8): 1, KVShape(2, 8, 8): 1}
    assert places == [0, 0, 0]


def test_a_few_layers_more_of_a_kind_make_no_group_of_their_own():
    facts = facts_of(*(KVShape(1, 8, 8),) * 5, *(KVShape(1, 8, 8, window=4),) * 6)
    assert [len(group.layers) for group in facts.groups] == [5, 6]
