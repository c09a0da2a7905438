"""How often what dies is started again, the wait until it is ready, and how a signal ends the whole."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from triptych_kit.process.supervision import (
    Restarts,
    SupervisorLimits,
    first_failure,
    run_until_signal,
    until_ready,
)


def test_each_restart_in_the_window_waits_twice_as_long_and_there_are_so_many() -> None:
    restarts = Restarts(SupervisorLimits(max_restarts=3))
    assert [restarts.begin(now) for now in (0.0, 1.0, 2.0)] == [0.5, 1.0, 2.0]
    assert restarts.count == "3 of 3"
    assert restarts.begin(59.0) is None
    assert restarts.tries == "3 restarts within 60 s"


def test_restarts_that_lie_before_the_window_are_forgotten() -> None:
    restarts = Restarts(SupervisorLimits(max_restarts=2))
    assert [restarts.begin(now) for now in (0.0, 30.0)] == [0.5, 1.0]
    assert restarts.begin(60.0) == 1.0
    assert restarts.count == "2 of 2"
    assert restarts.begin(200.0) == 0.5


class Died(Exception):
    """An end before it was ready."""


async def never() -> int:
    await asyncio.Event().wait()
    return 0


async def at_once() -> int:
    return 3


async def test_a_child_that_ends_before_it_is_ready_has_died_with_its_status() -> None:
    with pytest.raises(Died, match="3"):
        await until_ready(never(), at_once(), lambda status: Died(str(status)))
    await until_ready(at_once(), never(), lambda status: Died(str(status)))


async def test_an_error_while_waiting_is_handed_on() -> None:
    async def fail() -> int:
        raise OSError("the host is gone")

    for ready, ended in ((fail(), never()), (never(), fail())):
        with pytest.raises(OSError, match="the host is gone"):
            await until_ready(ready, ended, lambda status: Died(str(status)))


async def test_the_first_failure_is_raised_alone() -> None:
    async def fail() -> None:
        raise OSError("the cause")

    async def run_both() -> None:
        with first_failure():
            async with asyncio.TaskGroup() as group:
                group.create_task(never())
                group.create_task(fail())

    with pytest.raises(OSError, match="the cause"):
        await run_both()


class Verb:
    """Remembers what was done to it."""

    def __init__(
        self,
        failure: Exception | None = None,
        *,
        number: signal.Signals = signal.SIGTERM,
        signals_at_stop: int = 0,
    ) -> None:
        self._number = number
        self.events: list[str] = []
        self._failure = failure
        self._signals_at_stop = signals_at_stop
        self._hurried = asyncio.Event()

    async def run(self, *, until_signal: bool) -> int:
        return await run_until_signal(
            self._work(until_signal),
            stop=self._stop,
            hurry=self._hurry,
            failures=(OSError,),
            on_failure=self._fail,
        )

    async def _work(self, until_signal: bool) -> None:
        if self._failure is not None:
            raise self._failure
        if until_signal:
            os.kill(os.getpid(), self._number)
            await asyncio.Event().wait()

    async def _stop(self, number: signal.Signals | None) -> None:
        self.events.append("stop")
        if self._signals_at_stop:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait_for(self._hurried.wait(), 10)

    def _fail(self, error: OSError) -> int:
        self.events.append(str(error))
        return 3

    async def _hurry(self) -> None:
        self.events.append("hurry")
        self._hurried.set()


async def test_a_signal_stops_the_work_and_a_second_one_hurries() -> None:
    verb = Verb(signals_at_stop=1)
    assert await verb.run(until_signal=True) == 0
    assert verb.events == ["stop", "hurry"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_each_signal_that_stops_a_service_stops_the_work(number: signal.Signals) -> None:
    verb = Verb(number=number)
    assert await verb.run(until_signal=True) == 0
    assert verb.events == ["stop"]
    assert not asyncio.get_running_loop().remove_signal_handler(number)


async def test_work_that_is_done_ends_the_verb() -> None:
    verb = Verb()
    assert await verb.run(until_signal=False) == 0
    assert verb.events == ["stop"]


async def test_a_failure_that_is_expected_has_its_exit_code_and_a_bug_is_raised() -> None:
    verb = Verb(OSError("no such host"))
    assert await verb.run(until_signal=False) == 3
    assert verb.events == ["stop", "no such host"]
    verb = Verb(ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        await verb.run(until_signal=False)
    assert verb.events == ["stop"]
