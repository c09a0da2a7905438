"""The inline executor runs a plan where and when it is launched."""

from __future__ import annotations

from engine_svc.runner.executor import InlineExecutor
from engine_svc.step import StepPlan, StepResult


class RecordingRunner:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.steps.append(plan.step_number)
        return StepResult(plan.step_number, sampled=[[plan.step_number]])


def test_a_launched_step_is_over_and_keeps_its_result():
    runner = RecordingRunner()
    executor = InlineExecutor(runner)
    first, second = executor.launch(StepPlan(1)), executor.launch(StepPlan(2))
    assert runner.steps == [1, 2]
    assert second.result().sampled == [[2]]
    assert first.result().sampled == [[1]]
    executor.shutdown()
