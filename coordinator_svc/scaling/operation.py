"""State of one change of a group's size, as operators see it. The rules are in `scaling`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from triptych_kit.errors import InvalidTransition, ServiceError


class OperationState(Enum):
    """Progress of an operation."""

    PREPARING = "preparing"  # waits for engines to be ready for the new size; can be cancelled
    COMMITTING = "committing"  # engines have been ordered to leave, or to change over
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_TRANSITIONS: dict[OperationState, frozenset[OperationState]] = {
    OperationState.PREPARING: frozenset(
        {
            OperationState.COMMITTING,
            OperationState.DONE,
            OperationState.FAILED,
            OperationState.CANCELLED,
        }
    ),
    OperationState.COMMITTING: frozenset({OperationState.DONE, OperationState.FAILED}),
    OperationState.DONE: frozenset(),
    OperationState.FAILED: frozenset(),
    OperationState.CANCELLED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One change of a group's size. Replaced on every change."""

    operation_id: str
    group: str
    old_size: int
    new_size: int
    started_at: float
    ends_by: float
    is_lockstep: bool = False
    state: OperationState = OperationState.PREPARING
    generation: int = 0
    num_ready: int = 0  # engines that have answered in the present phase
    num_needed: int = 0
    error: ServiceError | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it is in a final state."""
        return not _TRANSITIONS[self.state]

    def move_to(self, state: OperationState, error: ServiceError | None = None) -> Operation:
        """This operation in `state`; raises InvalidTransition if the table has no such move."""
        if state not in _TRANSITIONS[self.state]:
            raise InvalidTransition(f"operation cannot move from {self.state.name} to {state.name}")
        return replace(self, state=state, error=error)
