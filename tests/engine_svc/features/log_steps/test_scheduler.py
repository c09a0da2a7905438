"""The log line of a step says what its plan and its result say."""

from __future__ import annotations

import logging

import pytest

from engine_svc.core.step import StepPlan, StepResult
from engine_svc.features.log_steps.scheduler import LogSteps
from triptych_kit.clock import FakeClock


def test_a_line_counts_what_the_step_computed(caplog: pytest.LogCaptureFixture):
    clock = FakeClock(5.0)
    feature = LogSteps(clock)
    plan = StepPlan(
        7,
        request_ids=["a", "b", "c", "d"],
        num_tokens=[40, 1, 3, 1],
        draft_token_ids=[[], [], [8, 9], []],
        preempted=["e"],
    )
    feature.on_plan(plan)
    # Ranks can read no more of a plan than they have forms for.
    assert plan.extras == {}
    clock.advance(0.25)
    with caplog.at_level(logging.INFO):
        feature.on_update(plan, StepResult(7, [[], [1], [8, 2], [3]]))
    (record,) = caplog.records
    fields = {
        name: value for name, value in vars(record).items() if name.startswith(("num_", "step_", "dur"))
    }
    assert fields == {
        "step_number": 7,
        "num_prefills": 1,
        "num_prefill_tokens": 40,
        "num_decodes": 3,
        "num_drafts": 2,
        "num_sampled": 4,
        "num_preempted": 1,
        "duration_ms": 250.0,
    }


def test_steps_that_overlap_have_their_own_durations_and_those_that_fail_no_line(caplog):
    clock = FakeClock(5.0)
    feature = LogSteps(clock)
    with caplog.at_level(logging.INFO):
        for number in (1, 2):
            feature.on_plan(StepPlan(number))
            clock.advance(0.1)
        feature.on_withdraw()
        for number in (3, 4):
            feature.on_plan(StepPlan(number))
            clock.advance(0.1)
        for number in (3, 4):
            feature.on_update(StepPlan(number), StepResult(number, []))
            clock.advance(0.2)
    lines = [(vars(record)["step_number"], vars(record)["duration_ms"]) for record in caplog.records]
    assert lines == [(3, 200.0), (4, 300.0)]
