"""The policy `least-recompute`: when blocks run out, as few tokens as possible are lost. Knows no budgets."""

from __future__ import annotations

from collections.abc import Sequence

from engine_svc.cache.kv_cache import KVCache
from engine_svc.core.request import Request
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.scheduler.policies.fcfs import FirstComeFirstServed
from engine_svc.scheduler.policy import OrderKey, Policy


class LeastRecompute(Policy):
    """First come, first served, but preempts the request that loses the fewest tokens per freed block.

    That is a request that shares most of its blocks, has just begun, or has just been given a block.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._order = FirstComeFirstServed(config)

    def order_key(self, request: Request) -> OrderKey:
        return self._order.order_key(request)

    def requeue_key(self, request: Request) -> OrderKey:
        return self._order.requeue_key(request)

    def walk(self, running: Sequence[Request], num_waiting: int) -> Sequence[Request]:
        return list(running)

    def pick_victim(self, running: Sequence[Request], kv_cache: KVCache) -> Request:
        """The cheapest, and of equals the last admitted; the first admitted only when it is alone.

        The first is spared so that one request always finishes: otherwise two requests could preempt each
        other forever.
        """
        victim, least = running[-1], float("inf")
        for request in running[:0:-1]:
            num_lost_tokens, num_freed_blocks = kv_cache.cost_of_release(request)
            cost = num_lost_tokens / num_freed_blocks if num_freed_blocks else float("inf")
            if cost < least:
                victim, least = request, cost
        return victim
