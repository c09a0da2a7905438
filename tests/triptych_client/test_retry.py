"""When a call is made again: by status, by count, by the server's word and within the deadline."""

from __future__ import annotations

import grpc
import pytest

from service_kit.clock import FakeClock
from triptych_client.errors import TriptychError
from triptych_client.retry import Attempts, RetryPolicy

POLICY = RetryPolicy(max_attempts=4, first_backoff_s=0.1, max_backoff_s=0.3, max_retry_after_s=5.0)


def failure(status: grpc.StatusCode, retry_after_ms: int | None = None) -> TriptychError:
    return TriptychError(status, "no", retry_after_ms=retry_after_ms)


UNAVAILABLE = failure(grpc.StatusCode.UNAVAILABLE)
EXHAUSTED, EXISTS = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ALREADY_EXISTS


@pytest.mark.parametrize("status", list(grpc.StatusCode))
def test_only_what_may_pass_is_tried_again(status: grpc.StatusCode) -> None:
    assert POLICY.is_retried(failure(status), 1) == (status is grpc.StatusCode.UNAVAILABLE)
    assert POLICY.is_retried(failure(status, 10), 1) == (
        status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
    )


@pytest.mark.parametrize(
    ("message", "is_retried"),
    [
        ("CANCELLED", True),
        ("Received RST_STREAM with error code 8", True),
        ("Locally cancelled by application!", False),
        ("Channel closed!", False),
    ],
)
def test_what_a_server_that_stops_has_not_looked_at_is_tried_again(message: str, is_retried: bool) -> None:
    error = TriptychError(grpc.StatusCode.CANCELLED, message)
    assert POLICY.is_retried(error, 1) == is_retried
    told = TriptychError(grpc.StatusCode.CANCELLED, message, reason="CANCELLED")
    assert not POLICY.is_retried(told, 1)


def test_the_own_id_of_an_earlier_attempt_is_waited_out() -> None:
    assert not POLICY.is_retried(failure(EXISTS), 1)
    assert POLICY.is_retried(failure(EXISTS), 2)


def test_the_wait_doubles_to_its_limit_and_chance_halves_it() -> None:
    assert [POLICY.backoff_s(number, 1.0) for number in (1, 2, 3, 4, 10_000)] == [0.1, 0.2, 0.3, 0.3, 0.3]
    assert POLICY.backoff_s(2, 0.0) == 0.1


def test_attempts_end_with_the_last_error() -> None:
    attempts = Attempts(POLICY, None, draw=lambda: 1.0)
    assert [attempts.next_after_s(UNAVAILABLE) for _ in range(3)] == [0.1, 0.2, 0.3]
    with pytest.raises(TriptychError) as caught:
        attempts.next_after_s(UNAVAILABLE)
    assert caught.value is UNAVAILABLE


def test_the_server_is_never_asked_earlier_than_it_said() -> None:
    attempts = Attempts(POLICY, None, draw=lambda: 0.0)
    assert attempts.next_after_s(failure(EXHAUSTED, 4000)) == 4.05
    with pytest.raises(TriptychError):
        attempts.next_after_s(failure(EXHAUSTED, 5001))


def test_no_wait_reaches_the_deadline() -> None:
    clock = FakeClock()
    attempts = Attempts(POLICY, 1.0, now=clock.now, draw=lambda: 1.0)
    clock.advance(0.85)
    assert attempts.next_after_s(UNAVAILABLE) == 0.1
    assert attempts.remaining_s(0.1) == pytest.approx(0.05)
    clock.advance(0.1)
    with pytest.raises(TriptychError):
        attempts.next_after_s(UNAVAILABLE)
    clock.advance(0.1)
    assert attempts.remaining_s() == 0.0
