"""Calls of `triptych admin` to a service's admin listener and to a coordinator's scaling service."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from launcher.verbs.complete import run_verb
from service_kit.channel import open_channel
from service_kit.errors import rpc_errors_translated
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.coordinator.v1 import scaling_pb2, scaling_pb2_grpc
from triptych.engine.v1 import utility_pb2

# The service itself answers at its limit; this is for one that does not respond.
_GRACE_S = 5.0
# The coordinator's default.
_DEFAULT_LIMIT_S = 600.0
_PREFIX = "OPERATION_STATE_"
_ENDED_WELL = scaling_pb2.OPERATION_STATE_DONE
_ENDED = (_ENDED_WELL, scaling_pb2.OPERATION_STATE_FAILED, scaling_pb2.OPERATION_STATE_CANCELLED)


def run_status(address: str, timeout_s: float) -> int:
    """Print the status of the service. Returns 0, or 1 with the error on stderr."""
    return run_verb(_status(address, timeout_s))


def run_call(address: str, call: utility_pb2.UtilityCall, timeout_s: float) -> int:
    """Make a utility call and print its result. Returns 0, or 1 with the error on stderr."""
    call.timeout_ms = max(1, int(timeout_s * 1000))
    return run_verb(_call(address, call, timeout_s))


def run_scale(address: str, group: str, size: int, limit_s: float, timeout_s: float) -> int:
    """Change a group's size and print the progress until its end.

    limit_s: after which the coordinator cancels it.  timeout_s: of one answer.  Returns 0, or 1 if it
    failed, was cancelled, was refused, or its progress could not be followed to the end.
    """
    return run_verb(_scale(address, group, size, limit_s, timeout_s))


def run_operations(address: str, timeout_s: float) -> int:
    """Print the operations known to the coordinator, newest first. Returns 0, or 1 if refused."""
    return run_verb(_operations(address, timeout_s))


def run_cancel(address: str, operation_id: str, timeout_s: float) -> int:
    """Cancel an operation and print its state. Returns 0, or 1 if refused."""
    return run_verb(_cancel(address, operation_id, timeout_s))


def run_drain_engine(address: str, engine_id: str, deadline_s: float, timeout_s: float) -> int:
    """Drain one engine. Returns 0, or 1 if refused."""
    return run_verb(_drain(address, engine_id, deadline_s, timeout_s))


def run_evict_engine(address: str, engine_id: str, reason: str, timeout_s: float) -> int:
    """Evict one engine. Returns 0, or 1 if refused."""
    return run_verb(_evict(address, engine_id, reason, timeout_s))


async def _status(address: str, timeout_s: float) -> int:
    async with open_channel(address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        with rpc_errors_translated():
            answer = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=timeout_s)
    print(f"{answer.instance} (pid {answer.pid}, version {answer.version})")
    for value in answer.values:
        shown = value.text if value.WhichOneof("value") == "text" else _number(value.number)
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


def _number(number: float) -> str:
    # All digits, because versions may differ by one.
    return str(int(number)) if number.is_integer() else f"{number:g}"


async def _scale(address: str, group: str, size: int, limit_s: float, timeout_s: float) -> int:
    request = scaling_pb2.ScaleRequest(dp_group=group, new_size=size, timeout_ms=int(limit_s * 1000))
    # The operation's limit, plus the time of an answer.
    patience_s = (limit_s or _DEFAULT_LIMIT_S) + timeout_s
    async with _scaling_stub(address) as stub:
        operation = (await stub.Scale(request, timeout=timeout_s)).operation
        print(_operation_line(operation), flush=True)
        watch = scaling_pb2.WatchOperationRequest(operation_id=operation.operation_id)
        async for message in stub.WatchOperation(watch, timeout=patience_s):
            if _operation_line(message.operation) != _operation_line(operation):
                print(_operation_line(message.operation), flush=True)
            operation = message.operation
    return 0 if operation.state == _ENDED_WELL else 1


async def _operations(address: str, timeout_s: float) -> int:
    async with _scaling_stub(address) as stub:
        answer = await stub.ListOperations(scaling_pb2.ListOperationsRequest(), timeout=timeout_s)
    for operation in answer.operations:
        print(f"{operation.age_ms / 1000:.0f} s ago: {_operation_line(operation)}")
    return 0


async def _cancel(address: str, operation_id: str, timeout_s: float) -> int:
    request = scaling_pb2.CancelOperationRequest(operation_id=operation_id)
    async with _scaling_stub(address) as stub:
        answer = await stub.CancelOperation(request, timeout=timeout_s)
    print(_operation_line(answer.operation))
    return 0


async def _drain(address: str, engine_id: str, deadline_s: float, timeout_s: float) -> int:
    # A tiny deadline must not be rounded to 0, which means no deadline.
    request = scaling_pb2.DrainEngineRequest(engine_id=engine_id, deadline_ms=math.ceil(deadline_s * 1000))
    async with _scaling_stub(address) as stub:
        answer = await stub.DrainEngine(request, timeout=timeout_s)
    print(f"engine {engine_id} drains, {answer.num_in_flight} requests are in flight")
    return 0


async def _evict(address: str, engine_id: str, reason: str, timeout_s: float) -> int:
    request = scaling_pb2.EvictEngineRequest(engine_id=engine_id, reason=reason)
    async with _scaling_stub(address) as stub:
        answer = await stub.EvictEngine(request, timeout=timeout_s)
    print(f"engine {engine_id} is gone, the topology has version {answer.version}")
    return 0


@asynccontextmanager
async def _scaling_stub(address: str) -> AsyncIterator[scaling_pb2_grpc.ScalingServiceStub]:
    """A stub of the service; its errors are raised as ServiceError."""
    async with open_channel(address) as channel:
        with rpc_errors_translated():
            yield scaling_pb2_grpc.ScalingServiceStub(channel)


def _operation_line(operation: scaling_pb2.Operation) -> str:
    state = scaling_pb2.OperationState.Name(operation.state).removeprefix(_PREFIX)
    group = f" of {operation.dp_group}" if operation.dp_group else ""
    words = [f"{operation.operation_id}{group}: {operation.old_size} -> {operation.new_size} {state}"]
    if operation.state not in _ENDED and operation.num_engines_needed:
        words.append(f"{operation.num_engines_ready} of {operation.num_engines_needed}")
    if operation.generation:
        words.append(f"generation {operation.generation}")
    if operation.HasField("error"):
        words.append(operation.error.message)
    return ", ".join(words)
