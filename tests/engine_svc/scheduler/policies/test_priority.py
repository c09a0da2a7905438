"""The most urgent first; the least urgent gives way."""

from __future__ import annotations

from engine_svc.build import build_core
from engine_svc.cache.attention import FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.scheduler.policies.priority import ByPriority
from tests.engine_svc.scheduler.doubles import AtMost, Meter
from tests.engine_svc.scheduler.fakes import Stage, granted, request

CONFIG = SchedulerConfig(max_model_len=64)


# Rows 152 and 169.
def test_equal_arrivals_are_taken_by_id():
    stage = Stage(policy="priority")
    stage.add(request("r10", 8), request("r9", 8), request("r1", 8))
    assert stage.step().request_ids == ["r1", "r10", "r9"]


def test_what_a_victim_was_to_compute_is_never_found_in_the_cache():
    stage = Stage(
        policy="priority",
        num_blocks=8,
        block_size=4,
        max_num_batched_tokens=12,
        reserve_full_prompt=False,
        budgets=[AtMost({"victim": 8})],
    )
    stage.add(request("victim", 25, priority=9))
    assert granted(stage.step()) == {"victim": 8}
    stage.add(request("full", 4, priority=1, max_tokens=2))
    assert granted(stage.step()) == {"victim": 8, "full": 4}
    plan = stage.step()
    # It was to fill two more blocks in this step, of which `full` has taken one.
    assert (plan.preempted, granted(plan)) == (["victim"], {"full": 1})
    assert stage.cache.match_prefix(request("b", 25, salt="victim")).num_tokens == 16
    plan = stage.step()
    assert (granted(plan), plan.num_computed_tokens) == ({"victim": 8}, [16])


# Row 176: a victim that comes later in the walk was not planned, and is not planned any more.
def test_a_victim_not_yet_planned_gives_nothing_back_and_gets_nothing():
    meter = Meter()
    stage = Stage(policy="priority", num_blocks=5, block_size=4, budgets=[meter], enable_prefix_caching=False)
    stage.add(request("full", 4, priority=1), request("victim", 8, priority=9))
    stage.step()
    stage.add(request("tail", 1, priority=1))
    assert granted(stage.step()) == {"full": 1}
    assert (meter.spent, meter.given_back) == ({"full": 1}, {})
    assert granted(stage.step()) == {"full": 1, "tail": 1}


def test_of_the_equally_urgent_the_latest_gives_way_and_of_those_the_first_admitted():
    policy = ByPriority(CONFIG)
    kv_cache = build_core(CONFIG, CacheConfig(10, (FullAttention(4),))).kv_cache
    urgent = request("urgent", 4, priority=1, arrival_at=9.0)
    early, late, late_too = (
        request(f"r{at}{n}", 4, priority=5, arrival_at=at) for at, n in ((1, 0), (2, 1), (2, 2))
    )
    assert policy.pick_victim([urgent, early, late, late_too], kv_cache) is late
    assert policy.pick_victim([urgent, early], kv_cache) is early
    assert policy.pick_victim([urgent], kv_cache) is urgent


def test_of_equals_who_has_lost_often_enough_gives_way_no_more_if_its_id_is_the_smaller():
    policy = ByPriority(CONFIG)
    kv_cache = build_core(CONFIG, CacheConfig(10, (FullAttention(4),))).kv_cache
    urgent = request("z", 4, priority=1)
    smaller, greater = request("a", 4, priority=5), request("b", 4, priority=5)
    for num_preemptions, victim in ((15, smaller), (16, greater), (17, greater)):
        smaller.num_preemptions = num_preemptions
        assert policy.pick_victim([urgent, smaller, greater], kv_cache) is victim
    # Who has lost little is not asked.
    assert policy.pick_victim([urgent, greater, smaller], kv_cache) is greater
    assert policy.pick_victim([urgent, smaller], kv_cache) is smaller


def test_who_gives_way_returns_to_its_place_and_newcomers_never_preempt():
    policy = ByPriority(CONFIG)
    one = request("a", 4, priority=2, arrival_at=3.0)
    assert policy.order_key(one) == policy.requeue_key(one) == (2, 3.0, "a")
    running = [one, request("b", 4)]
    walk = policy.walk(running, 5)
    assert (walk, walk is running, policy.budgets) == (running, False, ())
    stage = Stage(policy="priority", num_blocks=3, block_size=4)
    stage.add(request("low", 7, priority=9))
    stage.step()
    stage.add(request("high", 7, priority=0))
    assert granted(stage.step()) == {"low": 1}
    assert stage.scheduler.waiting_ids == ["high"]
