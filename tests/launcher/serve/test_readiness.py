"""Waiting for a service: until it serves, however late it can be asked, and nothing of the wait stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from launcher.serve.readiness import await_ready
from launcher.services import READINESS
from service_kit.limits import INTERNAL
from tests.connections import until_connections, without_collections

_Status = health_pb2.HealthCheckResponse


class LateHealth(health_pb2_grpc.HealthServicer):
    """Cannot be asked at first, stops while it is asked, and then serves when it is told to."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.may_serve = asyncio.Event()

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        self.num_asked += 1
        if self.num_asked == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        if self.num_asked == 2:
            # In gRPC's words, as of a server that stops with calls open.
            await context.abort(grpc.StatusCode.CANCELLED, "Cancelling all calls")
        assert request.service == READINESS["engine"]
        yield _Status(status=_Status.NOT_SERVING)
        await self.may_serve.wait()
        yield _Status(status=_Status.SERVING)
        await asyncio.Event().wait()


async def test_a_service_is_awaited_and_no_connection_stays():
    servicer, server = LateHealth(), grpc.aio.server(options=INTERNAL.options())
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    with without_collections():
        waiting = asyncio.ensure_future(await_ready("engine", address))
        await until_connections(address, 1)
        assert not waiting.done()
        servicer.may_serve.set()
        await waiting
        await until_connections(address, 0)
    assert servicer.num_asked == 3
    await server.stop(None)
