from __future__ import annotations

import pytest

from triptych_kit.telemetry.metrics import MAX_SERIES, Metrics, to_text


def lines_of(metrics: Metrics) -> list[str]:
    return to_text(metrics.collect()).decode().splitlines()


def test_metrics_are_at_zero_once_registered_and_read_when_scraped():
    metrics = Metrics("test", {"engine": "0"})
    depth = [0]
    metrics.gauge("triptych_depth", "How deep.", lambda: depth[0])
    ends = metrics.counts("triptych_ends_total", "Ends.", labels=("reason",), zeros=[("stop",)])
    latency = metrics.histogram("triptych_latency_seconds", "How long.", (0.1, 1)).of()
    first = lines_of(metrics)
    assert 'triptych_depth{engine="0"} 0.0' in first
    assert 'triptych_ends_total{engine="0",reason="stop"} 0.0' in first
    assert 'triptych_latency_seconds_count{engine="0"} 0.0' in first
    depth[0] = 3
    ends.add("stop")
    ends.add("length", by=2)
    for value in (0.1, 0.5, 7):
        latency.observe(value, times=2)
    later = lines_of(metrics)
    assert 'triptych_depth{engine="0"} 3.0' in later
    assert [line for line in later if line.startswith("triptych_ends_total")] == [
        'triptych_ends_total{engine="0",reason="stop"} 1.0',
        'triptych_ends_total{engine="0",reason="length"} 2.0',
    ]
    assert [line for line in later if line.startswith("triptych_latency_seconds")] == [
        'triptych_latency_seconds_bucket{engine="0",le="0.1"} 2.0',
        'triptych_latency_seconds_bucket{engine="0",le="1.0"} 4.0',
        'triptych_latency_seconds_bucket{engine="0",le="+Inf"} 6.0',
        'triptych_latency_seconds_count{engine="0"} 6.0',
        'triptych_latency_seconds_sum{engine="0"} 15.2',
    ]


def test_an_alias_has_the_values_of_its_metric():
    metrics = Metrics("test")
    metrics.counter("triptych_steps_total", "Steps.", lambda: 4, aliases=("vllm:steps_total",))
    assert {"triptych_steps_total 4.0", "vllm:steps_total 4.0"} <= set(lines_of(metrics))
    assert "vllm" not in to_text(metrics.collect(with_aliases=False)).decode()


def test_a_metric_of_the_conventions_has_prometheus_names_when_scraped():
    metrics = Metrics("test")
    times = metrics.conventional_histogram(
        "gen_ai.server.time_to_first_token", "Times.", (1,), unit="s", labels=("gen_ai.request.model",)
    )
    times.of("tiny").observe(0.5)
    name = "gen_ai_server_time_to_first_token_seconds_bucket"
    assert f'{name}{{gen_ai_request_model="tiny",le="1.0"}} 1.0' in lines_of(metrics)
    assert "gen_ai.server" not in "".join(lines_of(metrics))


def test_label_values_are_bounded():
    metrics = Metrics("test")
    counts = metrics.counts("triptych_codes_total", "Codes.", labels=("code",))
    sizes = metrics.histogram("triptych_size_bytes", "Sizes.", (1,), labels=("code",))
    for number in range(3 * MAX_SERIES):
        counts.add(str(number))
        sizes.of(str(number)).observe(1)
    assert len(counts.values) == len(sizes.values) == MAX_SERIES + 1
    assert counts.values["other",] == 2 * MAX_SERIES
    assert sizes.of("other").counts == [2 * MAX_SERIES, 0]


def test_a_metric_that_cannot_be_read_does_not_hide_the_others(caplog: pytest.LogCaptureFixture):
    metrics = Metrics("test")
    metrics.gauge("triptych_broken", "Broken.", lambda: 1 / 0)
    metrics.gauge("triptych_whole", "Whole.", lambda: 1)
    assert "triptych_whole 1.0" in lines_of(metrics)
    assert "metric cannot be read" in caplog.text


def test_a_name_is_registered_once():
    metrics = Metrics("test")
    metrics.gauge("triptych_depth", "How deep.", lambda: 0)
    with pytest.raises(ValueError, match="triptych_depth is registered already"):
        metrics.gauge("triptych_depth", "How deep.", lambda: 0)
