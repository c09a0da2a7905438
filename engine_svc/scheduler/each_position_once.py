"""Lets what steps compute of a request's positions out once: a preempted request computes them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

from engine_svc.core.extras import Extra, OutputExtra
from engine_svc.core.request import Request
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.scheduler.feature import SchedulerFeature

Output = TypeVar("Output", bound=OutputExtra)
# From a row's output in a step, the first position that is left, and how many at the end are of drafts that
# were rejected: what is left of it, and the position after it; None: nothing.
Rest: TypeAlias = Callable[[Output, int, int], tuple[Output, int] | None]


class EachPositionOnce(SchedulerFeature, Generic[Output]):
    """Removes positions from results that earlier results had.

    spec: the extra of requests that have such output.  output: its type in results.
    """

    def __init__(self, spec: type[Extra], output: type[Output], rest: Rest[Output]) -> None:
        self._spec, self._output, self._rest = spec, output, rest
        self._next_position: dict[str, int] = {}  # by request id
        self._ended: list[str] = []  # requests whose last result may still be given to `on_update`

    def on_add(self, request: Request) -> None:
        if self._spec in request.extras:
            self._next_position[request.request_id] = 0

    def on_update(self, plan: StepPlan, result: StepResult) -> None:
        outputs: dict[int, Output] = result.extras.get(self._output, {})
        for row, output in list(outputs.items()):
            request_id = plan.request_ids[row]
            num_drafts = result.num_drafts[row] if result.num_drafts else len(plan.draft_token_ids[row])
            # A row samples one token after the drafts that it accepts.
            num_rejected = num_drafts - max(0, len(result.sampled[row]) - 1)
            rest = self._rest(output, self._next_position.get(request_id, 0), num_rejected)
            if rest is None:
                del outputs[row]
                continue
            outputs[row], next_position = rest
            if request_id in self._next_position:
                self._next_position[request_id] = next_position
        for request_id in self._ended:
            self._next_position.pop(request_id, None)
        self._ended.clear()

    def on_finish(self, request: Request) -> None:
        if request.request_id in self._next_position:
            self._ended.append(request.request_id)
