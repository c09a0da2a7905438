from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from queue import Queue
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from triptych_kit.errors import NotFound
from triptych_kit.telemetry.logs import bind_log_fields, log_fields, set_log_level, setup_logs
from triptych_kit.telemetry.metrics import Metrics
from triptych_kit.telemetry.spans import SpanEvent, TraceContext
from triptych_kit.telemetry.traces import (
    begin_trace,
    context_from,
    recent_spans,
    recent_traces,
    record_trace,
    register_span_export,
    setup_telemetry,
    shutdown_telemetry,
    traced_operation,
)

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
UNSAMPLED_PARENT = f"00-{TRACE_ID}-{SPAN_ID}-00"


class FakeCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP receiver that keeps what arrives."""

    def __init__(self) -> None:
        self.received: Queue[trace_service_pb2.ExportTraceServiceRequest] = Queue()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.received.put(request)
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def clean() -> Iterator[None]:
    """No telemetry before or after, logging as it was."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    shutdown_telemetry()
    yield
    shutdown_telemetry()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def engine_telemetry(clean: None) -> None:
    setup_telemetry("engine", instance="engine-0")


def record(
    name: str = "request", traceparent: str = PARENT, *, is_notable: bool = False, **fields: Any
) -> TraceContext:
    """Record a trace of one span that took 1,000 ns."""
    context = begin_trace(name, traceparent, fields.pop("tracestate", ""))
    record_trace(context, lambda: [context.root(name, 1000, 2000, **fields)], is_notable=is_notable)
    return context


def test_traces_that_have_ended_are_kept_as_plain_data(engine_telemetry: None) -> None:
    context = begin_trace("request", PARENT)
    assert recent_spans() == []
    events = [SpanEvent("scheduled", 1500, {"engine": "e"})]
    record_trace(
        context,
        lambda: [
            context.root("request", 1000, 3000, {"num_tokens": 7}, events, "broken"),
            context.child(0, "prefill", 2000, 3000),
        ],
    )
    root, child = recent_spans(TRACE_ID)
    assert (root.name, root.start_unix_ns, root.end_unix_ns) == ("request", 1000, 3000)
    assert (root.attributes, root.events, root.error) == ({"num_tokens": 7}, events, "broken")
    assert (root.parent_span_id, child.parent_span_id) == (SPAN_ID, root.span_id)
    assert child.error is None
    # Each reader gets the same ids.
    assert recent_spans(TRACE_ID) == [root, child]


def test_the_ids_of_children_differ(engine_telemetry: None) -> None:
    context = TraceContext(1, 2**64 - 1)
    ids = {context.child(index, "", 0, 0).span_id for index in range(128)}
    assert len(ids | {f"{context.span_id:016x}"}) == 129


def test_the_last_64_traces_are_kept(engine_telemetry: None) -> None:
    for number in range(70):
        record(str(number))
    assert [span.name for span in recent_spans()] == [str(number) for number in range(6, 70)]
    assert [spans[0].name for spans in recent_traces(2)] == ["69", "68"]


def test_a_traceparent_joins_two_processes(engine_telemetry: None) -> None:
    outer = record()
    inner = begin_trace("work", outer.traceparent)
    assert outer.traceparent == f"00-{TRACE_ID}-{outer.span_id:016x}-01"
    assert (inner.trace_id, inner.parent_id) == (outer.trace_id, outer.span_id)
    assert begin_trace("other").trace_id != outer.trace_id


@pytest.mark.parametrize(
    ("sampler", "traceparent", "is_sampled"),
    [
        ("", PARENT, True),
        ("", UNSAMPLED_PARENT, False),
        ("", "", True),
        ("always_off", PARENT, False),
        ("parentbased_always_off", PARENT, True),
        ("parentbased_always_off", "", False),
    ],
)
def test_the_parent_or_the_sampler_of_the_environment_decides(
    clean: None, monkeypatch: pytest.MonkeyPatch, sampler: str, traceparent: str, is_sampled: bool
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler) if sampler else None
    setup_telemetry("engine", instance="engine-0")
    context = record(traceparent=traceparent)
    assert context.is_sampled == is_sampled
    assert context.traceparent.endswith(f"-0{int(is_sampled)}")
    # What is shown here needs no collector and no decision.
    assert len(recent_spans()) == 1


@pytest.mark.parametrize(
    "traceparent", ["", "nonsense", f"00-{'0' * 32}-{SPAN_ID}-01", f"ff-{TRACE_ID}-{SPAN_ID}-01"]
)
def test_a_bad_traceparent_starts_a_new_trace(engine_telemetry: None, traceparent: str) -> None:
    record(traceparent=traceparent)
    (span,) = recent_spans()
    assert span.parent_span_id == ""
    assert span.trace_id != TRACE_ID


def test_traces_before_the_setup_are_not_lost(clean: None) -> None:
    record("early")
    assert [span.name for span in recent_spans()] == ["early"]


def test_a_start_is_a_trace_of_its_phases(clean: None) -> None:
    starting = setup_telemetry("engine", instance="engine-0")
    for phase in ("weights", "weights", "warm-up"):
        starting.enter(phase)
    starting.end()
    starting.enter("too late")
    starting.end("too late")
    root, *phases = recent_spans()
    assert (root.name, root.error) == ("start engine", None)
    assert [span.name for span in phases] == ["configure", "build", "weights", "warm-up"]
    assert [span.start_unix_ns for span in phases[1:]] == [span.end_unix_ns for span in phases[:-1]]
    assert (phases[0].start_unix_ns, phases[-1].end_unix_ns) == (root.start_unix_ns, root.end_unix_ns)
    assert 0 < time.time_ns() - root.start_unix_ns < 3600e9


def test_an_operation_is_a_trace_with_its_error(engine_telemetry: None) -> None:
    with pytest.raises(NotFound), traced_operation("drain engine", {"triptych.engine": "e"}):
        raise NotFound("no such engine", resource_type="engine", resource_name="e")
    (span,) = recent_spans()
    assert (span.name, span.attributes, span.error) == (
        "drain engine", {"triptych.engine": "e"}, "no such engine",
    )  # fmt: skip


@contextlib.contextmanager
def collecting(
    monkeypatch: pytest.MonkeyPatch,
    collector: trace_service_pb2_grpc.TraceServiceServicer,
    variable: str = "OTEL_EXPORTER_OTLP_ENDPOINT",
) -> Iterator[None]:
    """Telemetry of an engine that exports to `collector`."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv(variable, f"http://127.0.0.1:{port}")
    setup_telemetry("engine", instance="engine-0")
    try:
        yield
    finally:
        server.stop(None)


def test_spans_reach_an_otlp_collector(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = FakeCollector()
    with collecting(monkeypatch, collector):
        events = [SpanEvent("first_token", 1500, {"triptych.engine": "e"})]
        record(attributes={"gen_ai.usage.input_tokens": 7, "reasons": ("stop",)}, events=events, error="no")
        (resource_spans,) = collector.received.get(timeout=60).resource_spans
    resource = {one.key: one.value for one in resource_spans.resource.attributes}
    assert resource["service.name"].string_value == "engine"
    assert resource["service.namespace"].string_value == "triptych"
    assert resource["service.instance.id"].string_value == "engine-0"
    assert resource["process.pid"].int_value == os.getpid()
    (span,) = resource_spans.scope_spans[0].spans
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("request", TRACE_ID, SPAN_ID)
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (1000, 2000)
    assert (span.kind, span.status.message) == (span.SPAN_KIND_SERVER, "no")
    attributes = {one.key: one.value for one in span.attributes}
    assert attributes["gen_ai.usage.input_tokens"].int_value == 7
    assert [one.string_value for one in attributes["reasons"].array_value.values] == ["stop"]
    assert [(event.name, event.time_unix_nano) for event in span.events] == [("first_token", 1500)]
    assert [span.name for span in recent_spans()] == ["request"]


def test_the_environment_names_the_resource(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.namespace=chat,deployment.environment.name=test")
    collector = FakeCollector()
    with collecting(monkeypatch, collector):
        record()
        (resource_spans,) = collector.received.get(timeout=60).resource_spans
    resource = {one.key: one.value.string_value for one in resource_spans.resource.attributes}
    assert (resource["service.name"], resource["service.namespace"]) == ("engine", "chat")
    assert resource["deployment.environment.name"] == "test"


def test_a_child_may_be_a_call_of_another_process(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = FakeCollector()
    with collecting(monkeypatch, collector):
        context = begin_trace("request", PARENT)
        call = context.child(0, "call", 1000, 2000, kind="client", error="lost")
        below = context.child(1, "wait", 1000, 1500, below=0)
        record_trace(context, lambda: [context.root("request", 1000, 2000), call, below])
        (resource_spans,) = collector.received.get(timeout=60).resource_spans
    spans = {span.name: span for span in resource_spans.scope_spans[0].spans}
    assert (spans["call"].kind, spans["call"].status.message) == (spans["call"].SPAN_KIND_CLIENT, "lost")
    assert spans["wait"].parent_span_id == spans["call"].span_id
    assert context.traceparent_of_child(0) == f"00-{TRACE_ID}-{spans['call'].span_id.hex()}-01"


def test_an_unsampled_trace_is_exported_only_if_it_is_notable(
    clean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = FakeCollector()
    with collecting(monkeypatch, collector):
        record("dull", UNSAMPLED_PARENT)
        record("failed", UNSAMPLED_PARENT, is_notable=True, error="broken")
        record("sampled")
        found: set[str] = set()
        while "sampled" not in found:
            (resource_spans,) = collector.received.get(timeout=60).resource_spans
            found |= {span.name for span in resource_spans.scope_spans[0].spans}
    assert found == {"failed", "sampled"}


def test_what_is_pending_is_exported_at_the_end(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = FakeCollector()
    with collecting(monkeypatch, collector, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        # Once one has arrived there is a connection, which is what may take long on a busy machine.
        record("first")
        collector.received.get(timeout=60)
        record("last")
        shutdown_telemetry()
        request = collector.received.get_nowait()
    assert request.resource_spans[0].scope_spans[0].spans[0].name == "last"


def test_a_collector_that_is_away_costs_little(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    setup_telemetry("engine", instance="engine-0")
    record()
    started_at = time.monotonic()
    shutdown_telemetry()
    assert time.monotonic() - started_at < 5


def test_a_collector_that_never_answers_costs_little(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, released = threading.Event(), threading.Event()

    class Hanging(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            asked.set()
            released.wait(60)
            return trace_service_pb2.ExportTraceServiceResponse()

    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "512")
    with collecting(monkeypatch, Hanging()):
        record()
        assert asked.wait(60)
        started_at = time.monotonic()
        # Many more than the queue holds: they are dropped, and none of them waits.
        for _ in range(2000):
            record()
        assert time.monotonic() - started_at < 5
        assert _counted() == {"exported": 0, "queue_full": 2000 - 512, "export_failed": 0}
        shutdown_telemetry()
        assert time.monotonic() - started_at < 10
        released.set()


def test_exported_and_failed_spans_are_counted(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(FakeCollector):
        def Export(self, request: Any, context: Any) -> Any:
            self.received.put(request)
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "no")

    for collector, expected in (
        (FakeCollector(), {"exported": 2, "queue_full": 0, "export_failed": 0}),
        (Refusing(), {"exported": 0, "queue_full": 0, "export_failed": 2}),
    ):
        with collecting(monkeypatch, collector):
            context = begin_trace("request")
            root = context.root("request", 0, 1)
            record_trace(context, functools.partial(list, [root, context.child(0, "part", 0, 1)]))
            deadline = time.monotonic() + 60
            while _counted() != expected and time.monotonic() < deadline:
                time.sleep(0.01)
            assert _counted() == expected
            shutdown_telemetry()


def _counted() -> dict[str, float]:
    """What the metrics say of this process's spans."""
    metrics = Metrics("engine")
    register_span_export(metrics)
    exported, dropped = (
        metrics.families[f"triptych_spans_{name}_total"].read() for name in ("exported", "dropped")
    )
    assert isinstance(exported, int) and isinstance(dropped, dict)
    return {"exported": exported, **{cause: count for (cause,), count in dropped.items()}}


@pytest.mark.parametrize("variables", [{}, {"OTEL_TRACES_EXPORTER": "none"}])
def test_without_a_collector_no_exporter_is_loaded(variables: dict[str, str]) -> None:
    if variables:
        variables = {**variables, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    program = (
        "import sys; from triptych_kit.telemetry.traces import *\n"
        "setup_telemetry('engine', instance='0').end();"
        "shutdown_telemetry(); sys.exit('opentelemetry.exporter.otlp.proto.grpc' in sys.modules)"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    assert subprocess.run([sys.executable, "-c", program], env=environment | variables).returncode == 0


@pytest.mark.parametrize("tracestate", ["x" * 3000, "=,=,", "a=b, c", "a=\nb", ",".join(["k=v"] * 40)])
def test_a_malformed_tracestate_is_dropped_without_a_word(engine_telemetry, caplog, tracestate):
    context = context_from(f"00-{TRACE_ID}-{SPAN_ID}-01", tracestate)
    span_context = trace.get_current_span(context).get_span_context()
    assert (f"{span_context.trace_id:032x}", dict(span_context.trace_state)) == (TRACE_ID, {})
    assert caplog.records == []


def test_a_sound_tracestate_goes_along(engine_telemetry: None) -> None:
    context = context_from(f"00-{TRACE_ID}-{SPAN_ID}-01", "vendor=a:1, t@v2=x")
    assert dict(trace.get_current_span(context).get_span_context().trace_state) == {
        "vendor": "a:1",
        "t@v2": "x",
    }


logger = logging.getLogger("tests.logs")


@pytest.fixture
def log_to() -> Iterator[Callable[[str, str], io.StringIO]]:
    """Sets up logs into a text; what was set up before is put back."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level

    def setup(log_format: str, log_level: str) -> io.StringIO:
        stream = io.StringIO()
        setup_logs("engine", instance="1", log_format=log_format, log_level=log_level, stream=stream)
        return stream

    yield setup
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


async def test_json_lines_have_all_fields(log_to: Callable[[str, str], io.StringIO]) -> None:
    stream = log_to("json", "info")
    bind_log_fields(request_id="r1", trace_id="t1")
    logger.info("request finished", extra={"reason": "stop", "num_output_tokens": 3})
    (line,) = lines(stream)
    assert line.pop("ts").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "tests.logs",
        "service": "engine",
        "instance": "1",
        "msg": "request finished",
        "request_id": "r1",
        "trace_id": "t1",
        "reason": "stop",
        "num_output_tokens": 3,
    }


def test_a_traceback_stays_in_its_line(log_to: Callable[[str, str], io.StringIO]) -> None:
    stream = log_to("json", "info")
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        logger.exception("incident")
    (line,) = lines(stream)
    assert "RuntimeError: broken" in line["exception"]


async def test_text_lines_are_for_people(log_to: Callable[[str, str], io.StringIO]) -> None:
    stream = log_to("text", "info")
    bind_log_fields(request_id="r1", trace_id="")
    logger.info("aborted", extra={"cause": "client left\nforged line", "step": 3})
    (line,) = stream.getvalue().splitlines()
    assert line.endswith('INFO    engine[1] aborted request_id=r1 cause="client left\\nforged line" step=3')


def test_lines_that_do_not_end_at_a_terminal_are_json_unless_it_is_asked_for_text(
    log_to: Callable[[str, str], io.StringIO],
) -> None:
    stream = log_to("auto", "info")
    logger.info("line")
    (line,) = lines(stream)
    assert line["msg"] == "line"


def test_a_second_setup_replaces_the_first(log_to: Callable[[str, str], io.StringIO]) -> None:
    first, second = log_to("json", "info"), log_to("json", "info")
    logger.info("once")
    assert (len(lines(first)), len(lines(second))) == (0, 1)


def test_the_level_can_change_while_running(log_to: Callable[[str, str], io.StringIO]) -> None:
    stream = log_to("json", "warning")
    logger.info("not shown")
    set_log_level("debug")
    logger.debug("shown")
    assert [line["msg"] for line in lines(stream)] == ["shown"]


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="'loud' is not one of debug, info, warning, error"):
        setup_logs("engine", instance="0", log_format="text", log_level="loud")


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="'xml' is not one of auto, text, json"):
        setup_logs("engine", instance="0", log_format="xml", log_level="info")


async def test_bound_fields_add_up() -> None:
    bind_log_fields(request_id="r1")
    bind_log_fields(trace_id="t1", request_id="r2")
    assert dict(log_fields()) == {"request_id": "r2", "trace_id": "t1"}
