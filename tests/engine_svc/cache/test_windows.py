"""Groups that read only a part of the tokens before: what they give back on the way, and what they hit."""

from __future__ import annotations

import pytest

from engine_svc.cache.attention import AttentionKind, ChunkedLocal, SlidingWindow
from tests.engine_svc.cache.fakes import SmallCache, request, table_of, tokens

WINDOW, CHUNKS = SlidingWindow(2, 4), ChunkedLocal(2, 4)


def _small(
    kind: AttentionKind, *, num_blocks: int = 20, caches: bool = True, max_in_flight_tokens: int = 100_000
) -> SmallCache:
    return SmallCache(
        num_blocks,
        groups=(kind,),
        enable_prefix_caching=caches,
        max_in_flight_tokens=max_in_flight_tokens,
    )


@pytest.mark.parametrize(
    ("computed", "table"),
    [
        (3, [1, 2]),
        (4, [1, 2, 3]),
        (5, [0, 2, 3]),
        (6, [0, 2, 3, 4]),
        (7, [0, 0, 3, 4]),
        (11, [0, 0, 0, 0, 5, 6]),
    ],
)
def test_57_blocks_behind_the_window_are_given_back_before_the_next_token(computed: int, table: list[int]):
    small = _small(WINDOW)
    running = request("a", tokens(computed))
    assert small.admit(running)
    # Only what comes afterwards shows that they are not read again.
    assert table_of(running) == list(range(1, (computed + 1) // 2 + 1))
    small.append(running, [99])
    assert table_of(running) == table


@pytest.mark.parametrize(
    ("computed", "table"),
    [
        (3, [1, 2]),
        (4, [0, 0, 3]),
        (6, [0, 0, 3, 4]),
        (7, [0, 0, 3, 4]),
        (8, [0, 0, 0, 0, 5]),
        (12, [0, 0, 0, 0, 0, 0, 7]),
    ],
)
def test_58_blocks_of_complete_chunks_are_given_back_before_the_next_token(computed: int, table: list[int]):
    small = _small(CHUNKS)
    running = request("a", tokens(computed), skips_lookup=True)
    assert small.admit(running)
    small.append(running, [99])
    assert table_of(running) == table


@pytest.mark.parametrize(("caches", "free"), [(True, [7, 8, 9, 4, 3, 2, 1]), (False, [4, 3, 2, 1, 7, 8, 9])])
def test_57_of_what_is_given_back_the_later_blocks_are_free_first(caches: bool, free: list[int]):
    small = _small(WINDOW, num_blocks=10, caches=caches)
    running = request("a", tokens(11))
    assert small.admit(running)
    assert small.append(running, [99]) == []
    assert small.pool.free_block_ids == free
    assert running.block_tables[0].num_released == 4


def test_58_of_a_complete_chunk_the_later_blocks_are_free_first():
    small = _small(CHUNKS, num_blocks=10)
    running = request("a", tokens(12), skips_lookup=True)
    assert small.admit(running)
    assert small.append(running, [99]) == [7]
    assert small.pool.free_block_ids == [8, 9, 6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize(
    ("num_in_flight", "num_released"), [(0, 4), (1, 3), (2, 3), (3, 2), (4, 2), (6, 1), (7, 0), (11, 0)]
)
def test_tokens_in_flight_still_read_behind_the_window(num_in_flight: int, num_released: int):
    # Rule 8 of the recorded version: what counts are the tokens that no step in flight computes.
    small = _small(WINDOW)
    running = request("a", tokens(11))
    assert small.admit(running)
    running.token_ids.append(99)
    assert small.compute(running, 1, num_in_flight=num_in_flight) == []
    assert table_of(running) == [0] * num_released + list(range(num_released + 1, 7))


def test_a_step_in_flight_takes_nothing_back_that_was_given():
    small = _small(WINDOW)
    running = request("a", tokens(11))
    assert small.admit(running)
    running.token_ids += tokens(2, 50)
    # With nothing said to be in flight, nothing is.
    assert small.cache.grow(running, 1) == []
    assert (table_of(running), running.block_tables[0].num_released) == ([0, 0, 0, 0, 5, 6], 4)
    running.num_computed_tokens += 1
    assert small.compute(running, 1, num_in_flight=12) == [7]
    assert (table_of(running), running.block_tables[0].num_released) == ([0, 0, 0, 0, 5, 6, 7], 4)


def test_a_growth_that_is_refused_has_given_back_all_the_same():
    small = _small(WINDOW, num_blocks=5)
    running = request("a", tokens(8))
    assert small.admit(running)
    assert small.pool.free_block_ids == []
    running.token_ids += tokens(9, 50)
    assert small.cache.grow(running, 9) is None
    assert table_of(running) == [0, 0, 3, 4]
    assert small.pool.free_block_ids == [2, 1]
    assert small.compute(running, 4) == [2, 1]


@pytest.mark.parametrize(
    ("num_tokens", "table"),
    [
        (2, [7]),
        (3, [1, 7]),
        (5, [1, 2, 7]),
        (6, [1, 2, 7]),
        (7, [0, 2, 3, 7]),
        (12, [0, 0, 0, 4, 5, 7]),
        (13, [0, 0, 0, 0, 5, 6, 7]),
    ],
)
def test_56_a_second_request_holds_only_what_its_window_reads(num_tokens: int, table: list[int]):
    small = _small(WINDOW)
    first = request("a", tokens(12))
    assert small.admit(first)
    second = request("b", tokens(num_tokens))
    assert small.admit(second)
    assert table_of(second) == table
    num_matched = len(table) - 1
    held = [small.pool.ref_count(block_id) for block_id in range(1, 7)]
    assert held == [1 + (block_id in table) for block_id in range(1, 7)]
    counts = second.block_tables[0].num_registered, second.block_tables[0].num_released
    assert counts == (max(num_matched, num_tokens // 2), table.count(0))


def test_58_a_second_request_holds_only_its_chunk():
    small = _small(CHUNKS)
    assert small.admit(request("a", tokens(10), skips_lookup=True))
    for num_tokens, table in [(5, [0, 0, 6]), (7, [0, 0, 3, 7]), (9, [0, 0, 0, 0, 8])]:
        second = request(f"b{num_tokens}", tokens(num_tokens))
        assert small.admit(second)
        assert second.num_cached_tokens == (num_tokens - 1) // 2 * 2
        assert table_of(second) == table


def test_58_with_chunks_alone_nothing_of_complete_chunks_is_computed():
    # No token of a later chunk depends on them, whether or not anybody has computed them.
    small = _small(CHUNKS)
    first = request("a", tokens(11))
    assert small.admit(first)
    assert (first.num_cached_tokens, table_of(first)) == (8, [0, 0, 0, 0, 1, 2])
    assert small.pool.num_cached_keys == 1


def test_56_the_beginning_is_found_where_the_rest_is_gone():
    small = _small(WINDOW)
    first = request("a", tokens(12))
    assert small.admit(first)
    small.cache.release(first)
    for block_id, num_cached in [(6, 10), (4, 6), (2, 2), (1, 0)]:
        small.evict(block_id)
        assert small.cache.match_prefix(request("b", tokens(13))).num_tokens == num_cached


@pytest.mark.parametrize(("held", "is_admitted"), [([1, 2, 3], True), ([1, 2, 3, 4], False)])
def test_only_the_blocks_that_are_read_count_as_taken(held: list[int], is_admitted: bool):
    small = _small(WINDOW, num_blocks=7)
    first = request("a", tokens(12))
    assert small.admit(first)
    small.cache.release(first)
    small.pool.hold(held)
    free = small.pool.free_block_ids
    second = request("b", tokens(13))
    # Two matched blocks that nobody holds, and one new.
    assert small.admit(second) is is_admitted
    assert table_of(second) == ([0, 0, 0, 0, 5, 6, 4] if is_admitted else [])
    assert small.pool.free_block_ids == ([] if is_admitted else free)


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
        small = _small(kind, num_blocks=num_usable + 1, caches=False, max_in_flight_tokens=16)
        long = request("a", tokens(256))
        assert small.cache.max_blocks_for(256) == most
        assert small.cache.admit(long, small.cache.match_prefix(long), 16, reserve_all=True) == expected


def test_the_admission_gate_counts_all_blocks_of_a_short_prompt_behind_a_window():
    small = _small(SlidingWindow(16, 32), num_blocks=3, max_in_flight_tokens=1000)
    short, long = request("a", tokens(32)), request("b", tokens(33, 100))
    assert small.cache.admit(long, small.cache.match_prefix(long), 16, reserve_all=True) is None
    assert small.cache.admit(short, small.cache.match_prefix(short), 16, reserve_all=True) == [[1]]


@pytest.mark.parametrize(
    "kind",
    [
        SlidingWindow(16, 32),
        SlidingWindow(16, 33),
        SlidingWindow(16, 1),
        ChunkedLocal(16, 48),
    ],
)
@pytest.mark.parametrize("num_tokens", [16, 24, 15])
def test_a_request_that_passed_the_gate_runs_to_its_end_alone(kind: AttentionKind, num_tokens: int):
    most = kind.max_blocks(256, num_tokens)
    small = _small(kind, num_blocks=most + 1, caches=False, max_in_flight_tokens=num_tokens)
    long = request("a", tokens(256))
    hit = small.cache.match_prefix(long)
    assert small.cache.admit(long, hit, num_tokens, reserve_all=True) is not None
    long.num_computed_tokens = num_tokens
    while long.num_computed_tokens < 256:
        assert small.compute(long, min(num_tokens, 256 - long.num_computed_tokens)) is not None
    assert len(table_of(long)) == 16


@pytest.mark.parametrize("kind", [WINDOW, CHUNKS, SlidingWindow(2, 1), SlidingWindow(2, 7)])
@pytest.mark.parametrize("caches", [True, False])
def test_tables_only_grow_and_entries_become_placeholders_from_the_front(kind: AttentionKind, caches: bool):
    small = _small(kind, caches=caches)
    running = request("a", tokens(1))
    assert small.admit(running)
    before = table_of(running).copy()
    for token in range(1, 40):
        gained = small.append(running, [token])
        table = table_of(running)
        num_released = running.block_tables[0].num_released
        assert table[num_released : len(before)] == before[num_released:]
        assert table[len(before) :] == gained
        assert table[:num_released] == [0] * num_released
        assert 0 not in table[num_released:]
        assert num_released == kind.num_unread_tokens(token) // 2
        before = table.copy()


def test_without_prefix_caching_a_chunk_may_have_any_length():
    small = SmallCache(
        30, groups=(ChunkedLocal(16, 40),), enable_prefix_caching=False, max_in_flight_tokens=16
    )
    assert small.cache.max_blocks_for(256) == 5
