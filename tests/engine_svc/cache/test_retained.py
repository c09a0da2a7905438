"""Blocks that are retained: found by later requests, not allocated meanwhile, never in the way of a reset."""

from __future__ import annotations

import pytest

from engine_svc.cache.attention import FullAttention, SlidingWindow
from tests.engine_svc.cache.fakes import SmallCache, request, table_of, tokens
from tests.engine_svc.core_state import free_block_ids


def ended(small: SmallCache, num_tokens: int, key: str, *, first: int = 0, num_retained: int = 1000) -> int:
    """A request ends and its blocks are retained; returns how many."""
    done = small.admitted(request(key, tokens(num_tokens, first)))
    num_blocks = small.cache.retain(key, done, num_retained)
    small.cache.release(done)
    return num_blocks


def test_full_blocks_stay_and_are_found_and_the_last_is_free():
    small = SmallCache(11)
    assert ended(small, 55, "a") == 3
    assert small.cache.num_used_blocks == 3
    following = small.admitted(request("b", tokens(70)))
    assert (following.num_cached_tokens, table_of(following)[:3]) == (48, [1, 2, 3])


def test_only_blocks_within_the_first_tokens_are_retained():
    small = SmallCache(11)
    assert ended(small, 55, "a", num_retained=47) == 2


def test_they_are_released_in_the_order_of_a_request():
    small = SmallCache(6)
    ended(small, 55, "a")
    assert small.cache.retained.release("a") == 3
    assert free_block_ids(small.pool)[-3:] == [3, 2, 1]
    assert "a" not in small.cache.retained


def test_a_block_of_two_lots_stays_with_the_second():
    small = SmallCache(11)
    ended(small, 40, "a")
    ended(small, 60, "b")
    assert small.cache.retained.num_blocks == 3
    assert small.cache.retained.release("a") == 0
    assert small.cache.retained.release("b") == 3
    assert small.cache.num_used_blocks == 0


def test_a_key_is_used_once():
    small = SmallCache(11)
    ended(small, 40, "a")
    with pytest.raises(ValueError, match="retained under 'a' already"):
        ended(small, 60, "a", first=500)


def test_blocks_that_were_never_cached_are_not_retained():
    small = SmallCache(11, enable_prefix_caching=False)
    assert ended(small, 55, "a") == 0
    assert len(small.cache.retained) == 0


def test_what_a_window_has_passed_is_not_retained():
    small = SmallCache(20, groups=(FullAttention(2), SlidingWindow(2, 4)))
    running = small.admitted(request("a", tokens(7)))
    assert small.append(running, [99]) == []
    assert small.cache.retain("a", running, 8) == 4 + 2


def test_a_reset_releases_them():
    small = SmallCache(11)
    ended(small, 40, "a")
    ended(small, 60, "b")
    assert small.cache.reset()
    assert (len(small.cache.retained), small.cache.num_used_blocks) == (0, 0)
    assert small.pool.num_cached_keys == 0


def test_a_reset_that_a_request_prevents_keeps_them():
    small = SmallCache(11)
    ended(small, 40, "a")
    # All of its blocks but one are retained as well.
    running = small.admitted(request("b", tokens(40)))
    assert not small.cache.reset()
    assert list(small.cache.retained) == ["a"]
    small.cache.release(running)
    assert small.cache.reset()
