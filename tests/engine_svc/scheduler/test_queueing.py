"""Adding, aborting and blocking."""

from __future__ import annotations

from engine_svc.core.request import FinishReason, RequestStatus
from tests.engine_svc.scheduler.doubles import Compiler, Loader
from tests.engine_svc.scheduler.fakes import Stage, granted, request


# Behaviour 1.
def test_added_requests_wait_in_order():
    stage = Stage()
    for index in range(10):
        stage.add(request(f"r{index}", 8))
        assert stage.scheduler.stats().num_waiting == index + 1
        assert stage.scheduler.num_unfinished == index + 1
    assert stage.scheduler.waiting_ids == [f"r{index}" for index in range(10)]


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
        assert stage.scheduler.num_unfinished == 9 - index
        assert len(stage.scheduler.waiting_ids) == 9 - index


def test_aborting_unknown_finished_and_repeated_ids_does_nothing():
    stage = Stage()
    stage.add(request("a", 8))
    assert len(stage.scheduler.abort(["b", "a", "a"], now=0.0)) == 1
    assert stage.scheduler.abort(["a"], now=0.0) == []


# Behaviour 3.
def test_all_small_prompts_are_admitted_in_order_of_arrival():
    stage = Stage()
    stage.add(*(request(f"r{index}", 8 + index) for index in range(10)))
    plan = stage.schedule()
    assert [admitted.request_id for admitted in plan.admitted] == [f"r{index}" for index in range(10)]
    assert plan.num_tokens == [8 + index for index in range(10)]
    assert plan.num_computed_tokens == [0] * 10
    assert plan.new_block_ids == [[[1 + index]] for index in range(9)] + [[[10, 11]]]
    assert stage.scheduler.running_ids == plan.request_ids
    assert stage.scheduler.waiting_ids == []


# Row 183.
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
        assert (stage.scheduler.num_unfinished, stage.cache.num_used_blocks) == (0, 0)


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


# Behaviour 20, row 190.
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


# Behaviour 18, row 171. Ours is one order, not two queues: the place is that of arrival.
def test_who_was_blocked_enters_in_the_order_of_arrival():
    stage = Stage()
    stage.add(
        request("compiled", 8, blockers=["compile"]),
        request("loaded", 8, blockers=["load"]),
        request("streamed", 8, blockers=["more"]),
        request("tail", 8),
    )
    assert stage.scheduler.stats().num_blocked == 3
    stage.scheduler.unblock("streamed", "more")
    stage.scheduler.unblock("loaded", "load")
    stage.scheduler.unblock("compiled", "compile")
    assert stage.scheduler.waiting_ids == ["compiled", "loaded", "streamed", "tail"]
    assert stage.step().request_ids == ["compiled", "loaded", "streamed", "tail"]


# Behaviour 18, row 170, while they are still blocked.
def test_who_is_blocked_holds_up_nobody():
    stage = Stage()
    stage.add(
        request("compiled", 8, blockers=["compile"]),
        request("loaded", 8, blockers=["load"]),
        request("tail", 8),
    )
    assert stage.step().request_ids == ["tail"]
    stage.scheduler.unblock("loaded", "load")
    assert stage.step().request_ids == ["tail", "loaded"]
    assert stage.scheduler.waiting_ids == ["compiled"]


# Behaviour 19.
def test_with_one_place_the_first_that_was_blocked_has_it_and_the_others_keep_theirs():
    stage = Stage(max_num_seqs=1)
    stage.add(
        request("g1", 8, blockers=["compile"]),
        request("g2", 8, blockers=["compile"]),
        request("remote", 8, blockers=["load"]),
        request("tail", 8),
    )
    for request_id, name in (("remote", "load"), ("g2", "compile"), ("g1", "compile")):
        stage.scheduler.unblock(request_id, name)
    assert stage.step().request_ids == ["g1"]
    assert stage.scheduler.waiting_ids == ["g2", "remote", "tail"]


# Row 172.
def test_who_becomes_ready_is_planned_in_the_next_step():
    stage = Stage(hooks=[Compiler("a")])
    stage.add(request("a", 8))
    assert (stage.scheduler.has_work, stage.scheduler.stats().num_blocked) == (False, 1)
    assert stage.step().request_ids == []
    stage.scheduler.unblock("a", Compiler.NAME)
    assert (stage.scheduler.has_work, stage.scheduler.stats().num_blocked) == (True, 0)
    assert stage.step().request_ids == ["a"]


def test_unblocking_by_another_name_leaves_a_request_blocked():
    stage = Stage()
    stage.add(request("a", 8, blockers=["one"]))
    stage.scheduler.unblock("a", "two")
    assert (stage.scheduler.has_work, stage.scheduler.stats().num_blocked) == (False, 1)


# Behaviour 28.
def test_who_cannot_be_compiled_ends_with_an_error_and_no_token_is_spent_on_it():
    stage = Stage(hooks=[Compiler("bad")])
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
    stage = Stage(hooks=[loader], **options)
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
    # The pool is empty: who needs the next block gives way itself.
    assert stage.step().preempted == ["a"]
    assert stage.cache.num_used_blocks == 3
    assert not stage.scheduler.reset_prefix_cache(now=9.0, reset_running=True)
    stage.scheduler.abort(["remote"], now=9.0)
    assert stage.cache.num_used_blocks == 0
