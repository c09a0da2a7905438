"""Calls to the admin listener of one service, for the verbs of `triptych admin`."""

from __future__ import annotations

from launcher.verbs.complete import run_verb
from service_kit.channel import open_channel
from service_kit.errors import rpc_errors_translated
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.engine.v1 import utility_pb2

# The service itself answers at its limit; this is for one that does not respond.
_GRACE_S = 5.0


def run_status(address: str, timeout_s: float) -> int:
    """Print the status of the service. Returns 0, or 1 with the error on stderr."""
    return run_verb(_status(address, timeout_s))


def run_call(address: str, call: utility_pb2.UtilityCall, timeout_s: float) -> int:
    """Make a utility call and print its result. Returns 0, or 1 with the error on stderr."""
    call.timeout_ms = max(1, int(timeout_s * 1000))
    return run_verb(_call(address, call, timeout_s))


async def _status(address: str, timeout_s: float) -> int:
    async with open_channel(address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        with rpc_errors_translated():
            answer = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=timeout_s)
    print(f"{answer.instance} (pid {answer.pid}, version {answer.version})")
    for value in answer.values:
        shown = value.text if value.WhichOneof("value") == "text" else _shown(value.number)
        print(f"{value.key} {shown}")
    return 0


async def _call(address: str, call: utility_pb2.UtilityCall, timeout_s: float) -> int:
    async with open_channel(address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        with rpc_errors_translated():
            request = admin_pb2.UtilityRequest(call=call)
            answer = await stub.Utility(request, timeout=timeout_s + _GRACE_S)
    if answer.result.WhichOneof("result") != "config":
        print("done")
    else:
        for option in answer.result.config.options:
            print(f"{option.name} {option.value or 'unset'} ({option.origin})")
    return 0


def _shown(number: float) -> str:
    # All digits, because versions may differ by one.
    return str(int(number)) if number.is_integer() else f"{number:g}"
