"""Streams whose frontend is gone, where the engine is not within the next one's reach at once, or leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import pytest

from frontend_svc.engines.connection.client import EngineState
from service_kit.channel import open_channel
from tests.frontend_svc.engines.adoption.test_takeover import (
    GRACE_MS,
    another_frontend,
    doomed,
    read_some,
    rest_of,
)
from tests.frontend_svc.fakes import AT_LENGTH, WAIT_S, Client, FakeEngine, serving
from triptych.api.v1 import inference_pb2


async def until(condition: Callable[[], bool]) -> None:
    """Return once it is true: turn by turn of the loop, as nobody tells of what it asks."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_frontend_that_has_just_begun_looks_until_it_has_heard_of_its_engines():
    engine = FakeEngine()
    async with serving(engine):
        async with doomed(engine) as first:
            call = first.client.generate(orphan_grace_ms=GRACE_MS)
            (request,) = await engine.wait_for_requests(1)
            engine.step({request: [5]})
            read = await read_some(call, 2)
        frontend = another_frontend(engine)
        address = await frontend.public.start()
        try:
            async with open_channel(address, profile="public") as channel:
                rest = asyncio.ensure_future(rest_of(Client(channel), read))
                await until(lambda: frontend.draining.num_open > 0 or rest.done())
                frontend.connect(address)
                await engine.wait(lambda: request.num_adoptions == 1)
                engine.step({request: [6]}, finished={request: AT_LENGTH})
                assert [list(message.delta.token_ids) for message in await rest] == [[6], []]
        finally:
            await frontend.public.stop(0)
            await frontend.close()


async def test_a_position_that_no_stream_reaches_is_refused_and_no_engine_asked():
    engine = FakeEngine()
    async with serving(engine) as (client, _):
        received = [inference_pb2.ReceivedOutput(num_tokens=1)]
        request = inference_pb2.ResumeRequest(
            resume_token="0" * 32, last_position=2**64 - 1, received=received
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.inference.Resume(request, timeout=WAIT_S).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == f"last_position is {2**64 - 1}, the limit is {2**48}"
    assert engine.num_asked_adoptions == 0


async def test_an_engine_that_leaves_is_asked_too():
    engine = FakeEngine()
    async with serving(engine) as (client, frontend):
        await client.until_engines_are_ready(1)
        async with doomed(engine) as first:
            call = first.client.generate(orphan_grace_ms=GRACE_MS)
            (request,) = await engine.wait_for_requests(1)
            engine.step({request: [5]})
            read = await read_some(call, 2)
            for session in engine.sessions:
                session.send(draining={})
            (known,) = frontend.directory.clients()
            await until(lambda: known.state is EngineState.DRAINING)
        rest = asyncio.ensure_future(rest_of(client, read))
        await engine.wait(lambda: request.num_adoptions == 1)
        engine.step({request: [6]}, finished={request: AT_LENGTH})
        assert [list(message.delta.token_ids) for message in await rest] == [[6], []]
