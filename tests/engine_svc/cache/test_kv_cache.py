"""One group of full attention: the verbs of the cache, and which blocks come out (37 to 48, 55, 61)."""

from __future__ import annotations

import pytest

from engine_svc.cache.attention import NEVER, AttentionKind, ChunkedLocal, FullAttention, SlidingWindow
from engine_svc.cache.config import CacheConfig
from engine_svc.cache.kv_cache import NO_BLOCKS, KVCache
from engine_svc.cache.prefix import PrefixHit
from engine_svc.core.request import ContentSpan, Request
from tests.engine_svc.cache.doubles import EventLog
from tests.engine_svc.cache.fakes import SmallCache, request, table_of, tables_of, tokens
from tests.engine_svc.core_state import free_block_ids, key_of

COMMON = tokens(48)  # three full blocks


def test_45_without_prefix_caching_nothing_is_found_again():
    small = SmallCache(5, block_size=4, enable_prefix_caching=False)
    first = small.admitted(request("a", tokens(10)))
    assert table_of(first) == [1, 2, 3]
    assert small.hashes_of(first) == [None] * 3
    small.cache.release(first)
    # Nothing of it is worth keeping, so all of it comes first.
    assert free_block_ids(small.pool) == [3, 2, 1, 4]
    second = small.admitted(request("b", tokens(16)))
    assert second.num_cached_tokens == 0
    assert table_of(second) == [3, 2, 1, 4]
    assert not small.admit(request("c", tokens(1)))
    assert small.compute(second, 1) is None
    assert (small.cache.prefix_queries, small.cache.hit_rate.value) == (0, 0.0)
    assert second.block_hashes == []


def test_47_who_skips_the_lookup_still_leaves_blocks_for_others():
    small = SmallCache(11)
    first, second = request("a", tokens(48)), request("b", tokens(48), skips_lookup=True)
    assert small.admit(first)
    assert small.admit(second)
    assert second.num_cached_tokens == 0
    assert table_of(second) == [4, 5, 6]
    assert small.hashes_of(second) == small.hashes_of(first) == first.block_hashes
    # It asked for nothing, so it is in no statistics.
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
    again = small.admitted(request("a", [*COMMON, 1]))
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
        passing = small.admitted(request(f"r{num_admitted}", tokens(17 if num_admitted < 2 else 1)))
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
    second = small.admitted(request("b", [*COMMON, 1]))
    assert small.cache.match_prefix(second) == PrefixHit()


# Up to where nothing has to be done for a running request, and which of its content is registered when.


def _limits(running: Request) -> tuple[int, int, int]:
    return running.room_until, running.registers_at, running.quiet_until


def test_the_room_of_a_request_is_that_of_its_shortest_group():
    small = SmallCache(20, groups=(FullAttention(8), FullAttention(2)), enable_prefix_caching=False)
    running = small.admitted(request("a", tokens(5)))
    assert _limits(running) == (6, NEVER, 6)


_SHAPES: list[tuple[AttentionKind, ...]] = [
    (FullAttention(4),),
    (SlidingWindow(4, 6),),
    (SlidingWindow(4, 1),),
    (FullAttention(4), SlidingWindow(4, 9)),
    (FullAttention(2), ChunkedLocal(2, 6)),
]


@pytest.mark.parametrize("groups", [*_SHAPES, (SlidingWindow(2, 7),), (FullAttention(8), FullAttention(8))])
@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("num_lookahead", [0, 3])
def test_something_happens_behind_the_quiet_and_nothing_before(groups, caches, num_lookahead):
    log = EventLog()
    small = SmallCache(
        100,
        groups=groups,
        enable_prefix_caching=caches,
        num_lookahead_tokens=num_lookahead,
        observers=(log,),
    )
    running = small.admitted(request("a", tokens(1), skips_lookup=True))
    for token in range(1, 60):
        quiet_until, before = running.quiet_until, tables_of(running)
        log.take()
        small.append(running, [token])
        is_quiet = tables_of(running) == before and not log.take()
        assert is_quiet is (running.num_computed_tokens <= quiet_until)


@pytest.mark.parametrize(
    "groups", [*_SHAPES, (FullAttention(4), SlidingWindow(2, 5)), (FullAttention(2), FullAttention(6))]
)
@pytest.mark.parametrize("drops_last", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_who_asks_only_behind_the_quiet_misses_nothing(groups, drops_last, num_tokens):
    if drops_last and any(isinstance(kind, ChunkedLocal) for kind in groups):
        return
    caches = [SmallCache(200, groups=groups, drop_last_matched_block=drops_last) for _ in range(2)]
    asking, knowing = (request(name, tokens(1), skips_lookup=True) for name in "ab")
    for small, running in zip(caches, (asking, knowing), strict=True):
        assert small.admit(running)
    for first in range(1, 70, num_tokens):
        new_tokens = tokens(num_tokens, first)
        gained = caches[0].append(asking, new_tokens)
        if knowing.num_computed_tokens + num_tokens > knowing.quiet_until:
            assert caches[1].append(knowing, new_tokens) == gained
        else:
            knowing.token_ids += new_tokens
            knowing.num_computed_tokens += num_tokens
            assert gained == []
        assert tables_of(knowing) == tables_of(asking)
        assert free_block_ids(caches[1].pool) == free_block_ids(caches[0].pool)
        assert caches[1].hashes_of(knowing) == caches[0].hashes_of(asking)


def test_a_request_that_has_room_gains_nothing():
    small = SmallCache(10, block_size=4)
    running = small.admitted(request("a", tokens(5)))
    running.token_ids += tokens(4, 5)
    assert small.cache.grow(running, 3) is NO_BLOCKS
    assert small.cache.grow(running, 4) == [[3]]


@pytest.mark.parametrize(("num_drafts", "num_blocks"), [(0, 2), (1, 2), (2, 3), (6, 4)])
def test_drafts_have_room_but_are_not_registered(num_drafts: int, num_blocks: int):
    # 6 tokens are computed, one is known behind them, and drafts follow.
    small = SmallCache(10, block_size=4)
    running = small.admitted(request("a", tokens(6)))
    running.token_ids.append(99)
    assert small.cache.grow(running, 1 + num_drafts) is not None
    assert len(table_of(running)) == num_blocks
    assert (running.block_tables[0].num_registered, len(running.block_hashes)) == (1, 1)


def test_what_is_verified_later_is_registered_up_to_there():
    small = SmallCache(10, block_size=4)
    running = small.admitted(request("a", tokens(6)))
    running.token_ids.append(6)
    assert small.cache.grow(running, 6) is not None
    running.num_computed_tokens += 6
    # Of five drafts four were right: 11 tokens are verified, and a twelfth is known but not computed.
    running.token_ids += tokens(5, 7)
    small.cache.commit(running, 7)
    assert (running.block_tables[0].num_registered, running.registers_at) == (1, 8)
    small.cache.commit(running, 11)
    assert (running.block_tables[0].num_registered, running.registers_at) == (2, 12)
    small.cache.commit(running, 11)
    assert small.hashes_of(running) == [*running.block_hashes[:2], None]
    small.cache.commit(running, 12)
    assert small.hashes_of(running) == running.block_hashes
    assert len(running.block_hashes) == 3


def test_a_rejected_draft_is_never_hit():
    small = SmallCache(10, block_size=4)
    running = small.admitted(request("a", tokens(6)))
    running.token_ids.append(6)
    assert small.cache.grow(running, 4) is not None
    running.token_ids += [700, 800]
    small.cache.commit(running, 8)
    assert small.cache.match_prefix(request("b", [*tokens(7), 7, 8, 9])).num_tokens == 4
    assert small.cache.match_prefix(request("c", [*tokens(7), 700, 8, 9])).num_tokens == 8


def test_without_prefix_caching_nothing_is_committed():
    small = SmallCache(10, block_size=4, enable_prefix_caching=False)
    running = small.admitted(request("a", tokens(8)))
    small.cache.commit(running, 8)
    assert (running.block_hashes, running.block_tables[0].num_registered) == ([], 0)


def test_a_released_request_has_no_room_left():
    small = SmallCache(10, block_size=4)
    running = small.admitted(request("a", tokens(6)))
    small.cache.release(running)
    assert (_limits(running), running.block_tables) == ((0, 0, 0), [])
    small.cache.release(running)
    assert small.cache.num_used_blocks == 0
    running.num_computed_tokens = 0
    assert small.admit(running)
    assert (table_of(running), _limits(running)) == ([1, 2], (8, 8, 7))


# Several groups of layers in one pool: a table each, hits that all of them hold, blocks of unequal size.

HYBRID = (FullAttention(16), SlidingWindow(16, 32), SlidingWindow(16, 32))


def test_room_is_all_or_nothing_over_all_groups():
    small = SmallCache(10, groups=HYBRID)
    refused, fitting = request("a", tokens(49)), request("b", tokens(48, 100))
    assert not small.admit(refused)
    assert (refused.block_tables, free_block_ids(small.pool)) == ([], list(range(1, 10)))
    assert small.admit(fitting)
    # The windows give two blocks back, but three groups want one each.
    assert small.append(fitting, [99]) is None
    assert tables_of(fitting) == [[1, 2, 3], [0, 5, 6], [0, 8, 9]]
    assert free_block_ids(small.pool) == [4, 7]


@pytest.mark.parametrize(
    ("num_tokens", "num_registered"), [(31, (0, 0)), (32, (1, 2)), (48, (1, 2)), (63, (1, 2)), (64, (2, 4))]
)
def test_60_only_what_ends_with_a_block_of_every_group_is_cached(num_tokens, num_registered):
    small = SmallCache(30, groups=(FullAttention(32), SlidingWindow(16, 32)))
    assert small.cache.hasher.block_size == 16
    first = small.admitted(request("a", tokens(num_tokens)))
    assert tuple(table.num_registered for table in first.block_tables) == num_registered
    assert small.pool.num_cached_keys == sum(num_registered)


def test_60_a_block_of_several_hashes_has_the_last_of_them():
    small = SmallCache(30, groups=(FullAttention(32), SlidingWindow(16, 32)))
    first = small.admitted(request("a", tokens(70)))
    hashes = first.block_hashes
    assert small.hashes_of(first)[:3] == [hashes[1], hashes[3], None]
    assert small.hashes_of(first)[3:] == [*(block_hash + b"\x01" for block_hash in hashes), None]


def test_60_with_a_block_to_give_up_one_block_more_is_cached():
    groups = (FullAttention(32), SlidingWindow(16, 32))
    for num_tokens, num_registered in [
        (31, (0, 0)),
        (32, (1, 2)),
        (47, (1, 2)),
        (48, (1, 3)),
        (64, (2, 4)),
        (96, (3, 6)),
    ]:
        small = SmallCache(30, groups=groups, drop_last_matched_block=True)
        first = small.admitted(request("a", tokens(num_tokens)))
        assert tuple(table.num_registered for table in first.block_tables) == num_registered


@pytest.mark.parametrize(
    ("num_tokens", "num_cached"),
    [(16, 0), (32, 16), (47, 16), (48, 32), (63, 32), (64, 48), (65, 48), (80, 48)],
)
def test_with_several_groups_the_block_given_up_may_be_the_last_of_the_prompt(
    num_tokens: int, num_cached: int
):
    # Rule 10 of the recorded version: of 4 equal blocks 3 are hit; with one group they would be 2.
    small = SmallCache(30, groups=HYBRID[:2], drop_last_matched_block=True)
    assert small.admit(request("a", tokens(64)))
    assert small.cache.match_prefix(request("b", tokens(num_tokens))).num_tokens == num_cached
    single = SmallCache(30, drop_last_matched_block=True)
    assert single.admit(request("a", tokens(64)))
    limit = (min(num_tokens - 1, 64) // 16 - 1) * 16
    assert single.cache.match_prefix(request("b", tokens(num_tokens))).num_tokens == max(0, limit)


def test_chunks_end_with_blocks_of_every_group_and_give_up_none():
    SmallCache(30, groups=(FullAttention(4), ChunkedLocal(2, 8)))
    for groups, drops in [
        ((FullAttention(4), ChunkedLocal(2, 6)), False),
        ((ChunkedLocal(2, 3),), False),
        ((ChunkedLocal(2, 4),), True),
    ]:
        with pytest.raises(ValueError, match=r"chunk is \d: with prefix caching it must be a multiple of \d"):
            SmallCache(30, groups=groups, drop_last_matched_block=drops)


# How blocks come back: what it costs to take them from a request, and how to keep them after its end.


def test_who_shares_nothing_loses_all_tokens_and_frees_all_blocks():
    small = SmallCache(11, block_size=4)
    alone = small.admitted(request("a", tokens(10)))
    assert small.cache.cost_of_release(alone) == (10, 3)


@pytest.mark.parametrize(
    ("num_shared", "cost"),
    [(0, (21, 6)), (4, (17, 5)), (8, (13, 4)), (12, (9, 3)), (16, (5, 2)), (20, (1, 1))],
)
def test_tokens_of_shared_blocks_are_not_lost_and_their_blocks_not_freed(num_shared, cost):
    small = SmallCache(30, block_size=4)
    assert small.admit(request("a", [*tokens(num_shared), *tokens(4, 500)]))
    sharing = small.admitted(request("b", tokens(21)))
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
    first = small.admitted(request("a", tokens(12)))
    kept = small.cache.hold(first)
    first.num_computed_tokens = 11
    assert small.cache.cost_of_release(first) == (0, 0)
    small.cache.release_held(kept)


def test_every_group_frees_its_blocks_and_the_shortest_share_counts():
    small = SmallCache(40, groups=(FullAttention(4), SlidingWindow(4, 100)))
    first, second = request("a", [*tokens(8), 500]), request("b", tokens(13))
    assert small.admit(first)
    assert small.admit(second)
    assert small.cache.cost_of_release(second) == (5, 4)
    # A request holds one block more of the first group alone.
    small.pool.hold(table_of(second, 0)[2:3])
    assert small.cache.cost_of_release(second) == (5, 3)


def test_what_was_given_back_is_not_freed_again():
    small = SmallCache(40, groups=(FullAttention(2), SlidingWindow(2, 4)))
    running = small.admitted(request("a", tokens(11)))
    assert small.append(running, [99]) == []
    assert table_of(running, 1)[:4] == [0] * 4
    assert small.cache.cost_of_release(running) == (12, 6 + 2)


@pytest.mark.parametrize(
    ("num_withdrawn", "num_found"), [(0, 3), (1, 3), (2, 2), (5, 2), (6, 1), (9, 1), (10, 0), (13, 0)]
)
def test_what_was_registered_but_will_not_be_computed_is_not_found(num_withdrawn: int, num_found: int):
    log = EventLog()
    small = SmallCache(6, block_size=4, observers=(log,))
    withdrawn = small.admitted(request("a", tokens(13)))
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
    assert free_block_ids(small.pool) == [4, 5, 3, 2, 1]


def test_withdrawing_forgets_blocks_of_every_group_and_none_that_a_window_has_passed():
    small = SmallCache(30, groups=(FullAttention(2), SlidingWindow(2, 4)))
    withdrawn = small.admitted(request("a", tokens(9)))
    assert small.append(withdrawn, tokens(3, 50)) is not None
    full, window = tables_of(withdrawn)
    assert window[:3] == [0, 0, 0]
    small.cache.release(withdrawn, 7)
    # 5 tokens were computed: two blocks of each group.
    assert [key_of(small.pool, block_id) is not None for block_id in full] == [True] * 2 + [False] * 4
    assert [key_of(small.pool, block_id) for block_id in window[3:]] == [None] * 3


def test_66_held_blocks_stay_after_the_end_and_come_back_in_the_order_of_their_release():
    small = SmallCache(11)
    ended = small.admitted(request("a", tokens(55)))
    kept = small.cache.hold(ended)
    assert kept == [4, 3, 2, 1]
    small.cache.release(ended)
    assert ended.block_tables == []
    assert free_block_ids(small.pool) == [5, 6, 7, 8, 9, 10]
    assert [small.pool.ref_count(block_id) for block_id in kept] == [1] * 4
    assert small.cache.num_used_blocks == 4
    assert not small.cache.reset()
    small.cache.release_held(kept)
    assert free_block_ids(small.pool) == [4, 5, 6, 7, 8, 9, 10, 3, 2, 1]
    assert small.cache.reset()


def test_66_held_content_is_found_and_shared():
    small = SmallCache(11)
    ended = small.admitted(request("a", tokens(55)))
    kept = small.cache.hold(ended)
    small.cache.release(ended)
    second = small.admitted(request("b", tokens(49)))
    assert table_of(second) == [1, 2, 3, 5]
    small.cache.release_held(kept)
    assert small.ref_counts_of(second) == [1] * 4
    assert free_block_ids(small.pool) == [4, 6, 7, 8, 9, 10]


def test_66_what_a_window_has_given_back_is_not_held():
    small = SmallCache(20, groups=(FullAttention(2), SlidingWindow(2, 4)))
    running = small.admitted(request("a", tokens(7)))
    assert small.append(running, [99]) == []
    assert table_of(running, 1) == [0, 0, 7, 8]
    assert small.cache.hold(running) == [4, 3, 2, 1, 8, 7]


# Room for tokens whose KV comes from elsewhere, before their request is admitted (70).


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
    first = small.admitted(request("a", tokens(16)))
    small.cache.release(first)
    free = free_block_ids(small.pool)
    loaded = request("b", [*tokens(16), *tokens(60, 500)])
    # A matched block that no request holds, and three new ones.
    reserved = small.cache.reserve(loaded, 64)
    assert (reserved is not None) is is_reserved
    if not is_reserved:
        assert (loaded.block_tables, loaded.num_computed_tokens) == ([], 0)
        assert free_block_ids(small.pool) == free


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
    assert free_block_ids(small.pool) == [3, 2, 1, 4, 5]
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


# How many blocks a request can come to hold, and which are admitted with how many free (63 to 65).

LENGTH = 16_384


def _sized(num_usable: int, *groups: AttentionKind, **sizes: int) -> SmallCache:
    return SmallCache(
        num_usable + 1, groups=groups, **{"max_model_len": LENGTH, "max_in_flight_tokens": 1024, **sizes}
    )


def _num_at_once(small: SmallCache, num_tokens: int = LENGTH) -> float:
    """Requests of full length that the pool can hold at once."""
    return small.cache.num_total_blocks / small.cache.max_blocks_for(num_tokens)


def test_63_of_1536_blocks_one_and_a_half_requests_of_16384_tokens_can_be_held():
    small = _sized(1536, FullAttention(16))
    assert small.cache.max_blocks_for(LENGTH) == 1024
    assert _num_at_once(small) == 1.5


def test_63_a_window_of_1024_with_1024_tokens_a_step_needs_129_blocks():
    small = _sized(129 * 3, SlidingWindow(16, 1024))
    assert small.cache.max_blocks_for(LENGTH) == 129
    assert _num_at_once(small) == 3


def test_63_a_hybrid_needs_what_its_groups_need():
    small = _sized((1024 + 129) * 3, FullAttention(16), SlidingWindow(16, 1024))
    assert small.cache.max_blocks_for(LENGTH) == 1153
    assert _num_at_once(small) == 3


def test_63_three_hybrid_requests_really_fit_and_a_fourth_does_not():
    # The same with shorter sequences: 64 blocks of full attention, and 3 + 1 of a window and a step of 32.
    groups = FullAttention(16), SlidingWindow(16, 16)
    small = _sized((64 + 4) * 3, *groups, max_model_len=1024, max_in_flight_tokens=32)
    assert small.cache.max_blocks_for(1024) == 68
    running = [request(name, tokens(1024, 10_000 * index)) for index, name in enumerate("abc")]
    for holder in running:
        assert small.cache.admit(holder, PrefixHit(), 32, reserve_all=True) is not None
        holder.num_computed_tokens = 32
    for _ in range(31):
        for holder in running:
            assert small.compute(holder, 32) is not None
    assert [len(table) for holder in running for table in tables_of(holder)] == [64] * 6
    # Each window holds the block that the last step still read, and the two that it wrote.
    assert small.cache.num_free_blocks == 3
    assert small.cache.admit(request("d", tokens(1024, 90_000)), PrefixHit(), 32, reserve_all=True) is None


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_64_a_prompt_that_fits_to_the_last_block_is_taken_and_a_longer_one_is_not(
    num_tokens: int, num_blocks: int
):
    # The block counts by which a scheduler refuses at once what would otherwise wait for ever.
    small = SmallCache(num_blocks + 1)
    assert small.cache.max_blocks_for(num_tokens) == num_blocks
    assert small.admit(request("a", tokens(num_tokens)))
    if num_blocks > 1:
        smaller = SmallCache(num_blocks)
        assert smaller.cache.max_blocks_for(num_tokens) > smaller.cache.num_total_blocks
        assert not smaller.admit(request("b", tokens(num_tokens)))


def test_lookahead_counts_among_the_blocks_up_to_the_longest_sequence():
    small = SmallCache(10, block_size=4, num_lookahead_tokens=3, max_model_len=20)
    most = [small.cache.max_blocks_for(num_tokens) for num_tokens in (1, 2, 5, 6, 17, 18, 20)]
    assert most == [1, 2, 2, 3, 5, 5, 5]


def test_lookahead_counts_among_the_tokens_in_flight_of_a_window():
    sizes = {"block_size": 4, "max_model_len": 1000}
    counts = []
    for num_in_flight, num_lookahead in [(4, 0), (5, 0), (5, 1), (4, 2), (6, 3)]:
        small = SmallCache(
            10,
            groups=(SlidingWindow(4, 5),),
            num_lookahead_tokens=num_lookahead,
            max_in_flight_tokens=num_in_flight,
            max_model_len=sizes["max_model_len"],
        )
        counts.append(small.cache.max_blocks_for(500))
    # 4 tokens behind the next one, and what is ahead of it: 8, 9, 10, 10, 13.
    assert counts == [3, 4, 4, 4, 5]


def test_65_the_whole_prompt_has_to_fit_though_only_a_chunk_is_taken():
    # A pool of 5 blocks with the placeholder, a prompt of 256 tokens, a first chunk of 16.
    small = SmallCache(5)
    long = request("a", tokens(256))
    assert small.cache.admit(long, PrefixHit(), 16, reserve_all=True) is None
    assert (long.block_tables, free_block_ids(small.pool)) == ([], [1, 2, 3, 4])
    assert small.cache.admit(long, PrefixHit(), 16, reserve_all=False) == [[1]]


@pytest.mark.parametrize(("num_usable", "is_admitted"), [(6, True), (5, False)])
def test_65_who_has_blocks_already_needs_the_rest_alone(num_usable: int, is_admitted: bool):
    small = SmallCache(num_usable + 1)
    loaded = request("a", tokens(96))
    assert small.cache.reserve(loaded, 32) == [[1, 2]]
    gained = small.cache.admit(loaded, PrefixHit(), 16, reserve_all=True)
    assert gained == ([[3]] if is_admitted else None)
    assert table_of(loaded) == ([1, 2, 3] if is_admitted else [1, 2])


def test_room_for_all_is_never_less_than_room_for_the_chunk():
    # Lookahead makes the chunk the larger of the two.
    small = SmallCache(3, block_size=4, num_lookahead_tokens=5)
    short = request("a", tokens(4))
    assert small.cache.admit(short, PrefixHit(), 4, reserve_all=True) is None
    smaller = SmallCache(4, block_size=4, num_lookahead_tokens=5)
    assert smaller.cache.admit(short, PrefixHit(), 4, reserve_all=True) == [[1, 2, 3]]


@pytest.mark.parametrize(
    "kind",
    [FullAttention(4), SlidingWindow(4, 1), SlidingWindow(4, 6), SlidingWindow(2, 5), ChunkedLocal(4, 8)],
)
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 7])
@pytest.mark.parametrize("num_lookahead", [0, 2])
def test_no_request_ever_holds_more_than_it_was_said(kind, num_tokens, num_lookahead):
    small = SmallCache(
        60,
        groups=(kind,),
        enable_prefix_caching=False,
        num_lookahead_tokens=num_lookahead,
        max_in_flight_tokens=num_tokens,
        max_model_len=64,
    )
    running = request("a", tokens(64))
    assert small.cache.admit(running, PrefixHit(), num_tokens, reserve_all=True) is not None
    running.num_computed_tokens = num_tokens
    while running.num_computed_tokens + num_tokens <= 64:
        assert small.compute(running, num_tokens) is not None
        most = small.cache.max_blocks_for(running.num_computed_tokens)
        assert small.cache.num_used_blocks <= most


# Groups that read only a part of the tokens before: what they give back on the way, and what they hit.

WINDOW, CHUNKS = SlidingWindow(2, 4), ChunkedLocal(2, 4)


def _windowed(
    kind: AttentionKind, *, num_blocks: int = 20, caches: bool = True, max_in_flight_tokens: int = 100_000
) -> SmallCache:
    return SmallCache(
        num_blocks,
        groups=(kind,),
        enable_prefix_caching=caches,
        max_in_flight_tokens=max_in_flight_tokens,
    )


@pytest.mark.parametrize(
    ("num_in_flight", "num_released"), [(0, 4), (1, 3), (2, 3), (3, 2), (4, 2), (6, 1), (7, 0), (11, 0)]
)
def test_tokens_in_flight_still_read_behind_the_window(num_in_flight: int, num_released: int):
    # Rule 8 of the recorded version: what counts are the tokens that no step in flight computes.
    small = _windowed(WINDOW)
    running = small.admitted(request("a", tokens(11)))
    running.token_ids.append(99)
    assert small.compute(running, 1, num_in_flight=num_in_flight) == []
    assert table_of(running) == [0] * num_released + list(range(num_released + 1, 7))


def test_a_step_in_flight_takes_nothing_back_that_was_given():
    small = _windowed(WINDOW)
    running = small.admitted(request("a", tokens(11)))
    running.token_ids += tokens(2, 50)
    # With nothing said to be in flight, nothing is.
    assert small.cache.grow(running, 1) == []
    assert (table_of(running), running.block_tables[0].num_released) == ([0, 0, 0, 0, 5, 6], 4)
    running.num_computed_tokens += 1
    assert small.compute(running, 1, num_in_flight=12) == [7]
    assert (table_of(running), running.block_tables[0].num_released) == ([0, 0, 0, 0, 5, 6, 7], 4)


def test_a_growth_that_is_refused_has_given_back_all_the_same():
    small = _windowed(WINDOW, num_blocks=5)
    running = small.admitted(request("a", tokens(8)))
    assert free_block_ids(small.pool) == []
    running.token_ids += tokens(9, 50)
    assert small.cache.grow(running, 9) is None
    assert table_of(running) == [0, 0, 3, 4]
    assert free_block_ids(small.pool) == [2, 1]
    assert small.compute(running, 4) == [2, 1]


def test_58_with_chunks_alone_nothing_of_complete_chunks_is_computed():
    # No token of a later chunk depends on them, whether or not they are computed.
    small = _windowed(CHUNKS)
    first = small.admitted(request("a", tokens(11)))
    assert (first.num_cached_tokens, table_of(first)) == (8, [0, 0, 0, 0, 1, 2])
    assert small.pool.num_cached_keys == 1


@pytest.mark.parametrize(("held", "is_admitted"), [([1, 2, 3], True), ([1, 2, 3, 4], False)])
def test_only_the_blocks_that_are_read_count_as_taken(held: list[int], is_admitted: bool):
    small = _windowed(WINDOW, num_blocks=7)
    first = small.admitted(request("a", tokens(12)))
    small.cache.release(first)
    small.pool.hold(held)
    free = free_block_ids(small.pool)
    second = request("b", tokens(13))
    # Two matched blocks that no request holds, and one new.
    assert small.admit(second) is is_admitted
    assert table_of(second) == ([0, 0, 0, 0, 5, 6, 4] if is_admitted else [])
    assert free_block_ids(small.pool) == ([] if is_admitted else free)


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        (SlidingWindow(16, 32), 4),
        (SlidingWindow(16, 33), 4),
        (SlidingWindow(16, 34), 5),
        (ChunkedLocal(16, 48), 4),
    ],
)
def test_the_admission_gate_counts_what_a_window_holds_at_once(kind: AttentionKind, most: int):
    # Rule 9: ceil((31 + 16) / 16) + 1 = 4 of the 16 blocks that 256 tokens fill.
    for num_usable, expected in [(most, [[1]]), (most - 1, None)]:
        small = _windowed(kind, num_blocks=num_usable + 1, caches=False, max_in_flight_tokens=16)
        long = request("a", tokens(256))
        assert small.cache.max_blocks_for(256) == most
        assert small.cache.admit(long, small.cache.match_prefix(long), 16, reserve_all=True) == expected


def test_the_admission_gate_counts_all_blocks_of_a_short_prompt_behind_a_window():
    small = _windowed(SlidingWindow(16, 32), num_blocks=3, max_in_flight_tokens=1000)
    short, long = request("a", tokens(32)), request("b", tokens(33, 100))
    assert small.cache.admit(long, small.cache.match_prefix(long), 16, reserve_all=True) is None
    assert small.cache.admit(short, small.cache.match_prefix(short), 16, reserve_all=True) == [[1]]


def test_without_prefix_caching_a_chunk_may_have_any_length():
    small = SmallCache(
        30, groups=(ChunkedLocal(16, 40),), enable_prefix_caching=False, max_in_flight_tokens=16
    )
    assert small.cache.max_blocks_for(256) == 5


# What a cache is built with without options.


def test_by_default_beginnings_are_shared_whole_and_no_slot_lies_ahead():
    cache = KVCache(CacheConfig(11, (FullAttention(16),)), max_model_len=1000, max_in_flight_tokens=1000)
    first, second = request("a", tokens(48)), request("b", tokens(49))
    assert cache.admit(first, cache.match_prefix(first), 48, reserve_all=False) == [[1, 2, 3]]
    assert cache.match_prefix(second).num_tokens == 48
    assert table_of(first) == [1, 2, 3]
    assert (
        cache.hasher.root()
        == KVCache(
            CacheConfig(11, (FullAttention(16),), fingerprint=b""),
            max_model_len=1000,
            max_in_flight_tokens=1000,
        ).hasher.root()
    )


def test_blocks_with_which_all_requests_begin_are_counted_by_group():
    groups = (FullAttention(16), SlidingWindow(16, 64), ChunkedLocal(16, 64))
    small = SmallCache(100, groups=groups)
    requests = [small.admitted(request(name, [*tokens(64), index])) for index, name in enumerate("abc")]
    assert small.cache.num_common_blocks(requests) == [4, 0, 0]
    other = small.admitted(request("d", [*tokens(32), 7]))
    assert small.cache.num_common_blocks([*requests, other]) == [2, 0, 0]
    assert small.cache.num_common_blocks([other]) == []
    stranger = small.admitted(request("e", tokens(40, first=500)))
    assert small.cache.num_common_blocks([*requests, stranger]) == []
