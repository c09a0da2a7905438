"""The calls of a server end together, each in the service's words, whatever it is doing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.triptych_kit.fakes import EOF, SERVICE_NAME, FakeService, call_unary, serving
from triptych_kit.errors import Unavailable, from_rpc_error
from triptych_kit.open_calls import OpenCalls


def leaving() -> Unavailable:
    return Unavailable("the service leaves", reason="LEAVING", retry_after_ms=70)


async def refusal(call: Any) -> tuple[grpc.StatusCode, str, int | None]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = from_rpc_error(caught.value)
    return error.code, error.reason, error.retry_after_ms


async def read_out(call: Any, read: list[bytes]) -> None:
    while (message := await call.read()) is not EOF:
        read.append(message)


LEAVING = (grpc.StatusCode.UNAVAILABLE, "LEAVING", 70)


async def test_whatever_waits_ends_with_the_error_and_what_comes_later_is_refused_by_it() -> None:
    waiting = asyncio.Semaphore(0)

    async def wait(request: bytes, context: Any) -> bytes:
        waiting.release()
        await asyncio.Event().wait()
        return b""

    service = FakeService(unary=wait)
    async with serving([service.register()]) as (server, channel):
        unary = asyncio.ensure_future(call_unary(channel))
        stream = channel.unary_stream(f"/{SERVICE_NAME}/Stream")(b"2")
        assert [await stream.read(), await stream.read()] == [b"0", b"1"]
        await waiting.acquire()
        await asyncio.wait_for(server.end_calls(leaving), 10)
        assert await refusal(unary) == LEAVING
        assert await refusal(stream.read()) == LEAVING
        assert service.num_closed == 1
        assert await refusal(call_unary(channel)) == LEAVING


async def test_a_call_has_a_grace_to_end_by_itself_in_which_no_other_begins() -> None:
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    async def wait(request: bytes, context: Any) -> bytes:
        has_begun.set()
        await may_end.wait()
        return b"done"

    async with serving([FakeService(unary=wait).register()]) as (server, channel):
        unary = asyncio.ensure_future(call_unary(channel))
        await has_begun.wait()
        ending = asyncio.ensure_future(server.end_calls(leaving, grace_s=600.0))
        await asyncio.sleep(0)
        assert await refusal(call_unary(channel)) == LEAVING
        may_end.set()
        assert await unary == b"done"
        await asyncio.wait_for(ending, 10)


async def test_a_call_that_outlasts_its_grace_ends_with_the_error() -> None:
    has_begun = asyncio.Event()

    async def wait(request: bytes, context: Any) -> bytes:
        has_begun.set()
        await asyncio.Event().wait()
        return b""

    async with serving([FakeService(unary=wait).register()]) as (server, channel):
        unary = asyncio.ensure_future(call_unary(channel))
        await has_begun.wait()
        await asyncio.wait_for(server.end_calls(leaving, grace_s=0.01), 10)
        assert await refusal(unary) == LEAVING


async def test_a_call_that_writes_ends_behind_its_message() -> None:
    enough = b"x" * 1024
    flood_begins = asyncio.Event()

    async def flood(request: bytes, context: Any) -> AsyncIterator[bytes]:
        while True:
            yield enough
            flood_begins.set()

    async with serving([FakeService(stream=flood).register()]) as (server, channel):
        call = channel.unary_stream(f"/{SERVICE_NAME}/Stream")(b"")
        await flood_begins.wait()
        ending = asyncio.ensure_future(server.end_calls(leaving))
        read: list[bytes] = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_out(call, read)
        await asyncio.wait_for(ending, 10)
    assert set(read) == {enough}
    assert from_rpc_error(caught.value).reason == "LEAVING"


async def test_health_is_answered_to_the_last() -> None:
    async with serving([FakeService().register()]) as (server, channel):
        await server.end_calls(leaving)
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_client_that_cancels_in_the_same_moment_has_cancelled() -> None:
    calls = OpenCalls()

    async def wait() -> None:
        with calls.opened():
            await asyncio.Event().wait()

    both = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    ending = asyncio.ensure_future(calls.end(leaving))
    await asyncio.sleep(0)
    both.cancel()
    with pytest.raises(asyncio.CancelledError):
        await both
    await asyncio.wait_for(ending, 10)
    assert len(calls) == 0
