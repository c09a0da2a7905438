"""The pool: what is handed out, in which order it comes back, and what can still be found."""

from __future__ import annotations

import pytest

from engine_svc.cache.block_pool import BlockPool


def test_the_placeholder_is_never_handed_out():
    pool = BlockPool(5)
    assert pool.num_usable_blocks == 4
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert pool.num_free_blocks == 0


def test_more_than_is_free_is_refused_and_nothing_changes():
    pool = BlockPool(3)
    with pytest.raises(ValueError, match="3 blocks wanted, 2 are free"):
        pool.allocate(3)
    assert pool.free_block_ids == [1, 2]


def test_a_pool_needs_a_block_to_hand_out():
    with pytest.raises(ValueError, match="the pool has 1 blocks"):
        BlockPool(1)


def test_a_held_block_comes_back_only_with_its_last_holder():
    pool = BlockPool(3)
    [block_id] = pool.allocate(1)
    pool.hold([block_id])
    pool.release([block_id])
    assert block_id not in pool.free_block_ids
    pool.release([block_id])
    assert block_id in pool.free_block_ids


def test_blocks_without_content_are_reused_before_those_with():
    pool = BlockPool(6)
    pool.allocate(4)
    pool.register([1, 2], [b"one", b"two"])
    pool.release([4, 3, 2, 1])
    assert pool.free_block_ids == [4, 3, 5, 2, 1]


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
    assert pool.key_of(1) is None


def test_of_twins_the_oldest_is_found_and_any_may_go():
    pool = BlockPool(4)
    pool.allocate(3)
    pool.register([1, 2, 3], [b"same", b"same", b"same"])
    assert pool.find(b"same") == 1
    pool.release([1])
    pool.allocate(1)
    assert pool.find(b"same") == 2
    pool.release([3])
    pool.allocate(1)
    assert pool.find(b"same") == 2
    pool.release([2])
    pool.allocate(1)
    assert pool.find(b"same") is None
    assert pool.num_cached_keys == 0


def test_an_unknown_hash_is_not_found():
    assert BlockPool(2).find(b"never") is None


def test_reset_waits_for_all_blocks():
    pool = BlockPool(3)
    pool.allocate(2)
    pool.register([1, 2], [b"same", b"same"])
    pool.release([1])
    assert not pool.reset()
    assert pool.find(b"same") == 1
    pool.release([2])
    assert pool.reset()
    assert pool.num_cached_keys == 0
    assert pool.key_of(1) is None
    assert pool.key_of(2) is None
