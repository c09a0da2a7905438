"""Logs each step: what it computed, and the time from its plan to its tokens."""

from __future__ import annotations

import logging
from collections import deque

from engine_svc.config import EngineConfig
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.scheduler.feature import SchedulerContext, SchedulerFeature
from triptych_kit.clock import Clock

logger = logging.getLogger(__name__)


def make(config: EngineConfig, context: SchedulerContext) -> SchedulerFeature | None:
    return LogSteps(context.clock) if config.log_steps else None


class LogSteps(SchedulerFeature):
    """Counts a row of one token, without its drafts, as a decode, and a longer one as a prefill."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # When the steps in flight began. Not an extra of the plan, which is also sent to other ranks.
        self._began_at: deque[float] = deque()

    def on_plan(self, plan: StepPlan) -> None:
        self._began_at.append(self._clock.now())

    def on_update(self, plan: StepPlan, result: StepResult) -> None:
        began_at = self._began_at.popleft()
        sizes = [
            num_tokens - len(drafts)
            for num_tokens, drafts in zip(plan.num_tokens, plan.draft_token_ids, strict=True)
        ]
        num_decodes = sum(size == 1 for size in sizes)
        logger.info(
            "step",
            extra={
                "step_number": plan.step_number,
                "num_prefills": len(sizes) - num_decodes,
                "num_prefill_tokens": sum(size for size in sizes if size > 1),
                "num_decodes": num_decodes,
                "num_drafts": sum(map(len, plan.draft_token_ids)),
                "num_sampled": sum(map(len, result.sampled)),
                "num_preempted": len(plan.preempted),
                "duration_ms": round((self._clock.now() - began_at) * 1000, 2),
            },
        )

    def on_withdraw(self) -> None:
        self._began_at.clear()
