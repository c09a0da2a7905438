"""Requests through a real frontend to fake engines: outputs, ends, aborts, nothing left behind."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import tracemalloc
from dataclasses import dataclass

import grpc
import pytest

from frontend_svc.generation.answers.generate import stream_generate
from frontend_svc.generation.caller import Caller
from frontend_svc.generation.generation import OpenRequest
from frontend_svc.generation.open_requests import OpenRequests, RequestPhase
from frontend_svc.output.collector import Output, OutputKind
from frontend_svc.process.frontend import Frontend
from frontend_svc.text.prompt import RequestPrompt
from tests.frontend_svc.fakes import (
    AT_EOS,
    AT_LENGTH,
    EOS_ID,
    MAX_MODEL_LEN,
    TOKENIZER,
    WAIT_S,
    Client,
    FakeEngine,
    FakeRequest,
    answer,
    details_of,
    make_request,
    read_all,
    serving,
    serving_one,
)
from triptych.api.v1 import inference_pb2
from triptych.common.v1 import output_pb2, sampling_pb2
from triptych.engine.v1 import engine_pb2, step_pb2
from triptych_kit.clock import FakeClock
from triptych_kit.errors import DeadlineExceeded, NotFound
from triptych_kit.telemetry.metrics import to_text
from triptych_kit.telemetry.traces import recent_spans, setup_telemetry, shutdown_telemetry

REPETITION = output_pb2.FINISH_REASON_REPETITION
TEXT = " sat on the mat 日本 😀."


async def test_stream_is_started_then_deltas_then_finished():
    engine = FakeEngine(answer(TEXT))
    async with serving(engine) as (client, _):
        started, text, ids, finished = await read_all(
            client.generate(request_id="mine", return_prompt_token_ids=True)
        )

    prompt = TOKENIZER.encode("the cat").ids
    assert (started.request_id, started.model, started.num_cached_tokens) == ("mine", "tiny", 16)
    assert (started.num_prompt_tokens, list(started.prompt_token_ids)) == (len(prompt), prompt)
    assert text == TEXT
    assert ids == [*TOKENIZER.encode(TEXT).ids, EOS_ID]
    assert finished.reason == output_pb2.FINISH_REASON_STOP
    assert finished.stop_match.eos == EOS_ID
    usage = finished.usage
    assert (usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_completion_tokens) == (
        len(prompt),
        16,
        len(ids),
    )


async def test_the_engine_gets_a_complete_request():
    engine = FakeEngine(answer("x"), generation_config={"temperature": 0.6, "top_k": 20, "top_p": 0.95})
    async with serving(engine) as (client, _):
        await read_all(
            client.generate(top_p=0.5, stop_token_ids=[3], priority=-5, cache_salt="salt", timeout=600)
        )
        await read_all(client.generate([5, 6], seed=2**64 - 1, max_tokens=9, stop=["zzz"]))
    first, second = (request.entry for request in engine.requests)

    assert first.sampling.temperature == pytest.approx(0.6)
    assert (first.sampling.top_k, first.sampling.top_p) == (20, 0.5)
    assert first.sampling.max_tokens == MAX_MODEL_LEN - len(engine.requests[0].prompt)
    assert (list(first.sampling.stop_token_ids), first.priority, first.cache_salt) == ([3], -5, "salt")
    assert 500_000 < first.remaining_ms <= 601_000
    assert len(first.request_id) == 32
    assert first.request_seed != 0
    assert (second.request_seed, second.sampling.max_tokens) == (2**64 - 1, 9)
    assert engine.requests[1].prompt == [5, 6]
    assert not second.sampling.stop


async def test_unary_answers_once_with_everything():
    async with serving(FakeEngine(answer(TEXT))) as (client, _):
        response = await client.inference.GenerateOnce(make_request("the cat"), timeout=WAIT_S)
        wrapped = inference_pb2.GenerateUnaryRequest(request=make_request("the cat"))
        same = await client.inference.GenerateUnary(wrapped, timeout=WAIT_S)
    (output,), (again,) = response.outputs, same.outputs
    for one in (output, again):
        one.ClearField("stats")
    assert output == again
    assert output.text == TEXT
    assert output.reason == output_pb2.FINISH_REASON_STOP
    assert response.started.num_cached_tokens == 16
    assert response.usage.num_completion_tokens == len(output.token_ids)


async def test_usage_has_the_drafts_that_engines_report_of_one_output_or_of_all():
    def script(engine: FakeEngine, request: FakeRequest) -> None:
        end = step_pb2.StepFinished()
        end.CopyFrom(AT_EOS)
        if request.entry.group_index < 2:
            end.drafts.num_proposed, end.drafts.num_accepted = 4 + request.entry.group_index, 2
        engine.step({request: [EOS_ID]}, finished={request: end})

    async with serving(FakeEngine(script)) as (client, _):
        asked = make_request("the cat", n=3, temperature=1.0)
        response = await client.inference.GenerateOnce(asked, timeout=WAIT_S)
        ends = [one.finished async for one in client.generate(n=3) if one.HasField("finished")]
    usage = response.usage
    assert (usage.num_draft_tokens, usage.num_accepted_draft_tokens) == (9, 4)
    of_outputs = sorted((end.output_index, end.usage.num_draft_tokens) for end in ends)
    assert of_outputs == [(0, 4), (1, 5), (2, 0)]
    has_drafts = {end.output_index: end.usage.HasField("num_draft_tokens") for end in ends}
    assert has_drafts == {0: True, 1: True, 2: False}


async def test_cumulative_and_final_only_outputs():
    async with serving(FakeEngine(answer("the cat sat"))) as (client, _):
        cumulative = [
            response.delta.text
            async for response in client.generate(output_kind=sampling_pb2.OUTPUT_KIND_CUMULATIVE)
            if response.WhichOneof("event") == "delta"
        ]
        final = [
            response.WhichOneof("event")
            async for response in client.generate(output_kind=sampling_pb2.OUTPUT_KIND_FINAL_ONLY)
        ]
    assert cumulative[-1] == "the cat sat"
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(cumulative))
    assert final == ["started", "delta", "finished"]


async def test_output_that_repeats_itself_ends_whole_and_with_a_reason_of_its_own():
    ids = [*TOKENIZER.encode("the cat").ids, 7, 7]
    detection = sampling_pb2.RepetitionDetection(max_pattern_size=1, min_count=2)

    def repeat(engine: FakeEngine, request: FakeRequest) -> None:
        engine.step({request: ids}, finished={request: step_pb2.StepFinished(reason=REPETITION)})

    engine = FakeEngine(repeat)
    async with serving(engine) as (client, _):
        _, text, token_ids, finished = await read_all(client.generate(repetition_detection=detection))
        request = inference_pb2.GenerateUnaryRequest(
            request=make_request("x", repetition_detection=detection)
        )
        response = await client.inference.GenerateUnary(request, timeout=WAIT_S)
    asked = [request.entry.sampling.repetition_detection for request in engine.requests]
    assert [(one.max_pattern_size, one.min_count) for one in asked] == [(1, 2), (1, 2)]
    assert (token_ids, finished.reason) == (ids, REPETITION)
    assert finished.stop_match == output_pb2.StopMatch()
    (output,) = response.outputs
    assert (output.text, list(output.token_ids), output.reason) == (text, ids, REPETITION)


async def test_cancel_before_the_first_token_aborts():
    async with serving_one() as (engine, client, frontend):
        call = client.generate()
        (request,) = await engine.wait_for_requests(1)
        call.cancel()
        await engine.wait(lambda: request.abort_reason is not None)
        assert frontend.requests.draining.num_open == 0
        # What the engine had sent before it knew is dropped.
        engine.step({request: [5]}, finished={request: AT_LENGTH})
        other = client.generate()
        requests = await engine.wait_for_requests(2)
        engine.step({requests[1]: [5]}, finished={requests[1]: AT_LENGTH})
        await read_all(other)
    assert request.abort_reason == engine_pb2.ABORT_REASON_CLIENT


async def test_a_deadline_that_the_engine_sees_first_is_no_finished_stream():
    def abort(engine, request):
        engine.step(
            {request: []}, finished={request: step_pb2.StepFinished(reason=output_pb2.FINISH_REASON_ABORT)}
        )

    engine = FakeEngine(abort)
    async with serving(engine) as (_, frontend):
        for remaining_s, num_sent in (([-0.001], 0), ([0.0005, 0.0002], 1), ([1.0, -0.001], 2)):
            with pytest.raises(DeadlineExceeded):
                await first_output(frontend, remaining_s)
            assert len(engine.requests) == num_sent
        output = await first_output(frontend, [2.0, 1.0])
        assert output.is_last
    assert engine.requests[0].entry.remaining_ms == 1


async def first_output(frontend: Frontend, remaining_s: list[float]) -> Output:
    """What a caller gets whose time goes down like this."""
    left = itertools.chain(remaining_s, itertools.repeat(remaining_s[-1]))
    caller = Caller("x", "", "", lambda: next(left))
    request = make_request()
    async with frontend.requests.generation.open(
        request, RequestPrompt(request), caller, OutputKind.DELTA
    ) as opened:
        return await opened.next()


async def test_cancel_at_many_phases_leaves_nothing():
    engine = FakeEngine(answer(TEXT))
    async with serving(engine) as (client, frontend):
        for num_reads in range(12):
            call = client.generate(prompt=[5 + num_reads])
            for _ in range(num_reads):
                await call.read()
            call.cancel()
        # One that is left alone still works.
        assert (await read_all(client.generate()))[1] == TEXT
        async with asyncio.timeout(WAIT_S):
            await frontend.drain()


async def test_a_lost_engine_ends_its_requests_with_unavailable_and_a_time_to_retry():
    async with serving_one() as (engine, client, _):
        calls = [client.generate() for _ in range(3)]
        requests = await engine.wait_for_requests(3)
        engine.step({requests[0]: [5]})
        await engine.kill()
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_all(call)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "RetryInfo" in details_of(caught.value)
        await client.wait_ready(is_ready=False)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(client.generate())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        # It comes back where it was, and so do we.
        engine.script = answer("back")
        await engine.start(engine.address)
        await client.wait_ready()
        assert (await read_all(client.generate()))[1] == "back"


async def test_a_slow_reader_is_ended_and_aborted():
    engine = FakeEngine()
    # Flow control then holds 64 KiB for a client that does not read.
    small_window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
    async with (
        serving(engine, slow_reader_s=0.05) as (_, frontend),
        grpc.aio.insecure_channel(frontend.address, options=small_window) as channel,
    ):
        call = Client(channel).generate()
        (request,) = await engine.wait_for_requests(1)
        ids = TOKENIZER.encode(" organization" * 250).ids[:250]
        for _ in range(400):
            engine.step({request: ids})
        await engine.wait(lambda: request.abort_reason is not None)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        text = to_text(frontend.metrics.collect())
    assert request.abort_reason == engine_pb2.ABORT_REASON_SLOW_CONSUMER
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert b'requests_aborted_total{cause="slow_consumer"} 1.0' in text


def refuse(engine, request, code=grpc.StatusCode.UNAVAILABLE):
    rejected = engine_pb2.AddRejected(handle=request.handle, retry_after_ms=250)
    rejected.status.code = code.value[0]
    rejected.status.message = "not now"
    request.session.send(add_rejected=rejected)


async def test_an_engines_refusal_reaches_the_client_as_its_status():
    engine = FakeEngine(refuse)
    async with serving(engine) as (client, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(client.generate())
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNAVAILABLE, "not now")
    assert "RetryInfo" in details_of(caught.value)
    assert len(engine.requests) == 1


async def test_a_request_that_one_engine_cannot_take_now_goes_to_another():
    engines = [FakeEngine(answer(TEXT), dp_rank=0), FakeEngine(answer(TEXT), dp_rank=1)]
    async with serving(*engines) as (client, _):
        await client.until_engines_are_ready(2)
        engines[0].script = refuse
        for _ in range(4):
            assert (await read_all(client.generate(seed=3)))[1] == TEXT
    assert len(engines[0].requests) > 0
    assert len(engines[1].requests) == 4
    resent = {request.entry.request_id: request.entry for request in engines[1].requests}
    for refused in engines[0].requests:
        again = resent[refused.entry.request_id]
        assert (refused.entry.attempt, again.attempt) == (0, 1)
        assert again.request_seed == refused.entry.request_seed


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED])
async def test_a_request_is_sent_to_each_engine_once_and_only_where_that_may_help(code):
    engines = [FakeEngine(dp_rank=rank) for rank in range(3)]
    for engine in engines:
        engine.script = functools.partial(refuse, code=code)
    async with serving(*engines) as (client, _):
        await client.until_engines_are_ready(3)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(client.generate())
    assert caught.value.code() is code
    num_sent = sorted(len(engine.requests) for engine in engines)
    assert num_sent == ([1, 1, 1] if code is grpc.StatusCode.UNAVAILABLE else [0, 0, 1])


def end_with(engine: FakeEngine, request: FakeRequest, code: grpc.StatusCode) -> None:
    error = step_pb2.StepFinished(
        reason=output_pb2.FINISH_REASON_ERROR, message="not this one", code=code.value[0]
    )
    engine.step({request: []}, finished={request: error})


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED])
async def test_an_end_with_a_status_is_the_status_of_the_call_and_ends_its_other_outputs(code):
    engine = FakeEngine()
    async with serving(engine) as (client, _):
        call = client.generate(n=2)
        first, second = await engine.wait_for_requests(2)
        engine.step({first: [5]})
        end_with(engine, second, code)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(call)
        await engine.wait(lambda: first.abort_reason is not None)
    assert (caught.value.code(), caught.value.details()) == (code, "not this one")
    assert second.abort_reason is None


async def test_a_request_that_an_engine_ends_as_unavailable_continues_at_another():
    engines = [FakeEngine(answer(TEXT), dp_rank=0), FakeEngine(answer(TEXT), dp_rank=1)]
    async with serving(*engines) as (client, _):
        await client.until_engines_are_ready(2)
        engines[0].script = functools.partial(end_with, code=grpc.StatusCode.UNAVAILABLE)
        for _ in range(4):
            assert (await read_all(client.generate(seed=3)))[1] == TEXT
    assert engines[0].requests


async def test_spans_join_the_clients_trace_and_ids_come_back():
    setup_telemetry("frontend", instance="0", log_level="error")
    trace_id, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    metadata = (("traceparent", f"00-{trace_id}-{parent}-01"), ("x-request-id", "abc"))
    engine = FakeEngine(answer(TEXT))
    async with serving(engine) as (client, _):
        call = client.generate(metadata=metadata, temperature=0.5)
        started, *_ = await read_all(call)
        headers = dict(await call.initial_metadata())
        assert (headers["x-request-id"], headers["x-trace-id"]) == ("abc", trace_id)
        engine.script = None
        aborted = client.generate(metadata=metadata)
        await engine.wait_for_requests(2)
        aborted.cancel()
        await engine.wait(lambda: engine.requests[1].abort_reason is not None)
    spans = recent_spans(trace_id)
    shutdown_telemetry()

    assert started.request_id == "abc"
    root = next(span for span in spans if span.name == "text_completion tiny")
    assert root.parent_span_id == parent
    assert root.attributes["triptych.request_id"] == "abc"
    assert root.attributes["gen_ai.request.model"] == "tiny"
    assert root.attributes["gen_ai.usage.output_tokens"] == len(TOKENIZER.encode(TEXT).ids) + 1
    children = [span.name for span in spans if span.parent_span_id == root.span_id]
    assert children == ["tokenize", "engine", "detokenize"]
    attempt = next(span for span in spans if span.name == "engine")
    assert [span.name for span in spans if span.parent_span_id == attempt.span_id] == ["prefill", "decode"]
    assert engine.requests[0].entry.trace_context.traceparent == f"00-{trace_id}-{attempt.span_id}-01"
    second = [span for span in spans if span.parent_span_id == parent][1]
    assert [event.name for event in second.events] == ["aborted"]


# The deadline of a call, wherever its request is when it passes.

# Long enough for a request to be in its engine before, also on a machine that is busy.
DEADLINE_S = 2.0


async def ends_late(call) -> None:
    """Read a call to its end, which is its deadline."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_call_whose_deadline_has_passed_sends_nothing_and_holds_no_slot():
    engine = FakeEngine(answer("y"))
    async with serving(engine, max_queued_requests=1) as (client, frontend):
        caller = Caller("call", "", "", lambda: -0.5, 1.0)
        with pytest.raises(DeadlineExceeded):
            await anext(stream_generate(frontend.requests.generation, make_request(request_id="x"), caller))
        assert not engine.requests
        assert (frontend.requests.admission.num_queued, frontend.requests.draining.num_open) == (0, 0)
        assert (await read_all(client.generate(request_id="x")))[1] == "y"


async def test_a_deadline_in_the_queue_releases_the_slot():
    async with serving_one(max_queued_requests=1) as (engine, client, frontend):
        call = client.generate(timeout=DEADLINE_S)
        (request,) = await engine.wait_for_requests(1)
        await ends_late(call)
        await engine.wait(lambda: request.abort_reason is not None)
        assert request.abort_reason == engine_pb2.ABORT_REASON_DEADLINE
        assert (frontend.requests.admission.num_queued, frontend.requests.draining.num_open) == (0, 0)
        engine.script = answer("y")
        assert (await read_all(client.generate()))[1] == "y"


async def test_a_deadline_while_it_runs_aborts_all_outputs_of_the_request():
    async with serving_one() as (engine, client, frontend):
        call = client.generate(timeout=DEADLINE_S, n=2)
        requests = list(await engine.wait_for_requests(2))
        for request in requests:
            engine.step({request: [5]})
        await ends_late(call)
        await engine.wait(lambda: all(request.abort_reason is not None for request in requests))
        assert len(frontend.requests.open) == 0
    assert {request.abort_reason for request in requests} == {engine_pb2.ABORT_REASON_DEADLINE}


async def test_an_engine_is_sent_the_remaining_time_and_nothing_without_a_deadline():
    engine = FakeEngine(answer("y"))
    async with serving(engine) as (client, _):
        await read_all(client.generate(timeout=8.0))
        await read_all(client.inference.Generate(make_request()))
    headers = [request.entry.remaining_ms for request in engine.requests]
    assert 0 < headers[0] <= 8100
    assert not engine.requests[1].entry.HasField("remaining_ms")


async def test_others_go_on_when_one_is_late():
    async with serving_one() as (engine, client, _):
        late, other = client.generate(timeout=DEADLINE_S), client.generate()
        requests = list(await engine.wait_for_requests(2))
        await ends_late(late)
        await engine.wait(lambda: any(request.abort_reason is not None for request in requests))
        (left,) = [request for request in requests if request.abort_reason is None]
        answer("y")(engine, left)
        assert (await asyncio.wait_for(read_all(other), WAIT_S))[1] == "y"


# What has ended leaves nothing that only a full collection would find.

_LONG = 1_000_000  # characters of an id that is refused


async def test_a_request_that_has_ended_is_freed_without_a_collection() -> None:
    async with serving(FakeEngine(answer("sat"))) as (client, _):
        gc.collect()
        gc.disable()
        held = len(_open_requests())  # by a test before, for all that this one knows
        try:
            await read_all(client.generate())
            async with asyncio.timeout(WAIT_S):
                # What the call still does after its last message has no event.
                while len(_open_requests()) > held:  # noqa: ASYNC110
                    await asyncio.sleep(0)
        finally:
            gc.enable()


async def test_of_a_request_that_was_refused_nothing_large_waits_for_a_collection() -> None:
    async with serving(FakeEngine()) as (client, _):
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(8):
                with pytest.raises(grpc.aio.AioRpcError):
                    await client.inference.GenerateUnary(_too_long(), timeout=WAIT_S)
                with pytest.raises(grpc.aio.AioRpcError):
                    await read_all(client.generate(request_id="i" * _LONG))
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            gc.enable()
    # The last one may still be on its way out.
    assert held < 4 * _LONG


def _too_long() -> inference_pb2.GenerateUnaryRequest:
    return inference_pb2.GenerateUnaryRequest(request=make_request(request_id="i" * _LONG))


def _open_requests() -> list[OpenRequest]:
    return [one for one in gc.get_objects() if type(one) is OpenRequest]


# Open requests by the ids that name them.


@dataclass
class FakeProgress:
    """A request as it is sent."""

    phase: RequestPhase = RequestPhase.RUNNING
    num_prompt_tokens: int = 7
    num_cached_tokens: int = 4
    num_sampled_tokens: int = 3
    engine_id: str = "engine-1"
    num_attempts: int = 2
    num_ends: int = 0

    def end(self) -> None:
        self.num_ends += 1


def test_a_request_is_found_by_its_own_id_and_by_its_calls_while_it_is_open():
    requests = OpenRequests(FakeClock())
    with requests.track("mine", "call"):
        assert {requests.facts(name).request_id for name in ("mine", "call")} == {"mine"}
    for name in ("mine", "call"):
        with pytest.raises(NotFound, match=name):
            requests.facts(name)
    assert len(requests) == 0


def test_the_status_of_a_request_before_and_after_it_was_sent():
    clock = FakeClock()
    requests = OpenRequests(clock)
    with requests.track("", "call") as tracked:
        clock.advance(2.5)
        before = requests.facts("call")
        assert (before.phase, before.age_s, before.num_attempts) == (RequestPhase.QUEUED, 2.5, 0)
        tracked.follow(FakeProgress())
        after = requests.facts("call")
    assert (after.request_id, after.phase, after.engine_id) == ("call", RequestPhase.RUNNING, "engine-1")
    assert (after.num_prompt_tokens, after.num_cached_tokens, after.num_sampled_tokens) == (7, 4, 3)
    assert after.num_attempts == 2


def test_an_id_of_several_requests_aborts_all_and_reports_the_first():
    clock = FakeClock()
    requests = OpenRequests(clock)
    progresses = [FakeProgress(RequestPhase.FINISHED), FakeProgress(), FakeProgress()]
    with requests.track("a", "call") as first, requests.track("b", "call") as second:
        first.follow(progresses[0])
        second.follow(progresses[1])
        with requests.track("c", "other") as third:
            third.follow(progresses[2])
            assert requests.facts("call").request_id == "a"
            assert requests.abort("call") is RequestPhase.RUNNING
        assert requests.abort("a") is RequestPhase.FINISHED
    assert [progress.num_ends for progress in progresses] == [2, 1, 0]


def test_an_abort_before_it_was_sent_ends_it_when_it_is():
    requests = OpenRequests(FakeClock())
    progress = FakeProgress(RequestPhase.QUEUED)
    with requests.track("a", "") as tracked:
        assert requests.abort("a") is RequestPhase.QUEUED
        tracked.follow(progress)
    assert progress.num_ends == 1
