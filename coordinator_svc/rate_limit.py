"""How many messages one session may send. Knows nothing of their content."""

from __future__ import annotations

from service_kit.clock import Clock
from service_kit.errors import ResourceExhausted

MAX_MESSAGES_PER_S = 1000
_BURST = 2 * MAX_MESSAGES_PER_S


class RateLimit:
    """Ends a session that floods: more than a thousand messages a second for longer than a burst."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._num_left = float(_BURST)
        self._taken_at = clock.now()

    def take(self) -> None:
        """Count one message; raises ResourceExhausted when there were too many."""
        now = self._clock.now()
        self._num_left = min(_BURST, self._num_left + (now - self._taken_at) * MAX_MESSAGES_PER_S)
        self._taken_at = now
        if self._num_left < 1:
            raise ResourceExhausted(
                f"a session may send {MAX_MESSAGES_PER_S} messages a second", retry_after_ms=1000
            )
        self._num_left -= 1
