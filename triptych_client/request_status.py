"""How far a request is, as plain data. Knows no channel."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.api.v1 import request_pb2
from triptych_client.events import Usage, read_usage


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """A request that the frontend knows. `state` is queued, running or finished.

    `engine_id` is empty where it runs nowhere yet; `num_attempts` is how many engines it was sent to.
    """

    request_id: str
    state: str
    usage: Usage
    age_ms: int
    engine_id: str
    num_attempts: int


def to_request_status(response: request_pb2.GetRequestResponse) -> RequestStatus:
    """What the frontend tells about a request."""
    return RequestStatus(
        response.request_id,
        _state(response.state),
        read_usage(response.usage),
        response.age_ms,
        response.engine_id,
        response.num_attempts,
    )


def read_state(response: request_pb2.AbortResponse) -> str:
    """How far a request was when it was aborted; `finished` means that the abort came too late."""
    return _state(response.state)


def _state(state: request_pb2.RequestState) -> str:
    return request_pb2.RequestState.Name(state).removeprefix("REQUEST_STATE_").lower()
