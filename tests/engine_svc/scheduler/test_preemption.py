"""Who gives way when blocks run out, what it loses, and how it comes back."""

from __future__ import annotations

import pytest

from engine_svc.cache.attention import FullAttention, SlidingWindow
from engine_svc.request import RequestStatus
from tests.engine_svc.scheduler.fakes import Stage, granted, request


def test_who_gives_way_stands_even_before_those_who_came_earlier():
    stage = Stage(num_blocks=5, block_size=4, enable_prefix_caching=False)
    stage.add(request("earlier", 8, blockers=["one"]), request("a", 8), request("b", 8))
    stage.step()
    stage.scheduler.unblock("earlier", "one")
    assert stage.step().preempted == ["b"]
    assert stage.scheduler.waiting_ids == ["b", "earlier"]


# Row 177: refused at the door; who comes in all the same makes no endless loop.
def test_a_lone_request_that_cannot_go_on_gives_way_to_nobody():
    stage = Stage(num_blocks=3, block_size=4)
    stage.add(request("a", 8))
    assert granted(stage.step()) == {"a": 8}
    plan = stage.schedule()
    assert (plan.preempted, plan.request_ids) == (["a"], [])
    assert stage.scheduler.waiting_ids == ["a"]
    assert stage.schedule().request_ids == []


# Row 178.
def test_who_gives_way_loses_its_computed_tokens_and_drafts_and_keeps_its_output():
    stage = Stage(num_blocks=6, block_size=4, num_speculative_tokens=2, enable_prefix_caching=False)
    victim = request("b", 7)
    stage.add(request("a", 11), victim)
    stage.update(stage.schedule(), {"b": [20]}, {"b": [21, 22]})
    assert victim.draft_token_ids == [21, 22]
    plan = stage.schedule()
    assert (plan.preempted, stage.now) == (["b"], 2.0)
    assert (victim.status, victim.num_preemptions) == (RequestStatus.WAITING, 1)
    assert (victim.num_computed_tokens, victim.draft_token_ids, victim.block_tables) == (0, [], [])
    assert victim.output_token_ids == [20]
    assert victim.timeline.events[-1] == ("preempted", 2.0)
    assert stage.scheduler.stats().num_preemptions == 1


# Row 174.
@pytest.mark.parametrize(("reserves", "planned"), [(True, {}), (False, {"a": 16})])
def test_who_can_never_fit_is_not_even_begun(reserves: bool, planned: dict[str, int]):
    """Behaviour 65, seen from the scheduler."""
    stage = Stage(num_blocks=6, max_num_batched_tokens=16, reserve_full_prompt=reserves)
    stage.add(request("a", 256))
    assert granted(stage.step()) == planned


# Row 174.
@pytest.mark.parametrize(("num_blocks", "is_admitted"), [(6, False), (7, True)])
def test_the_whole_prompt_is_counted_with_what_is_held_already(num_blocks: int, is_admitted: bool):
    stage = Stage(num_blocks=num_blocks, block_size=4, max_num_batched_tokens=5)
    stage.add(request("a", 1), request("b", 20))
    assert granted(stage.step()) == ({"a": 1, "b": 4} if is_admitted else {"a": 1})


def test_blocks_that_a_step_in_flight_still_reads_are_not_given_back():
    stage = Stage(groups=[FullAttention(4), SlidingWindow(4, 4)], async_scheduling=True)
    ahead = request("a", 8)
    stage.add(ahead)
    first = stage.schedule()
    stage.schedule()
    # 8 tokens count as computed, but all of them are in flight.
    assert ahead.block_tables[1].num_released == 0
    stage.update(first)
    stage.schedule()
    assert [table.num_released for table in ahead.block_tables] == [0, 1]
