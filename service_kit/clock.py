"""Sources of time: a protocol, the monotonic clock, and a clock that tests advance by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of seconds that never decrease; only differences have a meaning."""

    def now(self) -> float: ...


class MonotonicClock:
    """The system's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class FakeClock:
    """A clock that only moves by `advance`."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a clock cannot advance by {seconds} s")
        self._now_s += seconds
