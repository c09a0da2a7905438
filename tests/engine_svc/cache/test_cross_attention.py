"""KV of an encoder's output: room once for its length, and never found by token ids."""

from __future__ import annotations

import pytest

from engine_svc.cache.attention import CrossAttention, FullAttention
from engine_svc.cache.prefix import PrefixHit
from tests.engine_svc.cache.fakes import SmallCache, request, tables_of, tokens

GROUPS = FullAttention(4), CrossAttention(4)


def _small(num_blocks: int = 30, *, num_lookahead_tokens: int = 0) -> SmallCache:
    return SmallCache(
        num_blocks, groups=GROUPS, enable_prefix_caching=False, num_lookahead_tokens=num_lookahead_tokens
    )


def test_prefix_caching_is_refused():
    with pytest.raises(ValueError, match="prefix caching is on, but KV of one group depends on more"):
        SmallCache(30, groups=GROUPS)
    with pytest.raises(ValueError, match="prefix caching is on"):
        SmallCache(30, groups=(CrossAttention(4),))


def test_room_is_taken_at_admission_for_the_whole_output_of_the_encoder_and_never_again():
    small = _small()
    running = request("a", tokens(5), num_encoder_tokens=10)
    assert small.admit(running)
    assert tables_of(running) == [[1, 2], [3, 4, 5]]
    assert small.append(running, tokens(3)) == []
    assert small.append(running, [1]) == [6]
    assert small.append(running, tokens(20)) == [7, 8, 9, 10, 11]
    assert tables_of(running)[1] == [3, 4, 5]


@pytest.mark.parametrize(("num_encoder_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_the_room_is_that_of_the_encoders_tokens(num_encoder_tokens: int, num_blocks: int):
    small = _small()
    running = request("a", tokens(5), num_encoder_tokens=num_encoder_tokens)
    assert small.admit(running)
    assert len(tables_of(running)[1]) == num_blocks
    assert small.cache.max_blocks_for(5, num_encoder_tokens) == 2 + num_blocks
    assert small.cache.max_blocks_for(5) == 2


def test_a_chunk_of_the_prompt_has_room_for_all_of_the_encoder():
    small = _small()
    running = request("a", tokens(20), num_encoder_tokens=10)
    assert small.cache.admit(running, PrefixHit(), 4, reserve_all=True) == [[1], [2, 3, 4]]
    running.num_computed_tokens = 4
    assert small.cache.grow(running, 4) == [[5], []]


@pytest.mark.parametrize(("num_usable", "is_admitted"), [(5, True), (4, False)])
def test_the_encoders_room_is_part_of_what_admission_needs(num_usable: int, is_admitted: bool):
    small = _small(num_usable + 1)
    assert small.admit(request("a", tokens(5), num_encoder_tokens=10)) is is_admitted


def test_without_an_encoder_only_tokens_need_room():
    small = _small(3)
    running = request("a", tokens(5))
    assert small.admit(running)
    assert tables_of(running) == [[1, 2], []]
    assert not small.admit(request("b", tokens(1)))


def test_only_tokens_end_the_quiet():
    small = _small(num_lookahead_tokens=1)
    running = request("a", tokens(5), num_encoder_tokens=3)
    assert small.admit(running)
    # 8 slots, one of them ahead; the 4 slots of the encoder do not count.
    assert (running.room_until, running.quiet_until) == (7, 7)
    assert tables_of(running) == [[1, 2], [3]]


def test_the_encoders_blocks_come_back_with_the_others():
    small = _small(8)
    running = request("a", tokens(5), num_encoder_tokens=10)
    assert small.admit(running)
    assert small.cache.cost_of_release(running) == (5, 5)
    small.cache.release(running)
    assert small.pool.free_block_ids == [5, 4, 3, 2, 1, 6, 7]
