"""Reads the `Caller` from a gRPC call's context."""

from __future__ import annotations

from typing import Any

import grpc.aio

from frontend_svc.generation.caller import LOCAL_CALLER, Caller
from triptych_kit.security.identity import current_identity
from triptych_kit.telemetry.logs import log_fields


def caller_of(context: grpc.aio.ServicerContext[Any, Any] | None) -> Caller:
    """The caller of an RPC; without one it is in this process, and cancels what it no longer waits for."""
    if context is None:
        return LOCAL_CALLER
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    return Caller(
        # Bound by the interceptor, which takes it from x-request-id or generates it, and echoes it.
        request_id=log_fields().get("request_id", ""),
        traceparent=metadata.get("traceparent", ""),
        tracestate=metadata.get("tracestate", ""),
        remaining_s=context.time_remaining,
        patience_s=context.time_remaining(),
        identity=current_identity(),
    )
