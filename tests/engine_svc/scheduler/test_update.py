"""What becomes of the tokens of a step: stops, errors, first outputs, times, hooks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from engine_svc.core.extras import Extra, Extras
from engine_svc.core.request import (
    NO_STOP_TOKEN,
    FinishReason,
    FirstOutput,
    PrefillStats,
    Request,
    RequestOutput,
    Verdict,
)
from engine_svc.core.step import StepPlan, StepResult, TokenLogprobs
from engine_svc.scheduler.feature import SchedulerFeature
from engine_svc.scheduler.stats import SchedulerStats
from engine_svc.speculation.accounting import DraftStats
from tests.engine_svc.core_state import num_unfinished
from tests.engine_svc.scheduler.doubles import BlockHolder
from tests.engine_svc.scheduler.fakes import NEW_TOKEN, Stage, request


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
    assert stage.scheduler.stats().num_non_finite_rows == 1


def test_a_row_whose_rules_leave_no_token_ends_its_request_and_names_them():
    @dataclass(frozen=True)
    class Rule(Extra):
        rules: tuple[str, ...] = ("only_these",)

    stage = Stage()
    ruled = request("d", 8, min_tokens=2)
    ruled.extras = {Rule: Rule(), Extra: Extra()}
    stage.add(*(request(name, 8) for name in "abc"), ruled)
    outputs = stage.update(stage.schedule(), non_finite=[2], barred=[1, 3])
    assert [(output.request_id, output.message) for output in outputs] == [
        ("b", "the request's own rules leave no token to choose"),
        ("c", "the model produced logits that are not finite"),
        ("d", "the request's own rules leave no token to choose: min_tokens, only_these"),
        ("a", ""),
    ]
    failures = [output.failure for output in outputs]
    assert [failure and failure.rules for failure in failures] == [
        None,
        None,
        ("min_tokens", "only_these"),
        None,
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
    assert num_unfinished(stage.scheduler) == 0


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


class _First(Extra): ...


class _Second(Extra): ...


class _Listener(SchedulerFeature):
    """Records its calls, and blocks what it was asked to."""

    def __init__(self, blocks: str = "") -> None:
        self.calls: list[str] = []
        self._blocks = blocks

    def on_add(self, request: Request) -> None:
        self.calls.append(f"add {request.request_id}")
        if request.request_id == self._blocks:
            request.blockers.add("listener")

    def on_plan(self, plan: StepPlan) -> None:
        self.calls.append(f"plan {' '.join(plan.request_ids)}")
        plan.extras[_First] = self

    def on_update(self, plan: StepPlan, result: StepResult) -> None:
        assert plan.extras[_First] is self
        self.calls.append(f"update {result.sampled}")

    def on_withdraw(self) -> None:
        self.calls.append("withdraw")

    def on_finish(self, request: Request) -> None:
        assert request.finish_reason is not None
        self.calls.append(f"finish {request.request_id} {request.finish_reason.value}")


def test_features_observe_everything_in_order():
    listener = _Listener()
    stage = Stage(features=[listener])
    stage.add(request("a", 8, max_tokens=1), request("b", 8))
    stage.step()
    stage.scheduler.abort(["b"], now=2.0)
    stage.schedule()
    stage.add(request("c", 8))
    stage.schedule()
    stage.scheduler.withdraw(now=3.0)
    assert listener.calls == [
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


def test_features_are_called_in_the_order_of_registration():
    calls: list[str] = []
    first, second = _Listener(), _Listener(blocks="a")
    first.calls = second.calls = calls
    stage = Stage(features=[first, second])
    blocked = request("a", 8)
    stage.add(blocked)
    stage.scheduler.abort(["a"], now=1.0)
    assert calls == ["add a", "add a", "finish a abort", "finish a abort"]
    assert blocked.blockers == {"listener"}


def test_features_are_not_called_for_plans_without_rows():
    listener = _Listener()
    stage = Stage(features=[listener])
    stage.update(stage.schedule())
    assert listener.calls == []


# What behaviour 66 needs of the scheduler: features see the end before the blocks are free.
def test_who_still_needs_the_blocks_of_a_request_that_ends_can_keep_them():
    holder = BlockHolder()
    stage = Stage(features=[holder])
    holder.kv_cache = stage.cache
    stage.add(request("a", 40, max_tokens=1), request("b", 8))
    stage.step()
    assert stage.cache.num_used_blocks == 4
    stage.step()
    assert stage.cache.num_used_blocks == 4
    holder.release_held()
    assert stage.cache.num_used_blocks == 1


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
        num_non_finite_rows=0,
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


def test_the_first_output_says_how_the_prompt_was_computed():
    stage = Stage(max_num_batched_tokens=20)
    whole, chunked = request("a", 18, salt="s"), request("b", 40, salt="s")
    chunked.timeline.queued_at = 0.5
    stage.add(whole, chunked)
    outputs = [output for _ in range(3) for output in stage.update(stage.schedule()) if output.first]
    # The block of 16 tokens that "a" has filled; 2 tokens in the first step, then 19, then the rest.
    assert [(output.request_id, output.first) for output in outputs] == [
        ("a", FirstOutput(0, PrefillStats(num_prompt_tokens=18, num_chunks=1, queue_s=1.0, prefill_s=0.0))),
        ("b", FirstOutput(16, PrefillStats(num_prompt_tokens=40, num_chunks=3, queue_s=0.5, prefill_s=2.0))),
    ]


def test_a_request_without_a_first_token_has_no_times_of_its_prompt():
    stage = Stage(max_num_batched_tokens=5)
    stage.add(request("a", 8))
    stage.step()
    (output,) = stage.scheduler.abort(["a"], now=2.0)
    assert output.first == FirstOutput(0)


class _Judge(SchedulerFeature):
    """Has a verdict on requests whose names begin with "judged", and notes what it was asked."""

    def __init__(self, verdict: Verdict | None = None, *, at: int = 1) -> None:
        self._verdict = verdict
        self._at = at
        self.asked: list[tuple[str, list[int], FinishReason | None, Extras]] = []

    def on_add(self, request: Request) -> None:
        request.needs_verdict = request.request_id.startswith("judged")

    def verdict(self, request: Request, output: RequestOutput, extras: Extras) -> Verdict | None:
        self.asked.append((request.request_id, output.new_token_ids, output.finish_reason, extras))
        return self._verdict if request.num_output_tokens == self._at else None


def run_until_idle(stage: Stage) -> list[RequestOutput]:
    outputs = []
    while stage.scheduler.has_work:
        outputs += stage.update(stage.schedule())
    return outputs


def test_only_requests_that_need_a_verdict_are_judged():
    judge = _Judge()
    stage = Stage(features=[judge])
    stage.add(request("a", 8, max_tokens=2), request("judged", 8, max_tokens=2))
    outputs = run_until_idle(stage)
    assert [output.finish_reason for output in outputs if output.finish_reason] == [FinishReason.LENGTH] * 2
    assert judge.asked == [
        ("judged", [NEW_TOKEN], None, {}),
        ("judged", [NEW_TOKEN], FinishReason.LENGTH, {}),
    ]


def code_of(output: RequestOutput) -> str:
    return "" if output.failure is None else output.failure.code


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.ERROR, FinishReason.LENGTH])
@pytest.mark.parametrize("num_tokens", [None, 0])
@pytest.mark.parametrize("max_tokens", [2, 9])
def test_a_verdict_ends_its_request_with_or_without_the_token(reason, num_tokens, max_tokens):
    verdict = Verdict(reason, num_tokens, "INTERNAL", "it cannot go on")
    stage = Stage(features=[_Judge(verdict, at=2)])
    judged = request("judged", 8, max_tokens=max_tokens)
    stage.add(judged, request("other", 8, max_tokens=3))
    outputs = run_until_idle(stage)
    ends = {output.request_id: output for output in outputs if output.finish_reason is not None}
    end = ends["judged"]
    kept = [NEW_TOKEN] if num_tokens is None else []
    assert (end.new_token_ids, end.finish_reason, code_of(end), end.message) == (
        kept,
        reason,
        "INTERNAL",
        "it cannot go on",
    )
    assert end.stop_token_id == (NO_STOP_TOKEN if reason is FinishReason.STOP else None)
    assert judged.output_token_ids == [NEW_TOKEN, *kept]
    assert ends["other"].finish_reason is FinishReason.LENGTH
    assert stage.scheduler.stats().num_used_blocks == 0


def test_a_verdict_is_given_the_extras_of_its_row_and_cuts_logprobs():
    judge = _Judge(Verdict(FinishReason.STOP, 1))
    stage = Stage(features=[judge], num_speculative_tokens=2)
    stage.add(request("other", 8), request("judged", 8))
    plan = stage.schedule()
    result = StepResult(plan.step_number, [[7], [8]], extras={_First: {1: 5}, _Second: {0: "x"}})
    result.logprobs[1] = TokenLogprobs([-0.5], [1])
    outputs = stage.scheduler.update(plan, result, 1.0)
    assert judge.asked == [("judged", [8], None, {_First: 5})]
    assert [output.new_token_ids for output in outputs] == [[7], [8]]
    assert result.logprobs[1].logprobs == [-0.5]


def test_a_verdict_without_a_token_has_no_logprobs():
    stage = Stage(features=[_Judge(Verdict(FinishReason.STOP, 0))])
    stage.add(request("judged", 8))
    plan = stage.schedule()
    result = StepResult(plan.step_number, [[8]], logprobs={0: TokenLogprobs([-0.5], [1])})
    (output,) = stage.scheduler.update(plan, result, 1.0)
    assert (output.new_token_ids, result.logprobs) == ([], {})


@pytest.mark.parametrize("fault", [RuntimeError("no such state"), Verdict(FinishReason.STOP, 2)])
def test_a_verdict_that_fails_ends_its_request_alone(fault, caplog):
    class Failing(_Judge):
        def verdict(self, request: Request, output: RequestOutput, extras: Extras) -> Verdict | None:
            if isinstance(fault, Exception):
                raise fault
            return fault

    stage = Stage(features=[Failing()])
    stage.add(request("judged", 8), request("other", 8, max_tokens=3))
    outputs = run_until_idle(stage)
    ends = {output.request_id: output for output in outputs if output.finish_reason is not None}
    end = ends["judged"]
    assert (end.finish_reason, code_of(end), end.new_token_ids) == (
        FinishReason.ERROR,
        "INTERNAL",
        [NEW_TOKEN],
    )
    assert end.message.startswith("Failing failed: ")
    assert ends["other"].finish_reason is FinishReason.LENGTH
    assert [record.feature for record in caplog.records] == ["Failing"]
