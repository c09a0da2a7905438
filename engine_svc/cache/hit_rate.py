"""How much of what was asked for lately the prefix cache knew. Knows no requests and no clock."""

from __future__ import annotations

from collections import deque


class HitRate:
    """The share of tokens found, over the last `max_requests` requests."""

    def __init__(self, max_requests: int = 1000) -> None:
        if max_requests < 1:
            raise ValueError(f"max_requests is {max_requests}, must be at least 1")
        self._max_requests = max_requests
        self._parts: deque[tuple[int, int, int]] = deque()  # requests, tokens looked up, tokens found
        self._num_requests = 0
        self._num_queries = 0
        self._num_hits = 0

    @property
    def value(self) -> float:
        """From 0 to 1; 0 where nothing was looked up."""
        return self._num_hits / self._num_queries if self._num_queries else 0.0

    def add(self, num_requests: int, num_queries: int, num_hits: int) -> None:
        """Count requests together; the oldest are forgotten once there are too many, the newest never."""
        self._parts.append((num_requests, num_queries, num_hits))
        self._num_requests += num_requests
        self._num_queries += num_queries
        self._num_hits += num_hits
        while self._num_requests > self._max_requests and len(self._parts) > 1:
            old_requests, old_queries, old_hits = self._parts.popleft()
            self._num_requests -= old_requests
            self._num_queries -= old_queries
            self._num_hits -= old_hits

    def reset(self) -> None:
        """Begin anew."""
        self._parts.clear()
        self._num_requests = self._num_queries = self._num_hits = 0
