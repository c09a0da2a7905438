"""Abort and GetRequest over gRPC, beside running streams."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from tests.frontend_svc.fakes import (
    AT_LENGTH,
    TOKENIZER,
    WAIT_S,
    Client,
    FakeEngine,
    details_of,
    make_request,
    read_all,
    serving,
    serving_one,
)
from triptych.api.v1 import embedding_pb2, request_pb2
from triptych.common.v1 import output_pb2
from triptych.engine.v1 import engine_pb2

ABORT = output_pb2.FINISH_REASON_ABORT
QUEUED, RUNNING = request_pb2.REQUEST_STATE_QUEUED, request_pb2.REQUEST_STATE_RUNNING


async def abort(client: Client, request_id: str) -> int:
    response = await client.request.Abort(request_pb2.AbortRequest(request_id=request_id), timeout=WAIT_S)
    return int(response.state)


async def get(client: Client, request_id: str) -> request_pb2.GetRequestResponse:
    return await client.request.GetRequest(
        request_pb2.GetRequestRequest(request_id=request_id), timeout=WAIT_S
    )


async def test_an_aborted_stream_ends_with_what_there_was_and_ok():
    async with serving_one() as (engine, client, _):
        call = client.generate(request_id="mine", stop=["never"])
        (request,) = await engine.wait_for_requests(1)
        ids = TOKENIZER.encode(" sat on the").ids
        engine.step({request: ids})
        responses = aiter(call)
        assert (await anext(responses)).WhichOneof("event") == "started"
        assert await abort(client, "mine") == RUNNING
        text, finished = "", None
        async for response in responses:
            text += response.delta.text
            finished = response.finished
        assert await call.code() is grpc.StatusCode.OK
        await engine.wait(lambda: request.abort_reason is not None)
        # What the engine had sent before it knew is dropped, and the id is free.
        engine.step({request: [5]}, finished={request: AT_LENGTH})
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await abort(client, "mine")
    assert finished is not None
    assert (text, finished.reason, finished.usage.num_completion_tokens) == (" sat on the", ABORT, len(ids))
    assert request.abort_reason == engine_pb2.ABORT_REASON_CLIENT
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "mine" in details_of(caught.value)


async def test_an_abort_before_the_first_token_ends_all_outputs():
    async with serving_one() as (engine, client, _):
        call = client.generate(request_id="mine", n=2)
        requests = list(await engine.wait_for_requests(2))
        assert await abort(client, "mine") == QUEUED
        events = [response async for response in call]
        await engine.wait(lambda: all(one.abort_reason is not None for one in requests))
    assert [response.WhichOneof("event") for response in events] == ["started", "finished", "finished"]
    assert [(one.finished.output_index, one.finished.reason) for one in events[1:]] == [
        (0, ABORT),
        (1, ABORT),
    ]


async def test_the_id_of_a_call_aborts_all_that_came_by_it_and_unary_answers_too():
    engine = FakeEngine()
    metadata = (("x-request-id", "of-the-call"),)
    async with serving(engine) as (client, _):
        streams = [client.generate(metadata=metadata), client.generate(metadata=metadata, request_id="own")]
        unary = asyncio.ensure_future(
            client.inference.GenerateOnce(make_request(), metadata=metadata, timeout=WAIT_S)
        )
        other = client.generate()
        requests = list(await engine.wait_for_requests(4))
        for request in requests:
            engine.step({request: [5]})
        assert await abort(client, "of-the-call") in (QUEUED, RUNNING)
        assert [(await read_all(call))[3].reason for call in streams] == [ABORT, ABORT]
        assert (await unary).outputs[0].reason == ABORT
        await engine.wait(lambda: sum(one.abort_reason is not None for one in requests) == 3)
        (left,) = [one for one in requests if one.abort_reason is None]
        engine.step({left: [6]}, finished={left: AT_LENGTH})
        assert (await read_all(other))[3].reason == output_pb2.FINISH_REASON_LENGTH


async def test_one_id_in_flight_from_two_callers_succeeds_for_both():
    engine = FakeEngine()
    async with serving(engine) as (client, _):
        calls = [client.generate(request_id="mine"), client.generate(request_id="mine")]
        for request in list(await engine.wait_for_requests(2)):
            engine.step({request: [5]}, finished={request: AT_LENGTH})
        ends = [(await read_all(call))[3].reason for call in calls]
    assert ends == [output_pb2.FINISH_REASON_LENGTH] * 2


async def test_the_status_of_a_request_follows_it():
    async with serving_one() as (engine, client, _):
        call = client.generate(request_id="mine", prompt="the cat")
        (request,) = await engine.wait_for_requests(1)
        before = await get(client, "mine")
        engine.step({request: [5, 6]}, cached={request: 2})
        responses = aiter(call)
        assert (await anext(responses)).WhichOneof("event") == "started"
        after = await get(client, "mine")
        engine.step({request: [7]}, finished={request: AT_LENGTH})
        async for _ in responses:
            pass
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await get(client, "mine")
    num_prompt = len(TOKENIZER.encode("the cat").ids)
    assert (before.request_id, before.state, before.num_attempts) == ("mine", QUEUED, 1)
    assert (before.usage.num_prompt_tokens, before.usage.num_completion_tokens) == (num_prompt, 0)
    assert (after.state, after.engine_id, after.usage.num_completion_tokens) == (RUNNING, "engine-0", 2)
    assert (after.usage.num_cached_tokens, after.age_ms >= before.age_ms) == (2, True)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_no_id_is_refused_by_field():
    async with serving(FakeEngine()) as (client, _):
        for ask in (abort, get):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(client, "")
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "request_id" in details_of(caught.value)


async def test_an_aborted_pooling_request_ends_with_aborted_and_sends_no_more():
    engine = FakeEngine(supported_tasks=("embed",))
    inputs = [embedding_pb2.PoolingInput(prompt="the cat") for _ in range(600)]
    async with serving(engine) as (client, frontend):
        asked = embedding_pb2.EmbedRequest(inputs=inputs, request_id="mine")
        call = client.embedding.Embed(asked, timeout=WAIT_S)
        waiting = asyncio.ensure_future(call.code())
        requests = list(await engine.wait_for_requests(512))
        status = await get(client, "mine")
        assert await abort(client, "mine") == QUEUED
        assert await waiting is grpc.StatusCode.ABORTED
        await engine.wait(lambda: all(one.abort_reason is not None for one in requests))
        assert frontend.requests.draining.num_open == 0
    assert len(engine.requests) == 512
    assert status.usage.num_prompt_tokens == 600 * len(TOKENIZER.encode("the cat").ids)
    assert (status.state, status.engine_id, status.num_attempts) == (QUEUED, "engine-0", 1)
