"""Lets each position out once, and none of a draft that was rejected."""

from __future__ import annotations

from engine_svc.config import EngineConfig
from engine_svc.core.request import Request
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.features.forward_outputs.extras import ForwardOutputs, ForwardOutputSpec, PositionRun
from engine_svc.scheduler.feature import SchedulerContext, SchedulerFeature


def make(config: EngineConfig, context: SchedulerContext) -> SchedulerFeature | None:
    return ComputedOnce() if config.max_forward_output_bytes else None


class ComputedOnce(SchedulerFeature):
    """Removes positions from results that earlier results had: a preempted request computes them again."""

    def __init__(self) -> None:
        self._next_position: dict[str, int] = {}  # by request id
        self._ended: list[str] = []  # requests whose last result may still be given to `on_update`

    def on_add(self, request: Request) -> None:
        if ForwardOutputSpec in request.extras:
            self._next_position[request.request_id] = 0

    def on_update(self, plan: StepPlan, result: StepResult) -> None:
        outputs_of: dict[int, ForwardOutputs] = result.extras.get(ForwardOutputs, {})
        for row, outputs in list(outputs_of.items()):
            request_id = plan.request_ids[row]
            num_drafts = result.num_drafts[row] if result.num_drafts else len(plan.draft_token_ids[row])
            # A row samples one token after the drafts that it accepts.
            num_rejected = num_drafts - max(0, len(result.sampled[row]) - 1)
            run = _rest(outputs.runs[0], self._next_position.get(request_id, 0), num_rejected)
            if run is None:
                del outputs_of[row]
                continue
            outputs_of[row] = ForwardOutputs((run,))
            if request_id in self._next_position:
                self._next_position[request_id] = run.end_position
        for request_id in self._ended:
            self._next_position.pop(request_id, None)
        self._ended.clear()

    def on_finish(self, request: Request) -> None:
        if request.request_id in self._next_position:
            self._ended.append(request.request_id)


def _rest(run: PositionRun, position: int, num_rejected: int) -> PositionRun | None:
    """The positions from `position` on without the last `num_rejected`; None: there are none."""
    first, end = max(0, position - run.first_position), run.num_positions - num_rejected
    return run.part(first, end) if first < end else None
