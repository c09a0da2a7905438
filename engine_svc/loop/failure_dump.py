"""Logs failed steps: request ids and token counts, never token ids. Raises nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict

from engine_svc.core.step import StepPlan
from engine_svc.scheduler.stats import SchedulerStats

logger = logging.getLogger(__name__)


def log_failure(plans: Sequence[StepPlan], stats: Callable[[], SchedulerStats]) -> None:
    """Log the plans by ids and token counts, and the scheduler's statistics.

    An error raised here would hide the error being reported, so only its type is logged.
    """
    try:
        for plan in plans:
            logger.error("step at the time of the error", extra=_described(plan))
        logger.error("scheduler at the time of the error", extra={"stats": asdict(stats())})
    except Exception as error:  # noqa: BLE001  After a failure any state is possible.
        logger.error("failed steps cannot be logged", extra={"error": type(error).__name__})


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
