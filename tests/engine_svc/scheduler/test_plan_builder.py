"""A plan while it is made: grants, admission, and how a row is taken out again."""

from __future__ import annotations

from engine_svc.core.request import Request
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.scheduler.plan_builder import PlanBuilder
from tests.engine_svc.scheduler.doubles import AtMost, Meter, Postponed
from tests.engine_svc.scheduler.fakes import request


def _builder(*budgets: Meter, **options: object) -> PlanBuilder:
    config = SchedulerConfig(**{"max_model_len": 64, "max_num_batched_tokens": 20, **options})
    builder = PlanBuilder(config, budgets)
    builder.begin(1)
    return builder


def _computed(
    request_id: str, num_tokens: int, num_computed: int, drafts: list[int] | None = None
) -> Request:
    planned = request(request_id, num_tokens)
    planned.num_computed_tokens = num_computed
    planned.draft_token_ids = drafts or []
    return planned


def test_a_grant_is_what_tokens_and_all_budgets_leave():
    builder = _builder(AtMost({"a": 9}), AtMost({"a": 7, "b": 11}))
    granted = {name: builder.clip(request(name, 1), 50) for name in "abc"}
    assert granted == {"a": 7, "b": 11, "c": 20}
    assert builder.clip(request("a", 1), 6) == 6
    builder.add_row(_computed("c", 15, 0), 15, [])
    assert [builder.clip(request(name, 1), 50) for name in "abc"] == [5, 5, 5]


def test_a_request_enters_when_all_budgets_admit_it():
    builder = _builder(Meter(), Postponed("a", 1))
    first, other = request("a", 1), request("b", 1)
    assert [builder.admits(first), builder.admits(other), builder.admits(first)] == [False, True, True]
    assert _builder().admits(first)


def test_who_gives_way_leaves_no_trace_in_the_plan():
    meter = Meter()
    builder = _builder(meter)
    first, victim, last = _computed("a", 8, 0), _computed("b", 6, 2, [9]), _computed("c", 5, 4)
    builder.add_row(first, 8, [[1, 2]])
    builder.add_row(victim, 5, [[3]])
    builder.add_row(last, 1, [[4]])
    assert builder.withdraw(victim) == 5
    plan = builder.plan
    assert (plan.request_ids, builder.rows) == (["a", "c"], [first, last])
    assert (plan.num_tokens, plan.num_computed_tokens) == ([8, 1], [0, 4])
    assert (plan.new_block_ids, plan.draft_token_ids) == ([[[1, 2]], [[4]]], [[], []])
    assert (plan.samples, plan.total_num_tokens) == ([True, True], 9)
    assert builder.remaining == 11
    assert (meter.spent, meter.given_back) == ({"a": 8, "c": 1}, {"b": 5})


def test_budgets_of_prefills_are_asked_for_rows_of_several_tokens_alone():
    limit = AtMost({"a": 7})
    builder = PlanBuilder(SchedulerConfig(max_model_len=64, max_num_batched_tokens=20), (), [limit])
    builder.begin(1)
    assert not builder.has_budgets
    assert builder.clip(request("a", 1), 9) == 7
    prefill, decode = _computed("a", 8, 0), _computed("b", 5, 4)
    builder.add_row(prefill, 7, [[1, 2]])
    builder.add_row(decode, 1, [[3]])
    assert limit.spent == {"a": 7}
    builder.withdraw(decode)
    builder.withdraw(prefill)
    assert (limit.spent, limit.given_back) == ({}, {"a": 7})
