"""Adding, aborting and blocking."""

from __future__ import annotations

import pytest

from engine_svc.cache.attention import CrossAttention, FullAttention, SlidingWindow
from engine_svc.core.request import FinishReason, InputSegment, Request, RequestStatus
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.scheduler.config import PauseState
from engine_svc.scheduler.waiting_queue import OrderedQueue, WaitingQueue
from tests.engine_svc.core_state import num_unfinished
from tests.engine_svc.scheduler.doubles import Compiler, Loader, Retainer
from tests.engine_svc.scheduler.fakes import STOP, Stage, granted, ids_of, request, segment, session


# Behaviour 2.
def test_an_aborted_request_leaves_the_queue_with_one_final_output():
    stage = Stage()
    requests = [request(f"r{index}", 8) for index in range(10)]
    stage.add(*requests)
    for index, waiting in enumerate(requests):
        [output] = stage.scheduler.abort([waiting.request_id], now=3.0)
        assert (output.request_id, output.finish_reason) == (waiting.request_id, FinishReason.ABORT)
        assert output.new_token_ids == []
        assert waiting.timeline.finished_at == 3.0
        assert (waiting.status, waiting.finish_reason) == (RequestStatus.FINISHED, FinishReason.ABORT)
        assert num_unfinished(stage.scheduler) == 9 - index
        assert len(stage.scheduler.waiting_ids) == 9 - index


# Row 183.
def test_an_abort_while_running_frees_blocks_at_once_and_the_row_with_the_next_plan():
    stage = Stage()
    stage.add(request("a", 40), request("b", 8))
    stage.step()
    stage.scheduler.abort(["a"], now=2.0)
    assert stage.cache.num_used_blocks == 1
    assert stage.schedule().released == ["a"]
    assert stage.scheduler.running_ids == ["b"]


def test_90_an_abort_that_races_the_final_token_ends_as_abort_and_leaves_nothing():
    for max_tokens, steps_before in ((1, 0), (3, 2)):
        stage = Stage()
        last = request("a", 8, max_tokens=max_tokens)
        stage.add(last)
        for _ in range(steps_before):
            stage.step()
        plan = stage.schedule()
        [output] = stage.scheduler.abort(["a"], now=9.0)
        assert (output.finish_reason, output.new_token_ids) == (FinishReason.ABORT, [])
        assert stage.update(plan) == []
        assert (last.status, last.finish_reason) == (RequestStatus.FINISHED, FinishReason.ABORT)
        assert last.num_output_tokens == steps_before
        assert stage.scheduler.abort(["a"], now=9.0) == []
        assert (num_unfinished(stage.scheduler), stage.cache.num_used_blocks) == (0, 0)


def test_a_request_that_never_ran_is_never_released():
    stage = Stage(max_num_seqs=1)
    stage.add(request("a", 8), request("b", 8))
    stage.step()
    stage.scheduler.abort(["b"], now=2.0)
    assert stage.schedule().released == []


def test_what_a_plan_without_rows_would_release_rides_on_the_next():
    stage = Stage()
    stage.add(request("a", 8))
    stage.step()
    stage.scheduler.abort(["a"], now=2.0)
    assert stage.schedule().released == []
    stage.add(request("b", 8))
    assert stage.schedule().released == ["a"]


def test_a_request_preempted_and_then_aborted_is_released_once():
    stage = Stage(num_blocks=5, block_size=4)
    stage.add(request("a", 8), request("b", 8))
    stage.step()
    plan = stage.step()
    assert plan.preempted == ["b"]
    assert plan.released == ["b"]
    stage.scheduler.abort(["b"], now=3.0)
    assert stage.schedule().released == []


def test_a_blocked_request_is_overtaken_and_keeps_its_place():
    stage = Stage(max_num_seqs=1)
    stage.add(
        request("a", 8, blockers=["one", "two"]),
        request("b", 8, blockers=["one"]),
        request("c", 8, max_tokens=1),
    )
    stage.add(request("d", 8))
    assert stage.scheduler.waiting_ids == ["a", "b", "c", "d"]
    assert granted(stage.step()) == {"c": 8}
    stage.scheduler.unblock("b", "one")
    stage.scheduler.unblock("a", "one")
    assert stage.scheduler.stats().num_blocked == 1
    stage.scheduler.unblock("a", "two")
    assert granted(stage.schedule()) == {"a": 8}
    assert stage.scheduler.waiting_ids == ["b", "d"]


def test_unblocking_what_is_not_blocked_does_nothing():
    stage = Stage()
    stage.add(request("a", 8))
    stage.scheduler.unblock("a", "one")
    stage.scheduler.unblock("unknown", "one")
    assert stage.scheduler.waiting_ids == ["a"]


def test_a_blocked_request_can_be_aborted():
    stage = Stage()
    stage.add(request("a", 8, blockers=["one"]))
    assert not stage.scheduler.has_work
    assert len(stage.scheduler.abort(["a"], now=0.0)) == 1
    assert num_unfinished(stage.scheduler) == 0


# Row 172.
def test_who_becomes_ready_is_planned_in_the_next_step():
    stage = Stage(features=[Compiler("a")])
    stage.add(request("a", 8))
    assert (stage.scheduler.has_work, stage.scheduler.stats().num_blocked) == (False, 1)
    assert stage.step().request_ids == []
    stage.scheduler.unblock("a", Compiler.NAME)
    assert (stage.scheduler.has_work, stage.scheduler.stats().num_blocked) == (True, 0)
    assert stage.step().request_ids == ["a"]


# Behaviour 28.
def test_who_cannot_be_compiled_ends_with_an_error_and_no_token_is_spent_on_it():
    stage = Stage(features=[Compiler("bad")])
    failed = request("bad", 8)
    stage.add(failed, request("good", 8))
    [output] = stage.scheduler.abort(["bad"], now=1.0, cause="no such grammar", reason=FinishReason.ERROR)
    assert (output.finish_reason, output.stop_token_id, output.new_token_ids) == (
        FinishReason.ERROR,
        None,
        [],
    )
    assert (failed.finish_reason, failed.abort_cause) == (FinishReason.ERROR, "no such grammar")
    plan = stage.schedule()
    assert (granted(plan), plan.released) == ({"good": 8}, [])


# Behaviour 29.
def test_who_yields_what_may_not_follow_ends_with_an_error_and_has_said_it():
    stage = Stage()
    failed = request("bad", 8)
    stage.add(failed, request("good", 8))
    outputs = stage.update(stage.schedule(), {"bad": [42]})
    assert [output.new_token_ids for output in outputs] == [[42], [7]]
    [output] = stage.scheduler.abort(["bad"], now=2.0, reason=FinishReason.ERROR)
    assert (output.finish_reason, output.num_cached_tokens) == (FinishReason.ERROR, None)
    assert failed.output_token_ids == [42]
    plan = stage.step()
    assert (granted(plan), plan.released) == ({"good": 1}, ["bad"])


def test_an_abort_says_who_wanted_it_and_when():
    stage = Stage()
    aborted, other = request("a", 8), request("b", 8)
    stage.add(aborted, other)
    outputs = stage.scheduler.abort(["a", "b"], now=3.0, cause="the client left")
    assert [output.num_cached_tokens for output in outputs] == [0, 0]
    assert (aborted.abort_cause, other.abort_cause) == ("the client left", "the client left")
    assert aborted.timeline.events == [("aborted", 3.0)]
    assert (aborted.finish_reason, aborted.timeline.finished_at) == (FinishReason.ABORT, 3.0)


def _loading(**options: object) -> Stage:
    """A stage on which the first 40 tokens of `remote` come from elsewhere."""
    loader = Loader({"remote": 40})
    stage = Stage(features=[loader], **options)
    loader.reserve = stage.cache.reserve
    return stage


def test_who_is_loaded_from_elsewhere_holds_blocks_while_it_waits_and_computes_the_rest():
    stage = _loading()
    loaded = request("remote", 50)
    stage.add(loaded)
    assert (stage.cache.num_used_blocks, stage.scheduler.stats().num_waiting_tokens) == (3, 10)
    stage.scheduler.unblock("remote", Loader.NAME)
    assert stage.scheduler.stats().num_waiting_tokens == 10
    plan = stage.schedule()
    assert (granted(plan), plan.num_computed_tokens) == ({"remote": 10}, [40])
    assert plan.admitted[0].block_ids == [loaded.block_tables[0].block_ids[:3]]
    assert loaded.num_cached_tokens == 40


def test_who_is_being_loaded_never_loses_its_blocks_to_others():
    stage = _loading(num_blocks=6)
    stage.add(request("remote", 50), request("a", 30))
    assert granted(stage.step()) == {"a": 30}
    stage.step()
    stage.step()
    # The pool is empty: the request that needs the next block gives way itself.
    assert stage.step().preempted == ["a"]
    assert stage.cache.num_used_blocks == 3
    assert not stage.scheduler.reset_prefix_cache(now=9.0, reset_running=True)
    stage.scheduler.abort(["remote"], now=9.0)
    assert stage.cache.num_used_blocks == 0


# The order of those that wait, and the position that a blocked one keeps.


def _waiting(request_id: str, place: float, num_uncached: int = 1, *, blocked: bool = False) -> Request:
    queued = request(request_id, 4, blockers=["one"] if blocked else [])
    queued.order_key = (place, 0.0, request_id)
    queued.num_uncached_tokens = num_uncached
    if not blocked:
        queued.move_to(RequestStatus.WAITING)
    return queued


def _queue(*requests: Request) -> WaitingQueue:
    queue = WaitingQueue(OrderedQueue())
    for queued in requests:
        queue.add(queued)
    return queue


def test_an_empty_queue_has_nothing():
    queue = WaitingQueue(OrderedQueue())
    assert (len(queue), queue.num_ready, queue.num_blocked, queue.num_uncached_tokens) == (0, 0, 0, 0)
    assert (list(queue.candidates()), queue.blocked("a"), list(queue)) == ([], None, [])


def test_blocked_ones_keep_their_place_and_are_not_offered():
    queue = _queue(
        _waiting("a", 1), _waiting("b", 2, blocked=True), _waiting("c", 3), _waiting("d", 0, blocked=True)
    )
    assert ids_of(queue) == ["d", "a", "b", "c"]
    assert (len(queue), queue.num_ready, queue.num_blocked) == (4, 2, 2)
    assert ids_of(queue.candidates()) == ["a", "c"]
    blocked = queue.blocked("b")
    assert blocked is not None and blocked.request_id == "b"
    assert queue.blocked("a") is None


def test_each_request_is_a_candidate_once_whatever_comes_and_goes_meanwhile():
    queue = _queue(*(_waiting(name, place) for place, name in enumerate("abcd", start=1)))
    seen = []
    for candidate in queue.candidates():
        seen.append(candidate)
        if candidate.request_id == "b":
            queue.remove(candidate)
            queue.add(_waiting("z", 0))
    assert ids_of(seen) == ["a", "b", "c", "d"]
    assert ids_of(queue) == ["z", "a", "c", "d"]


def test_anyone_can_leave_from_anywhere():
    first, second, third = (_waiting(name, place) for place, name in enumerate("abc"))
    blocked = _waiting("d", 9, blocked=True)
    queue = _queue(first, second, third, blocked)
    queue.remove(second)
    assert ids_of(queue) == ["a", "c", "d"]
    queue.remove(blocked)
    assert (queue.num_ready, queue.num_blocked, queue.blocked("d")) == (2, 0, None)
    queue.remove(third)
    queue.remove(first)
    assert len(queue) == 0


def test_tokens_still_to_compute_are_summed_over_waiting_and_blocked():
    waiting, blocked = _waiting("a", 1, 5), _waiting("b", 2, 7, blocked=True)
    queue = _queue(waiting, blocked)
    assert queue.num_uncached_tokens == 12
    queue.remove(waiting)
    assert queue.num_uncached_tokens == 7
    queue.remove(blocked)
    assert queue.num_uncached_tokens == 0


# What can never be served is refused in words, and what just can is not.


def _small(**options: object) -> Stage:
    """Room for 56 tokens; the model takes more."""
    return Stage(**{"num_blocks": 15, "block_size": 4, "max_model_len": 64, **options})


def _segment(num_tokens: int, max_tokens: int = 1) -> InputSegment:
    return InputSegment([5] * num_tokens, SamplingParams(max_tokens=max_tokens))


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "reason"),
    [
        (0, 1, "prompt has 0 tokens, must have at least 1"),
        (1, 1, None),
        (64, 1, "request begins with 64 tokens, the model takes 63"),
        (65, 1, "request begins with 65 tokens, the model takes 63"),
        (63, 1, "request may need 16 KV blocks, the engine has 14"),
        (60, 16, "request may need 16 KV blocks, the engine has 14"),
        (10, 46, None),
        # The last token is never computed: 57 tokens have KV for 56.
        (10, 47, None),
        (10, 48, "request may need 15 KV blocks, the engine has 14"),
        (56, 1, None),
        (57, 1, "request may need 15 KV blocks, the engine has 14"),
    ],
)
def test_a_request_has_to_fit_the_model_and_the_pool(num_tokens: int, max_tokens: int, reason: str | None):
    assert _small().scheduler.refusal(request("a", num_tokens, max_tokens=max_tokens)) == reason


def test_the_longest_request_of_the_model_needs_no_more_than_the_model_takes():
    stage = _small(num_blocks=17)
    assert stage.scheduler.refusal(request("a", 63, max_tokens=1000)) is None
    # 64 tokens, the last without KV, fill 16 blocks as 63 do.
    assert _small(num_blocks=16).scheduler.refusal(request("a", 1, max_tokens=1000)) == (
        "request may need 16 KV blocks, the engine has 15"
    )


@pytest.mark.parametrize(
    ("max_tokens", "reason"), [(44, None), (45, "request may need 15 KV blocks, the engine has 14")]
)
def test_drafts_behind_the_last_token_need_room_too(max_tokens: int, reason: str | None):
    stage = _small(num_speculative_tokens=3)
    assert stage.scheduler.refusal(request("a", 10, max_tokens=max_tokens)) == reason


def test_a_prompt_has_no_more_tokens_than_there_are():
    broken = request("a", 8)
    broken.num_prompt_tokens = 9
    assert Stage().scheduler.refusal(broken) is not None


@pytest.mark.parametrize(
    ("max_tokens", "reason"),
    [
        (1, "2 output tokens are there already, max_tokens is 1"),
        (2, "2 output tokens are there already, max_tokens is 2"),
        (3, None),
    ],
)
def test_a_continuation_must_have_something_to_say(max_tokens: int, reason: str | None):
    continued = request("a", 8, max_tokens=max_tokens)
    continued.token_ids.extend([1, 1])
    assert Stage().scheduler.refusal(continued) == reason


def test_an_id_is_served_once_at_a_time():
    stage = Stage()
    stage.add(request("a", 8))
    assert stage.scheduler.refusal(request("a", 8)) == "request a is already being served"
    assert stage.scheduler.refusal(request("b", 8)) is None
    with pytest.raises(ValueError, match="request a is already being served"):
        stage.add(request("a", 8))
    stage.scheduler.abort(["a"], now=0.0)
    assert stage.scheduler.refusal(request("a", 8)) is None


@pytest.mark.parametrize(
    ("num_tokens", "reason"), [(40, None), (41, "request may need 15 KV blocks, the engine has 14")]
)
def test_a_window_needs_what_it_reads_and_what_is_in_flight(num_tokens: int, reason: str | None):
    # A window of 5 reads 4 tokens before, 8 are in flight: 12 tokens fill 3 blocks and touch one more.
    groups = [FullAttention(4), SlidingWindow(4, 5)]
    stage = _small(groups=groups, max_num_batched_tokens=8)
    assert stage.scheduler.refusal(request("a", num_tokens, max_tokens=1)) == reason


@pytest.mark.parametrize(
    ("num_encoder_tokens", "reason"),
    [(0, None), (16, None), (17, "request may need 15 KV blocks, the engine has 14")],
)
def test_what_an_encoder_made_needs_room_from_the_beginning(num_encoder_tokens: int, reason: str | None):
    stage = _small(groups=[FullAttention(4), CrossAttention(4)], enable_prefix_caching=False)
    encoded = request("a", 40, max_tokens=1)
    encoded.num_encoder_tokens = num_encoder_tokens
    assert stage.scheduler.refusal(encoded) == reason


def test_what_is_not_refused_can_be_served_to_its_end():
    for num_tokens, max_tokens in ((10, 47), (56, 1), (1, 56)):
        stage = _small(num_speculative_tokens=0)
        longest = request("a", num_tokens, max_tokens=max_tokens)
        assert stage.scheduler.refusal(longest) is None
        stage.add(longest)
        stage.step_until_idle(max_steps=60)
        assert (longest.num_output_tokens, longest.num_preemptions) == (max_tokens, 0)


def _open(stage: Stage, num_tokens: int = 10, max_tokens: int = 20) -> None:
    """A resumable request whose first turn runs."""
    stage.add(request("a", num_tokens, max_tokens=max_tokens, is_resumable=True))
    stage.step()


def test_input_is_for_requests_that_are_open():
    stage = Stage()
    closed = "the request is not open for further input"
    assert stage.scheduler.segment_refusal("a", _segment(1)) == closed
    stage.add(request("plain", 8))
    assert stage.scheduler.segment_refusal("plain", _segment(1)) == closed
    _open(stage)
    assert stage.scheduler.segment_refusal("a", _segment(1)) is None
    stage.scheduler.extend("a", None, now=2.0)
    assert stage.scheduler.segment_refusal("a", _segment(1)) == closed


def test_only_so_many_segments_wait_for_their_turn():
    stage = Stage()
    _open(stage)
    for _ in range(63):
        stage.scheduler.extend("a", _segment(1), now=2.0)
    assert stage.scheduler.segment_refusal("a", _segment(1)) is None
    stage.scheduler.extend("a", _segment(1), now=2.0)
    assert stage.scheduler.segment_refusal("a", _segment(1)) == (
        "64 input segments of the request wait for their turn already"
    )


@pytest.mark.parametrize(
    ("segment", "reason"),
    [
        (_segment(0), "input segment has 0 tokens, must have at least 1"),
        (_segment(1), None),
        (_segment(1, max_tokens=0), "max_tokens is 0, must be at least 1"),
        # The turn that runs may reach 30 tokens.
        (_segment(33), None),
        (_segment(34), "request could begin with 64 tokens, the model takes 63"),
        (_segment(35), "request could begin with 65 tokens, the model takes 63"),
    ],
)
def test_a_segment_has_to_fit_behind_the_turn_that_runs(segment: InputSegment, reason: str | None):
    stage = _small(num_blocks=100)
    _open(stage)
    assert stage.scheduler.segment_refusal("a", segment) == reason


@pytest.mark.parametrize(
    ("num_tokens", "reason"), [(24, None), (25, "request could begin with 64 tokens, the model takes 63")]
)
def test_a_segment_has_to_fit_behind_those_that_wait(num_tokens: int, reason: str | None):
    stage = _small(num_blocks=100)
    _open(stage)
    # With what it may yield, up to 39 tokens.
    stage.scheduler.extend("a", _segment(5, max_tokens=4), now=2.0)
    assert stage.scheduler.segment_refusal("a", _segment(num_tokens)) == reason


@pytest.mark.parametrize(
    ("max_tokens", "reason"), [(22, None), (23, "request may need 15 KV blocks, the engine has 14")]
)
def test_a_segment_has_to_fit_the_pool(max_tokens: int, reason: str | None):
    stage = _small()
    _open(stage)
    # 30 tokens before it, then 5 and so many more; the last has no KV.
    assert stage.scheduler.segment_refusal("a", _segment(5, max_tokens)) == reason


def test_a_segment_brings_nothing_for_the_encoder_but_what_is_there_counts():
    stage = _small(groups=[FullAttention(4), CrossAttention(4)], enable_prefix_caching=False)
    encoded = request("a", 10, max_tokens=10, is_resumable=True)
    encoded.num_encoder_tokens = 16
    stage.add(encoded)
    assert stage.scheduler.segment_refusal("a", _segment(20, max_tokens=1)) is None
    assert stage.scheduler.segment_refusal("a", _segment(21, max_tokens=1)) == (
        "request may need 15 KV blocks, the engine has 14"
    )


def test_room_for_a_segment_is_counted_as_far_as_the_model_goes():
    stage = _small(num_blocks=17)
    _open(stage)
    assert stage.scheduler.segment_refusal("a", _segment(5, max_tokens=1000)) is None


@pytest.mark.parametrize(
    ("num_tokens", "reason"),
    [(53, None), (54, "request could begin with 64 tokens, the model takes 63")],
)
def test_a_turn_that_is_over_makes_a_request_no_longer(num_tokens: int, reason: str | None):
    stage = Stage(max_model_len=64, block_size=4)
    stage.add(session("a", 10, max_tokens=50))
    stage.step({"a": [STOP]})
    assert stage.scheduler.segment_refusal("a", segment(*range(num_tokens), max_tokens=1)) == reason


# Holding back all or only the new, and forgetting what is cached.


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
    stage = Stage(block_size=4, features=[loader])
    loader.reserve = stage.cache.reserve
    stage.add(request("remote", 5), request("a", 8))
    stage.step()
    # Blocks into which KV may be on its way are not taken.
    assert not stage.scheduler.reset_prefix_cache(now=2.0, reset_running=True)
    plan = stage.schedule()
    assert (granted(plan), plan.num_computed_tokens) == ({"a": 1}, [8])


def test_a_reset_takes_retained_blocks_and_says_so():
    retainer = Retainer()
    stage = Stage(features=[retainer])
    stage.add(request("a", 40, max_tokens=1))
    stage.step_until_idle()
    stage.add(request("b", 8))
    stage.step()
    stats = stage.scheduler.stats()
    assert (stats.num_retained_lots, stats.num_retained_blocks) == (1, 2)
    assert not stage.scheduler.reset_prefix_cache(now=2.0)
    assert (list(stage.cache.retained), retainer.num_resets) == (["a"], 0)
    assert stage.scheduler.reset_prefix_cache(now=2.0, reset_running=True)
    assert (list(stage.cache.retained), retainer.num_resets) == ([], 1)


def test_with_nothing_running_the_prefix_cache_is_reset_at_once():
    stage = Stage()
    stage.add(request("a", 20, max_tokens=1, salt="same"))
    stage.step_until_idle()
    assert stage.scheduler.reset_prefix_cache(now=2.0)
    stage.add(request("b", 20, salt="same"))
    assert granted(stage.step()) == {"b": 20}
