"""Sources of time: a protocol, the monotonic clock, and one that tests advance by hand. A timer of stalls."""

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


class StallTimer:
    """Adds up the time between looks at an unchanged value.

    Not the time since its last change: while this process is stopped, neither the looks nor what they look at
    go on.
    """

    def __init__(self, tick_s: float) -> None:
        self._longest_tick_s = 2 * tick_s
        self._looked_at: float | None = None
        self._value: object = None
        self._stalled_s = 0.0

    def look(self, value: object, now: float, since: float | None = None) -> float:
        """How long `value` has been seen unchanged. Called every `tick_s` or so.

        since: when it became what it is, if that is known: the time up to the look that finds it counts, too.
        """
        passed_s = 0.0 if self._looked_at is None else min(now - self._looked_at, self._longest_tick_s)
        if value == self._value:
            self._stalled_s += passed_s
        else:
            self._stalled_s = 0.0 if since is None else max(0.0, min(passed_s, now - since))
        self._looked_at, self._value = now, value
        return self._stalled_s
