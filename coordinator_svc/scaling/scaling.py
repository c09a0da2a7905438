"""The wanted size of each group, and the operations that change it. Knows no streams and no protos.

The state of engines is what they report: `look` gets snapshots of the groups and advances the operations. A
group of `size` has the ranks 0..size-1. Engines are started by supervisors, which follow the wanted size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from coordinator_svc.membership.registry import MemberState
from coordinator_svc.scaling.group_snapshot import Group
from coordinator_svc.scaling.operation import Operation, OperationState
from triptych_kit.errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    ServiceError,
)

MAX_SIZE = 1024
MAX_HISTORY = 64
MAX_GROUPS = 1024
# Consecutive failed attempts of its lockstep group after which an operation fails.
MAX_FAILURES = 4
DEFAULT_TIMEOUT_S = 600.0
MAX_TIMEOUT_S = 86_400.0
# The drain command is sent again if the engine does not report DRAINING by then.
DRAIN_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """The wanted size of a group, and the operation that set it."""

    size: int
    operation_id: str


@dataclass(slots=True)
class _Running:
    """An operation that runs, with its private state."""

    operation: Operation
    before: frozenset[tuple[str, int]]  # processes that were members when it began
    leaving: set[tuple[str, int]] = field(default_factory=set)


class Scaling:
    """The operations of all groups, at most one running in each, and the engines to be drained."""

    def __init__(self, *, id_prefix: str = "scale", max_history: int = MAX_HISTORY) -> None:
        self._id_prefix = id_prefix
        self._num_begun = 0
        self._running: dict[str, _Running] = {}  # by group
        self._ended: deque[Operation] = deque(maxlen=max_history)
        self._wanted: dict[str, Wanted] = {}
        # Processes that must leave and do not report DRAINING yet, with the time of the next drain command.
        self._leavers: dict[tuple[str, int], float] = {}

    def begin(self, group: Group, new_size: int, now: float, timeout_s: float = 0.0) -> Operation:
        """Begin to change the size of a group; DONE if it has that size already. 0 s: the default limit.

        Raises InvalidArgument, or Aborted with the id of the operation that runs in that group.
        """
        if not 1 <= new_size <= MAX_SIZE:
            raise InvalidArgument(f"new_size is {new_size}, the range is 1..{MAX_SIZE}", field="new_size")
        if not 0 <= timeout_s <= MAX_TIMEOUT_S:
            raise InvalidArgument(
                f"timeout_ms is {timeout_s * 1000:.0f}, the limit is {MAX_TIMEOUT_S * 1000:.0f}",
                field="timeout_ms",
            )
        if group.name in self._running:
            raise _runs_already(self._running[group.name].operation)
        if group.name not in self._wanted and len(self._wanted) >= MAX_GROUPS:
            raise ResourceExhausted(f"{MAX_GROUPS} groups have been given a size, which is the limit")
        self._num_begun += 1
        operation = Operation(
            operation_id=f"{self._id_prefix}-{self._num_begun}",
            group=group.name,
            old_size=self._old_size(group),
            new_size=new_size,
            started_at=now,
            ends_by=now + (timeout_s or DEFAULT_TIMEOUT_S),
            is_lockstep=group.formed is not None,
        )
        self._wanted[group.name] = Wanted(new_size, operation.operation_id)
        running = _Running(operation, before=frozenset(engine.key for engine in group.engines))
        if operation.is_lockstep:
            # The leaving ranks get their order as soon as the others prepare the generation without them.
            running.leaving = {engine.key for engine in group.above(new_size)}
        self._running[group.name] = running
        self._go_on(group, now)
        return self.find(operation.operation_id)

    def cancel(self, operation_id: str, group: Group, now: float) -> Operation:
        """Cancel an operation before any engine has been ordered to leave or to change over.

        A CANCELLED one stays so. Raises NotFound, or FailedPrecondition if it is too late.
        """
        operation = self.find(operation_id)
        if operation.state is OperationState.CANCELLED:
            return operation
        running = self._running.get(operation.group)
        is_preparing = operation.state is OperationState.PREPARING
        if running is None or not is_preparing or self._has_begun_leaving(running, group):
            raise FailedPrecondition(
                f"operation {operation_id} is {operation.state.name} and cannot be cancelled",
                reason="TOO_LATE",
            )
        error = Cancelled(f"operation {operation_id} was cancelled")
        self._roll_back(running, group, OperationState.CANCELLED, error, now)
        return self.find(operation_id)

    def find(self, operation_id: str) -> Operation:
        """The operation with that id; raises NotFound if it never existed or has been forgotten."""
        for operation in self.operations():
            if operation.operation_id == operation_id:
                return operation
        raise NotFound(
            f"operation {operation_id!r} is not known: the last {self._ended.maxlen} are remembered, until"
            " the coordinator ends",
            resource_type="operation",
            resource_name=operation_id,
        )

    def operations(self) -> list[Operation]:
        """Running operations, then ended ones, each newest first."""
        return [
            *reversed([running.operation for running in self._running.values()]),
            *reversed(self._ended),
        ]

    def wanted(self) -> Mapping[str, Wanted]:
        """The wanted size of each group that has had an operation."""
        return self._wanted

    def members_wanted(self, group: Group) -> tuple[int, frozenset[str]]:
        """The wanted number of members of a group, and the engines that must leave it."""
        wanted = self._wanted[group.name]
        return wanted.size, frozenset(engine.engine_id for engine in group.above(wanted.size))

    def refuse(self, engine_id: str, reason: str) -> None:
        """An engine refuses to drain: the operation that needs it to leave fails."""
        for running in list(self._running.values()):
            if any(key[0] == engine_id for key in running.leaving):
                error = FailedPrecondition(f"engine {engine_id} refuses to drain: {reason}")
                self._end(running, OperationState.FAILED, error)
        for key in [key for key in self._leavers if key[0] == engine_id]:
            del self._leavers[key]

    def acknowledge(self, engine_id: str) -> None:
        """An engine has accepted the drain command: do not send it again."""
        for key in self._leavers:
            if key[0] == engine_id:
                self._leavers[key] = float("inf")

    def look(self, groups: Mapping[str, Group], now: float) -> list[str]:
        """Advance the operations; returns the ids of the engines to send a drain command to."""
        for name in list(self._running):
            self._go_on(groups.get(name, Group(name, ())), now)
        present = {engine.key: engine for group in groups.values() for engine in group.engines}
        to_drain = []
        for key, again_at in list(self._leavers.items()):
            if key not in present or present[key].state is MemberState.DRAINING:
                del self._leavers[key]
            elif again_at <= now:
                self._leavers[key] = now + DRAIN_RETRY_S
                to_drain.append(key[0])
        return to_drain

    def next_at(self) -> float | None:
        """When to call `look` if there is no change before; None: only after a change."""
        limits = [running.operation.ends_by for running in self._running.values()]
        times = [at for at in (*limits, *self._leavers.values()) if at != float("inf")]
        return min(times, default=None)

    def _old_size(self, group: Group) -> int:
        wanted = self._wanted.get(group.name)
        return wanted.size if wanted is not None else max(group.indexes().values(), default=-1) + 1

    def _go_on(self, group: Group, now: float) -> None:
        running = self._running[group.name]
        if running.operation.is_lockstep:
            self._follow(running, group, now)
        else:
            self._settle(running, group, now)
        has_failed = group.formed is not None and group.formed.num_failures >= MAX_FAILURES
        if group.name in self._running and (has_failed or now >= running.operation.ends_by):
            self._give_up(running, group, now)

    def _settle(self, running: _Running, group: Group, now: float) -> None:
        """A group without lockstep: first the ranks that stay must be ready, then the others leave."""
        new_size = running.operation.new_size
        if running.operation.state is OperationState.PREPARING:
            num_ready = sum(engine.state is MemberState.READY for engine in group.below(new_size))
            running.operation = replace(running.operation, num_ready=num_ready, num_needed=new_size)
            if num_ready < new_size:
                return
            running.leaving = {engine.key for engine in group.above(new_size)}
            running.operation = running.operation.move_to(OperationState.COMMITTING)
        self._drain_leavers(running, group, now)

    def _follow(self, running: _Running, group: Group, now: float) -> None:
        """A lockstep group: its ranks change over together, and then the leaving ones drain."""
        formed, new_size = group.formed, running.operation.new_size
        if formed is None:
            return
        is_preparing = running.operation.state is OperationState.PREPARING
        if is_preparing and formed.is_changing_over and len(group.below(new_size)) >= new_size:
            running.operation = running.operation.move_to(OperationState.COMMITTING)
        running.operation = replace(
            running.operation,
            generation=formed.generation,
            num_ready=formed.num_answered if formed.num_asked else min(formed.size, new_size),
            num_needed=formed.num_asked or new_size,
        )
        if formed.is_settled and formed.size == new_size:
            running.leaving |= {engine.key for engine in group.above(new_size)}
            # An engine that committed a generation without itself leaves on its own: drain it only later.
            self._drain_leavers(running, group, now + DRAIN_RETRY_S)

    def _drain_leavers(self, running: _Running, group: Group, drain_at: float) -> None:
        """Drain the ranks beyond the new size; the operation is DONE when they have left."""
        present = {engine.key for engine in group.engines}
        for engine in group.above(running.operation.new_size):
            if engine.key in running.leaving:
                self._leavers.setdefault(engine.key, drain_at)
        num_gone = len(running.leaving - present)
        running.operation = replace(running.operation, num_ready=num_gone, num_needed=len(running.leaving))
        if num_gone == len(running.leaving):
            self._end(running, OperationState.DONE)

    def _has_begun_leaving(self, running: _Running, group: Group) -> bool:
        """Whether an engine that must leave is draining already, which cannot be undone."""
        staying = {engine.key for engine in group.staying}
        present = {engine.key for engine in group.engines}
        return bool(running.leaving & (present - staying))

    def _give_up(self, running: _Running, group: Group, now: float) -> None:
        operation = running.operation
        waited = f"operation {operation.operation_id} was not done within {now - operation.started_at:.0f} s"
        cause = f"; {group.formed.last_failure}" if group.formed and group.formed.last_failure else ""
        answered = f"{operation.num_ready} of {operation.num_needed} engines"
        if operation.state is OperationState.PREPARING and not self._has_begun_leaving(running, group):
            text = f"{waited}: {answered} were ready for size {operation.new_size}{cause}"
            self._roll_back(running, group, OperationState.FAILED, DeadlineExceeded(text), now)
            return
        present = sorted(engine.engine_id for engine in group.engines if engine.key in running.leaving)
        unfinished = f"still there are {', '.join(present)}" if present else f"{answered} have changed over"
        self._end(running, OperationState.FAILED, DeadlineExceeded(f"{waited}: {unfinished}{cause}"))

    def _roll_back(
        self, running: _Running, group: Group, state: OperationState, error: ServiceError, now: float
    ) -> None:
        """Restore the old size; engines that joined for the new one are drained."""
        self._want_old_size(running)
        for engine, index in group.indexes().items():
            if index >= running.operation.old_size and engine.key not in running.before:
                self._leavers.setdefault(engine.key, now)
        self._end(running, state, error)

    def _want_old_size(self, running: _Running) -> None:
        operation = running.operation
        self._wanted[operation.group] = Wanted(operation.old_size, operation.operation_id)

    def _end(self, running: _Running, state: OperationState, error: ServiceError | None = None) -> None:
        del self._running[running.operation.group]
        running.operation = running.operation.move_to(state, error)
        self._ended.append(running.operation)


def _runs_already(other: Operation) -> Aborted:
    return Aborted(
        f"group {other.group!r} is being changed from {other.old_size} to {other.new_size} by operation"
        f" {other.operation_id}: wait for its end, or cancel it",
        reason="OPERATION_RUNS",
        metadata={"operation_id": other.operation_id},
    )
