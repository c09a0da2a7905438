"""Errors of the service in the shape of Anthropic's API, and how its streams have them."""

from __future__ import annotations

from typing import Any

import msgspec

from frontend_svc.protocols.openai.call import Dialect
from frontend_svc.protocols.openai.errors import status_of
from triptych_kit.errors import ServiceError

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_encode = msgspec.json.Encoder().encode


def error_body(error: ServiceError) -> dict[str, Any]:
    status = status_of(error)
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def event_of(content: dict[str, Any]) -> bytes:
    """An event under its own type."""
    return f"event: {content['type']}\ndata: ".encode() + _encode(content) + b"\n\n"


ANTHROPIC = Dialect(error_body, event_of, heartbeat=event_of({"type": "ping"}), id_header="request-id")
