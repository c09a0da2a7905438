"""The status of a request as plain data. Knows no channel."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.api.v1 import request_pb2
from triptych_client.events import Usage, read_usage


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """Status of a request. `state` is queued, running or finished.

    `engine_id` is empty while it runs on no engine; `num_attempts` is the number of engines it was sent to.
    """

    request_id: str
    state: str
    usage: Usage
    age_ms: int
    engine_id: str
    num_attempts: int


def to_request_status(response: request_pb2.GetRequestResponse) -> RequestStatus:
    return RequestStatus(
        response.request_id,
        _state(response.state),
        read_usage(response.usage),
        response.age_ms,
        response.engine_id,
        response.num_attempts,
    )


def read_state(response: request_pb2.AbortResponse) -> str:
    """The state of a request when it was aborted; `finished` means that the abort was too late."""
    return _state(response.state)


def _state(state: request_pb2.RequestState) -> str:
    return request_pb2.RequestState.Name(state).removeprefix("REQUEST_STATE_").lower()
