"""Delays between attempts to connect: a service that starts, or fails at once, is not asked too often."""

from __future__ import annotations

import random

from triptych_kit.clock import Clock

_FIRST_S = 0.1


class Backoff:
    """The delay doubles with each attempt, and starts anew after a connection that lasted for `steady_s`."""

    def __init__(self, clock: Clock, *, max_s: float = 1.0, steady_s: float = 0.0) -> None:
        self._clock = clock
        self._max_s = max_s
        self._steady_s = steady_s
        self._delay_s = _FIRST_S
        self._connected_at: float | None = None

    def note_connected(self) -> None:
        """Note that an attempt was successful; harmless while it lasts."""
        if self._connected_at is None:
            self._connected_at = self._clock.now()

    def next_s(self) -> float:
        """Seconds until the next attempt, with jitter: many clients must not all connect at one moment."""
        if self._connected_at is not None and self._clock.now() - self._connected_at >= self._steady_s:
            self._delay_s = _FIRST_S
        self._connected_at = None
        delay_s, self._delay_s = self._delay_s, min(2 * self._delay_s, self._max_s)
        return delay_s * random.uniform(0.5, 1.0)
