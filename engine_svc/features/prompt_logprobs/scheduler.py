"""Lets each position of a prompt out once: a preempted request computes its prompt again."""

from __future__ import annotations

from engine_svc.config import EngineConfig
from engine_svc.core.request import Request
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.features.prompt_logprobs.extras import PromptLogprobs, PromptLogprobSpec
from engine_svc.scheduler.feature import SchedulerContext, SchedulerFeature


def make(config: EngineConfig, context: SchedulerContext) -> SchedulerFeature:
    return EachPositionOnce()


class EachPositionOnce(SchedulerFeature):
    """Removes positions from results that earlier results had."""

    def __init__(self) -> None:
        self._next_position: dict[str, int] = {}  # by request id
        self._ended: list[str] = []  # requests whose last result may still be given to `on_update`

    def on_add(self, request: Request) -> None:
        if PromptLogprobSpec in request.extras:
            self._next_position[request.request_id] = 0

    def on_update(self, plan: StepPlan, result: StepResult) -> None:
        logprobs_of: dict[int, PromptLogprobs] = result.extras.get(PromptLogprobs, {})
        for row, logprobs in list(logprobs_of.items()):
            request_id = plan.request_ids[row]
            start = self._next_position.get(request_id, 0)
            rest = logprobs.from_position(start)
            if rest is None:
                del logprobs_of[row]
                continue
            logprobs_of[row] = rest
            if request_id in self._next_position:
                self._next_position[request_id] = rest.runs[-1].end_position
        for request_id in self._ended:
            self._next_position.pop(request_id, None)
        self._ended.clear()

    def on_finish(self, request: Request) -> None:
        if request.request_id in self._next_position:
            self._ended.append(request.request_id)
