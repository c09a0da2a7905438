from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service_kit.health import HealthServicer
from tests.service_kit.fakes import EOF, SERVICE_NAME, FakeService, serving

Response = health_pb2.HealthCheckResponse


async def check(channel: Any, name: str) -> int:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
    return int(answer.status)


def watch(channel: Any, name: str) -> Any:
    return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=name))


async def test_a_process_is_alive_before_its_services_are_ready() -> None:
    async with serving([FakeService().register()]) as (server, channel):
        assert await check(channel, "") == Response.SERVING
        assert await check(channel, SERVICE_NAME) == Response.NOT_SERVING
        server.set_ready(SERVICE_NAME, True)
        assert await check(channel, SERVICE_NAME) == Response.SERVING
        server.set_ready(SERVICE_NAME, False)
        assert await check(channel, SERVICE_NAME) == Response.NOT_SERVING


async def test_an_unknown_name_is_not_found() -> None:
    async with serving([]) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(channel, "test.v1.Other")
        assert (await watch(channel, "test.v1.Other").read()).status == Response.SERVICE_UNKNOWN
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_watcher_is_told_of_every_change() -> None:
    async with serving([FakeService().register()]) as (server, channel):
        call = watch(channel, SERVICE_NAME)
        seen = [(await call.read()).status]
        for is_ready in (True, False, True):
            server.set_ready(SERVICE_NAME, is_ready)
            seen.append((await call.read()).status)
        server.drain()
        seen.append((await call.read()).status)
        call.cancel()
    assert seen == [
        Response.NOT_SERVING,
        Response.SERVING,
        Response.NOT_SERVING,
        Response.SERVING,
        Response.NOT_SERVING,
    ]


async def test_draining_is_for_good() -> None:
    async with serving([FakeService().register()]) as (server, channel):
        server.drain()
        server.set_ready(SERVICE_NAME, True)
        assert await check(channel, SERVICE_NAME) == Response.NOT_SERVING
        assert await check(channel, "") == Response.NOT_SERVING


async def test_a_watcher_that_leaves_takes_no_other_with_it() -> None:
    async with serving([FakeService().register()]) as (server, channel):
        leaving, staying = watch(channel, SERVICE_NAME), watch(channel, SERVICE_NAME)
        await leaving.read()
        await staying.read()
        leaving.cancel()
        assert await leaving.code() is grpc.StatusCode.CANCELLED
        server.set_ready(SERVICE_NAME, True)
        assert (await staying.read()).status == Response.SERVING
        staying.cancel()


async def test_watches_end_with_the_server() -> None:
    async with serving([FakeService().register()]) as (server, channel):
        call = watch(channel, "")
        assert (await call.read()).status == Response.SERVING
        await asyncio.wait_for(server.stop(grace_s=60.0), 30)
        assert (await call.read()).status == Response.NOT_SERVING
        assert await call.read() is EOF
        assert await call.code() is grpc.StatusCode.OK


def test_only_served_names_have_a_status() -> None:
    with pytest.raises(ValueError, match="is not served here"):
        HealthServicer([SERVICE_NAME]).set_ready("test.v1.Other", True)
