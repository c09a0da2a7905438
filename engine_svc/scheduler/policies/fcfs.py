"""The policy `fcfs`. Knows no budgets and no blocks."""

from __future__ import annotations

from collections.abc import Sequence

from engine_svc.cache.kv_cache import KVCache
from engine_svc.core.request import Request
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.scheduler.policy import OrderKey, Policy


class FirstComeFirstServed(Policy):
    """Served in order of arrival; the last admitted is preempted first, and is the first admitted again."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._front = 0
        self._back = 0

    def order_key(self, request: Request) -> OrderKey:
        self._back += 1
        return (self._back, 0.0, "")

    def requeue_key(self, request: Request) -> OrderKey:
        self._front -= 1
        return (self._front, 0.0, "")

    def walk(self, running: Sequence[Request], num_waiting: int) -> Sequence[Request]:
        return list(running)

    def pick_victim(self, running: Sequence[Request], kv_cache: KVCache) -> Request:
        """The last admitted, which is not in the plan yet: plans begin with the first."""
        return running[-1]
