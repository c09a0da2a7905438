"""Traces, metrics and logs of a process: its last traces, and OTLP export if it is configured.

A trace is recorded when it has ended: only then is decided whether it is exported. Fails open: a collector
that is away, slow or hangs costs log lines, never a request.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from itertools import pairwise

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from triptych_kit.config import read_environment
from triptych_kit.errors import ServiceError
from triptych_kit.telemetry.logs import bind_log_fields, log_fields, setup_logs
from triptych_kit.telemetry.metrics import Metrics
from triptych_kit.telemetry.spans import RecordedTrace, SpanRecord, TraceContext, Value

__all__ = [
    "StartTrace",
    "begin_trace",
    "bind_log_fields",
    "context_from",
    "current_method",
    "export_metrics",
    "join_trace",
    "log_fields",
    "recent_spans",
    "recent_traces",
    "record_trace",
    "setup_telemetry",
    "shutdown_telemetry",
    "this_process",
    "traced_operation",
]

MAX_RECENT = 64
_MAX_TRACESTATE_CHARS = 512
_MEMBER = r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
_TRACESTATE = re.compile(rf"({_MEMBER}([ \t]*,[ \t]*{_MEMBER}){{0,31}})?")
_EXPORT_DELAY_MS = 250
_FLUSH_DEADLINE_S = 1.0
_SAMPLED = trace.TraceFlags(trace.TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope("triptych")
_MAX_PHASES = 32

_ids = RandomIdGenerator()
# The trace of the call that this task serves and the call's method; 0 and "" if it serves none.
_call: ContextVar[tuple[int, str]] = ContextVar("triptych_call", default=(0, ""))


class _Telemetry:
    """The recorder and the exporter of this process's traces."""

    def __init__(self, service: str, instance: str) -> None:
        self.process: dict[str, str | int] = {"service": service, "instance": instance, "pid": os.getpid()}
        self.traces: deque[RecordedTrace] = deque(maxlen=MAX_RECENT)
        self.provider = TracerProvider(
            resource=Resource.create(
                {"service.name": service, "service.instance.id": instance, "process.pid": os.getpid()}
            ),
            shutdown_on_exit=False,
        )
        self._exporter: SpanExporter | None = None
        self._processor: BatchSpanProcessor | None = None
        if _exports_traces():
            self._exporter = _otlp_exporter()
            # Its queue has a limit, OTEL_BSP_MAX_QUEUE_SIZE; what exceeds it is dropped.
            self._processor = BatchSpanProcessor(self._exporter, schedule_delay_millis=_EXPORT_DELAY_MS)

    def record(self, recorded: RecordedTrace, *, is_exported: bool) -> None:
        self.traces.append(recorded)
        if self._processor is not None and is_exported:
            for span in recorded.make_spans():
                self._processor.on_end(_readable(span, recorded.context, self.provider.resource))

    def shutdown(self) -> None:
        """Export pending spans; a collector that does not answer delays the shutdown by a second at most."""
        if self._exporter is None or self._processor is None:
            return
        cut = threading.Timer(_FLUSH_DEADLINE_S, self._exporter.shutdown)
        cut.daemon = True
        cut.start()
        self._processor.shutdown()
        cut.cancel()


# A process has one telemetry, as it has one stderr. Traces recorded before the setup are kept as well.
_telemetry: list[_Telemetry] = []


def setup_telemetry(
    service: str, *, instance: str, log_format: str = "text", log_level: str = "info"
) -> StartTrace:
    """Set up logs and traces of this process. Called once in `main`, after the configuration is loaded."""
    setup_logs(service, instance=instance, log_format=log_format, log_level=log_level)
    shutdown_telemetry()
    _telemetry.append(_Telemetry(service, instance))
    return StartTrace(service)


def shutdown_telemetry() -> None:
    """Export pending spans, for a second at most, and discard all traces."""
    while _telemetry:
        _telemetry.pop().shutdown()


async def export_metrics(metrics: Metrics) -> None:
    """Export every OTEL_METRIC_EXPORT_INTERVAL ms, until cancelled. Returns at once without a collector."""
    if read_environment("OTEL_METRICS_EXPORTER") == "none" or not (
        read_environment("OTEL_EXPORTER_OTLP_ENDPOINT")
        or read_environment("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
    ):
        return
    from triptych_kit.telemetry.otlp_metrics import run_export

    interval = read_environment("OTEL_METRIC_EXPORT_INTERVAL") or ""
    await run_export(metrics, _current().provider.resource, interval)


def begin_trace(name: str, traceparent: str = "", tracestate: str = "") -> TraceContext:
    """A place for a root span: below the caller's span, else in the trace of the call that this task serves.

    The sampler of the environment (OTEL_TRACES_SAMPLER) decides whether it is sampled; by default the parent.
    """
    parent_context = context_from(traceparent, tracestate)
    parent = trace.get_current_span(parent_context).get_span_context()
    trace_id = parent.trace_id or _call.get()[0] or _ids.generate_trace_id()
    sampled = _current().provider.sampler.should_sample(parent_context, trace_id, name)
    return TraceContext(
        trace_id,
        _ids.generate_span_id(),
        parent.span_id,
        sampled.decision.is_sampled(),
        parent.trace_state,
    )


def record_trace(
    context: TraceContext, make_spans: Callable[[], Sequence[SpanRecord]], *, is_notable: bool = False
) -> None:
    """Keep a trace that has ended, and export it if it is sampled or notable.

    `make_spans` is called when somebody reads the trace, and must make the same spans each time.
    """
    is_exported = context.is_sampled or is_notable
    _current().record(RecordedTrace(context, make_spans), is_exported=is_exported)


def recent_spans(trace_id: str | None = None) -> list[SpanRecord]:
    """The spans of the last 64 traces, or those of one trace id, in the order in which the traces ended."""
    return [
        span
        for recorded in list(_current().traces)
        if trace_id is None or f"{recorded.context.trace_id:032x}" == trace_id
        for span in recorded.make_spans()
    ]


def recent_traces(num_traces: int) -> list[Sequence[SpanRecord]]:
    """The spans of each of the last traces, newest end first."""
    return [recorded.make_spans() for recorded in list(_current().traces)[::-1][:num_traces]]


def this_process() -> Mapping[str, str | int]:
    """The identity of this process in its traces: service, instance, pid."""
    return _current().process


@contextlib.contextmanager
def traced_operation(name: str, attributes: Mapping[str, Value]) -> Iterator[None]:
    """Record the block, an operation of an administrator, as a trace of one span. It is always exported."""
    context, start_ns = begin_trace(name), time.time_ns()
    error: str | None = None
    try:
        yield
    except BaseException as raised:
        is_status = isinstance(raised, ServiceError)
        error = str(raised) if is_status else type(raised).__name__
        raise
    finally:
        span = context.root(name, start_ns, time.time_ns(), attributes, error=error)
        record_trace(context, lambda: [span], is_notable=True)


class StartTrace:
    """The trace of a process's start: a span for each phase, of which each begins where the last one ends."""

    def __init__(self, service: str) -> None:
        self._name = f"start {service}"
        self._context = begin_trace(self._name)
        # Of interpreter, imports and configuration, all before this object.
        self._phases = [("configure", _process_start_ns())]
        self._has_ended = False
        self.enter("build")

    def enter(self, phase: str) -> None:
        """Begin a phase, if it is another than the present one."""
        if self._has_ended or self._phases[-1][0] == phase or len(self._phases) >= _MAX_PHASES:
            return
        self._phases.append((phase, time.time_ns()))

    def end(self, error: str | None = None) -> None:
        """The process serves, or has failed to. Further calls have no effect."""
        if self._has_ended:
            return
        self._has_ended = True
        end_ns = time.time_ns()
        marks = [*self._phases, ("", end_ns)]
        spans = [self._context.root(self._name, marks[0][1], end_ns, error=error)]
        for index, ((name, start_ns), (_, next_ns)) in enumerate(pairwise(marks)):
            spans.append(self._context.child(index, name, start_ns, next_ns))
        record_trace(self._context, lambda: spans, is_notable=True)


def context_from(traceparent: str, tracestate: str = "") -> Context:
    """The context of a W3C `traceparent`; an empty one, i.e. a new root, if it is malformed or empty."""
    # Checked here because OpenTelemetry logs a warning with the client's text for each malformed member.
    is_sound = len(tracestate) <= _MAX_TRACESTATE_CHARS and _TRACESTATE.fullmatch(tracestate)
    carrier = {"traceparent": traceparent, "tracestate": tracestate if is_sound else ""}
    return TraceContextTextMapPropagator().extract(carrier, context=Context())


def join_trace(traceparent: str, method: str) -> str:
    """Bind this task to the trace of `traceparent`, or to a new one; returns its id.

    Later traces of the task belong to it, so that the id can be sent before the first span is made.
    """
    named = trace.get_current_span(context_from(traceparent)).get_span_context().trace_id
    trace_id = named or _ids.generate_trace_id()
    _call.set((trace_id, method))
    return f"{trace_id:032x}"


def current_method() -> str:
    """The method that this task serves, `package.Service/Method`; "" if it serves no call."""
    return _call.get()[1].removeprefix("/")


def _current() -> _Telemetry:
    if not _telemetry:
        _telemetry.append(_Telemetry("triptych", "0"))
    return _telemetry[0]


def _exports_traces() -> bool:
    is_disabled = read_environment("OTEL_SDK_DISABLED").lower() == "true"
    if is_disabled or read_environment("OTEL_TRACES_EXPORTER") == "none":
        return False
    return bool(
        read_environment("OTEL_EXPORTER_OTLP_ENDPOINT")
        or read_environment("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    )


def _otlp_exporter() -> SpanExporter:
    # Imported here: the import takes 0.4 s and most processes have no collector.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    from triptych_kit.telemetry.otlp_failures import FirstFailures

    failures = FirstFailures("traces")

    class QuietExporter(OTLPSpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result = super().export(spans)
            if result is SpanExportResult.SUCCESS:
                failures.forget()
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
        kind=trace.SpanKind.SERVER if is_root else trace.SpanKind.INTERNAL,
        status=status,
        start_time=span.start_unix_ns,
        end_time=span.end_unix_ns,
        instrumentation_scope=_SCOPE,
    )


def _process_start_ns() -> int:
    """When this process began, to some 10 ms."""
    with open("/proc/self/stat", encoding="ascii") as file:
        started_ticks = int(file.read().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
    return time.time_ns() - int(max(0.0, age_s) * 1e9)
