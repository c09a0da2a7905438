"""Who gets how many tokens in a step: budget, chunks, order, and what the plan tells the runner."""

from __future__ import annotations

import pytest

from engine_svc.core.request import ContentSpan, FinishReason, RequestStatus
from tests.engine_svc.scheduler.fakes import EOS, NEW_TOKEN, Stage, granted, request


# Behaviour 4, row 161.
def test_chunks_share_the_budget_under_the_limit_for_one_request():
    stage = Stage(max_num_batched_tokens=1024, long_prefill_token_threshold=400)
    stage.add(*(request(name, 800) for name in "abc"))
    assert granted(stage.step()) == {"a": 400, "b": 400, "c": 224}
    assert granted(stage.step()) == {"a": 400, "b": 400, "c": 224}
    assert granted(stage.step()) == {"a": 1, "b": 1, "c": 352}


def test_a_lone_request_is_not_limited():
    stage = Stage(max_num_batched_tokens=1024, long_prefill_token_threshold=400)
    stage.add(request("a", 1500))
    assert granted(stage.step()) == {"a": 1024}
    # Nor is one that runs already.
    assert granted(stage.step()) == {"a": 476}


@pytest.mark.parametrize("blockers", [[], ["one"]])
def test_a_request_is_not_alone_when_another_runs_waits_or_is_blocked(blockers: list[str]):
    stage = Stage(max_num_batched_tokens=500, long_prefill_token_threshold=400)
    stage.add(request("a", 800), request("b", 8, blockers=blockers))
    assert granted(stage.step())["a"] == 400
    assert granted(stage.step())["a"] == 400


# Behaviour 5, row 162.
@pytest.mark.parametrize(("chunked", "admitted"), [(True, {"a": 800, "b": 224}), (False, {"a": 800})])
def test_nobody_overtakes_the_head_of_the_queue(chunked: bool, admitted: dict[str, int]):
    stage = Stage(
        max_num_batched_tokens=1024, max_num_seqs=3, max_model_len=1024, enable_chunked_prefill=chunked
    )
    stage.add(request("a", 800), request("b", 800), request("c", 10), request("d", 10))
    assert granted(stage.step()) == admitted


# Row 162.
def test_without_chunks_a_prompt_enters_as_soon_as_it_fits_whole():
    stage = Stage(max_num_batched_tokens=100, max_model_len=100, enable_chunked_prefill=False)
    stage.add(request("a", 50), request("b", 51), request("c", 1))
    assert granted(stage.step()) == {"a": 50}
    assert granted(stage.step()) == {"a": 1, "b": 51, "c": 1}
    stage.add(request("d", 97), request("e", 98))
    assert granted(stage.step()) == {"a": 1, "b": 1, "c": 1, "d": 97}
    assert stage.scheduler.stats().num_chunked_prefills == 0


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


def test_only_the_chunk_that_ends_at_the_last_token_samples():
    stage = Stage(max_num_batched_tokens=10)
    stage.add(request("a", 15))
    assert stage.step().samples == [False]
    assert stage.step().samples == [True]
    assert stage.scheduler.stats().num_chunked_prefills == 1


# Row 160.
def test_a_long_prompt_takes_as_many_steps_as_it_has_budgets():
    stage = Stage(max_num_batched_tokens=512, max_model_len=8192)
    stage.add(request("a", 4096))
    plans = [stage.step() for _ in range(8)]
    assert [plan.num_tokens for plan in plans] == [[512]] * 8
    assert [plan.samples for plan in plans] == [[False]] * 7 + [[True]]
    assert [plan.num_computed_tokens for plan in plans] == [[512 * step] for step in range(8)]


# Row 155.
def test_one_step_mixes_a_long_prefill_and_decodes():
    stage = Stage(max_num_batched_tokens=2048)
    stage.add(*(request(f"r{index}", 4) for index in range(10)))
    stage.step()
    stage.add(request("long", 2000))
    plan = stage.step()
    assert plan.num_tokens == [1] * 10 + [2000]
    assert plan.total_num_tokens == 2010


# Rows 156 and 159.
def test_running_requests_come_before_any_admission_and_all_share_one_budget():
    stage = Stage(max_num_batched_tokens=64)
    stage.add(*(request(f"r{index}", 4) for index in range(10)))
    stage.step()
    stage.add(request("long", 100))
    plan = stage.step()
    assert plan.num_tokens == [1] * 10 + [54]
    assert plan.total_num_tokens == 64
    stage.add(request("short", 1))
    assert granted(stage.step()) == {**{f"r{index}": 1 for index in range(10)}, "long": 46, "short": 1}


def test_who_runs_is_served_in_order_of_admission_until_the_budget_is_spent():
    stage = Stage(max_num_batched_tokens=3)
    for name in "abcd":
        stage.add(request(name, 1))
        stage.step()
    assert stage.scheduler.running_ids == ["a", "b", "c"]
    assert granted(stage.step()) == {"a": 1, "b": 1, "c": 1}
    stage.scheduler.abort(["b"], now=9.0)
    assert granted(stage.step()) == {"a": 1, "c": 1, "d": 1}


# Row 157.
def test_so_many_requests_run_and_the_next_waits():
    stage = Stage(max_num_seqs=4)
    stage.add(*(request(f"r{index}", 8, max_tokens=2 + index) for index in range(5)))
    assert stage.step().request_ids == ["r0", "r1", "r2", "r3"]
    assert stage.scheduler.waiting_ids == ["r4"]
    assert stage.step().request_ids == ["r0", "r1", "r2", "r3"]
    assert stage.step().request_ids == ["r1", "r2", "r3", "r4"]
    assert stage.scheduler.stats().max_rows == 4


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


# Row 146.
def test_only_requests_of_the_same_salt_share_what_is_cached():
    stage = Stage()
    stage.add(request("a", 100, salt="one"), request("b", 100, salt="two"), request("c", 100, salt="one"))
    assert granted(stage.step()) == {"a": 100, "b": 100, "c": 4}


@pytest.mark.parametrize("field", ["extra_keys", "spans"])
def test_only_requests_of_the_same_content_share_what_is_cached(field: str):
    stage = Stage()
    other = request("b", 100, salt="same")
    if field == "spans":
        other.spans = (ContentSpan(10, 5, "picture"),)
    else:
        other.extra_keys = ("weights",)
    stage.add(request("a", 100, salt="same"), other)
    assert granted(stage.step()) == {"a": 100, "b": 100}


# Row 153.
def test_full_blocks_have_hashes_from_prompt_and_output():
    stage = Stage(block_size=16)
    hashed = request("a", 31)
    stage.add(hashed)
    stage.step()
    assert (hashed.num_tokens, len(hashed.block_hashes)) == (32, 1)
    stage.step()
    assert (hashed.num_tokens, len(hashed.block_hashes)) == (33, 2)


# Row 163.
def test_no_position_behind_the_model_length_is_ever_computed():
    stage = Stage(max_model_len=10)
    longest = request("a", 8, max_tokens=100)
    stage.add(longest)
    plans = stage.step_until_idle()
    assert [plan.num_computed_tokens for plan in plans] == [[0], [8]]
    assert (longest.num_tokens, longest.finish_reason) == (10, FinishReason.LENGTH)


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


# Row 184.
def test_an_answer_is_what_came_up_to_its_end():
    stage = Stage()
    answered = request("a", 8)
    stage.add(answered)
    for token in (20, 21, EOS):
        stage.update(stage.schedule(), {"a": [token]})
    assert (answered.output_token_ids, answered.status) == ([20, 21, EOS], RequestStatus.FINISHED)
    assert stage.cache.num_used_blocks == 0
