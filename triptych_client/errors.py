"""What a failed call tells its caller. Knows gRPC's statuses and google.rpc details, and no service."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

_DETAILS_KEY = "grpc-status-details-bin"

Metadata = Iterable[tuple[str, str | bytes]] | None


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of a request that was refused, and why."""

    field: str
    description: str


class TriptychError(Exception):
    """A call ended with a status other than OK."""

    def __init__(
        self,
        status: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        field_violations: tuple[FieldViolation, ...] = (),
        retry_after_ms: int | None = None,
    ) -> None:
        """Keep what the server said: `reason` is for programs, `retry_after_ms` None if not given."""
        super().__init__(f"{status.name}: {message}")
        self.status = status
        self.message = message
        self.reason = reason
        self.field_violations = field_violations
        self.retry_after_ms = retry_after_ms


def from_rpc_error(error: grpc.RpcError) -> TriptychError:
    """The error of ours that says what gRPC's `error` says, details included."""
    reason, violations, retry_after_ms = "", [], None
    # The stubs of grpc call them a class of their own; blocking and awaited calls both give pairs.
    for detail in _details(cast(Metadata, error.trailing_metadata())):
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            reason = info.reason
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad_request = error_details_pb2.BadRequest()
            detail.Unpack(bad_request)
            violations += [FieldViolation(v.field, v.description) for v in bad_request.field_violations]
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_after_ms = retry.retry_delay.ToMilliseconds()
    return TriptychError(
        error.code(),
        error.details() or "",
        reason=reason,
        field_violations=tuple(violations),
        retry_after_ms=retry_after_ms,
    )


def not_reached(address: str, timeout_s: float) -> TriptychError:
    """The error for a frontend that cannot be reached."""
    return TriptychError(grpc.StatusCode.UNAVAILABLE, f"{address} was not reached within {timeout_s:g} s")


def _details(metadata: Metadata) -> list[any_pb2.Any]:
    for key, value in metadata or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            return list(status_pb2.Status.FromString(value).details)
    return []
