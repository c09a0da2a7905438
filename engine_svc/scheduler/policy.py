"""What a policy is: in which order requests are taken, and who gives way when blocks run out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from engine_svc.cache.kv_cache import KVCache
from engine_svc.core.request import Request
from engine_svc.scheduler.budget import Budget
from engine_svc.scheduler.config import SchedulerConfig

OrderKey = tuple[float, float, str]


class Policy(Protocol):
    """One way to rank requests. The smallest key is taken first; no two requests have the same."""

    @property
    def budgets(self) -> Sequence[Budget]:
        """What it lets a step spend, beside the tokens."""
        ...

    def order_key(self, request: Request) -> OrderKey:
        """The place of a request that came."""
        ...

    def requeue_key(self, request: Request) -> OrderKey:
        """The place of a request that was preempted, or has its next chunk."""
        ...

    def walk(self, running: Sequence[Request], num_waiting: int) -> Sequence[Request]:
        """The running requests, given in order of admission, in the order in which a step serves them.

        `num_waiting` counts those that wait and could enter, as far as there are places.

        A list of its own: requests leave `running` meanwhile.
        """
        ...

    def pick_victim(self, running: Sequence[Request], kv_cache: KVCache) -> Request:
        """Which of the running requests, in order of admission and not empty, is preempted next.

        So that the engine always advances, some request must be spared until it ends.
        """
        ...


# What an entry point of the group `triptych.policies` names.
PolicyFactory = Callable[[SchedulerConfig], Policy]
