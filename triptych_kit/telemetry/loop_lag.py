"""Lag of an event loop: how late it runs due callbacks, sampled by the loop itself. Knows no service."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from triptych_kit.clock import Clock
from triptych_kit.telemetry.metrics import Distribution

INTERVAL_S = 0.01
WINDOW_S = 20.0
LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


@dataclass(frozen=True, slots=True)
class LagSummary:
    """The lag over the window; all 0 before the first sample."""

    p50_ms: float
    p99_ms: float
    max_ms: float


class LoopLag:
    """A timer that fires every `interval_s` and records how late it was; the last `window_s` are kept.

    A loop that was blocked for many intervals gets one sample for each of them, so that a long stop has a
    weight proportional to its duration.
    """

    def __init__(self, clock: Clock, *, interval_s: float = INTERVAL_S, window_s: float = WINDOW_S) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self.distribution = Distribution(LAG_BUCKETS)  # of all samples since the start
        self._samples_s: deque[float] = deque(maxlen=max(1, round(window_s / interval_s)))
        self._due_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to sample the running loop. Without effect if it is sampling already."""
        if self._timer is None:
            self._due_at = self._clock.now() + self._interval_s
            self._schedule()

    def stop(self) -> None:
        """Stop sampling; the samples are kept."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def summary(self) -> LagSummary:
        ordered = sorted(self._samples_s)
        if not ordered:
            return LagSummary(0.0, 0.0, 0.0)
        last = len(ordered) - 1
        return LagSummary(
            p50_ms=ordered[last * 50 // 100] * 1000,
            p99_ms=ordered[-(-last * 99 // 100)] * 1000,
            max_ms=ordered[-1] * 1000,
        )

    def tick(self) -> None:
        """Record the samples due until now; the timer calls it."""
        now = self._clock.now()
        if now < self._due_at:
            # A loop with coarse timers may fire a little early, which counts as no lag.
            self._note(0.0)
            self._due_at += self._interval_s
            return
        num_due = 1 + int((now - self._due_at) / self._interval_s)
        # Samples older than the window would be dropped at once.
        for index in range(max(0, num_due - (self._samples_s.maxlen or 0)), num_due):
            self._note(now - (self._due_at + index * self._interval_s))
        self._due_at += num_due * self._interval_s

    def _note(self, lag_s: float) -> None:
        self._samples_s.append(lag_s)
        self.distribution.observe(lag_s)

    def _schedule(self) -> None:
        delay_s = max(0.0, self._due_at - self._clock.now())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._fire)

    def _fire(self) -> None:
        self.tick()
        self._schedule()
