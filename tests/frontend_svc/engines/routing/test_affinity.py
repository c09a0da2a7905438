"""Which requests meet at one engine, what moves when an engine goes, and when a favourite is left."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from frontend_svc.engines.routing.affinity import by_preference, favourite, prefix_affinity, prefix_hash
from frontend_svc.engines.routing.engine_info import EngineInfo, RoutingRequest

ENGINES = [EngineInfo(f"engine-{index}:50061", dp_rank=index) for index in range(8)]
KEYS = [b"session %d" % index for index in range(2000)]


def of_session(name: str = "s", prefix: bytes = b"") -> RoutingRequest:
    return RoutingRequest(num_prompt_tokens=100, session_id=name, prefix_hash=prefix)


def test_keys_spread_over_all_engines():
    counts = Counter(favourite(ENGINES, key).address for key in KEYS)
    assert len(counts) == 8 and max(counts.values()) < 1.25 * len(KEYS) / 8


def test_an_engine_that_goes_moves_its_own_keys_alone_and_one_that_comes_takes_its_share():
    before = {key: favourite(ENGINES, key) for key in KEYS}
    left = ENGINES[:3] + ENGINES[4:]
    for key, engine in before.items():
        after = favourite(left, key)
        assert after is engine or engine is ENGINES[3]
        if engine is ENGINES[3]:
            assert after is by_preference(ENGINES, key)[1]


def test_the_order_in_which_engines_are_known_says_nothing():
    assert [favourite(ENGINES, key) for key in KEYS] == [favourite(ENGINES[::-1], key) for key in KEYS]


def test_a_session_stays_whatever_its_prompts_and_the_turn():
    picks = {prefix_affinity(ENGINES, of_session(prefix=b"%d" % turn), turn).address for turn in range(50)}
    assert len(picks) == 1


def test_without_a_session_equal_first_blocks_meet_and_without_both_the_least_loaded_is_taken():
    picks = {prefix_affinity(ENGINES, of_session("", b"blocks"), turn).address for turn in range(50)}
    assert len(picks) == 1
    idle = [replace(engine, num_running=5) for engine in ENGINES[:3]] + [ENGINES[-1]]
    assert prefix_affinity(idle, of_session(""), 3) is ENGINES[-1]


def test_the_favourite_is_left_where_it_is_clearly_more_loaded_and_then_for_the_next_in_line():
    first, second = by_preference(ENGINES, b"s")[:2]

    def pick(**load: int) -> str:
        engines = [replace(engine, **load) if engine is first else engine for engine in ENGINES]
        return prefix_affinity(engines, of_session(), 0).address

    assert pick(num_running=3) == pick(num_waiting_tokens=900) == first.address
    assert pick(num_waiting_tokens=9000) == pick(num_waiting=40) == second.address


def test_all_engines_being_loaded_alike_moves_nothing():
    engines = [replace(engine, num_waiting=40, num_waiting_tokens=90_000) for engine in ENGINES]
    assert prefix_affinity(engines, of_session(), 0).address == by_preference(ENGINES, b"s")[0].address


def test_a_prefix_is_known_by_whole_steps_up_to_sixty_four_tokens():
    prompt = list(range(1, 200))
    assert prefix_hash(prompt[:15]) == b""
    assert prefix_hash(prompt[:16]) == prefix_hash(prompt[:31]) != prefix_hash(prompt[:32])
    assert prefix_hash(prompt[:64]) == prefix_hash(prompt) != prefix_hash(prompt[:63])
    assert prefix_hash([5, *prompt]) != prefix_hash(prompt)
