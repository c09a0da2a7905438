"""How blocks come back: what it costs to take them from a request, and how to keep them after its end."""

from __future__ import annotations

import pytest

from engine_svc.cache.attention import FullAttention, SlidingWindow
from tests.engine_svc.cache.doubles import EventLog
from tests.engine_svc.cache.fakes import SmallCache, request, table_of, tables_of, tokens


def test_who_shares_nothing_loses_all_tokens_and_frees_all_blocks():
    small = SmallCache(11, block_size=4)
    alone = request("a", tokens(10))
    assert small.admit(alone)
    assert small.cache.cost_of_release(alone) == (10, 3)


@pytest.mark.parametrize(
    ("num_shared", "cost"),
    [(0, (21, 6)), (4, (17, 5)), (8, (13, 4)), (12, (9, 3)), (16, (5, 2)), (20, (1, 1))],
)
def test_tokens_of_shared_blocks_are_not_lost_and_their_blocks_not_freed(
    num_shared: int, cost: tuple[int, int]
):
    small = SmallCache(30, block_size=4)
    assert small.admit(request("a", [*tokens(num_shared), *tokens(4, 500)]))
    sharing = request("b", tokens(21))
    assert small.admit(sharing)
    assert small.cache.cost_of_release(sharing) == cost


def test_blocks_that_were_shared_are_lost_with_their_last_holder():
    small = SmallCache(30, block_size=4)
    first, second = request("a", tokens(9)), request("b", tokens(10))
    assert small.admit(first)
    assert small.admit(second)
    assert small.cache.cost_of_release(second) == (2, 1)
    small.cache.release(first)
    assert small.cache.cost_of_release(second) == (10, 3)


def test_not_more_tokens_are_kept_than_are_computed():
    small = SmallCache(30, block_size=4)
    first = request("a", tokens(12))
    assert small.admit(first)
    kept = small.cache.hold(first)
    first.num_computed_tokens = 11
    assert small.cache.cost_of_release(first) == (0, 0)
    small.cache.let_go(kept)


def test_every_group_frees_its_blocks_and_the_shortest_share_counts():
    small = SmallCache(40, groups=(FullAttention(4), SlidingWindow(4, 100)))
    first, second = request("a", [*tokens(8), 500]), request("b", tokens(13))
    assert small.admit(first)
    assert small.admit(second)
    assert small.cache.cost_of_release(second) == (5, 4)
    # Somebody holds one block more of the first group alone.
    small.pool.hold(table_of(second, 0)[2:3])
    assert small.cache.cost_of_release(second) == (5, 3)


def test_what_was_given_back_is_not_freed_again():
    small = SmallCache(40, groups=(FullAttention(2), SlidingWindow(2, 4)))
    running = request("a", tokens(11))
    assert small.admit(running)
    assert small.append(running, [99]) == []
    assert table_of(running, 1)[:4] == [0] * 4
    assert small.cache.cost_of_release(running) == (12, 6 + 2)


@pytest.mark.parametrize(
    ("num_withdrawn", "num_found"), [(0, 3), (1, 3), (2, 2), (5, 2), (6, 1), (9, 1), (10, 0), (13, 0)]
)
def test_what_was_registered_but_will_not_be_computed_is_not_found(num_withdrawn: int, num_found: int):
    log = EventLog()
    small = SmallCache(6, block_size=4, observers=(log,))
    withdrawn = request("a", tokens(13))
    assert small.admit(withdrawn)
    hashes = withdrawn.block_hashes
    log.take()
    small.cache.release(withdrawn, num_withdrawn)
    assert withdrawn.block_tables == []
    assert [small.pool.find(block_hash) for block_hash in hashes] == [1, 2, 3][:num_found] + [None] * (
        3 - num_found
    )
    assert log.take() == [
        ("evict", block_id, hashes[block_id - 1], 0) for block_id in range(num_found + 1, 4)
    ]
    # They keep the places that they would have with their content.
    assert small.pool.free_block_ids == [4, 5, 3, 2, 1]


def test_withdrawing_forgets_blocks_of_every_group_and_none_that_a_window_has_passed():
    small = SmallCache(30, groups=(FullAttention(2), SlidingWindow(2, 4)))
    withdrawn = request("a", tokens(9))
    assert small.admit(withdrawn)
    assert small.append(withdrawn, tokens(3, 50)) is not None
    full, window = tables_of(withdrawn)
    assert window[:3] == [0, 0, 0]
    small.cache.release(withdrawn, 7)
    # 5 tokens were computed: two blocks of each group.
    assert [small.pool.key_of(block_id) is not None for block_id in full] == [True] * 2 + [False] * 4
    assert [small.pool.key_of(block_id) for block_id in window[3:]] == [None] * 3


def test_66_held_blocks_stay_after_the_end_and_come_back_in_the_order_of_their_release():
    small = SmallCache(11)
    ended = request("a", tokens(55))
    assert small.admit(ended)
    kept = small.cache.hold(ended)
    assert kept == [4, 3, 2, 1]
    small.cache.release(ended)
    assert ended.block_tables == []
    assert small.pool.free_block_ids == [5, 6, 7, 8, 9, 10]
    assert [small.pool.ref_count(block_id) for block_id in kept] == [1] * 4
    assert small.cache.num_used_blocks == 4
    assert not small.cache.reset()
    small.cache.let_go(kept)
    assert small.pool.free_block_ids == [4, 5, 6, 7, 8, 9, 10, 3, 2, 1]
    assert small.cache.reset()


def test_66_held_content_is_found_and_shared():
    small = SmallCache(11)
    ended = request("a", tokens(55))
    assert small.admit(ended)
    kept = small.cache.hold(ended)
    small.cache.release(ended)
    second = request("b", tokens(49))
    assert small.admit(second)
    assert table_of(second) == [1, 2, 3, 5]
    small.cache.let_go(kept)
    assert small.ref_counts_of(second) == [1] * 4
    assert small.pool.free_block_ids == [4, 6, 7, 8, 9, 10]


def test_66_what_a_window_has_given_back_is_not_held():
    small = SmallCache(20, groups=(FullAttention(2), SlidingWindow(2, 4)))
    running = request("a", tokens(7))
    assert small.admit(running)
    assert small.append(running, [99]) == []
    assert table_of(running, 1) == [0, 0, 7, 8]
    assert small.cache.hold(running) == [4, 3, 2, 1, 8, 7]
