"""Traces, metrics and logs of a process: its last traces, and OTLP export if it is configured.

A trace is recorded when it has ended: only then is decided whether it is exported. Fails open: a collector
that is away, slow or hangs costs log lines, never a request.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from itertools import pairwise

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from triptych_kit.config import read_environment
from triptych_kit.errors import ServiceError
from triptych_kit.telemetry.logs import bind_log_fields, log_fields, setup_logs
from triptych_kit.telemetry.metrics import Metrics
from triptych_kit.telemetry.span_export import ExportCounts, SpanExport, exports_traces
from triptych_kit.telemetry.spans import RecordedTrace, SpanRecord, TraceContext, Value

__all__ = [
    "StartTrace",
    "begin_trace",
    "bind_log_fields",
    "context_from",
    "current_method",
    "export_metrics",
    "exports_traces",
    "join_trace",
    "log_fields",
    "recent_spans",
    "recent_traces",
    "record_trace",
    "register_span_export",
    "setup_telemetry",
    "shutdown_telemetry",
    "this_process",
    "traced_operation",
]

MAX_RECENT = 64
_MAX_TRACESTATE_CHARS = 512
_MEMBER = r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
_TRACESTATE = re.compile(rf"({_MEMBER}([ \t]*,[ \t]*{_MEMBER}){{0,31}})?")
_MAX_PHASES = 32
_NAMESPACE = "triptych"

_ids = RandomIdGenerator()
# The trace of the call that this task serves and the call's method; 0 and "" if it serves none.
_call: ContextVar[tuple[int, str]] = ContextVar("triptych_call", default=(0, ""))


class _Telemetry:
    """The recorder and the exporter of this process's traces."""

    def __init__(self, service: str, instance: str) -> None:
        self.process: dict[str, str | int] = {"service": service, "instance": instance, "pid": os.getpid()}
        self.traces: deque[RecordedTrace] = deque(maxlen=MAX_RECENT)
        self.provider = TracerProvider(
            resource=_resource(service, instance),
            shutdown_on_exit=False,
        )
        self.span_counts = ExportCounts()
        self._export = SpanExport(self.provider.resource, self.span_counts) if exports_traces() else None

    def record(self, recorded: RecordedTrace, *, is_exported: bool) -> None:
        self.traces.append(recorded)
        if self._export is not None and is_exported:
            self._export.add(recorded)

    def shutdown(self) -> None:
        if self._export is not None:
            self._export.shutdown()


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


def register_span_export(metrics: Metrics) -> None:
    """Register how many spans this process exported, and how many it lost."""
    metrics.counter(
        "triptych_spans_exported_total",
        "Spans that the OTLP collector took.",
        lambda: _current().span_counts.num_exported,
    )
    metrics.counter(
        "triptych_spans_dropped_total",
        "Spans that were lost, by cause: queue_full, as the collector is slow, or export_failed.",
        lambda: _current().span_counts.dropped.values,
        labels=("cause",),
    )


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
        span = context.root(name, start_ns, time.time_ns(), attributes, error=error, kind="internal")
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
        spans = [self._context.root(self._name, marks[0][1], end_ns, error=error, kind="internal")]
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


def _resource(service: str, instance: str) -> Resource:
    """The origin of exports. OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME come before the process's own."""
    own: dict[str, str | int] = {
        "service.namespace": _NAMESPACE,
        "service.name": service,
        "service.instance.id": instance,
        "process.pid": os.getpid(),
    }
    of_environment = OTELResourceDetector().detect().attributes
    return Resource.create({**own, **of_environment})


def _process_start_ns() -> int:
    """When this process began, to some 10 ms."""
    with open("/proc/self/stat", encoding="ascii") as file:
        started_ticks = int(file.read().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
    return time.time_ns() - int(max(0.0, age_s) * 1e9)
