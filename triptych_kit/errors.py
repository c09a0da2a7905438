"""Service errors as exceptions, and their conversion to and from gRPC statuses with google.rpc details."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "triptych"

# A status is sent in trailers, and peers refuse trailers above 8 KiB, so client text is truncated. This
# also keeps logs and spans of a refused request smaller than the request.
_MAX_MESSAGE_BYTES = 512
_MAX_TEXT_BYTES = 144
_MAX_ENTRIES = 8


class InvalidTransition(RuntimeError):
    """A state machine was given a transition that its table does not have: an internal bug."""


class ServiceError(Exception):
    """An error with a status code, a machine-readable reason and a message for clients.

    A message of more than 512 bytes is truncated.
    `reason` is UPPER_SNAKE_CASE and stable; it defaults to the name of the status code. `retry_after_ms` is
    when the same call may succeed.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        self.message = _clip(message, _MAX_MESSAGE_BYTES)
        super().__init__(self.message)
        self.reason = reason or self.code.name
        self.metadata = dict(metadata or {})
        self.retry_after_ms = retry_after_ms


class InvalidArgument(ServiceError):
    """The request is wrong in any state of the service. Names the field, the value and the limit."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        violations: Sequence[tuple[str, str]] = (),
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message, reason=reason, metadata=metadata, retry_after_ms=retry_after_ms)
        self.violations: list[tuple[str, str]] = list(violations)
        if field is not None:
            self.violations.insert(0, (field, self.message))


class NotFound(ServiceError):
    """A named thing does not exist."""

    code = grpc.StatusCode.NOT_FOUND

    def __init__(
        self,
        message: str,
        *,
        resource_type: str,
        resource_name: str,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message, reason=reason, metadata=metadata, retry_after_ms=retry_after_ms)
        self.resource_type = resource_type
        self.resource_name = resource_name


class AlreadyExists(ServiceError):
    """The thing to be created exists already."""

    code = grpc.StatusCode.ALREADY_EXISTS


class ResourceExhausted(ServiceError):
    """A queue, quota or size limit is reached."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class FailedPrecondition(ServiceError):
    """The state of the service does not allow this; a retry fails until the state is changed."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Unavailable(ServiceError):
    """The service is temporarily unavailable; a retry may succeed."""

    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(ServiceError):
    """The deadline has passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Unimplemented(ServiceError):
    """The API has it, but this service does not implement it."""

    code = grpc.StatusCode.UNIMPLEMENTED


class PermissionDenied(ServiceError):
    """The caller is authenticated, but may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class Unauthenticated(ServiceError):
    """The caller is not authenticated."""

    code = grpc.StatusCode.UNAUTHENTICATED


class Aborted(ServiceError):
    """The operation was aborted, or conflicts with another one."""

    code = grpc.StatusCode.ABORTED


class Cancelled(ServiceError):
    """The caller cancelled."""

    code = grpc.StatusCode.CANCELLED


class OutOfRange(ServiceError):
    """A cursor or offset is outside the stored range."""

    code = grpc.StatusCode.OUT_OF_RANGE


class DataLoss(ServiceError):
    """Data is lost and cannot be recovered."""

    code = grpc.StatusCode.DATA_LOSS


class Internal(ServiceError):
    """An internal error. Its message is for clients: no path, no value, no traceback."""

    code = grpc.StatusCode.INTERNAL


def with_fields(error: ServiceError, name_of: Callable[[str], str]) -> ServiceError:
    """The same error with other names of the fields that it is about, in its texts too."""
    changed = type(error).__new__(type(error), error.message)
    changed.__dict__.update(error.__dict__)
    if isinstance(changed, InvalidArgument) and changed.violations:
        changed.violations = [
            (name_of(field), text.replace(field, name_of(field), 1)) for field, text in changed.violations
        ]
        changed.message = _clip("; ".join(text for _, text in changed.violations), _MAX_MESSAGE_BYTES)
    elif field := changed.metadata.get("fields"):
        changed.metadata = {**changed.metadata, "fields": name_of(field)}
        changed.message = changed.message.replace(field, name_of(field), 1)
    changed.args = (changed.message,)
    return changed


_BY_NUMBER: dict[int, type[ServiceError]] = {
    error.code.value[0]: error
    for error in (
        ServiceError,
        InvalidArgument,
        NotFound,
        AlreadyExists,
        ResourceExhausted,
        FailedPrecondition,
        Unavailable,
        DeadlineExceeded,
        Unimplemented,
        PermissionDenied,
        Unauthenticated,
        Aborted,
        Cancelled,
        OutOfRange,
        DataLoss,
        Internal,
    )
}


def to_number(name: str) -> int:
    """The number of the status code with this name, as it is sent inside a message."""
    return int(grpc.StatusCode[name].value[0])


def to_parts(error: ServiceError) -> tuple[int, str, bytes]:
    """Code, message and serialized google.rpc.Status of `error`, to send it inside a message."""
    status = to_status(error)
    details = (value for _, value in status.trailing_metadata or () if isinstance(value, bytes))
    return error.code.value[0], status.details, next(details, b"")


def to_details(code: str, message: str, reason: str, field: str) -> bytes:
    """A serialized google.rpc.Status. code: the name of a status code. field: empty if none is refused."""
    kind = _BY_NUMBER[to_number(code)]
    error = kind(message, reason=reason)
    if isinstance(error, InvalidArgument) and field:
        error.violations.append((field, error.message))
    return to_parts(error)[2]


def to_status(error: ServiceError) -> grpc.Status:
    """The status of `error` with google.rpc details: always ErrorInfo, others as they apply."""
    details: list[Any] = [
        error_details_pb2.ErrorInfo(
            reason=error.reason,
            domain=DOMAIN,
            metadata={
                _clip(key, _MAX_TEXT_BYTES): _clip(value, _MAX_TEXT_BYTES)
                for key, value in list(error.metadata.items())[:_MAX_ENTRIES]
            },
        )
    ]
    if isinstance(error, InvalidArgument) and error.violations:
        bad_request = error_details_pb2.BadRequest()
        for field, description in error.violations[:_MAX_ENTRIES]:
            bad_request.field_violations.add(
                field=_clip(field, _MAX_TEXT_BYTES), description=_clip(description, _MAX_TEXT_BYTES)
            )
        details.append(bad_request)
    if isinstance(error, NotFound):
        details.append(
            error_details_pb2.ResourceInfo(
                resource_type=error.resource_type, resource_name=_clip(error.resource_name, _MAX_TEXT_BYTES)
            )
        )
    if error.retry_after_ms is not None:
        retry_info = error_details_pb2.RetryInfo()
        retry_info.retry_delay.FromMilliseconds(error.retry_after_ms)
        details.append(retry_info)
    status = status_pb2.Status(
        code=error.code.value[0],
        # A service that forwards an error may have put a prefix before the message.
        message=_clip(error.message, _MAX_MESSAGE_BYTES),
        details=[_packed(detail) for detail in details],
    )
    return rpc_status.to_status(status)


def from_rpc_error(error: grpc.RpcError) -> ServiceError:
    """The error that a peer answered with, with its details; a bare status becomes the error of its code."""
    call: Any = error  # every RpcError raised by a call is also a grpc.Call, which its type does not show
    code: grpc.StatusCode = call.code()
    metadata = dict(call.trailing_metadata() or ())
    return from_status(code.value[0], call.details() or "", metadata.get("grpc-status-details-bin", b""))


@contextlib.contextmanager
def rpc_errors_translated() -> Iterator[None]:
    """Raise an RpcError of the block as a ServiceError."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


def from_status(code: int, message: str, details: bytes, retry_after_ms: int | None = None) -> ServiceError:
    """The error of a status sent inside a message; `details` is a serialized google.rpc.Status or empty.

    An unknown code becomes INTERNAL: the peer violates the protocol.
    """
    status = _rich_status(details)
    info = _detail(status, error_details_pb2.ErrorInfo()) or error_details_pb2.ErrorInfo()
    retry_info = _detail(status, error_details_pb2.RetryInfo())
    if retry_after_ms is None and retry_info is not None:
        retry_after_ms = retry_info.retry_delay.ToMilliseconds()
    kind = _BY_NUMBER.get(code, Internal)
    message = message or kind.code.name
    keywords: dict[str, Any] = {
        "reason": info.reason,
        "metadata": dict(info.metadata),
        "retry_after_ms": retry_after_ms,
    }
    if kind is InvalidArgument:
        bad_request = _detail(status, error_details_pb2.BadRequest()) or error_details_pb2.BadRequest()
        violations = [(violation.field, violation.description) for violation in bad_request.field_violations]
        return InvalidArgument(message, violations=violations, **keywords)
    if kind is NotFound:
        resource = _detail(status, error_details_pb2.ResourceInfo()) or error_details_pb2.ResourceInfo()
        return NotFound(
            message, resource_type=resource.resource_type, resource_name=resource.resource_name, **keywords
        )
    return kind(message, **keywords)


def _clip(text: str, max_bytes: int) -> str:
    encoded = text.encode("utf-8", errors="replace")
    if len(encoded) <= max_bytes:
        return encoded.decode("utf-8")
    return encoded[: max_bytes - 3].decode("utf-8", errors="ignore") + "..."


def _packed(detail: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _rich_status(details: bytes) -> status_pb2.Status:
    # A foreign peer may send details that cannot be parsed; then only the plain status is used.
    try:
        return status_pb2.Status.FromString(details)
    except DecodeError:
        return status_pb2.Status()


def _detail(status: status_pb2.Status, message: Any) -> Any:
    for packed in status.details:
        if packed.Unpack(message):
            return message
    return None
