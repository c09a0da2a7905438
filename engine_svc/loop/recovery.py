"""Recovers from failed steps: rolls them back, and ends the requests that make steps fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict

from engine_svc.core.errors import DeviceFull, DeviceLost, PeersLost
from engine_svc.core.request import FinishReason
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.loop.failure_bisection import CULPRIT_MESSAGE, BisectionDecision, FailureBisector
from engine_svc.loop.protocols import EngineScheduler, Lockstep
from engine_svc.loop.requests import EngineRequests
from engine_svc.loop.statistics import StatsRecorder
from engine_svc.loop.steps import StepsInFlight
from engine_svc.scheduler.stats import SchedulerStats
from triptych_kit.clock import Clock

logger = logging.getLogger(__name__)


class StepRecovery:
    """Carries out what the bisection of failed steps decides. Belongs to the engine thread."""

    def __init__(
        self,
        *,
        scheduler: EngineScheduler,
        steps: StepsInFlight,
        requests: EngineRequests,
        lockstep: Lockstep,
        stats: StatsRecorder,
        clock: Clock,
    ) -> None:
        self._scheduler = scheduler
        self._steps = steps
        self._requests = requests
        self._lockstep = lockstep
        self._stats = stats
        self._clock = clock
        self._bisector = FailureBisector()

    @property
    def is_open(self) -> bool:
        """Whether suspects run apart, with one step in flight at a time."""
        return self._bisector.is_open

    def check(self, plan: StepPlan, result: StepResult) -> BisectionDecision | None:
        """A step worked: what to `apply` after its update. Raises DeviceLost if its logits show that."""
        decision = self._bisector.on_step_done(plan, result)
        if decision is not None and decision.is_fatal:
            raise DeviceLost("no row of the last steps has finite logits")
        return decision

    def review(self) -> None:
        """Drop suspects that have ended."""
        if self._bisector.is_open:
            self.apply(self._bisector.review(self._requests.by_id))

    def recover(self, error: Exception) -> None:
        """Roll back the steps in flight and bisect for the request that fails; raise `error` if none does."""
        plans = self._steps.plans
        # First, because a step that still runs may be waiting for the other ranks.
        self._lockstep.leave_group(error)
        if isinstance(error, PeersLost):
            self._roll_back()
            return
        in_them = {request_id for plan in plans for request_id in plan.request_ids}
        decision = self._bisector.failed(
            [request_id for request_id in reversed(self._requests.by_id) if request_id in in_them],
            max(plan.total_num_tokens for plan in plans),
            is_full=isinstance(error, DeviceFull),
        )
        if decision.is_fatal or isinstance(error, DeviceLost):
            raise error
        logger.error("step failed, its requests run again", exc_info=error)
        log_failure(plans, self._scheduler.stats)
        self._roll_back()
        self.apply(decision)

    def apply(self, decision: BisectionDecision | None) -> None:
        """End culprits and restrict which requests run. No step with other requests may be in flight."""
        if decision is None:
            return
        if decision.culprits:
            self._requests.abort(decision.culprits, "poison", FinishReason.ERROR, CULPRIT_MESSAGE)
            logger.error("requests that make steps fail were ended", extra={"request_ids": decision.culprits})
        self._scheduler.restrict(decision.only, self._clock.now(), decision.max_num_tokens)

    def _roll_back(self) -> None:
        """Drop every step in flight and queue its requests again."""
        self._stats.drop_steps()
        self._steps.drop()
        self._scheduler.withdraw(self._clock.now())


def log_failure(plans: Sequence[StepPlan], stats: Callable[[], SchedulerStats]) -> None:
    """Log the plans by ids and token counts, and the scheduler's statistics.

    An error raised here would hide the error being reported, so only its type is logged.
    """
    try:
        for plan in plans:
            logger.error("step at the time of the error", extra=_described(plan))
        logger.error("scheduler at the time of the error", extra={"stats": asdict(stats())})
    except Exception as error:  # noqa: BLE001  After a failure any state is possible.
        logger.error("the plans of failed steps cannot be logged", extra={"error": type(error).__name__})


def _described(plan: StepPlan) -> dict[str, object]:
    return {
        "step_number": plan.step_number,
        # By column and not by row: columns of a broken plan may differ in length.
        "request_ids": list(plan.request_ids),
        "num_tokens": list(plan.num_tokens),
        "num_computed_tokens": list(plan.num_computed_tokens),
        "samples": list(plan.samples),
        "admitted": [admitted.request_id for admitted in plan.admitted],
        "released": list(plan.released),
        "preempted": list(plan.preempted),
    }
