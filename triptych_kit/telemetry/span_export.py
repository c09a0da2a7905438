"""Exports spans to an OTLP collector from a thread of its own, with a bounded queue; losses are counted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from triptych_kit.config import read_environment
from triptych_kit.telemetry.metrics import Counts
from triptych_kit.telemetry.spans import RecordedTrace, SpanRecord, TraceContext

logger = logging.getLogger(__name__)

_EXPORT_DELAY_MS = 250
_FLUSH_DEADLINE_S = 1.0
_DEFAULT_QUEUE_SIZE = 2048
_SAMPLED = trace.TraceFlags(trace.TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope("triptych")
_KINDS = {
    "internal": trace.SpanKind.INTERNAL,
    "client": trace.SpanKind.CLIENT,
    "server": trace.SpanKind.SERVER,
}


class ExportCounts:
    """Spans by what became of them. num_taken: that left the queue, exported or not."""

    def __init__(self) -> None:
        self.num_taken = 0
        self.num_exported = 0
        self.dropped = Counts({("queue_full",): 0, ("export_failed",): 0})


class SpanExport:
    """The queue of a process's spans and the thread that exports them. `add` waits for nothing."""

    def __init__(self, resource: Resource, counts: ExportCounts) -> None:
        self._resource = resource
        self._counts = counts
        self._num_added = 0
        self._is_full = False
        self._max_queued = int(read_environment("OTEL_BSP_MAX_QUEUE_SIZE") or _DEFAULT_QUEUE_SIZE)
        self._exporter = _otlp_exporter(counts)
        self._processor = BatchSpanProcessor(self._exporter, schedule_delay_millis=_EXPORT_DELAY_MS)

    def add(self, recorded: RecordedTrace) -> None:
        """Queue the spans of a trace, without those that exceed the limit."""
        for span in recorded.make_spans():
            is_full = self._num_added - self._counts.num_taken >= self._max_queued
            if is_full:
                self._counts.dropped.add("queue_full")
            else:
                self._num_added += 1
                self._processor.on_end(_readable(span, recorded.context, self._resource))
            if is_full and not self._is_full:
                logger.warning("spans dropped: the queue is full", extra={"max_queued": self._max_queued})
            self._is_full = is_full

    def shutdown(self) -> None:
        """Export pending spans; a collector that does not answer delays the shutdown by a second at most."""
        cut = threading.Timer(_FLUSH_DEADLINE_S, self._exporter.shutdown)
        cut.daemon = True
        cut.start()
        self._processor.shutdown()
        cut.cancel()


def exports_traces() -> bool:
    """Whether the environment names a collector for traces."""
    is_disabled = read_environment("OTEL_SDK_DISABLED").lower() == "true"
    if is_disabled or read_environment("OTEL_TRACES_EXPORTER") == "none":
        return False
    return bool(
        read_environment("OTEL_EXPORTER_OTLP_ENDPOINT")
        or read_environment("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    )


def _otlp_exporter(counts: ExportCounts) -> SpanExporter:
    # Imported here: the import takes 0.4 s and most processes have no collector.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    from triptych_kit.telemetry.otlp_failures import FirstFailures

    failures = FirstFailures("traces")

    class QuietExporter(OTLPSpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            counts.num_taken += len(spans)
            result = super().export(spans)
            if result is SpanExportResult.SUCCESS:
                counts.num_exported += len(spans)
                failures.forget()
            else:
                counts.dropped.add("export_failed", by=len(spans))
            return result

        def shutdown(self, timeout_millis: float = 30_000, **kwargs: object) -> None:
            super().shutdown(timeout_millis, **kwargs)
            failures.close()

    return QuietExporter()


def _readable(span: SpanRecord, context: TraceContext, resource: Resource) -> ReadableSpan:
    """The span as exporters take it. It is marked as sampled: that it is exported has been decided."""

    def of_id(span_id: str, *, is_remote: bool = False) -> trace.SpanContext:
        return trace.SpanContext(context.trace_id, int(span_id, 16), is_remote, _SAMPLED, context.state)

    is_root = int(span.span_id, 16) == context.span_id
    status = trace.Status() if span.error is None else trace.Status(trace.StatusCode.ERROR, span.error)
    return ReadableSpan(
        name=span.name,
        context=of_id(span.span_id),
        parent=of_id(span.parent_span_id, is_remote=is_root) if span.parent_span_id else None,
        resource=resource,
        attributes=span.attributes,
        events=[Event(event.name, event.attributes, event.unix_ns) for event in span.events],
        kind=_KINDS[span.kind],
        status=status,
        start_time=span.start_unix_ns,
        end_time=span.end_unix_ns,
        instrumentation_scope=_SCOPE,
    )
