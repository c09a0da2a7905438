"""Adding, aborting and blocking."""

from __future__ import annotations

from engine_svc.request import FinishReason, RequestStatus
from tests.engine_svc.scheduler.doubles import Compiler, Loader
from tests.engine_svc.scheduler.fakes import Stage, granted, request


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


# Row 172.
def test_who_becomes_ready_is_planned_in_the_next_step():
    stage = Stage(hooks=[Compiler("a")])
    stage.add(request("a", 8))
    assert (stage.scheduler.has_work, stage.scheduler.stats().num_blocked) == (False, 1)
    assert stage.step().request_ids == []
    stage.scheduler.unblock("a", Compiler.NAME)
    assert (stage.scheduler.has_work, stage.scheduler.stats().num_blocked) == (True, 0)
    assert stage.step().request_ids == ["a"]


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
