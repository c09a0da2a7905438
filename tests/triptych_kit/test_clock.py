from __future__ import annotations

import pytest

from triptych_kit.clock import FakeClock, MonotonicClock, StallTimer


def test_a_fake_clock_moves_only_when_advanced() -> None:
    clock = FakeClock(start_s=5.0)
    assert clock.now() == 5.0
    clock.advance(0.25)
    assert clock.now() == 5.25


def test_a_fake_clock_does_not_run_backwards() -> None:
    with pytest.raises(ValueError, match="cannot advance"):
        FakeClock().advance(-1)


def test_the_monotonic_clock_never_runs_backwards() -> None:
    clock = MonotonicClock()
    readings = [clock.now() for _ in range(100)]
    assert readings == sorted(readings)


# How long something stands still counts only while this process runs.


def test_an_unchanged_value_has_been_seen_since_the_look_that_found_it():
    timer = StallTimer(1.0)
    assert [timer.look("a", now) for now in (10.0, 11.0, 12.5)] == [0.0, 1.0, 2.5]
    assert [timer.look("b", now) for now in (13.0, 14.0)] == [0.0, 1.0]


def test_the_time_before_the_look_that_finds_a_value_counts_where_it_is_known():
    timer = StallTimer(1.0)
    assert timer.look("a", 10.0, 8.0) == 0.0
    assert [timer.look("b", 11.0, 10.75), timer.look("b", 12.0, 10.75)] == [0.25, 1.25]
    assert timer.look("c", 86_400.0, 13.0) == 2.0


def test_of_a_gap_between_two_looks_only_two_ticks_count():
    timer = StallTimer(1.0)
    assert [timer.look("a", now) for now in (0.0, 86_400.0, 86_401.0)] == [0.0, 2.0, 3.0]
