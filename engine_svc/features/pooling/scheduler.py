"""Counts the tokens of prompts whose states have become a result."""

from __future__ import annotations

from engine_svc.config import EngineConfig
from engine_svc.core.request import FinishReason, Request
from engine_svc.features.pooling.extras import PoolingRequest
from engine_svc.scheduler.feature import SchedulerContext, SchedulerFeature
from triptych_kit.telemetry.metrics import Metrics


def make(config: EngineConfig, context: SchedulerContext) -> SchedulerFeature:
    return PooledTokens(context.metrics)


class PooledTokens(SchedulerFeature):
    """Requests that end otherwise than with a result count for nothing."""

    def __init__(self, metrics: Metrics) -> None:
        self._tokens = metrics.counts(
            "triptych_engine_pooled_tokens_total",
            "Tokens of prompts whose result was pooled, by its task; those from the prefix cache count, too.",
            labels=("task",),
        )

    def on_finish(self, request: Request) -> None:
        wanted: PoolingRequest | None = request.extras.get(PoolingRequest)
        if wanted is not None and request.finish_reason is FinishReason.STOP:
            self._tokens.add(wanted.task, by=request.num_prompt_tokens)
