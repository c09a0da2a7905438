"""Resumable requests that are ahead of their tokens, are preempted, or lose their blocks while they wait."""

from __future__ import annotations

import pytest

from engine_svc.core.request import FinishReason, Request, RequestStatus
from tests.engine_svc.scheduler.doubles import Loader
from tests.engine_svc.scheduler.fakes import NEW_TOKEN, STOP, Stage, chunk, granted, request, session


# Behaviour 35, with the next step in flight.
def test_what_is_in_flight_when_a_turn_ends_is_nobodys():
    stage = Stage(async_scheduling=True)
    resumable = session("a", 3)
    resumable.token_ids = [1, 2, 3]
    stage.add(resumable)
    first, second = stage.schedule(), stage.schedule()
    stage.update(first, {"a": [10]})
    third = stage.schedule()
    [output] = stage.update(second, {"a": [STOP]})
    assert (output.finish_reason, output.continues) == (FinishReason.STOP, True)
    assert (resumable.num_computed_tokens, resumable.num_placeholders) == (4, 0)
    stage.scheduler.extend("a", chunk(4, 5), now=3.0)
    assert resumable.token_ids == [1, 2, 3, 10, 4, 5]
    plan = stage.schedule()
    assert (granted(plan), plan.num_computed_tokens) == ({"a": 2}, [4])
    assert stage.update(third, {"a": [99]}) == []
    [output] = stage.update(plan, {"a": [11]})
    assert output.new_token_ids == [11]
    assert resumable.token_ids == [1, 2, 3, 10, 4, 5, 11]
    assert (resumable.num_computed_tokens, resumable.num_placeholders) == (6, 0)


def test_a_chunk_that_waits_begins_while_the_former_turn_is_in_flight():
    stage = Stage(async_scheduling=True, num_speculative_tokens=2)
    resumable = session("a", 3)
    stage.add(resumable)
    stage.scheduler.extend("a", chunk(4, 5), now=0.0)
    first, second = stage.schedule(), stage.schedule()
    [output] = stage.update(first, {"a": [STOP]})
    assert output.continues
    plan = stage.schedule()
    assert (granted(plan), plan.num_computed_tokens, plan.draft_token_ids) == ({"a": 2}, [3], [[]])
    assert stage.update(second, {"a": [97, 98, 99]}) == []
    stage.update(plan, {"a": [11]})
    assert resumable.token_ids[3:] == [4, 5, 11]


def test_a_turn_may_end_for_who_was_preempted_meanwhile():
    stage = Stage(async_scheduling=True)
    resumable = session("a", 3)
    stage.add(resumable)
    plan = stage.schedule()
    assert stage.scheduler.reset_prefix_cache(now=1.0, reset_running=True)
    [output] = stage.update(plan, {"a": [STOP]})
    assert (output.continues, resumable.status) == (True, RequestStatus.BLOCKED)
    assert (resumable.num_computed_tokens, resumable.block_tables) == (0, [])
    stage.scheduler.extend("a", chunk(4, 5), now=2.0)
    plan = stage.schedule()
    assert (granted(plan), plan.num_computed_tokens) == ({"a": 5}, [0])
    assert plan.released == ["a"]


def test_who_is_preempted_in_a_turn_takes_its_chunk_behind_it():
    stage = Stage(num_blocks=5, block_size=4, enable_prefix_caching=False)
    resumable = session("b", 8)
    stage.add(request("a", 4, max_tokens=2), resumable)
    stage.step()
    assert stage.step().preempted == ["b"]
    stage.scheduler.extend("b", chunk(4, 5), now=2.0)
    assert (resumable.status, len(resumable.chunks)) == (RequestStatus.WAITING, 1)
    assert granted(stage.step({"b": [STOP]})) == {"b": 9}
    assert resumable.token_ids[8:] == [NEW_TOKEN, 4, 5]
    assert granted(stage.step()) == {"b": 2}


def _idle_session(stage: Stage, request_id: str, num_tokens: int) -> Request:
    """A session that has said STOP at once, and holds blocks for `num_tokens` tokens."""
    resumable = session(request_id, num_tokens)
    stage.add(resumable)
    stage.step({request_id: [STOP]})
    assert resumable.status is RequestStatus.BLOCKED
    return resumable


# Three usable blocks of four; a session holds one, and a request that runs wants three.
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_an_idle_session_gives_way_before_anybody_is_preempted(enable_prefix_caching: bool):
    stage = Stage(num_blocks=4, block_size=4, enable_prefix_caching=enable_prefix_caching)
    resumable = _idle_session(stage, "idle", 3)
    running = request("a", 8)
    stage.add(running)
    assert granted(stage.step()) == {"a": 8}
    plan = stage.step()
    assert (granted(plan), plan.preempted, plan.new_block_ids) == ({"a": 1}, [], [[[1]]])
    assert (resumable.block_tables, resumable.num_computed_tokens) == ([], 0)
    assert stage.scheduler.stats().num_preemptions == 0
    stage.scheduler.abort(["a"], now=9.0)
    stage.scheduler.extend("idle", chunk(4, 5), now=9.0)
    plan = stage.schedule()
    assert (granted(plan), plan.num_computed_tokens) == ({"idle": 5}, [0])


def test_a_session_that_lost_its_blocks_finds_in_the_cache_what_is_left():
    stage = Stage(num_blocks=4, block_size=4)
    resumable = _idle_session(stage, "idle", 5)
    stage.add(request("a", 8))
    # Its second block is not full, and goes first.
    assert granted(stage.step()) == {"a": 8}
    assert (resumable.block_tables, stage.cache.num_used_blocks) == ([], 2)
    stage.scheduler.abort(["a"], now=9.0)
    stage.scheduler.extend("idle", chunk(4, 5), now=9.0)
    plan = stage.schedule()
    assert (granted(plan), plan.num_computed_tokens) == ({"idle": 3}, [4])


def test_of_idle_sessions_the_one_that_waits_for_the_longest_gives_way():
    stage = Stage(num_blocks=6, block_size=4)
    first, second = _idle_session(stage, "first", 4), _idle_session(stage, "second", 4)
    stage.add(request("a", 12))
    assert granted(stage.step()) == {"a": 12}
    assert [bool(resumable.block_tables) for resumable in (first, second)] == [True, True]
    stage.step()
    assert [bool(resumable.block_tables) for resumable in (first, second)] == [False, True]
    assert stage.scheduler.stats().num_preemptions == 0


def test_who_came_back_in_between_waits_for_the_shorter_time():
    stage = Stage(num_blocks=6, block_size=4)
    first, second = _idle_session(stage, "first", 3), _idle_session(stage, "second", 3)
    stage.scheduler.extend("first", chunk(4), now=3.0)
    stage.step({"first": [STOP]})
    stage.add(request("a", 12))
    stage.step()
    stage.step()
    assert [bool(resumable.block_tables) for resumable in (first, second)] == [True, False]


def test_a_newcomer_takes_the_blocks_of_idle_sessions_only_when_nobody_runs():
    stage = Stage(num_blocks=5, block_size=4)
    resumable = _idle_session(stage, "idle", 8)
    stage.add(request("a", 4, max_tokens=2), request("b", 8))
    assert granted(stage.step()) == {"a": 4}
    assert granted(stage.step()) == {"a": 1}
    assert len(resumable.block_tables) == 1
    # Nobody runs: now the newcomer must get in, or nothing would ever happen.
    assert granted(stage.step()) == {"b": 8}
    assert stage.scheduler.waiting_ids == ["idle"]


def test_just_as_many_idle_sessions_give_way_as_a_newcomer_needs():
    stage = Stage(num_blocks=5, block_size=4)
    sessions = [_idle_session(stage, name, 4) for name in ("first", "second", "third")]
    stage.add(request("a", 12))
    assert granted(stage.step()) == {"a": 12}
    assert [bool(resumable.block_tables) for resumable in sessions] == [False, False, True]


def test_a_session_that_goes_on_takes_the_blocks_of_others_not_its_own():
    stage = Stage(num_blocks=5, block_size=4)
    first, second = _idle_session(stage, "first", 8), _idle_session(stage, "second", 8)
    stage.scheduler.extend("first", chunk(4, 5), now=3.0)
    plan = stage.schedule()
    assert (granted(plan), plan.num_computed_tokens) == ({"first": 2}, [8])
    assert (len(first.block_tables), second.block_tables) == (1, [])


def test_a_session_with_a_chunk_that_does_not_get_in_gives_way_as_well():
    stage = Stage(num_blocks=5, block_size=4, max_num_seqs=1)
    resumable = _idle_session(stage, "idle", 4)
    stage.add(request("a", 8))
    stage.step()
    stage.scheduler.extend("idle", chunk(4, 5), now=3.0)
    assert stage.scheduler.waiting_ids == ["idle"]
    for _ in range(5):
        assert stage.step().preempted == []
    # `a` has 13 tokens: its fourth block was the session's, which is ready but has no place.
    assert (resumable.status, resumable.block_tables) == (RequestStatus.WAITING, [])


def test_a_session_that_waits_for_something_else_too_keeps_its_blocks():
    stage = Stage(num_blocks=4, block_size=4, enable_prefix_caching=False)
    resumable = _idle_session(stage, "idle", 3)
    resumable.blockers.add(Loader.NAME)
    stage.add(request("a", 8))
    stage.step()
    assert stage.step().preempted == ["a"]
    assert len(resumable.block_tables) == 1


def test_a_session_that_ends_between_its_turns_has_nothing_to_give():
    stage = Stage(num_blocks=4, block_size=4, enable_prefix_caching=False)
    _idle_session(stage, "idle", 3)
    stage.scheduler.extend("idle", None, now=2.0)
    stage.add(request("a", 8), request("b", 4))
    assert granted(stage.step()) == {"a": 8, "b": 4}
    assert stage.step().preempted == ["b"]


def test_resetting_the_prefix_cache_takes_the_blocks_of_idle_sessions():
    stage = Stage(block_size=4)
    resumable = _idle_session(stage, "idle", 9)
    assert not stage.scheduler.reset_prefix_cache(now=2.0)
    assert len(resumable.block_tables) == 1
    assert stage.scheduler.reset_prefix_cache(now=2.0, reset_running=True)
    assert (resumable.block_tables, stage.cache.num_used_blocks) == ([], 0)
    stage.scheduler.extend("idle", chunk(4), now=3.0)
    assert granted(stage.step()) == {"idle": 10}


def test_the_queue_knows_how_much_a_session_has_still_to_compute():
    stage = Stage()
    _idle_session(stage, "idle", 9)
    assert stage.scheduler.stats().num_waiting_tokens == 0
    stage.scheduler.extend("idle", chunk(4, 5), now=3.0)
    assert stage.scheduler.stats().num_waiting_tokens == 2


def test_a_session_that_lost_its_blocks_is_no_first_admission():
    stage = Stage(num_blocks=6, block_size=4)
    stage.add(session("a", 10))
    stage.step({"a": [STOP]})
    stage.add(request("b", 16, max_tokens=2))
    stage.step_until_idle()
    stage.scheduler.extend("a", chunk(4, 5, 6), now=9.0)
    stage.step()
    stats = stage.scheduler.stats()
    assert (stats.prefix_queries, stats.preempted_queries) == (26, 13)
