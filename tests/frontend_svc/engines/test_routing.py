"""Which engine is picked, case by case."""

from __future__ import annotations

from dataclasses import replace

from frontend_svc.engines.routing import EngineInfo, pick_engine


def engine(name: str, waiting: int = 0, running: int = 0, *, rank: int = 0) -> EngineInfo:
    return EngineInfo(name, rank, waiting, running, num_unreported=0, num_in_flight=0)


def burst(engines: list[EngineInfo], num_requests: int, turn: int = 0) -> list[EngineInfo]:
    for index in range(num_requests):
        picked = pick_engine(engines, data_parallel_rank=None, turn=turn + index)
        assert picked is not None
        at = engines.index(picked)
        engines[at] = replace(
            picked, num_unreported=picked.num_unreported + 1, num_in_flight=picked.num_in_flight + 1
        )
    return engines


def test_no_engine_is_none():
    assert pick_engine([], data_parallel_rank=None, turn=0) is None


def test_least_loaded_wins_and_waiting_weighs_four():
    for loads, expected in (((5, 10), (0, 0)), 1), (((5, 10), (0, 20)), 1), (((1, 0), (0, 5)), 0):
        engines = [engine(str(index), *load) for index, load in enumerate(loads)]
        picked = pick_engine(engines, data_parallel_rank=None, turn=0)
        assert picked is engines[expected]


def test_ties_go_round():
    engines = [engine("a"), engine("b"), engine("c")]
    picks = [pick_engine(engines, data_parallel_rank=None, turn=turn) for turn in range(4)]
    assert picks == [engines[0], engines[1], engines[2], engines[0]]


def test_a_burst_spreads_before_and_after_a_report_that_knows_nothing():
    engines = burst([engine(name) for name in "abcd"], 4)
    assert [one.num_in_flight for one in engines] == [1, 1, 1, 1]
    engines = burst([replace(one, num_unreported=0) for one in engines], 4, turn=3)
    assert [one.num_in_flight for one in engines] == [2, 2, 2, 2]


def test_a_pinned_rank_is_obeyed():
    engines = [engine("a", rank=0), engine("b", waiting=50, rank=1)]
    assert pick_engine(engines, data_parallel_rank=1, turn=0) is engines[1]
    assert pick_engine(engines, data_parallel_rank=2, turn=0) is None


def test_a_held_engine_gets_requests_only_where_all_are_held():
    held, busy = replace(engine("held"), is_held=True), engine("busy", 9, 99)
    assert pick_engine([held, busy], data_parallel_rank=None, turn=0) is busy
    assert pick_engine([held], data_parallel_rank=None, turn=0) is held
