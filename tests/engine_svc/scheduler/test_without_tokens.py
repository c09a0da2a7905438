"""Requests that sample no token: they end when their prompt is computed."""

from __future__ import annotations

from engine_svc.core.request import NO_STOP_TOKEN, FinishReason, Request
from engine_svc.core.step import StepPlan
from tests.engine_svc.scheduler.fakes import Stage, granted, request


def silent(request_id: str, num_tokens: int) -> Request:
    made = request(request_id, num_tokens, max_tokens=1)
    made.samples = False
    return made


def test_it_ends_with_the_step_that_computes_the_last_token_of_its_prompt():
    stage = Stage(max_num_batched_tokens=24)
    stage.add(silent("a", 40))
    plan = stage.schedule()
    assert (granted(plan), plan.samples) == ({"a": 24}, [False])
    assert stage.update(plan) == []
    plan = stage.schedule()
    assert (granted(plan), plan.samples) == ({"a": 16}, [False])
    (output,) = stage.update(plan)
    assert (output.new_token_ids, output.finish_reason) == ([], FinishReason.STOP)
    assert output.stop_token_id == NO_STOP_TOKEN
    assert output.num_cached_tokens == 0
    assert not stage.scheduler.has_work
    assert stage.cache.num_used_blocks == 0


def test_it_may_be_as_long_as_the_model_takes():
    stage = Stage(max_model_len=64, max_num_batched_tokens=48)
    assert stage.scheduler.refusal(silent("a", 65)) == "request begins with 65 tokens, the model takes 64"
    whole = silent("b", 64)
    assert stage.scheduler.refusal(whole) is None
    stage.add(whole)
    assert [granted(plan) for plan in stage.step_until_idle()] == [{"b": 48}, {"b": 16}]
    assert whole.is_finished


def test_a_request_beside_it_is_planned_as_ever():
    stage = Stage()
    stage.add(silent("a", 20), request("b", 30, max_tokens=3))
    plans = stage.step_until_idle()
    assert [granted(plan) for plan in plans] == [{"a": 20, "b": 30}, {"b": 1}, {"b": 1}]


def test_its_row_is_planned_once_where_steps_overlap():
    stage = Stage(async_scheduling=True)
    one = silent("a", 20)
    stage.add(one)
    in_flight: list[StepPlan] = []
    outputs = [output for _ in range(3) for output in stage.overlap(in_flight)]
    assert [output.finish_reason for output in outputs] == [FinishReason.STOP]
    assert one.num_placeholders == 0


def test_a_preempted_one_ends_with_its_step_in_flight():
    stage = Stage(async_scheduling=True)
    one = silent("a", 20)
    stage.add(one)
    plan = stage.schedule()
    stage.preempt_running()
    (output,) = stage.update(plan)
    assert output.finish_reason is FinishReason.STOP
    assert not stage.scheduler.has_work


def test_it_gets_no_drafts():
    stage = Stage(num_speculative_tokens=4)
    stage.add(request("a", 20))
    stage.step()
    stage.add(silent("b", 1))
    plan = stage.schedule()
    assert dict(zip(plan.request_ids, plan.draft_token_ids, strict=True))["b"] == []
