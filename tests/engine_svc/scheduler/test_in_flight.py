"""Steps that are planned before the tokens of the one before are known."""

from __future__ import annotations

from engine_svc.request import FinishReason
from engine_svc.scheduler.in_flight import StepsInFlight
from tests.engine_svc.scheduler.fakes import EOS, NEW_TOKEN, Stage, granted, request


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
