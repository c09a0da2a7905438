"""Errors of the service in OpenAI's shape, with the facts that they have over gRPC."""

from __future__ import annotations

import math
from typing import Any

import grpc

from triptych_kit.errors import InvalidArgument, NotFound, ServiceError

# Clients repeat a request after 408, 409, 429 and from 500 on, so what stays refused is below.
_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.UNIMPLEMENTED: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
# For what HTTP has a status of its own.
_STATUSES_OF_REASONS = {
    "BODY_TIME_LIMIT": 408,
    "BODY_TOO_LARGE": 413,
    "HOST_NOT_SERVED": 421,
    "METHOD_NOT_ALLOWED": 405,
    "UNKNOWN_URL": 404,
    "UPGRADE_REQUIRED": 426,
    "UNSUPPORTED_MEDIA_TYPE": 415,
}
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


def status_of(error: ServiceError) -> int:
    return _STATUSES_OF_REASONS.get(error.reason) or _STATUSES.get(error.code, 500)


def error_body(error: ServiceError) -> dict[str, Any]:
    status = status_of(error)
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    code = error.reason.lower()
    if isinstance(error, NotFound) and error.resource_type == "model":
        code = "model_not_found"
    return {"error": {"message": error.message, "type": kind, "param": _field_of(error), "code": code}}


def error_headers(error: ServiceError) -> dict[str, str]:
    if status_of(error) == 401:
        return {"www-authenticate": "Bearer"}
    if status_of(error) == 426:
        return {"upgrade": "websocket", "sec-websocket-version": "13"}
    if error.retry_after_ms is None:
        return {}
    return {"retry-after": str(max(1, math.ceil(error.retry_after_ms / 1000)))}


def _field_of(error: ServiceError) -> str | None:
    if isinstance(error, InvalidArgument) and error.violations:
        return error.violations[0][0]
    if isinstance(error, NotFound) and error.resource_type == "model":
        return "model"
    return error.metadata.get("field") or error.metadata.get("fields")
