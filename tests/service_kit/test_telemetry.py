from __future__ import annotations

import io
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from queue import Queue
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from service_kit.logs import bind_log_fields, log_fields, set_log_level, setup_logs
from service_kit.telemetry import (
    context_from,
    recent_spans,
    setup_telemetry,
    shutdown_telemetry,
    traceparent_of,
    tracer,
)

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"


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


def test_finished_spans_are_kept_as_plain_data(engine_telemetry: None) -> None:
    span = tracer().start_span("prefill", start_time=1000, attributes={"num_tokens": 7})
    span.add_event("scheduled", timestamp=1500)
    assert recent_spans() == []
    span.end(end_time=2000)
    (record,) = recent_spans()
    assert (record.name, record.start_unix_ns, record.end_unix_ns) == ("prefill", 1000, 2000)
    assert (record.service, record.pid, record.parent_span_id) == ("engine", os.getpid(), "")
    assert (record.attributes, record.events, record.ok) == ({"num_tokens": "7"}, [("scheduled", 1500)], True)


def test_a_failed_span_is_not_ok(engine_telemetry: None) -> None:
    span = tracer().start_span("request")
    span.set_status(trace.StatusCode.ERROR)
    span.end()
    assert not recent_spans()[0].ok


def test_the_ring_keeps_the_last_2048(engine_telemetry: None) -> None:
    for number in range(2100):
        tracer().start_span(str(number)).end()
    names = [record.name for record in recent_spans()]
    assert (len(names), names[0], names[-1]) == (2048, "52", "2099")


def test_a_traceparent_joins_two_processes(engine_telemetry: None) -> None:
    parent = tracer().start_span("request", context=context_from(f"00-{TRACE_ID}-{SPAN_ID}-01", "vendor=1"))
    child = tracer().start_span("engine.request", context=context_from(traceparent_of(parent)))
    child.end()
    parent.end()
    tracer().start_span("other").end()
    inner, outer = recent_spans(TRACE_ID)
    assert (outer.parent_span_id, inner.parent_span_id) == (SPAN_ID, outer.span_id)


def test_a_client_that_does_not_sample_is_traced_all_the_same(engine_telemetry: None) -> None:
    tracer().start_span("request", context=context_from(f"00-{TRACE_ID}-{SPAN_ID}-00")).end()
    assert [record.name for record in recent_spans(TRACE_ID)] == ["request"]


@pytest.mark.parametrize(
    "traceparent", ["", "nonsense", f"00-{'0' * 32}-{SPAN_ID}-01", f"ff-{TRACE_ID}-{SPAN_ID}-01"]
)
def test_a_bad_traceparent_starts_a_new_trace(engine_telemetry: None, traceparent: str) -> None:
    tracer().start_span("request", context=context_from(traceparent)).end()
    (record,) = recent_spans()
    assert record.parent_span_id == ""
    assert record.trace_id != TRACE_ID


def test_spans_before_the_setup_are_not_lost(clean: None) -> None:
    tracer().start_span("early").end()
    assert [record.name for record in recent_spans()] == ["early"]


def test_the_sampler_of_the_environment_counts(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    setup_telemetry("engine", instance="engine-0")
    tracer().start_span("request").end()
    assert recent_spans() == []


def test_spans_reach_an_otlp_collector(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = FakeCollector()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    setup_telemetry("engine", instance="engine-0")
    tracer().start_span("request", context=context_from(f"00-{TRACE_ID}-{SPAN_ID}-01")).end()
    request = collector.received.get(timeout=60)
    server.stop(None)
    (resource_spans,) = request.resource_spans
    resource = {one.key: one.value for one in resource_spans.resource.attributes}
    assert resource["service.name"].string_value == "engine"
    assert resource["service.instance.id"].string_value == "engine-0"
    assert resource["process.pid"].int_value == os.getpid()
    (span,) = resource_spans.scope_spans[0].spans
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("request", TRACE_ID, SPAN_ID)
    assert [record.name for record in recent_spans()] == ["request"]


def test_what_is_pending_is_exported_at_the_end(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = FakeCollector()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"http://127.0.0.1:{port}")
    setup_telemetry("engine", instance="engine-0")
    # Once one has arrived there is a connection, which is what may take long on a busy machine.
    tracer().start_span("first").end()
    collector.received.get(timeout=60)
    tracer().start_span("last").end()
    shutdown_telemetry()
    assert collector.received.get_nowait().resource_spans[0].scope_spans[0].spans[0].name == "last"
    server.stop(None)


def test_a_collector_that_is_away_costs_little(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    setup_telemetry("engine", instance="engine-0")
    tracer().start_span("request").end()
    started_at = time.monotonic()
    shutdown_telemetry()
    assert time.monotonic() - started_at < 5


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
