"""Calls of `triptych admin` to a service's admin listener and to a coordinator's scaling service."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.coordinator.v1 import scaling_pb2, scaling_pb2_grpc
from triptych.engine.v1 import utility_pb2
from triptych_cli.client_channel import open_client_channel
from triptych_cli.verbs.failures import Target, WrongService, run_verb
from triptych_kit.errors import Unimplemented, rpc_errors_translated

# The service itself answers at its limit; this is for one that does not respond.
_GRACE_S = 5.0
# The coordinator's default.
_DEFAULT_LIMIT_S = 600.0
_PREFIX = "OPERATION_STATE_"
_ENDED_WELL = scaling_pb2.OPERATION_STATE_DONE
_ENDED = (_ENDED_WELL, scaling_pb2.OPERATION_STATE_FAILED, scaling_pb2.OPERATION_STATE_CANCELLED)


_NAMES = {"engine": "an engine", "frontend": "a frontend", "coordinator": "a coordinator"}
_HINT = (
    "is the service running? admin takes the address of an admin listener, which the service's log names, "
    "or a service of a running `triptych serve`, such as engine-0"
)
_FLAGS = {
    "target": "ADDRESS", "dp_group": "--group", "new_size": "SIZE", "operation_id": "OPERATION_ID",
    "engine_id": "ENGINE_ID", "deadline_ms": "--deadline-s", "timeout_ms": "--timeout-s",
    "pause.mode": "--mode", "sleep.mode": "--mode", "sleep.level": "--level", "wake.tags": "--tag",
    "profile.prefix": "--prefix",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminTarget(Target):
    """The service that a call goes to, and how its answer is shown.

    given_up: why services of its `serve` stay down, by their names.
    """

    timeout_s: float
    given_up: Mapping[str, str] = field(default_factory=dict)
    hint: str = _HINT
    flags: Mapping[str, str] = field(default_factory=lambda: _FLAGS)
    as_json: bool = False


def run_status(target: AdminTarget) -> int:
    """Print the status of the service. Returns 0, or 1 with the error on stderr."""
    return _run(_status(target), target)


def run_drain(target: AdminTarget, deadline_s: float, *, keep_running: bool) -> int:
    """Drain the service and print the progress. Returns 0, or 1 if it could not be followed to its end."""
    return _run(_drain(target, deadline_s, keep_running=keep_running), target)


def run_call(target: AdminTarget, call: utility_pb2.UtilityCall) -> int:
    """Make a utility call and print its result. Returns 0, or 1 with the error on stderr."""
    call.timeout_ms = max(1, int(target.timeout_s * 1000))
    return _run(_call(target, call), target, needs="engine")


def run_quarantine(target: AdminTarget, *, cleared: str | None) -> int:
    """Print the prompts in a frontend's quarantine, or clear an incident, all if it is empty."""
    coroutine = _quarantined(target) if cleared is None else _clear_quarantine(target, cleared)
    return _run(coroutine, target, needs="frontend")


def run_scale(target: AdminTarget, group: str, size: int, limit_s: float) -> int:
    """Change a group's size and print the progress until its end.

    limit_s: after which the coordinator cancels it.  Returns 0, or 1 if it failed, was cancelled, was
    refused, or its progress could not be followed to the end.
    """
    return _run(_scale(target, group, size, limit_s), target, needs="coordinator")


def run_operations(target: AdminTarget) -> int:
    """Print the operations known to the coordinator, newest first. Returns 0, or 1 if refused."""
    return _run(_operations(target), target, needs="coordinator")


def run_cancel(target: AdminTarget, operation_id: str) -> int:
    """Cancel an operation and print its state. Returns 0, or 1 if refused."""
    return _run(_cancel(target, operation_id), target, needs="coordinator")


def run_drain_engine(target: AdminTarget, engine_id: str, deadline_s: float) -> int:
    """Drain one engine. Returns 0, or 1 if refused."""
    return _run(_drain_engine(target, engine_id, deadline_s), target, needs="coordinator")


def run_evict_engine(target: AdminTarget, engine_id: str, reason: str) -> int:
    """Evict one engine. Returns 0, or 1 if refused."""
    return _run(_evict(target, engine_id, reason), target, needs="coordinator")


def _run(work: Coroutine[None, None, int], target: AdminTarget, needs: str = "") -> int:
    """Run a call to a service of the kind `needs`; one to another kind is explained."""
    return run_verb(_explained(work, target, needs), target)


async def _explained(work: Coroutine[None, None, int], target: AdminTarget, needs: str) -> int:
    try:
        return await work
    except Unimplemented as error:
        kind = await _kind_of(target)
        if kind == needs:
            raise
        raise WrongService(f"{target.address} is {_NAMES.get(kind, kind)}{_remedy(needs)}") from error


def _remedy(needs: str) -> str:
    if not needs:
        return ": this call takes an admin address, which the log of a service names"
    return f": this call takes the admin address of {_NAMES[needs]}, or its name, such as {needs}-0"


async def _kind_of(target: AdminTarget) -> str:
    """The kind of service at the address, or a description of a server that is none."""
    async with open_client_channel(target.address, profile="internal") as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        try:
            with rpc_errors_translated():
                answer = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=target.timeout_s)
        except Unimplemented:
            return "no admin listener"
    return str(answer.service)


async def _status(target: AdminTarget) -> int:
    async with open_client_channel(target.address, profile="internal") as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        with rpc_errors_translated():
            answer = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=target.timeout_s)
    values = {value.key: _value(value) for value in answer.values}
    values |= {f"given_up.{name}": why for name, why in target.given_up.items()}
    if target.as_json:
        state = admin_pb2.ServiceState.Name(answer.state).removeprefix("SERVICE_STATE_").lower()
        facts = {"service": answer.service, "instance": answer.instance, "pid": answer.pid}
        facts |= {"version": answer.version, "state": state, "uptime_s": answer.uptime_ms / 1000}
        print(json.dumps(facts | {"values": values}))
        return 0
    uptime = datetime.timedelta(seconds=answer.uptime_ms // 1000)
    print(f"{answer.instance} (pid {answer.pid}, version {answer.version}, up {uptime})")
    for key, value in values.items():
        print(f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}")
    return 0


async def _drain(target: AdminTarget, deadline_s: float, *, keep_running: bool) -> int:
    # A tiny deadline must not be rounded to 0, which means no deadline.
    request = admin_pb2.DrainRequest(deadline_ms=math.ceil(deadline_s * 1000), keep_running=keep_running)
    limit_s = deadline_s + target.timeout_s if deadline_s else None
    async with open_client_channel(target.address, profile="internal") as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        with rpc_errors_translated():
            async for answer in stub.Drain(request, timeout=limit_s):
                state = admin_pb2.ServiceState.Name(answer.state).removeprefix("SERVICE_STATE_").lower()
                print(f"{state}, {answer.num_in_flight} requests in flight", flush=True)
    return 0


async def _call(target: AdminTarget, call: utility_pb2.UtilityCall) -> int:
    async with open_client_channel(target.address, profile="internal") as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        with rpc_errors_translated():
            request = admin_pb2.UtilityRequest(call=call)
            answer = await stub.Utility(request, timeout=target.timeout_s + _GRACE_S)
    kind = answer.result.WhichOneof("result")
    if target.as_json:
        print(json.dumps(_record(answer.result)))
    elif kind == "config":
        for option in answer.result.config.options:
            print(f"{option.name} {option.value or 'unset'} ({option.origin})")
    elif kind == "adapters":
        for line in map(_adapter_line, answer.result.adapters.adapters):
            print(line)
        if not answer.result.adapters.adapters:
            print("no adapters")
    elif kind == "pins":
        for line in map(_pin_line, answer.result.pins.pins):
            print(line)
        if not answer.result.pins.pins:
            print("no pins")
    elif kind == "num_released_blocks":
        print(f"{answer.result.num_released_blocks} blocks released")
    else:
        print("done")
    return 0


def _adapter_line(adapter: utility_pb2.LoadedAdapter) -> str:
    words = [f"{adapter.name} rank {adapter.rank}, digest {adapter.digest[:12]}"]
    words += ["used lately"] if adapter.in_slot else []
    return ", ".join([*words, "pinned"] if adapter.pinned else words)


def _pin_line(pin: utility_pb2.PinnedBlocks) -> str:
    left = f"{pin.remaining_ms / 1000:g} s left" if pin.remaining_ms else "until its next turn"
    whose = f", job {pin.job_id}" if pin.job_id else ""
    whose += f" of {pin.tenant}" if pin.tenant else ""
    return f"{pin.pin_id} {pin.num_blocks} blocks, {left}{whose}"


async def _quarantined(target: AdminTarget) -> int:
    async with open_client_channel(target.address, profile="internal") as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        with rpc_errors_translated():
            request = admin_pb2.ListQuarantineRequest()
            answer = await stub.ListQuarantine(request, timeout=target.timeout_s)
    if target.as_json:
        print(json.dumps(_record(answer)))
        return 0
    for prompt in answer.prompts:
        whose = prompt.account or "no key"
        left_s = prompt.remaining_ms // 1000
        print(f"{prompt.incident_id} {prompt.model}, {whose}: {prompt.num_tokens} tokens, {left_s} s left")
    return 0


async def _clear_quarantine(target: AdminTarget, incident_id: str) -> int:
    async with open_client_channel(target.address, profile="internal") as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        with rpc_errors_translated():
            request = admin_pb2.ClearQuarantineRequest(incident_id=incident_id)
            answer = await stub.ClearQuarantine(request, timeout=target.timeout_s)
    print(json.dumps(_record(answer)) if target.as_json else f"{answer.num_cleared} cleared")
    return 0


def _value(value: admin_pb2.StatusValue) -> str | float:
    if value.WhichOneof("value") == "text":
        return value.text
    # All digits of a whole number, because versions may differ by one.
    return int(value.number) if value.number.is_integer() else value.number


def _record(message: Message) -> dict[str, Any]:
    """A message as an object for JSON, with the names of the protos."""
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


async def _scale(target: AdminTarget, group: str, size: int, limit_s: float) -> int:
    request = scaling_pb2.ScaleRequest(dp_group=group, new_size=size, timeout_ms=int(limit_s * 1000))
    # The operation's limit, plus the time of an answer.
    patience_s = (limit_s or _DEFAULT_LIMIT_S) + target.timeout_s
    async with _scaling_stub(target.address) as stub:
        operation = (await stub.Scale(request, timeout=target.timeout_s)).operation
        print(_operation_line(operation), flush=True)
        watch = scaling_pb2.WatchOperationRequest(operation_id=operation.operation_id)
        async for message in stub.WatchOperation(watch, timeout=patience_s):
            if _operation_line(message.operation) != _operation_line(operation):
                print(_operation_line(message.operation), flush=True)
            operation = message.operation
    return 0 if operation.state == _ENDED_WELL else 1


async def _operations(target: AdminTarget) -> int:
    async with _scaling_stub(target.address) as stub:
        answer = await stub.ListOperations(scaling_pb2.ListOperationsRequest(), timeout=target.timeout_s)
    if target.as_json:
        print(json.dumps(_record(answer)))
    elif not answer.operations:
        print("no operations")
    for operation in () if target.as_json else answer.operations:
        print(f"{operation.age_ms / 1000:.0f} s ago: {_operation_line(operation)}")
    return 0


async def _cancel(target: AdminTarget, operation_id: str) -> int:
    request = scaling_pb2.CancelOperationRequest(operation_id=operation_id)
    async with _scaling_stub(target.address) as stub:
        answer = await stub.CancelOperation(request, timeout=target.timeout_s)
    print(_operation_line(answer.operation))
    return 0


async def _drain_engine(target: AdminTarget, engine_id: str, deadline_s: float) -> int:
    # A tiny deadline must not be rounded to 0, which means no deadline.
    request = scaling_pb2.DrainEngineRequest(engine_id=engine_id, deadline_ms=math.ceil(deadline_s * 1000))
    async with _scaling_stub(target.address) as stub:
        answer = await stub.DrainEngine(request, timeout=target.timeout_s)
    print(f"engine {engine_id} drains, {answer.num_in_flight} requests are in flight")
    return 0


async def _evict(target: AdminTarget, engine_id: str, reason: str) -> int:
    request = scaling_pb2.EvictEngineRequest(engine_id=engine_id, reason=reason)
    async with _scaling_stub(target.address) as stub:
        answer = await stub.EvictEngine(request, timeout=target.timeout_s)
    print(f"engine {engine_id} is gone, the topology has version {answer.version}")
    return 0


@asynccontextmanager
async def _scaling_stub(address: str) -> AsyncIterator[scaling_pb2_grpc.ScalingServiceStub]:
    """A stub of the service; its errors are raised as ServiceError."""
    async with open_client_channel(address, profile="internal") as channel:
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
