"""The free list (behaviour 62): order, O(1) removal, and refusal of what would corrupt it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_svc.cache.block import Block, FreeList
from engine_svc.cache.block_pool import BlockPool, content_key
from engine_svc.cache.kv_cache import HitRate
from tests.engine_svc.core_state import free_block_ids, key_of


def _ids(free: FreeList) -> list[int]:
    return [block.block_id for block in free]


def _list_of(num_blocks: int) -> tuple[list[Block], FreeList]:
    blocks = [Block(block_id) for block_id in range(num_blocks)]
    return blocks, FreeList(blocks)


def test_62_links_are_set_exactly_while_a_block_is_free():
    blocks, free = _list_of(2)
    assert free.pop_first() is blocks[0]
    assert blocks[0].previous is blocks[0].next is None
    assert blocks[1].previous is not None
    assert blocks[1].next is not None


def test_62_taking_from_an_empty_list_raises():
    _, free = _list_of(1)
    free.pop_first()
    with pytest.raises(IndexError, match="No free blocks available"):
        free.pop_first()


def test_62_removing_a_block_that_is_not_free_raises():
    blocks, free = _list_of(2)
    free.remove(blocks[0])
    with pytest.raises(ValueError, match="block 0 is not on the free list"):
        free.remove(blocks[0])


@pytest.mark.parametrize("num_times", [1, 2])
def test_62_a_block_cannot_be_free_twice(num_times: int):
    blocks, free = _list_of(3)
    if num_times == 2:
        free.remove(blocks[1])
    with pytest.raises(ValueError, match="block 1 is already on the free list"):
        free.append([blocks[1]] * num_times)


@settings(max_examples=40, derandomize=True, database=None, deadline=None)
@given(st.data())
def test_62_it_behaves_like_a_list(data: st.DataObject):
    blocks, free = _list_of(8)
    model = list(range(8))
    for _ in range(30):
        outside = [block_id for block_id in range(8) if block_id not in model]
        operation = data.draw(st.sampled_from(["pop", "remove", "append", "prepend"]))
        if operation == "pop" and model:
            assert free.pop_first().block_id == model.pop(0)
        elif operation == "remove" and model:
            block_id = data.draw(st.sampled_from(model))
            free.remove(blocks[block_id])
            model.remove(block_id)
        elif operation in ("append", "prepend") and outside:
            chosen = data.draw(st.lists(st.sampled_from(outside), unique=True))
            added = [blocks[block_id] for block_id in chosen]
            if operation == "append":
                free.append(added)
                model = model + chosen
            else:
                free.prepend(added)
                model = chosen + model
        assert _ids(free) == model
        assert len(free) == len(model)


# The pool: what is handed out, in which order it comes back, and what can still be found.


def test_the_placeholder_is_never_handed_out():
    pool = BlockPool(5)
    assert pool.num_usable_blocks == 4
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert pool.num_free_blocks == 0


def test_more_than_is_free_is_refused_and_nothing_changes():
    pool = BlockPool(3)
    with pytest.raises(ValueError, match="3 blocks wanted, 2 are free"):
        pool.allocate(3)
    assert free_block_ids(pool) == [1, 2]
    assert pool.allocate(0) == []
    assert pool.allocate(2) == [1, 2]


def test_a_pool_needs_a_block_to_hand_out():
    assert free_block_ids(BlockPool(2)) == [1]
    with pytest.raises(ValueError, match="the pool has 1 blocks"):
        BlockPool(1)


def test_a_held_block_comes_back_only_with_its_last_holder():
    pool = BlockPool(3)
    [block_id] = pool.allocate(1)
    assert pool.ref_count(block_id) == 1
    pool.hold([block_id])
    assert pool.ref_count(block_id) == 2
    pool.release([block_id])
    assert free_block_ids(pool) == [2]
    pool.release([block_id])
    assert free_block_ids(pool) == [1, 2]
    assert pool.ref_count(block_id) == 0


def test_free_blocks_are_counted_among_others():
    pool = BlockPool(6)
    pool.allocate(3)
    assert pool.count_free([1, 2, 3]) == 0
    assert pool.count_free([2, 4, 5]) == 2
    assert pool.count_free([]) == 0


def test_blocks_without_content_are_reused_before_those_with():
    pool = BlockPool(6)
    pool.allocate(4)
    pool.register([1, 2], [b"one", b"two"])
    pool.release([4, 3, 2, 1])
    assert free_block_ids(pool) == [4, 3, 5, 2, 1]


def test_holding_a_free_block_keeps_it_from_reuse():
    pool = BlockPool(3)
    pool.allocate(2)
    pool.register([1, 2], [b"one", b"two"])
    pool.release([2, 1])
    pool.hold([2])
    assert pool.allocate(1) == [1]
    assert pool.find(b"two") == 2


def test_reuse_forgets_the_content():
    pool = BlockPool(2)
    pool.allocate(1)
    pool.register([1], [b"one"])
    pool.release([1])
    assert pool.find(b"one") == 1
    pool.allocate(1)
    assert pool.find(b"one") is None
    assert key_of(pool, 1) is None


def _twins() -> BlockPool:
    pool = BlockPool(4)
    pool.allocate(3)
    pool.register([1, 2, 3], [b"same", b"same", b"same"])
    return pool


def test_52_evicting_one_of_two_twins_leaves_the_other_findable_and_evicting_both_leaves_nothing():
    pool = BlockPool(3)
    pool.allocate(2)
    pool.register([1, 2], [b"same", b"same"])
    assert (pool.find(b"same"), pool.num_cached_keys) == (1, 1)
    pool.release([1])
    pool.allocate(1)
    assert (pool.find(b"same"), pool.num_cached_keys) == (2, 1)
    assert (key_of(pool, 1), key_of(pool, 2)) == (None, b"same")
    pool.release([2])
    pool.allocate(1)
    assert (pool.find(b"same"), pool.num_cached_keys) == (None, 0)
    # Nothing is left behind of them: the next with this content is the only one.
    pool.register([1], [b"same"])
    pool.release([1])
    pool.allocate(1)
    assert (pool.find(b"same"), pool.num_cached_keys) == (None, 0)


@pytest.mark.parametrize(
    ("order", "found"),
    [
        ((1, 2, 3), (2, 3, None)),
        ((1, 3, 2), (2, 2, None)),
        ((2, 1, 3), (1, 3, None)),
        ((2, 3, 1), (1, 1, None)),
        ((3, 1, 2), (1, 2, None)),
        ((3, 2, 1), (1, 1, None)),
    ],
)
def test_52_of_twins_the_oldest_is_found_whichever_goes(order, found):
    pool = _twins()
    for block_id, expected in zip(order, found, strict=True):
        assert pool.num_cached_keys == 1
        pool.release([block_id])
        assert pool.allocate(1) == [block_id]
        assert pool.find(b"same") == expected
    assert pool.num_cached_keys == 0


def test_content_can_be_forgotten_where_it_is():
    pool = BlockPool(6)
    pool.allocate(4)
    pool.register([1, 2, 3], [b"one", b"same", b"same"])
    pool.release([1, 2])
    # The third is held, the fourth and the placeholder cannot be found anyway.
    pool.forget([1, 2, 3, 4, 0])
    assert (pool.find(b"one"), pool.find(b"same"), pool.num_cached_keys) == (None, 3, 1)
    assert [pool.ref_count(block_id) for block_id in (1, 2, 3, 4)] == [0, 0, 1, 1]
    assert free_block_ids(pool) == [5, 1, 2]


def test_the_same_content_is_found_apart_in_each_group():
    block_hash = bytes(32)
    keys = [content_key(block_hash, group) for group in range(3)]
    assert keys == [block_hash, block_hash + b"\x01", block_hash + b"\x02"]
    pool = BlockPool(4)
    pool.register(pool.allocate(3), keys)
    assert [pool.find(key) for key in keys] == [1, 2, 3]


def test_52_an_unknown_hash_is_not_found():
    assert BlockPool(2).find(b"never") is None


def test_53_reset_is_refused_while_a_block_is_in_use_and_then_forgets_all():
    pool = BlockPool(4)
    pool.allocate(3)
    pool.register([1, 2, 3], [b"same", b"same", b"other"])
    pool.release([1, 3])
    assert not pool.reset()
    assert (pool.find(b"same"), pool.num_cached_keys) == (1, 2)
    pool.release([2])
    assert pool.reset()
    assert (pool.find(b"same"), pool.num_cached_keys) == (None, 0)
    assert [key_of(pool, block_id) for block_id in (1, 2, 3)] == [None] * 3
    # Nor does it know twins any more.
    pool.register(pool.allocate(1), [b"same"])
    pool.release([1])
    pool.hold([2, 3])
    pool.allocate(1)
    assert pool.find(b"same") is None


# The share of tokens found among what was asked for lately.


def test_68_the_rate_is_that_of_the_last_five_requests():
    rate = HitRate(5)
    assert rate.value == 0.0
    rate.add(1, 20, 9)
    assert rate.value == 0.45
    rate.add(4, 80, 16)
    assert rate.value == 0.25
    # A sixth: the first is forgotten, 18 of 90 are left.
    rate.add(1, 10, 2)
    assert rate.value == 0.2
    rate.reset()
    assert rate.value == 0.0


def test_68_requests_counted_together_are_forgotten_together():
    rate = HitRate(5)
    rate.add(4, 100, 100)
    rate.add(1, 10, 0)
    assert rate.value == 100 / 110
    rate.add(1, 10, 5)
    assert rate.value == 5 / 20
    for _ in range(3):
        rate.add(1, 10, 0)
    assert rate.value == 5 / 50
    rate.add(1, 10, 0)
    assert rate.value == 5 / 50
    rate.add(1, 10, 0)
    assert rate.value == 0.0


def test_68_the_newest_are_never_forgotten():
    rate = HitRate(5)
    rate.add(1, 10, 10)
    rate.add(6, 100, 30)
    assert rate.value == 0.3
    rate.add(1, 50, 50)
    assert rate.value == 1.0


def test_68_several_old_ones_may_have_to_go_at_once():
    rate = HitRate(3)
    for num_hits in (10, 0, 0):
        rate.add(1, 10, num_hits)
    rate.add(2, 10, 5)
    assert rate.value == 5 / 20


def test_68_after_a_reset_it_begins_anew():
    rate = HitRate(2)
    rate.add(2, 10, 10)
    rate.reset()
    rate.add(1, 10, 0)
    rate.add(1, 10, 5)
    assert rate.value == 0.25
    rate.add(1, 10, 5)
    assert rate.value == 0.5


def test_lookups_without_tokens_are_no_lookups():
    rate = HitRate(2)
    rate.add(1, 0, 0)
    assert rate.value == 0.0
    rate.add(1, 4, 1)
    assert rate.value == 0.25


def test_the_last_thousand_count_by_default():
    rate = HitRate()
    rate.add(1, 1, 1)
    for _ in range(999):
        rate.add(1, 1, 0)
    assert rate.value == 0.001
    rate.add(1, 1, 0)
    assert rate.value == 0.0


def test_at_least_one_request_is_remembered():
    one = HitRate(1)
    one.add(1, 2, 1)
    one.add(1, 2, 2)
    assert one.value == 1.0
    with pytest.raises(ValueError, match="max_requests is 0, must be at least 1"):
        HitRate(0)
