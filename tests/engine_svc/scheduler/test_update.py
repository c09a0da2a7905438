"""What becomes of the tokens of a step: stops, errors, first outputs, times, hooks."""

from __future__ import annotations

import pytest

from engine_svc.core.request import FinishReason, Request
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.scheduler.stats import DraftStats, SchedulerStats
from tests.engine_svc.scheduler.doubles import BlockHolder
from tests.engine_svc.scheduler.fakes import EOS, NEW_TOKEN, Stage, request


def _drafting_stage(**wishes: object) -> tuple[Stage, Request, StepPlan]:
    """One request that has one token and is about to verify two drafts."""
    stage = Stage(num_speculative_tokens=2)
    drafted = request("a", 8, **wishes)  # type: ignore[arg-type]
    stage.add(drafted)
    stage.update(stage.schedule(), {"a": [5]}, {"a": [10, 11]})
    return stage, drafted, stage.schedule()


# Behaviour 8.
def test_the_end_token_stops_one_and_the_other_keeps_both_tokens():
    stage = Stage(num_speculative_tokens=1)
    stage.add(request("a", 8), request("b", 8))
    stage.update(stage.schedule(), drafts={"a": [9], "b": [10]})
    first, second = stage.update(stage.schedule(), {"a": [EOS], "b": [10, 11]})
    assert (first.new_token_ids, first.finish_reason, first.stop_token_id) == ([EOS], FinishReason.STOP, None)
    assert (second.new_token_ids, second.finish_reason) == ([10, 11], None)
    assert stage.scheduler.running_ids == ["b"]


# Behaviour 9.
def test_a_stop_token_cuts_what_comes_behind_it():
    stage, stopped, plan = _drafting_stage(stop_token_ids=[42, 43])
    [output] = stage.update(plan, {"a": [10, 42, 12]})
    assert (output.new_token_ids, output.finish_reason, output.stop_token_id) == (
        [10, 42],
        FinishReason.STOP,
        42,
    )
    assert stopped.output_token_ids == [5, 10, 42]


# Behaviour 10, behind the first token.
def test_the_length_cuts_what_comes_behind_it():
    stage, stopped, plan = _drafting_stage(max_tokens=3)
    [output] = stage.update(plan, {"a": [10, 11, 12]})
    assert (output.new_token_ids, output.finish_reason) == ([10, 11], FinishReason.LENGTH)
    assert stopped.num_output_tokens == 3


# Behaviour 11.
def test_an_ignored_end_token_is_a_token_like_others():
    stage, running, plan = _drafting_stage(ignore_eos=True)
    [output] = stage.update(plan, {"a": [EOS, 10, 11]})
    assert (output.new_token_ids, output.finish_reason) == ([EOS, 10, 11], None)
    assert not running.is_finished


# Behaviour 12: recorded cases have it so, that the scheduler does not look at the minimum.
@pytest.mark.parametrize("token", [EOS, 42])
def test_the_minimum_is_the_samplers_business(token: int):
    stage = Stage()
    stage.add(request("a", 8, min_tokens=5, stop_token_ids=[42]))
    [output] = stage.update(stage.schedule(), {"a": [token]})
    assert output.finish_reason is FinishReason.STOP


def test_the_model_length_ends_a_request_before_its_maximum():
    stage = Stage(max_model_len=10)
    stage.add(request("a", 8, max_tokens=100))
    stage.step()
    [output] = stage.update(stage.schedule())
    assert output.finish_reason is FinishReason.LENGTH


def test_a_row_without_finite_logits_ends_its_request_and_no_other():
    stage = Stage()
    stage.add(*(request(name, 8) for name in "abc"))
    outputs = stage.update(stage.schedule(), non_finite=[1])
    assert {output.request_id: output.finish_reason for output in outputs} == {
        "a": None,
        "b": FinishReason.ERROR,
        "c": None,
    }
    assert next(output for output in outputs if output.request_id == "b").new_token_ids == []
    assert [output.request_id for output in outputs] == ["b", "a", "c"]
    assert (outputs[0].num_cached_tokens, outputs[0].stop_token_id) == (0, None)
    plan = stage.schedule()
    assert plan.released == ["b"]
    assert plan.request_ids == ["a", "c"]


def test_a_row_whose_rules_leave_no_token_ends_its_request_and_says_so():
    stage = Stage()
    stage.add(*(request(name, 8) for name in "abc"))
    outputs = stage.update(stage.schedule(), non_finite=[2], barred=[1])
    assert [(output.request_id, output.message) for output in outputs] == [
        ("b", "the request's own rules leave no token to choose"),
        ("c", "the model yielded logits that are not finite"),
        ("a", ""),
    ]


# Row 154.
def test_rows_without_finite_logits_are_ended_once_and_in_order():
    stage = Stage()
    broken = [request(name, 8) for name in "abc"]
    stage.add(*broken)
    stage.step()
    plan = stage.schedule()
    stage.scheduler.abort(["b"], now=2.0)
    outputs = stage.update(plan, non_finite=[2, 1, 0, 2])
    assert [(output.request_id, output.finish_reason) for output in outputs] == [
        ("a", FinishReason.ERROR),
        ("c", FinishReason.ERROR),
    ]
    # They have had their first output.
    assert [output.num_cached_tokens for output in outputs] == [None, None]
    assert [one.finish_reason for one in broken] == [
        FinishReason.ERROR,
        FinishReason.ABORT,
        FinishReason.ERROR,
    ]
    assert [one.num_output_tokens for one in broken] == [1, 1, 1]


def test_a_chunk_without_finite_logits_ends_its_request_too():
    stage = Stage(max_num_batched_tokens=5)
    stage.add(request("a", 8))
    [output] = stage.update(stage.schedule(), non_finite=[0])
    assert output.finish_reason is FinishReason.ERROR
    assert stage.scheduler.num_unfinished == 0


def test_cached_tokens_are_told_once():
    stage = Stage()
    stage.add(request("a", 8))
    [first] = stage.update(stage.schedule())
    [second] = stage.update(stage.schedule())
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, None)


def test_a_request_ends_with_exactly_one_final_output():
    stage = Stage()
    stage.add(request("a", 8, max_tokens=3))
    outputs = []
    while stage.scheduler.has_work:
        outputs.extend(stage.update(stage.schedule()))
    assert [output.finish_reason for output in outputs] == [None, None, FinishReason.LENGTH]
    assert stage.scheduler.abort(["a"], now=9.0) == []


def test_the_timeline_has_every_turn_of_a_life():
    stage = Stage(num_blocks=5, block_size=4, enable_prefix_caching=False)
    stage.add(request("a", 8, max_tokens=2))
    later = request("b", 8, max_tokens=2, arrival_at=0.5)
    stage.add(later)
    stage.step_until_idle()
    timeline = later.timeline
    assert (timeline.queued_at, timeline.scheduled_at) == (0.5, 1.0)
    assert (timeline.first_token_at, timeline.finished_at) == (1.0, 3.0)
    assert timeline.events == [("scheduled", 1.0), ("first_token", 1.0), ("preempted", 2.0), ("resumed", 3.0)]
    assert later.finish_reason is FinishReason.LENGTH


class _Listener:
    """Writes down what it is told, and blocks what it was asked to."""

    def __init__(self, blocks: str = "") -> None:
        self.heard: list[str] = []
        self._blocks = blocks

    def on_add(self, request: Request) -> None:
        self.heard.append(f"add {request.request_id}")
        if request.request_id == self._blocks:
            request.blockers.add("listener")

    def on_plan(self, plan: StepPlan) -> None:
        self.heard.append(f"plan {' '.join(plan.request_ids)}")
        plan.extras[_Listener] = self

    def on_update(self, plan: StepPlan, result: StepResult) -> None:
        assert plan.extras[_Listener] is self
        self.heard.append(f"update {result.sampled}")

    def on_withdraw(self) -> None:
        self.heard.append("withdraw")

    def on_finish(self, request: Request) -> None:
        assert request.finish_reason is not None
        self.heard.append(f"finish {request.request_id} {request.finish_reason.value}")


def test_hooks_hear_everything_in_order():
    listener = _Listener()
    stage = Stage(hooks=[listener])
    stage.add(request("a", 8, max_tokens=1), request("b", 8))
    stage.step()
    stage.scheduler.abort(["b"], now=2.0)
    stage.schedule()
    stage.add(request("c", 8))
    stage.schedule()
    stage.scheduler.withdraw(now=3.0)
    assert listener.heard == [
        "add a",
        "add b",
        "plan a b",
        "finish a length",
        f"update [[{NEW_TOKEN}], [{NEW_TOKEN}]]",
        "finish b abort",
        "add c",
        "plan c",
        "withdraw",
    ]


def test_a_hook_can_block_a_request_that_comes():
    stage = Stage(hooks=[_Listener(blocks="a")])
    stage.add(request("a", 8), request("b", 8))
    assert stage.step().request_ids == ["b"]
    stage.scheduler.unblock("a", "listener")
    assert stage.step().request_ids == ["b", "a"]


def test_every_hook_hears_in_the_order_of_registration():
    heard: list[str] = []
    first, second = _Listener(), _Listener(blocks="a")
    first.heard = second.heard = heard
    stage = Stage(hooks=[first, second])
    blocked = request("a", 8)
    stage.add(blocked)
    stage.scheduler.abort(["a"], now=1.0)
    assert heard == ["add a", "add a", "finish a abort", "finish a abort"]
    assert blocked.blockers == {"listener"}


def test_hooks_are_not_told_of_plans_without_rows():
    listener = _Listener()
    stage = Stage(hooks=[listener])
    stage.update(stage.schedule())
    assert listener.heard == []


# What behaviour 66 needs of the scheduler: hooks hear of the end before the blocks are free.
def test_who_still_needs_the_blocks_of_a_request_that_ends_can_keep_them():
    holder = BlockHolder()
    stage = Stage(hooks=[holder])
    holder.kv_cache = stage.cache
    stage.add(request("a", 40, max_tokens=1), request("b", 8))
    stage.step()
    assert stage.cache.num_used_blocks == 4
    stage.step()
    assert stage.cache.num_used_blocks == 4
    holder.let_go()
    assert stage.cache.num_used_blocks == 1


def test_the_first_output_tells_what_was_cached_even_if_it_is_the_last():
    stage = Stage()
    stage.add(request("a", 20, max_tokens=1, salt="same"), request("b", 20, max_tokens=1, salt="same"))
    outputs = stage.update(stage.schedule())
    assert [(output.num_cached_tokens, output.finish_reason) for output in outputs] == [
        (0, FinishReason.LENGTH),
        (16, FinishReason.LENGTH),
    ]
    assert [output.continues for output in outputs] == [False, False]


def test_the_first_token_is_noted_when_the_prompt_is_done():
    stage = Stage(max_num_batched_tokens=5)
    slow = request("a", 8)
    stage.add(slow)
    assert stage.update(stage.schedule()) == []
    assert (slow.timeline.scheduled_at, slow.timeline.first_token_at) == (1.0, None)
    stage.step()
    stage.step()
    assert (slow.timeline.scheduled_at, slow.timeline.first_token_at) == (1.0, 2.0)
    assert slow.timeline.events == [("scheduled", 1.0), ("first_token", 2.0)]


def test_there_is_nothing_to_count_at_the_start():
    stats = Stage(num_blocks=10).scheduler.stats()
    assert stats == SchedulerStats(
        step_number=0,
        num_running=0,
        num_waiting=0,
        num_blocked=0,
        num_waiting_tokens=0,
        num_used_blocks=0,
        num_total_blocks=9,
        prefix_queries=0,
        prefix_hits=0,
        prefix_hit_rate=0.0,
        preempted_queries=0,
        preempted_hits=0,
        num_preemptions=0,
        num_chunked_prefills=0,
        max_rows=0,
        drafts=DraftStats(0, 0, 0, ()),
    )


# Row 189.
def test_statistics_match_what_is_there():
    stage = Stage(num_blocks=10, block_size=4, max_num_batched_tokens=20, max_num_seqs=2)
    first = request("a", 8, salt="same")
    stage.add(first, request("b", 9, salt="same"), request("c", 30), request("d", 4, blockers=["one"]))
    stage.step()
    stats = stage.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocked) == (2, 1, 1)
    assert stats.num_waiting_tokens == 34
    assert (stats.num_used_blocks, stats.num_total_blocks) == (3, 9)
    assert (stats.prefix_queries, stats.prefix_hits, stats.prefix_hit_rate) == (17, 8, 8 / 17)
    assert (stats.num_preemptions, stats.num_chunked_prefills, stats.max_rows) == (0, 0, 2)
    stage.scheduler.abort(["a", "b"], now=1.0)
    stage.step()
    stats = stage.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocked) == (1, 0, 1)
    assert (stats.num_waiting_tokens, stats.num_chunked_prefills, stats.max_rows) == (4, 1, 2)


def test_what_a_broken_request_computed_is_not_found_again():
    stage = Stage(block_size=4)
    stage.add(request("a", 17))
    stage.update(stage.schedule(), non_finite=[0])
    again = request("b", 17)
    again.cache_salt = "a"
    assert stage.cache.match_prefix(again).num_tokens == 0
    assert stage.cache.num_used_blocks == 0
