"""Requests through a real frontend to fake engines: outputs, ends, aborts, nothing left behind."""

from __future__ import annotations

import asyncio
import itertools
import math

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from service_kit.telemetry import recent_spans, setup_telemetry, shutdown_telemetry
from tests.frontend_svc.fakes import (
    AT_LENGTH,
    EOS_ID,
    MAX_MODEL_LEN,
    TOKENIZER,
    VOCAB_SIZE,
    WAIT_S,
    Client,
    FakeEngine,
    answer,
    make_request,
    read_all,
    serving,
)
from triptych.api.v1 import inference_pb2
from triptych.common.v1 import output_pb2, sampling_pb2
from triptych.engine.v1 import engine_pb2

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
            client.generate(top_p=0.5, stop_token_ids=[3], priority=-5, cache_salt="salt", timeout=5)
        )
        await read_all(client.generate([5, 6], seed=2**64 - 1, max_tokens=9, stop=["zzz"]))
    first, second = (request.entry for request in engine.requests)

    assert first.sampling.temperature == pytest.approx(0.6)
    assert (first.sampling.top_k, first.sampling.top_p) == (20, 0.5)
    assert first.sampling.max_tokens == MAX_MODEL_LEN - len(engine.requests[0].prompt)
    assert (list(first.sampling.stop_token_ids), first.priority, first.cache_salt) == ([3], -5, "salt")
    assert 4000 < first.remaining_ms < 5200
    assert len(first.request_id) == 32
    assert first.request_seed != 0
    assert (second.request_seed, second.sampling.max_tokens) == (2**64 - 1, 9)
    assert engine.requests[1].prompt == [5, 6]
    assert not second.sampling.stop


async def test_unary_answers_once_with_everything():
    async with serving(FakeEngine(answer(TEXT))) as (client, _):
        request = inference_pb2.GenerateUnaryRequest(request=make_request("the cat"))
        response = await client.inference.GenerateUnary(request, timeout=WAIT_S)
    (output,) = response.outputs
    assert output.text == TEXT
    assert output.reason == output_pb2.FINISH_REASON_STOP
    assert response.started.num_cached_tokens == 16
    assert response.usage.num_completion_tokens == len(output.token_ids)


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


async def test_stop_string_ends_the_stream_and_aborts_in_the_engine_once():
    engine = FakeEngine()
    async with serving(engine) as (client, _):
        call = client.generate(stop=["mat"])
        (request,) = await engine.wait_for_requests(1)
        ids = TOKENIZER.encode(TEXT).ids
        for token_id in ids:
            engine.step({request: [token_id]})
        _, text, _, finished = await read_all(call)
        await engine.wait(lambda: request.abort_reason is not None)
    assert text == " sat on the "
    assert finished.stop_match.string == "mat"
    assert request.abort_reason == engine_pb2.ABORT_REASON_STOP_STRING


async def test_cancel_before_the_first_token_aborts():
    engine = FakeEngine()
    async with serving(engine) as (client, frontend):
        call = client.generate()
        (request,) = await engine.wait_for_requests(1)
        call.cancel()
        await engine.wait(lambda: request.abort_reason is not None)
        assert frontend.generation.num_open == 0
        # What the engine had sent before it knew is dropped.
        engine.step({request: [5]}, finished={request: AT_LENGTH})
        other = client.generate()
        requests = await engine.wait_for_requests(2)
        engine.step({requests[1]: [5]}, finished={requests[1]: AT_LENGTH})
        await read_all(other)
    assert request.abort_reason == engine_pb2.ABORT_REASON_CLIENT


async def test_cancel_in_the_middle_aborts():
    engine = FakeEngine()
    async with serving(engine) as (client, _):
        call = client.generate()
        (request,) = await engine.wait_for_requests(1)
        engine.step({request: [5, 6]})
        assert (await call.read()).WhichOneof("event") == "started"
        call.cancel()
        await engine.wait(lambda: request.abort_reason is not None)


async def test_deadline_aborts_with_its_reason():
    engine = FakeEngine()
    async with serving(engine) as (client, _):
        call = client.generate(timeout=0.3)
        (request,) = await engine.wait_for_requests(1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(call)
        await engine.wait(lambda: request.abort_reason is not None)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0 < request.entry.remaining_ms < 500
    assert request.abort_reason == engine_pb2.ABORT_REASON_DEADLINE


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
    engine = FakeEngine()
    async with serving(engine) as (client, _):
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
    assert request.abort_reason == engine_pb2.ABORT_REASON_SLOW_CONSUMER
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


NAN, LONG = math.nan, [5] * MAX_MODEL_LEN
BAD_INPUT = {
    "empty prompt": (make_request(""), "INVALID_ARGUMENT", ["prompt", "empty"]),
    "no ids": (make_request([]), "INVALID_ARGUMENT", ["token_ids", "empty"]),
    "unknown model": (make_request("x", model="gpt-9"), "NOT_FOUND", ["gpt-9", "tiny"]),
    "nan": (make_request("x", temperature=NAN), "INVALID_ARGUMENT", ["sampling.temperature", "nan", "0..2"]),
    "hot": (make_request("x", temperature=2.5), "INVALID_ARGUMENT", ["sampling.temperature", "2.5", "0..2"]),
    "no tokens": (make_request("x", max_tokens=0), "INVALID_ARGUMENT", ["sampling.max_tokens", "0", "1"]),
    "too many": (
        make_request([5] * 500, max_tokens=13),
        "INVALID_ARGUMENT",
        ["max_tokens", "13", "12", "512"],
    ),
    "negative": (make_request("x", max_tokens=-1), "INVALID_ARGUMENT", ["sampling.max_tokens", "-1"]),
    "huge": (make_request("x", max_tokens=2**40), "INVALID_ARGUMENT", ["sampling.max_tokens", str(2**40)]),
    "out of vocabulary": (
        make_request([1, VOCAB_SIZE]),
        "INVALID_ARGUMENT",
        ["token_ids[1]", str(VOCAB_SIZE)],
    ),
    "too long": (make_request(LONG), "INVALID_ARGUMENT", ["CONTEXT_LENGTH_EXCEEDED", "512"]),
    "too long text": (make_request("a" * 100_000), "INVALID_ARGUMENT", ["CONTEXT_LENGTH_EXCEEDED", "512"]),
    "many stops": (
        make_request("x", stop=["a"] * 10_000),
        "INVALID_ARGUMENT",
        ["sampling.stop", "10000", "16"],
    ),
    "long stop": (
        make_request("x", stop=["a" * 300]),
        "INVALID_ARGUMENT",
        ["sampling.stop[0]", "300", "256"],
    ),
    "top_p": (make_request("x", top_p=0.0), "INVALID_ARGUMENT", ["sampling.top_p", "above 0"]),
    "priority": (make_request("x", priority=101), "INVALID_ARGUMENT", ["priority", "101", "-100..100"]),
    "n": (make_request("x", n=65), "INVALID_ARGUMENT", ["sampling.n", "65", "1..64"]),
    "two": (make_request("", top_p=7.0), "INVALID_ARGUMENT", ["prompt", "sampling.top_p"]),
    "n 2": (make_request("x", n=2), "UNIMPLEMENTED", ["sampling.n"]),
    "logprobs": (make_request("x", logprobs=1), "UNIMPLEMENTED", ["sampling.logprobs"]),
    "penalty": (make_request("x", presence_penalty=0.5), "UNIMPLEMENTED", ["sampling.presence_penalty"]),
    "adapter": (make_request("x", adapter="lora"), "UNIMPLEMENTED", ["adapter"]),
    "rank": (make_request("x", data_parallel_rank=5), "UNAVAILABLE", ["data_parallel_rank 5"]),
}


async def test_bad_input_is_refused_by_name_beside_running_streams():
    engine = FakeEngine()
    async with serving(engine) as (client, _):
        good = [client.generate() for _ in range(8)]
        requests = list(await engine.wait_for_requests(8))
        for name, (request, code, expected) in BAD_INPUT.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_all(client.inference.Generate(request, timeout=WAIT_S))
            told = f"{caught.value.details()} {details_of(caught.value)}"
            assert caught.value.code().name == code, (name, told)
            for words in expected:
                assert words in told, (name, told)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(client.inference.Generate(make_request("x" * 20_000_000), timeout=WAIT_S))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for index, request in enumerate(requests):
            engine.step({request: [5 + index]}, finished={request: AT_LENGTH})
        assert [(await read_all(call))[2] for call in good] == [[5 + index] for index in range(8)]
    assert len(engine.requests) == 8


async def test_neutral_values_of_unserved_parameters_are_accepted():
    engine = FakeEngine(answer("x"))
    async with serving(engine) as (client, _):
        await read_all(client.generate(n=1, min_p=0.0, presence_penalty=0.0, repetition_penalty=1.0))


async def test_a_duplicate_id_in_flight_is_refused_and_free_afterwards():
    engine = FakeEngine()
    async with serving(engine) as (client, _):
        first = client.generate(request_id="x")
        await engine.wait_for_requests(1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(client.generate(request_id="x"))
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
        engine.step({engine.requests[0]: [5]}, finished={engine.requests[0]: AT_LENGTH})
        await read_all(first)
        engine.script = answer("y")
        assert (await read_all(client.generate(request_id="x")))[1] == "y"


async def test_a_full_queue_is_refused_until_a_first_token_came():
    engine = FakeEngine()
    async with serving(engine, max_queued_requests=1) as (client, _):
        first = client.generate()
        (request,) = await engine.wait_for_requests(1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(client.generate())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "RetryInfo" in details_of(caught.value)
        engine.step({request: [5]})
        await first.read()
        engine.script = answer("y")
        assert (await read_all(client.generate()))[1] == "y"
        first.cancel()
        await engine.wait(lambda: request.abort_reason is not None)


async def test_an_engines_refusal_reaches_the_client_as_its_status():
    def refuse(engine, request):
        rejected = engine_pb2.AddRejected(handle=request.handle, retry_after_ms=250)
        rejected.status.code = grpc.StatusCode.UNAVAILABLE.value[0]
        rejected.status.message = "not now"
        request.session.send(add_rejected=rejected)

    async with serving(FakeEngine(refuse)) as (client, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(client.generate())
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNAVAILABLE, "not now")
    assert "RetryInfo" in details_of(caught.value)


async def test_draining_finishes_streams_and_refuses_new_ones():
    engine = FakeEngine()
    async with serving(engine) as (client, frontend):
        running = client.generate()
        (request,) = await engine.wait_for_requests(1)
        drain = asyncio.ensure_future(frontend.drain())
        await asyncio.sleep(0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(client.generate())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not drain.done()
        engine.step({request: [5]}, finished={request: AT_LENGTH})
        await read_all(running)
        await asyncio.wait_for(drain, WAIT_S)


async def test_spans_join_the_clients_trace_and_ids_come_back():
    setup_telemetry("frontend", instance="0", log_level="error")
    trace_id, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    metadata = (("traceparent", f"00-{trace_id}-{parent}-01"), ("x-request-id", "abc"))
    engine = FakeEngine(answer(TEXT))
    async with serving(engine) as (client, _):
        call = client.generate(metadata=metadata, temperature=0.5)
        started, *_ = await read_all(call)
        assert dict(await call.initial_metadata())["x-request-id"] == "abc"
        assert dict(await call.trailing_metadata())["x-trace-id"] == trace_id
        engine.script = None
        aborted = client.generate(metadata=metadata)
        await engine.wait_for_requests(2)
        aborted.cancel()
        await engine.wait(lambda: engine.requests[1].abort_reason is not None)
    spans = recent_spans(trace_id)
    shutdown_telemetry()

    assert started.request_id == "abc"
    root = next(span for span in spans if span.name == "request")
    assert root.parent_span_id == parent
    assert root.attributes["triptych.request_id"] == "abc"
    assert root.attributes["gen_ai.request.model"] == "tiny"
    assert root.attributes["gen_ai.usage.output_tokens"] == str(len(TOKENIZER.encode(TEXT).ids) + 1)
    children = {span.name for span in spans if span.parent_span_id == root.span_id}
    assert children == {"tokenize", "detokenize"}
    assert engine.requests[0].entry.trace_context.traceparent == f"00-{trace_id}-{root.span_id}-01"
    second = [span for span in spans if span.name == "request"][1]
    assert [name for name, _ in second.events] == ["aborted"]


def details_of(error: grpc.aio.AioRpcError) -> str:
    """The names and contents of an error's details, as text."""
    status = rpc_status.from_call(error)
    shown = []
    for detail in status.details if status is not None else ():
        for kind in (
            error_details_pb2.BadRequest,
            error_details_pb2.ErrorInfo,
            error_details_pb2.ResourceInfo,
        ):
            message = kind()
            if detail.Unpack(message):
                shown.append(f"{kind.__name__} {message}")
        if detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            shown.append("RetryInfo")
    return " ".join(shown)
