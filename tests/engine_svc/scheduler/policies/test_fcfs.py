"""Which request gives way, by priority and by least work; recorded cases have the order of arrival."""

from __future__ import annotations

from engine_svc.build.engine import Core, build_core
from engine_svc.cache.attention import FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.core.request import Request
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.scheduler.policies.least_recompute import LeastRecompute
from engine_svc.scheduler.policies.priority import ByPriority
from tests.engine_svc.scheduler.doubles import AtMost
from tests.engine_svc.scheduler.fakes import Stage, granted, ids_of, request

CONFIG = SchedulerConfig(max_model_len=64)


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


def test_of_equals_who_has_lost_often_enough_gives_way_no_more_if_its_id_is_the_smaller():
    policy = ByPriority(CONFIG)
    kv_cache = build_core(CONFIG, CacheConfig(10, (FullAttention(4),))).kv_cache
    urgent = request("z", 4, priority=1)
    smaller, greater = request("a", 4, priority=5), request("b", 4, priority=5)
    for num_preemptions, victim in ((15, smaller), (16, greater), (17, greater)):
        smaller.num_preemptions = num_preemptions
        assert policy.pick_victim([urgent, smaller, greater], kv_cache) is victim
    # A request that has lost little is not asked.
    assert policy.pick_victim([urgent, greater, smaller], kv_cache) is greater
    assert policy.pick_victim([urgent, smaller], kv_cache) is smaller


# When blocks run out, as little work as possible is lost.

_LONG = SchedulerConfig(max_model_len=256)


def _core() -> Core:
    return build_core(_LONG, CacheConfig(100, (FullAttention(4),)))


def _running(core: Core, request_id: str, num_tokens: int, salt: str | None = None) -> Request:
    """A request that has blocks for its tokens, all of them computed."""
    running = request(request_id, num_tokens, salt=salt)
    hit = core.kv_cache.match_prefix(running)
    assert core.kv_cache.admit(running, hit, num_tokens - hit.num_tokens, reserve_all=False) is not None
    running.num_computed_tokens = num_tokens
    return running


def _victim(core: Core, *running: Request) -> str:
    return LeastRecompute(_LONG).pick_victim(running, core.kv_cache).request_id


def test_who_has_just_been_given_a_block_loses_the_fewest_tokens_for_each():
    core = _core()
    # 12 tokens for 3 blocks, 9 for 3, 8 for 2.
    running = [
        _running(core, name, num) for name, num in (("first", 4), ("full", 12), ("begun", 9), ("even", 8))
    ]
    assert _victim(core, *running) == "begun"


def test_of_equals_the_last_admitted_gives_way():
    core = _core()
    running = [_running(core, name, num) for name, num in (("first", 1), ("a", 8), ("b", 8), ("c", 12))]
    assert _victim(core, *running) == "c"
    assert _victim(core, *running[:3]) == "b"


def test_who_shares_its_beginning_with_others_loses_only_the_rest():
    core = _core()
    shared = [_running(core, name, 17, salt="same") for name in ("first", "a")]
    alone = _running(core, "alone", 6)
    # `a` shares 4 blocks of 5, so it loses a token and frees a block; `alone` loses 3 a block.
    assert core.kv_cache.cost_of_release(shared[1]) == (1, 1)
    assert core.kv_cache.cost_of_release(alone) == (6, 2)
    assert _victim(core, shared[0], alone, shared[1]) == "a"
    assert _victim(core, shared[0], shared[1], alone) == "a"


def test_who_would_free_nothing_does_not_give_way():
    core = _core()
    first, all_shared, alone = (
        _running(core, name, num, salt)
        for name, num, salt in (("first", 8, "same"), ("a", 8, "same"), ("b", 8, None))
    )
    # A holder more of its last block, so that nothing of it would become free.
    core.kv_cache.pool.hold(all_shared.block_tables[0].block_ids)
    assert core.kv_cache.cost_of_release(all_shared)[1] == 0
    assert _victim(core, first, alone, all_shared) == "b"
    assert _victim(core, first, all_shared) == "a"


def test_the_first_admitted_is_spared_while_there_is_another():
    core = _core()
    cheap, dear = _running(core, "cheap", 1), _running(core, "dear", 40)
    assert _victim(core, cheap, dear) == "dear"
    assert _victim(core, cheap) == "cheap"


def test_running_requests_are_served_in_order_of_admission():
    policy = LeastRecompute(_LONG)
    running = [request(name, 4) for name in "abc"]
    walk = policy.walk(running, 0)
    assert (ids_of(walk), walk is running, policy.budgets) == (["a", "b", "c"], False, ())


def test_who_comes_stands_behind_all_and_who_returns_before_all():
    policy = LeastRecompute(_LONG)
    one = request("a", 4)
    first, second = policy.order_key(one), policy.order_key(one)
    assert policy.requeue_key(one) < first < second


def test_a_victim_in_the_middle_gives_way_and_the_others_go_on():
    stage = Stage(policy="least-recompute", num_blocks=9, block_size=4, enable_prefix_caching=False)
    stage.add(request("first", 8), request("cheap", 5), request("last", 16))
    assert granted(stage.step()) == {"first": 8, "cheap": 5, "last": 16}
    plan = stage.step()
    # `first` wants a third block: `cheap` loses 5 tokens for 2, `last` would lose 16 for 4.
    assert plan.preempted == ["cheap"]
    assert granted(plan) == {"first": 1, "last": 1}
    assert stage.scheduler.waiting_ids == ["cheap"]
    assert stage.cache.num_free_blocks == 0


def test_a_victim_already_planned_is_taken_out_of_the_plan():
    stage = Stage(policy="least-recompute", num_blocks=8, block_size=4, enable_prefix_caching=False)
    stage.add(request("first", 5), request("cheap", 6), request("full", 12))
    stage.step()
    plan = stage.step()
    assert plan.preempted == ["cheap"]
    assert (plan.request_ids, plan.num_computed_tokens) == (["first", "full"], [5, 12])
    assert plan.new_block_ids[1] != []
