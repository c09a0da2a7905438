"""Each RPC of the contract answers: with something real, or with UNIMPLEMENTED. None hangs, none breaks."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf import descriptor, message_factory

import triptych
from tests.system.stack import Stack, listeners_of
from triptych_kit.channel import open_channel
from triptych_kit.errors import from_rpc_error

REAL = {
    grpc.StatusCode.OK,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
}
# A coordinator that has just started cannot scale yet; UNAVAILABLE for no such reason is a broken connection.
STARTING = "REBUILDING"
LIMIT_S = 60.0


def _methods() -> Iterator[descriptor.MethodDescriptor]:
    for module in pkgutil.walk_packages(triptych.__path__, "triptych."):
        if module.name.endswith("_pb2"):
            file = importlib.import_module(module.name).DESCRIPTOR
            for service in file.services_by_name.values():
                yield from service.methods


# Drain ends a service: it comes last.
METHODS = sorted(_methods(), key=lambda method: (method.name == "Drain", method.full_name))


async def test_every_rpc_answers_on_every_listener(llama: str) -> None:
    served: dict[str, set[str]] = {}
    async with Stack() as stack:
        trio = await stack.start_all(llama)
        for child in (trio.frontend, trio.engine, trio.coordinator):
            for address in listeners_of(child):
                async with open_channel(address, profile="public") as channel:
                    for method in METHODS:
                        code, reason = await _call(channel, method)
                        is_real = code in REAL or reason == STARTING
                        assert is_real, f"{method.full_name} at {child.name}: {code}"
                        if code is not grpc.StatusCode.UNIMPLEMENTED:
                            served.setdefault(child.name.rpartition("-")[0], set()).add(method.full_name)
    assert "triptych.api.v1.InferenceService.Generate" in served["frontend"]
    assert "triptych.engine.v1.EngineCoreService.GetLoad" in served["engine"]
    assert "triptych.coordinator.v1.CoordinatorService.GetTopology" in served["coordinator"]


async def _call(
    channel: grpc.aio.Channel, method: descriptor.MethodDescriptor
) -> tuple[grpc.StatusCode, str]:
    """Send one empty message and read to the first answer: its status, and its reason where it has one."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    request = message_factory.GetMessageClass(method.input_type)()
    kinds: dict[tuple[bool, bool], Any] = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }
    callable_ = kinds[method.client_streaming, method.server_streaming](
        path,
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
    )
    call = callable_(iter([request]) if method.client_streaming else request, timeout=LIMIT_S)
    try:
        if method.server_streaming:
            await call.read()
            call.cancel()
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code(), from_rpc_error(error).reason
    return grpc.StatusCode.OK, ""
