"""When an engine's loop is taken to hang."""

from __future__ import annotations

import pytest

from frontend_svc.engines.connection.health import StepWatch
from triptych.engine.v1 import session_pb2


def heartbeat(age_s: float, **fields: object) -> session_pb2.Heartbeat:
    return session_pb2.Heartbeat(**{"has_work": True, "step_started_age_ms": int(age_s * 1000), **fields})


def watch_of(step_s: float, num_steps: int = 200) -> StepWatch:
    watch = StepWatch()
    for number in range(num_steps):
        watch.on_step(number, number * step_s, has_more=True)
    return watch


@pytest.mark.parametrize(
    ("step_s", "age_s", "is_hung"),
    [(0.01, 4.9, False), (0.01, 5.1, True), (0.8, 7.9, False), (0.8, 8.1, True)],
    ids=["short steps, not yet", "short steps", "long steps, not yet", "long steps"],
)
def test_a_step_hangs_after_five_seconds_or_ten_usual_steps(step_s, age_s, is_hung):
    assert (watch_of(step_s).hung_for_s(heartbeat(age_s)) is not None) is is_hung


def test_a_step_that_was_announced_to_be_long_may_be():
    watch = watch_of(0.01)
    assert watch.hung_for_s(heartbeat(50.0, step_budget_ms=60_000)) is None
    assert watch.hung_for_s(heartbeat(61.0, step_budget_ms=60_000)) == 61.0


def test_an_engine_without_work_or_without_a_step_does_not_hang():
    watch = watch_of(0.01)
    assert watch.hung_for_s(heartbeat(60.0, has_work=False)) is None
    assert watch.hung_for_s(session_pb2.Heartbeat(has_work=True)) is None


def test_the_time_between_requests_is_no_step():
    watch = StepWatch()
    for number in range(100):
        watch.on_step(number, number * 60.0, has_more=False)
    assert watch.hung_for_s(heartbeat(5.1)) is not None


def test_steps_that_came_as_one_count_each():
    watch = StepWatch()
    for number in range(0, 1000, 10):
        watch.on_step(number, number * 0.2, has_more=True)
    assert watch.limit_s() == 5.0


def test_a_hang_is_told_once_and_ends_with_the_step():
    watch = watch_of(0.01)
    assert watch.hear(heartbeat(6.0, step_number=7)) == 6.0
    assert watch.hear(heartbeat(6.5, step_number=7)) is None
    assert watch.hung_step == 7
    assert watch.hear(heartbeat(0.1, step_number=8)) is None
    assert watch.hung_step is None
