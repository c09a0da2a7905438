"""What a step spends beside tokens: what is clipped, what is passed over, and what is released."""

from __future__ import annotations

import pytest

from engine_svc.core.request import Request
from engine_svc.scheduler.budget import PipelineTurns
from engine_svc.scheduler.feature import SchedulerFeature
from tests.engine_svc.scheduler.doubles import AtMost, Meter, Postponed, item
from tests.engine_svc.scheduler.fakes import Stage, granted, request
from tests.simulation.budgets import AdapterCap, Adapters, EncoderBudget


class _EvenOnly(Meter):
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
    assert budget.num_steps == 2


def test_every_budget_hears_of_every_row():
    budgets = [Meter(), Meter()]
    stage = Stage(budgets=budgets)
    stage.add(request("a", 9), request("b", 5))
    stage.step()
    stage.step()
    assert [budget.spent for budget in budgets] == [{"a": 1, "b": 1}] * 2
    assert [budget.num_steps for budget in budgets] == [2, 2]


def _with_item(request_id: str, num_tokens: int, start: int, num_item_tokens: int) -> Request:
    prompted = request(request_id, num_tokens)
    prompted.spans = item(start, num_item_tokens, f"item of {request_id}")
    return prompted


# Behaviour 6.
def test_who_reaches_an_item_that_cannot_be_encoded_gets_the_tokens_before_it():
    encoder = EncoderBudget(1024)
    stage = Stage(max_num_batched_tokens=1024, budgets=[encoder])
    stage.add(*(_with_item(f"r{index}", 800, 100, 600) for index in range(3)))
    assert granted(stage.step()) == {"r0": 800, "r1": 100, "r2": 100}
    assert encoder.remaining == 424
    assert granted(stage.step()) == {"r0": 1, "r1": 700}
    assert encoder.remaining == 424
    assert stage.scheduler.running_ids == ["r0", "r1", "r2"]
    assert granted(stage.step()) == {"r0": 1, "r1": 1, "r2": 700}


# Behaviour 6, row 164: in `running`, a request that gets nothing does not hold up those behind it.
def test_who_starves_does_not_stop_the_next_that_runs():
    stage = Stage(budgets=[EncoderBudget(600)], max_num_batched_tokens=1024)
    stage.add(_with_item("a", 200, 0, 100), _with_item("b", 700, 50, 600), request("c", 10))
    assert granted(stage.step()) == {"a": 200, "b": 50, "c": 10}
    stage.add(_with_item("d", 10, 0, 10))
    assert granted(stage.step()) == {"a": 1, "b": 650, "c": 1}
    assert granted(stage.step()) == {"a": 1, "b": 1, "c": 1, "d": 10}


# Row 164: among the waiting, one that gets nothing holds up all behind it.
def test_who_starves_at_the_head_of_the_queue_stops_admission():
    stage = Stage(budgets=[EncoderBudget(100)])
    stage.add(_with_item("a", 100, 0, 60), _with_item("b", 100, 0, 60), request("c", 10))
    assert granted(stage.step()) == {"a": 100}
    assert stage.scheduler.waiting_ids == ["b", "c"]
    assert granted(stage.step()) == {"a": 1, "b": 100, "c": 10}


def test_budgets_see_where_the_row_of_a_newcomer_begins():
    encoder = EncoderBudget(60)
    stage = Stage(budgets=[encoder])
    stage.add(request("a", 180, salt="same"))
    stage.step()
    first, same = request("b", 80), request("c", 180, salt="same")
    first.spans, same.spans = item(0, 60, "one"), item(100, 60, "two")
    stage.add(first, same)
    plan = stage.step()
    # 96 tokens of the last are cached; the item 4 tokens behind them cannot be encoded in this step.
    assert (granted(plan), plan.num_computed_tokens) == ({"a": 1, "b": 80, "c": 4}, [180, 0, 96])
    assert granted(stage.step()) == {"a": 1, "b": 1, "c": 80}


def test_who_does_not_get_in_has_computed_nothing():
    encoder = EncoderBudget(100)
    stage = Stage(budgets=[encoder])
    stage.add(request("a", 800, salt="same"))
    stage.step()
    starved = request("b", 800, salt="same")
    starved.spans = item(96, 600)
    stage.add(starved)
    assert stage.step().request_ids == ["a"]
    assert (starved.num_computed_tokens, starved.block_tables) == (0, [])
    assert stage.scheduler.stats().prefix_queries == 800


def _with_adapter(request_id: str, adapter: str) -> Request:
    adapted = request(request_id, 8)
    adapted.extra_keys = (adapter,)
    return adapted


# Row 173.
def test_a_third_adapter_waits_while_its_peers_with_the_first_run():
    stage = Stage(features=[Adapters(AdapterCap(2))])
    stage.add(
        *(_with_adapter(f"r{index}", f"adapter {index % 3}") for index in range(6)), request("plain", 8)
    )
    plan = stage.step()
    assert plan.request_ids == ["r0", "r1", "r3", "r4", "plain"]
    assert stage.scheduler.waiting_ids == ["r2", "r5"]
    stage.scheduler.abort(["r1"], now=2.0)
    assert stage.step().request_ids == ["r0", "r3", "r4", "plain"]
    stage.scheduler.abort(["r4"], now=3.0)
    assert stage.step().request_ids == ["r0", "r3", "plain", "r2", "r5"]


def test_a_feature_s_budget_is_asked_for_its_own_requests_alone():
    """Also for rows of one token."""
    feature, meter = SchedulerFeature(), Meter()
    feature.budget = meter
    stage = Stage(features=[feature])
    plain, own = request("plain", 7), request("own", 7)
    own.num_budgets = 1
    stage.add(plain, own)
    stage.step()
    assert meter.spent == {"own": 7}
    stage.step()
    assert meter.spent == {"own": 1}
    stage.scheduler.abort(["own"], now=2.0)
    stage.step()
    assert (meter.spent, meter.num_steps) == ({}, 3)


def test_who_is_passed_over_keeps_its_place_among_those_who_enter():
    stage = Stage(budgets=[Postponed("a", 1)], max_num_seqs=2)
    stage.add(*(request(name, 8) for name in "abcd"))
    assert stage.step().request_ids == ["b", "c"]
    assert stage.scheduler.waiting_ids == ["a", "d"]
    stage.scheduler.abort(["b"], now=2.0)
    assert stage.step().request_ids == ["c", "a"]


def test_everybody_may_be_passed_over():
    stage = Stage(budgets=[Postponed("a", 1), Postponed("b", 1)])
    stage.add(request("a", 8), request("b", 8))
    assert stage.step().request_ids == []
    assert stage.step().request_ids == ["a", "b"]


# Behaviour 27.
def test_tokens_are_looked_up_once_however_often_admission_is_put_off():
    stage = Stage(budgets=[Postponed("a", 3)])
    stage.add(request("a", 20))
    for _ in range(3):
        assert stage.step().request_ids == []
        assert stage.scheduler.stats().prefix_queries == 0
    assert granted(stage.step()) == {"a": 20}
    stats = stage.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (20, 0)
    assert (stats.preempted_queries, stats.preempted_hits) == (0, 0)


# Behaviour 27.
def test_who_returns_after_a_preemption_is_counted_apart():
    stage = Stage(num_blocks=5, block_size=4)
    stage.add(request("a", 4, max_tokens=2), request("b", 8))
    stage.step()
    assert stage.step().preempted == ["b"]
    plan = stage.step()
    assert (granted(plan), plan.num_computed_tokens) == ({"b": 1}, [8])
    stats = stage.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.prefix_hit_rate) == (12, 0, 0.0)
    assert (stats.preempted_queries, stats.preempted_hits) == (9, 8)


# Row 176: tokens, blocks and a further budget all return at once, and the next in line has them.
def test_what_a_victim_gives_back_is_spent_in_the_same_step():
    encoder = EncoderBudget(4)
    stage = Stage(
        policy="priority",
        num_blocks=7,
        block_size=4,
        max_num_batched_tokens=8,
        reserve_full_prompt=False,
        enable_prefix_caching=False,
        budgets=[AtMost({"victim": 4, "next": 4}), encoder],
    )
    victim, following = request("victim", 20, priority=9), request("next", 12, priority=5)
    victim.spans, following.spans = item(12, 4, "first"), item(4, 4, "second")
    stage.add(victim)
    assert granted(stage.step()) == {"victim": 4}
    stage.add(request("full", 3, priority=1), following)
    assert granted(stage.step()) == {"victim": 4, "full": 3, "next": 1}
    assert granted(stage.step()) == {"victim": 4, "full": 1, "next": 3}
    # The victim is planned with 4 tokens, its item and the last block; then one more block is wanted.
    plan = stage.step()
    assert plan.preempted == ["victim"]
    assert granted(plan) == {"full": 1, "next": 4}
    assert (encoder.remaining, encoder.encoded) == (0, {(following, 4)})
    assert stage.cache.num_used_blocks == 4


@pytest.mark.parametrize(
    ("options", "blocked", "admitted"),
    [
        # Tokens, rows, blocks and a grant of nothing end the admission of a step.
        ({"max_num_batched_tokens": 8}, False, ["a"]),
        ({"max_num_batched_tokens": 9}, False, ["a", "b"]),
        ({"max_num_seqs": 1}, False, ["a"]),
        ({"max_num_seqs": 2}, False, ["a", "b"]),
        ({"num_blocks": 4, "block_size": 4}, False, ["a"]),
        ({"num_blocks": 5, "block_size": 4}, False, ["a", "b"]),
        ({"budgets": [AtMost({"b": 0})]}, False, ["a"]),
        ({"budgets": [AtMost({"b": 1})]}, False, ["a", "b", "c"]),
        # What is blocked or not admitted is passed over.
        ({}, True, ["a", "c"]),
        ({"budgets": [Postponed("b", 1)]}, False, ["a", "c"]),
        ({}, False, ["a", "b", "c"]),
    ],
)
def test_each_limit_by_itself(options: dict[str, object], blocked: bool, admitted: list[str]):
    """Row 158."""
    stage = Stage(**options)
    stage.add(request("a", 8), request("b", 8, blockers=["one"] if blocked else []), request("c", 1))
    assert stage.schedule().request_ids == admitted


def test_whose_row_is_given_back_may_sample_in_the_next_step():
    turns, one = PipelineTurns(2), request("a", 4)
    turns.begin_step()
    turns.take(one, 4)
    turns.begin_step()
    assert (turns.admits(one), turns.clip(one, 4)) == (False, 0)
    turns.begin_step()
    turns.take(one, 4)
    turns.give_back(one, 4)
    turns.begin_step()
    assert (turns.admits(one), turns.clip(one, 4)) == (True, 4)
