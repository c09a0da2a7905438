"""Protocol of policies: in which order requests are served, and which are preempted for others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from engine_svc.cache.kv_cache import KVCache
from engine_svc.core.request import Request
from engine_svc.core.step import StepPlan
from engine_svc.scheduler.budget import Budget
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.scheduler.waiting_queue import OrderedQueue, ReadyQueue

OrderKey = tuple[float, float, str]


class Policy(Protocol):
    """One way to order requests. The request with the smallest key is first; no two keys are equal.

    A class derives from it, and so has the rest from here: one order by keys, in which nothing is displaced.
    """

    # Further budgets of a step, besides its tokens.
    budgets: Sequence[Budget] = ()
    # Those that are asked only for rows of several tokens, so that decodes cost nothing.
    prefill_budgets: Sequence[Budget] = ()
    # Whether `displaced` is asked, in steps in which requests wait.
    displaces: bool = False

    def attach(self, kv_cache: KVCache) -> None:
        """The cache of the requests. Called once, before all else."""
        return

    def ready_queue(self) -> ReadyQueue:
        """The queue of requests that may be admitted, which decides by what order; empty."""
        return OrderedQueue()

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

    def displaced(self, running: Sequence[Request], kv_cache: KVCache) -> Sequence[Request]:
        """Running requests to preempt before a step is planned, so that waiting ones can enter in it.

        Not asked in a step that admits none. What `pick_victim` spares is spared here as well.
        """
        return ()

    def on_enter(self, request: Request) -> None:
        """A request is about to leave the waiting ones and run."""
        return

    def on_leave(self, request: Request) -> None:
        """A request no longer runs."""
        return

    def on_plan(self, plan: StepPlan, rows: Sequence[Request]) -> None:
        """A plan with rows is complete. rows: the request of each."""
        return


# What an entry point of the group `triptych.policies` refers to.
PolicyFactory = Callable[[SchedulerConfig], Policy]
