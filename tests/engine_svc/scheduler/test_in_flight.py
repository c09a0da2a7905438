"""Steps that are planned before the tokens of the one before are known."""

from __future__ import annotations

import pytest

from engine_svc.core.request import FinishReason, Request
from engine_svc.core.step import StepPlan
from engine_svc.scheduler.in_flight import StepsInFlight
from tests.engine_svc.scheduler.fakes import EOS, NEW_TOKEN, Stage, granted, request


def _run(stage: Stage, *requests: Request) -> int:
    """Two steps in flight until all have ended; returns how many tokens were planned."""
    stage.add(*requests)
    num_planned, in_flight = 0, list[StepPlan]()
    while not all(done.is_finished for done in requests):
        stage.overlap(in_flight)
        num_planned += in_flight[-1].total_num_tokens if in_flight else 0
    return num_planned


def test_results_come_back_in_the_order_of_the_plans():
    steps = StepsInFlight()
    first, second = [request("a", 4)], [request("b", 4)]
    steps.push(3, first, [4])
    steps.push(5, second, [4])
    assert steps.pop(3) is first
    assert steps.pop(5) is second


def test_the_newest_step_of_a_request_is_the_last_that_computes_something_of_it():
    steps = StepsInFlight()
    both, once, never = request("a", 4), request("b", 4), request("c", 4)
    assert steps.newest_of(both) == 0
    steps.push(3, [both, once], [4, 4])
    steps.push(5, [both], [1])
    assert [steps.newest_of(one) for one in (both, once, never)] == [5, 3, 0]
    steps.pop(3)
    assert [steps.newest_of(one) for one in (both, once, never)] == [5, 0, 0]


def test_tokens_in_flight_are_summed_over_the_steps():
    steps = StepsInFlight()
    both, once, never = request("a", 4), request("b", 4), request("c", 4)
    steps.push(1, [once, both], [3, 5])
    steps.push(2, [both], [7])
    assert [steps.num_tokens_of(one) for one in (both, once, never)] == [12, 3, 0]
    steps.pop(1)
    assert [steps.num_tokens_of(one) for one in (both, once, never)] == [7, 0, 0]


def test_what_is_forgotten_comes_back_as_for_nobody_in_every_step():
    steps = StepsInFlight()
    forgotten, other = request("a", 4), request("a", 4)
    steps.push(1, [forgotten, other], [1, 1])
    steps.push(2, [other, forgotten], [1, 1])
    steps.forget(forgotten)
    first, second = steps.pop(1), steps.pop(2)
    assert (first[1], second[0]) == (other, other)
    assert first[0].is_finished and second[1].is_finished
    assert not forgotten.is_finished


# Behaviour 30, rows 165 and 166.
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_a_request_ahead_of_its_tokens_is_planned_exactly_as_often_as_it_needs(max_tokens: int):
    ahead = request("a", 8, max_tokens=max_tokens)
    stage = Stage(async_scheduling=True)
    assert _run(stage, ahead) == 8 + max_tokens - 1
    assert ahead.output_token_ids == [NEW_TOKEN] * max_tokens
    assert (ahead.finish_reason, ahead.num_placeholders) == (FinishReason.LENGTH, 0)
    assert stage.cache.num_used_blocks == 0


# Behaviour 30, all of them together.
def test_requests_of_different_lengths_ahead_of_their_tokens_are_planned_exactly():
    ahead = [request(f"r{most}", 8, max_tokens=most) for most in (1, 2, 3, 5)]
    assert _run(Stage(async_scheduling=True), *ahead) == 8 * 4 + (0 + 1 + 2 + 4)
    assert [done.num_output_tokens for done in ahead] == [1, 2, 3, 5]


def test_the_model_length_stops_planning_ahead_as_well():
    ahead = request("a", 8, max_tokens=100)
    assert _run(Stage(async_scheduling=True, max_model_len=12), ahead) == 11
    assert ahead.num_tokens == 12


def test_placeholders_stand_for_tokens_that_are_not_there_yet():
    stage = Stage(async_scheduling=True, max_num_batched_tokens=5)
    ahead = request("a", 8)
    stage.add(ahead)
    plans, placeholders = [], []
    for _ in range(2):
        plans.append(stage.schedule())
        placeholders.append(ahead.num_placeholders)
    # The first chunk ends inside the prompt, so it yields no token to wait for.
    assert placeholders == [0, 1]
    stage.update(plans[0])
    plan = stage.schedule()
    assert (plan.num_tokens, plan.num_computed_tokens, ahead.num_placeholders) == ([1], [8], 2)
    stage.update(plans[1])
    assert (ahead.num_placeholders, ahead.num_output_tokens) == (1, 1)
    stage.update(plan)
    assert (ahead.num_placeholders, ahead.num_output_tokens) == (0, 2)


# Behaviour 31.
def test_each_of_ten_aborts_while_two_steps_are_in_flight_leaves_the_tokens_that_came():
    stage = Stage(async_scheduling=True)
    requests = [request(f"r{index}", 10, max_tokens=20) for index in range(10)]
    stage.add(*requests)
    in_flight = [stage.schedule(), stage.schedule()]
    for place, index in enumerate((0, 8, 3, 1, 6, 4, 2, 5, 7, 9)):
        [output] = stage.scheduler.abort([f"r{index}"], now=stage.now)
        assert output.finish_reason is FinishReason.ABORT
        assert requests[index].num_output_tokens == place
        plan = stage.schedule()
        stage.update(in_flight.pop(0))
        if plan.request_ids:
            in_flight.append(plan)
    for plan in in_flight:
        assert stage.update(plan) == []
    assert [done.num_output_tokens for done in requests] == [0, 3, 6, 2, 5, 7, 4, 8, 1, 9]
    assert all(done.finish_reason is FinishReason.ABORT for done in requests)
    assert (stage.scheduler.num_unfinished, stage.cache.num_used_blocks) == (0, 0)


# Behaviour 32.
@pytest.mark.parametrize("ahead", [False, True])
def test_an_identical_prompt_later_in_the_same_step_hits_at_once(ahead: bool):
    stage = Stage(async_scheduling=ahead)
    stage.add(request("a", 100, salt="same"), request("b", 100, salt="same"))
    plan = stage.schedule()
    assert granted(plan) == {"a": 100, "b": 4}
    assert plan.num_computed_tokens == [0, 96]
    outputs = stage.update(plan)
    assert [output.num_cached_tokens for output in outputs] == [0, 96]
    assert stage.scheduler.stats().prefix_hits == 96


# Behaviour 33.
def test_the_next_turn_of_a_conversation_computes_what_does_not_fill_a_block():
    stage = Stage(async_scheduling=True)
    first = request("a", 100, max_tokens=200, salt="same")
    _run(stage, first)
    assert first.num_tokens == 300
    following = request("b", 0, salt="same")
    following.token_ids = list(first.token_ids)
    following.num_prompt_tokens = 300
    stage.add(following)
    assert granted(stage.schedule()) == {"b": 12}


# Behaviour 34, row 182.
def test_tokens_count_as_computed_when_planned():
    stage = Stage(max_num_batched_tokens=10)
    first, second = request("r0", 12), request("r1", 12)
    stage.add(first, second)
    plans = [stage.schedule()]
    assert (first.num_computed_tokens, second.num_computed_tokens) == (10, 0)
    plans.append(stage.schedule())
    assert (first.num_computed_tokens, second.num_computed_tokens) == (12, 8)
    assert [granted(plan) for plan in plans] == [{"r0": 10}, {"r0": 2, "r1": 8}]
    stage.update(plans[0])
    plans.append(stage.schedule())
    assert granted(plans[2]) == {"r1": 4}
    stage.update(plans[1])
    assert granted(stage.schedule()) == {"r0": 1}
    stage.update(plans[2])
    assert granted(stage.schedule()) == {"r1": 1}


# Behaviour 13.
def test_a_preempted_request_keeps_the_token_that_comes_late():
    stage = Stage(num_blocks=11, reserve_full_prompt=False)
    first, second = request("a", 80), request("b", 80)
    stage.add(first)
    plan_first = stage.schedule()
    stage.add(second)
    plan_second = stage.schedule()
    stage.update(plan_first)
    assert stage.schedule().preempted == ["b"]
    [output] = stage.update(plan_second, {"b": [42]})
    assert output.new_token_ids == [42]
    assert second.output_token_ids == [42]
    assert stage.scheduler.waiting_ids == ["b"]


def test_a_preempted_request_returns_only_when_its_late_tokens_are_there():
    stage = Stage(async_scheduling=True)
    late = request("a", 8)
    stage.add(late)
    plans = [stage.schedule(), stage.schedule()]
    assert stage.scheduler.reset_prefix_cache(now=1.0, reset_running=True)
    stage.add(request("b", 8))
    # It stands first, but for now others pass it.
    assert stage.scheduler.waiting_ids == ["a", "b"]
    assert granted(stage.schedule()) == {"b": 8}
    stage.update(plans[0], {"a": [42]})
    assert granted(stage.schedule()) == {"b": 1}
    stage.update(plans[1], {"a": [43]})
    plan = stage.schedule()
    assert plan.admitted[0].token_ids[-2:] == [42, 43]
    assert granted(plan) == {"b": 1, "a": 10}


def test_who_is_preempted_with_nothing_in_flight_may_return_at_once():
    stage = Stage(async_scheduling=True)
    stage.add(request("a", 8))
    stage.step()
    assert stage.scheduler.reset_prefix_cache(now=2.0, reset_running=True)
    assert granted(stage.schedule()) == {"a": 9}


def test_a_late_token_may_end_a_preempted_request():
    stage = Stage(async_scheduling=True)
    late = request("a", 8)
    stage.add(late)
    plan = stage.schedule()
    stage.scheduler.reset_prefix_cache(now=1.0, reset_running=True)
    [output] = stage.update(plan, {"a": [EOS]})
    assert output.finish_reason is FinishReason.STOP
    assert (stage.scheduler.num_unfinished, stage.scheduler.has_work) == (0, False)


def test_a_request_stopped_while_ahead_yields_nothing_more():
    stage = Stage(async_scheduling=True)
    stage.add(request("a", 8))
    first, second = stage.schedule(), stage.schedule()
    assert granted(second) == {"a": 1}
    [output] = stage.update(first, {"a": [EOS]})
    assert output.finish_reason is FinishReason.STOP
    assert stage.update(second) == []
    assert stage.cache.num_used_blocks == 0


def test_blocks_filled_ahead_are_found_only_when_their_tokens_are_known():
    stage = Stage(async_scheduling=True, block_size=4)
    ahead = request("a", 3, salt="same")
    stage.add(ahead)
    plans = [stage.schedule(), stage.schedule()]
    follower = request("b", 3, salt="same")
    follower.token_ids += [NEW_TOKEN, 1]
    assert stage.cache.match_prefix(follower).num_tokens == 0
    # Now its last token is known, but not what the step that computes it will make of it.
    stage.update(plans[0])
    assert stage.cache.match_prefix(follower).num_tokens == 0
    stage.update(plans[1])
    assert stage.cache.match_prefix(follower).num_tokens == 4


def test_an_id_used_again_gets_nothing_of_the_former_request():
    stage = Stage()
    stage.add(request("a", 8))
    plan = stage.schedule()
    stage.scheduler.abort(["a"], now=1.0)
    again = request("a", 8)
    stage.add(again)
    assert stage.update(plan) == []
    assert again.num_output_tokens == 0
    plan = stage.schedule()
    assert plan.released == ["a"]
    assert [admitted.request_id for admitted in plan.admitted] == ["a"]
