from __future__ import annotations

import pytest

from service_kit.clock import FakeClock, MonotonicClock


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
