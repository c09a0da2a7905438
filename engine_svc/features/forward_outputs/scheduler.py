"""Lets each position out once, and none of a draft that was rejected."""

from __future__ import annotations

from engine_svc.config import EngineConfig
from engine_svc.features.forward_outputs.extras import ForwardOutputs, ForwardOutputSpec
from engine_svc.scheduler.each_position_once import EachPositionOnce
from engine_svc.scheduler.feature import SchedulerContext, SchedulerFeature


def make(config: EngineConfig, context: SchedulerContext) -> SchedulerFeature | None:
    if not config.max_forward_output_bytes:
        return None
    return EachPositionOnce(ForwardOutputSpec, ForwardOutputs, rest)


def rest(outputs: ForwardOutputs, position: int, num_rejected: int) -> tuple[ForwardOutputs, int] | None:
    (run,) = outputs.runs
    first, end = max(0, position - run.first_position), run.num_positions - num_rejected
    return (ForwardOutputs((run.part(first, end),)), run.first_position + end) if first < end else None
