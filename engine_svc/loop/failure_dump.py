"""What is written down of steps that failed: who was in them and how much, never what. Raises nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict

from engine_svc.core.step import StepPlan
from engine_svc.scheduler.stats import SchedulerStats

logger = logging.getLogger(__name__)


def log_failure(plans: Sequence[StepPlan], stats: Callable[[], SchedulerStats]) -> None:
    """Log the plans by ids and token counts, and the scheduler's figures.

    An error here would hide the one that is to be explained, so that only its type is told.
    """
    try:
        for plan in plans:
            logger.error("step at the time of the error", extra=_described(plan))
        logger.error("scheduler at the time of the error", extra={"stats": asdict(stats())})
    except Exception as error:  # noqa: BLE001  Whatever state all is in.
        logger.error("what failed cannot be described", extra={"error": type(error).__name__})


def _described(plan: StepPlan) -> dict[str, object]:
    return {
        "step_number": plan.step_number,
        # Not by row: a broken plan may have columns of different lengths.
        "request_ids": list(plan.request_ids),
        "num_tokens": list(plan.num_tokens),
        "num_computed_tokens": list(plan.num_computed_tokens),
        "samples": list(plan.samples),
        "admitted": [admitted.request_id for admitted in plan.admitted],
        "released": list(plan.released),
        "preempted": list(plan.preempted),
    }
