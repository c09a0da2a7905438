"""What a collector gets of a service's metrics."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc

from triptych_kit.telemetry.metrics import Metrics
from triptych_kit.telemetry.traces import export_metrics, setup_telemetry, shutdown_telemetry


class Collector(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self) -> None:
        self.received: asyncio.Queue = asyncio.Queue()

    async def Export(self, request, context):
        self.received.put_nowait(request)
        return metrics_service_pb2.ExportMetricsServiceResponse()


async def test_a_collector_gets_every_kind_without_aliases(monkeypatch: pytest.MonkeyPatch):
    server, collector = grpc.aio.server(), Collector()
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    setup_telemetry("engine", instance="3")
    metrics = Metrics("engine", {"engine": "3"})
    metrics.gauge("triptych_depth", "How deep.", lambda: 7, aliases=("vllm:depth",))
    metrics.counter("triptych_steps_total", "Steps.", lambda: {("a",): 1, ("b",): 2}, labels=("kind",))
    times = metrics.histogram("triptych_time_seconds", "Times.", (0.1, 1), labels=("kind",))
    times.of("a").observe(0.5)
    times.of("b").observe(2, times=3)
    usage = metrics.conventional_histogram(
        "gen_ai.client.token.usage",
        "Tokens.",
        (1, 4),
        unit="{token}",
        labels=("gen_ai.token.type", "error.type"),
    )
    usage.of("input", "").observe(3)
    exporting = asyncio.ensure_future(export_metrics(metrics))
    try:
        request = await asyncio.wait_for(collector.received.get(), 30)
    finally:
        exporting.cancel()
        await asyncio.wait([exporting])
        await server.stop(None)
        shutdown_telemetry()
    (group,) = request.resource_metrics
    assert {pair.key: pair.value.string_value for pair in group.resource.attributes}[
        "service.name"
    ] == "engine"
    found = {metric.name: metric for metric in group.scope_metrics[0].metrics}
    assert "vllm:depth" not in found
    assert found["triptych_depth"].gauge.data_points[0].as_double == 7
    assert found["triptych_steps_total"].sum.is_monotonic
    assert {
        tuple(sorted(pair.value.string_value for pair in point.attributes)): point.as_double
        for point in found["triptych_steps_total"].sum.data_points
    } == {("3", "a"): 1, ("3", "b"): 2}
    assert found["triptych_time_seconds"].unit == "s"
    assert [
        (list(point.explicit_bounds), list(point.bucket_counts), point.count, point.sum)
        for point in found["triptych_time_seconds"].histogram.data_points
    ] == [([0.1, 1], [0, 1, 0], 1, 0.5), ([0.1, 1], [0, 0, 3], 3, 6)]
    by_convention = found["gen_ai.client.token.usage"]
    assert by_convention.unit == "{token}"
    (point,) = by_convention.histogram.data_points
    assert {pair.key: pair.value.string_value for pair in point.attributes} == {
        "engine": "3",
        "gen_ai.token.type": "input",
    }
    assert (list(point.explicit_bounds), point.sum) == ([1, 4], 3)
    # Not known, and so not 0.
    for point in found["triptych_time_seconds"].histogram.data_points:
        assert not point.HasField("min")
        assert not point.HasField("max")


async def test_a_collector_that_takes_no_metrics_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    enough = asyncio.Event()
    num_refused = 0

    class Refusing(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation, details):
            nonlocal num_refused
            num_refused += 1
            if num_refused == 3:
                enough.set()
            return await continuation(details)

    server = grpc.aio.server(interceptors=[Refusing()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    metrics = Metrics("engine")
    metrics.gauge("triptych_depth", "How deep.", lambda: 7)
    exporting = asyncio.ensure_future(export_metrics(metrics))
    try:
        await asyncio.wait_for(enough.wait(), 30)
    finally:
        exporting.cancel()
        await asyncio.wait([exporting])
        await server.stop(None)
        shutdown_telemetry()
    # The exporter of an earlier test may still be ending.
    texts = [record.getMessage() for record in caplog.records]
    messages = [text for text in texts if "export" in text and f":{port}" in text]
    assert len(messages) == 1
    assert "UNIMPLEMENTED" in messages[0]


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_METRICS_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"},
    ],
    ids=["no collector", "turned off", "traces alone"],
)
async def test_nothing_is_exported_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
):
    for variable in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    await asyncio.wait_for(export_metrics(Metrics("engine")), 5)
