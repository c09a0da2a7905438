"""Calls into the engine thread between two steps: when they run, and what others see of them meanwhile."""

from __future__ import annotations

from engine_svc.core.step import StepPlan, StepResult
from engine_svc.loop.mailbox import Call, Figures
from tests.engine_svc.fakes import FakeExecutor, FakePendingStep
from tests.engine_svc.loop.test_engine import Rig

CALL_BUDGET_S = 600.0


class WatchedStep(FakePendingStep):
    """A step that looks at the board while its result is waited for."""

    def __init__(self, pending: FakePendingStep, executor: WatchedExecutor) -> None:
        self._pending = pending
        self._executor = executor

    def result(self) -> StepResult:
        assert self._executor.rig is not None
        self._executor.seen.append(self._executor.rig.board.read())
        return self._pending.result()


class WatchedExecutor(FakeExecutor):
    """Keeps the figures that are read while results are waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.rig: Rig | None = None
        self.seen: list[Figures] = []

    def launch(self, plan: StepPlan) -> FakePendingStep:
        return WatchedStep(super().launch(plan), self)


def test_a_call_is_work_with_an_age_and_a_budget_until_it_is_done():
    rig = Rig()
    rig.clock.advance(3.0)
    seen: list[Figures] = []
    rig.inbox.put(Call(lambda: seen.append(rig.board.read())))
    rig.add(1, max_tokens=2)
    rig.start()
    rig.frontend.read_until_ended(1)
    rig.stop()
    (during,) = seen
    assert (during.has_work, during.is_in_call) == (True, True)
    assert (during.step_started_at, during.step_budget_s) == (3.0, CALL_BUDGET_S)
    after = rig.board.read()
    assert (after.has_work, after.is_in_call, after.step_started_at) == (False, False, None)


def test_what_was_asked_for_when_idle_is_judged_as_well():
    rig = Rig()
    seen: list[Figures] = []
    rig.add(1, max_tokens=2)
    rig.engine.when_idle(lambda: seen.append(rig.board.read()))
    rig.start()
    rig.frontend.read_until_ended(1)
    rig.stop()
    assert [(figures.step_started_at, figures.step_budget_s) for figures in seen] == [(0.0, CALL_BUDGET_S)]


def test_steps_that_a_call_waits_for_are_judged_as_steps_and_what_follows_as_the_call():
    executor = WatchedExecutor()
    rig = executor.rig = Rig(executor=executor, max_in_flight=2)
    seen: list[Figures] = []

    def call() -> None:
        seen.append(rig.board.read())
        rig.clock.advance(7.0)
        rig.engine.settle()
        seen.append(rig.board.read())

    def put_call(plan: StepPlan) -> None:
        # It is taken in with the first step's result, while the second is in flight.
        if plan.step_number == 2:
            rig.inbox.put(Call(call))

    executor.on_launch = put_call
    # Six prompt tokens each, sixty-four a step: they need two steps to enter.
    for handle in range(12):
        rig.add(handle, max_tokens=1)
    rig.start()
    rig.frontend.read_until_ended(12)
    rig.stop()
    assert [(figures.is_in_call, figures.step_started_at) for figures in seen] == [(True, 0.0), (True, 7.0)]
    settled = [figures for figures in executor.seen if figures.step_started_at == 7.0]
    assert settled
    assert not any(figures.is_in_call for figures in settled)
