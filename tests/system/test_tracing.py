"""One trace per request, below the client's own span, for a collector and for those who have none."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.system.generation import read_to_end, request_of
from tests.system.otlp import OtlpReceiver, ReceivedSpan, collecting
from tests.system.stack import WAIT_LIMIT_S, Stack, address_of
from triptych.api.v1 import generate_pb2, inference_pb2_grpc
from triptych_cli.verbs.trace import draw, read_traces
from triptych_kit.telemetry import conventions as names

CLIENT_SPAN_ID = "00f067aa0ba902b7"
PHASES = ("queue", "prefill", "decode")
CHILDREN = ["tokenize", "engine", *PHASES, "detokenize"]
# Two requests of 6 blocks each do not fit.
ENGINE_FLAGS = ("--num-kv-blocks=8", "--block-size=16", "--max-model-len=96", "--max-num-seqs=4")
SHARE = 0.05
NUM_TOKENS = 50
NUM_TRIES = 4


class Traced:
    """A client whose calls are in traces of their own."""

    def __init__(self, stub: inference_pb2_grpc.InferenceServiceStub, receiver: OtlpReceiver) -> None:
        self._stub = stub
        self._receiver = receiver
        self._ids = random.Random(11)

    def call(
        self, request: generate_pb2.GenerateRequest, *, is_sampled: bool = True
    ) -> tuple[str, grpc.aio.UnaryStreamCall]:
        """The trace's id and the call."""
        trace_id = f"{self._ids.getrandbits(128):032x}"
        metadata = (("traceparent", f"00-{trace_id}-{CLIENT_SPAN_ID}-0{int(is_sampled)}"),)
        return trace_id, self._stub.Generate(request, metadata=metadata, timeout=WAIT_LIMIT_S)

    async def tree(self, trace_id: str) -> tuple[ReceivedSpan, list[ReceivedSpan]]:
        """The request's span, below the client's, and the frontend's others in the order of their begin."""
        spans = await self._receiver.trace(trace_id, _has_frontends)
        (root,) = (span for span in spans if span.parent_span_id == CLIENT_SPAN_ID)
        own = [span for span in spans if span.service == "frontend" and span is not root]
        attempts = {span.span_id: span for span in own if span.kind == "client"}
        for span in own:
            is_phase = span.name in PHASES
            assert span.parent_span_id in (attempts if is_phase else {root.span_id})
        assert len({span.span_id for span in spans}) == len(spans)
        assert {span.namespace for span in spans} == {"triptych"}
        assert root.kind == "server"
        return root, sorted(own, key=lambda span: (span.start_ns, span.kind))

    async def of_engines(self, trace_id: str, num_spans: int = 1) -> list[ReceivedSpan]:
        """The spans of engines in the order of their begin, each below an attempt of the frontend's."""
        spans = await self._receiver.trace(
            trace_id,
            lambda spans: _has_frontends(spans) and _num_of_engines(spans) == num_spans,
        )
        attempts = {span.span_id for span in spans if span.kind == "client"}
        made = [span for span in spans if span.service == "engine"]
        assert {span.parent_span_id for span in made} <= attempts
        assert len({span.parent_span_id for span in made}) == num_spans
        assert {(span.name, span.kind) for span in made} == {("llm_request", "server")}
        return sorted(made, key=lambda span: span.start_ns)


def _has_frontends(spans: list[ReceivedSpan]) -> bool:
    return any(span.parent_span_id == CLIENT_SPAN_ID for span in spans)


def _num_of_engines(spans: list[ReceivedSpan]) -> int:
    return sum(span.service == "engine" for span in spans)


async def test_every_request_is_one_tree_whatever_becomes_of_it(slow_llama, tmp_path: Path):
    sched_trace = tmp_path / "sched.jsonl"
    async with collecting() as (received, variables), Stack(variables) as stack:
        trio = await stack.start_all(slow_llama, *ENGINE_FLAGS, f"--sched-trace-path={sched_trace}")
        stub = stack.inference(trio.frontend)
        traced = Traced(stub, received)
        # The first request of a process pays for imports and connections.
        await read_to_end(stub.Generate(request_of("the", 1)))
        round_trip_s = await _refusal_s(stub)

        # On a busy machine a client may be late for what has arrived; of several one is not.
        tries: list[tuple[list[int], list[ReceivedSpan]]] = []
        for token_id in range(20, 20 + NUM_TRIES):
            began_at = time.perf_counter()
            request = request_of([token_id] * 20, NUM_TOKENS)
            request.request_id = f"streamed-{token_id}"
            streamed_id, call = traced.call(request)
            await read_to_end(call)
            client_s = time.perf_counter() - began_at
            streamed = await traced.tree(streamed_id)
            _check_streamed(*streamed, address_of(trio.frontend))
            tries.append(([token_id] * 20, streamed[1]))
            deviation = _deviation_from_client(*streamed, client_s, round_trip_s)
            if deviation < SHARE:
                break
        assert deviation < SHARE
        (of_engine,) = await traced.of_engines(streamed_id)
        _check_of_engine(of_engine, *streamed)

        aborted_id, call = traced.call(request_of([6] * 20, 70))
        for _ in range(4):
            await call.read()
        call.cancel()
        root, children = await traced.tree(aborted_id)
        assert [span.name for span in children] == CHILDREN
        assert root.event("aborted") == {names.CAUSE: "client"}
        assert root.attributes[names.RPC_STATUS_CODE] == "CANCELLED"
        assert root.attributes[names.RESPONSE_FINISH_REASONS] == ["abort"]
        assert root.error is None
        (of_engine,) = await traced.of_engines(aborted_id)
        assert of_engine.attributes[names.RESPONSE_FINISH_REASONS] == ["abort"]
        assert of_engine.attributes[names.CAUSE] == "client"
        assert of_engine.attributes[names.USAGE_OUTPUT_TOKENS] >= 3

        calls = [traced.call(request_of([7 + index] * 20, 60)) for index in range(2)]
        await asyncio.gather(*(read_to_end(call) for _, call in calls))
        trees = [await traced.tree(trace_id) for trace_id, _ in calls]
        num_preemptions = [root.attributes[names.NUM_PREEMPTIONS] for root, _ in trees]
        assert sum(num_preemptions) >= 1
        preempted = trees[num_preemptions.index(max(num_preemptions))]
        events = [name for name, _ in preempted[0].events]
        assert events[:2] == ["scheduled", "first_token"]
        assert events.count("preempted") == events.count("resumed") == max(num_preemptions)
        assert [span.name for span in preempted[1]] == CHILDREN
        (of_engine,) = await traced.of_engines(preempted[0].trace_id)
        assert of_engine.attributes[names.NUM_PREEMPTIONS] == max(num_preemptions)

        # Of unsampled requests only those that fail are exported.
        unsampled_id, call = traced.call(request_of([9] * 3, 2), is_sampled=False)
        await read_to_end(call)
        failed_id, call = traced.call(request_of([9] * 200, 2), is_sampled=False)
        with pytest.raises(grpc.aio.AioRpcError):
            await read_to_end(call)
        root, _ = await traced.tree(failed_id)
        assert root.error == root.attributes[names.ERROR_REASON] + ": token_ids"
        assert root.attributes[names.ERROR_TYPE] == "INVALID_ARGUMENT"
        assert root.attributes[names.RPC_STATUS_CODE] == "INVALID_ARGUMENT"
        assert unsampled_id not in {span.trace_id for span in received.spans}

        # The same without a collector: the same spans, with the same ids.
        assert trio.frontend.announcement is not None
        shown = await read_traces(trio.frontend.announcement.admin_http, 64, timeout_s=10)
        by_id = {trace["trace_id"]: trace for trace in shown}
        assert [span["name"] for span in by_id[unsampled_id]["spans"]][1:] == CHILDREN
        assert {span["span_id"] for span in by_id[streamed_id]["spans"]} == {
            span.span_id for span in (streamed[0], *streamed[1])
        }
        drawn = "\n".join(draw(by_id[streamed_id]))
        assert f"decode {streamed[0].event('scheduled')[names.ENGINE]} " in drawn
        # Each service has recorded its start.
        starts = [span for span in received.spans if span.name.startswith("start ")]
        assert {span.name for span in starts} >= {"start coordinator", "start frontend", "start engine"}
        trio.engine.terminate()
        await trio.engine.wait()
    records = [json.loads(line) for line in sched_trace.read_bytes().splitlines()]
    deviations = [_deviation_from_sched_trace(children, prompt, records) for prompt, children in tries]
    assert min(deviations) < SHARE


def _check_streamed(root: ReceivedSpan, children: list[ReceivedSpan], address: str) -> None:
    host, _, port = address.rpartition(":")
    assert root.name == f"text_completion {root.attributes[names.REQUEST_MODEL]}"
    assert root.error is None
    expected = {
        names.OPERATION_NAME: "text_completion",
        names.PROVIDER_NAME: "triptych",
        names.REQUEST_STREAM: True,
        names.REQUEST_MAX_TOKENS: NUM_TOKENS,
        names.REQUEST_TEMPERATURE: 0.0,
        names.USAGE_INPUT_TOKENS: 20,
        names.USAGE_OUTPUT_TOKENS: NUM_TOKENS,
        names.USAGE_CACHE_READ_TOKENS: 0,
        names.RESPONSE_FINISH_REASONS: ["length"],
        names.NUM_PREEMPTIONS: 0,
        names.NUM_MIGRATIONS: 0,
        names.RPC_SYSTEM_NAME: "grpc",
        names.RPC_METHOD: "triptych.api.v1.InferenceService/Generate",
        names.RPC_STATUS_CODE: "OK",
        names.SERVER_ADDRESS: host,
        names.SERVER_PORT: int(port),
    }
    assert {name: root.attributes.get(name) for name in expected} == expected
    assert 0 < root.attributes[names.RESPONSE_TIME_TO_FIRST_CHUNK] < root.duration_s
    assert [name for name, _ in root.events] == ["scheduled", "first_token"]
    assert [span.name for span in children] == CHILDREN
    assert {span.attributes.get(names.ENGINE) for span in children[1:5]} == {
        root.event("scheduled")[names.ENGINE]
    }
    queue, prefill, decode = children[2:5]
    assert (queue.end_ns, prefill.end_ns) == (prefill.start_ns, decode.start_ns)


def _check_of_engine(span: ReceivedSpan, root: ReceivedSpan, children: list[ReceivedSpan]) -> None:
    """The engine's span says the same as the frontend's, whose clock is another."""
    attempt = next(child for child in children if child.kind == "client")
    assert span.parent_span_id == attempt.span_id
    same = (names.REQUEST_ID, names.USAGE_INPUT_TOKENS, names.USAGE_OUTPUT_TOKENS, names.RESPONSE_MODEL,
            names.USAGE_CACHE_READ_TOKENS, names.RESPONSE_FINISH_REASONS, names.REQUEST_TEMPERATURE,
            names.REQUEST_TOP_P, names.REQUEST_MAX_TOKENS)  # fmt: skip
    assert {name: span.attributes[name] for name in same} == {name: root.attributes[name] for name in same}
    assert attempt.start_ns < span.start_ns < span.end_ns < attempt.end_ns
    queue_s, first_token_s = (
        span.attributes[name] for name in (names.LATENCY_TIME_IN_QUEUE, names.LATENCY_TIME_TO_FIRST_TOKEN)
    )
    assert 0 < queue_s < first_token_s
    assert span.attributes[names.LATENCY_END_TO_END] == pytest.approx(span.duration_s, abs=1e-6)


def _deviation_from_client(
    root: ReceivedSpan, children: list[ReceivedSpan], client_s: float, round_trip_s: float
) -> float:
    """How far queue, prefill and decode are from the client's time, less that of frontend and transport.

    The frontend's own part is all before the request is sent, tokenizing above all, and detokenizing; that of
    the transport is what a call takes that is refused at once.
    """
    before_s = (children[1].start_ns - root.start_ns) / 1e9  # up to the attempt
    detokenize = next(span for span in children if span.name == "detokenize")
    frontend_s = before_s + detokenize.attributes[names.BUSY_US] / 1e6
    engine_s = sum(span.duration_s for span in children if span.name in PHASES)
    return abs(engine_s / (client_s - frontend_s - round_trip_s) - 1)


def _deviation_from_sched_trace(
    children: list[ReceivedSpan], prompt: list[int], records: list[dict[str, Any]]
) -> float:
    """How far prefill and decode are from what is between the first decision and the last result."""
    at = {record["step"]: record["at"] for record in records if record["kind"] == "step_snapshot"}
    events = [event for record in records for event in record.get("events", ())]
    (engine_id,) = (
        event["request"]["id"]
        for event in events
        if event["op"] == "add" and event["request"]["prompt"] == prompt
    )
    steps = [
        record["step"]
        for record in records
        if record["kind"] == "step_decision" and engine_id in record["num_scheduled_tokens"]
    ]
    result_at = {event["for_step"]: event["at"] for event in events if event["op"] == "update"}
    times = {span.name: span.duration_s for span in children}
    return abs((times["prefill"] + times["decode"]) / (result_at[steps[-1]] - at[steps[0]]) - 1)


async def _refusal_s(stub: inference_pb2_grpc.InferenceServiceStub) -> float:
    """The least time of calls that the frontend refuses at once."""
    found = []
    for _ in range(5):
        began_at = time.perf_counter()
        with pytest.raises(grpc.aio.AioRpcError):
            await read_to_end(stub.Generate(generate_pb2.GenerateRequest(model="other")))
        found.append(time.perf_counter() - began_at)
    return min(found)


@pytest.mark.chaos
async def test_a_request_whose_engine_is_killed_is_one_tree_with_its_stay_in_each(slow_llama):
    flags = ("--port=0", "--deterministic=on")
    async with collecting() as (received, variables), Stack(variables) as stack:
        engines = await stack.start_several("engine", slow_llama, *flags, count=2)
        known = [f"--engine={address_of(engine)}" for engine in engines]
        frontend = await stack.start("frontend", "--port=0", "--reconnect-window-s=0.5", *known)
        for engine in engines:
            await stack.ready("engine", engine)
        await stack.ready("frontend", frontend)
        traced = Traced(stack.inference(frontend), received)

        trace_id, call = traced.call(request_of([5] * 20, 60))
        await _read_tokens(call, 5)
        stats = [await stack.engine(engine).stats() for engine in engines]
        first = next(index for index, one in enumerate(stats) if one.num_running)
        engines[first].kill()
        await read_to_end(call)
        root, children = await traced.tree(trace_id)
        moved = root.event("resumed_elsewhere")
        assert moved[names.FROM_ENGINE] != moved[names.TO_ENGINE]
        assert moved[names.CAUSE]
        assert moved[names.NUM_OUTPUT_TOKENS] >= 5
        stays = [(span.name, span.attributes[names.ENGINE]) for span in children if span.name in PHASES]
        assert stays == [
            (phase, moved[end]) for end in (names.FROM_ENGINE, names.TO_ENGINE) for phase in PHASES
        ]
        assert root.attributes[names.NUM_MIGRATIONS] == 1
        assert root.attributes[names.USAGE_OUTPUT_TOKENS] == 60
        assert root.error is None
        assert [name for name, _ in root.events].count("first_token") == 1
        lost, other = (span for span in children if span.kind == "client")
        assert (lost.error, other.error) == (moved[names.CAUSE], None)
        (of_engine,) = await traced.of_engines(trace_id)
        assert of_engine.parent_span_id == other.span_id
        assert of_engine.attributes[names.ATTEMPT] == 1
        before = moved[names.NUM_OUTPUT_TOKENS]
        assert of_engine.attributes[names.USAGE_OUTPUT_TOKENS] == 60 - before

        # The other one too: there is no engine left, and no hole in the trace.
        trace_id, call = traced.call(request_of([5] * 20, 60))
        await _read_tokens(call, 5)
        engines[1 - first].kill()
        with pytest.raises(grpc.aio.AioRpcError):
            await read_to_end(call)
        root, children = await traced.tree(trace_id)
        assert root.attributes[names.ERROR_TYPE] == "UNAVAILABLE"
        assert root.error
        assert [span.name for span in children if span.name in PHASES] == list(PHASES)


async def _read_tokens(call: grpc.aio.UnaryStreamCall, num_messages: int) -> None:
    for _ in range(num_messages + 1):
        await call.read()
