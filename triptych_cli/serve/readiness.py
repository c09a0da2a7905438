"""Client of the standard health service: waits until a service is ready, or checks it once."""

from __future__ import annotations

import asyncio

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]  # its stubs leave it out
from grpc_health.v1 import health_pb2, health_pb2_grpc

from triptych_cli.client_channel import open_client_channel
from triptych_cli.services import READINESS
from triptych_kit.channel import open_channel
from triptych_kit.errors import ServiceError, from_rpc_error

_RETRY_S = 0.1
# Not started yet, or stopping; its supervisor notices the latter.
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def await_ready(service: str, address: str) -> None:
    """Return once `service` at `address` is SERVING. Has no timeout of its own."""
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            call = stub.Watch(health_pb2.HealthCheckRequest(service=READINESS[service]))
            try:
                # Not `async for`: an unfinished iterator keeps the call open, and so the connection.
                while (answer := await call.read()) is not EOF:
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.RpcError as error:
                if error.code() not in _AWAY:
                    raise from_rpc_error(error) from error
            await asyncio.sleep(_RETRY_S)


async def health_of(target: str, name: str, timeout_s: float) -> str:
    """The health status of the gRPC service `name`: SERVING, NOT_SERVING, SERVICE_UNKNOWN.

    The empty name is the process as a whole.
    """
    async with open_client_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=name)
        try:
            answer = await stub.Check(request, timeout=timeout_s)
        except grpc.RpcError as error:
            failure: ServiceError = from_rpc_error(error)
            if failure.code is grpc.StatusCode.NOT_FOUND:
                return "SERVICE_UNKNOWN"
            raise failure from error
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
