"""Restart policy with backoff, and a wait for readiness that also watches for the end. Knows no processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class Restarts:
    """Restarts of one process: at most `most` within a window, with a delay that doubles each time."""

    def __init__(self, *, most: int, window_s: float, delay_s: float) -> None:
        self._most = most
        self._window_s = window_s
        self._delay_s = delay_s
        self._begun_at: list[float] = []  # within the window

    def begin(self, now: float) -> float | None:
        """Count a restart; returns the delay before it, or None if there were too many."""
        self._begun_at = [at for at in self._begun_at if now - at < self._window_s]
        if len(self._begun_at) == self._most:
            return None
        delay_s: float = self._delay_s * 2 ** len(self._begun_at)
        self._begun_at.append(now)
        return delay_s

    @property
    def count(self) -> str:
        """The number of restarts and its limit, for messages."""
        return f"{len(self._begun_at)} of {self._most}"

    @property
    def tries(self) -> str:
        """The limit, for the message when it is exceeded."""
        return f"{self._most} restarts within {self._window_s:g} s"


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
