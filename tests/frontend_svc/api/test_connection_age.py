"""Connections that are asked to go after a while, so that clients spread over new frontends."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from tests.frontend_svc.fakes import AT_LENGTH, WAIT_S, Client, FakeEngine, answer, read_all, serving

OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


async def test_a_stream_outlives_the_age_of_its_connection_and_the_next_call_takes_another():
    engine = FakeEngine()
    async with (
        serving(engine, max_connection_age_s=0.2, max_connection_age_grace_s=60.0) as (_, frontend),
        grpc.aio.insecure_channel(frontend.address, options=OWN_CONNECTION) as channel,
    ):
        client = Client(channel)
        call = client.generate()
        (request,) = await engine.wait_for_requests(1)
        # The channel leaves the connection when it is asked to; the stream stays on it.
        await asyncio.wait_for(channel.wait_for_state_change(grpc.ChannelConnectivity.READY), WAIT_S)
        engine.step({request: [5]})
        engine.step({request: [6]}, finished={request: AT_LENGTH})
        assert (await read_all(call))[2] == [5, 6]
        engine.script = answer("y")
        assert (await read_all(client.generate()))[1] == "y"


async def test_a_stream_beyond_the_grace_is_cut_and_aborted():
    engine = FakeEngine()
    async with (
        # Its connections end as well: a client in one long call would be cut off.
        serving(engine, waits_ready=False, max_connection_age_s=1.0, max_connection_age_grace_s=1.0) as (
            other,
            frontend,
        ),
        grpc.aio.insecure_channel(frontend.address, options=OWN_CONNECTION) as channel,
    ):
        await other.until_engines_are_ready(1)
        call = Client(channel).generate([5, 6])
        (request,) = await engine.wait_for_requests(1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(call)
        await engine.wait(lambda: request.abort_reason is not None)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
