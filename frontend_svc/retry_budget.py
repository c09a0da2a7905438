"""How many requests may be sent again: a token bucket for all of them together. Knows no request."""

from __future__ import annotations

from service_kit.clock import Clock

_CAPACITY = 1024.0
_GIVEN_BACK = 0.1
_PER_SECOND = 1.0


class RetryBudget:
    """Starts full; a repetition takes one, a request that ends well gives back a tenth, a second gives one.

    So when most of what is sent again fails again, that dries up before it brings down what is left.
    """

    def __init__(self, clock: Clock, *, capacity: float = _CAPACITY) -> None:
        self._clock = clock
        self._capacity = capacity
        self._left = capacity
        self._filled_at = clock.now()

    @property
    def left(self) -> float:
        """How many repetitions there are left now."""
        now = self._clock.now()
        self._left = min(self._capacity, self._left + _PER_SECOND * (now - self._filled_at))
        self._filled_at = now
        return self._left

    def take(self) -> bool:
        """Take one; False, with nothing taken, when less than one is left."""
        if self.left < 1:
            return False
        self._left -= 1
        return True

    def give_back(self) -> None:
        """Note a request that ended well."""
        self._left = min(self._capacity, self._left + _GIVEN_BACK)
