"""Reads the parent of a request's span from its ADD, and records the span."""

from __future__ import annotations

import functools

from engine_svc.config import EngineConfig
from engine_svc.convert.feature import AddContext, Parsed, WireFeature
from engine_svc.features.request_spans.extras import TracedRequest
from engine_svc.features.request_spans.span import SPAN_NAME
from triptych.engine.v1 import add_pb2
from triptych_kit.telemetry.spans import SpanRecord, TraceContext
from triptych_kit.telemetry.traces import begin_trace, exports_traces, record_trace


def make(config: EngineConfig) -> WireFeature:
    return ParentOfAdd(is_exported=exports_traces())


class ParentOfAdd(WireFeature):
    """is_exported: whether there is a collector; without one no ADD is looked at."""

    fields = ("trace_context",)

    def __init__(self, *, is_exported: bool) -> None:
        self._is_exported = is_exported

    def parse(self, entry: add_pb2.AddEntry, context: AddContext) -> Parsed | None:
        if not self._is_exported or not entry.HasField("trace_context"):
            return None
        parent = entry.trace_context
        span = begin_trace(SPAN_NAME, parent.traceparent, parent.tracestate)
        # A malformed parent would begin a trace of its own.
        if not span.parent_id or not span.is_sampled:
            return None
        request_id = entry.external_request_id or entry.request_id
        record = functools.partial(_record, span)
        return Parsed(TracedRequest(span, request_id, context.facts.model_name, entry.attempt, record))


def _record(context: TraceContext, span: SpanRecord) -> None:
    record_trace(context, lambda: [span])
