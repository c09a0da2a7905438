"""Who gets how many tokens in a step: budget, chunks, order, and what the plan tells the runner."""

from __future__ import annotations

import pytest

from engine_svc.request import FinishReason, RequestStatus
from tests.engine_svc.scheduler.fakes import NEW_TOKEN, Stage, granted, request


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


def test_an_admitted_request_is_told_in_full_and_later_only_by_its_new_blocks():
    stage = Stage(block_size=4)
    told = request("a", 7)
    stage.add(told)
    plan = stage.step()
    [admitted] = plan.admitted
    assert admitted.token_ids == told.token_ids[:7]
    assert admitted.num_prompt_tokens == 7
    assert (admitted.block_ids, plan.new_block_ids) == ([[]], [[[1, 2]]])
    assert admitted.token_ids is not told.token_ids
    later = [stage.step() for _ in range(2)]
    assert [plan.admitted for plan in later] == [[], []]
    assert [[[ids for ids in gained if ids] for gained in plan.new_block_ids] for plan in later] == [
        [[]],
        [[[3]]],
    ]


# Row 180: what plans say in sum is what the scheduler has.
def test_a_runner_that_adds_up_the_plans_has_the_tables_of_the_scheduler():
    stage = Stage(num_blocks=9, block_size=4, max_num_batched_tokens=16)
    requests = [request(name, 7, max_tokens=9, salt="same") for name in "abc"]
    stage.add(*requests)
    tables: dict[str, list[int]] = {}
    num_preempted = 0
    while stage.scheduler.has_work:
        plan = stage.schedule()
        num_preempted += len(plan.preempted)
        for request_id in plan.released:
            del tables[request_id]
        for admitted in plan.admitted:
            assert admitted.request_id not in tables
            tables[admitted.request_id] = list(admitted.block_ids[0])
        for request_id, gained in zip(plan.request_ids, plan.new_block_ids, strict=True):
            tables[request_id] += gained[0] if gained else []
        running = [one for one in requests if one.status is RequestStatus.RUNNING]
        assert tables == {one.request_id: one.block_tables[0].block_ids for one in running}
        stage.update(plan)
    assert num_preempted > 0
    assert all(one.is_finished for one in requests)


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
