"""The steps on the device. Knows no request and no scheduler."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from engine_svc.core.step import StepPlan, StepResult


class PendingStep(Protocol):
    """A step on the device."""

    def result(self) -> StepResult:
        """Wait for the result."""
        ...


class Executor(Protocol):
    """Runs plans in order. Raises DeviceLost if it can run no further plan, DeviceFull if memory is short."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Begin the step of `plan`, which is not changed any more."""
        ...

    def drop(self) -> None:
        """Forget steps whose results were not read, and any error, so that later plans can run.

        Some rows of these steps may have been entered: the next plan releases all of them.
        """
        ...

    def shutdown(self) -> None: ...


class StepsInFlight:
    """The steps that were launched and are not finished, the oldest first."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._steps: deque[tuple[StepPlan, PendingStep]] = deque()
        self._launching: StepPlan | None = None

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def plans(self) -> list[StepPlan]:
        """The plans in flight, and the one being launched."""
        plans = [plan for plan, _ in self._steps]
        return plans if self._launching is None else [*plans, self._launching]

    def launch(self, plan: StepPlan) -> None:
        self._launching = plan
        self._steps.append((plan, self._executor.launch(plan)))
        self._launching = None

    def wait_for_oldest(self) -> tuple[StepPlan, StepResult]:
        """The oldest step with its result. It is in flight until `pop_oldest`."""
        plan, pending = self._steps[0]
        return plan, pending.result()

    def pop_oldest(self) -> None:
        self._steps.popleft()

    def drop(self) -> None:
        """Forget every step in flight, so that later ones can run."""
        self._steps.clear()
        self._launching = None
        self._executor.drop()

    def shutdown(self) -> None:
        self._executor.shutdown()
