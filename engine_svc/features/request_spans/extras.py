"""The parent of a request's span, from the ADD to the engine thread, which keeps it from the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine_svc.core.extras import Extra
from triptych_kit.telemetry.spans import SpanRecord, TraceContext


@dataclass(frozen=True, slots=True)
class TracedRequest(Extra):
    """context: of the request's span.  request_id: the client's.  attempt: how often it was sent before.

    record: takes the span, on the event loop.
    """

    context: TraceContext
    request_id: str
    model: str
    attempt: int
    record: Callable[[SpanRecord], None]


EXTRAS = ()
