"""The policy `continuum`: jobs of many requests in the order of their first ones. Knows no budgets.

Source: Continuum, arXiv 2511.02230.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain

from engine_svc.cache.kv_cache import KVCache
from engine_svc.cache.retained import RetainedBlocks
from engine_svc.core.request import Request
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.scheduler.policy import OrderKey, Policy
from engine_svc.scheduler.waiting_queue import OrderedQueue, ReadyQueue

# Jobs whose first request is remembered; the least recently used is forgotten.
MAX_JOBS = 65_536


class Continuum(Policy):
    """Requests of jobs whose blocks are retained are next, then jobs in the order of their first requests.

    A request without a job is one of its own. The last without retained blocks of its job is preempted first.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._num_requests = 0
        self._first_of: OrderedDict[str, int] = OrderedDict()  # the number of the first request, by job
        self._queue: ReadyQueue = OrderedQueue()

    def attach(self, kv_cache: KVCache) -> None:
        self._queue = RetainedFirst(kv_cache.retained)

    def ready_queue(self) -> ReadyQueue:
        return self._queue

    def order_key(self, request: Request) -> OrderKey:
        self._num_requests += 1
        return (self._first(request.job), self._num_requests, "")

    def requeue_key(self, request: Request) -> OrderKey:
        """It keeps its position, before all later jobs."""
        return request.order_key

    def walk(self, running: Sequence[Request], num_waiting: int) -> Sequence[Request]:
        return list(running)

    def pick_victim(self, running: Sequence[Request], kv_cache: KVCache) -> Request:
        """The last without retained blocks, else the last: of two requests the same one always goes on."""
        retained = kv_cache.retained
        return next((request for request in reversed(running) if request.job not in retained), running[-1])

    def _first(self, job: str) -> int:
        if not job:
            return self._num_requests
        number = self._first_of.setdefault(job, self._num_requests)
        self._first_of.move_to_end(job)
        if len(self._first_of) > MAX_JOBS:
            self._first_of.popitem(last=False)
        return number


class RetainedFirst:
    """Requests by their keys, those of jobs with retained blocks before all others."""

    def __init__(self, retained: RetainedBlocks) -> None:
        self._retained = retained
        self._version = retained.version
        self._queues = {True: OrderedQueue(), False: OrderedQueue()}  # by whether blocks are retained
        self._of_jobs: dict[Request, bool] = {}  # the queue of each request with a job

    def __len__(self) -> int:
        return len(self._queues[True]) + len(self._queues[False])

    def __iter__(self) -> Iterator[Request]:
        return chain(self._queues[True], self._queues[False])

    def add(self, request: Request) -> None:
        has_blocks = request.job in self._retained
        if request.job:
            self._of_jobs[request] = has_blocks
        self._queues[has_blocks].add(request)

    def remove(self, request: Request) -> None:
        self._queues[self._of_jobs.pop(request, False)].remove(request)

    def candidates(self) -> Iterator[Request]:
        """In the order of this moment: blocks released or retained during a step count from the next on."""
        if self._version != self._retained.version:
            self._version = self._retained.version
            self._sort()
        return chain(self._queues[True].candidates(), self._queues[False].candidates())

    def _sort(self) -> None:
        for request, had_blocks in list(self._of_jobs.items()):
            if (request.job in self._retained) is not had_blocks:
                self.remove(request)
                self.add(request)
