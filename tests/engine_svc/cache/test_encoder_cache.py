"""Items encoded once for many requests: the seams of budgets and hooks carry such a cache (69)."""

from __future__ import annotations

from engine_svc.core.request import ContentSpan, Request
from engine_svc.core.step import StepPlan
from tests.engine_svc.cache.doubles import EncoderCache
from tests.engine_svc.cache.fakes import request, tokens
from tests.engine_svc.scheduler.fakes import Stage, granted


def _stage(cache: EncoderCache) -> Stage:
    return Stage(budgets=[cache], hooks=[cache])


def _with_items(request_id: str, *spans: ContentSpan, max_tokens: int = 1) -> Request:
    return request(request_id, tokens(30), spans=spans, salt=request_id, max_tokens=max_tokens)


def _serve(stage: Stage, *requests: Request) -> StepPlan:
    """Requests come, are computed in one step, and end."""
    stage.add(*requests)
    return stage.step()


def _evicted(plan: StepPlan) -> object:
    return plan.extras[EncoderCache]


def test_69_an_item_takes_room_and_stays_reclaimable_after_its_request():
    cache = EncoderCache(10, 10)
    stage = _stage(cache)
    stage.add(_with_items("a", ContentSpan(5, 4, "four")))
    plan = stage.schedule()
    assert granted(plan) == {"a": 30}
    assert (cache.num_free_tokens, cache.num_reclaimable_tokens, cache.keys) == (6, 6, {"four"})
    stage.update(plan)
    assert (cache.num_free_tokens, cache.num_reclaimable_tokens, cache.keys) == (6, 10, {"four"})


def test_69_what_is_still_there_is_not_encoded_again():
    cache = EncoderCache(10, 4)
    stage = _stage(cache)
    _serve(stage, _with_items("a", ContentSpan(5, 4, "four")))
    stage.add(_with_items("b", ContentSpan(8, 4, "four")), _with_items("c", ContentSpan(5, 4, "other")))
    # The encoder has 4 tokens a step: were the first item encoded again, the second would have to wait.
    assert granted(stage.schedule()) == {"b": 30, "c": 30}
    assert (cache.num_free_tokens, cache.num_reclaimable_tokens) == (2, 2)


def test_69_an_item_that_nobody_needs_makes_room_and_is_named():
    cache = EncoderCache(10, 10)
    stage = _stage(cache)
    assert _evicted(_serve(stage, _with_items("a", ContentSpan(5, 6, "six")))) == []
    assert (cache.num_free_tokens, cache.num_reclaimable_tokens) == (4, 10)
    plan = _serve(stage, _with_items("b", ContentSpan(5, 5, "five")))
    assert _evicted(plan) == ["six"]
    assert (cache.num_free_tokens, cache.keys) == (5, {"five"})


def test_69_an_item_that_is_needed_makes_no_room():
    cache = EncoderCache(10, 10)
    stage = _stage(cache)
    stage.add(_with_items("a", ContentSpan(5, 6, "six")), _with_items("b", ContentSpan(7, 5, "five")))
    plan = stage.schedule()
    # The second request is computed up to its item, and goes on when there is room.
    assert granted(plan) == {"a": 30, "b": 7}
    stage.update(plan)
    plan = stage.schedule()
    assert (granted(plan), _evicted(plan)) == ({"b": 23}, ["six"])


def test_69_a_step_encodes_so_much_and_no_more():
    cache = EncoderCache(20, 10)
    stage = _stage(cache)
    stage.add(_with_items("a", ContentSpan(3, 5, "five"), ContentSpan(12, 6, "six")))
    plan = stage.schedule()
    assert (granted(plan), cache.keys) == ({"a": 12}, {"five"})
    stage.update(plan)
    assert granted(stage.schedule()) == {"a": 18}
    assert cache.keys == {"five", "six"}


def test_69_an_item_that_stands_twice_in_a_prompt_is_one_item_and_leaves_as_one():
    cache = EncoderCache(10, 10)
    stage = _stage(cache)
    stage.add(_with_items("a", ContentSpan(3, 6, "six"), ContentSpan(12, 6, "six")))
    plan = stage.schedule()
    assert granted(plan) == {"a": 30}
    assert (cache.num_free_tokens, cache.num_reclaimable_tokens) == (4, 4)
    stage.update(plan)
    assert (cache.num_free_tokens, cache.num_reclaimable_tokens) == (4, 10)
    assert _evicted(_serve(stage, _with_items("b", ContentSpan(3, 10, "ten")))) == ["six"]
    assert cache.keys == {"ten"}


def test_69_of_several_unneeded_items_the_oldest_goes_first_and_no_more_than_needed():
    cache = EncoderCache(10, 10)
    stage = _stage(cache)
    for name in ("first", "second", "third"):
        _serve(stage, _with_items(name, ContentSpan(5, 3, name)))
    assert (cache.num_free_tokens, cache.num_reclaimable_tokens) == (1, 10)
    assert _evicted(_serve(stage, _with_items("d", ContentSpan(5, 4, "fourth")))) == ["first"]
    assert cache.keys == {"second", "third", "fourth"}


def test_69_two_requests_share_an_item_until_both_have_ended():
    cache = EncoderCache(10, 10)
    stage = _stage(cache)
    stage.add(
        _with_items("a", ContentSpan(5, 6, "six")), _with_items("b", ContentSpan(9, 6, "six"), max_tokens=9)
    )
    plan = stage.schedule()
    assert granted(plan) == {"a": 30, "b": 30}
    stage.update(plan)
    assert cache.num_reclaimable_tokens == 4
    stage.scheduler.abort(["b"], stage.now)
    assert (cache.num_free_tokens, cache.num_reclaimable_tokens) == (4, 10)


def test_69_a_row_behind_a_hit_is_clipped_from_where_it_begins():
    cache = EncoderCache(10, 10)
    stage = _stage(cache)
    stage.add(request("a", tokens(33), max_tokens=1))
    stage.step()
    # 32 tokens are cached, and the item at 40 is larger than what the encoder can do in a step.
    stage.add(request("b", tokens(60), max_tokens=1, spans=(ContentSpan(40, 12, "large"),)))
    assert granted(stage.schedule()) == {"b": 8}
    assert (cache.num_free_tokens, cache.keys) == (10, set())
