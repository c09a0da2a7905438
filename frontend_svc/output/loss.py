"""How an engine lost requests of ours, for those who send them on. Knows no stream and no request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from service_kit.errors import ResourceExhausted, ServiceError, Unavailable

ENGINE_LOST = "ENGINE_LOST"
NOT_CONTINUED = "NOT_CONTINUED"
RETRY_AFTER_MS = 1000


class LossKind(Enum):
    """What is known of the engine that had the requests."""

    DEATH = "death"  # its process is gone, or has said that it fails, or its loop hangs
    SILENCE = "silence"  # nothing is heard of it: it may still run what it has
    LEFT = "left"  # it ended on purpose: what it had is to go on elsewhere
    DISMISSAL = "dismissal"  # it lives, and has given up the session with all that it had
    REFUSED = "refused"  # it goes on without them: it takes no requests for now


@dataclass(frozen=True, slots=True)
class Loss:
    """One engine's stream is over, and what it had of this frontend's requests is not going on there."""

    address: str
    kind: LossKind
    reason: str  # for people

    def error(self) -> Unavailable:
        """What the client of a request is told that cannot go on elsewhere."""
        return Unavailable(
            f"the engine at {self.address} was lost: {self.reason}",
            reason=ENGINE_LOST,
            retry_after_ms=RETRY_AFTER_MS,
        )


def refusal_of_begun(address: str, error: ServiceError) -> ServiceError:
    """What the client of a request that another engine had begun is told, where nobody goes on with it.

    `error` is what the engine at `address` says, which has other limits: it was no mistake of the client's.
    """
    if isinstance(error, Unavailable | ResourceExhausted):
        return error
    return Unavailable(
        f"the engine at {address} does not go on with what another began: {error.message}",
        reason=NOT_CONTINUED,
        retry_after_ms=RETRY_AFTER_MS,
    )
