"""Between the scaling service's protos and the coordinator's own types."""

from __future__ import annotations

from coordinator_svc.operation import Operation, OperationState
from service_kit.errors import ServiceError, to_parts
from triptych.common.v1 import error_pb2
from triptych.coordinator.v1 import scaling_pb2

_STATES = {
    OperationState.PREPARING: scaling_pb2.OPERATION_STATE_PREPARING,
    OperationState.COMMITTING: scaling_pb2.OPERATION_STATE_COMMITTING,
    OperationState.DONE: scaling_pb2.OPERATION_STATE_DONE,
    OperationState.FAILED: scaling_pb2.OPERATION_STATE_FAILED,
    OperationState.CANCELLED: scaling_pb2.OPERATION_STATE_CANCELLED,
}


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
