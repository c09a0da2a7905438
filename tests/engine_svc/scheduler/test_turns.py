"""Resumable requests: a turn ends, the request waits with its KV, the next segment continues it."""

from __future__ import annotations

import pytest

from engine_svc.core.extras import Extra, Extras
from engine_svc.core.request import FinishReason, InputSegment, PrefillStats, Request, RequestStatus
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.scheduler.feature import SchedulerFeature
from engine_svc.scheduler.turns import INPUT, begin_turn, settle_turn
from tests.engine_svc.core_state import num_unfinished
from tests.engine_svc.scheduler.doubles import Loader, item
from tests.engine_svc.scheduler.fakes import EOS, NEW_TOKEN, STOP, Stage, granted, request, segment, session


def _after_first_turn(**options: object) -> tuple[Stage, Request]:
    stage = Stage(**options)
    resumable = session("a", 3)
    resumable.token_ids = [1, 2, 3]
    stage.add(resumable)
    stage.step({"a": [10]})
    stage.step({"a": [STOP]})
    return stage, resumable


# Behaviour 35, row 187.
def test_a_segment_takes_the_place_of_the_token_that_was_sampled_last():
    stage = Stage()
    resumable = session("a", 3)
    resumable.token_ids = [1, 2, 3]
    stage.add(resumable)
    stage.step({"a": [10]})
    [output] = stage.update(stage.schedule(), {"a": [STOP]})
    assert (output.finish_reason, output.stop_token_id, output.continues) == (FinishReason.STOP, STOP, True)
    assert (resumable.status, resumable.blockers) == (RequestStatus.BLOCKED, {INPUT})
    assert (stage.scheduler.has_work, stage.scheduler.stats().num_blocked) == (False, 1)
    assert resumable.num_computed_tokens == 4
    assert stage.scheduler.extend("a", segment(4, 5), now=3.0) == []
    assert resumable.token_ids == [1, 2, 3, 10, 4, 5]
    assert (resumable.num_computed_tokens, resumable.num_output_tokens) == (4, 0)
    assert stage.scheduler.has_work
    plan = stage.schedule()
    assert (granted(plan), plan.num_computed_tokens, plan.samples) == ({"a": 2}, [4], [True])
    [output] = stage.update(plan, {"a": [11]})
    assert (output.new_token_ids, output.finish_reason, output.continues) == ([11], None, False)
    assert resumable.output_token_ids == [11]


def test_between_turns_a_request_keeps_its_blocks_and_gives_up_its_row():
    stage, resumable = _after_first_turn(block_size=4)
    assert stage.cache.num_used_blocks == 1
    stage.scheduler.extend("a", segment(4, 5), now=3.0)
    plan = stage.schedule()
    assert plan.released == ["a"]
    [admitted] = plan.admitted
    assert (admitted.token_ids, admitted.num_prompt_tokens) == ([1, 2, 3, 10, 4, 5], 6)
    assert (admitted.block_ids, plan.new_block_ids) == ([[1]], [[[2]]])
    assert admitted.sampling is resumable.sampling
    assert stage.scheduler.stats().prefix_queries == 3


def test_a_segment_that_fits_the_blocks_that_are_there_takes_none():
    stage, _ = _after_first_turn(block_size=8)
    stage.scheduler.extend("a", segment(4, 5), now=3.0)
    plan = stage.schedule()
    assert plan.admitted[0].block_ids == [[1]]
    assert [ids for gained in plan.new_block_ids for ids in gained if ids] == []


def test_each_turn_has_limits_of_its_own():
    stage, resumable = _after_first_turn()
    stage.scheduler.extend("a", segment(4, 5, max_tokens=2), now=3.0)
    assert resumable.max_num_tokens == 8
    assert resumable.end_token_ids == {STOP}
    outputs = [stage.update(stage.schedule(), {"a": [token]})[0] for token in (EOS, 12)]
    # The end token of the first turn ends nothing in the second.
    assert [output.finish_reason for output in outputs] == [None, FinishReason.LENGTH]
    assert [output.continues for output in outputs] == [False, True]
    assert resumable.token_ids == [1, 2, 3, 10, 4, 5, EOS]


def test_each_turn_has_times_and_a_first_output_of_its_own():
    stage, resumable = _after_first_turn()
    assert resumable.timeline.finished_at == 2.0
    stage.scheduler.extend("a", segment(4, 5), now=2.5)
    [output] = stage.update(stage.schedule())
    assert output.num_cached_tokens == resumable.num_cached_tokens == 4
    assert output.first.prefill == PrefillStats(num_prompt_tokens=6, num_chunks=1, queue_s=0.5, prefill_s=0.0)
    assert resumable.timeline.events == [("scheduled", 3.0), ("first_token", 3.0)]
    assert (resumable.timeline.queued_at, resumable.finish_reason) == (2.5, None)


class _Turns(SchedulerFeature):
    """Notes the hooks of requests and turns, with their extras; blocks a turn that has any."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, Extras]] = []

    def on_add(self, request: Request) -> None:
        self.calls.append(("add", request.num_tokens, request.extras))
        request.blockers |= {"extras"} if request.extras else set()

    def on_finish(self, request: Request) -> None:
        self.calls.append(("finish", request.num_tokens, request.extras))


def test_to_features_a_turn_is_as_a_request():
    hooks, extra = _Turns(), {Extra: Extra()}
    stage, resumable = _after_first_turn(features=[hooks])
    stage.scheduler.extend("a", InputSegment([4, 5], SamplingParams(max_tokens=1), extras=extra), now=3.0)
    assert (resumable.status, resumable.blockers) == (RequestStatus.BLOCKED, {"extras"})
    stage.scheduler.unblock("a", "extras")
    stage.step()
    stage.scheduler.extend("a", None, now=4.0)
    assert hooks.calls == [
        ("add", 3, {}), ("finish", 5, {}), ("add", 6, extra), ("finish", 7, extra), ("finish", 6, extra),
    ]  # fmt: skip


@pytest.mark.parametrize(("key", "num_cached"), [("image", 12), ("other image", 8)])
def test_the_spans_of_a_segment_count_from_its_start(key: str, num_cached: int):
    stage, resumable = Stage(block_size=4), session("a", 6)
    stage.add(resumable)
    stage.step({"a": [STOP]})
    further = InputSegment([5] * 8, SamplingParams(max_tokens=1), spans=item(3, 2, "image"))
    stage.scheduler.extend("a", further, now=3.0)
    stage.step()
    assert resumable.spans == item(9, 2, "image")
    same = request("b", 15, salt="a")
    same.token_ids[6:14], same.spans = [5] * 8, item(9, 2, key)
    stage.add(same)
    assert stage.schedule().num_computed_tokens == [num_cached]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_next_token_is_the_last_of_a_turn_that_is_cancelled(async_scheduling: bool):
    stage = Stage(async_scheduling=async_scheduling)
    resumable = session("a", 3)
    stage.add(resumable)
    stage.step()
    plan = stage.schedule()
    stage.scheduler.cancel_turn("a")
    [output] = stage.update(plan)
    assert (output.finish_reason, output.continues) == (FinishReason.ABORT, True)
    stage.scheduler.cancel_turn("a")
    stage.scheduler.extend("a", segment(4, 5), now=3.0)
    [output] = stage.update(stage.schedule())
    assert (output.finish_reason, resumable.output_token_ids) == (None, [NEW_TOKEN])


def test_a_cancelled_turn_whose_next_token_is_a_stop_token_stops():
    stage = Stage()
    stage.add(session("a", 3))
    stage.scheduler.cancel_turn("a")
    [output] = stage.update(stage.schedule(), {"a": [STOP]})
    assert (output.finish_reason, output.stop_token_id) == (FinishReason.STOP, STOP)


def test_the_last_turn_can_be_cancelled():
    stage = Stage()
    stage.add(session("a", 3))
    assert stage.scheduler.extend("a", None, now=2.0) == []
    stage.scheduler.cancel_turn("a")
    [output] = stage.update(stage.schedule())
    assert (output.finish_reason, output.continues) == (FinishReason.ABORT, False)


def test_resumable_requests_and_idle_ones_are_counted():
    stage = Stage()
    counts = []
    stage.add(session("a", 3), session("b", 3), request("c", 3))
    for call in (
        lambda: stage.step({"a": [STOP], "b": [STOP]}),
        lambda: stage.scheduler.extend("a", segment(4), now=2.0),
        lambda: stage.scheduler.abort(["a", "c"], now=3.0),
        lambda: stage.scheduler.extend("b", None, now=4.0),
    ):
        counts.append((stage.scheduler.stats().num_resumable, stage.scheduler.stats().num_idle))
        call()
    counts.append((stage.scheduler.stats().num_resumable, stage.scheduler.stats().num_idle))
    assert counts == [(2, 0), (2, 2), (2, 1), (1, 1), (0, 0)]


def test_a_segment_that_comes_before_its_turn_waits_for_it():
    stage = Stage()
    resumable = session("a", 3)
    stage.add(resumable)
    stage.step({"a": [10]})
    assert stage.scheduler.extend("a", segment(4, 5), now=2.0) == []
    assert stage.scheduler.extend("a", segment(6), now=2.0) == []
    assert (resumable.num_tokens, len(resumable.segments)) == (4, 2)
    [output] = stage.update(stage.schedule(), {"a": [STOP]})
    assert (output.finish_reason, output.continues) == (FinishReason.STOP, True)
    assert (resumable.status, resumable.token_ids[-3:]) == (RequestStatus.WAITING, [10, 4, 5])
    assert granted(stage.step({"a": [STOP]})) == {"a": 2}
    assert resumable.token_ids[-3:] == [4, 5, 6]
    assert granted(stage.step()) == {"a": 1}
    assert len(resumable.segments) == 0


def test_a_segment_for_a_session_that_never_ran_waits_as_well():
    stage = Stage()
    resumable = session("a", 3)
    stage.add(resumable)
    stage.scheduler.extend("a", segment(4, 5), now=0.0)
    assert resumable.num_tokens == 3
    assert granted(stage.step({"a": [STOP]})) == {"a": 3}
    assert granted(stage.step()) == {"a": 2}


# Behaviour 36.
def test_the_end_marker_ends_a_session_that_waits_for_input():
    stage, resumable = _after_first_turn()
    [output] = stage.scheduler.extend("a", None, now=3.0)
    assert (output.request_id, output.finish_reason) == ("a", FinishReason.ABORT)
    assert (output.new_token_ids, output.continues, output.num_cached_tokens) == ([], False, None)
    assert (resumable.status, resumable.timeline.finished_at) == (RequestStatus.FINISHED, 3.0)
    assert (num_unfinished(stage.scheduler), stage.cache.num_used_blocks) == (0, 0)
    assert stage.scheduler.waiting_ids == []


# Behaviour 36, while the turn still runs.
def test_the_end_marker_lets_the_turn_that_runs_come_to_its_end():
    stage = Stage()
    resumable = session("a", 3)
    stage.add(resumable)
    stage.step({"a": [10]})
    assert stage.scheduler.extend("a", None, now=2.0) == []
    [output] = stage.update(stage.schedule(), {"a": [STOP]})
    assert (output.finish_reason, output.continues) == (FinishReason.STOP, False)
    assert resumable.output_token_ids == [10, STOP]
    assert num_unfinished(stage.scheduler) == 0


# Behaviour 36, behind segments that wait.
def test_the_end_marker_stands_behind_the_segments_that_came_before_it():
    stage = Stage()
    stage.add(session("a", 3))
    stage.step({"a": [10]})
    stage.scheduler.extend("a", segment(4, 5), now=2.0)
    assert stage.scheduler.extend("a", None, now=2.0) == []
    [output] = stage.update(stage.schedule(), {"a": [STOP]})
    assert output.continues
    [output] = stage.update(stage.schedule(), {"a": [STOP]})
    assert (output.finish_reason, output.continues) == (FinishReason.STOP, False)
    assert num_unfinished(stage.scheduler) == 0


# Behaviour 36, before a segment: that one is refused at the door.
def test_behind_the_end_marker_comes_nothing():
    stage = Stage()
    stage.add(session("a", 3))
    stage.step({"a": [10]})
    stage.scheduler.extend("a", None, now=2.0)
    assert stage.scheduler.segment_refusal("a", segment(4)) == "the request is not open for further input"


def test_input_for_who_is_not_there_is_ignored():
    stage = Stage()
    assert stage.scheduler.extend("a", segment(4), now=0.0) == []
    assert stage.scheduler.extend("a", None, now=0.0) == []


def test_a_session_can_be_aborted_between_its_turns_and_within_one():
    for token in (10, STOP):
        stage = Stage()
        resumable = session("a", 3)
        stage.add(resumable)
        stage.step({"a": [token]})
        stage.scheduler.extend("b", segment(4), now=1.0)
        [output] = stage.scheduler.abort(["a"], now=2.0)
        assert (output.finish_reason, resumable.is_finished) == (FinishReason.ABORT, True)
        assert (num_unfinished(stage.scheduler), stage.cache.num_used_blocks) == (0, 0)


def test_an_abort_drops_the_segments_that_wait():
    stage = Stage()
    stage.add(session("a", 3))
    plan = stage.schedule()
    stage.scheduler.extend("a", segment(4), now=1.0)
    stage.scheduler.abort(["a"], now=1.0)
    assert stage.update(plan, {"a": [STOP]}) == []
    assert (num_unfinished(stage.scheduler), stage.scheduler.has_work) == (0, False)


def test_who_goes_on_stands_before_who_has_not_begun():
    stage, _ = _after_first_turn(max_num_seqs=1)
    stage.add(request("b", 8))
    stage.scheduler.extend("a", segment(4, 5), now=3.0)
    assert stage.scheduler.waiting_ids == ["a", "b"]
    assert granted(stage.step()) == {"a": 2}


def test_who_is_between_two_turns_stands_even_before_those_who_came_earlier():
    stage = Stage()
    stage.add(request("earlier", 8, blockers=["one"]), session("a", 3))
    stage.step({"a": [STOP]})
    assert stage.scheduler.waiting_ids == ["a", "earlier"]


def test_under_priority_who_goes_on_stands_where_it_stood():
    stage, _ = _after_first_turn(policy="priority", max_num_seqs=1)
    stage.add(request("b", 8, priority=-1), request("c", 8, priority=1))
    assert stage.scheduler.waiting_ids == ["b", "a", "c"]
    stage.scheduler.extend("a", segment(4, 5), now=3.0)
    assert stage.scheduler.waiting_ids == ["b", "a", "c"]


def test_a_turn_that_ends_among_drafts_keeps_no_more_than_was_said():
    stage = Stage(num_speculative_tokens=3, block_size=4)
    resumable = session("a", 4)
    stage.add(resumable)
    stage.update(stage.schedule(), {"a": [10]}, {"a": [11, STOP, 13]})
    [output] = stage.update(stage.schedule(), {"a": [11, STOP, 13, 14]}, {"a": [15]})
    assert (output.new_token_ids, output.continues) == ([11, STOP], True)
    assert resumable.token_ids[4:] == [10, 11]
    assert (resumable.num_computed_tokens, resumable.draft_token_ids) == (6, [])
    stage.scheduler.extend("a", segment(4, 5, 6), now=3.0)
    plan = stage.schedule()
    assert (granted(plan), plan.num_computed_tokens, plan.draft_token_ids) == ({"a": 3}, [6], [[]])


def test_what_was_said_last_is_never_found_in_the_cache():
    stage = Stage(block_size=4)
    resumable = session("a", 3)
    stage.add(resumable)
    stage.step({"a": [STOP]})
    # With it the block is full, but it was dropped before it had KV.
    stage.scheduler.extend("a", segment(4, 5, 6, 7, 8), now=2.0)
    stage.step()
    found = []
    for fourth in (STOP, 4):
        follower = request("b", 3, salt="a")
        follower.token_ids += [fourth, 5]
        found.append(stage.cache.match_prefix(follower).num_tokens)
    assert found == [0, 4]


def test_a_turn_that_ends_with_a_full_block_hashes_what_takes_its_place():
    resumable = session("a", 8)
    resumable.block_hashes = [b"one", b"two"]
    resumable.num_computed_tokens = 7
    settle_turn(resumable, hash_block_size=4)
    assert (resumable.num_tokens, resumable.block_hashes, resumable.num_computed_tokens) == (7, [b"one"], 7)
    begin_turn(resumable, segment(4, 5, max_tokens=3), max_model_len=100, now=0.0)
    assert (resumable.token_ids[-2:], resumable.num_prompt_tokens, resumable.num_tokens) == ([4, 5], 9, 9)
    assert (resumable.max_num_tokens, resumable.sampling.max_tokens) == (12, 3)


@pytest.mark.parametrize(
    ("num_computed", "num_placeholders", "kept"),
    [(9, 0, 8), (9, 1, 8), (10, 3, 7), (8, 0, 8), (7, 0, 7), (0, 0, 0)],
)
def test_a_turn_that_ends_keeps_what_is_computed_and_known(num_computed, num_placeholders, kept):
    resumable = session("a", 9)
    resumable.num_computed_tokens, resumable.num_placeholders = num_computed, num_placeholders
    resumable.draft_token_ids = [5]
    resumable.block_hashes = [b"one", b"two"]
    settle_turn(resumable, hash_block_size=4)
    assert (resumable.num_computed_tokens, resumable.num_placeholders) == (kept, 0)
    assert (resumable.draft_token_ids, resumable.block_hashes) == ([], [b"one", b"two"])


def test_all_turns_together_end_with_exactly_one_output_that_does_not_continue():
    stage = Stage()
    resumable = session("a", 3, max_tokens=2)
    stage.add(resumable)
    for last in range(3):
        stage.scheduler.extend("a", segment(4 + last, max_tokens=2), now=0.0)
    stage.scheduler.extend("a", None, now=0.0)
    outputs = []
    while stage.scheduler.has_work:
        outputs += stage.update(stage.schedule())
    ends = [output for output in outputs if output.finish_reason is not None]
    assert [output.continues for output in ends] == [True, True, True, False]
    assert resumable.token_ids[3:] == [NEW_TOKEN, 4, NEW_TOKEN, 5, NEW_TOKEN, 6, NEW_TOKEN, NEW_TOKEN]
    assert stage.cache.num_used_blocks == 0


# Resumable requests that are ahead of their tokens, are preempted, or lose their blocks while they wait.


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
    stage.scheduler.extend("a", segment(4, 5), now=3.0)
    assert resumable.token_ids == [1, 2, 3, 10, 4, 5]
    plan = stage.schedule()
    assert (granted(plan), plan.num_computed_tokens) == ({"a": 2}, [4])
    assert stage.update(third, {"a": [99]}) == []
    [output] = stage.update(plan, {"a": [11]})
    assert output.new_token_ids == [11]
    assert resumable.token_ids == [1, 2, 3, 10, 4, 5, 11]
    assert (resumable.num_computed_tokens, resumable.num_placeholders) == (6, 0)


def test_a_segment_that_waits_begins_while_the_former_turn_is_in_flight():
    stage = Stage(async_scheduling=True, num_speculative_tokens=2)
    resumable = session("a", 3)
    stage.add(resumable)
    stage.scheduler.extend("a", segment(4, 5), now=0.0)
    first, second = stage.schedule(), stage.schedule()
    [output] = stage.update(first, {"a": [STOP]})
    assert output.continues
    plan = stage.schedule()
    assert (granted(plan), plan.num_computed_tokens, plan.draft_token_ids) == ({"a": 2}, [3], [[]])
    assert stage.update(second, {"a": [97, 98, 99]}) == []
    stage.update(plan, {"a": [11]})
    assert resumable.token_ids[3:] == [4, 5, 11]


def test_what_a_turn_has_computed_stays_cached_if_the_steps_behind_it_are_rolled_back():
    stage = Stage(async_scheduling=True, block_size=4)
    stage.add(session("a", 3))
    first, second = stage.schedule(), stage.schedule()
    stage.update(first, {"a": [10]})
    # Registers the first block, which the second step fills.
    stage.schedule()
    [output] = stage.update(second, {"a": [STOP]})
    assert output.continues
    stage.scheduler.withdraw(now=2.0)
    other = request("b", 5, salt="a")
    other.token_ids[3:] = [10, 9]
    stage.add(other)
    plan = stage.schedule()
    assert (granted(plan), plan.num_computed_tokens) == ({"b": 1}, [4])


def test_a_turn_may_end_for_who_was_preempted_meanwhile():
    stage = Stage(async_scheduling=True)
    resumable = session("a", 3)
    stage.add(resumable)
    plan = stage.schedule()
    stage.preempt_running()
    [output] = stage.update(plan, {"a": [STOP]})
    assert (output.continues, resumable.status) == (True, RequestStatus.BLOCKED)
    assert (resumable.num_computed_tokens, resumable.block_tables) == (0, [])
    stage.scheduler.extend("a", segment(4, 5), now=2.0)
    plan = stage.schedule()
    assert (granted(plan), plan.num_computed_tokens) == ({"a": 5}, [0])
    assert plan.released == ["a"]


def test_who_is_preempted_in_a_turn_takes_its_segment_behind_it():
    stage = Stage(num_blocks=5, block_size=4, enable_prefix_caching=False)
    resumable = session("b", 8)
    stage.add(request("a", 4, max_tokens=2), resumable)
    stage.step()
    assert stage.step().preempted == ["b"]
    stage.scheduler.extend("b", segment(4, 5), now=2.0)
    assert (resumable.status, len(resumable.segments)) == (RequestStatus.WAITING, 1)
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
    stage.scheduler.extend("idle", segment(4, 5), now=9.0)
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
    stage.scheduler.extend("idle", segment(4, 5), now=9.0)
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
    stage.scheduler.extend("first", segment(4), now=3.0)
    stage.step({"first": [STOP]})
    stage.add(request("a", 12))
    stage.step()
    stage.step()
    assert [bool(resumable.block_tables) for resumable in (first, second)] == [True, False]


def test_a_new_request_takes_the_blocks_of_idle_sessions_only_when_nothing_runs():
    stage = Stage(num_blocks=5, block_size=4)
    resumable = _idle_session(stage, "idle", 8)
    stage.add(request("a", 4, max_tokens=2), request("b", 8))
    assert granted(stage.step()) == {"a": 4}
    assert granted(stage.step()) == {"a": 1}
    assert len(resumable.block_tables) == 1
    # No request runs: now the newcomer must get in, or nothing would ever happen.
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
    stage.scheduler.extend("first", segment(4, 5), now=3.0)
    plan = stage.schedule()
    assert (granted(plan), plan.num_computed_tokens) == ({"first": 2}, [8])
    assert (len(first.block_tables), second.block_tables) == (1, [])


def test_a_session_with_a_segment_that_does_not_get_in_gives_way_as_well():
    stage = Stage(num_blocks=5, block_size=4, max_num_seqs=1)
    resumable = _idle_session(stage, "idle", 4)
    stage.add(request("a", 8))
    stage.step()
    stage.scheduler.extend("idle", segment(4, 5), now=3.0)
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
    stage.scheduler.extend("idle", segment(4), now=3.0)
    assert granted(stage.step()) == {"idle": 10}


def test_the_queue_knows_how_much_a_session_has_still_to_compute():
    stage = Stage()
    _idle_session(stage, "idle", 9)
    assert stage.scheduler.stats().num_waiting_tokens == 0
    stage.scheduler.extend("idle", segment(4, 5), now=3.0)
    assert stage.scheduler.stats().num_waiting_tokens == 2


def test_a_session_that_lost_its_blocks_is_no_first_admission():
    stage = Stage(num_blocks=6, block_size=4)
    stage.add(session("a", 10))
    stage.step({"a": [STOP]})
    stage.add(request("b", 16, max_tokens=2))
    stage.step_until_idle()
    stage.scheduler.extend("a", segment(4, 5, 6), now=9.0)
    stage.step()
    stats = stage.scheduler.stats()
    assert (stats.prefix_queries, stats.preempted_queries) == (26, 13)
