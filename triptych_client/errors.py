"""Errors of failed calls. Knows gRPC statuses and google.rpc details, and no service."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from triptych.common.v1 import error_pb2

_DETAILS_KEY = "grpc-status-details-bin"
_REQUEST_ID_KEY = "x-request-id"
_TRACE_ID_KEY = "x-trace-id"

Metadata = Iterable[tuple[str, str | bytes]] | None


class _FailedCall(Protocol):
    """The part of a failed call that blocking and asyncio clients share."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def initial_metadata(self) -> Metadata: ...
    def trailing_metadata(self) -> Metadata: ...


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """A field of a refused request, and the reason."""

    field: str
    description: str


class TriptychError(Exception):
    """A call ended with a status other than OK.

    `reason` is machine-readable and `facts` are its metadata; `retry_after_ms` is None if the server did not
    send one. `request_id` and `trace_id` identify the call in the server's logs and traces; empty if the
    server was not reached.
    """

    def __init__(
        self,
        status: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        facts: Mapping[str, str] | None = None,
        field_violations: tuple[FieldViolation, ...] = (),
        retry_after_ms: int | None = None,
        request_id: str = "",
        trace_id: str = "",
    ) -> None:
        super().__init__(f"{status.name}: {message}")
        self.status = status
        self.message = message
        self.reason = reason
        self.facts = dict(facts or {})
        self.field_violations = field_violations
        self.retry_after_ms = retry_after_ms
        self.request_id = request_id
        self.trace_id = trace_id


def from_rpc_error(error: grpc.RpcError) -> TriptychError:
    """Convert gRPC's `error`, with its details and ids."""
    # Every RpcError raised by a call is also a grpc.Call, which its type does not show.
    call = cast(_FailedCall, error)
    trailing = dict(call.trailing_metadata() or ())
    ids = {**dict(call.initial_metadata() or ()), **trailing}
    details = _read_details(trailing.get(_DETAILS_KEY))
    return TriptychError(
        call.code(),
        call.details() or "",
        reason=details.reason,
        facts=details.facts,
        field_violations=tuple(details.field_violations),
        retry_after_ms=details.retry_after_ms,
        request_id=str(ids.get(_REQUEST_ID_KEY, "")),
        trace_id=str(ids.get(_TRACE_ID_KEY, "")),
    )


def from_error_status(error: error_pb2.ErrorStatus) -> TriptychError:
    """The error for a status sent inside a message."""
    details = _read_details(error.details)
    return TriptychError(
        _STATUS_OF.get(error.code, grpc.StatusCode.UNKNOWN),
        error.message,
        reason=details.reason,
        facts=details.facts,
        field_violations=tuple(details.field_violations),
        retry_after_ms=details.retry_after_ms,
    )


def is_undelivered(error: TriptychError) -> bool:
    """Whether a stopping server dropped the call before a handler saw it."""
    # gRPC's texts for a cancellation by the server; a local cancellation has another text.
    is_remote = error.message == "CANCELLED" or error.message.startswith("Received RST_STREAM")
    return error.status is grpc.StatusCode.CANCELLED and not error.reason and is_remote


def not_reached(address: str, timeout_s: float) -> TriptychError:
    return TriptychError(grpc.StatusCode.UNAVAILABLE, f"{address} was not reached within {timeout_s:g} s")


# The value of a status is a pair: its number, and its name in lower case.
_STATUS_OF: dict[int, grpc.StatusCode] = {status.value[0]: status for status in grpc.StatusCode}


@dataclass(slots=True)
class _Details:
    """The content of google.rpc details."""

    reason: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    field_violations: list[FieldViolation] = field(default_factory=list)
    retry_after_ms: int | None = None


def _read_details(serialized: str | bytes | None) -> _Details:
    found = _Details()
    for detail in _status_of(serialized).details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            found.reason, found.facts = info.reason, dict(info.metadata)
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad_request = error_details_pb2.BadRequest()
            detail.Unpack(bad_request)
            found.field_violations += [
                FieldViolation(violation.field, violation.description)
                for violation in bad_request.field_violations
            ]
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            found.retry_after_ms = retry.retry_delay.ToMilliseconds()
    return found


def _status_of(serialized: str | bytes | None) -> status_pb2.Status:
    try:
        return status_pb2.Status.FromString(serialized if isinstance(serialized, bytes) else b"")
    except DecodeError:
        # A proxy may send anything; then only the plain status is used.
        return status_pb2.Status()
