"""Continuations, numbers of steps, late tokens and preemption; recorded cases have the decisions of steps."""

from __future__ import annotations

from copy import deepcopy

import pytest

from engine_svc.core.request import FinishReason, RequestStatus
from engine_svc.core.step import StepCosts, StepPlan
from engine_svc.scheduler.config import SchedulerConfig
from tests.engine_svc.core_state import num_unfinished
from tests.engine_svc.scheduler.fakes import EOS, NEW_TOKEN, Stage, granted, request


def test_an_admitted_request_is_sent_in_full_and_later_only_its_new_blocks():
    stage = Stage(block_size=4)
    added = request("a", 7)
    stage.add(added)
    plan = stage.step()
    [admitted] = plan.admitted
    assert admitted.token_ids == added.token_ids[:7]
    assert admitted.num_prompt_tokens == 7
    assert (admitted.block_ids, plan.new_block_ids) == ([[]], [[[1, 2]]])
    assert admitted.token_ids is not added.token_ids
    later = [stage.step() for _ in range(2)]
    assert [plan.admitted for plan in later] == [[], []]
    assert [[[ids for ids in gained if ids] for gained in plan.new_block_ids] for plan in later] == [
        [[]],
        [[[3]]],
    ]


def test_a_continuation_computes_prompt_and_output_and_counts_both():
    stage = Stage()
    continued = request("a", 8, max_tokens=4)
    continued.token_ids.extend([11, 12])
    stage.add(continued)
    plan = stage.schedule()
    assert plan.num_tokens == [10]
    assert plan.admitted[0].num_prompt_tokens == 8
    [output] = stage.update(plan)
    assert output.num_cached_tokens == 0
    plan = stage.schedule()
    [output] = stage.update(plan)
    assert output.finish_reason is FinishReason.LENGTH
    assert continued.output_token_ids == [11, 12, NEW_TOKEN, NEW_TOKEN]


def test_steps_are_numbered_from_one_and_say_so_in_the_statistics():
    stage = Stage()
    assert stage.scheduler.stats().step_number == 0
    assert stage.schedule().step_number == 1
    stage.add(request("a", 8))
    plan = stage.schedule()
    assert (plan.step_number, stage.scheduler.stats().step_number) == (2, 2)


def test_a_plan_without_rows_has_nothing_to_give_back():
    stage = Stage()
    assert stage.update(stage.schedule()) == []


def test_a_plan_does_not_change_after_it_was_returned():
    stage = Stage(num_blocks=13, block_size=4, async_scheduling=True)
    stage.add(
        request("a", 12, max_tokens=24), request("b", 12, max_tokens=24), request("c", 20, max_tokens=8)
    )
    plans: list[StepPlan] = []
    copies: list[StepPlan] = []
    in_flight: list[StepPlan] = []
    while stage.scheduler.has_work or in_flight:
        assert len(plans) < 200, "no end in sight"
        plans.append(stage.schedule())
        copies.append(deepcopy(plans[-1]))
        if plans[-1].request_ids:
            in_flight.append(plans[-1])
        if len(in_flight) == 2 or (in_flight and not plans[-1].request_ids):
            stage.update(in_flight.pop(0))
    assert any(plan.preempted for plan in plans)
    assert plans == copies


# Steps that are planned before the tokens of the one before are known.


def test_a_preempted_request_returns_only_when_its_late_tokens_are_there():
    stage = Stage(async_scheduling=True)
    late = request("a", 8)
    stage.add(late)
    plans = [stage.schedule(), stage.schedule()]
    stage.preempt_running()
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
    stage.preempt_running()
    assert granted(stage.schedule()) == {"a": 9}


def test_a_reset_drops_what_is_in_flight_and_its_requests_return_at_once():
    stage = Stage(async_scheduling=True, num_speculative_tokens=2)
    stage.add(request("a", 8))
    plans = [stage.schedule(), stage.schedule()]
    assert stage.scheduler.reset_prefix_cache(now=2.0, reset_running=True)
    stage.add(request("b", 8))
    plan = stage.schedule()
    assert granted(plan) == {"a": 8, "b": 8}
    assert (stage.update(plans[0], {"a": [41]}), stage.update(plans[1], {"a": [42, 43]})) == ([], [])
    outputs = stage.update(plan, {"a": [44], "b": [45]})
    assert [output.new_token_ids for output in outputs] == [[44], [45]]
    assert stage.scheduler.stats().drafts.num_drafts == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_where_drafts_do_not_pay_no_row_has_any(is_async):
    costs = StepCosts((1, 64), (1e-3, 64e-3))
    stage = Stage(async_scheduling=is_async, num_speculative_tokens=2, step_costs=costs)
    for name in ("a", "b"):
        stage.add(request(name, 8, max_tokens=60))
    plan = stage.schedule()
    for index in range(50):
        following = stage.schedule() if is_async else None
        stage.update(plan, {name: [40 + index] for name in plan.request_ids})
        assert not any(plan.draft_token_ids)
        plan = following or stage.schedule()
    assert plan.request_ids == ["a", "b"]


def test_a_late_token_may_end_a_preempted_request():
    stage = Stage(async_scheduling=True)
    late = request("a", 8)
    stage.add(late)
    plan = stage.schedule()
    stage.preempt_running()
    [output] = stage.update(plan, {"a": [EOS]})
    assert output.finish_reason is FinishReason.STOP
    assert (num_unfinished(stage.scheduler), stage.scheduler.has_work) == (0, False)


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


# What gives way when blocks run out, what it loses, and how it comes back.


# Row 178.
def test_who_gives_way_loses_its_computed_tokens_and_drafts_and_keeps_its_output():
    stage = Stage(num_blocks=6, block_size=4, num_speculative_tokens=2, enable_prefix_caching=False)
    victim = request("b", 7)
    stage.add(request("a", 11), victim)
    stage.update(stage.schedule(), {"b": [20]}, {"b": [21, 22]})
    assert victim.draft_token_ids == [21, 22]
    plan = stage.schedule()
    assert (plan.preempted, stage.now) == (["b"], 2.0)
    assert (victim.status, victim.num_preemptions) == (RequestStatus.WAITING, 1)
    assert (victim.num_computed_tokens, victim.draft_token_ids, victim.block_tables) == (0, [], [])
    assert victim.output_token_ids == [20]
    assert victim.timeline.events[-1] == ("preempted", 2.0)
    assert stage.scheduler.stats().num_preemptions == 1


# Nonsense is refused with the value and the limit; every option changes something.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0, must be at least 1"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens is -1, must be at least 1"),
        ({"max_model_len": 0}, "max_model_len is 0, must be at least 1"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold is -1, must be at least 0"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1, must be at least 0"),
        ({"max_steps_in_flight": 0}, "max_steps_in_flight is 0, must be at least 1"),
        ({"pipeline_stages": 0}, "pipeline_stages is 0, must be at least 1"),
        (
            {"max_steps_in_flight": 3, "pipeline_stages": 2},
            "max_steps_in_flight is 3, without async_scheduling it must be at most pipeline_stages, 2",
        ),
        ({"prefill_share": 0.0}, "prefill_share is 0.0, must be above 0 and below 1"),
        ({"prefill_share": 1.0}, "prefill_share is 1.0, must be above 0 and below 1"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 63},
            "max_num_batched_tokens is 63, without chunked prefill it must be at least max_model_len, 64",
        ),
    ],
)
def test_nonsense_is_refused(options: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**{"max_model_len": 64, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 1},
        {"max_num_batched_tokens": 1},
        {"max_num_seqs": 1},
        {"long_prefill_token_threshold": 0},
        {"num_speculative_tokens": 0},
        {"max_steps_in_flight": 1},
        {"max_steps_in_flight": 2, "async_scheduling": True},
        {"max_steps_in_flight": 2, "pipeline_stages": 2},
        {"prefill_share": 0.001},
        {"prefill_share": 0.999},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 63},
    ],
)
def test_the_limits_themselves_are_taken(options: dict[str, object]):
    config = SchedulerConfig(**{"max_model_len": 64, **options})
    assert {name: getattr(config, name) for name in options} == options


def test_default_scheduler_config():
    assert SchedulerConfig(max_model_len=64) == SchedulerConfig(
        max_model_len=64,
        max_num_batched_tokens=2048,
        max_num_seqs=256,
        enable_chunked_prefill=True,
        long_prefill_token_threshold=0,
        reserve_full_prompt=True,
        num_speculative_tokens=0,
        async_scheduling=False,
        max_steps_in_flight=1,
        pipeline_stages=1,
        prefill_share=0.5,
    )


def test_a_plan_has_the_number_of_blocks_that_all_its_rows_share():
    stage = Stage(block_size=16)
    stage.add(request("a", 65, salt="same"))
    assert stage.step().num_common_blocks == []
    stage.add(request("b", 65, salt="same"), request("c", 70, salt="same"))
    # The rows of "b" and "c" have the hit in this step already, and gain blocks of their own later.
    assert [stage.step().num_common_blocks for _ in range(12)] == [[4]] * 12
    stage.add(request("d", 40, max_tokens=2))
    assert [stage.step().num_common_blocks for _ in range(3)] == [[], [], [4]]


def test_a_preempted_request_is_compared_again():
    stage = Stage(block_size=16)
    stage.add(request("a", 65, salt="same"), request("b", 65, salt="same"))
    stage.step()
    assert stage.step().num_common_blocks == [4]
    stage.preempt_running()
    assert stage.cache.reset()
    plans = [stage.step() for _ in range(2)]
    assert [plan.num_common_blocks for plan in plans] == [[4], [4]]


def test_common_blocks_are_not_counted_where_that_is_off():
    stage = Stage(block_size=16, enable_common_prefix=False)
    stage.add(request("a", 65, salt="same"), request("b", 65, salt="same"))
    assert [stage.step().num_common_blocks for _ in range(3)] == [[]] * 3
