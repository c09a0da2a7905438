"""Protocol of policies: in which order requests are served, and which is preempted when blocks run out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from engine_svc.cache.kv_cache import KVCache
from engine_svc.core.request import Request
from engine_svc.scheduler.budget import Budget
from engine_svc.scheduler.config import SchedulerConfig

OrderKey = tuple[float, float, str]


class Policy(Protocol):
    """One way to order requests. The request with the smallest key is first; no two keys are equal.

    A class derives from it for what it does not define itself.
    """

    # Further budgets of a step, besides its tokens.
    budgets: Sequence[Budget] = ()
    # Those that are asked only for rows of several tokens, so that decodes cost nothing.
    prefill_budgets: Sequence[Budget] = ()

    def order_key(self, request: Request) -> OrderKey:
        """The key of a new request in the waiting queue."""
        ...

    def requeue_key(self, request: Request) -> OrderKey:
        """The key of a request that was preempted, or whose turn has ended."""
        ...

    def walk(self, running: Sequence[Request], num_waiting: int) -> Sequence[Request]:
        """The running requests, given in order of admission, in the order in which a step serves them.

        Returns a new list, as requests leave `running` meanwhile. `num_waiting` counts the waiting requests
        that there are rows for.
        """
        ...

    def pick_victim(self, running: Sequence[Request], kv_cache: KVCache) -> Request:
        """The running request to preempt next. running: in order of admission, not empty.

        Some request must be spared until it ends, so that the engine always makes progress.
        """
        ...


# What an entry point of the group `triptych.policies` refers to.
PolicyFactory = Callable[[SchedulerConfig], Policy]
