"""Holding back all or only the new, and forgetting what is cached."""

from __future__ import annotations

from engine_svc.scheduler.config import PauseState
from tests.engine_svc.scheduler.doubles import Loader
from tests.engine_svc.scheduler.fakes import Stage, granted, request


def test_pausing_admissions_lets_the_running_go_on():
    stage = Stage()
    stage.add(request("a", 8))
    stage.step()
    stage.add(request("b", 8))
    stage.scheduler.set_pause(PauseState.NEW)
    assert stage.scheduler.has_work
    assert granted(stage.step()) == {"a": 1}
    stage.scheduler.abort(["a"], now=2.0)
    assert not stage.scheduler.has_work
    stage.scheduler.set_pause(PauseState.NONE)
    assert stage.scheduler.has_work
    assert granted(stage.step()) == {"b": 8}


def test_pausing_all_plans_nothing_until_resumed():
    stage = Stage()
    stage.add(request("a", 8))
    stage.step()
    stage.add(request("b", 8))
    stage.scheduler.set_pause(PauseState.ALL)
    assert not stage.scheduler.has_work
    assert stage.schedule().request_ids == []
    stage.scheduler.set_pause(PauseState.NONE)
    assert granted(stage.schedule()) == {"a": 1, "b": 8}


def test_what_is_in_flight_when_a_pause_begins_still_comes_back():
    stage = Stage()
    running = request("a", 8)
    stage.add(running)
    plan = stage.schedule()
    stage.scheduler.set_pause(PauseState.ALL)
    assert stage.schedule().request_ids == []
    assert len(stage.update(plan)) == 1
    assert running.num_output_tokens == 1


def test_who_ends_in_a_pause_is_released_with_the_next_step():
    stage = Stage()
    stage.add(request("a", 8), request("b", 8))
    stage.step()
    stage.scheduler.set_pause(PauseState.ALL)
    stage.scheduler.abort(["a"], now=2.0)
    assert stage.schedule().released == []
    stage.scheduler.set_pause(PauseState.NONE)
    assert stage.schedule().released == ["a"]
    assert stage.schedule().released == []


# Behaviour 21.
def test_the_prefix_cache_is_not_reset_under_running_requests():
    stage = Stage()
    requests = [request(f"r{index}", 20) for index in range(10)]
    stage.add(*requests)
    stage.step()
    assert not stage.scheduler.reset_prefix_cache(now=2.0)
    assert len(stage.scheduler.running_ids) == 10
    assert stage.scheduler.reset_prefix_cache(now=2.0, reset_running=True)
    assert stage.scheduler.running_ids == []
    assert stage.scheduler.waiting_ids == [f"r{index}" for index in range(10)]
    assert stage.cache.num_used_blocks == 0
    plan = stage.schedule()
    assert plan.released == [f"r{index}" for index in reversed(range(10))]
    # Nothing of what they had computed is found again.
    assert plan.num_tokens == [21] * 10
    assert all(one.timeline.events[-2:] == [("preempted", 2.0), ("resumed", 2.0)] for one in requests)


def test_a_reset_that_is_refused_all_the_same_leaves_what_was_computed_to_be_found():
    loader = Loader({"remote": 4})
    stage = Stage(block_size=4, hooks=[loader])
    loader.reserve = stage.cache.reserve
    stage.add(request("remote", 5), request("a", 8))
    stage.step()
    # Blocks into which KV may be on its way are not taken.
    assert not stage.scheduler.reset_prefix_cache(now=2.0, reset_running=True)
    plan = stage.schedule()
    assert (granted(plan), plan.num_computed_tokens) == ({"a": 1}, [8])


def test_with_nobody_running_the_prefix_cache_is_reset_at_once():
    stage = Stage()
    stage.add(request("a", 20, max_tokens=1, salt="same"))
    stage.step_until_idle()
    assert stage.scheduler.reset_prefix_cache(now=2.0)
    stage.add(request("b", 20, salt="same"))
    assert granted(stage.step()) == {"b": 20}
