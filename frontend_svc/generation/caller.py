"""Who makes a call, as far as its requests need to know: ids, deadline, and whom they outlive it for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from service_kit.errors import DeadlineExceeded
from triptych.engine.v1 import engine_pb2

_MAX_REMAINING_S = 10 * 365 * 86400.0
# What the engine's clock and ours may differ by about one deadline, and how much gRPC rounds one by.
_LATE_S = 0.002
_ROUNDED_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Caller:
    """What a call brings besides its request. `remaining_s` is None where there is no deadline."""

    request_id: str
    traceparent: str
    tracestate: str
    remaining_s: Callable[[], float | None]
    patience_s: float | None = None  # what remained when the call arrived
    resume_token: str = ""  # of a stream that outlives its call
    # Whether what runs for the caller is left to the next frontend, where it would be aborted else.
    is_left: Callable[[], bool] = lambda: False

    def is_late(self) -> bool:
        """True when the caller's deadline has passed, or passes before an answer could be with it."""
        remaining_s = self.remaining_s()
        return remaining_s is not None and remaining_s < _LATE_S + _ROUNDED_SHARE * (self.patience_s or 0.0)

    def remaining_ms(self) -> int | None:
        """What an engine is told of the deadline, None of none. Raises DeadlineExceeded behind it."""
        remaining_s = self.remaining_s()
        if remaining_s is None or remaining_s >= _MAX_REMAINING_S:
            return None
        if remaining_s <= 0:
            raise too_late()
        return math.ceil(remaining_s * 1000)

    def abort_reason(self) -> engine_pb2.AbortReason:
        """Why what still runs for the caller is ended."""
        return engine_pb2.ABORT_REASON_DEADLINE if self.is_late() else engine_pb2.ABORT_REASON_CLIENT


def too_late() -> DeadlineExceeded:
    """The error of a caller whose deadline has passed."""
    return DeadlineExceeded("the deadline of the call has passed")
