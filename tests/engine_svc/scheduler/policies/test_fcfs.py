"""First come, first served."""

from __future__ import annotations

from engine_svc.build.engine import build_core
from engine_svc.cache.attention import FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.scheduler.policies.fcfs import FirstComeFirstServed
from tests.engine_svc.scheduler.fakes import Stage, request

CONFIG = SchedulerConfig(max_model_len=64)


def test_each_who_comes_stands_behind_all_and_each_who_returns_before_all():
    policy = FirstComeFirstServed(CONFIG)
    one = request("a", 4)
    came = [policy.order_key(one) for _ in range(3)]
    returned = [policy.requeue_key(one) for _ in range(3)]
    assert [*reversed(returned), *came] == sorted([*came, *returned])
    assert len({*came, *returned}) == 6
    assert policy.budgets == ()


def test_running_requests_are_served_in_order_of_admission_and_the_last_gives_way():
    policy = FirstComeFirstServed(CONFIG)
    running = [request(name, 4) for name in "abc"]
    walk = policy.walk(running, 0)
    assert walk == running
    assert walk is not running
    kv_cache = build_core(CONFIG, CacheConfig(10, (FullAttention(4),))).kv_cache
    assert policy.pick_victim(running, kv_cache) is running[2]


def test_neither_urgency_nor_times_matter():
    stage = Stage(max_num_seqs=2)
    stage.add(
        request("a", 8, priority=9, arrival_at=3.0),
        request("b", 8, arrival_at=2.0),
        request("c", 8, priority=-1),
    )
    assert stage.step().request_ids == ["a", "b"]
    assert stage.scheduler.waiting_ids == ["c"]
