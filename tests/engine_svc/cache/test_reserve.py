"""Room for tokens whose KV comes from elsewhere, before their request is admitted (70)."""

from __future__ import annotations

import pytest

from engine_svc.cache.attention import FullAttention, SlidingWindow
from engine_svc.cache.prefix import PrefixHit
from tests.engine_svc.cache.fakes import SmallCache, request, table_of, tables_of, tokens


def test_70_forty_tokens_from_elsewhere_are_held_unhashed_until_the_request_is_admitted():
    small = SmallCache(11)
    loaded = request("a", tokens(40))
    assert small.cache.reserve(loaded, 40) == [[1, 2, 3]]
    # One token is left to compute, as after a hit.
    assert loaded.num_computed_tokens == 39
    assert small.hashes_of(loaded) == [None] * 3
    assert small.ref_counts_of(loaded) == [1] * 3
    assert small.cache.match_prefix(request("b", tokens(40))).num_tokens == 0
    # It has what it needs: nothing is looked up, and no block is taken.
    assert small.cache.match_prefix(loaded) == PrefixHit()
    assert small.cache.admit(loaded, PrefixHit(), 1, reserve_all=True) == []
    assert small.hashes_of(loaded) == [*loaded.block_hashes, None]
    assert len(loaded.block_hashes) == 2
    assert small.cache.match_prefix(request("c", tokens(40))).num_tokens == 32


@pytest.mark.parametrize(("num_tokens", "num_computed"), [(1, 1), (38, 38), (39, 39), (40, 39)])
def test_70_what_is_reserved_counts_as_computed_but_for_the_last_token(num_tokens: int, num_computed: int):
    small = SmallCache(11)
    loaded = request("a", tokens(40))
    assert small.cache.reserve(loaded, num_tokens) is not None
    assert loaded.num_computed_tokens == num_computed
    assert len(table_of(loaded)) == -(-num_tokens // 16)


def test_70_behind_the_reserved_tokens_a_request_grows_like_any_other():
    small = SmallCache(11)
    loaded = request("a", tokens(60))
    assert small.cache.reserve(loaded, 40) == [[1, 2, 3]]
    assert small.cache.admit(loaded, PrefixHit(), 8, reserve_all=True) == []
    assert [key is None for key in small.hashes_of(loaded)] == [False, False, False]
    loaded.num_computed_tokens = 48
    assert small.cache.grow(loaded, 12) == [[4]]


def test_70_what_is_cached_here_is_not_reserved_again():
    small = SmallCache(11)
    assert small.admit(request("a", tokens(32)))
    loaded = request("b", [*tokens(32), *tokens(30, 500)])
    assert small.cache.reserve(loaded, 48) == [[3]]
    assert (table_of(loaded), loaded.num_computed_tokens) == ([1, 2, 3], 48)
    assert small.ref_counts_of(loaded) == [2, 2, 1]
    assert loaded.block_tables[0].num_registered == 2
    assert small.cache.admit(loaded, PrefixHit(), 14, reserve_all=True) == [[4]]
    assert small.hashes_of(loaded) == [*loaded.block_hashes, None]


@pytest.mark.parametrize(("num_usable", "is_reserved"), [(4, True), (3, False)])
def test_70_a_reservation_is_all_or_nothing(num_usable: int, is_reserved: bool):
    small = SmallCache(num_usable + 1)
    first = request("a", tokens(16))
    assert small.admit(first)
    small.cache.release(first)
    free = small.pool.free_block_ids
    loaded = request("b", [*tokens(16), *tokens(60, 500)])
    # A matched block that nobody holds, and three new ones.
    reserved = small.cache.reserve(loaded, 64)
    assert (reserved is not None) is is_reserved
    if not is_reserved:
        assert (loaded.block_tables, loaded.num_computed_tokens) == ([], 0)
        assert small.pool.free_block_ids == free


def test_70_a_reservation_asks_for_no_more_than_its_tokens():
    small = SmallCache(3)
    loaded = request("a", tokens(100))
    assert small.cache.reserve(loaded, 32) == [[1, 2]]


def test_70_lookahead_slots_are_reserved_too():
    small = SmallCache(11, num_lookahead_tokens=2)
    assert small.cache.reserve(request("a", tokens(100)), 31) == [[1, 2, 3]]
    assert small.cache.reserve(request("b", tokens(100, 200)), 30) == [[4, 5]]


def test_70_a_reservation_is_released_without_a_trace():
    small = SmallCache(6)
    loaded = request("a", tokens(40))
    assert small.cache.reserve(loaded, 40) is not None
    small.cache.release(loaded)
    assert loaded.block_tables == []
    # What was in them is unknown, so they are the first to be handed out.
    assert small.pool.free_block_ids == [3, 2, 1, 4, 5]
    assert small.pool.num_cached_keys == 0


def test_70_every_group_has_room_reserved():
    small = SmallCache(30, groups=(FullAttention(4), FullAttention(8)))
    loaded = request("a", tokens(20))
    assert small.cache.reserve(loaded, 12) == [[1, 2, 3], [4, 5]]
    assert small.cache.admit(loaded, PrefixHit(), 8, reserve_all=True) == [[6, 7], [8]]
    assert tables_of(loaded) == [[1, 2, 3, 6, 7], [4, 5, 8]]


@pytest.mark.parametrize(
    ("num_tokens", "table"),
    [(4, [1, 2]), (5, [0, 1, 2]), (7, [0, 0, 1, 2]), (10, [0, 0, 0, 1, 2]), (11, [0] * 4 + [1, 2])],
)
def test_70_what_a_window_will_have_passed_is_not_reserved(num_tokens: int, table: list[int]):
    small = SmallCache(5, groups=(SlidingWindow(2, 4),), enable_prefix_caching=False)
    loaded = request("a", tokens(14))
    assert small.cache.reserve(loaded, num_tokens) == [[1, 2]]
    assert table_of(loaded) == table
    num_missing = 14 - num_tokens
    admitted = small.cache.admit(loaded, PrefixHit(), num_missing, reserve_all=False)
    # 4 usable blocks: enough for 8 tokens from the first that is read.
    assert admitted == ([[3, 4][: 7 - len(table)]] if len(table) >= 5 else None)


def test_70_behind_a_window_only_what_is_read_of_a_hit_is_held():
    small = SmallCache(30, groups=(SlidingWindow(2, 4),))
    assert small.admit(request("a", tokens(12)))
    for num_tokens, block_ids in [(13, [0] * 5 + [6, 7]), (16, [0] * 6 + [8, 9])]:
        loaded = request(f"b{num_tokens}", [*tokens(12), *tokens(8, 500)])
        assert small.cache.reserve(loaded, num_tokens) is not None
        [table] = loaded.block_tables
        assert table.block_ids == block_ids
        assert (table.num_released, table.num_registered) == (block_ids.count(0), 6)
    assert [small.pool.ref_count(block_id) for block_id in range(1, 7)] == [1] * 5 + [2]


def test_70_a_refused_admission_of_a_reserved_request_leaves_it_its_blocks():
    small = SmallCache(4)
    loaded = request("a", tokens(64))
    assert small.cache.reserve(loaded, 40) == [[1, 2, 3]]
    assert small.cache.admit(loaded, PrefixHit(), 24, reserve_all=False) is None
    assert small.cache.admit(loaded, PrefixHit(), 8, reserve_all=True) is None
    assert (table_of(loaded), small.ref_counts_of(loaded)) == ([1, 2, 3], [1, 1, 1])
    assert small.pool.num_cached_keys == 0
    assert small.cache.admit(loaded, PrefixHit(), 8, reserve_all=False) == []


def test_70_the_token_that_is_computed_again_still_reads_its_whole_window():
    small = SmallCache(30, groups=(SlidingWindow(2, 4),), enable_prefix_caching=False)
    loaded = request("a", tokens(13))
    assert small.cache.reserve(loaded, 13) == [[1, 2, 3]]
    # Token 12 is left to compute and reads from token 9 on, in the fifth block.
    assert (loaded.num_computed_tokens, table_of(loaded)) == (12, [0, 0, 0, 0, 1, 2, 3])


def test_27_a_loaded_request_is_counted_once():
    small = SmallCache(11)
    loaded = request("a", tokens(40))
    small.cache.reserve(loaded, 40)
    small.cache.admit(loaded, small.cache.match_prefix(loaded), 1, reserve_all=True)
    assert (small.cache.prefix_queries, small.cache.prefix_hits) == (40, 0)
