"""How many blocks a request can come to hold, and who is admitted with how many free (63 to 65)."""

from __future__ import annotations

import pytest

from engine_svc.cache.attention import AttentionKind, ChunkedLocal, FullAttention, SlidingWindow
from engine_svc.cache.prefix import PrefixHit
from tests.engine_svc.cache.fakes import SmallCache, request, table_of, tables_of, tokens

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
    assert (long.block_tables, small.pool.free_block_ids) == ([], [1, 2, 3, 4])
    assert small.cache.admit(long, PrefixHit(), 16, reserve_all=False) == [[1]]


@pytest.mark.parametrize(("num_tokens", "is_admitted"), [(64, True), (65, False)])
def test_65_the_gate_is_exact(num_tokens: int, is_admitted: bool):
    small = SmallCache(5)
    long = request("a", tokens(num_tokens))
    gained = small.cache.admit(long, PrefixHit(), 16, reserve_all=True)
    assert gained == ([[1]] if is_admitted else None)
    assert table_of(long) == ([1] if is_admitted else [])


@pytest.mark.parametrize(("num_lookahead", "is_admitted"), [(0, True), (16, True), (48, True), (49, False)])
def test_65_the_gate_asks_for_lookahead_slots_behind_the_chunk_alone(num_lookahead: int, is_admitted: bool):
    small = SmallCache(5, num_lookahead_tokens=num_lookahead)
    long = request("a", tokens(64))
    admitted = small.cache.admit(long, PrefixHit(), 16, reserve_all=True) is not None
    assert admitted is is_admitted


@pytest.mark.parametrize(("num_held", "is_admitted"), [(0, True), (1, True), (2, False)])
def test_65_matched_blocks_that_somebody_holds_need_no_room(num_held: int, is_admitted: bool):
    small = SmallCache(7)
    sharing = request("a", tokens(33))
    assert small.admit(sharing)
    small.pool.allocate(num_held)
    # Blocks 1 and 2 are matched; of 4 others that it wants, and 3 are free.
    long = request("b", [*tokens(32), *tokens(32, 500)])
    hit = small.cache.match_prefix(long)
    assert hit.num_tokens == 32
    assert (small.cache.admit(long, hit, 16, reserve_all=True) is not None) is is_admitted


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
def test_no_request_ever_holds_more_than_it_was_said(
    kind: AttentionKind, num_tokens: int, num_lookahead: int
):
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
