"""Keeps children running: restarts with back-off and a limit, the wait for readiness, the end by a signal.

Knows no processes: a child may also run on another machine.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from triptych_kit.process.setup import stop_signals

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


@dataclass(frozen=True, slots=True)
class SupervisorLimits:
    """Timeouts and restart limits of a supervisor."""

    startup_s: float = 600.0
    stop_s: float = 25.0
    max_restarts: int = 3  # of one child within `restart_window_s`
    restart_window_s: float = 60.0
    restart_delay_s: float = 0.5  # doubles with each restart in the window


class Restarts:
    """Restarts of one child: a limited number within a window, with a delay that doubles each time.

    num_deaths: since it was first started.
    """

    def __init__(self, limits: SupervisorLimits) -> None:
        self.num_deaths = 0
        self._limits = limits
        self._begun_at: list[float] = []  # within the window

    def begin(self, now: float) -> float | None:
        """Count a death and its restart; returns the delay before it, or None if there were too many."""
        self.num_deaths += 1
        self._begun_at = [at for at in self._begun_at if now - at < self._limits.restart_window_s]
        if len(self._begun_at) == self._limits.max_restarts:
            return None
        delay_s: float = self._limits.restart_delay_s * 2 ** len(self._begun_at)
        self._begun_at.append(now)
        return delay_s

    @property
    def count(self) -> str:
        """The number of restarts and its limit, for messages."""
        return f"{len(self._begun_at)} of {self._limits.max_restarts}"

    @property
    def tries(self) -> str:
        """The limit, for the message when it is exceeded."""
        return f"{self._limits.max_restarts} restarts within {self._limits.restart_window_s:g} s"


async def until_ready(ready: Awaitable[object], ended: Awaitable[T], died: Callable[[T], Exception]) -> None:
    """Wait for `ready`; if `ended` completes first, raise `died` of its result."""
    becoming_ready, ending = asyncio.ensure_future(ready), asyncio.ensure_future(ended)
    try:
        await asyncio.wait((becoming_ready, ending), return_when=asyncio.FIRST_COMPLETED)
        if not becoming_ready.done():
            raise died(ending.result())
        becoming_ready.result()
    finally:
        for task in (becoming_ready, ending):
            task.cancel()
        await asyncio.gather(becoming_ready, ending, return_exceptions=True)


@contextmanager
def first_failure() -> Iterator[None]:
    """Around a TaskGroup: raise its first failure; the other tasks were cancelled or followed from it."""
    try:
        yield
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures


async def run_until_signal(
    work: Coroutine[None, None, None],
    *,
    stop: Callable[[signal.Signals | None], Awaitable[None]],
    hurry: Callable[[], Awaitable[None]],
    failures: tuple[type[E], ...],
    on_failure: Callable[[E], int],
) -> int:
    """Run `work` until it ends, or until SIGTERM, SIGINT or SIGHUP, then `stop`; returns the exit code.

    `stop` gets the signal, if it was one. A second signal calls `hurry` during `stop`. `on_failure` is called
    with one of `failures`, after `stop`, and returns the exit code.
    """
    hurrying: set[asyncio.Task[None]] = set()
    stopping: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()

    def on_signal(number: signal.Signals) -> None:
        if stopping.done():
            hurrying.add(asyncio.ensure_future(hurry()))
        else:
            stopping.set_result(number)

    loop, numbers = asyncio.get_running_loop(), stop_signals()
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    running = asyncio.ensure_future(work)
    failure: E | None = None
    try:
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    except failures as error:
        failure = error
    finally:
        running.cancel()
        await asyncio.wait((running,))
        await stop(stopping.result() if stopping.done() else None)
        for number in numbers:
            loop.remove_signal_handler(number)
    return 0 if failure is None else on_failure(failure)
