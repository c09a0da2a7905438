"""Where plans are run on this machine: in the caller's thread, or in one beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

from engine_svc.core.step import StepPlan, StepResult

# What is asked for by its name beside plans, in plain values, and answered in such.
Call = Callable[[Mapping[str, object]], Mapping[str, object]]


class LaunchedStep(Protocol):
    """A step under way."""

    def result(self) -> StepResult:
        """What it yielded; waits until it is done."""
        ...


class PlanRunner(Protocol):
    """Starts plans, in order."""

    def execute(self, plan: StepPlan) -> LaunchedStep:
        """Do what the plan says."""
        ...


class InlineExecutor:
    """Runs plans in the calling thread: where the device works by itself, or nobody else has work to do."""

    def __init__(self, runner: PlanRunner, calls: Mapping[str, Call] | None = None) -> None:
        self._runner = runner
        self._calls = calls or {}

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Run the plan now."""
        return self._runner.execute(plan)

    def call(self, name: str, arguments: Mapping[str, object]) -> list[Mapping[str, object]]:
        """Do now what goes by this name; the answer of the only rank."""
        return [self._calls[name](arguments)]

    def drop(self) -> None:
        """Nothing is kept of a step but what it did to the rows."""

    def shutdown(self) -> None:
        """Nothing runs outside the caller's thread, so nothing is left to end."""


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException


@dataclass(frozen=True, slots=True)
class _Called:
    """Something beside the plans, and where its answer goes."""

    call: Call
    arguments: Mapping[str, object]
    answers: SimpleQueue[Mapping[str, object] | _Failed] = field(default_factory=SimpleQueue)


class ThreadExecutor:
    """Runs plans in a thread of its own: on a CPU the next step is planned while this one is computed.

    Results are taken in the order of the launches. `is_over`: it was told to end.
    """

    def __init__(self, runner: PlanRunner, calls: Mapping[str, Call] | None = None) -> None:
        self._runner = runner
        self._calls = calls or {}
        # Both are as short as the steps that the loop has in flight.
        self._plans: SimpleQueue[StepPlan | _Called | None] = SimpleQueue()
        self._steps: SimpleQueue[LaunchedStep | _Failed] = SimpleQueue()
        self._num_untaken = 0  # steps that were launched and whose results nobody has
        self._failed: _Failed | None = None  # the thread's, but while it has nothing to do
        self.is_over = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Run the plan behind those launched before."""
        self._num_untaken += 1
        self._plans.put(plan)
        return _QueuedStep(self)

    def call(self, name: str, arguments: Mapping[str, object]) -> list[Mapping[str, object]]:
        """Do what goes by this name behind the plans launched so far; the answer of the only rank.

        Takes no results: those of steps in flight come afterwards, as ever.
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
        """The oldest step whose result nobody has taken, once it is under way; the error that ended it."""
        step = self._steps.get()
        self._num_untaken -= 1
        if isinstance(step, _Failed):
            try:
                raise step.error
            finally:
                # Or this frame, which is in the error's traceback, would keep the error, and with it all that
                # the step had computed, until a full collection.
                del step
        return step

    def drop(self) -> None:
        """Wait for the step that runs and take no result any more; plans that come are run again."""
        while self._num_untaken:
            self._steps.get()
            self._num_untaken -= 1
        # The thread waits for the next plan.
        self._failed = None

    def shutdown(self) -> None:
        """Let the step that runs come to its end, and the thread with it; plans behind it fail.

        A thread that is inside of native code when the interpreter goes would take the process down with it.
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
                    # What a failed step left of the rows is nothing to go on from.
                    self._steps.put(self._failed or _Failed(RuntimeError("the executor is shut down")))
                else:
                    # What it yielded is told in the loop's thread: here the next step waits.
                    self._steps.put(self._runner.execute(plan))
            except Exception as error:  # noqa: BLE001  Whatever it is, it belongs to who waits for the result.
                if isinstance(plan, _Called):
                    plan.answers.put(_Failed(error))
                else:
                    self._failed = _Failed(error)
                    self._steps.put(self._failed)


@dataclass(frozen=True, slots=True)
class _QueuedStep:
    executor: ThreadExecutor

    def result(self) -> StepResult:
        """The oldest result that nobody has taken; the error that ended its step is raised here."""
        return self.executor.take_oldest().result()
