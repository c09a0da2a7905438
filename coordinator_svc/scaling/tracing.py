"""Traces of operations: one each, with a span for every state that it was in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from time import time_ns

from coordinator_svc.scaling.operation import Operation, OperationState
from triptych_kit.telemetry import conventions as names
from triptych_kit.telemetry.spans import SpanRecord, TraceContext, Value
from triptych_kit.telemetry.traces import begin_trace, record_trace

_NAME = "scale"


@dataclass(slots=True)
class _Followed:
    """An operation that had not ended when it was looked at last. entered: its states, and when."""

    context: TraceContext
    entered: list[tuple[OperationState, int]]


class OperationTraces:
    """Follows operations from `begin` to their end. As many as run are followed."""

    def __init__(self) -> None:
        self._followed: dict[str, _Followed] = {}

    def begin(self, operation_id: str) -> None:
        """Begin the span of an operation as a child of the RPC that this task serves."""
        context = begin_trace(_NAME)
        self._followed[operation_id] = _Followed(context, [(OperationState.PREPARING, time_ns())])

    def look(self, operations: Iterable[Operation]) -> None:
        """Note changes of state, and record the operations that have ended."""
        if not self._followed:
            return
        for operation in operations:
            followed = self._followed.get(operation.operation_id)
            if followed is None or followed.entered[-1][0] is operation.state:
                continue
            followed.entered.append((operation.state, time_ns()))
            if operation.has_ended:
                del self._followed[operation.operation_id]
                record_trace(followed.context, partial(_spans, operation, followed), is_notable=True)


def _spans(operation: Operation, followed: _Followed) -> list[SpanRecord]:
    context, entered = followed.context, followed.entered
    attributes: dict[str, Value] = {
        names.OPERATION_ID: operation.operation_id,
        names.GROUP: operation.group,
        names.OLD_SIZE: operation.old_size,
        names.NEW_SIZE: operation.new_size,
        names.STATE: operation.state.value,
    }
    error = None if operation.error is None else str(operation.error)
    root = context.root(_NAME, entered[0][1], entered[-1][1], attributes, error=error, kind="internal")
    return [
        root,
        *(
            context.child(index, state.value, start_ns, end_ns)
            for index, ((state, start_ns), (_, end_ns)) in enumerate(pairwise(entered))
        ),
    ]
