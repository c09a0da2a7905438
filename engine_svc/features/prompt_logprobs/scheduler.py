"""Lets each position of a prompt out once."""

from __future__ import annotations

from engine_svc.config import EngineConfig
from engine_svc.features.prompt_logprobs.extras import PromptLogprobs, PromptLogprobSpec, PromptRun
from engine_svc.scheduler.each_position_once import EachPositionOnce
from engine_svc.scheduler.feature import SchedulerContext, SchedulerFeature


def make(config: EngineConfig, context: SchedulerContext) -> SchedulerFeature:
    return EachPositionOnce(PromptLogprobSpec, PromptLogprobs, rest)


def rest(logprobs: PromptLogprobs, position: int, num_rejected: int) -> tuple[PromptLogprobs, int] | None:
    """No draft is in a prompt. That of a single token has an empty run, which goes out once, too."""
    (run,) = logprobs.runs
    if position >= run.end_position:
        return None
    skipped, columns = max(0, position - run.first_position), run.token_logprobs
    left = PromptRun(run.first_position + skipped, columns.part(skipped, len(columns.ranks)))
    return PromptLogprobs((left,)), run.end_position
