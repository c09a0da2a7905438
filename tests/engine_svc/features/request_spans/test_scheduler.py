"""Spans of a request: made when it ends, below the context that came with it, on the time it happened."""

from __future__ import annotations

import time

import pytest

from engine_svc.core.request import FinishReason, Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.features.request_spans.scheduler import RequestSpans
from service_kit.clock import FakeClock
from service_kit.telemetry import SpanRecord, recent_spans, tracer

_PARENT = "b" * 16


def finished_request(trace: str, reason: FinishReason, **times: float | None) -> Request:
    context = (f"00-{trace}-{_PARENT}-01", "")
    request = Request(
        "r", [1, 2, 3, 4], 3, SamplingParams(max_tokens=4), arrival_at=1.0, trace_context=context
    )
    request.finish_reason = reason
    for name, at in times.items():
        setattr(request.timeline, name, at)
    return request


def spans_of(request: Request, trace: str) -> dict[str, SpanRecord]:
    deferred: list = []
    spans = RequestSpans(tracer(), FakeClock(100.0), deferred.append)
    spans.on_finish(request)
    assert recent_spans(trace) == []
    for make in deferred:
        make()
    return {span.name: span for span in recent_spans(trace)}


def test_a_finished_request_gets_a_tree_below_its_own_context():
    trace = "1" * 32
    request = finished_request(
        trace, FinishReason.LENGTH, scheduled_at=2.0, first_token_at=4.0, finished_at=9.0
    )
    request.timeline.events = [("scheduled", 2.0), ("preempted", 3.0), ("first_token", 4.0)]
    spans = spans_of(request, trace)
    assert set(spans) == {"engine.request", "queue", "prefill", "decode"}
    root = spans["engine.request"]
    assert root.parent_span_id == _PARENT
    assert {spans[name].parent_span_id for name in ("queue", "prefill", "decode")} == {root.span_id}
    assert [name for name, _ in root.events] == ["scheduled", "preempted", "first_token"]
    assert root.attributes["finish_reason"] == "length"
    assert "abort_cause" not in root.attributes
    assert {span.attributes["request_id"] for span in spans.values()} == {"r"}
    assert root.attributes["num_output_tokens"] == "1"
    seconds = {name: (span.end_unix_ns - span.start_unix_ns) / 1e9 for name, span in spans.items()}
    assert seconds == pytest.approx({"engine.request": 8.0, "queue": 1.0, "prefill": 2.0, "decode": 5.0})
    assert spans["prefill"].end_unix_ns == root.events[2][1] == spans["decode"].start_unix_ns


def test_times_become_wall_clock_times():
    trace = "2" * 32
    request = finished_request(
        trace, FinishReason.STOP, scheduled_at=100.0, first_token_at=100.0, finished_at=100.0
    )
    spans = spans_of(request, trace)
    assert abs(spans["engine.request"].end_unix_ns - time.time_ns()) < 60e9


@pytest.mark.parametrize(
    ("times", "names"),
    [
        ({"finished_at": 5.0}, {"engine.request", "queue"}),
        ({"scheduled_at": 2.0, "finished_at": 5.0}, {"engine.request", "queue", "prefill"}),
    ],
    ids=["while waiting", "before its first token"],
)
def test_an_aborted_request_has_the_spans_it_came_to(times, names):
    trace = f"{3 + len(times):x}" * 32
    request = finished_request(trace, FinishReason.ABORT, **times)
    request.timeline.events.append(("aborted", 5.0))
    request.abort_cause = "deadline"
    spans = spans_of(request, trace)
    assert set(spans) == names
    assert spans["engine.request"].attributes["finish_reason"] == "abort"
    assert spans["engine.request"].attributes["abort_cause"] == "deadline"
    assert [name for name, _ in spans["engine.request"].events] == ["aborted"]


def test_a_failed_request_has_a_failed_span():
    trace = "7" * 32
    spans = spans_of(finished_request(trace, FinishReason.ERROR, finished_at=2.0), trace)
    assert not spans["engine.request"].ok


def test_a_request_without_a_context_has_no_spans():
    request = finished_request("8" * 32, FinishReason.STOP, finished_at=2.0)
    request.trace_context = ("", "")
    deferred: list = []
    RequestSpans(tracer(), FakeClock(100.0), deferred.append).on_finish(request)
    assert deferred == []
