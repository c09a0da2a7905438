"""The scaling service, for operators that resize groups and supervisors that start engines.

The rules are in `scaling`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TypeAlias

import grpc.aio

from coordinator_svc.membership.publisher import ChangeSignal
from coordinator_svc.membership.registry import MemberState
from coordinator_svc.scaling.group_snapshot import Group, GroupEngine
from coordinator_svc.scaling.operation import Operation, OperationState
from coordinator_svc.scaling.scaling import MAX_TIMEOUT_S, Scaling
from coordinator_svc.scaling.tracing import OperationTraces
from triptych.common.v1 import error_pb2
from triptych.coordinator.v1 import scaling_pb2, scaling_pb2_grpc
from triptych_kit.clock import Clock
from triptych_kit.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    ServiceError,
    Unavailable,
    to_parts,
)
from triptych_kit.telemetry import conventions as names
from triptych_kit.telemetry.traces import traced_operation

logger = logging.getLogger(__name__)

_Watch: TypeAlias = (
    "grpc.aio.ServicerContext[scaling_pb2.WatchOperationRequest, scaling_pb2.WatchOperationResponse]"
)
# Drain deadline of an engine that leaves; requests that still run then are moved to other engines.
LEAVE_DEADLINE_S = 20.0
# Changes within this time are handled together.
_MIN_LOOK_INTERVAL_S = 0.02
# The longest interval while an operation runs.
_BUSY_LOOK_INTERVAL_S = 0.1
_IDLE_LOOK_INTERVAL_S = 1.0
# A stream without changes repeats its last message, so that a disconnected reader is noticed.
_REPEAT_S = 5.0
_MAX_WATCHERS = 256
_MAX_REASON_CHARS = 256  # in traces
_STATES = {
    OperationState.PREPARING: scaling_pb2.OPERATION_STATE_PREPARING,
    OperationState.COMMITTING: scaling_pb2.OPERATION_STATE_COMMITTING,
    OperationState.DONE: scaling_pb2.OPERATION_STATE_DONE,
    OperationState.FAILED: scaling_pb2.OPERATION_STATE_FAILED,
    OperationState.CANCELLED: scaling_pb2.OPERATION_STATE_CANCELLED,
}


class ScalingServicer(scaling_pb2_grpc.ScalingServiceServicer):
    """Serves operators and advances operations. `run` must run in the background. Lives in one event loop.

    rebuilt_at: until then a coordinator that has just started does not know all of its engines.
    """

    def __init__(
        self,
        scaling: Scaling,
        engines: Engines,
        signal: ChangeSignal,
        clock: Clock,
        *,
        epoch: int,
        rebuilt_at: float,
    ) -> None:
        self._scaling = scaling
        self._engines = engines
        self._signal = signal
        self._clock = clock
        self._epoch = epoch
        self._rebuilt_at = rebuilt_at
        self._moved = ChangeSignal()
        self._traces = OperationTraces()
        self._shown: tuple[object, ...] = ()  # the state that watchers were last woken for
        self._num_watchers = 0
        self._drain_tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False

    async def run(self) -> None:
        """Follow the members and advance operations, until cancelled."""
        while True:
            self._look()
            busy = self._scaling.next_at() is not None
            interval_s = _BUSY_LOOK_INTERVAL_S if busy else _IDLE_LOOK_INTERVAL_S
            await self._signal.wait(interval_s, loads_too=False)
            await asyncio.sleep(_MIN_LOOK_INTERVAL_S)

    def close(self) -> None:
        """End all streams, so that watchers reconnect to the next coordinator."""
        self._is_closing = True
        self._moved.notify()

    async def Scale(
        self, request: scaling_pb2.ScaleRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> scaling_pb2.ScaleResponse:
        """Begin to change the size of a group."""
        if self._clock.now() < self._rebuilt_at:
            retry_after_ms = round((self._rebuilt_at - self._clock.now()) * 1000) + 1
            raise Unavailable(
                "the coordinator has just started and does not know all engines yet",
                reason="REBUILDING",
                retry_after_ms=retry_after_ms,
            )
        group = self._group_of(request.dp_group)
        operation = self._scaling.begin(group, request.new_size, self._clock.now(), request.timeout_ms / 1000)
        self._traces.begin(operation.operation_id)
        fields = {"operation_id": operation.operation_id, "group": group.name}
        logger.info("scaling", extra={**fields, "from": operation.old_size, "to": operation.new_size})
        self._look()
        return scaling_pb2.ScaleResponse(operation=self._operation(operation.operation_id))

    async def GetOperation(
        self, request: scaling_pb2.GetOperationRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> scaling_pb2.GetOperationResponse:
        return scaling_pb2.GetOperationResponse(operation=self._operation(request.operation_id))

    async def WatchOperation(
        self, request: scaling_pb2.WatchOperationRequest, context: _Watch
    ) -> AsyncIterator[scaling_pb2.WatchOperationResponse]:
        """An operation's state: now, on every change, and every 5 s; the final state is the last message."""
        with self._watching():
            shown: Operation | None = None
            shown_at = 0.0
            while True:
                operation, now = self._scaling.find(request.operation_id), self._clock.now()
                if operation != shown or now - shown_at >= _REPEAT_S:
                    shown, shown_at = operation, now
                    yield scaling_pb2.WatchOperationResponse(operation=from_operation(operation, now))
                if operation.has_ended:
                    return
                await self._until_moved()

    async def ListOperations(
        self, request: scaling_pb2.ListOperationsRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> scaling_pb2.ListOperationsResponse:
        """Running operations and the last ones that ended."""
        now = self._clock.now()
        return scaling_pb2.ListOperationsResponse(
            operations=[from_operation(operation, now) for operation in self._scaling.operations()]
        )

    async def CancelOperation(
        self, request: scaling_pb2.CancelOperationRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> scaling_pb2.CancelOperationResponse:
        name = self._scaling.find(request.operation_id).group
        group = self._engines.groups().get(name, Group(name, ()))
        self._scaling.cancel(request.operation_id, group, self._clock.now())
        self._look()
        return scaling_pb2.CancelOperationResponse(operation=self._operation(request.operation_id))

    async def DrainEngine(
        self, request: scaling_pb2.DrainEngineRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> scaling_pb2.DrainEngineResponse:
        """Drain one engine; for one that drains already, only a given deadline is sent."""
        if request.deadline_ms > MAX_TIMEOUT_S * 1000:
            raise InvalidArgument(
                f"deadline_ms is {request.deadline_ms}, the limit is {MAX_TIMEOUT_S * 1000:.0f}",
                field="deadline_ms",
            )
        engine = self._engine_of(request.engine_id)
        if engine.state is not MemberState.DRAINING or request.deadline_ms:
            with traced_operation("drain engine", {names.ENGINE: engine.engine_id}):
                refusal = await self._engines.drain(engine.engine_id, request.deadline_ms / 1000)
                if refusal:
                    raise FailedPrecondition(f"engine {engine.engine_id} refuses to drain: {refusal}")
            logger.info("engine drains", extra={"engine_id": engine.engine_id})
        return scaling_pb2.DrainEngineResponse(num_in_flight=self._engines.num_in_flight(engine.engine_id))

    async def EvictEngine(
        self, request: scaling_pb2.EvictEngineRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> scaling_pb2.EvictEngineResponse:
        engine = self._engine_of(request.engine_id)
        attributes = {names.ENGINE: engine.engine_id, names.CAUSE: request.reason[:_MAX_REASON_CHARS]}
        with traced_operation("evict engine", attributes):
            version = self._engines.evict(engine.engine_id, request.reason)
        self._signal.notify()
        return scaling_pb2.EvictEngineResponse(version=version)

    async def WatchGroups(
        self,
        request: scaling_pb2.WatchGroupsRequest,
        context: grpc.aio.ServicerContext[scaling_pb2.WatchGroupsRequest, scaling_pb2.WatchGroupsResponse],
    ) -> AsyncIterator[scaling_pb2.WatchGroupsResponse]:
        """Actual and wanted sizes of all groups: now, on every change, and every 5 s."""
        with self._watching():
            shown, shown_at = None, 0.0
            while True:
                states, now = self._group_states(), self._clock.now()
                if states != shown or now - shown_at >= _REPEAT_S:
                    shown, shown_at = states, now
                    yield scaling_pb2.WatchGroupsResponse(groups=states, coordinator_epoch=self._epoch)
                await self._until_moved()

    def _look(self) -> None:
        """Advance the operations, send the drain commands that are due, and wake watchers of a change."""
        groups = self._engines.groups()
        for engine_id in self._scaling.look(groups, self._clock.now()):
            task = asyncio.ensure_future(self._send_drain(engine_id))
            self._drain_tasks.add(task)
            task.add_done_callback(self._drain_tasks.discard)
        for group in groups.values():
            if group.formed is not None and group.name in self._scaling.wanted():
                self._engines.want_members(group.name, *self._scaling.members_wanted(group))
        operations = self._scaling.operations()
        self._traces.look(operations)
        shown = (operations, self._group_states())
        if shown != self._shown:
            self._shown = shown
            self._moved.notify()

    async def _send_drain(self, engine_id: str) -> None:
        try:
            with traced_operation("drain engine", {names.ENGINE: engine_id}):
                refusal = await self._engines.drain(engine_id, LEAVE_DEADLINE_S)
        except ServiceError as error:
            # The command is sent again: the session, or the answer, may only be late.
            logger.info("drain not delivered", extra={"engine_id": engine_id, "cause": str(error)})
            return
        if not refusal:
            self._scaling.acknowledge(engine_id)
        else:
            logger.warning("engine refuses to drain", extra={"engine_id": engine_id, "cause": refusal})
            self._scaling.refuse(engine_id, refusal)
            self._signal.notify()

    def _operation(self, operation_id: str) -> scaling_pb2.Operation:
        return from_operation(self._scaling.find(operation_id), self._clock.now())

    def _group_of(self, name: str) -> Group:
        groups = self._engines.groups()
        if name in groups:
            return groups[name]
        known = ", ".join(repr(known) for known in sorted(groups)) or "none"
        if name or not groups:
            raise NotFound(
                f"group {name!r} has no engine; groups: {known}",
                resource_type="group",
                resource_name=name,
            )
        if len(groups) > 1:
            raise InvalidArgument(f"dp_group is '', must be one of: {known}", field="dp_group")
        return next(iter(groups.values()))

    def _engine_of(self, engine_id: str) -> GroupEngine:
        engine = self._engines.find(engine_id)
        if engine is None:
            raise NotFound(
                f"engine {engine_id!r} is not a member", resource_type="engine", resource_name=engine_id
            )
        return engine

    def _group_states(self) -> list[scaling_pb2.GroupState]:
        groups, wanted = self._engines.groups(), self._scaling.wanted()
        running = {one.group: one.operation_id for one in self._scaling.operations() if not one.has_ended}
        return [
            scaling_pb2.GroupState(
                dp_group=name,
                size=groups[name].size if name in groups else 0,
                wanted_size=wanted[name].size if name in wanted else 0,
                operation_id=running.get(name, ""),
                num_kv_blocks=groups[name].num_kv_blocks if name in groups else 0,
            )
            for name in sorted(groups.keys() | wanted.keys())
        ]

    @contextmanager
    def _watching(self) -> Iterator[None]:
        if self._num_watchers >= _MAX_WATCHERS:
            raise ResourceExhausted(f"{_MAX_WATCHERS} streams watch already, which is the limit")
        self._num_watchers += 1
        try:
            yield
        finally:
            self._num_watchers -= 1

    async def _until_moved(self) -> None:
        await self._moved.wait(_REPEAT_S)
        if self._is_closing:
            raise Unavailable("the coordinator stops")


class Engines(Protocol):
    """Access to the members: snapshots, and commands to single engines."""

    def groups(self) -> Mapping[str, Group]: ...

    def find(self, engine_id: str) -> GroupEngine | None: ...

    def num_in_flight(self, engine_id: str) -> int: ...

    def want_members(self, group: str, size: int, leaving: frozenset[str]) -> None: ...

    async def drain(self, engine_id: str, deadline_s: float) -> str:
        """Command an engine to drain within `deadline_s`, 0: no limit. Returns why it refuses, or ""."""
        ...

    def evict(self, engine_id: str, reason: str) -> int: ...


def from_operation(operation: Operation, now: float) -> scaling_pb2.Operation:
    """An operation as operators get it."""
    return scaling_pb2.Operation(
        operation_id=operation.operation_id,
        state=_STATES[operation.state],
        dp_group=operation.group,
        old_size=operation.old_size,
        new_size=operation.new_size,
        generation=operation.generation,
        num_engines_ready=operation.num_ready,
        num_engines_needed=operation.num_needed,
        error=None if operation.error is None else _from_error(operation.error),
        age_ms=int(max(0.0, now - operation.started_at) * 1000),
    )


def _from_error(error: ServiceError) -> error_pb2.ErrorStatus:
    code, message, details = to_parts(error)
    return error_pb2.ErrorStatus(code=code, message=message, details=details)
