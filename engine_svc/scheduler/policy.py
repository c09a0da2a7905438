"""In which order requests are taken, and who gives way when blocks run out. Knows no budgets, no blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine_svc.request import Request

OrderKey = tuple[float, float, str]


class Policy(Protocol):
    """One way to rank requests. The smallest key is taken first; no two requests have the same."""

    def order_key(self, request: Request) -> OrderKey:
        """The place of a request that came."""
        ...

    def requeue_key(self, request: Request) -> OrderKey:
        """The place of a request that was preempted."""
        ...

    def pick_victim(self, running: Sequence[Request]) -> Request:
        """Which of the running requests, in order of admission and not empty, is preempted next."""
        ...


class FirstComeFirstServed:
    """Taken in order of arrival; the last admitted gives way, and is the first to be taken again."""

    def __init__(self) -> None:
        self._front = 0
        self._back = 0

    def order_key(self, request: Request) -> OrderKey:
        """Behind everybody."""
        self._back += 1
        return (self._back, 0.0, "")

    def requeue_key(self, request: Request) -> OrderKey:
        """Before everybody."""
        self._front -= 1
        return (self._front, 0.0, "")

    def pick_victim(self, running: Sequence[Request]) -> Request:
        """The last admitted, which is never planned yet: plans are made from the first."""
        return running[-1]


class ByPriority:
    """The most urgent first, then the earliest. Newcomers never preempt; they wait until blocks run out."""

    def order_key(self, request: Request) -> OrderKey:
        """By urgency, arrival, and id as text."""
        return (request.priority, request.arrival_at, request.request_id)

    def requeue_key(self, request: Request) -> OrderKey:
        """Where it stood before."""
        return self.order_key(request)

    def pick_victim(self, running: Sequence[Request]) -> Request:
        """The least urgent, then the latest, then the first admitted. It may already be in the plan."""
        return max(running, key=lambda request: (request.priority, request.arrival_at))


POLICIES: dict[str, type[FirstComeFirstServed] | type[ByPriority]] = {
    "fcfs": FirstComeFirstServed,
    "priority": ByPriority,
}
