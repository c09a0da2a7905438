"""Requests that have begun, and that the engine they are sent on to does not take."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import pytest

from tests.frontend_svc.fakes import (
    AT_LENGTH,
    WAIT_S,
    Client,
    FakeEngine,
    Script,
    details_of,
    read_all,
    serving,
)
from triptych.api.v1 import model_pb2, request_pb2
from triptych.engine.v1 import engine_pb2, session_pb2

REFUSALS = [
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
]
WHY = "logprobs is 50, it takes 0 to 20"


def refusing(code: grpc.StatusCode) -> Script:
    """A script that takes no request."""

    def script(engine, request):
        rejected = engine_pb2.AddRejected(handle=request.handle, attempt=request.entry.attempt)
        rejected.status.code, rejected.status.message = code.value[0], WHY
        request.session.send(add_rejected=rejected)

    return script


def ending_with(token_id: int) -> Script:
    """A script that ends each request with one more token."""
    return lambda engine, request: engine.step({request: [token_id]}, finished={request: AT_LENGTH})


async def until_told(client: Client, request_id: str, num_tokens: int) -> None:
    """Wait until the frontend has so many tokens of a request."""
    async with asyncio.timeout(WAIT_S):
        while True:
            told = await client.request.GetRequest(request_pb2.GetRequestRequest(request_id=request_id))
            if told.usage.num_completion_tokens == num_tokens:
                return


async def lose_first(client: Client, engines: Sequence[FakeEngine]) -> None:
    """The first engine dies for good when the others are there."""
    for engine in engines[1:]:
        engine.become_ready()
    await client.until_engines_are_ready(len(engines))
    engines[0].is_ready = False
    engines[0].die()


async def make_second_choice(client: Client, frontend, engine: FakeEngine) -> None:
    """Have `engine` say that it is busy, so that others are preferred."""
    await engine.wait(lambda: bool(engine.sessions))
    engine.sessions[0].send(stats=session_pb2.Stats(num_running=8, num_waiting=2))
    async with asyncio.timeout(WAIT_S):
        while not any(one.info().num_running for one in frontend.directory.clients()):
            await client.model.ListModels(model_pb2.ListModelsRequest())


@pytest.mark.parametrize("code", REFUSALS)
async def test_what_has_begun_goes_past_an_engine_that_refuses_it_for_whatever_reason(code):
    engines = [
        FakeEngine(),
        FakeEngine(refusing(code), dp_rank=1, is_ready=False),
        FakeEngine(ending_with(6), dp_rank=2, is_ready=False),
    ]
    async with serving(*engines) as (client, frontend):
        call = client.generate(request_id="mine")
        (request,) = await engines[0].wait_for_requests(1)
        engines[0].step({request: [5]})
        await until_told(client, "mine", 1)
        await make_second_choice(client, frontend, engines[2])
        await lose_first(client, engines)
        assert (await read_all(call))[2] == [5, 6]
    assert [len(engine.requests) for engine in engines] == [1, 1, 1]
    assert engines[2].requests[0].output == [5]


async def test_an_output_that_has_not_begun_goes_on_with_its_group():
    engines = [
        FakeEngine(),
        FakeEngine(refusing(REFUSALS[0]), dp_rank=1, is_ready=False),
        FakeEngine(ending_with(6), dp_rank=2, is_ready=False),
    ]
    async with serving(*engines) as (client, frontend):
        call = client.generate(request_id="mine", n=2)
        _, second = await engines[0].wait_for_requests(2)
        engines[0].step({second: [5]})
        await until_told(client, "mine", 1)
        await make_second_choice(client, frontend, engines[2])
        await lose_first(client, engines)
        assert sorted((await read_all(call))[2]) == [5, 6, 6]
    assert [request.output for request in engines[2].requests] == [[], [5]]


@pytest.mark.parametrize("code", REFUSALS[:2])
async def test_what_has_begun_and_nobody_takes_was_no_mistake_of_its_client(code):
    engines = [
        FakeEngine(),
        FakeEngine(refusing(code), dp_rank=1, is_ready=False),
        FakeEngine(refusing(code), dp_rank=2, is_ready=False),
    ]
    async with serving(*engines) as (client, _):
        call = client.generate(request_id="mine")
        (request,) = await engines[0].wait_for_requests(1)
        engines[0].step({request: [5]})
        await until_told(client, "mine", 1)
        await lose_first(client, engines)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert WHY in (caught.value.details() or "")
    assert "NOT_CONTINUED" in details_of(caught.value)
    assert "RetryInfo" in details_of(caught.value)
    assert [len(engine.requests) for engine in engines] == [1, 1, 1]
