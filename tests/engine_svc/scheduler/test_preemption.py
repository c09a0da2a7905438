"""Who gives way when blocks run out, what it loses, and how it comes back."""

from __future__ import annotations

import pytest

from engine_svc.cache.attention import FullAttention, SlidingWindow
from engine_svc.core.request import RequestStatus
from tests.engine_svc.scheduler.fakes import NEW_TOKEN, Stage, granted, request


# Rows 168 and 175.
def test_the_last_admitted_gives_way_and_is_the_first_to_return():
    stage = Stage(num_blocks=7, block_size=4, enable_prefix_caching=False)
    stage.add(*(request(name, 8) for name in "abc"))
    stage.step()
    stage.add(request("newcomer", 8))
    plan = stage.step()
    assert plan.preempted == ["c"]
    assert granted(plan) == {"a": 1, "b": 1}
    assert stage.scheduler.waiting_ids == ["c", "newcomer"]
    stage.scheduler.abort(["a"], now=3.0)
    plan = stage.schedule()
    assert plan.released == ["a"]
    assert plan.admitted[-1].token_ids[-1] == NEW_TOKEN
    assert granted(plan) == {"b": 1, "c": 9}


def test_several_who_give_way_return_in_their_former_order():
    stage = Stage(num_blocks=7, block_size=4, enable_prefix_caching=False)
    stage.add(*(request(name, 8) for name in "abc"))
    stage.step()
    stage.add(request("newcomer", 8))
    preempted = [stage.step().preempted for _ in range(5)]
    assert preempted == [["c"], [], [], [], ["b"]]
    assert stage.scheduler.waiting_ids == ["b", "c", "newcomer"]
    stage.scheduler.abort(["a"], now=9.0)
    assert stage.step().request_ids == ["b"]


def test_who_gives_way_stands_even_before_those_who_came_earlier():
    stage = Stage(num_blocks=5, block_size=4, enable_prefix_caching=False)
    stage.add(request("earlier", 8, blockers=["one"]), request("a", 8), request("b", 8))
    stage.step()
    stage.scheduler.unblock("earlier", "one")
    assert stage.step().preempted == ["b"]
    assert stage.scheduler.waiting_ids == ["b", "earlier"]


# Row 167.
def test_a_step_that_preempts_admits_nobody():
    stage = Stage(num_blocks=7, block_size=4)
    stage.add(*(request(name, 8) for name in "abc"))
    stage.step()
    stage.add(request("small", 1))
    plan = stage.step()
    assert (plan.preempted, plan.admitted) == (["c"], [])
    assert stage.cache.num_free_blocks == 0
    stage.scheduler.abort(["a"], now=3.0)
    assert stage.step().request_ids == ["b", "c"]


def test_a_request_may_have_to_give_way_itself():
    stage = Stage(num_blocks=5, block_size=4, enable_prefix_caching=False)
    stage.add(request("a", 4), request("b", 8))
    stage.step()
    plan = stage.step()
    assert plan.preempted == ["b"]
    assert granted(plan) == {"a": 1}


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


# Row 178.
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_the_answer_is_the_same_with_and_without_preemption(enable_prefix_caching: bool):
    answers = []
    for num_blocks in (6, 100):
        stage = Stage(num_blocks=num_blocks, block_size=4, enable_prefix_caching=enable_prefix_caching)
        requests = [request(name, 6, max_tokens=8) for name in "ab"]
        stage.add(*requests)
        while stage.scheduler.has_work:
            plan = stage.schedule()
            # A model that says a number that depends on all tokens before.
            said = {one.request_id: [1000 + sum(one.token_ids) % 997] for one in requests}
            stage.update(plan, said)
        answers.append([one.output_token_ids for one in requests])
        assert (stage.scheduler.stats().num_preemptions > 0) is (num_blocks == 6)
    assert answers[0] == answers[1]
    assert [len(output) for output in answers[0]] == [8, 8]


# Row 174.
@pytest.mark.parametrize(("reserves", "fifth"), [(True, {}), (False, {"r4": 64})])
def test_with_the_pool_nearly_full_a_large_prompt_enters_only_by_its_first_chunk(
    reserves: bool, fifth: dict[str, int]
):
    stage = Stage(num_blocks=41, long_prefill_token_threshold=64, reserve_full_prompt=reserves)
    stage.add(*(request(f"r{index}", 144) for index in range(4)))
    stage.step()
    stage.step()
    stage.add(request("r4", 144))
    # The four take 36 of 40 blocks. The fifth needs 9 in the end, and 4 for its first chunk.
    assert granted(stage.step()) == {**{f"r{index}": 16 for index in range(4)}, **fifth}


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


def test_what_a_window_has_passed_is_given_back_before_anybody_gives_way():
    stage = Stage(num_blocks=5, groups=[SlidingWindow(4, 5)], max_num_batched_tokens=4)
    stage.add(request("a", 12, max_tokens=8), request("b", 1, max_tokens=2))
    assert granted(stage.step()) == {"a": 4}
    assert granted(stage.step()) == {"a": 4}
    assert granted(stage.step()) == {"a": 4}
    assert stage.cache.num_used_blocks == 2
    assert granted(stage.step()) == {"a": 1, "b": 1}
    assert stage.scheduler.stats().num_preemptions == 0


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
