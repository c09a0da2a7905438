"""Retries of calls that failed before their first message: whether, and when. Makes no call itself.

gRPC's own retries are not enough: they end with the response headers, which a frontend sends before it knows
whether it accepts a request, and they ignore RetryInfo.
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
    """Retries UNAVAILABLE, undelivered calls, and RESOURCE_EXHAUSTED with a retry delay.

    `max_attempts` includes the first one; 1 disables retries. The wait doubles from `first_backoff_s` up to
    `max_backoff_s`, is reduced by a random share of at most half, and is added to the server's retry delay.
    There is no retry if the server's delay is longer than `max_retry_after_s`.
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
        # A frontend that has not noticed the broken connection still has the request id in flight.
        is_own_id = error.status is grpc.StatusCode.ALREADY_EXISTS and num_attempts > 1
        return is_own_id or error.status is grpc.StatusCode.UNAVAILABLE or is_undelivered(error)

    def backoff_s(self, num_attempts: int, chance: float) -> float:
        """How long to wait after `num_attempts`; `chance` is drawn from 0 to 1."""
        # A larger exponent cannot make the wait longer, but could overflow.
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
        """Begin the first attempt. `timeout_s` None is no deadline; `draw` returns numbers from 0 to 1."""
        self.policy = policy
        self._now = now
        self._draw = draw
        self._ends_at = None if timeout_s is None else now() + timeout_s
        self._num_attempts = 1

    def remaining_s(self, delay_s: float = 0.0) -> float | None:
        """The time left `delay_s` from now; None without a deadline."""
        return None if self._ends_at is None else max(0.0, self._ends_at - self._now() - delay_s)

    def now(self) -> float:
        return self._now()

    def next_after_s(self, error: TriptychError) -> float:
        """How long to wait before the next attempt; raises `error` if there is none."""
        if not self.policy.is_retried(error, self._num_attempts):
            raise error
        delay_s = (error.retry_after_ms or 0) / 1000 + self.backoff_s(self._num_attempts)
        if not self.has_time_for(delay_s):
            raise error
        self._num_attempts += 1
        return delay_s

    def backoff_s(self, num_attempts: int) -> float:
        """How long to wait after `num_attempts` without an answer."""
        return self.policy.backoff_s(num_attempts, self._draw())

    def has_time_for(self, delay_s: float) -> bool:
        """Whether the deadline is later than `delay_s` from now."""
        return self.remaining_s(delay_s) != 0.0
