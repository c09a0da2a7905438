"""Which requests get how many tokens in a step: budget, chunks, order, and the plan for the runner."""

from __future__ import annotations

import pytest

from engine_svc.cache.attention import FullAttention, SlidingWindow
from engine_svc.core.request import FinishReason, RequestStatus
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.scheduler.in_flight import PlannedSteps
from tests.engine_svc.scheduler.fakes import EOS, NEW_TOKEN, Stage, granted, request


@pytest.mark.parametrize("blockers", [[], ["one"]])
def test_a_request_is_not_alone_when_another_runs_waits_or_is_blocked(blockers: list[str]):
    stage = Stage(max_num_batched_tokens=500, long_prefill_token_threshold=400)
    stage.add(request("a", 800), request("b", 8, blockers=blockers))
    assert granted(stage.step())["a"] == 400
    assert granted(stage.step())["a"] == 400


def test_without_chunks_the_limit_for_one_request_still_cuts():
    stage = Stage(
        max_num_batched_tokens=100,
        max_model_len=100,
        enable_chunked_prefill=False,
        long_prefill_token_threshold=30,
    )
    stage.add(request("a", 50), request("b", 50))
    assert granted(stage.step()) == {"a": 30, "b": 30}
    assert granted(stage.step()) == {"a": 20, "b": 20}


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


# Steps that are planned before the tokens of the one before are known.


def test_results_come_back_in_the_order_of_the_plans():
    steps = PlannedSteps()
    first, second = [request("a", 4)], [request("b", 4)]
    steps.push(3, first, [4])
    steps.push(5, second, [4])
    assert steps.pop(3) is first
    assert steps.pop(5) is second


def test_the_newest_step_of_a_request_is_the_last_that_computes_something_of_it():
    steps = PlannedSteps()
    both, once, never = request("a", 4), request("b", 4), request("c", 4)
    assert steps.newest_of(both) == 0
    steps.push(3, [both, once], [4, 4])
    steps.push(5, [both], [1])
    assert [steps.newest_of(one) for one in (both, once, never)] == [5, 3, 0]
    steps.pop(3)
    assert [steps.newest_of(one) for one in (both, once, never)] == [5, 0, 0]


def test_tokens_in_flight_are_summed_over_the_steps():
    steps = PlannedSteps()
    both, once, never = request("a", 4), request("b", 4), request("c", 4)
    steps.push(1, [once, both], [3, 5])
    steps.push(2, [both], [7])
    assert [steps.num_tokens_of(one) for one in (both, once, never)] == [12, 3, 0]
    steps.pop(1)
    assert [steps.num_tokens_of(one) for one in (both, once, never)] == [7, 0, 0]


def test_the_rows_of_a_forgotten_request_are_dropped_in_every_step():
    steps = PlannedSteps()
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


def test_a_late_token_may_end_a_preempted_request():
    stage = Stage(async_scheduling=True)
    late = request("a", 8)
    stage.add(late)
    plan = stage.schedule()
    stage.preempt_running()
    [output] = stage.update(plan, {"a": [EOS]})
    assert output.finish_reason is FinishReason.STOP
    assert (stage.scheduler.num_unfinished, stage.scheduler.has_work) == (0, False)


# Several batches are in flight, each with the requests that have no token outstanding.


def test_a_request_whose_token_is_outstanding_leaves_the_step_to_others():
    stage = Stage(pipeline_stages=2, max_num_batched_tokens=8)
    stage.add(request("a", 8), request("b", 12))
    plans = [stage.schedule(), stage.schedule()]
    assert [granted(plan) for plan in plans] == [{"a": 8}, {"b": 8}]
    stage.update(plans[0])
    plans.append(stage.schedule())
    # The next chunk of a prompt needs no token.
    assert granted(plans[2]) == {"a": 1, "b": 4}
    stage.update(plans[1])
    assert granted(stage.schedule()) == {}


@pytest.mark.parametrize("num_stages", [2, 3])
def test_ahead_of_its_tokens_a_request_samples_once_in_as_many_steps_as_there_are_stages(num_stages: int):
    stage = Stage(async_scheduling=True, pipeline_stages=num_stages)
    in_flight = [stage.schedule()]
    for index in range(num_stages):
        stage.add(request(str(index), 8))
        in_flight.append(stage.schedule())
    assert [granted(plan) for plan in in_flight[1:]] == [{str(index): 8} for index in range(num_stages)]
    for index in range(num_stages):
        stage.update(in_flight[1 + index])
        assert granted(stage.schedule()) == {str(index): 1}


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


# What gives way when blocks run out, what it loses, and how it comes back.


def test_who_gives_way_stands_even_before_those_who_came_earlier():
    stage = Stage(num_blocks=5, block_size=4, enable_prefix_caching=False)
    stage.add(request("earlier", 8, blockers=["one"]), request("a", 8), request("b", 8))
    stage.step()
    stage.scheduler.unblock("earlier", "one")
    assert stage.step().preempted == ["b"]
    assert stage.scheduler.waiting_ids == ["b", "earlier"]


# Row 177: refused at the door; a request that comes in all the same makes no endless loop.
def test_a_lone_request_that_cannot_continue_is_not_preempted():
    stage = Stage(num_blocks=3, block_size=4)
    stage.add(request("a", 8))
    assert granted(stage.step()) == {"a": 8}
    plan = stage.schedule()
    assert (plan.preempted, plan.request_ids) == (["a"], [])
    assert stage.scheduler.waiting_ids == ["a"]
    assert stage.schedule().request_ids == []


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


# Row 174.
@pytest.mark.parametrize(("reserves", "planned"), [(True, {}), (False, {"a": 16})])
def test_who_can_never_fit_is_not_even_begun(reserves: bool, planned: dict[str, int]):
    """Behaviour 65, seen from the scheduler."""
    stage = Stage(num_blocks=6, max_num_batched_tokens=16, reserve_full_prompt=reserves)
    stage.add(request("a", 256))
    assert granted(stage.step()) == planned


# Row 174.
@pytest.mark.parametrize(("num_blocks", "is_admitted"), [(6, False), (7, True)])
def test_the_whole_prompt_is_counted_with_what_is_held_already(num_blocks: int, is_admitted: bool):
    stage = Stage(num_blocks=num_blocks, block_size=4, max_num_batched_tokens=5)
    stage.add(request("a", 1), request("b", 20))
    assert granted(stage.step()) == ({"a": 1, "b": 4} if is_admitted else {"a": 1})


def test_blocks_that_a_step_in_flight_still_reads_are_not_given_back():
    stage = Stage(groups=[FullAttention(4), SlidingWindow(4, 4)], async_scheduling=True)
    ahead = request("a", 8)
    stage.add(ahead)
    first = stage.schedule()
    stage.schedule()
    # 8 tokens count as computed, but all of them are in flight.
    assert ahead.block_tables[1].num_released == 0
    stage.update(first)
    stage.schedule()
    assert [table.num_released for table in ahead.block_tables] == [0, 1]


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
