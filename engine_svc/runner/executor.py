"""Where a plan is run. Inline: in the caller's thread, before `launch` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine_svc.step import StepPlan, StepResult


class PlanRunner(Protocol):
    """Runs one plan to its end."""

    def execute(self, plan: StepPlan) -> StepResult:
        """What the plan yielded."""


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that was over when it was launched."""

    step_result: StepResult

    def result(self) -> StepResult:
        """What the step yielded, at once."""
        return self.step_result


class InlineExecutor:
    """Runs plans in the calling thread."""

    def __init__(self, runner: PlanRunner) -> None:
        self._runner = runner

    def launch(self, plan: StepPlan) -> FinishedStep:
        """Run the plan now."""
        return FinishedStep(self._runner.execute(plan))

    def shutdown(self) -> None:
        """Nothing runs outside the caller's thread, so nothing is left to end."""
