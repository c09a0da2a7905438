"""How long a frontend waits before it dials an engine again. Knows no stream."""

from __future__ import annotations

import random

from frontend_svc.engines.stream import StreamEnd
from service_kit.clock import Clock

_MIN_S = 0.1
_MAX_S = 1.0
# An engine of another version is another one after an upgrade only.
_INCOMPATIBLE_S = 5.0
# Who breaks sooner than this after being ready is not dialled any faster for having been ready.
_STEADY_S = 1.0


class ReconnectPause:
    """Grows with each visit that came to nothing, up to a second; short again after one that lasted."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pause_s = _MIN_S
        self._ready_at: float | None = None

    def note_ready(self) -> None:
        """The engine takes requests."""
        if self._ready_at is None:
            self._ready_at = self._clock.now()

    def after(self, end: StreamEnd) -> float:
        """Seconds to wait after a visit that ended so, with a share left to chance."""
        lasted = self._ready_at is not None and self._clock.now() - self._ready_at > _STEADY_S
        self._ready_at = None
        self._pause_s = _MIN_S if lasted else min(2 * self._pause_s, _MAX_S)
        pause_s = _INCOMPATIBLE_S if end is StreamEnd.INCOMPATIBLE else self._pause_s
        return pause_s * random.uniform(0.5, 1.0)
