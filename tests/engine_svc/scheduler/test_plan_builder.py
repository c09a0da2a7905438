"""A plan while it is made: what a row says, what it spends, and how it is taken out again."""

from __future__ import annotations

import pytest

from engine_svc.core.request import BlockTable, Request
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


def test_each_step_begins_with_everything_to_spend():
    meter = Meter()
    builder = _builder(meter)
    builder.add_row(_computed("a", 8, 0), 8, [])
    assert builder.remaining == 12
    plan = builder.begin(2)
    assert (plan.step_number, builder.plan is plan) == (2, True)
    assert (builder.remaining, builder.rows, plan.request_ids, meter.num_steps) == (20, [], [], 2)
    assert (builder.has_budgets, _builder().has_budgets) == (True, False)


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


def test_a_row_tells_where_it_begins_and_how_far_it_goes():
    meter = Meter()
    builder = _builder(meter)
    chunk, decode = _computed("a", 8, 2), _computed("b", 5, 4)
    builder.add_row(chunk, 3, [[4]])
    builder.add_row(decode, 1, [])
    plan = builder.plan
    assert plan.request_ids == ["a", "b"]
    assert (plan.num_tokens, plan.num_computed_tokens) == ([3, 1], [2, 4])
    assert (plan.new_block_ids, plan.draft_token_ids) == ([[[4]], []], [[], []])
    assert plan.samples == [False, True]
    assert (builder.rows, builder.remaining) == ([chunk, decode], 16)
    assert (chunk.num_computed_tokens, chunk.last_row_sampled) == (5, False)
    assert (decode.num_computed_tokens, decode.last_row_sampled) == (5, True)
    assert meter.spent == {"a": 3, "b": 1}
    assert (chunk.num_placeholders, decode.num_placeholders) == (0, 0)


@pytest.mark.parametrize(
    ("num_tokens", "drafts", "samples"),
    [(4, [21, 22, 23], True), (3, [21, 22], True), (2, [21], True), (1, [], True)],
)
def test_the_drafts_of_a_row_are_what_reaches_behind_the_known_tokens(num_tokens, drafts, samples):
    builder = _builder()
    drafted = _computed("a", 8, 7, [21, 22, 23])
    builder.add_row(drafted, num_tokens, [])
    assert (builder.plan.draft_token_ids, builder.plan.samples) == ([drafts], [samples])
    assert drafted.draft_token_ids == []


def test_a_chunk_inside_the_prompt_drops_the_drafts():
    builder = _builder()
    drafted = _computed("a", 8, 2, [21, 22, 23])
    builder.add_row(drafted, 5, [])
    assert (builder.plan.draft_token_ids, builder.plan.samples) == ([[]], [False])
    assert drafted.draft_token_ids == []


def test_a_row_planned_ahead_leaves_a_placeholder_for_each_token_it_may_yield():
    builder = _builder(async_scheduling=True, num_speculative_tokens=2)
    drafted = _computed("a", 8, 7, [-1, -1])
    builder.add_row(drafted, 3, [])
    assert (drafted.num_placeholders, drafted.draft_token_ids) == (3, [-1, -1])
    builder.begin(2)
    builder.add_row(drafted, 3, [])
    assert (builder.plan.samples, builder.plan.draft_token_ids) == ([True], [[-1, -1]])
    assert (drafted.num_placeholders, drafted.num_computed_tokens) == (6, 13)


def test_a_chunk_planned_ahead_leaves_no_placeholder():
    builder = _builder(async_scheduling=True, num_speculative_tokens=2)
    chunk = _computed("a", 8, 0)
    builder.add_row(chunk, 7, [])
    assert (chunk.num_placeholders, chunk.draft_token_ids) == (0, [])
    builder.begin(2)
    builder.add_row(chunk, 1, [])
    assert (chunk.num_placeholders, chunk.draft_token_ids) == (1, [-1, -1])


def test_a_row_ahead_of_the_known_tokens_samples_only_at_their_end():
    builder = _builder(async_scheduling=True)
    ahead = _computed("a", 8, 8)
    ahead.num_placeholders = 1
    builder.add_row(ahead, 1, [])
    assert (builder.plan.samples, ahead.num_placeholders) == ([True], 2)


@pytest.mark.parametrize(
    ("num_tokens", "drafts", "samples"), [(1, [], False), (2, [], True), (3, [-1], True), (4, [-1, -1], True)]
)
def test_placeholders_stand_before_the_drafts_of_a_row(num_tokens: int, drafts: list[int], samples: bool):
    builder = _builder(async_scheduling=True, num_speculative_tokens=2)
    ahead = _computed("a", 8, 8, [-1, -1])
    ahead.num_placeholders = 2
    builder.add_row(ahead, num_tokens, [])
    assert (builder.plan.draft_token_ids, builder.plan.samples) == ([drafts], [samples])


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


def test_who_has_no_row_gives_nothing_back():
    meter = Meter()
    builder = _builder(meter)
    builder.add_row(_computed("a", 8, 0), 8, [])
    assert builder.withdraw(request("b", 8)) == 0
    assert (builder.remaining, builder.plan.request_ids, meter.given_back) == (12, ["a"], {})


def test_an_admitted_request_is_sent_in_full_with_its_blocks():
    builder = _builder()
    admitted = request("a", 9)
    admitted.block_tables = [BlockTable([1, 2, 3]), BlockTable([0, 5, 6])]
    builder.admit(admitted, [[3], [5, 6]])
    builder.admit(admitted, [])
    first, second = builder.plan.admitted
    assert (first.request_id, first.num_prompt_tokens, first.sampling) == ("a", 9, admitted.sampling)
    assert first.token_ids == admitted.token_ids
    assert first.token_ids is not admitted.token_ids
    assert (first.block_ids, second.block_ids) == ([[1, 2], [0]], [[1, 2, 3], [0, 5, 6]])
