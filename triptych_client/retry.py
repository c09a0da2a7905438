"""Whether, and when, a call that failed before its first message is made again. Makes no call itself.

gRPC's own retries are not enough: they end with the answer's headers, which a frontend sends before it knows
whether it takes a request, and they know no RetryInfo.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from triptych_client.errors import TriptychError, is_undelivered

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """What is tried again: UNAVAILABLE, what nobody heard, RESOURCE_EXHAUSTED that says when to come back.

    `max_attempts` counts the first one; 1 tries nothing again. The wait doubles from `first_backoff_s` up to
    `max_backoff_s`, is shortened by chance to no less than half, and comes on top of what the server asks
    for. A server that asks for more than `max_retry_after_s` is not waited for.
    """

    max_attempts: int = 3
    first_backoff_s: float = 0.1
    max_backoff_s: float = 2.0
    max_retry_after_s: float = 30.0

    def is_retried(self, error: TriptychError, num_attempts: int) -> bool:
        """Whether there is another attempt after `num_attempts`, of which the last failed with `error`."""
        if num_attempts >= self.max_attempts or (error.retry_after_ms or 0) > self.max_retry_after_s * 1000:
            return False
        if error.status is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return error.retry_after_ms is not None
        # A frontend that has not noticed yet that the connection broke still has the id in flight.
        is_own_id = error.status is grpc.StatusCode.ALREADY_EXISTS and num_attempts > 1
        return is_own_id or error.status is grpc.StatusCode.UNAVAILABLE or is_undelivered(error)

    def backoff_s(self, num_attempts: int, chance: float) -> float:
        """How long to wait after `num_attempts`; `chance` is drawn from 0 to 1."""
        # A larger exponent would be no longer wait, and one without end no number.
        longest = self.first_backoff_s * 2.0 ** min(num_attempts - 1, 30)
        return min(longest, self.max_backoff_s) * (0.5 + 0.5 * chance)


class Attempts:
    """The attempts of one call, within its deadline."""

    def __init__(
        self,
        policy: RetryPolicy,
        timeout_s: float | None,
        *,
        now: Clock = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """Begin the first attempt. `timeout_s` None is no deadline; `draw` gives chances from 0 to 1."""
        self.policy = policy
        self._now = now
        self._draw = draw
        self._ends_at = None if timeout_s is None else now() + timeout_s
        self._num_attempts = 1

    def remaining_s(self, delay_s: float = 0.0) -> float | None:
        """How long the call may still take `delay_s` from now; None is without end."""
        return None if self._ends_at is None else max(0.0, self._ends_at - self._now() - delay_s)

    def now(self) -> float:
        """The time, in seconds since some instant."""
        return self._now()

    def next_after_s(self, error: TriptychError) -> float:
        """How long to wait before the next attempt; raises `error` where there is none."""
        if not self.policy.is_retried(error, self._num_attempts):
            raise error
        delay_s = (error.retry_after_ms or 0) / 1000 + self.backoff_s(self._num_attempts)
        if not self.has_time_for(delay_s):
            raise error
        self._num_attempts += 1
        return delay_s

    def backoff_s(self, num_attempts: int) -> float:
        """How long to wait after `num_attempts` that nobody answered."""
        return self.policy.backoff_s(num_attempts, self._draw())

    def has_time_for(self, delay_s: float) -> bool:
        """Whether the deadline is later than `delay_s` from now."""
        return self.remaining_s(delay_s) != 0.0
