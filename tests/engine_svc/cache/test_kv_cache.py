"""One group of full attention: the verbs of the cache, and which blocks come out (37 to 48, 55, 61)."""

from __future__ import annotations

import pytest

from engine_svc.cache.prefix import PrefixHit
from engine_svc.request import ContentSpan
from tests.engine_svc.cache.fakes import SmallCache, request, table_of, tokens

COMMON = tokens(48)  # three full blocks


def test_44_a_partial_block_has_no_hash_even_where_a_full_one_was():
    small = SmallCache(2)
    first = request("a", tokens(16))
    assert small.admit(first)
    small.cache.release(first)
    second = request("b", tokens(15))
    assert small.admit(second)
    assert (table_of(second), small.hashes_of(second)) == ([1], [None])
    assert small.pool.num_cached_keys == 0


def test_45_without_prefix_caching_nothing_is_found_again():
    small = SmallCache(5, block_size=4, enable_prefix_caching=False)
    first = request("a", tokens(10))
    assert small.admit(first)
    assert table_of(first) == [1, 2, 3]
    assert small.hashes_of(first) == [None] * 3
    small.cache.release(first)
    # Nothing of it is worth keeping, so all of it comes first.
    assert small.pool.free_block_ids == [3, 2, 1, 4]
    second = request("b", tokens(16))
    assert small.admit(second)
    assert second.num_cached_tokens == 0
    assert table_of(second) == [3, 2, 1, 4]
    assert not small.admit(request("c", tokens(1)))
    assert small.compute(second, 1) is None
    assert (small.cache.prefix_queries, small.cache.hit_rate.value) == (0, 0.0)
    assert second.block_hashes == []


def test_46_a_refused_admission_changes_nothing():
    small = SmallCache(11)
    first = request("a", tokens(96))
    assert small.admit(first)
    second = request("b", [*tokens(96), *tokens(80, 500)])
    assert not small.admit(second)
    assert (table_of(second), second.num_computed_tokens) == ([], 0)
    assert small.ref_counts_of(first) == [1] * 6
    assert small.pool.free_block_ids == [7, 8, 9, 10]
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


def test_47_who_skips_the_lookup_still_leaves_blocks_for_others():
    small = SmallCache(11)
    first, second = request("a", tokens(48)), request("b", tokens(48), skips_lookup=True)
    assert small.admit(first)
    assert small.admit(second)
    assert second.num_cached_tokens == 0
    assert table_of(second) == [4, 5, 6]
    assert small.hashes_of(second) == small.hashes_of(first) == first.block_hashes
    # It asked for nothing, so it is in no figure.
    assert (small.cache.prefix_queries, small.cache.prefix_hits) == (48, 0)


def test_48_extra_keys_and_spans_part_requests_like_the_salt():
    small = SmallCache(30)
    image = (ContentSpan(20, 8, "image"),)
    assert small.admit(request("a", [*COMMON, 1], extra_keys=("adapter",), spans=image))
    cached = [
        small.cache.match_prefix(request(name, [*COMMON, 2], extra_keys=keys, spans=spans)).num_tokens
        for name, keys, spans in [
            ("b", ("adapter",), image),
            ("c", ("adapter",), ()),
            ("d", ("adapter",), (ContentSpan(20, 8, "other"),)),
            ("e", (), image),
        ]
    ]
    # What the span changes begins with its block.
    assert cached == [48, 16, 16, 0]


def test_the_fingerprint_of_the_model_is_in_the_hashes():
    here, there = SmallCache(5, fingerprint=b"one"), SmallCache(5, fingerprint=b"two")
    hashed = [request("a", tokens(16)), request("b", tokens(16))]
    assert here.admit(hashed[0])
    assert there.admit(hashed[1])
    assert hashed[0].block_hashes != hashed[1].block_hashes


def test_the_search_ends_at_the_first_miss():
    small = SmallCache(20)
    first = request("a", [*tokens(32), *tokens(32, 500)])
    assert small.admit(first)
    stranger = request("b", [*tokens(16, 900), *first.token_ids[16:], 1])
    assert small.cache.match_prefix(stranger).num_tokens == 0
    small.cache.release(first)
    small.evict(2)
    again = request("c", [*first.token_ids, 1])
    # The third and fourth block are there, but behind the one that is missing.
    assert small.cache.match_prefix(again).num_tokens == 16
    assert small.pool.find(first.block_hashes[3]) == 4


@pytest.mark.parametrize(
    ("num_tokens", "num_lookahead", "num_blocks"),
    [(3, 1, 1), (3, 2, 2), (3, 4, 2), (3, 5, 2), (3, 6, 3), (8, 0, 2)],
)
def test_61_lookahead_slots_are_part_of_the_room(num_tokens: int, num_lookahead: int, num_blocks: int):
    small = SmallCache(10, block_size=4, num_lookahead_tokens=num_lookahead)
    ahead = request("a", tokens(num_tokens))
    assert small.admit(ahead)
    assert len(table_of(ahead)) == num_blocks


def test_61_a_growing_request_keeps_its_lookahead_slots():
    small = SmallCache(10, block_size=4, num_lookahead_tokens=2)
    ahead = request("a", tokens(5))
    assert small.admit(ahead)
    assert len(table_of(ahead)) == 2
    assert small.append(ahead, [5]) == []
    assert small.append(ahead, [6]) == [3]
    assert small.append(ahead, tokens(3, 7)) == []
    assert small.append(ahead, [10]) == [4]


@pytest.mark.parametrize(("num_usable", "is_admitted"), [(2, True), (1, False)])
def test_61_lookahead_slots_count_when_a_request_enters(num_usable: int, is_admitted: bool):
    small = SmallCache(num_usable + 1, block_size=4, num_lookahead_tokens=2)
    assert small.admit(request("a", tokens(3))) is is_admitted


def test_61_no_slot_lies_behind_the_longest_sequence():
    small = SmallCache(10, block_size=4, num_lookahead_tokens=4, max_model_len=9)
    ahead = request("a", tokens(5))
    assert small.admit(ahead)
    assert len(table_of(ahead)) == 3
    assert small.append(ahead, tokens(3, 5)) == []


def test_reset_forgets_the_hit_rate_and_a_refused_one_does_not():
    small = SmallCache(11)
    first, second = request("a", COMMON), request("b", [*COMMON, *COMMON])
    assert small.admit(first)
    assert small.admit(second)
    assert not small.cache.reset()
    assert small.cache.hit_rate.value == 48 / 144
    small.cache.release(first)
    small.cache.release(second)
    assert small.cache.reset()
    assert small.cache.hit_rate.value == 0.0
    # The counters since the start go on.
    assert (small.cache.prefix_queries, small.cache.prefix_hits) == (144, 48)


def test_the_cache_counts_its_blocks():
    small = SmallCache(11)
    counts = small.cache.num_groups, small.cache.num_total_blocks, small.cache.num_free_blocks
    assert (counts, small.cache.num_used_blocks) == ((1, 10, 10), 0)
    assert small.admit(request("a", COMMON))
    assert (small.cache.num_free_blocks, small.cache.num_used_blocks) == (7, 3)


def test_a_preempted_request_is_counted_apart_when_it_comes_back():
    small = SmallCache(11)
    again = request("a", [*COMMON, 1])
    assert small.admit(again)
    small.cache.release(again)
    again.num_preemptions = 1
    assert small.admit(again)
    assert (small.cache.prefix_queries, small.cache.prefix_hits) == (49, 0)
    assert (small.cache.preempted_queries, small.cache.preempted_hits) == (49, 48)
    assert small.cache.hit_rate.value == 0.0


def test_the_hit_rate_is_that_of_the_last_thousand_admissions():
    small = SmallCache(4)
    for num_admitted in range(1000):
        # The second finds 16 of its 17 tokens, all others find nothing.
        passing = request(f"r{num_admitted}", tokens(17 if num_admitted < 2 else 1))
        assert small.admit(passing)
        small.cache.release(passing)
    assert small.cache.hit_rate.value == 16 / (2 * 17 + 998)
    assert small.admit(request("last", [5]))
    assert small.cache.hit_rate.value == 16 / (17 + 999)


def test_lookups_are_counted_at_admissions_alone():
    small = SmallCache(11)
    assert small.admit(request("a", COMMON))
    second = request("b", [*COMMON, 1])
    for _ in range(3):
        assert small.cache.match_prefix(second).num_tokens == 48
    assert (small.cache.prefix_queries, small.cache.prefix_hits) == (48, 0)
    assert small.admit(second)
    assert (small.cache.prefix_queries, small.cache.prefix_hits) == (97, 48)
    assert small.cache.hit_rate.value == 48 / 97


def test_who_holds_blocks_has_nothing_to_look_up():
    small = SmallCache(11)
    assert small.admit(request("a", COMMON))
    second = request("b", [*COMMON, 1])
    assert small.admit(second)
    assert small.cache.match_prefix(second) == PrefixHit()
