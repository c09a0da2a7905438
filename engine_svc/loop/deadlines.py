"""Which requests are past their time. Knows no clock and no scheduler."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping


class Deadlines:
    """A heap of instants, by the ids of requests. An id may be used again after its end.

    running: has the ids of requests that have not ended; an instant of any other is void.
    """

    def __init__(self, running: Mapping[str, object]) -> None:
        self._running = running
        self._deadline_of: dict[str, float] = {}  # of the request that has the id now, or had it last
        self._entries: list[tuple[float, str]] = []

    def note(self, deadline_at: float | None, request_id: str) -> None:
        """A request has come, and has to end then; None: whenever it does."""
        if deadline_at is None:
            self._deadline_of.pop(request_id, None)
            return
        if len(self._entries) > 2 * len(self._running):
            # Most are of requests that have ended.
            self._entries = [entry for entry in self._entries if self._is_due(*entry)]
            self._deadline_of = {request_id: due_at for due_at, request_id in self._entries}
            heapq.heapify(self._entries)
        self._deadline_of[request_id] = deadline_at
        heapq.heappush(self._entries, (deadline_at, request_id))

    def expired(self, now: float) -> Iterator[str]:
        """The requests whose time is over, each once."""
        while self._entries and self._entries[0][0] <= now:
            deadline_at, request_id = heapq.heappop(self._entries)
            is_due = self._is_due(deadline_at, request_id)
            if self._deadline_of.get(request_id) == deadline_at:
                del self._deadline_of[request_id]
            if is_due:
                yield request_id

    def left_s(self, now: float) -> float | None:
        """Until there may be one; None: there is none."""
        return max(0.0, self._entries[0][0] - now) if self._entries else None

    def _is_due(self, deadline_at: float, request_id: str) -> bool:
        return request_id in self._running and self._deadline_of.get(request_id) == deadline_at
