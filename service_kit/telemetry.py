"""Spans and logs of a process: OpenTelemetry with a buffer of recent spans, and OTLP export if configured.

Fails open: an unreachable collector costs a log line, never a request.
"""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from service_kit.config import read_environment
from service_kit.logs import bind_log_fields, log_fields, setup_logs
from service_kit.metrics import Metrics

__all__ = [
    "SpanRecord",
    "bind_log_fields",
    "context_from",
    "export_metrics",
    "join_trace",
    "log_fields",
    "recent_spans",
    "setup_telemetry",
    "shutdown_telemetry",
    "traceparent_of",
    "tracer",
]

_RING_SIZE = 2048
_MAX_TRACESTATE_CHARS = 512
_MEMBER = r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
_TRACESTATE = re.compile(rf"({_MEMBER}([ \t]*,[ \t]*{_MEMBER}){{0,31}})?")
_EXPORT_DELAY_MS = 250
_FLUSH_DEADLINE_S = 1.0


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """A finished span as plain data. Ids are lower-case hex; `parent_span_id` is "" for a root."""

    name: str
    trace_id: str
    span_id: str
    parent_span_id: str
    service: str
    pid: int
    start_unix_ns: int
    end_unix_ns: int
    attributes: dict[str, str]
    events: list[tuple[str, int]]
    ok: bool


class SpanRing(SpanProcessor):
    """Keeps the last spans that ended, oldest first."""

    def __init__(self, size: int = _RING_SIZE) -> None:
        self._spans: deque[ReadableSpan] = deque(maxlen=size)

    def on_end(self, span: ReadableSpan) -> None:
        self._spans.append(span)

    def spans(self) -> list[ReadableSpan]:
        return list(self._spans)


# The trace of the call that this task serves; 0 if it serves none.
_joined_trace_id: ContextVar[int] = ContextVar("triptych_trace_id", default=0)


class _JoiningIdGenerator(RandomIdGenerator):
    """Root spans of a call get the trace id that was sent to its client."""

    def generate_trace_id(self) -> int:
        return _joined_trace_id.get() or super().generate_trace_id()


class _Telemetry:
    """The one tracer provider of this process and its ring."""

    def __init__(self, service: str, instance: str) -> None:
        self.ring = SpanRing()
        self.provider = TracerProvider(
            id_generator=_JoiningIdGenerator(),
            sampler=None if read_environment("OTEL_TRACES_SAMPLER") else ALWAYS_ON,
            resource=Resource.create(
                {"service.name": service, "service.instance.id": instance, "process.pid": os.getpid()}
            ),
            shutdown_on_exit=False,
        )
        self.provider.add_span_processor(self.ring)
        self.tracer = self.provider.get_tracer("triptych")
        self._exporter: SpanExporter | None = None
        if read_environment("OTEL_EXPORTER_OTLP_ENDPOINT") or read_environment(
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
        ):
            self._exporter = _otlp_exporter()
            self.provider.add_span_processor(
                BatchSpanProcessor(self._exporter, schedule_delay_millis=_EXPORT_DELAY_MS)
            )

    def shutdown(self) -> None:
        """Export pending spans; an unreachable collector delays the shutdown by a second at most."""
        if self._exporter is None:
            self.provider.shutdown()
            return
        cut = threading.Timer(_FLUSH_DEADLINE_S, self._exporter.shutdown)
        cut.daemon = True
        cut.start()
        self.provider.shutdown()
        cut.cancel()


# A process has one telemetry, as it has one stderr. Spans created before the setup are buffered as well.
_telemetry: list[_Telemetry] = []


def setup_telemetry(
    service: str, *, instance: str, log_format: str = "text", log_level: str = "info"
) -> None:
    """Set up logs and spans of this process. Called once in `main`, after the configuration is loaded."""
    setup_logs(service, instance=instance, log_format=log_format, log_level=log_level)
    shutdown_telemetry()
    _telemetry.append(_Telemetry(service, instance))


def shutdown_telemetry() -> None:
    """Export pending spans, for a second at most, and discard all spans."""
    while _telemetry:
        _telemetry.pop().shutdown()


def tracer() -> trace.Tracer:
    """The tracer of this process."""
    return _current().tracer


async def export_metrics(metrics: Metrics) -> None:
    """Export every OTEL_METRIC_EXPORT_INTERVAL ms, until cancelled. Returns at once without a collector."""
    if read_environment("OTEL_METRICS_EXPORTER") == "none" or not (
        read_environment("OTEL_EXPORTER_OTLP_ENDPOINT")
        or read_environment("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
    ):
        return
    from service_kit.otlp_metrics import run_export

    interval = read_environment("OTEL_METRIC_EXPORT_INTERVAL") or ""
    await run_export(metrics, _current().provider.resource, interval)


def recent_spans(trace_id: str | None = None) -> list[SpanRecord]:
    """The last 2,048 finished spans, or those of one trace, oldest end first."""
    records = [_record(span) for span in _current().ring.spans()]
    return [record for record in records if trace_id is None or record.trace_id == trace_id]


def context_from(traceparent: str, tracestate: str = "") -> Context:
    """The context of a W3C `traceparent`; an empty one, i.e. a new root, if it is malformed or empty."""
    # Checked here because OpenTelemetry logs a warning with the client's text for each malformed member.
    is_sound = len(tracestate) <= _MAX_TRACESTATE_CHARS and _TRACESTATE.fullmatch(tracestate)
    carrier = {"traceparent": traceparent, "tracestate": tracestate if is_sound else ""}
    return TraceContextTextMapPropagator().extract(carrier, context=Context())


def join_trace(traceparent: str) -> str:
    """Bind this task to the trace of `traceparent`, or to a new one; returns its id.

    Later root spans of the task belong to it, so that the id can be sent before the first span is opened.
    """
    named = trace.get_current_span(context_from(traceparent)).get_span_context().trace_id
    trace_id = named or RandomIdGenerator().generate_trace_id()
    _joined_trace_id.set(trace_id)
    return f"{trace_id:032x}"


def traceparent_of(span: trace.Span) -> str:
    """The W3C `traceparent` with `span` as the parent."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _current() -> _Telemetry:
    if not _telemetry:
        _telemetry.append(_Telemetry("triptych", "0"))
    return _telemetry[0]


def _otlp_exporter() -> SpanExporter:
    # Imported here: the import takes 0.4 s and most processes have no collector.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _record(span: ReadableSpan) -> SpanRecord:
    context, resource = span.context, span.resource.attributes
    attributes: Mapping[str, object] = span.attributes or {}
    return SpanRecord(
        name=span.name,
        trace_id=f"{context.trace_id:032x}",
        span_id=f"{context.span_id:016x}",
        parent_span_id="" if span.parent is None else f"{span.parent.span_id:016x}",
        service=str(resource.get("service.name", "")),
        pid=int(str(resource.get("process.pid", 0))),
        start_unix_ns=span.start_time or 0,
        end_unix_ns=span.end_time or 0,
        attributes={key: str(value) for key, value in attributes.items()},
        events=[(event.name, event.timestamp) for event in span.events],
        ok=span.status.status_code is not trace.StatusCode.ERROR,
    )
