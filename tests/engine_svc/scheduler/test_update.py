"""What becomes of the tokens of a step: stops, errors, first outputs, times, hooks."""

from __future__ import annotations

import pytest

from engine_svc.request import FinishReason, Request
from engine_svc.step import StepPlan, StepResult
from tests.engine_svc.scheduler.fakes import EOS, NEW_TOKEN, Stage, request


def _drafting_stage(**wishes: object) -> tuple[Stage, Request, StepPlan]:
    """One request that has one token and is about to verify two drafts."""
    stage = Stage(num_speculative_tokens=2)
    drafted = request("a", 8, **wishes)  # type: ignore[arg-type]
    stage.add(drafted)
    stage.update(stage.schedule(), {"a": [5]}, {"a": [10, 11]})
    return stage, drafted, stage.schedule()


def test_the_end_token_stops_one_and_the_other_keeps_both_tokens():
    stage = Stage(num_speculative_tokens=1)
    stage.add(request("a", 8), request("b", 8))
    stage.update(stage.schedule(), drafts={"a": [9], "b": [10]})
    first, second = stage.update(stage.schedule(), {"a": [EOS], "b": [10, 11]})
    assert (first.new_token_ids, first.finish_reason, first.stop_token_id) == ([EOS], FinishReason.STOP, None)
    assert (second.new_token_ids, second.finish_reason) == ([10, 11], None)
    assert stage.scheduler.running_ids == ["b"]


def test_a_stop_token_cuts_what_comes_behind_it():
    stage, stopped, plan = _drafting_stage(stop_token_ids=[42, 43])
    [output] = stage.update(plan, {"a": [10, 42, 12]})
    assert (output.new_token_ids, output.finish_reason, output.stop_token_id) == (
        [10, 42],
        FinishReason.STOP,
        42,
    )
    assert stopped.output_token_ids == [5, 10, 42]


def test_the_length_cuts_what_comes_behind_it():
    stage, stopped, plan = _drafting_stage(max_tokens=3)
    [output] = stage.update(plan, {"a": [10, 11, 12]})
    assert (output.new_token_ids, output.finish_reason) == ([10, 11], FinishReason.LENGTH)
    assert stopped.num_output_tokens == 3


def test_an_ignored_end_token_is_a_token_like_others():
    stage, running, plan = _drafting_stage(ignore_eos=True)
    [output] = stage.update(plan, {"a": [EOS, 10, 11]})
    assert (output.new_token_ids, output.finish_reason) == ([EOS, 10, 11], None)
    assert not running.is_finished


def test_an_end_token_that_is_a_stop_token_too_counts_as_the_end_token():
    stage = Stage()
    stage.add(request("a", 8, stop_token_ids=[EOS]))
    [output] = stage.update(stage.schedule(), {"a": [EOS]})
    assert (output.finish_reason, output.stop_token_id) == (FinishReason.STOP, None)


def test_an_ignored_end_token_that_is_a_stop_token_stops():
    stage = Stage()
    stage.add(request("a", 8, ignore_eos=True, stop_token_ids=[EOS]))
    [output] = stage.update(stage.schedule(), {"a": [EOS]})
    assert (output.finish_reason, output.stop_token_id) == (FinishReason.STOP, EOS)


def test_a_stop_token_at_the_length_limit_is_a_stop():
    stage = Stage()
    stage.add(request("a", 8, max_tokens=1, stop_token_ids=[42]))
    [output] = stage.update(stage.schedule(), {"a": [42]})
    assert (output.finish_reason, output.stop_token_id) == (FinishReason.STOP, 42)


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
    plan = stage.schedule()
    assert plan.released == ["b"]
    assert plan.request_ids == ["a", "c"]


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
    assert listener.heard == [
        "add a",
        "add b",
        "plan a b",
        "finish a length",
        f"update [[{NEW_TOKEN}], [{NEW_TOKEN}]]",
        "finish b abort",
    ]


def test_a_hook_can_block_a_request_that_comes():
    stage = Stage(hooks=[_Listener(blocks="a")])
    stage.add(request("a", 8), request("b", 8))
    assert stage.step().request_ids == ["b"]
    stage.scheduler.unblock("a", "listener")
    assert stage.step().request_ids == ["b", "a"]
