from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest as Request

from service_kit.server import V1_NAME, V1ALPHA_NAME
from tests.service_kit.fakes import serving


async def ask(channel: Any, service: str, request: Request) -> Any:
    method = channel.stream_stream(
        f"/{service}/ServerReflectionInfo",
        request_serializer=Request.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    call = method()
    await call.write(request)
    answer = await call.read()
    await call.done_writing()
    return answer


@pytest.mark.parametrize("service", [V1_NAME, V1ALPHA_NAME])
async def test_services_are_listed_under_both_names(service: str) -> None:
    async with serving([]) as (_, channel):
        answer = await ask(channel, service, Request(list_services=""))
    names = {entry.name for entry in answer.list_services_response.service}
    assert names == {"grpc.health.v1.Health", V1_NAME, V1ALPHA_NAME}


@pytest.mark.parametrize("symbol", ["grpc.health.v1.Health", V1_NAME, V1ALPHA_NAME])
async def test_every_listed_service_can_be_described(symbol: str) -> None:
    async with serving([]) as (_, channel):
        answer = await ask(channel, V1_NAME, Request(file_containing_symbol=symbol))
    file = descriptor_pb2.FileDescriptorProto()
    file.ParseFromString(answer.file_descriptor_response.file_descriptor_proto[0])
    assert symbol in [f"{file.package}.{service.name}" for service in file.service]


async def test_reflection_can_be_left_out() -> None:
    async with serving([], reflection=False) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(channel, V1_NAME, Request(list_services=""))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
