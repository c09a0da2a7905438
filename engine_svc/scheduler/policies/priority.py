"""The policy `priority`. Knows no budgets and no blocks."""

from __future__ import annotations

from collections.abc import Sequence

from engine_svc.cache.kv_cache import KVCache
from engine_svc.core.request import Request
from engine_svc.scheduler.budget import Budget
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.scheduler.policy import OrderKey

# Of one request, from which on the id decides between it and its equals.
_MAX_TURNS = 16


class ByPriority:
    """The most urgent first, then the earliest. Newcomers never preempt; they wait until blocks run out."""

    budgets: Sequence[Budget] = ()

    def __init__(self, config: SchedulerConfig) -> None:
        """It has no options."""

    def order_key(self, request: Request) -> OrderKey:
        """By urgency, arrival, and id as text."""
        return (request.priority, request.arrival_at, request.request_id)

    def requeue_key(self, request: Request) -> OrderKey:
        """Where it stood before."""
        return self.order_key(request)

    def walk(self, running: Sequence[Request], num_waiting: int) -> Sequence[Request]:
        """In order of admission."""
        return list(running)

    def pick_victim(self, running: Sequence[Request], kv_cache: KVCache) -> Request:
        """The least urgent, then the latest, then the first admitted. It may already be in the plan.

        Two that came at the same instant could so take turns in losing everything, for ever. Once one has
        lost often enough the greater id gives way, and the other gets to its end.
        """
        victim = max(running, key=lambda request: (request.priority, request.arrival_at))
        return victim if victim.num_preemptions < _MAX_TURNS else max(running, key=self.order_key)
