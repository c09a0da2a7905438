"""The pool: what is handed out, in which order it comes back, and what can still be found."""

from __future__ import annotations

import pytest

from engine_svc.cache.block_pool import BlockPool, content_key


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
    assert pool.allocate(0) == []
    assert pool.allocate(2) == [1, 2]


def test_a_pool_needs_a_block_to_hand_out():
    assert BlockPool(2).free_block_ids == [1]
    with pytest.raises(ValueError, match="the pool has 1 blocks"):
        BlockPool(1)


def test_a_held_block_comes_back_only_with_its_last_holder():
    pool = BlockPool(3)
    [block_id] = pool.allocate(1)
    assert pool.ref_count(block_id) == 1
    pool.hold([block_id])
    assert pool.ref_count(block_id) == 2
    pool.release([block_id])
    assert pool.free_block_ids == [2]
    pool.release([block_id])
    assert pool.free_block_ids == [1, 2]
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
    assert (pool.key_of(1), pool.key_of(2)) == (None, b"same")
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
def test_52_of_twins_the_oldest_is_found_whichever_goes(
    order: tuple[int, ...], found: tuple[int | None, ...]
):
    pool = _twins()
    for block_id, expected in zip(order, found, strict=True):
        assert pool.num_cached_keys == 1
        pool.release([block_id])
        assert pool.allocate(1) == [block_id]
        assert pool.find(b"same") == expected
    assert pool.num_cached_keys == 0


def test_52_twins_do_not_keep_each_other_and_other_content_is_untouched():
    pool = BlockPool(5)
    pool.allocate(4)
    pool.register([1, 2, 3], [b"same", b"other", b"same"])
    pool.release([3])
    pool.allocate(1)
    assert (pool.find(b"same"), pool.find(b"other"), pool.num_cached_keys) == (1, 2, 2)


def test_content_can_be_forgotten_where_it_is():
    pool = BlockPool(6)
    pool.allocate(4)
    pool.register([1, 2, 3], [b"one", b"same", b"same"])
    pool.release([1, 2])
    # The third is held, the fourth and the placeholder cannot be found anyway.
    pool.forget([1, 2, 3, 4, 0])
    assert (pool.find(b"one"), pool.find(b"same"), pool.num_cached_keys) == (None, 3, 1)
    assert [pool.ref_count(block_id) for block_id in (1, 2, 3, 4)] == [0, 0, 1, 1]
    assert pool.free_block_ids == [5, 1, 2]


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
    assert [pool.key_of(block_id) for block_id in (1, 2, 3)] == [None] * 3
    # Nor does it know twins any more.
    pool.register(pool.allocate(1), [b"same"])
    pool.release([1])
    pool.hold([2, 3])
    pool.allocate(1)
    assert pool.find(b"same") is None
