"""Calls to the admin listener of one service, for the verbs of `triptych admin`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc

from launcher.verbs.complete import print_failure
from service_kit.channel import open_channel
from service_kit.errors import ServiceError, from_rpc_error
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.engine.v1 import utility_pb2

# The service itself answers at its limit; this is for one that does not respond.
_GRACE_S = 5.0


def run_status(address: str, timeout_s: float) -> int:
    """Print the status of the service. Returns 0, or 1 with the error on stderr."""
    try:
        answer = asyncio.run(_status(address, timeout_s))
    except ServiceError as error:
        print_failure(error)
        return 1
    print(f"{answer.instance} (pid {answer.pid}, version {answer.version})")
    for value in answer.values:
        shown = value.text if value.WhichOneof("value") == "text" else _shown(value.number)
        print(f"{value.key} {shown}")
    return 0


def run_call(address: str, call: utility_pb2.UtilityCall, timeout_s: float) -> int:
    """Make a utility call and print its result. Returns 0, or 1 with the error on stderr."""
    call.timeout_ms = max(1, int(timeout_s * 1000))
    try:
        result = asyncio.run(_call(address, call, timeout_s))
    except ServiceError as error:
        print_failure(error)
        return 1
    for line in _lines(result):
        print(line)
    return 0


def _shown(number: float) -> str:
    # All digits, because versions may differ by one.
    return str(int(number)) if number.is_integer() else f"{number:g}"


async def _status(address: str, timeout_s: float) -> admin_pb2.GetStatusResponse:
    async with open_channel(address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        try:
            answer = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
    status: admin_pb2.GetStatusResponse = answer
    return status


async def _call(address: str, call: utility_pb2.UtilityCall, timeout_s: float) -> utility_pb2.UtilityResult:
    async with open_channel(address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        try:
            request = admin_pb2.UtilityRequest(call=call)
            answer = await stub.Utility(request, timeout=timeout_s + _GRACE_S)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
    result: utility_pb2.UtilityResult = answer.result
    return result


def _lines(result: utility_pb2.UtilityResult) -> Iterator[str]:
    if result.WhichOneof("result") != "config":
        yield "done"
        return
    for option in result.config.options:
        yield f"{option.name} {option.value or 'unset'} ({option.origin})"
