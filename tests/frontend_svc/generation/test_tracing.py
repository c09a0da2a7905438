"""The trace of one request: which spans it has, how many at most, and when it is exported all the same."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import grpc
import pytest

import frontend_svc.generation.tracing
from frontend_svc.generation.caller import Caller
from frontend_svc.generation.tracing import RequestTimeline, RequestTrace, RequestTraces
from frontend_svc.output.engine_times import EngineTimes, EventKind, Progress
from tests.frontend_svc.fakes import (
    AT_LENGTH,
    WAIT_S,
    FakeEngine,
    FakeRequest,
    answer,
    make_request,
    read_all,
    serving,
)
from triptych.api.v1 import chat_message_pb2
from triptych.engine.v1 import step_pb2
from triptych_kit.errors import ResourceExhausted
from triptych_kit.telemetry import conventions as names
from triptych_kit.telemetry.spans import SpanRecord, TraceContext
from triptych_kit.telemetry.traces import recent_spans, setup_telemetry, shutdown_telemetry

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4738"
METADATA = (("traceparent", f"00-{TRACE_ID}-00f067aa0ba902b7-01"),)
SECRET = "hovercraft"


@pytest.fixture
def telemetry() -> Iterator[None]:
    setup_telemetry("frontend", instance="0", log_level="error")
    yield
    shutdown_telemetry()


def phases(spans: list[SpanRecord]) -> list[tuple[str, object, object]]:
    return [
        (span.name, span.attributes[names.ENGINE], span.attributes.get(names.OUTPUT_INDEX))
        for span in spans
        if names.ENGINE in span.attributes
    ]


async def test_each_output_of_a_prompt_has_phases_of_its_own(telemetry):
    def one_each(engine: FakeEngine, request: FakeRequest) -> None:
        engine.step({request: [7]}, cached={request: 0}, finished={request: AT_LENGTH})

    async with serving(FakeEngine(one_each)) as (client, _):
        await client.inference.GenerateOnce(make_request(n=2), timeout=WAIT_S, metadata=METADATA)
    root, *children = recent_spans(TRACE_ID)
    assert phases(children) == [
        *(("engine", "engine-0", index) for index in range(2)),
        *((phase, "engine-0", index) for index in range(2) for phase in ("prefill", "decode")),
    ]
    attempts = {
        span.attributes[names.OUTPUT_INDEX]: span.span_id for span in children if span.kind == "client"
    }
    below = {(span.attributes[names.OUTPUT_INDEX], span.parent_span_id) for span in children[3:-1]}
    assert below == set(attempts.items())
    assert {span.parent_span_id for span in children if span.kind == "client"} == {root.span_id}
    assert root.kind == "server"
    assert root.attributes[names.REQUEST_CHOICE_COUNT] == 2
    assert root.attributes[names.RESPONSE_FINISH_REASONS] == ("length", "length")
    assert root.attributes[names.REQUEST_STREAM] is False
    firsts = [event.attributes for event in root.events if event.name == "first_token"]
    assert firsts == [{names.ENGINE: "engine-0", names.OUTPUT_INDEX: index} for index in range(2)]


async def test_a_span_has_the_drafts_of_all_outputs(telemetry):
    ending = step_pb2.StepFinished(drafts=step_pb2.DraftUse(num_proposed=5, num_accepted=3))
    ending.MergeFrom(AT_LENGTH)

    def one_each(engine: FakeEngine, request: FakeRequest) -> None:
        engine.step({request: [7]}, finished={request: ending})

    async with serving(FakeEngine(one_each)) as (client, _):
        await client.inference.GenerateOnce(make_request(n=2), timeout=WAIT_S, metadata=METADATA)
    root = recent_spans(TRACE_ID)[0]
    assert root.attributes[names.NUM_DRAFT_TOKENS] == 10
    assert root.attributes[names.NUM_ACCEPTED_DRAFT_TOKENS] == 6


async def test_a_chat_is_named_so_and_nothing_of_its_content_is_recorded(telemetry):
    part = chat_message_pb2.ChatPart(text=SECRET)
    message = chat_message_pb2.ChatMessage(role=chat_message_pb2.CHAT_ROLE_USER, parts=[part])
    request = chat_message_pb2.ChatRequest(messages=[message])
    request.sampling.stop.append(SECRET + "s")
    request.sampling.seed = 7
    async with serving(FakeEngine(answer("the cat"), chat_template="{{ messages[0].content }}")) as (
        client,
        _,
    ):
        async for _ in client.chat.Chat(request, timeout=WAIT_S, metadata=METADATA):
            pass
    root, *_ = spans = recent_spans(TRACE_ID)
    assert root.name == "chat tiny"
    assert root.attributes[names.RPC_METHOD] == "triptych.api.v1.ChatService/Chat"
    assert root.attributes[names.REQUEST_SEED] == 7
    assert names.REQUEST_CHOICE_COUNT not in root.attributes
    shown = json.dumps([(span.name, dict(span.attributes), str(span.events)) for span in spans])
    assert SECRET not in shown
    assert "the cat" not in shown


@pytest.mark.parametrize("flags", ["00", "01"])
async def test_an_engine_gets_the_span_of_its_attempt_and_the_decision_of_the_client(telemetry, flags):
    engine = FakeEngine(answer("the cat"))
    metadata = (("traceparent", f"00-{TRACE_ID}-00f067aa0ba902b7-{flags}"),)
    async with serving(engine) as (client, _):
        await read_all(client.generate(metadata=metadata))
    (attempt,) = (span for span in recent_spans(TRACE_ID) if span.kind == "client")
    assert engine.requests[0].entry.trace_context.traceparent == f"00-{TRACE_ID}-{attempt.span_id}-{flags}"


@pytest.mark.parametrize(
    "asked", [{"model": SECRET}, {"structured_output": {"regex": f"({SECRET}"}}], ids=["model", "regex"]
)
async def test_what_a_refusal_quotes_of_a_request_is_in_no_span(telemetry, asked):
    async with serving(FakeEngine()) as (client, _):
        with pytest.raises(grpc.aio.AioRpcError):
            await read_all(client.generate(metadata=METADATA, **asked))
    shown = json.dumps(
        [(span.error, dict(span.attributes), str(span.events)) for span in recent_spans(TRACE_ID)]
    )
    assert recent_spans(TRACE_ID)[0].error
    assert SECRET not in shown


async def test_a_refused_request_is_a_failed_span_with_its_code(telemetry):
    async with serving(FakeEngine()) as (client, _):
        with pytest.raises(grpc.aio.AioRpcError):
            await read_all(client.generate(temperature=-1.0, metadata=METADATA))
    (root,) = recent_spans(TRACE_ID)
    assert (root.name, root.error) == ("text_completion", "INVALID_REQUEST: sampling.temperature")
    assert root.attributes[names.ERROR_TYPE] == root.attributes[names.RPC_STATUS_CODE] == "INVALID_ARGUMENT"


def test_a_trace_has_a_limit_of_spans_and_events():
    outputs = []
    for _ in range(200):
        times = EngineTimes()
        times.begin(0, "e")
        times.note(Progress([(EventKind.QUEUED, 0), (EventKind.SCHEDULED, 0)], 0))
        times.end()
        outputs.append(times)
    timeline = RequestTimeline(TraceContext(1, 2), "chat", 0, 0, tokenizing_ns=(0, 1), detokenizing=(1, 2, 1))
    timeline.add_outputs(outputs)
    root, *children = timeline.spans()
    assert (len(children), len(root.events)) == (128, 128)
    assert (
        root.attributes[names.NUM_DROPPED_SPANS] == 602 - 128
    )  # tokenize, 200 times three phases, detokenize
    assert (children[0].name, children[-1].name) == ("tokenize", "detokenize")
    assert len({span.span_id for span in (root, *children)}) == 129


def test_a_trace_has_a_limit_of_attempts_and_each_is_whole():
    timeline = RequestTimeline(TraceContext(1, 2), "chat", 0, 0)
    trace = RequestTrace(timeline, "r", slow_ns=0, is_repeated=lambda error: False)
    parents, outputs = [], []
    for index in range(100):
        parents.append(trace.begin_attempt(index, 0))
        times = EngineTimes()
        times.begin(0, "e")
        times.note(Progress([(EventKind.QUEUED, 0), (EventKind.SCHEDULED, 0)], 0))
        times.end()
        outputs.append(times)
    timeline.add_outputs(outputs)
    root, *children = timeline.spans()
    made = [span.span_id for span in children if span.kind == "client"]
    assert [parent.split("-")[2] for parent in parents] == made + [root.span_id] * 36
    assert len({span.span_id for span in (root, *children)}) == 1 + 64 + 126


def test_an_output_that_moves_and_is_preempted_for_ever_keeps_a_part():
    times = EngineTimes()
    for attempt in range(200):
        times.begin(attempt, "e")
        times.note(Progress([(EventKind.PREEMPTED, 0)]))
        times.end()
    assert (len(times.stays), len(times.moments), times.num_preemptions) == (96, 64, 200)


@pytest.mark.parametrize(
    ("slow_ms", "error", "is_notable"),
    [(0, None, False), (1, None, True), (60_000, None, False), (0, ResourceExhausted("full"), True)],
    ids=["no limit", "slow", "fast", "failed"],
)
def test_a_slow_or_failed_request_is_notable(monkeypatch, slow_ms, error, is_notable):
    found = []
    monkeypatch.setattr(
        frontend_svc.generation.tracing, "record_trace", lambda *_, is_notable: found.append(is_notable)
    )
    now_ns = iter((0, 2_000_000))
    monkeypatch.setattr(frontend_svc.generation.tracing, "perf_counter_ns", lambda: next(now_ns))
    trace = RequestTraces(slow_ms=slow_ms).begin("chat", "r", Caller("r", "", "", lambda: None))
    with contextlib.suppress(ResourceExhausted), trace:
        if error is not None:
            raise error
    assert found == [is_notable]


async def test_a_trace_has_the_tenant_and_the_time_in_queues(telemetry, tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text("- {name: ann, key: key-of-ann-0123456789, role: client, tenant: team-a}\n")
    metadata = (*METADATA, ("authorization", "Bearer key-of-ann-0123456789"))
    engine = FakeEngine(answer("y"))
    async with serving(engine, api_keys=str(file)) as (client, _):
        call = client.inference.GenerateOnce(make_request("the cat"), timeout=WAIT_S, metadata=metadata)
        await call
    root, tokenize, *_ = recent_spans(TRACE_ID)
    assert root.attributes[names.ACCOUNT] == "team-a"
    assert 0 <= tokenize.attributes[names.QUEUE_US] <= root.attributes[names.QUEUE_US]
