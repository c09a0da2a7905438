"""Runs plans on this machine, in the caller's thread or in a separate one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

from engine_svc.core.step import StepPlan, StepResult

# A named call besides plans. Arguments and answers are plain values.
Call = Callable[[Mapping[str, object]], Mapping[str, object]]


class LaunchedStep(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """The step's result; waits until it is done."""
        ...


class PlanRunner(Protocol):
    """Runs plans, in order."""

    def execute(self, plan: StepPlan) -> LaunchedStep: ...


class InlineExecutor:
    """Runs plans in the calling thread: if the device is asynchronous, or no other work needs the thread."""

    def __init__(self, runner: PlanRunner, calls: Mapping[str, Call] | None = None) -> None:
        self._runner = runner
        self._calls = calls or {}

    def launch(self, plan: StepPlan) -> LaunchedStep:
        return self._runner.execute(plan)

    def call(self, name: str, arguments: Mapping[str, object]) -> list[Mapping[str, object]]:
        """Run the call of this name; returns the answer of the only rank."""
        return [self._calls[name](arguments)]

    def drop(self) -> None: ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException


@dataclass(frozen=True, slots=True)
class _Called:
    """A call besides the plans, and the queue for its answer."""

    call: Call
    arguments: Mapping[str, object]
    answers: SimpleQueue[Mapping[str, object] | _Failed] = field(default_factory=SimpleQueue)


class ThreadExecutor:
    """Runs plans in a thread of its own: on a CPU the next step is planned while this one is computed.

    Results are taken in the order of the launches. `is_over`: shutdown was called.
    """

    def __init__(self, runner: PlanRunner, calls: Mapping[str, Call] | None = None) -> None:
        self._runner = runner
        self._calls = calls or {}
        # Both are at most as long as the number of steps that the loop has in flight.
        self._plans: SimpleQueue[StepPlan | _Called | None] = SimpleQueue()
        self._steps: SimpleQueue[LaunchedStep | _Failed] = SimpleQueue()
        self._num_untaken = 0  # steps that were launched and whose results were not taken
        self._failed: _Failed | None = None  # the last failed step; cleared by `drop`
        self.is_over = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Run the plan after those launched before."""
        self._num_untaken += 1
        self._plans.put(plan)
        return _QueuedStep(self)

    def call(self, name: str, arguments: Mapping[str, object]) -> list[Mapping[str, object]]:
        """Run the call of this name after the plans launched before; returns the answer of the only rank.

        Takes no results: those of steps in flight are still to be taken.
        """
        called = _Called(self._calls[name], arguments)
        self._plans.put(called)
        answer = called.answers.get()
        if isinstance(answer, _Failed):
            try:
                raise answer.error
            finally:
                del answer  # or this frame, which is in the error's traceback, would keep the error
        return [answer]

    def take_oldest(self) -> LaunchedStep:
        """The oldest step whose result was not taken, once it is launched. Raises the error that ended it."""
        step = self._steps.get()
        self._num_untaken -= 1
        if isinstance(step, _Failed):
            try:
                raise step.error
            finally:
                # Otherwise this frame, which is in the error's traceback, would keep the error, and with it
                # all that the step had computed, until a full collection.
                del step
        return step

    def drop(self) -> None:
        """Wait for the running step and discard all results. Afterwards plans are run again."""
        while self._num_untaken:
            self._steps.get()
            self._num_untaken -= 1
        # The thread waits for the next plan.
        self._failed = None

    def shutdown(self) -> None:
        """Let the running step finish, and end the thread; plans after it fail.

        A thread that is in native code when the interpreter exits would crash the process.
        """
        self.is_over = True
        self._plans.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (plan := self._plans.get()) is not None:
            try:
                if isinstance(plan, _Called):
                    plan.answers.put(plan.call(plan.arguments))
                elif self.is_over or self._failed is not None:
                    # After a failed step the rows are in an unknown state.
                    self._steps.put(self._failed or _Failed(RuntimeError("the executor is shut down")))
                else:
                    # Results are read in the loop's thread: here that would delay the next step.
                    self._steps.put(self._runner.execute(plan))
            except Exception as error:  # noqa: BLE001  Raised in the thread that waits for the result.
                if isinstance(plan, _Called):
                    plan.answers.put(_Failed(error))
                else:
                    self._failed = _Failed(error)
                    self._steps.put(self._failed)


@dataclass(frozen=True, slots=True)
class _QueuedStep:
    executor: ThreadExecutor

    def result(self) -> StepResult:
        """The oldest result not taken yet; raises the error that ended its step."""
        return self.executor.take_oldest().result()
