"""Deadlines of requests. Knows no clock and no scheduler."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping


class Deadlines:
    """A heap of deadlines by request id. An id may be used again after its request has ended.

    running: has the ids of requests that have not ended. Deadlines of all others are void.
    """

    def __init__(self, running: Mapping[str, object]) -> None:
        self._running = running
        self._deadline_of: dict[str, float] = {}  # of the newest request with the id
        self._entries: list[tuple[float, str]] = []

    def note(self, deadline_at: float | None, request_id: str) -> None:
        """Set the deadline of a new request; None: it has none."""
        if deadline_at is None:
            self._deadline_of.pop(request_id, None)
            return
        if len(self._entries) > 2 * len(self._running):
            # Most entries belong to requests that have ended.
            self._entries = [entry for entry in self._entries if self._is_due(*entry)]
            self._deadline_of = {request_id: due_at for due_at, request_id in self._entries}
            heapq.heapify(self._entries)
        self._deadline_of[request_id] = deadline_at
        heapq.heappush(self._entries, (deadline_at, request_id))

    def expired(self, now: float) -> Iterator[str]:
        """The requests whose deadlines have passed, each once."""
        while self._entries and self._entries[0][0] <= now:
            deadline_at, request_id = heapq.heappop(self._entries)
            is_due = self._is_due(deadline_at, request_id)
            if self._deadline_of.get(request_id) == deadline_at:
                del self._deadline_of[request_id]
            if is_due:
                yield request_id

    def left_s(self, now: float) -> float | None:
        """The time until the next deadline; None: there is none."""
        return max(0.0, self._entries[0][0] - now) if self._entries else None

    def _is_due(self, deadline_at: float, request_id: str) -> bool:
        return request_id in self._running and self._deadline_of.get(request_id) == deadline_at
