"""What follows when a stream fails: another attempt, a Resume, or its error."""

from __future__ import annotations

import grpc
import pytest

from service_kit.clock import FakeClock
from triptych.api.v1 import generate_pb2, inference_pb2
from triptych_client.errors import TriptychError
from triptych_client.events import Delta, Event, Started, to_event
from triptych_client.retry import Attempts, RetryPolicy
from triptych_client.stream_plan import NextCall, StreamPlan

BREAK = TriptychError(grpc.StatusCode.UNAVAILABLE, "Socket closed")
UNHEARD = TriptychError(grpc.StatusCode.CANCELLED, "CANCELLED")
LEAVES = TriptychError(grpc.StatusCode.UNAVAILABLE, "shutting down", reason="DRAINING", retry_after_ms=1000)
GONE = TriptychError(grpc.StatusCode.NOT_FOUND, "no such stream", reason="NOT_FOUND")
POLICY = RetryPolicy(max_attempts=2, first_backoff_s=0.1)


def plan(
    *, grace_s: float = 1.0, timeout_s: float | None = None, clock: FakeClock | None = None
) -> StreamPlan[Event]:
    attempts = Attempts(POLICY, timeout_s, now=(clock or FakeClock()).now, draw=lambda: 1.0)
    return StreamPlan(to_event, attempts, grace_s=grace_s)


def started(token: str = "t") -> generate_pb2.GenerateResponse:
    return generate_pb2.GenerateResponse(
        position=1, started=generate_pb2.Started(request_id="r", resume_token=token)
    )


def delta(position: int) -> generate_pb2.GenerateResponse:
    """The message of a position from 2 on: two characters of text, one token."""
    text = generate_pb2.Delta(text=f"é{position}", token_ids=[position])
    return generate_pb2.GenerateResponse(position=position, delta=text)


def resume_after(position: int) -> inference_pb2.ResumeRequest:
    received = inference_pb2.ReceivedOutput(num_tokens=position - 1, num_characters=2 * (position - 1))
    return inference_pb2.ResumeRequest(
        resume_token="t", last_position=position, received=[received] if position > 1 else []
    )


def test_before_the_first_message_the_call_is_made_again() -> None:
    stream = plan()
    assert stream.after_error(BREAK) == NextCall(0.1, None, None)
    with pytest.raises(TriptychError) as caught:
        stream.after_error(BREAK)
    assert caught.value is BREAK


def test_a_stream_that_broke_is_resumed_after_its_last_message_at_once() -> None:
    stream = plan(timeout_s=9.0)
    assert isinstance(stream.take(started()), Started)
    stream.take(delta(2))
    assert stream.after_error(BREAK) == NextCall(0.0, 9.0, resume_after(2))


def test_a_frontend_that_leaves_breaks_its_streams_and_is_no_place_to_resume_them() -> None:
    stream = plan()
    stream.take(started())
    stream.take(delta(2))
    # What it asks whoever begins anew to wait is too long for a stream: another frontend has it at once.
    assert [stream.after_error(LEAVES) for _ in range(3)] == [
        NextCall(after_s, None, resume_after(2)) for after_s in (0.0, 0.1, 0.2)
    ]
    with pytest.raises(TriptychError) as caught:
        stream.after_error(GONE)
    assert caught.value is LEAVES


def test_a_resume_that_reaches_a_server_as_it_stops_is_made_again() -> None:
    stream = plan()
    stream.take(started())
    assert stream.after_error(LEAVES).after_s == 0.0
    assert stream.after_error(UNHEARD) == NextCall(0.1, None, resume_after(1))


def test_what_was_there_before_is_not_given_twice() -> None:
    stream = plan()
    stream.take(started())
    stream.take(delta(2))
    stream.after_error(BREAK)
    assert stream.take(inference_pb2.ResumeResponse(response=delta(2))) is None
    assert stream.take(inference_pb2.ResumeResponse(response=delta(3))) == Delta(0, "é3", (3,), None)


def test_another_frontend_is_told_what_there_is_of_each_output() -> None:
    stream = plan()
    stream.take(started())
    for position in (2, 3):
        stream.take(delta(position))
    ended = generate_pb2.GenerateResponse(position=4, finished=generate_pb2.Finished(output_index=1))
    stream.take(ended)
    resume = stream.after_error(BREAK).resume
    assert resume is not None
    told = [
        (one.output_index, one.num_tokens, one.num_characters, one.is_finished) for one in resume.received
    ]
    assert told == [(0, 2, 4, False), (1, 0, 0, True)]


def test_resuming_goes_on_until_the_grace_is_over() -> None:
    clock = FakeClock()
    stream = plan(clock=clock)
    stream.take(started())
    for wait_s in (0.0, 0.1, 0.2, 0.4):
        assert stream.after_error(BREAK).after_s == wait_s
        clock.advance(wait_s)
    with pytest.raises(TriptychError) as caught:
        stream.after_error(BREAK)
    assert caught.value is BREAK


def test_a_message_begins_a_new_grace() -> None:
    clock = FakeClock()
    stream = plan(clock=clock)
    stream.take(started())
    for position in range(2, 6):
        assert stream.after_error(BREAK).after_s == 0.0
        clock.advance(0.9)
        stream.take(delta(position))


def test_the_deadline_ends_the_grace() -> None:
    clock = FakeClock()
    stream = plan(clock=clock, timeout_s=0.5)
    stream.take(started())
    clock.advance(0.5)
    with pytest.raises(TriptychError) as caught:
        stream.after_error(BREAK)
    assert caught.value is BREAK


def test_a_stream_that_is_not_kept_ends_with_what_broke_it() -> None:
    stream = plan()
    stream.take(started())
    stream.after_error(BREAK)
    with pytest.raises(TriptychError) as caught:
        stream.after_error(GONE)
    assert (caught.value, caught.value.__cause__) == (BREAK, GONE)


@pytest.mark.parametrize(
    "error",
    [
        TriptychError(grpc.StatusCode.UNAVAILABLE, "no engine", reason="NO_ENGINE"),
        TriptychError(grpc.StatusCode.DEADLINE_EXCEEDED, "late"),
    ],
)
def test_an_end_that_the_frontend_told_is_no_break(error: TriptychError) -> None:
    for is_resumed in (False, True):
        stream = plan()
        stream.take(started())
        if is_resumed:
            stream.after_error(BREAK)
        with pytest.raises(TriptychError) as caught:
            stream.after_error(error)
        assert caught.value is error


@pytest.mark.parametrize(("grace_s", "token"), [(0.0, "t"), (1.0, "")])
def test_without_a_grace_or_a_token_a_break_is_the_end(grace_s: float, token: str) -> None:
    stream = plan(grace_s=grace_s)
    stream.take(started(token))
    with pytest.raises(TriptychError, match="Socket closed"):
        stream.after_error(BREAK)


def test_only_a_request_that_lives_on_is_abandoned_and_once() -> None:
    kept, ended, unkept = plan(), plan(), plan()
    for stream, token in ((kept, "t"), (ended, "t"), (unkept, "")):
        stream.take(started(token))
    ended.end()
    assert [kept.take_abandoned(), ended.take_abandoned(), unkept.take_abandoned()] == ["r", "", ""]
    assert kept.take_abandoned() == ""
