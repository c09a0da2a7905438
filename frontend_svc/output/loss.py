"""Why the requests on an engine were lost, for failover. Knows no stream and no request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from triptych_kit.errors import ResourceExhausted, ServiceError, Unavailable

ENGINE_LOST = "ENGINE_LOST"
NOT_CONTINUED = "NOT_CONTINUED"
RETRY_AFTER_MS = 1000


class LossKind(Enum):
    """State of the engine that had the requests."""

    DEATH = "death"  # its process is gone, it reported a failure, or its loop hangs
    SILENCE = "silence"  # no messages arrive: it may still run the requests
    LEFT = "left"  # it ended on purpose: its requests continue elsewhere
    DISMISSAL = "dismissal"  # it is alive, but has ended the session with all its requests
    REFUSED = "refused"  # it is alive, but takes no requests for now


@dataclass(frozen=True, slots=True)
class Loss:
    """An engine's stream has ended, and this frontend's requests do not continue there."""

    address: str
    kind: LossKind
    reason: str  # for people

    def error(self) -> Unavailable:
        """The client's error for a request that cannot continue elsewhere."""
        return Unavailable(
            f"the engine at {self.address} was lost: {self.reason}",
            reason=ENGINE_LOST,
            retry_after_ms=RETRY_AFTER_MS,
        )


def refusal_of_begun(address: str, error: ServiceError) -> ServiceError:
    """The client's error for a request that a lost engine had begun and no engine continues.

    error: the refusal of the engine at `address`, which has other limits: it is not the client's mistake.
    """
    if isinstance(error, Unavailable | ResourceExhausted):
        return error
    return Unavailable(
        f"the engine at {address} does not continue a request begun on another engine: {error.message}",
        reason=NOT_CONTINUED,
        retry_after_ms=RETRY_AFTER_MS,
    )
