"""Suspects of a frontend: nothing runs ahead of what it sends when one of them has yielded."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine_svc.core.request import Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import StepPlan
from engine_svc.loop.mailbox import Abort, Add, Inbox
from tests.engine_svc.fakes import expected_tokens
from tests.engine_svc.loop.test_engine import Rig


class AnsweringInbox(Inbox):
    """A frontend's answers come in while the loop waits for them, never before."""

    def __init__(self) -> None:
        super().__init__(max_commands=1000)
        self.answer: Callable[[], None] = lambda: None

    def wait(self, timeout_s: float | None) -> None:
        answer, self.answer = self.answer, lambda: None
        answer()
        super().wait(timeout_s)


def rows_of(plans: list[StepPlan], *, suspects: tuple[int, ...]) -> list[list[str]]:
    """The requests of every step, where request 1 runs on and 2 comes in, then 3 as soon as 2 has a token."""
    inbox = AnsweringInbox()
    rig = Rig(on_launch=plans.append, max_in_flight=2, runs_ahead=True, inbox=inbox)

    def answer() -> None:
        rig.frontend.read()
        if 2 in rig.frontend.tokens:
            rig.add(3, max_tokens=1, is_suspect=3 in suspects)
        else:
            inbox.answer = answer

    inbox.answer = answer
    rig.add(1, max_tokens=12)
    rig.add(2, max_tokens=1, is_suspect=2 in suspects)
    rig.start()
    rig.frontend.read_until_ended(3)
    rig.stop()
    return [list(plan.request_ids) for plan in plans]


def test_the_next_suspect_is_in_the_step_behind_the_first_output_of_the_one_before():
    rows = rows_of([], suspects=(2, 3))
    assert rows[:4] == [["r1", "r2"], ["r1", "r3"], ["r1"], ["r1"]]


def test_nobody_waits_for_an_answer_to_another_request():
    # The loop never parks while request 1 runs, so the answer comes when that has ended.
    rows = rows_of([], suspects=())
    assert rows[-1] == ["r3"]
    assert all(row == ["r1"] for row in rows[1:-1])


def test_steps_run_ahead_again_when_a_suspect_has_yielded():
    rig = Rig(max_in_flight=2, runs_ahead=True)
    ahead: list[int] = []

    def launch(plan: StepPlan) -> None:
        ahead.append(rig.executor.num_launched - rig.board.read().num_generated_tokens)

    rig.executor.on_launch = launch
    rig.add(1, max_tokens=6, is_suspect=True)
    rig.start()
    rig.frontend.read_until_ended(1)
    rig.stop()
    # One token a step: what was launched and has not yielded when each of the steps is launched.
    assert ahead == [0, 0, 1, 1, 1, 1]


def test_parts_of_a_suspects_prompt_that_yield_nothing_run_ahead():
    rig = Rig(max_in_flight=2, runs_ahead=True)
    rig.executor.gate.clear()
    prompt = list(range(100))  # the scheduler gives 64 a step
    request = Request("long", list(prompt), len(prompt), SamplingParams(max_tokens=1, seed=7))
    rig.inbox.put(Add(request, rig.frontend.outbox, 1, is_suspect=True))
    rig.start()
    rig.executor.wait_for_launches(2)
    assert rig.frontend.tokens == {}
    rig.executor.gate.set()
    rig.frontend.read_until_ended(1)
    rig.stop()
    assert rig.frontend.tokens == {1: expected_tokens(prompt, 7, 1)}


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_suspect_that_is_aborted_holds_up_nothing(max_in_flight: int):
    rig = Rig(max_in_flight=max_in_flight)
    rig.add(1, is_suspect=True)
    rig.inbox.put(Abort("r1"))
    rig.add(2, max_tokens=4)
    rig.start()
    rig.frontend.read_until_ended(2)
    rig.stop()
    assert len(rig.frontend.tokens[2]) == 4
    assert not rig.engine._unproven
