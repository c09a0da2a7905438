"""States of recurrent layers: which are kept, what a hit takes over, and what happens where none is free."""

from __future__ import annotations

import pytest

from engine_svc.cache.attention import AlignedState, FullAttention, KeptState, SingleState
from engine_svc.cache.block_pool import held_blocks
from engine_svc.cache.config import CacheConfig
from engine_svc.cache.kv_cache import KVCache
from engine_svc.core.request import Request, RequestStatus
from tests.engine_svc.cache.doubles import EventLog
from tests.engine_svc.cache.fakes import request, tables_of, tokens
from tests.engine_svc.core_state import content_of

FIRST_SLOT = 100


class StateCache:
    """A cache of full attention and states, which admits and computes as a scheduler does."""

    def __init__(
        self, num_slots: int, *, interval: int = 64, caches: bool = True, observers: tuple[EventLog, ...] = ()
    ) -> None:
        config = CacheConfig(
            FIRST_SLOT,
            (FullAttention(4), KeptState(4, interval)),
            num_state_slots=num_slots,
            enable_prefix_caching=caches,
        )
        self.cache = KVCache(config, max_model_len=1000, max_in_flight_tokens=1000, observers=observers)

    def admit(self, admitted: Request, num_tokens: int | None = None) -> list[int] | None:
        """Compute the first tokens that are not cached; returns the new entries of the states' table."""
        hit = self.cache.match_prefix(admitted)
        num_tokens = admitted.num_tokens - hit.num_tokens if num_tokens is None else num_tokens
        new = self.cache.admit(admitted, hit, num_tokens, reserve_all=False)
        if new is None:
            return None
        admitted.num_computed_tokens += num_tokens
        admitted.move_to(RequestStatus.WAITING)
        admitted.move_to(RequestStatus.RUNNING)
        self.cache.take_registered()
        return self._slots(new)

    def compute(self, running: Request, num_tokens: int = 1) -> list[int]:
        """Compute further tokens, one after the other; returns the new entries."""
        entries = []
        for _ in range(num_tokens):
            if running.num_computed_tokens == running.num_tokens:
                running.token_ids.append(7)
            new = self.cache.grow(running, 1)
            assert new is not None
            running.num_computed_tokens += 1
            entries += self._slots(new)
        self.cache.take_registered()
        return entries

    def chunk(self, running: Request, num_tokens: int) -> list[int]:
        """Compute further tokens of a prompt in one step; returns the new entries."""
        new = self.cache.grow(running, num_tokens)
        assert new is not None
        running.num_computed_tokens += num_tokens
        self.cache.take_registered()
        return self._slots(new)

    def hit_of(self, token_ids: list[int], salt: str = "") -> int:
        return self.cache.match_prefix(request("asking", token_ids, salt=salt)).num_tokens

    @property
    def num_free_slots(self) -> int:
        return self.cache.pools[1].num_free_blocks

    def _slots(self, new: list[list[int]]) -> list[int]:
        return [block_id and block_id - FIRST_SLOT + 1 for block_id in new[1]] if new else []


def test_a_prompt_keeps_the_state_after_its_last_whole_block():
    small = StateCache(8)
    # One slot after 8 of 10 tokens, and the one that goes on.
    assert small.admit(request("a", tokens(10))) == [0, 2, 1]
    assert small.hit_of(tokens(10)) == small.hit_of(tokens(200)) == 8
    # A hit leaves one token to compute.
    assert small.hit_of(tokens(8)) == 0


def test_states_are_kept_at_every_interval():
    small = StateCache(8, interval=8)
    assert small.admit(request("a", tokens(30))) == [0, 5, 0, 4, 0, 3, 2, 1]
    assert [small.hit_of(tokens(num)) for num in (8, 9, 16, 17, 24, 25, 28, 29)] == [
        0,
        8,
        8,
        16,
        16,
        24,
        24,
        28,
    ]


def test_states_are_kept_more_densely_before_the_end_of_a_prompt():
    small = StateCache(16, interval=1000)
    small.admit(request("a", tokens(150)))
    # Every 16 tokens of the last 64, and the last whole block.
    kept = {small.hit_of(tokens(num)) for num in range(1, 151)}
    assert kept == {0, 96, 112, 128, 144, 148}


def test_where_slots_are_few_the_last_states_of_a_prompt_are_kept():
    small = StateCache(4, interval=8)
    small.admit(request("a", tokens(150)))
    assert {small.hit_of(tokens(num)) for num in range(1, 151)} == {0, 136, 144, 148}


def test_a_state_is_kept_where_a_prompt_parts_from_another():
    small = StateCache(16, interval=1000)
    head = tokens(200)
    small.cache.release(_admitted(small, request("a", [*head, *tokens(120, 300)])))
    assert small.hit_of([*head, 7]) == 0
    small.cache.release(_admitted(small, request("b", [*head, *tokens(120, 500)])))
    assert small.hit_of([*head, 7]) == 200


def test_chunks_keep_the_same_states_and_go_on_in_their_slot():
    small = StateCache(8, interval=8)
    chunked = request("a", tokens(30))
    assert small.admit(chunked, 5) == [0, 1]
    # The slot of the first chunk gets the state after 8 tokens, which is kept.
    assert small.chunk(chunked, 5) == [2]
    assert small.chunk(chunked, 5) == [2]
    assert [slot > 0 for slot in small.chunk(chunked, 15)] == [False, True, True, True]
    assert [small.hit_of(tokens(num)) for num in (9, 17, 25, 29)] == [8, 16, 24, 28]


def test_the_newest_whole_block_of_an_answer_is_kept_and_the_one_before_it_given_up():
    small = StateCache(8)
    running = request("a", tokens(10))
    small.admit(running)
    text = tokens(10) + [7] * 30
    for num_computed in range(11, 30):
        small.compute(running)
        assert small.hit_of(text) == num_computed // 4 * 4
        # That of the prompt, and at most the newest two.
        assert len([key for key in _contents(small) if key]) <= 3
    small.cache.release(running)
    assert (small.hit_of(text), small.num_free_slots) == (28, 8)


def test_a_running_request_holds_one_slot():
    small = StateCache(8)
    running = request("a", tokens(10))
    small.admit(running)
    small.compute(running, 2)
    assert small.num_free_slots == 7
    small.compute(running, 2)
    assert small.num_free_slots == 7


def test_where_no_slot_is_free_a_request_goes_on_in_its_own():
    small = StateCache(3)
    first, second, third = (request(name, tokens(10, at)) for name, at in (("a", 0), ("b", 100), ("c", 200)))
    for running in (first, second):
        small.admit(running)
        small.compute(running)
    # The state of the first prompt was the least recently used.
    assert (small.hit_of(tokens(10)), small.hit_of(tokens(10, 100))) == (0, 8)
    entries = small.admit(third)
    assert entries is not None and entries[:2] == [0, 0] and small.num_free_slots == 0
    own = tables_of(first)[1][-1]
    small.compute(first, 8)
    assert held_blocks(tables_of(first)[1]) == [own]
    assert small.hit_of([*tokens(10), *[7] * 20]) == 0
    small.cache.release(third)
    small.compute(first, 8)
    assert small.hit_of([*tokens(10), *[7] * 30]) == 24


def test_a_request_does_not_go_on_in_a_slot_that_another_one_reads():
    small = StateCache(3)
    first = request("a", tokens(12))
    small.admit(first, 12)
    small.compute(first, 4)
    text = [*tokens(12), *[7] * 4]
    second = _admitted(small, request("b", [*text, 1]))
    assert tables_of(second)[1][3] == tables_of(first)[1][-1]
    third = _admitted(small, request("c", [900]))
    first.token_ids.append(7)
    assert small.cache.grow(first, 1) is None
    small.cache.release(third)
    assert small.cache.grow(first, 1) is not None
    assert small.hit_of([*text, 1]) == 16


def test_a_hit_reads_the_kept_slot_and_writes_another():
    small = StateCache(8)
    small.cache.release(_admitted(small, request("a", tokens(10))))
    kept = tables_of(_admitted(small, second := request("b", tokens(20))))[1][1]
    assert content_of(small.cache, kept) is not None
    small.compute(second, 2)
    # It is as it was, and reused last of all.
    assert small.hit_of(tokens(9)) == 8
    assert kept not in tables_of(second)[1]


def test_a_hit_that_was_passed_stays_for_others():
    small = StateCache(8)
    small.cache.release(_admitted(small, request("a", tokens(10))))
    second = _admitted(small, request("b", tokens(20)))
    small.compute(second, 20)
    assert small.hit_of([*tokens(8), 1000, 1001]) == 8


def test_a_state_of_this_step_is_not_shared_in_it():
    small = StateCache(8)
    first, second = request("a", tokens(10)), request("b", tokens(10))
    hit = small.cache.match_prefix(first)
    assert small.cache.admit(first, hit, 10, reserve_all=False) is not None
    hit = small.cache.match_prefix(second)
    assert hit.num_tokens == 8
    assert small.cache.admit(second, hit, 2, reserve_all=False) is None
    small.cache.take_registered()
    assert small.cache.admit(second, hit, 2, reserve_all=False) is not None


def test_the_least_recently_used_state_is_given_up_first():
    small = StateCache(4)
    for number in range(3):
        small.cache.release(_admitted(small, request(f"r{number}", tokens(10, 100 * number))))
    small.cache.release(_admitted(small, request("again", tokens(10))))
    small.cache.release(_admitted(small, request("new", tokens(10, 900))))
    assert [small.hit_of(tokens(10, first)) for first in (0, 100, 200, 900)] == [8, 0, 8, 8]


def test_states_follow_salts_and_a_reset():
    small = StateCache(8)
    running = _admitted(small, request("a", tokens(10), salt="x"))
    assert (small.hit_of(tokens(10)), small.hit_of(tokens(10), salt="x")) == (0, 8)
    assert not small.cache.reset()
    small.cache.release(running)
    assert small.cache.reset()
    assert small.hit_of(tokens(10), salt="x") == 0
    assert small.num_free_slots == 8


def test_states_have_events_as_blocks_have():
    log = EventLog()
    small = StateCache(8, observers=(log,))
    small.admit(request("a", tokens(10)))
    stored = [event[1] for event in log.events if event[0] == "store"]
    assert [(each.group, len(each.block_hashes), each.token_ids) for each in stored] == [
        (0, 2, tokens(8)),
        (1, 1, tokens(4, 4)),
    ]
    assert stored[1].parent_hash == stored[0].block_hashes[0]


def test_states_of_withdrawn_tokens_are_dropped():
    small = StateCache(8)
    running = _admitted(small, request("a", tokens(10)))
    small.cache.release(running, 4)
    assert small.hit_of(tokens(10)) == 0
    broken = _admitted(small, request("b", tokens(10, 50)))
    small.compute(broken, 10)
    small.cache.release(broken, broken.num_computed_tokens)
    assert [key for key in _contents(small) if key] == []


def test_a_retained_request_keeps_the_state_at_its_end():
    small = StateCache(3)
    running = _admitted(small, request("a", tokens(10)))
    small.compute(running, 8)
    small.cache.retain("lot", running, running.num_computed_tokens)
    small.cache.release(running)
    for number in range(1, 5):
        small.cache.release(_admitted(small, request(f"r{number}", tokens(10, 100 * number))))
    assert small.hit_of([*tokens(10), *[7] * 20]) == 16
    small.cache.retained.release("lot")
    assert small.num_free_slots == 3


def test_without_a_prefix_cache_a_request_has_one_slot():
    small = StateCache(8, caches=False)
    running = request("a", tokens(100))
    small.admit(running)
    small.compute(running, 20)
    assert small.num_free_slots == 7
    assert len(set(filter(None, tables_of(running)[1]))) == 1


def test_an_interval_is_whole_blocks():
    with pytest.raises(ValueError, match="interval is 6, must be a multiple of 4"):
        KeptState(4, 6)


def test_two_groups_of_states_are_refused():
    config = CacheConfig(4, (KeptState(4, 4), KeptState(4, 8)), num_state_slots=4)
    with pytest.raises(ValueError, match="2 groups have states"):
        KVCache(config, max_model_len=10, max_in_flight_tokens=10)


@pytest.mark.parametrize("kind", [AlignedState(4), KeptState(4, 4)])
def test_no_matched_block_can_be_dropped(kind: AlignedState | KeptState):
    config = CacheConfig(4, (kind,), drop_last_matched_block=True, num_state_slots=4)
    with pytest.raises(ValueError, match="no matched block can be dropped"):
        KVCache(config, max_model_len=10, max_in_flight_tokens=10)


def test_a_single_state_is_never_cached():
    with pytest.raises(ValueError, match="prefix caching is on"):
        KVCache(CacheConfig(4, (SingleState(8),)), max_model_len=8, max_in_flight_tokens=8)


def _admitted(small: StateCache, admitted: Request) -> Request:
    assert small.admit(admitted) is not None
    return admitted


def _contents(small: StateCache) -> list[bytes | None]:
    pool = small.cache.pools[1]
    return [pool.content_of(block_id) for block_id in pool.block_ids]
