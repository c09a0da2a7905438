"""The kinds of attention: what is read again, how much is held at once, and what makes a hit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine_svc.cache.attention import (
    NEVER,
    AttentionKind,
    CachedBlock,
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    SlidingWindow,
)
from engine_svc.cache.prefix import PrefixHit
from tests.engine_svc.cache.fakes import SmallCache, request, tables_of, tokens
from tests.engine_svc.core_state import free_block_ids

FULL, WINDOW, CHUNKS, CROSS = FullAttention(2), SlidingWindow(2, 4), ChunkedLocal(2, 4), CrossAttention(2)


def _find_in(pattern: str) -> Callable[[int], CachedBlock | None]:
    """Blocks 10, 11, ... by their index, where the pattern says T."""
    known = pattern.replace(" ", "")
    return lambda index: [10 + index] if known[index] == "T" else None


def _hit(
    kind: AttentionKind, pattern: str, *, alignment: int = 2, drop_last: bool = False
) -> list[int | None]:
    num_blocks = len(pattern.replace(" ", ""))
    hit = kind.longest_hit(_find_in(pattern), num_blocks, alignment, drop_last=drop_last)
    return [None if found is None else found[0] for found in hit]


def test_who_follows_tokens():
    assert [kind.follows_tokens for kind in (FULL, WINDOW, CHUNKS, CROSS)] == [True, True, True, False]
    assert [kind.block_size for kind in (FULL, WINDOW, CHUNKS, CROSS)] == [2, 2, 2, 2]


def test_cross_attention_has_slots_for_the_encoder_and_the_others_for_their_tokens():
    assert [kind.num_slots(7, 3) for kind in (FULL, WINDOW, CHUNKS, CROSS)] == [7, 7, 7, 3]


@pytest.mark.parametrize("kind", [FULL, CROSS])
def test_full_and_cross_attention_read_everything_for_ever(kind: AttentionKind):
    assert kind.num_unread_tokens(1000) == 0
    assert kind.first_unreading(1) == NEVER


@pytest.mark.parametrize(
    "kind", [SlidingWindow(2, 1), WINDOW, SlidingWindow(2, 5), CHUNKS, ChunkedLocal(2, 7)]
)
@pytest.mark.parametrize("num_tokens", range(1, 12))
def test_the_first_time_when_tokens_are_unread_is_exact(kind: AttentionKind, num_tokens: int):
    first = kind.first_unreading(num_tokens)
    assert kind.num_unread_tokens(first) >= num_tokens
    assert kind.num_unread_tokens(first - 1) < num_tokens


@pytest.mark.parametrize("kind", [FULL, CROSS])
def test_full_and_cross_attention_hold_all_at_once(kind: AttentionKind):
    assert [kind.max_blocks(num_tokens, 1) for num_tokens in (0, 1, 2, 3, 100)] == [0, 1, 1, 2, 50]


def test_63_a_window_of_1024_with_1024_tokens_in_flight_needs_129_blocks():
    window = SlidingWindow(16, 1024)
    assert window.max_blocks(16_384, 1024) == 129
    # 1,023 before the next token and 1,024 in flight are 2,047: 128 blocks, and one as they begin anywhere.
    assert window.max_blocks(16_384, 1025) == 129
    assert window.max_blocks(16_384, 1026) == 130
    assert window.max_blocks(16_384, 1010) == 129
    assert window.max_blocks(16_384, 1009) == 128


@pytest.mark.parametrize(
    ("kind", "num_in_flight", "most"),
    [
        # 5 or 6 tokens at once are 3 blocks, 7 are 4; where they need not begin with a block, one more.
        (SlidingWindow(2, 4), 2, 4),
        (SlidingWindow(2, 4), 3, 4),
        (SlidingWindow(2, 4), 4, 5),
        (ChunkedLocal(2, 4), 1, 3),
        (ChunkedLocal(2, 4), 2, 3),
        (ChunkedLocal(2, 4), 3, 4),
        (ChunkedLocal(2, 5), 1, 4),
        (ChunkedLocal(2, 5), 2, 5),
    ],
)
def test_a_window_and_a_chunk_hold_so_much_at_once_and_never_more_than_the_tokens_fill(
    kind: AttentionKind, num_in_flight: int, most: int
):
    for num_tokens in range(20):
        assert kind.max_blocks(num_tokens, num_in_flight) == min(most, (num_tokens + 1) // 2)
    assert kind.max_blocks(100_000, num_in_flight) == most


@pytest.mark.parametrize("length", [0, -1])
def test_a_window_and_a_chunk_have_at_least_one_token(length: int):
    assert SlidingWindow(2, 1).window == ChunkedLocal(2, 1).chunk == 1
    with pytest.raises(ValueError, match=f"window is {length}, must be at least 1"):
        SlidingWindow(2, length)
    with pytest.raises(ValueError, match=f"chunk is {length}, must be at least 1"):
        ChunkedLocal(2, length)


def test_60_the_end_of_a_hit_may_be_every_third_block():
    assert _hit(WINDOW, "TTTTT", alignment=6) == [None, 11, 12]
    assert _hit(WINDOW, "TTFTTTTT", alignment=6) == [None] * 4 + [14, 15]
    assert _hit(WINDOW, "TTTTTTT", alignment=6, drop_last=True) == [None] * 4 + [14, 15]
    assert _hit(WINDOW, "TTTTTT", alignment=6, drop_last=True) == [None, 11, 12]


def test_cross_attention_never_hits():
    assert _hit(CROSS, "TTTT") == []


# KV of an encoder's output: room once for its length, and never found by token ids.

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
    running = small.admitted(request("a", tokens(5), num_encoder_tokens=10))
    assert tables_of(running) == [[1, 2], [3, 4, 5]]
    assert small.append(running, tokens(3)) == []
    assert small.append(running, [1]) == [6]
    assert small.append(running, tokens(20)) == [7, 8, 9, 10, 11]
    assert tables_of(running)[1] == [3, 4, 5]


@pytest.mark.parametrize(("num_encoder_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_the_room_is_that_of_the_encoders_tokens(num_encoder_tokens: int, num_blocks: int):
    small = _small()
    running = small.admitted(request("a", tokens(5), num_encoder_tokens=num_encoder_tokens))
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
    running = small.admitted(request("a", tokens(5)))
    assert tables_of(running) == [[1, 2], []]
    assert not small.admit(request("b", tokens(1)))


def test_only_tokens_end_the_quiet():
    small = _small(num_lookahead_tokens=1)
    running = small.admitted(request("a", tokens(5), num_encoder_tokens=3))
    # 8 slots, one of them ahead; the 4 slots of the encoder do not count.
    assert (running.room_until, running.quiet_until) == (7, 7)
    assert tables_of(running) == [[1, 2], [3]]


def test_the_encoders_blocks_come_back_with_the_others():
    small = _small(8)
    running = small.admitted(request("a", tokens(5), num_encoder_tokens=10))
    assert small.cache.cost_of_release(running) == (5, 5)
    small.cache.release(running)
    assert free_block_ids(small.pool) == [5, 4, 3, 2, 1, 6, 7]
