"""How often what dies is started again, and what is said of one that dies before it is ready."""

from __future__ import annotations

import asyncio

import pytest

from launcher.serve.restarts import Restarts, until_ready


def test_each_restart_in_the_window_waits_twice_as_long_and_there_are_so_many() -> None:
    restarts = Restarts(most=3, window_s=60.0, delay_s=0.5)
    assert [restarts.begin(now) for now in (0.0, 1.0, 2.0)] == [0.5, 1.0, 2.0]
    assert restarts.count == "3 of 3"
    assert restarts.begin(59.0) is None
    assert restarts.tries == "3 restarts within 60 s"


def test_restarts_that_lie_before_the_window_are_forgotten() -> None:
    restarts = Restarts(most=2, window_s=60.0, delay_s=0.5)
    assert [restarts.begin(now) for now in (0.0, 30.0)] == [0.5, 1.0]
    assert restarts.begin(60.0) == 1.0
    assert restarts.count == "2 of 2"
    assert restarts.begin(200.0) == 0.5


class Died(Exception):
    """An end before it was ready."""


async def never() -> int:
    """It neither ends nor is ready."""
    await asyncio.Event().wait()
    return 0


async def at_once() -> int:
    """Ready, or ended with 3."""
    return 3


async def test_who_ends_before_it_is_ready_has_died_with_its_status() -> None:
    with pytest.raises(Died, match="3"):
        await until_ready(never(), at_once(), lambda status: Died(str(status)))
    await until_ready(at_once(), never(), lambda status: Died(str(status)))


async def test_an_error_while_waiting_is_handed_on() -> None:
    async def fail() -> int:
        raise OSError("the host is gone")

    for ready, ended in ((fail(), never()), (never(), fail())):
        with pytest.raises(OSError, match="the host is gone"):
            await until_ready(ready, ended, lambda status: Died(str(status)))
