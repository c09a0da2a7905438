"""The limit on the messages of one session."""

from __future__ import annotations

import pytest

from coordinator_svc.membership.servicer import MAX_MESSAGES_PER_S, RateLimit
from service_kit.clock import FakeClock
from service_kit.errors import ResourceExhausted


def test_a_steady_session_is_never_ended() -> None:
    clock = FakeClock()
    limit = RateLimit(clock)
    for _ in range(10 * MAX_MESSAGES_PER_S):
        clock.advance(1 / MAX_MESSAGES_PER_S)
        limit.take()


def test_a_flood_is_ended_after_its_burst() -> None:
    limit = RateLimit(FakeClock())
    for _ in range(2 * MAX_MESSAGES_PER_S):
        limit.take()
    with pytest.raises(ResourceExhausted, match="messages a second"):
        limit.take()
