"""The budget for sending requests again."""

from __future__ import annotations

from frontend_svc.generation.failover import RetryBudget
from service_kit.clock import FakeClock


def test_it_is_full_at_the_start_and_empty_after_as_many_repetitions():
    budget = RetryBudget(FakeClock())
    assert [budget.take() for _ in range(1025)] == [True] * 1024 + [False]
    assert budget.left == 0


def test_ten_requests_that_end_well_or_a_second_give_one_back():
    clock = FakeClock()
    budget = RetryBudget(clock, capacity=2)
    assert (budget.take(), budget.take()) == (True, True)
    for _ in range(9):
        budget.give_back()
    assert not budget.take()
    budget.give_back()
    budget.give_back()
    assert (budget.take(), budget.take()) == (True, False)
    clock.advance(1)
    assert budget.take()


def test_it_never_holds_more_than_at_the_start():
    clock = FakeClock()
    budget = RetryBudget(clock, capacity=2)
    clock.advance(1000)
    budget.give_back()
    assert [budget.take() for _ in range(3)] == [True, True, False]
