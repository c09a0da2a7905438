"""State of one stream across its calls: converts messages to events, and plans the next call after a failure.

Before the first message a failed call is retried; after it, a broken stream is resumed if the request has an
orphan grace. Makes no calls and does not wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from triptych.api.v1 import generate_pb2, inference_pb2
from triptych_client.errors import TriptychError, is_undelivered
from triptych_client.retry import Attempts

EventT = TypeVar("EventT")

# The frontend cannot resume the stream; the stream then ends with the error that broke it.
_NOT_KEPT = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.OUT_OF_RANGE)

# Reason of a frontend that stops: another one, or this one after a restart, can resume the stream.
_LEAVES = "DRAINING"


@dataclass(frozen=True, slots=True)
class NextCall:
    """A call to make: a Resume, or the first call again."""

    after_s: float
    timeout_s: float | None
    resume: inference_pb2.ResumeRequest | None


class StreamPlan(Generic[EventT]):
    """Plans the calls of one stream. `grace_s` above 0 is its orphan grace."""

    def __init__(
        self,
        # grpc's types do not have the message type that a call streams.
        to_event: Callable[[Any], EventT | None],
        attempts: Attempts,
        *,
        grace_s: float = 0.0,
    ) -> None:
        self._to_event = to_event
        self._attempts = attempts
        self._grace_s = grace_s
        self._has_message = False
        self._is_over = False
        self._request_id = ""
        self._token = ""
        self._position = 0
        self._received: dict[int, inference_pb2.ReceivedOutput] = {}
        self._broken: TriptychError | None = None
        self._broken_at = 0.0
        self._num_resumes = 0

    def first_call(self) -> NextCall:
        return self._next_call(0.0)

    def take(self, message: Message) -> EventT | None:
        """The event in a message; None for a repeated or an unknown one."""
        self._has_message = True
        self._broken, self._num_resumes = None, 0
        if isinstance(message, inference_pb2.ResumeResponse):
            message = message.response
        if isinstance(message, generate_pb2.GenerateResponse):
            if message.position <= self._position:
                return None
            self._position = message.position
            self._note_received(message)
            if message.HasField("started"):
                self._request_id, self._token = message.started.request_id, message.started.resume_token
        return self._to_event(message)

    def after_error(self, error: TriptychError) -> NextCall:
        """The call to make after a failed one. Raises the stream's final error if there is none."""
        try:
            if self._broken is None and not self._has_message:
                return self._next_call(self._attempts.next_after_s(error))
            return self._next_call(
                self._resume_after_s(error),
                inference_pb2.ResumeRequest(
                    resume_token=self._token,
                    last_position=self._position,
                    received=self._received.values(),
                ),
            )
        except TriptychError:
            self.end()
            raise

    def end(self) -> None:
        """The server has sent everything."""
        self._is_over = True

    def take_abandoned(self) -> str:
        """The id of the request if it still runs although the stream is closed, else ""."""
        request_id = self._request_id if self._token and not self._is_over else ""
        self._is_over = True
        return request_id

    def _note_received(self, message: generate_pb2.GenerateResponse) -> None:
        """Count the received part of each output: another frontend splits messages differently."""
        if message.HasField("started"):
            return
        is_delta = message.HasField("delta")
        index = message.delta.output_index if is_delta else message.finished.output_index
        received = self._received.setdefault(index, inference_pb2.ReceivedOutput(output_index=index))
        received.num_tokens += len(message.delta.token_ids)
        received.num_characters += len(message.delta.text)
        received.is_finished = not is_delta

    def _resume_after_s(self, error: TriptychError) -> float:
        if self._broken is None:
            if not (self._token and self._grace_s and _is_break(error)):
                raise error
            self._broken, self._broken_at = error, self._attempts.now()
        elif error.status in _NOT_KEPT:
            raise self._broken from error
        elif not _is_break(error):
            raise error
        delay_s = self._attempts.backoff_s(self._num_resumes) if self._num_resumes else 0.0
        is_in_grace = self._attempts.now() + delay_s < self._broken_at + self._grace_s
        if not (is_in_grace and self._attempts.has_time_for(delay_s)):
            raise self._broken
        self._num_resumes += 1
        return delay_s

    def _next_call(self, after_s: float, resume: inference_pb2.ResumeRequest | None = None) -> NextCall:
        return NextCall(after_s, self._attempts.remaining_s(after_s), resume)


def _is_break(error: TriptychError) -> bool:
    # A status without a reason comes from gRPC and means a broken connection: frontends always set one.
    is_gone = error.status is grpc.StatusCode.UNAVAILABLE and error.reason in ("", _LEAVES)
    # A proxy that cuts a stream ends it without a status, or resets it.
    is_cut = error.status is grpc.StatusCode.UNKNOWN and not error.reason
    is_cut |= error.status is grpc.StatusCode.INTERNAL and error.message.startswith("Received RST_STREAM")
    return is_gone or is_cut or is_undelivered(error)
