"""Which requests are past their time. Knows no clock and no scheduler."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

_Route = TypeVar("_Route")


class Deadlines(Generic[_Route]):
    """A heap of instants. Entries carry where the outputs go, as an id may be used again after its end.

    routes: of requests that have not ended, by id; an entry whose route is not there any more is void.
    """

    def __init__(self, routes: Mapping[str, _Route]) -> None:
        self._routes = routes
        self._entries: list[tuple[float, str, _Route]] = []

    def note(self, deadline_at: float, request_id: str) -> None:
        """The request has to end then."""
        if len(self._entries) > 2 * len(self._routes):
            # Most are of requests that have ended.
            self._entries = [entry for entry in self._entries if self._routes.get(entry[1]) is entry[2]]
            heapq.heapify(self._entries)
        heapq.heappush(self._entries, (deadline_at, request_id, self._routes[request_id]))

    def expired(self, now: float) -> Iterator[str]:
        """The requests whose time is over, each once."""
        while self._entries and self._entries[0][0] <= now:
            _, request_id, route = heapq.heappop(self._entries)
            if self._routes.get(request_id) is route:
                yield request_id

    def left_s(self, now: float) -> float | None:
        """Until there may be one; None: there is none."""
        return max(0.0, self._entries[0][0] - now) if self._entries else None
