"""The four verbs of the cache, with the block ids that must come out."""

from __future__ import annotations

import pytest

from engine_svc.cache.prefix import PrefixHit
from tests.engine_svc.cache.fakes import SmallCache, request, table_of, tokens

COMMON = tokens(48)  # three full blocks


def test_the_first_prompt_fills_blocks_in_order_and_hashes_the_full_ones():
    small = SmallCache(11)
    first = request("a", [*COMMON, *tokens(7, 100)])
    assert small.admit(first)
    assert table_of(first) == [1, 2, 3, 4]
    assert small.hashes_of(first) == [*first.block_hashes, None]
    assert len(set(first.block_hashes)) == 3
    assert small.ref_counts_of(first) == [1, 1, 1, 1]


def test_a_second_prompt_shares_the_blocks_of_the_common_beginning():
    small = SmallCache(11)
    first, second = request("a", [*COMMON, *tokens(7, 100)]), request("b", [*COMMON, *tokens(5, 200)])
    assert small.admit(first)
    assert small.admit(second)
    assert second.num_cached_tokens == 48
    assert table_of(second) == [1, 2, 3, 5]
    assert small.ref_counts_of(second) == [2, 2, 2, 1]
    assert small.cache.num_free_blocks == 5
    assert (small.cache.prefix_queries, small.cache.prefix_hits) == (55 + 53, 48)


def _cache_after_two_shared_prompts() -> SmallCache:
    small = SmallCache(11)
    first, second = request("a", [*COMMON, *tokens(7, 100)]), request("b", [*COMMON, *tokens(5, 200)])
    small.admit(first)
    small.admit(second)
    small.cache.release(first)
    small.cache.release(second)
    return small


def test_freed_blocks_are_reused_unhashed_first_and_hashed_tail_first():
    small = _cache_after_two_shared_prompts()
    assert small.pool.free_block_ids == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]


def test_cached_blocks_are_taken_again_and_evicted_in_order():
    small = _cache_after_two_shared_prompts()
    third = request("c", [*COMMON, *tokens(5, 300)])
    assert small.admit(third)
    assert table_of(third) == [1, 2, 3, 5]
    small.cache.release(third)
    stranger = request("d", tokens(160, 1000))
    assert small.admit(stranger)
    assert table_of(stranger) == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    assert small.cache.num_free_blocks == 0


def test_growth_takes_a_block_only_when_the_last_is_full():
    small = SmallCache(11)
    growing = request("a", tokens(55))
    assert small.admit(growing)
    assert small.append(growing, tokens(4, 100)) == []
    assert small.append(growing, tokens(19, 200)) == [5]
    assert small.hashes_of(growing) == [*growing.block_hashes, None]
    assert len(growing.block_hashes) == 4


def test_the_blocks_of_the_longest_gone_request_are_evicted_first():
    small = SmallCache(11)
    first, second = request("a", tokens(87)), request("b", tokens(48, 1000))
    assert small.admit(first)
    assert small.admit(second)
    small.cache.release(first)
    small.cache.release(second)
    assert small.pool.free_block_ids == [6, 10, 5, 4, 3, 2, 1, 9, 8, 7]
    sharing = request("c", [*tokens(32), *tokens(3, 2000)])
    assert small.admit(sharing)
    assert table_of(sharing) == [1, 2, 6]
    assert small.cache.num_free_blocks == 7


def test_a_hit_protects_its_blocks_from_the_rest_of_the_same_prompt():
    small = SmallCache(3)
    first = request("a", tokens(32))
    assert small.admit(first)
    small.cache.release(first)
    second = request("b", [*tokens(16), *tokens(16, 500)])
    assert small.admit(second)
    assert second.num_cached_tokens == 16
    assert table_of(second) == [1, 2]


def test_a_partial_block_has_no_hash_even_where_a_full_one_was():
    small = SmallCache(2)
    first = request("a", tokens(16))
    assert small.admit(first)
    small.cache.release(first)
    second = request("b", tokens(15))
    assert small.admit(second)
    assert small.hashes_of(second) == [None]
    assert small.pool.num_cached_keys == 0


def test_without_prefix_caching_nothing_is_found_again():
    small = SmallCache(5, enable_prefix_caching=False)
    first = request("a", tokens(40))
    assert small.admit(first)
    assert len(table_of(first)) == 3
    small.cache.release(first)
    assert small.pool.free_block_ids == [3, 2, 1, 4]
    second = request("b", tokens(64))
    assert small.admit(second)
    assert second.num_cached_tokens == 0
    assert len(table_of(second)) == 4
    assert not small.admit(request("c", tokens(1)))
    assert small.cache.prefix_queries == 0


def test_a_refused_admission_changes_nothing():
    small = SmallCache(11)
    first = request("a", tokens(96))
    assert small.admit(first)
    second = request("b", [*tokens(96), *tokens(80, 500)])
    assert not small.admit(second)
    assert table_of(second) == []
    assert small.ref_counts_of(first) == [1] * 6
    assert small.cache.num_free_blocks == 4
    assert small.cache.prefix_queries == 96


def test_matched_blocks_that_nobody_holds_count_as_taken():
    small = SmallCache(5)
    first = request("a", tokens(32))
    assert small.admit(first)
    small.cache.release(first)
    assert not small.admit(request("b", [*tokens(32), *tokens(33, 500)]))
    assert small.admit(request("c", [*tokens(32), *tokens(32, 500)]))


def test_a_refused_growth_changes_nothing():
    small = SmallCache(3)
    growing = request("a", tokens(32))
    assert small.admit(growing)
    assert small.cache.grow(growing, 1) is None
    assert table_of(growing) == [1, 2]


def test_room_for_all_tokens_can_be_asked_for():
    small = SmallCache(5)
    long = request("a", tokens(65))
    assert small.cache.admit(long, PrefixHit(), 16, reserve_all=True) is None
    assert small.cache.admit(long, PrefixHit(), 16, reserve_all=False) == [[1]]
    assert table_of(long) == [1]


def test_who_skips_the_lookup_still_leaves_blocks_for_others():
    small = SmallCache(11)
    first, second = request("a", tokens(48)), request("b", tokens(48), skips_lookup=True)
    assert small.admit(first)
    assert small.admit(second)
    assert second.num_cached_tokens == 0
    assert table_of(second) == [4, 5, 6]
    assert small.hashes_of(second) == small.hashes_of(first)


@pytest.mark.parametrize(("salt", "num_cached"), [("tenant", 48), ("other", 0), ("", 0)])
def test_only_equal_salts_share(salt: str, num_cached: int):
    small = SmallCache(11)
    assert small.admit(request("a", [*COMMON, 1], salt="tenant"))
    second = request("b", [*COMMON, 2], salt=salt)
    assert small.admit(second)
    assert second.num_cached_tokens == num_cached


def test_at_least_one_token_is_computed():
    small = SmallCache(11)
    assert small.admit(request("a", COMMON))
    second = request("b", COMMON)
    assert small.admit(second)
    assert second.num_cached_tokens == 32


def test_the_search_ends_at_the_first_miss():
    small = SmallCache(20)
    first = request("a", [*tokens(32), *tokens(32, 500)])
    assert small.admit(first)
    stranger = request("b", [*tokens(16, 900), *first.token_ids[16:], 1])
    assert small.cache.match_prefix(stranger).num_tokens == 0


@pytest.mark.parametrize("num_tokens", [48, 37])
def test_the_last_match_can_be_given_up(num_tokens: int):
    small = SmallCache(20, drop_last_matched_block=True)
    assert small.admit(request("a", tokens(num_tokens)))
    assert small.cache.match_prefix(request("b", tokens(num_tokens))).num_tokens == 16


@pytest.mark.parametrize(("num_tokens", "num_lookahead"), [(3, 2), (3, 4), (8, 0)])
def test_lookahead_slots_are_part_of_the_room(num_tokens: int, num_lookahead: int):
    small = SmallCache(10, block_size=4, num_lookahead_tokens=num_lookahead)
    ahead = request("a", tokens(num_tokens))
    assert small.admit(ahead)
    assert len(table_of(ahead)) == 2


def test_reset_waits_until_nobody_holds_a_block():
    small = SmallCache(11)
    first = request("a", COMMON)
    assert small.admit(first)
    assert not small.cache.reset()
    small.cache.release(first)
    assert small.cache.reset()
    assert small.cache.match_prefix(request("b", COMMON)).num_tokens == 0


def test_a_preempted_request_is_not_counted_among_the_lookups_again():
    small = SmallCache(11)
    again = request("a", COMMON)
    assert small.admit(again)
    small.cache.release(again)
    again.num_preemptions = 1
    assert small.admit(again)
    assert (small.cache.prefix_queries, small.cache.prefix_hits) == (48, 0)
