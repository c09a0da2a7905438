"""The waiting requests: those that may be admitted, in an order, and the blocked ones. Knows no policy."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Protocol

from engine_svc.core.request import Request, RequestStatus

_by_order_key = attrgetter("order_key")


class ReadyQueue(Protocol):
    """The requests that may be admitted."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """All of them, in any order."""
        ...

    def add(self, request: Request) -> None: ...

    def remove(self, request: Request) -> None: ...

    def candidates(self) -> Iterator[Request]:
        """The requests in the order in which a step tries them, each once.

        The caller removes one that it admits before it takes the next.
        """
        ...


class OrderedQueue:
    """Requests in the order of their keys."""

    def __init__(self) -> None:
        self._requests: list[Request] = []  # sorted

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_by_order_key)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, request.order_key, key=_by_order_key)
        assert self._requests[index] is request, f"request {request.request_id} is not in the queue"
        del self._requests[index]

    def candidates(self) -> Iterator[Request]:
        index = 0
        while index < len(self._requests):
            request = self._requests[index]
            key = request.order_key
            yield request
            index = bisect_right(self._requests, key, key=_by_order_key)


class WaitingQueue:
    """Waiting and blocked requests. A blocked request cannot be admitted and keeps its order key."""

    def __init__(self, ready: ReadyQueue) -> None:
        self._ready = ready
        self._blocked: dict[str, Request] = {}
        self._num_uncached_tokens = 0

    def __len__(self) -> int:
        return len(self._ready) + len(self._blocked)

    def __iter__(self) -> Iterator[Request]:
        """All of them, in the order of their keys."""
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
            self._ready.add(request)

    def candidates(self) -> Iterator[Request]:
        """The requests to admit next, without blocked ones; an admitted one is removed before the next."""
        return self._ready.candidates()

    def blocked(self, request_id: str) -> Request | None:
        """The blocked request with this id, if there is one."""
        return self._blocked.get(request_id)

    def remove(self, request: Request) -> None:
        """Remove a waiting or blocked request. Call it before its status changes."""
        self._num_uncached_tokens -= request.num_uncached_tokens
        if request.status is RequestStatus.BLOCKED:
            del self._blocked[request.request_id]
        else:
            self._ready.remove(request)
