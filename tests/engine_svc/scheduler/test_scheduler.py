"""Who gets how many tokens in a step: budget, chunks, order, preemption, drafts."""

from __future__ import annotations

import pytest

from engine_svc.request import FinishReason, Request
from tests.engine_svc.scheduler.fakes import NEW_TOKEN, Stage, granted, request


def test_chunks_share_the_budget_under_the_limit_for_one_request():
    stage = Stage(max_num_batched_tokens=1024, long_prefill_token_threshold=400)
    stage.add(*(request(name, 800) for name in "abc"))
    assert granted(stage.step()) == {"a": 400, "b": 400, "c": 224}
    assert granted(stage.step()) == {"a": 400, "b": 400, "c": 224}
    assert granted(stage.step()) == {"a": 1, "b": 1, "c": 352}


def test_a_lone_request_is_not_limited():
    stage = Stage(max_num_batched_tokens=1024, long_prefill_token_threshold=400)
    stage.add(request("a", 800))
    assert granted(stage.step()) == {"a": 800}


@pytest.mark.parametrize(("chunked", "admitted"), [(True, {"a": 800, "b": 224}), (False, {"a": 800})])
def test_nobody_overtakes_the_head_of_the_queue(chunked: bool, admitted: dict[str, int]):
    stage = Stage(
        max_num_batched_tokens=1024, max_num_seqs=3, max_model_len=1024, enable_chunked_prefill=chunked
    )
    stage.add(request("a", 800), request("b", 800), request("c", 10), request("d", 10))
    assert granted(stage.step()) == admitted


def test_only_the_chunk_that_ends_at_the_last_token_samples():
    stage = Stage(max_num_batched_tokens=10)
    stage.add(request("a", 15))
    assert stage.step().samples == [False]
    assert stage.step().samples == [True]
    assert stage.scheduler.stats().num_chunked_prefills == 1


def test_one_step_mixes_a_long_prefill_and_decodes():
    stage = Stage(max_num_batched_tokens=64)
    stage.add(*(request(f"r{index}", 4) for index in range(10)))
    stage.step()
    stage.add(request("long", 100))
    plan = stage.step()
    assert plan.num_tokens == [1] * 10 + [54]
    assert plan.total_num_tokens == 64


def test_tokens_count_as_computed_when_planned():
    stage = Stage(max_num_batched_tokens=10)
    stage.add(request("a", 12), request("b", 12))
    first = stage.schedule()
    second = stage.schedule()
    assert granted(first) == {"a": 10}
    assert granted(second) == {"a": 2, "b": 8}
    stage.update(first)
    assert granted(stage.schedule()) == {"b": 4}
    stage.update(second)
    assert granted(stage.schedule()) == {"a": 1}


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
    assert [plan.new_block_ids for plan in later] == [[[]], [[[3]]]]


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


def test_an_identical_prompt_later_in_the_same_step_hits_at_once():
    stage = Stage()
    first, second = request("a", 100), request("b", 100)
    second.cache_salt = first.cache_salt
    stage.add(first, second)
    plan = stage.schedule()
    assert granted(plan) == {"a": 100, "b": 4}
    assert plan.num_computed_tokens == [0, 96]
    outputs = stage.update(plan)
    assert [output.num_cached_tokens for output in outputs] == [0, 96]
    assert stage.scheduler.stats().prefix_hits == 96


def test_the_last_admitted_gives_way_and_is_the_first_to_return():
    stage = Stage(num_blocks=7, block_size=4, enable_prefix_caching=False)
    stage.add(*(request(name, 8) for name in "abc"))
    stage.step()
    plan = stage.step()
    assert plan.preempted == ["c"]
    assert granted(plan) == {"a": 1, "b": 1}
    assert stage.scheduler.waiting_ids == ["c"]
    stage.scheduler.abort(["a"], now=3.0)
    plan = stage.schedule()
    assert plan.released == ["a"]
    assert plan.admitted[-1].token_ids[-1] == NEW_TOKEN
    assert granted(plan) == {"b": 1, "c": 9}


def test_a_step_that_preempts_admits_nobody():
    stage = Stage(num_blocks=7, block_size=4)
    stage.add(*(request(name, 8) for name in "abc"))
    stage.step()
    stage.add(request("small", 1))
    assert stage.step().admitted == []


def test_a_request_may_have_to_give_way_itself():
    stage = Stage(num_blocks=5, block_size=4, enable_prefix_caching=False)
    stage.add(request("a", 4), request("b", 8))
    stage.step()
    plan = stage.step()
    assert plan.preempted == ["b"]
    assert granted(plan) == {"a": 1}


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


def test_a_preempted_request_returns_only_when_its_late_token_is_there():
    stage = Stage(async_scheduling=True)
    late = request("a", 8)
    stage.add(late)
    plan = stage.schedule()
    assert stage.scheduler.reset_prefix_cache(now=1.0, reset_running=True)
    assert stage.schedule().request_ids == []
    stage.update(plan, {"a": [42]})
    plan = stage.schedule()
    assert plan.admitted[0].token_ids[-1] == 42
    assert granted(plan) == {"a": 9}


def test_priority_admits_the_most_urgent_first():
    stage = Stage(policy="priority", max_num_seqs=2)
    stage.add(*(request(f"r{index}", 8, priority=priority) for index, priority in enumerate([3, 1, 2, 0])))
    assert stage.step().request_ids == ["r3", "r1"]
    assert stage.scheduler.waiting_ids == ["r2", "r0"]


def test_equal_priorities_are_taken_by_arrival():
    stage = Stage(policy="priority", max_num_seqs=1)
    arrivals = enumerate([3.0, 1.0, 2.0])
    stage.add(*(request(f"r{index}", 8, max_tokens=1, arrival_at=arrival) for index, arrival in arrivals))
    assert [stage.step().request_ids for _ in range(3)] == [["r1"], ["r2"], ["r0"]]


def test_equal_arrivals_are_taken_by_id():
    stage = Stage(policy="priority")
    stage.add(request("r10", 8), request("r9", 8), request("r1", 8))
    assert stage.step().request_ids == ["r1", "r10", "r9"]


def test_the_least_urgent_gives_way():
    stage = Stage(policy="priority", num_blocks=6, reserve_full_prompt=False)
    low, high = request("low", 32, priority=5), request("high", 32, priority=0)
    stage.add(low)
    stage.step()
    stage.add(high)
    stage.step()
    plan = stage.step()
    assert plan.preempted == ["low"]
    assert granted(plan) == {"high": 1}


class _Meter:
    """A budget without a limit that keeps book."""

    def __init__(self) -> None:
        self.spent: dict[str, int] = {}

    def begin_step(self) -> None:
        self.spent = {}

    def admits(self, request: Request) -> bool:
        return True

    def clip(self, request: Request, num_tokens: int) -> int:
        return num_tokens

    def take(self, request: Request, num_tokens: int) -> None:
        self.spent[request.request_id] = num_tokens

    def give_back(self, request: Request, num_tokens: int) -> None:
        assert self.spent.pop(request.request_id) == num_tokens


def test_a_victim_already_planned_gives_its_tokens_back_and_nobody_is_skipped():
    meter = _Meter()
    stage = Stage(policy="priority", num_blocks=6, block_size=4, budgets=[meter])
    # The victim to be stands first; whoever follows must not be passed over when it leaves the list.
    stage.add(request("victim", 5, priority=9))
    stage.step()
    stage.add(request("full", 4, priority=1), request("next", 5, priority=5))
    stage.step()
    assert stage.scheduler.running_ids == ["victim", "full", "next"]
    plan = stage.schedule()
    assert plan.preempted == ["victim"]
    assert granted(plan) == {"full": 1, "next": 1}
    assert meter.spent == {"full": 1, "next": 1}
    assert len(plan.new_block_ids) == len(plan.samples) == len(plan.num_computed_tokens) == 2
    assert plan.released == ["victim"]
    assert [output.request_id for output in stage.update(plan)] == ["full", "next"]


class _EvenOnly(_Meter):
    """Grants only multiples of two."""

    def clip(self, request: Request, num_tokens: int) -> int:
        return num_tokens // 2 * 2


def test_a_further_budget_clips_and_hears_what_is_taken():
    budget = _EvenOnly()
    stage = Stage(budgets=[budget])
    stage.add(request("a", 9), request("b", 1), request("c", 4))
    assert granted(stage.step()) == {"a": 8}
    assert budget.spent == {"a": 8}
    assert granted(stage.step()) == {}


def test_drafts_are_not_mixed_into_a_prompt():
    stage = Stage(max_num_batched_tokens=50, num_speculative_tokens=3)
    stage.add(request("a", 80))
    stage.update(stage.schedule(), drafts={"a": [1, 2, 3]})
    plan = stage.schedule()
    assert granted(plan) == {"a": 30}
    assert plan.draft_token_ids == [[]]
    stage.update(plan, drafts={"a": [1, 2, 3]})
    plan = stage.schedule()
    assert granted(plan) == {"a": 4}
    assert plan.draft_token_ids == [[1, 2, 3]]


def test_rejected_drafts_are_taken_back():
    stage = Stage(num_speculative_tokens=3)
    drafted = request("a", 8)
    stage.add(drafted)
    stage.update(stage.schedule(), {"a": [20]}, {"a": [21, 98, 99]})
    plan = stage.schedule()
    assert plan.num_computed_tokens == [8]
    [output] = stage.update(plan, {"a": [21, 22]})
    assert output.new_token_ids == [21, 22]
    assert drafted.output_token_ids == [20, 21, 22]
    plan = stage.schedule()
    assert plan.num_computed_tokens == [10]
    assert plan.num_tokens == [1]


def test_rejected_drafts_are_never_cached():
    stage = Stage(num_speculative_tokens=3, block_size=4)
    drafted = request("a", 4)
    stage.add(drafted)
    stage.update(stage.schedule(), {"a": [20]}, {"a": [21, 22, 23]})
    plan = stage.schedule()
    assert drafted.block_tables[0].num_registered == 1
    stage.update(plan, {"a": [50]})
    stage.scheduler.abort(["a"], now=3.0)
    follower = request("b", 4)
    follower.cache_salt = "a"
    follower.token_ids.extend([20, 21, 22, 23, 1])
    assert stage.cache.match_prefix(follower).num_tokens == 4


def test_a_request_ahead_of_its_tokens_is_planned_exactly_as_often_as_it_needs():
    for max_tokens in (1, 2, 3, 5):
        stage = Stage(async_scheduling=True)
        ahead = request("a", 8, max_tokens=max_tokens)
        stage.add(ahead)
        num_planned, in_flight = 0, []
        while not ahead.is_finished:
            plan = stage.schedule()
            if plan.request_ids:
                num_planned += plan.total_num_tokens
                in_flight.append(plan)
            if len(in_flight) == 2 or not plan.request_ids:
                stage.update(in_flight.pop(0))
        assert num_planned == 8 + max_tokens - 1
        assert ahead.num_output_tokens == max_tokens


def test_a_request_stopped_while_ahead_yields_nothing_more():
    stage = Stage(async_scheduling=True)
    stage.add(request("a", 8))
    first, second = stage.schedule(), stage.schedule()
    assert granted(second) == {"a": 1}
    [output] = stage.update(first, {"a": [2]})
    assert output.finish_reason is FinishReason.STOP
    assert stage.update(second) == []
    assert stage.cache.num_used_blocks == 0
