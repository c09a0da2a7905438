"""Where plans run: in the caller's thread, or in one beside it, and what becomes of their results."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from engine_svc.core.errors import DeviceFull, DeviceLost, PeersLost
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.runner.executor import InlineExecutor, ThreadExecutor
from engine_svc.runner.running_step import RunningStep
from tests.connections import without_collections


@dataclass
class FinishedStep:
    step_result: StepResult

    def result(self) -> StepResult:
        return self.step_result


class RecordingRunner:
    """Notes the steps it runs and their threads; waits at `gate`, fails at step 13."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.threads: set[str] = set()
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def execute(self, plan: StepPlan) -> FinishedStep:
        self.entered.set()
        self.gate.wait(10)
        self.threads.add(threading.current_thread().name)
        if plan.step_number == 13:
            raise RuntimeError("bad luck")
        self.steps.append(plan.step_number)
        return FinishedStep(StepResult(plan.step_number, sampled=[[plan.step_number]]))


def test_an_inline_step_is_over_when_it_is_launched_and_keeps_its_result():
    runner = RecordingRunner()
    executor = InlineExecutor(runner)
    first, second = executor.launch(StepPlan(1)), executor.launch(StepPlan(2))
    assert runner.steps == [1, 2]
    assert second.result().sampled == [[2]]
    assert first.result().sampled == [[1]]
    executor.shutdown()


def test_a_launch_returns_before_the_step_beside_it_is_over():
    runner = RecordingRunner()
    runner.gate.clear()
    executor = ThreadExecutor(runner)
    steps = [executor.launch(StepPlan(number)) for number in (1, 2)]
    assert runner.steps == []
    runner.gate.set()
    assert [step.result().step_number for step in steps] == [1, 2]
    assert runner.threads == {"model"}
    executor.shutdown()


def test_an_error_in_the_thread_is_raised_to_who_waits_and_ends_the_steps_behind_it():
    runner = RecordingRunner()
    executor = ThreadExecutor(runner)
    steps = [executor.launch(StepPlan(number)) for number in (12, 13, 14)]
    assert steps[0].result().step_number == 12
    for step in steps[1:]:
        with pytest.raises(RuntimeError, match="bad luck"):
            step.result()
    assert runner.steps == [12]
    executor.shutdown()


def test_an_executor_goes_on_after_its_steps_were_dropped():
    runner = RecordingRunner()
    executor = ThreadExecutor(runner)
    steps = [executor.launch(StepPlan(number)) for number in (12, 13, 14, 15)]
    assert steps[0].result().step_number == 12
    with pytest.raises(RuntimeError, match="bad luck"):
        steps[1].result()
    executor.drop()
    after = [executor.launch(StepPlan(number)) for number in (16, 17)]
    assert [step.result().step_number for step in after] == [16, 17]
    assert runner.steps == [12, 16, 17]
    executor.shutdown()


@pytest.mark.parametrize("kind", [InlineExecutor, ThreadExecutor])
def test_what_a_failed_call_had_in_hand_is_freed_without_a_collection(kind):
    held: list[weakref.ref[FinishedStep]] = []

    def work(arguments: Mapping[str, object]) -> Mapping[str, object]:
        in_hand = FinishedStep(StepResult(1, sampled=[]))
        held.append(weakref.ref(in_hand))
        raise ValueError("bad luck")

    executor = kind(RecordingRunner(), {"work": work})
    with without_collections():
        with contextlib.suppress(ValueError):
            executor.call("work", {})
        # The thread that did it has forgotten it when it has done the next.
        executor.launch(StepPlan(1)).result()
        assert held[0]() is None
    executor.shutdown()


def test_a_drop_waits_for_the_steps_that_run():
    runner = RecordingRunner()
    executor = ThreadExecutor(runner)
    for number in (1, 2):
        executor.launch(StepPlan(number))
    executor.drop()
    assert runner.steps == [1, 2]
    assert executor.launch(StepPlan(3)).result().step_number == 3
    executor.shutdown()


def test_a_shutdown_waits_for_the_step_that_runs_and_no_other():
    runner = RecordingRunner()
    runner.gate.clear()
    others = set(threading.enumerate())
    executor = ThreadExecutor(runner)
    steps = [executor.launch(StepPlan(number)) for number in (5, 6)]
    runner.entered.wait(10)
    ending = threading.Thread(target=executor.shutdown)
    ending.start()
    while not executor.is_over:
        pass
    runner.gate.set()
    ending.join(10)
    assert steps[0].result().step_number == 5
    with pytest.raises(RuntimeError, match="shut down"):
        steps[1].result()
    assert "model" not in {thread.name for thread in set(threading.enumerate()) - others}


# A step is over when its device has done it, whether or not it sampled. A stand-in is the device.


class FakeEvent:
    """What happens on a device, in order."""

    log: ClassVar[list[str]] = []

    def record(self) -> None:
        self.log.append("recorded")

    def synchronize(self) -> None:
        self.log.append("waited for")


@pytest.fixture
def log(monkeypatch) -> list[str]:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "log", [])
    return FakeEvent.log


def chunk_of_a_prompt() -> StepPlan:
    return StepPlan(3, request_ids=["a"], num_tokens=[8], num_computed_tokens=[0], samples=[False])


def test_a_chunk_that_samples_nothing_is_waited_for(log):
    step = RunningStep(chunk_of_a_prompt(), None, torch.device("cuda"))
    assert log == ["recorded"]
    result = step.result()
    assert (result.step_number, result.sampled) == (3, [[]])
    assert log == ["recorded", "waited for"]


def test_what_ranks_had_to_send_is_asked_behind_a_chunk_that_samples_nothing(log):
    RunningStep(chunk_of_a_prompt(), None, torch.device("cuda"), check=lambda: log.append("checked")).result()
    assert log == ["recorded", "waited for", "checked"]


def test_a_step_that_computes_nothing_is_over_at_once(log):
    RunningStep(StepPlan(3), None, torch.device("cuda")).result()
    assert log == []


@pytest.mark.parametrize(
    ("make_error", "kind"),
    [
        (lambda: RuntimeError("bad luck"), RuntimeError),
        (lambda: PeersLost("a rank is gone"), PeersLost),
        (lambda: torch.OutOfMemoryError("CUDA out of memory"), DeviceFull),
        (lambda: RuntimeError("CUDA error: an illegal memory access was encountered"), DeviceLost),
    ],
)
@pytest.mark.usefixtures("log")
def test_a_device_error_keeps_nothing_alive_once_it_was_raised(make_error, kind):
    held: list[weakref.ref[torch.Tensor]] = []

    def check() -> None:
        values = torch.zeros(1)
        held.append(weakref.ref(values))
        raise make_error()

    with without_collections():
        assert _kind_of_failure(check) is kind
        assert held[0]() is None


def _kind_of_failure(check: Callable[[], None]) -> type[Exception] | None:
    step = RunningStep(chunk_of_a_prompt(), None, torch.device("cuda"), check=check)
    try:
        step.result()
    except Exception as error:  # noqa: BLE001  Its type is what is asked for.
        return type(error)
    return None
