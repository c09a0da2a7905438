"""Adding, aborting, blocking and pausing."""

from __future__ import annotations

import pytest

from engine_svc.request import FinishReason, RequestStatus
from engine_svc.scheduler.config import PauseState
from tests.engine_svc.scheduler.fakes import Stage, granted, request


def test_added_requests_wait_in_order():
    stage = Stage()
    for index in range(10):
        stage.add(request(f"r{index}", 8))
        assert stage.scheduler.stats().num_waiting == index + 1
    assert stage.scheduler.waiting_ids == [f"r{index}" for index in range(10)]


def test_an_id_cannot_be_added_twice():
    stage = Stage()
    stage.add(request("a", 8))
    with pytest.raises(ValueError, match="request a is already being served"):
        stage.add(request("a", 8))


def test_an_aborted_request_leaves_the_queue_with_one_final_output():
    stage = Stage()
    requests = [request(f"r{index}", 8) for index in range(10)]
    stage.add(*requests)
    for index, waiting in enumerate(requests):
        [output] = stage.scheduler.abort([waiting.request_id], now=3.0)
        assert (output.request_id, output.finish_reason) == (waiting.request_id, FinishReason.ABORT)
        assert output.new_token_ids == []
        assert waiting.timeline.finished_at == 3.0
        assert stage.scheduler.num_unfinished == 9 - index


def test_aborting_unknown_finished_and_repeated_ids_does_nothing():
    stage = Stage()
    stage.add(request("a", 8))
    assert len(stage.scheduler.abort(["b", "a", "a"], now=0.0)) == 1
    assert stage.scheduler.abort(["a"], now=0.0) == []


def test_all_small_prompts_are_admitted_in_order_of_arrival():
    stage = Stage()
    stage.add(*(request(f"r{index}", 8 + index) for index in range(10)))
    plan = stage.schedule()
    assert [admitted.request_id for admitted in plan.admitted] == [f"r{index}" for index in range(10)]
    assert plan.num_tokens == [8 + index for index in range(10)]
    assert plan.num_computed_tokens == [0] * 10
    assert stage.scheduler.running_ids == plan.request_ids
    assert stage.scheduler.waiting_ids == []


def test_an_abort_while_running_frees_blocks_at_once_and_the_row_with_the_next_plan():
    stage = Stage()
    stage.add(request("a", 40), request("b", 8))
    stage.step()
    stage.scheduler.abort(["a"], now=2.0)
    assert stage.cache.num_used_blocks == 1
    assert stage.schedule().released == ["a"]
    assert stage.scheduler.running_ids == ["b"]


def test_a_result_for_an_aborted_request_is_ignored():
    stage = Stage()
    stage.add(request("a", 8), request("b", 8))
    plan = stage.schedule()
    stage.scheduler.abort(["a"], now=1.0)
    assert [output.request_id for output in stage.update(plan)] == ["b"]


def test_an_id_used_again_gets_nothing_of_the_former_request():
    stage = Stage()
    stage.add(request("a", 8))
    plan = stage.schedule()
    stage.scheduler.abort(["a"], now=1.0)
    again = request("a", 8)
    stage.add(again)
    assert stage.update(plan) == []
    assert again.num_output_tokens == 0
    plan = stage.schedule()
    assert plan.released == ["a"]
    assert [admitted.request_id for admitted in plan.admitted] == ["a"]


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
    assert stage.scheduler.num_unfinished == 0


def test_stats_tell_running_waiting_and_blocked_apart():
    stage = Stage(max_num_batched_tokens=100)
    stage.add(*(request(f"r{index}", 50) for index in range(3)))
    stage.add(*(request(f"b{index}", 8, blockers=["one"]) for index in range(2)))
    stage.schedule()
    stats = stage.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocked) == (2, 1, 2)
    assert stats.num_waiting_tokens == 50 + 2 * 8
    assert (stats.num_used_blocks, stats.num_total_blocks) == (8, 999)
    assert stats.max_rows == 2


def test_pausing_admissions_lets_the_running_go_on():
    stage = Stage()
    stage.add(request("a", 8))
    stage.step()
    stage.add(request("b", 8))
    stage.scheduler.set_pause(PauseState.NEW)
    assert granted(stage.step()) == {"a": 1}
    stage.scheduler.abort(["a"], now=2.0)
    assert not stage.scheduler.has_work
    stage.scheduler.set_pause(PauseState.NONE)
    assert granted(stage.step()) == {"b": 8}


def test_pausing_all_plans_nothing_until_resumed():
    stage = Stage()
    stage.add(request("a", 8))
    stage.step()
    stage.scheduler.set_pause(PauseState.ALL)
    assert not stage.scheduler.has_work
    assert stage.schedule().request_ids == []
    stage.scheduler.set_pause(PauseState.NONE)
    assert granted(stage.schedule()) == {"a": 1}


def test_the_prefix_cache_is_not_reset_under_running_requests():
    stage = Stage()
    requests = [request(f"r{index}", 20) for index in range(10)]
    stage.add(*requests)
    stage.step()
    assert not stage.scheduler.reset_prefix_cache(now=2.0)
    assert stage.scheduler.reset_prefix_cache(now=2.0, reset_running=True)
    assert stage.scheduler.running_ids == []
    assert stage.scheduler.waiting_ids == [f"r{index}" for index in range(10)]
    assert stage.cache.num_used_blocks == 0
    plan = stage.schedule()
    assert plan.released == [f"r{index}" for index in reversed(range(10))]
    assert plan.num_tokens == [21] * 10


def test_nothing_is_left_when_all_is_done():
    stage = Stage()
    requests = [request(f"r{index}", 10) for index in range(5)]
    stage.add(*requests)
    stage.step_until_idle()
    assert stage.scheduler.num_unfinished == 0
    assert stage.cache.num_used_blocks == 0
    assert all(stage.pool.ref_count(block_id) == 0 for block_id in range(1000))
    assert all(done.status is RequestStatus.FINISHED for done in requests)
    assert stage.schedule().request_ids == []


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "reason"),
    [
        (0, 1, "prompt has 0 tokens, must have at least 1"),
        (64, 1, "request begins with 64 tokens, the model takes 63"),
        (60, 16, "request may need 16 KV blocks, the engine has 14"),
        (10, 46, None),
        (10, 48, "request may need 15 KV blocks, the engine has 14"),
    ],
)
def test_what_can_never_be_served_is_refused_in_words(num_tokens: int, max_tokens: int, reason: str | None):
    stage = Stage(num_blocks=15, block_size=4, max_model_len=64)
    assert stage.scheduler.refusal(request("a", num_tokens, max_tokens=max_tokens)) == reason


def test_a_continuation_that_has_all_its_tokens_is_refused():
    continued = request("a", 8, max_tokens=2)
    continued.token_ids.extend([1, 1])
    assert Stage().scheduler.refusal(continued) == "2 output tokens are there already, max_tokens is 2"
