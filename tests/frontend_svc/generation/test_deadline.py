"""The deadline of a call, wherever its request is when it passes."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from frontend_svc.api.generate_stream import stream_generate
from frontend_svc.generation.caller import Caller
from service_kit.errors import DeadlineExceeded
from tests.frontend_svc.fakes import WAIT_S, FakeEngine, answer, make_request, read_all, serving
from triptych.engine.v1 import engine_pb2

# Long enough for a request to be in its engine before, also on a machine that is busy.
DEADLINE_S = 2.0


async def ends_late(call) -> None:
    """Read a call to its end, which is its deadline."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_call_whose_deadline_has_passed_sends_nothing_and_keeps_no_place():
    engine = FakeEngine(answer("y"))
    async with serving(engine, max_queued_requests=1) as (client, frontend):
        caller = Caller("call", "", "", lambda: -0.5, 1.0)
        with pytest.raises(DeadlineExceeded):
            await anext(stream_generate(frontend.generation, make_request(request_id="x"), caller))
        assert not engine.requests
        assert (frontend.admission.num_queued, frontend.draining.num_open) == (0, 0)
        assert (await read_all(client.generate(request_id="x")))[1] == "y"


async def test_a_deadline_in_the_queue_gives_the_place_back():
    engine = FakeEngine()
    async with serving(engine, max_queued_requests=1) as (client, frontend):
        call = client.generate(timeout=DEADLINE_S)
        (request,) = await engine.wait_for_requests(1)
        await ends_late(call)
        await engine.wait(lambda: request.abort_reason is not None)
        assert request.abort_reason == engine_pb2.ABORT_REASON_DEADLINE
        assert (frontend.admission.num_queued, frontend.draining.num_open) == (0, 0)
        engine.script = answer("y")
        assert (await read_all(client.generate()))[1] == "y"


async def test_a_deadline_while_it_runs_aborts_all_outputs_of_the_request():
    engine = FakeEngine()
    async with serving(engine) as (client, frontend):
        call = client.generate(timeout=DEADLINE_S, n=2)
        requests = list(await engine.wait_for_requests(2))
        for request in requests:
            engine.step({request: [5]})
        await ends_late(call)
        await engine.wait(lambda: all(request.abort_reason is not None for request in requests))
        assert len(frontend.requests) == 0
    assert {request.abort_reason for request in requests} == {engine_pb2.ABORT_REASON_DEADLINE}


async def test_an_engine_is_told_what_is_left_of_the_deadline_and_nothing_where_there_is_none():
    engine = FakeEngine(answer("y"))
    async with serving(engine) as (client, _):
        await read_all(client.generate(timeout=8.0))
        await read_all(client.inference.Generate(make_request()))
    told = [request.entry.remaining_ms for request in engine.requests]
    assert 0 < told[0] <= 8100
    assert not engine.requests[1].entry.HasField("remaining_ms")


async def test_others_go_on_when_one_is_late():
    engine = FakeEngine()
    async with serving(engine) as (client, _):
        late, other = client.generate(timeout=DEADLINE_S), client.generate()
        requests = list(await engine.wait_for_requests(2))
        await ends_late(late)
        await engine.wait(lambda: any(request.abort_reason is not None for request in requests))
        (left,) = [request for request in requests if request.abort_reason is None]
        answer("y")(engine, left)
        assert (await asyncio.wait_for(read_all(other), WAIT_S))[1] == "y"
