"""Exports metrics to an OTLP collector. Imported only where there is one: it takes long to import."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from time import time_ns
from typing import Any

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import metrics_core

from triptych_kit.telemetry.metrics import Metrics
from triptych_kit.telemetry.otlp_failures import FirstFailures

_DEFAULT_INTERVAL_MS = 60_000
_MIN_INTERVAL_MS = 100
_CUMULATIVE = AggregationTemporality.CUMULATIVE
# The least and the greatest value of a histogram, which are optional in OTLP, though not by the SDK's types.
_UNKNOWN: Any = None


async def run_export(metrics: Metrics, of: Resource, interval_text: str) -> None:
    """Export `metrics` of the process `of` until cancelled, every `interval_text` ms; "": every minute."""
    interval_ms = _interval_ms(interval_text)
    loop, started_at_ns = asyncio.get_running_loop(), time_ns()
    # In a thread of its own, which is never waited for: the exporter waits for its collector.
    thread = ThreadPoolExecutor(1, "otlp-metrics")
    failures = FirstFailures("metrics")
    try:
        exporter = await loop.run_in_executor(thread, _make_exporter)
        while True:
            await asyncio.sleep(interval_ms / 1000)
            data = to_otlp(
                metrics.collect(with_aliases=False, by_convention=True), of, started_at_ns, time_ns()
            )
            if await loop.run_in_executor(thread, exporter.export, data) is MetricExportResult.SUCCESS:
                failures.forget()
    finally:
        failures.close()
        thread.shutdown(wait=False, cancel_futures=True)


def to_otlp(
    metrics: Iterable[metrics_core.Metric], of: Resource, started_at_ns: int, now_ns: int
) -> MetricsData:
    """The same values in OTLP's terms."""
    converted = [_converted(metric, started_at_ns, now_ns) for metric in metrics if metric.samples]
    scope = ScopeMetrics(InstrumentationScope("triptych"), converted, "")
    return MetricsData([ResourceMetrics(of, [scope], "")])


def _converted(metric: metrics_core.Metric, started_at_ns: int, now_ns: int) -> Metric:
    unit = metric.unit or next(
        (unit for suffix, unit in (("_seconds", "s"), ("_bytes", "By")) if metric.name.endswith(suffix)), ""
    )
    if metric.type == "histogram":
        points = list(_histogram_points(metric, started_at_ns, now_ns))
        return Metric(metric.name, metric.documentation, unit, Histogram(points, _CUMULATIVE))
    numbers = [
        NumberDataPoint(sample.labels, started_at_ns, now_ns, float(sample.value))
        for sample in metric.samples
    ]
    if metric.type == "counter":
        total = Sum(numbers, _CUMULATIVE, is_monotonic=True)
        return Metric(f"{metric.name}_total", metric.documentation, unit, total)
    return Metric(metric.name, metric.documentation, unit, Gauge(numbers))


def _histogram_points(
    metric: metrics_core.Metric, started_at_ns: int, now_ns: int
) -> Iterator[HistogramDataPoint]:
    """A data point per series, whose samples follow each other: buckets, count, sum."""
    bounds: list[float] = []
    counts: list[int] = []
    for sample in metric.samples:
        if sample.name.endswith("_bucket"):
            bounds.append(float(sample.labels["le"]))
            counts.append(int(sample.value))
        elif sample.name.endswith("_sum"):
            own = [later - earlier for earlier, later in pairwise([0, *counts])]
            yield HistogramDataPoint(
                # An empty label is none, in Prometheus as well.
                {name: value for name, value in sample.labels.items() if value},
                started_at_ns,
                now_ns,
                counts[-1],
                sample.value,
                own,
                bounds[:-1],
                _UNKNOWN,
                _UNKNOWN,
            )
            bounds, counts = [], []


def _interval_ms(text: str) -> int:
    return max(_MIN_INTERVAL_MS, int(text)) if text.isdigit() else _DEFAULT_INTERVAL_MS


def _make_exporter() -> MetricExporter:
    # Imported here, as the exporter of spans.
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter()
