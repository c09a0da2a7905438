"""The scheduler events of a request, from the scheduler to the client."""

from __future__ import annotations

from dataclasses import dataclass

from engine_svc.core.extras import OutputExtra

# Upper limit on the wire.
_EVENT_BYTES = 24


@dataclass(frozen=True, slots=True)
class RequestEvents(OutputExtra):
    """Scheduler events of a request since its last row, in order.

    events: names are queued, scheduled, preempted and resumed; times are on the engine's clock.
    """

    events: tuple[tuple[str, float], ...]

    @property
    def size_bytes(self) -> int:
        return _EVENT_BYTES * len(self.events)

    def merged(self, later: RequestEvents) -> RequestEvents:
        return RequestEvents(self.events + later.events)

    def split(self, max_bytes: int) -> list[RequestEvents]:
        size = max(1, max_bytes // _EVENT_BYTES)
        return [RequestEvents(self.events[at : at + size]) for at in range(0, len(self.events), size)]


EXTRAS = ()
