"""Registry of open requests by id, for Abort and GetRequest. Knows no wire."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from triptych_kit.clock import Clock
from triptych_kit.errors import NotFound


class RequestPhase(Enum):
    """FINISHED: the outputs are complete, and the client has not read the last ones yet."""

    QUEUED = 1
    RUNNING = 2
    FINISHED = 3


class SentRequest(Protocol):
    """A request that was sent to an engine. `end` ends its outputs as aborted."""

    @property
    def phase(self) -> RequestPhase: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_cached_tokens(self) -> int: ...

    @property
    def num_sampled_tokens(self) -> int: ...

    @property
    def engine_id(self) -> str: ...

    @property
    def num_attempts(self) -> int: ...

    def end(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """State of an open request at one instant."""

    request_id: str
    phase: RequestPhase
    age_s: float
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_sampled_tokens: int = 0
    engine_id: str = ""
    num_attempts: int = 0


class TrackedRequest:
    """One open request. Its progress is known once it was sent to an engine."""

    def __init__(self, request_id: str, arrived_at: float) -> None:
        self.request_id = request_id
        self.arrived_at = arrived_at
        self._sent: SentRequest | None = None
        self._is_aborted = False

    @property
    def phase(self) -> RequestPhase:
        return RequestPhase.QUEUED if self._sent is None else self._sent.phase

    def follow(self, sent: SentRequest) -> None:
        """Note that it was sent. If it was aborted before, it ends at once."""
        self._sent = sent
        if self._is_aborted:
            sent.end()

    def abort(self) -> RequestPhase:
        """End it; its stream ends with finish reason ABORT. Returns the phase it was in."""
        phase = self.phase
        self._is_aborted = True
        if self._sent is not None:
            self._sent.end()
        return phase

    def facts(self, now: float) -> RequestFacts:
        age_s, sent = now - self.arrived_at, self._sent
        if sent is None:
            return RequestFacts(self.request_id, RequestPhase.QUEUED, age_s)
        return RequestFacts(
            self.request_id,
            sent.phase,
            age_s,
            sent.num_prompt_tokens,
            sent.num_cached_tokens,
            sent.num_sampled_tokens,
            sent.engine_id,
            sent.num_attempts,
        )


class OpenRequests:
    """The open requests of this process, by tenant and the client's request id or the call's id.

    An id may belong to several requests: a tenant may use it again, and a call's id, from x-request-id or
    generated here, belongs to all requests of a batch. An operation on an id applies to all of them.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_id: dict[tuple[str, str], list[TrackedRequest]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @contextmanager
    def track(self, request_id: str, call_id: str, *, tenant: str = "") -> Iterator[TrackedRequest]:
        """Register a request inside of the block. `request_id` is empty if the client gave none."""
        tracked = TrackedRequest(request_id or call_id, self._clock.now())
        ids = [(tenant, one) for one in sorted({request_id, call_id} - {""})]
        for one in ids:
            self._by_id.setdefault(one, []).append(tracked)
        try:
            yield tracked
        finally:
            for one in ids:
                self._by_id[one].remove(tracked)
                if not self._by_id[one]:
                    del self._by_id[one]

    def abort(self, request_id: str, *, tenant: str = "") -> RequestPhase:
        """End all requests of an id. Returns the phase of the least advanced one; raises NotFound."""
        phases = [tracked.abort() for tracked in self._find(tenant, request_id)]
        return min(phases, key=lambda phase: phase.value)

    def facts(self, request_id: str, *, tenant: str = "") -> RequestFacts:
        """State of the first request of an id; raises NotFound."""
        return self._find(tenant, request_id)[0].facts(self._clock.now())

    def _find(self, tenant: str, request_id: str) -> list[TrackedRequest]:
        requests = self._by_id.get((tenant, request_id))
        if not requests:
            raise NotFound(
                f"no request with the id {request_id!r} is open in this frontend process",
                resource_type="request",
                resource_name=request_id,
            )
        # A copy: a request that ends is removed from the list.
        return list(requests)
