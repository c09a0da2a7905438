"""The parent of a request's span, from the ADD to the engine thread, which keeps it from the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from engine_svc.core.extras import Extra
from triptych_kit.telemetry.spans import TraceContext


@dataclass(frozen=True, slots=True)
class TracedRequest(Extra):
    """context: of the request's span.  request_id: the client's.  attempt: how often it was sent before."""

    context: TraceContext
    request_id: str
    model: str
    attempt: int


EXTRAS = ()
