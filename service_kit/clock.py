"""Where time comes from: a protocol, the monotonic clock, and a clock that tests turn by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of seconds that never run backwards; only differences mean something."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        ...


class MonotonicClock:
    """The clock of the running process."""

    def now(self) -> float:
        """Seconds of the system's monotonic clock."""
        return time.monotonic()


class FakeClock:
    """A clock that stands still until it is told to advance."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Seconds it was advanced by, plus its start."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass. Time does not run backwards."""
        if seconds < 0:
            raise ValueError(f"a clock cannot advance by {seconds} s")
        self._now_s += seconds
