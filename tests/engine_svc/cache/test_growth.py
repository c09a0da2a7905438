"""Up to where nothing has to be done for a running request, and which of its content is registered when."""

from __future__ import annotations

import pytest

from engine_svc.cache.attention import NEVER, AttentionKind, ChunkedLocal, FullAttention, SlidingWindow
from engine_svc.cache.kv_cache import NO_BLOCKS
from engine_svc.cache.prefix import PrefixHit
from engine_svc.core.request import Request
from tests.engine_svc.cache.doubles import EventLog
from tests.engine_svc.cache.fakes import SmallCache, request, table_of, tables_of, tokens


def _limits(running: Request) -> tuple[int, int, int]:
    return running.room_until, running.registers_at, running.quiet_until


@pytest.mark.parametrize(
    ("num_tokens", "limits"),
    [
        # The last token that fills a block has to be planned aloud, the first of the next as well.
        (1, (4, 4, 3)),
        (3, (4, 4, 3)),
        (4, (4, 8, 4)),
        (5, (8, 8, 7)),
        (7, (8, 8, 7)),
        (8, (8, 12, 8)),
    ],
)
def test_a_request_is_quiet_up_to_the_end_of_its_block(num_tokens: int, limits: tuple[int, int, int]):
    small = SmallCache(10, block_size=4)
    running = request("a", tokens(num_tokens))
    assert small.admit(running)
    assert _limits(running) == limits


def test_without_prefix_caching_a_request_is_quiet_as_long_as_it_has_room():
    small = SmallCache(10, block_size=4, enable_prefix_caching=False)
    running = request("a", tokens(5))
    assert small.admit(running)
    assert _limits(running) == (8, NEVER, 8)
    assert small.append(running, tokens(3)) == []
    assert _limits(running) == (8, NEVER, 8)
    assert small.append(running, [1]) == [3]
    assert _limits(running) == (12, NEVER, 12)
    assert running.block_hashes == []


def test_lookahead_slots_are_taken_before_they_are_needed():
    small = SmallCache(10, block_size=4, num_lookahead_tokens=3, enable_prefix_caching=False)
    running = request("a", tokens(5))
    assert small.admit(running)
    assert (table_of(running), _limits(running)) == ([1, 2], (5, NEVER, 5))


@pytest.mark.parametrize(
    ("kind", "num_tokens", "room_until"),
    [
        (SlidingWindow(4, 6), 3, 4),
        (SlidingWindow(4, 6), 8, 8),
        (SlidingWindow(4, 6), 9, 9),
        (SlidingWindow(2, 7), 1, 2),
        (ChunkedLocal(4, 8), 8, 8),
        (SlidingWindow(4, 1), 3, 4),
        (SlidingWindow(4, 1), 4, 4),
    ],
)
def test_a_window_that_passes_a_block_ends_the_quiet(kind: AttentionKind, num_tokens: int, room_until: int):
    small = SmallCache(10, groups=(kind,), enable_prefix_caching=False)
    running = request("a", tokens(num_tokens))
    assert small.admit(running)
    assert running.room_until == room_until


def test_the_room_of_a_request_is_that_of_its_shortest_group():
    small = SmallCache(20, groups=(FullAttention(8), FullAttention(2)), enable_prefix_caching=False)
    running = request("a", tokens(5))
    assert small.admit(running)
    assert _limits(running) == (6, NEVER, 6)


def test_content_is_registered_by_the_group_that_fills_a_block_first():
    small = SmallCache(20, groups=(FullAttention(8), FullAttention(8)))
    running = request("a", tokens(5))
    assert small.admit(running)
    assert _limits(running) == (8, 8, 7)
    assert small.append(running, tokens(3)) == []
    assert [table.num_registered for table in running.block_tables] == [1, 1]
    assert _limits(running) == (8, 16, 8)


_SHAPES: list[tuple[AttentionKind, ...]] = [
    (FullAttention(4),),
    (SlidingWindow(4, 6),),
    (SlidingWindow(4, 1),),
    (FullAttention(4), SlidingWindow(4, 9)),
    (FullAttention(2), ChunkedLocal(2, 6)),
]


@pytest.mark.parametrize("groups", _SHAPES)
@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("num_lookahead", [0, 3])
def test_something_happens_behind_the_quiet_and_nothing_before(
    groups: tuple[AttentionKind, ...], caches: bool, num_lookahead: int
):
    log = EventLog()
    small = SmallCache(
        100,
        groups=groups,
        enable_prefix_caching=caches,
        num_lookahead_tokens=num_lookahead,
        observers=(log,),
    )
    running = request("a", tokens(1), skips_lookup=True)
    assert small.admit(running)
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
def test_who_asks_only_behind_the_quiet_misses_nothing(
    groups: tuple[AttentionKind, ...], drops_last: bool, num_tokens: int
):
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
        assert caches[1].pool.free_block_ids == caches[0].pool.free_block_ids
        assert caches[1].hashes_of(knowing) == caches[0].hashes_of(asking)


def test_a_request_that_has_room_gains_nothing():
    small = SmallCache(10, block_size=4)
    running = request("a", tokens(5))
    assert small.admit(running)
    running.token_ids += tokens(4, 5)
    assert small.cache.grow(running, 3) is NO_BLOCKS
    assert small.cache.grow(running, 4) == [[3]]


@pytest.mark.parametrize(("num_tokens", "num_registered"), [(3, 0), (4, 1), (7, 1), (8, 2)])
def test_a_chunk_registers_the_blocks_that_it_fills(num_tokens: int, num_registered: int):
    small = SmallCache(10, block_size=4)
    running = request("a", tokens(11))
    assert small.cache.admit(running, PrefixHit(), num_tokens, reserve_all=False) is not None
    assert running.block_tables[0].num_registered == num_registered
    assert small.pool.num_cached_keys == num_registered


@pytest.mark.parametrize(("num_drafts", "num_blocks"), [(0, 2), (1, 2), (2, 3), (6, 4)])
def test_drafts_have_room_but_are_not_registered(num_drafts: int, num_blocks: int):
    # 6 tokens are computed, one is known behind them, and drafts follow.
    small = SmallCache(10, block_size=4)
    running = request("a", tokens(6))
    assert small.admit(running)
    running.token_ids.append(99)
    assert small.cache.grow(running, 1 + num_drafts) is not None
    assert len(table_of(running)) == num_blocks
    assert (running.block_tables[0].num_registered, len(running.block_hashes)) == (1, 1)


def test_what_is_verified_later_is_registered_up_to_there():
    small = SmallCache(10, block_size=4)
    running = request("a", tokens(6))
    assert small.admit(running)
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
    running = request("a", tokens(6))
    assert small.admit(running)
    running.token_ids.append(6)
    assert small.cache.grow(running, 4) is not None
    running.token_ids += [700, 800]
    small.cache.commit(running, 8)
    assert small.cache.match_prefix(request("b", [*tokens(7), 7, 8, 9])).num_tokens == 4
    assert small.cache.match_prefix(request("c", [*tokens(7), 700, 8, 9])).num_tokens == 8


def test_without_prefix_caching_nothing_is_committed():
    small = SmallCache(10, block_size=4, enable_prefix_caching=False)
    running = request("a", tokens(8))
    assert small.admit(running)
    small.cache.commit(running, 8)
    assert (running.block_hashes, running.block_tables[0].num_registered) == ([], 0)


def test_a_released_request_has_no_room_left():
    small = SmallCache(10, block_size=4)
    running = request("a", tokens(6))
    assert small.admit(running)
    small.cache.release(running)
    assert (_limits(running), running.block_tables) == ((0, 0, 0), [])
    small.cache.release(running)
    assert small.cache.num_used_blocks == 0
    running.num_computed_tokens = 0
    assert small.admit(running)
    assert (table_of(running), _limits(running)) == ([1, 2], (8, 8, 7))
