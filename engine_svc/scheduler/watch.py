"""The scheduler's state for watchers: its requests, their blocks, and the steps that have ended.

In the engine thread. Copies plain values; knows no wire.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

from engine_svc.cache.block_pool import held_blocks
from engine_svc.core.request import Request, RequestStatus
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.scheduler.feature import SchedulerFeature
from engine_svc.scheduler.stats import PAUSED
from triptych_kit.clock import Clock

if TYPE_CHECKING:
    from engine_svc.cache.kv_cache import KVCache
    from engine_svc.loop.protocols import EngineScheduler

MAX_STEPS = 1024


class WatchedRequest(NamedTuple):
    """One request at one moment."""

    request_id: str
    status: RequestStatus
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_preemptions: int
    priority: int
    arrival_at: float
    blockers: Sequence[str]
    num_blocks: int
    block_ids: Sequence[int]


class WatchedStep(NamedTuple):
    """One step that has ended. duration_s: from its plan to its tokens."""

    step_number: int
    num_tokens: int
    num_requests: int
    duration_s: float


class WatchedState(NamedTuple):
    """The scheduler at one moment."""

    at: float
    requests: Sequence[WatchedRequest]  # running ones in batch order, then waiting ones in queue order
    cached_block_ids: Sequence[int]  # that no request holds
    steps: Sequence[WatchedStep]


class SchedulerWatch(SchedulerFeature):
    """Knows the scheduler's requests by id, and records the `MAX_STEPS` steps after each `read`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._scheduler: EngineScheduler | None = None
        self._kv_cache: KVCache | None = None
        self._requests: dict[str, Request] = {}
        self._num_to_record = 0
        self._began_at: dict[int, float] = {}  # of the steps in flight, by their numbers
        self._planned_at = float("-inf")
        self._steps: deque[WatchedStep] = deque(maxlen=MAX_STEPS)

    def wrap(self, scheduler: EngineScheduler, kv_cache: KVCache) -> EngineScheduler:
        self._scheduler, self._kv_cache = scheduler, kv_cache
        return scheduler

    def on_add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def on_finish(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)

    def on_turn_end(self, request: Request) -> None:
        """A request that waits for input is shown as well."""

    def on_plan(self, plan: StepPlan) -> None:
        if self._num_to_record:
            self._num_to_record -= 1
            self._planned_at = self._began_at[plan.step_number] = self._clock.now()

    def on_update(self, plan: StepPlan, result: StepResult) -> None:
        if self._began_at and (began_at := self._began_at.pop(plan.step_number, None)) is not None:
            duration_s = self._clock.now() - began_at
            num_tokens = sum(plan.num_tokens)
            self._steps.append(WatchedStep(plan.step_number, num_tokens, len(plan.request_ids), duration_s))

    def on_withdraw(self) -> None:
        self._began_at.clear()

    def read(self, *, max_requests: int, max_blocks: int, after_step: int) -> WatchedState:
        """The state now, within the limits, and the steps after `after_step`."""
        scheduler, kv_cache = self._scheduler, self._kv_cache
        assert scheduler is not None and kv_cache is not None, "the engine is built"
        self._num_to_record = MAX_STEPS
        limit = scheduler.stats().admission_limit
        held = (PAUSED,) if limit == PAUSED else ()
        # While only admissions are paused, there is work as long as requests run.
        running_held = () if scheduler.has_work else held
        requests = []
        num_left = max_blocks
        ids = chain(scheduler.running_ids, scheduler.waiting_ids) if max_requests else ()
        for request_id in islice(ids, max_requests):
            request = self._requests.get(request_id)
            if request is None:
                # A scheduler of another package need not call features.
                continue
            blockers: Sequence[str]
            if request.status is RequestStatus.RUNNING:
                blockers = running_held
            elif request.status is RequestStatus.WAITING:
                # The newest plan says nothing of a request that came after it.
                blockers = held or ((limit,) if limit and self._has_seen(request) else ())
            else:
                blockers = sorted(request.blockers)
            block_ids: list[int] = []
            num_blocks = 0
            for table in request.block_tables:
                # Some entries of a table of states have none.
                of_table = held_blocks(table.block_ids[table.num_released :])
                num_blocks += len(of_table)
                shown = of_table[:num_left]
                block_ids += shown
                num_left -= len(shown)
            requests.append(
                WatchedRequest(
                    request_id,
                    request.status,
                    request.num_prompt_tokens,
                    request.num_output_tokens,
                    request.num_computed_tokens,
                    request.num_preemptions,
                    request.priority,
                    request.arrival_at,
                    blockers,
                    num_blocks,
                    block_ids,
                )
            )
        return WatchedState(
            self._clock.now(),
            requests,
            kv_cache.pool.cached_block_ids(num_left),
            [step for step in self._steps if step.step_number > after_step],
        )

    def _has_seen(self, request: Request) -> bool:
        return request.timeline.queued_at <= self._planned_at
