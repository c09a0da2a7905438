"""The lag of an event loop, with a clock that is turned by hand."""

from __future__ import annotations

import asyncio

import pytest

from triptych_kit.clock import FakeClock
from triptych_kit.telemetry.loop_lag import LagSummary, LoopLag


async def sampled(*steps_s: float, window_s: float = 20.0) -> LoopLag:
    """A lag after ticks so far apart; the loop itself never comes to the timer."""
    clock = FakeClock()
    lag = LoopLag(clock, interval_s=0.01, window_s=window_s)
    lag.start()
    for step_s in steps_s:
        clock.advance(step_s)
        lag.tick()
    lag.stop()
    return lag


def num_samples(lag: LoopLag) -> int:
    return sum(lag.distribution.counts)


async def test_a_tick_in_time_is_no_lag() -> None:
    lag = await sampled(*[0.01] * 5)
    assert num_samples(lag) == 5
    assert lag.summary().max_ms == pytest.approx(0.0, abs=1e-6)


async def test_a_late_tick_is_as_late_as_it_came() -> None:
    lag = await sampled(0.01, 0.014)
    assert lag.summary().max_ms == pytest.approx(4.0)


async def test_an_early_tick_is_not_late() -> None:
    lag = await sampled(0.009)
    assert (num_samples(lag), lag.summary().max_ms) == (1, 0.0)


async def test_a_long_stop_counts_for_all_that_was_due_in_it() -> None:
    lag = await sampled(0.01, 1.0)
    assert num_samples(lag) == 101
    assert lag.summary().max_ms == pytest.approx(990.0)
    assert lag.summary().p50_ms == pytest.approx(490.0, abs=11)
    assert lag.summary().p99_ms == pytest.approx(980.0, abs=11)


async def test_only_the_window_is_kept() -> None:
    lag = await sampled(5.0, *[0.01] * 10, window_s=0.1)
    assert lag.summary().max_ms == pytest.approx(0.0, abs=1e-6)


async def test_after_a_stop_longer_than_the_window_the_latest_are_kept() -> None:
    lag = await sampled(5.0, window_s=0.1)
    assert num_samples(lag) == 10
    assert lag.summary().max_ms == pytest.approx(90.0, abs=1e-6)


async def test_a_loop_that_runs_is_sampled_until_it_is_stopped() -> None:
    clock = FakeClock()
    lag = LoopLag(clock, interval_s=0.0001)
    lag.start()
    lag.start()
    async with asyncio.timeout(30):
        while num_samples(lag) < 3:
            clock.advance(0.0001)
            await asyncio.sleep(0)
    lag.stop()
    before = num_samples(lag)
    for _ in range(10):
        clock.advance(0.0001)
        await asyncio.sleep(0)
    assert num_samples(lag) == before


def test_before_the_first_sample_there_is_no_lag() -> None:
    assert LoopLag(FakeClock()).summary() == LagSummary(0.0, 0.0, 0.0)
