"""A refusal that travels as data, as the error a client gets."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from service_kit import errors
from triptych.engine.v1 import engine_pb2

_ERRORS: dict[int, type[errors.ServiceError]] = {
    kind.code.value[0]: kind
    for kind in (
        errors.AlreadyExists,
        errors.ResourceExhausted,
        errors.FailedPrecondition,
        errors.Unavailable,
        errors.DeadlineExceeded,
        errors.Unimplemented,
        errors.PermissionDenied,
        errors.Aborted,
        errors.OutOfRange,
        errors.Internal,
    )
}


def rejection_error(rejected: engine_pb2.AddRejected) -> errors.ServiceError:
    """The error that an engine's refusal of one request means, with its details where they can be read."""
    status = rejected.status
    rich = status_pb2.Status()
    try:
        rich.ParseFromString(status.details)
    except DecodeError:
        rich.Clear()
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in rich.details:
        # Unpack does nothing where the type is another.
        detail.Unpack(info)
        detail.Unpack(bad_request)
    message = status.message or "the engine refused the request"
    reason, metadata = info.reason, dict(info.metadata)
    retry_after_ms = rejected.retry_after_ms or None
    if status.code == errors.InvalidArgument.code.value[0]:
        violations = [(violation.field, violation.description) for violation in bad_request.field_violations]
        return errors.InvalidArgument(message, violations=violations, reason=reason, metadata=metadata)
    kind = _ERRORS.get(status.code, errors.Internal)
    return kind(message, reason=reason, metadata=metadata, retry_after_ms=retry_after_ms)
