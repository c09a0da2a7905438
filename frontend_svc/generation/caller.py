"""The call of a request: identity, ids, deadline, and whether the request outlives it."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from triptych.engine.v1 import engine_pb2
from triptych_kit.errors import DeadlineExceeded, ServiceError
from triptych_kit.security.identity import UNRESTRICTED, Identity

_MAX_REMAINING_S = 10 * 365 * 86400.0
# Tolerance for clocks of engine and frontend, and the share by which gRPC rounds a deadline.
_LATE_S = 0.002
_ROUNDED_SHARE = 0.01
# What a name of a tenant's becomes.
_SCOPED = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Caller:
    """Properties of a call besides its request. `remaining_s()` is None without a deadline.

    server: the address that it came to, host:port; empty: that of gRPC.
    """

    request_id: str
    traceparent: str
    tracestate: str
    remaining_s: Callable[[], float | None]
    patience_s: float | None = None  # time to the deadline when the call arrived
    resume_token: str = ""  # of a stream that outlives its call
    # Whether the request is left in its engine for another frontend at its end, instead of being aborted.
    is_left: Callable[[], bool] = lambda: False
    # Whether the call sends the request again after this error, which then is not its end, and has done so.
    is_repeated: Callable[[ServiceError], bool] = lambda error: False
    is_repeat: bool = False
    identity: Identity = UNRESTRICTED
    server: str = ""

    def scoped(self, name: str) -> str:
        """A name of the client's, such as a salt, so that two tenants never mean the same by it."""
        tenant = self.identity.tenant
        # A client without a tenant may not name what is another's, either.
        is_plain = not tenant and not _SCOPED.fullmatch(name)
        return name if is_plain else hashlib.sha256(f"{tenant}\0{name}".encode()).hexdigest()

    def is_late(self) -> bool:
        """True if the deadline has passed, or will pass before an answer could reach the client."""
        remaining_s = self.remaining_s()
        return remaining_s is not None and remaining_s < _LATE_S + _ROUNDED_SHARE * (self.patience_s or 0.0)

    def remaining_ms(self) -> int | None:
        """Time to the deadline for an engine; None without one. Raises DeadlineExceeded after it."""
        remaining_s = self.remaining_s()
        if remaining_s is None or remaining_s >= _MAX_REMAINING_S:
            return None
        if remaining_s <= 0:
            raise too_late()
        return math.ceil(remaining_s * 1000)

    def abort_reason(self) -> engine_pb2.AbortReason:
        """The reason with which running requests of the call are aborted at its end."""
        return engine_pb2.ABORT_REASON_DEADLINE if self.is_late() else engine_pb2.ABORT_REASON_CLIENT


# A caller in this process, which cancels what it no longer waits for.
LOCAL_CALLER = Caller(request_id="", traceparent="", tracestate="", remaining_s=lambda: None)


def too_late() -> DeadlineExceeded:
    return DeadlineExceeded("the deadline of the call has passed")
