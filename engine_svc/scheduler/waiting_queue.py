"""The waiting requests in the order of their keys. Knows no policy."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from engine_svc.core.request import Request, RequestStatus

_by_order_key = attrgetter("order_key")


class WaitingQueue:
    """Waiting and blocked requests. A blocked request cannot be admitted and keeps its order key."""

    def __init__(self) -> None:
        self._ready: list[Request] = []  # sorted
        self._blocked: dict[str, Request] = {}
        self._num_uncached_tokens = 0

    def __len__(self) -> int:
        return len(self._ready) + len(self._blocked)

    def __iter__(self) -> Iterator[Request]:
        """All of them, in order."""
        return iter(sorted([*self._ready, *self._blocked.values()], key=_by_order_key))

    @property
    def num_ready(self) -> int:
        """Requests that may be admitted."""
        return len(self._ready)

    @property
    def num_blocked(self) -> int:
        return len(self._blocked)

    @property
    def num_uncached_tokens(self) -> int:
        """How many tokens all of them will probably have to compute."""
        return self._num_uncached_tokens

    def add(self, request: Request) -> None:
        self._num_uncached_tokens += request.num_uncached_tokens
        if request.status is RequestStatus.BLOCKED:
            self._blocked[request.request_id] = request
        else:
            insort(self._ready, request, key=_by_order_key)

    def at(self, index: int) -> Request | None:
        """The request at this index of the order, without blocked ones; None after the last."""
        return self._ready[index] if index < len(self._ready) else None

    def blocked(self, request_id: str) -> Request | None:
        """The blocked request with this id, if there is one."""
        return self._blocked.get(request_id)

    def remove(self, request: Request) -> None:
        """Remove a waiting or blocked request. Call it before its status changes."""
        self._num_uncached_tokens -= request.num_uncached_tokens
        if request.status is RequestStatus.BLOCKED:
            del self._blocked[request.request_id]
            return
        index = bisect_left(self._ready, request.order_key, key=_by_order_key)
        assert self._ready[index] is request, f"request {request.request_id} is not in the queue"
        del self._ready[index]
