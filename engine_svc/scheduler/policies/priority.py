"""The policy `priority`. Knows no budgets and no blocks."""

from __future__ import annotations

from collections.abc import Sequence

from engine_svc.cache.kv_cache import KVCache
from engine_svc.core.request import Request
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.scheduler.policy import OrderKey, Policy

# Preemptions of one request after which the id decides between it and equals.
_MAX_TURNS = 16


class ByPriority(Policy):
    """The most urgent first, then the earliest. New requests never preempt; only a lack of blocks does."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Has no options."""

    def order_key(self, request: Request) -> OrderKey:
        return (request.priority, request.arrival_at, request.request_id)

    def requeue_key(self, request: Request) -> OrderKey:
        return self.order_key(request)

    def walk(self, running: Sequence[Request], num_waiting: int) -> Sequence[Request]:
        return list(running)

    def pick_victim(self, running: Sequence[Request], kv_cache: KVCache) -> Request:
        """The least urgent, then the latest, then the first admitted. It may already be in the plan.

        Two requests of equal priority and arrival could preempt each other forever. Once one was preempted
        often enough, the one with the greater id is preempted and the other finishes.
        """
        victim = max(running, key=lambda request: (request.priority, request.arrival_at))
        return victim if victim.num_preemptions < _MAX_TURNS else max(running, key=self.order_key)
