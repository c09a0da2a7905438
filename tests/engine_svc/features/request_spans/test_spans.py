"""A sampled request has one span, below the one that its ADD names, however it ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine_svc.convert import messages
from engine_svc.convert.feature import WireFeatures
from engine_svc.core.request import Request
from engine_svc.features.request_spans.extras import TracedRequest
from engine_svc.features.request_spans.scheduler import RequestSpans
from engine_svc.features.request_spans.wire import ParentOfAdd
from tests.engine_svc.scheduler.fakes import EOS, Stage, request
from tests.engine_svc.session.service_rig import make_entry, make_facts
from triptych.engine.v1 import add_pb2
from triptych_kit.clock import FakeClock
from triptych_kit.telemetry import conventions as names
from triptych_kit.telemetry.spans import SpanRecord, TraceContext
from triptych_kit.telemetry.traces import recent_spans

PARENT_ID = "00f067aa0ba902b7"


def parsed(trace_id: str, *, is_exported: bool = True, parent: str = "", **fields: object) -> Request:
    """The request of an ADD with a trace context."""
    entry = make_entry(1)
    traceparent = parent or f"00-{trace_id}-{PARENT_ID}-01"
    entry.MergeFrom(add_pb2.AddEntry(trace_context=add_pb2.TraceContext(traceparent=traceparent), **fields))
    features = WireFeatures([ParentOfAdd(is_exported=is_exported)])
    return messages.to_request(entry, session_number=1, facts=make_facts(), now=0.0, features=features)


class Traced:
    """A scheduler with the feature, whose event loop runs when the test lets it."""

    def __init__(self) -> None:
        self.deferred: list[Callable[[], None]] = []
        self._recorded: list[SpanRecord] = []
        self.stage = Stage(features=[RequestSpans(FakeClock(), self.deferred.append)])

    def add(self, added: Request) -> Request:
        context = TraceContext(0xA1, 7, int(PARENT_ID, 16))
        added.extras[TracedRequest] = TracedRequest(context, "mine", "tiny", 2, self._recorded.append)
        self.stage.add(added)
        return added

    def span(self) -> SpanRecord:
        """The only span, made by the only call that the engine thread left to the event loop."""
        assert self._recorded == []
        (record,) = self.deferred
        record()
        (span,) = self._recorded
        return span


def test_the_span_is_a_child_of_the_frontends_and_has_its_times_and_counts():
    traced = Traced()
    added = traced.add(request("a", 8, max_tokens=4))
    assert added.extras == {}  # ranks do not get it
    added.timeline.queued_at = 0.5
    for _ in range(4):
        traced.stage.step()
    span = traced.span()
    assert (span.name, span.kind, span.parent_span_id) == ("llm_request", "server", PARENT_ID)
    assert (span.end_unix_ns - span.start_unix_ns) / 1e9 == pytest.approx(3.5)
    expected = {
        names.REQUEST_ID: "mine",
        names.REQUEST_ID_OF_VLLM: "mine",
        names.ATTEMPT: 2,
        names.RESPONSE_MODEL: "tiny",
        names.REQUEST_MAX_TOKENS: 4,
        names.REQUEST_TEMPERATURE: 1.0,
        names.REQUEST_TOP_P: 1.0,
        names.REQUEST_N: 1,
        names.USAGE_INPUT_TOKENS: 8,
        names.USAGE_PROMPT_TOKENS: 8,
        names.USAGE_OUTPUT_TOKENS: 4,
        names.USAGE_COMPLETION_TOKENS: 4,
        names.USAGE_CACHE_READ_TOKENS: 0,
        names.NUM_PREEMPTIONS: 0,
        names.RESPONSE_FINISH_REASONS: ("length",),
        names.LATENCY_TIME_IN_QUEUE: 0.5,
        names.LATENCY_TIME_TO_FIRST_TOKEN: 0.5,
        names.LATENCY_PREFILL: 0.0,
        names.LATENCY_DECODE: 3.0,
        names.LATENCY_INFERENCE: 3.0,
        names.LATENCY_END_TO_END: 3.5,
    }
    assert {name: span.attributes.get(name) for name in expected} == expected
    assert [event.name for event in span.events] == ["scheduled", "first_token"]
    assert span.error is None


def test_a_request_of_an_earlier_engine_counts_what_this_one_made():
    traced = Traced()
    continued = request("a", 8)
    continued.token_ids += [7, 7, 7]
    traced.add(continued)
    traced.stage.step()
    traced.stage.step({"a": [EOS]})
    span = traced.span()
    assert span.attributes[names.USAGE_OUTPUT_TOKENS] == 2
    assert span.attributes[names.RESPONSE_FINISH_REASONS] == ("stop",)


def test_an_aborted_request_has_a_span_with_the_cause():
    traced = Traced()
    traced.add(request("a", 8))
    traced.stage.scheduler.abort(["a"], now=2.0, cause="client")
    span = traced.span()
    assert span.attributes[names.RESPONSE_FINISH_REASONS] == ("abort",)
    assert span.attributes[names.CAUSE] == "client"
    assert (span.attributes[names.LATENCY_TIME_IN_QUEUE], span.error) == (2.0, None)
    assert names.LATENCY_PREFILL not in span.attributes
    assert [event.name for event in span.events] == ["aborted"]


def test_a_request_that_fails_has_a_failed_span_and_preemptions_are_counted():
    traced = Traced()
    traced.add(request("a", 8))
    traced.stage.step()
    traced.stage.preempt_running()
    plan = traced.stage.schedule()
    traced.stage.update(plan, non_finite=[0])
    span = traced.span()
    assert span.error
    assert span.attributes[names.ERROR_TYPE] == "INTERNAL"
    assert span.attributes[names.NUM_PREEMPTIONS] == 1
    assert [event.name for event in span.events] == ["scheduled", "first_token", "preempted", "resumed"]


def test_a_request_without_a_parent_has_no_span():
    traced = Traced()
    traced.stage.add(request("a", 8, max_tokens=1))
    traced.stage.step()
    assert traced.deferred == []


def test_an_add_names_the_parent_and_the_clients_id():
    trace_id = f"{0xB1:032x}"
    traced = parsed(trace_id, external_request_id="mine", attempt=3).extras[TracedRequest]
    traced.record(traced.context.root("llm_request", 0, 1))
    assert [span.parent_span_id for span in recent_spans(trace_id)] == [PARENT_ID]
    assert (f"{traced.context.trace_id:032x}", f"{traced.context.parent_id:016x}") == (trace_id, PARENT_ID)
    assert (traced.request_id, traced.model, traced.attempt) == ("mine", "fake", 3)


@pytest.mark.parametrize(
    "parent",
    [f"00-{0xB2:032x}-{PARENT_ID}-00", "00-zz-1-01", f"00-{0:032x}-{PARENT_ID}-01", "x" * 10_000],
    ids=["not sampled", "malformed", "no trace", "long"],
)
def test_an_add_without_a_sampled_parent_is_served_without_a_span(parent: str):
    assert parsed("", parent=parent).extras == {}


def test_without_a_collector_the_parent_is_not_read():
    assert parsed(f"{0xB3:032x}", is_exported=False).extras == {}
