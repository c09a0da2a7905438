"""Steps that fail: the offender ends, everybody else has the tokens of an undisturbed run."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from engine_svc.core.errors import DeviceFull, DeviceLost
from engine_svc.core.request import FinishReason, Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.loop.failure_dump import log_failure
from engine_svc.loop.mailbox import Abort, Add
from engine_svc.loop.step_output import StepOutput
from engine_svc.scheduler.stats import SchedulerStats
from tests.engine_svc.fakes import FakeExecutor, FakePendingStep, expected_tokens
from tests.engine_svc.loop.test_engine import Rig, prompt_of


class FailingStep(FakePendingStep):
    """A step whose error is seen when its result is asked for."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> StepResult:
        raise self._error


class FailingExecutor(FakeExecutor):
    """Fails where `why` has an error for a plan: before it does anything, with the rows in, or at the end."""

    def __init__(self, why: Callable[[StepPlan], Exception | None], moment: str = "before") -> None:
        super().__init__()
        self.why = why
        self.moment = moment
        self.num_failures = 0

    def launch(self, plan: StepPlan) -> FakePendingStep:
        error = self.why(plan)
        if error is None:
            return super().launch(plan)
        self.num_failures += 1
        if self.moment == "before":
            raise error
        super().launch(plan)
        if self.moment == "middle":
            raise error
        return FailingStep(error)


def poisonous(*request_ids: str) -> Callable[[StepPlan], Exception | None]:
    """Every plan fails that one of these is in."""

    def why(plan: StepPlan) -> Exception | None:
        return None if set(request_ids).isdisjoint(plan.request_ids) else ValueError("bad row")

    return why


def assert_others_are_exact(rig: Rig, handles: range, offenders: set[int], max_tokens: int) -> None:
    for handle in handles:
        if handle not in offenders:
            assert rig.frontend.tokens[handle] == expected_tokens(prompt_of(handle), handle, max_tokens)
    assert dict(rig.frontend.ends) == {
        handle: FinishReason.ERROR if handle in offenders else FinishReason.LENGTH for handle in handles
    }
    assert len(rig.frontend.ends) == len(handles)


@pytest.mark.parametrize("moment", ["before", "middle", "result"])
@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("offenders", [{0}, {7}, {15}, {3, 4}, {2, 14}])
def test_offenders_end_with_an_error_and_the_others_get_their_tokens(moment, max_in_flight, offenders):
    executor = FailingExecutor(poisonous(*(f"r{handle}" for handle in offenders)), moment)
    rig = Rig(executor=executor, max_in_flight=max_in_flight)
    for handle in range(16):
        rig.add(handle, max_tokens=12)
    rig.start()
    rig.frontend.read_until_ended(16)
    rig.stop()
    assert rig.error is None
    assert_others_are_exact(rig, range(16), offenders, 12)
    assert rig.board.read().scheduler.num_used_blocks == 0


@pytest.mark.parametrize("moment", ["before", "middle", "result"])
def test_an_offender_that_fails_only_later_is_found_as_well(moment):
    def why(plan: StepPlan) -> Exception | None:
        rows = dict(
            zip(plan.request_ids, zip(plan.num_computed_tokens, plan.num_tokens, strict=True), strict=True)
        )
        return ValueError("too long") if sum(rows.get("r3", (0, 0))) >= 10 else None

    rig = Rig(executor=FailingExecutor(why, moment), max_in_flight=2)
    for handle in range(8):
        rig.add(handle, max_tokens=20)
    rig.start()
    rig.frontend.read_until_ended(8)
    rig.stop()
    assert_others_are_exact(rig, range(8), {3}, 20)
    # What it had until then is right.
    assert rig.frontend.tokens[3] == expected_tokens(prompt_of(3), 3, 20)[: len(rig.frontend.tokens[3])]
    assert len(rig.frontend.tokens[3]) >= 1


@pytest.mark.parametrize("moment", ["before", "middle", "result"])
def test_an_error_that_does_not_come_back_ends_nobody(moment):
    launches: list[int] = []

    def why(plan: StepPlan) -> Exception | None:
        launches.append(plan.step_number)
        return OSError("once") if len(launches) == 4 else None

    executor = FailingExecutor(why, moment)
    rig = Rig(executor=executor, max_in_flight=2)
    for handle in range(9):
        rig.add(handle, max_tokens=15)
    rig.start()
    rig.frontend.read_until_ended(9)
    rig.stop()
    assert executor.num_failures == 1
    assert_others_are_exact(rig, range(9), set(), 15)


def test_prompts_of_several_steps_are_heard_to_their_end():
    def why(plan: StepPlan) -> Exception | None:
        # The chunks before the last are harmless.
        for request_id, computed in zip(plan.request_ids, plan.num_computed_tokens, strict=True):
            if request_id == "long" and computed >= 64:
                return ValueError("bad end")
        return None

    rig = Rig(executor=FailingExecutor(why))
    prompt = [*range(100)]
    rig.add(1, max_tokens=10)
    rig.inbox.put(Add(Request("long", prompt, 100, SamplingParams(max_tokens=3)), rig.frontend.outbox, 9))
    rig.add(2, max_tokens=10)
    rig.start()
    rig.frontend.read_until_ended(3)
    rig.stop()
    assert dict(rig.frontend.ends) == {1: FinishReason.LENGTH, 2: FinishReason.LENGTH, 9: FinishReason.ERROR}
    assert rig.frontend.tokens[1] == expected_tokens(prompt_of(1), 1, 10)


def test_blocks_of_a_step_that_failed_are_hit_by_nobody():
    prompt = [5] * 20
    seen: list[int] = []

    def why(plan: StepPlan) -> Exception | None:
        seen.extend(len(admitted.block_ids[0]) for admitted in plan.admitted)
        return OSError("once") if plan.step_number == 1 else None

    rig = Rig(executor=FailingExecutor(why))
    # Of one step, so that the second hits what the first was to compute.
    for handle in (1, 2):
        request = Request(f"r{handle}", prompt.copy(), 20, SamplingParams(max_tokens=3))
        rig.inbox.put(Add(request, rig.frontend.outbox, handle))
    rig.start()
    rig.frontend.read_until_ended(2)
    rig.stop()
    # The newer is heard alone first, and finds nothing; then the older finds what it has computed, and the
    # newer, which made room for it, all of its own.
    assert seen == [0, 4, 0, 4, 5]


def test_a_suspect_that_is_aborted_meanwhile_holds_nobody_up():
    executor = FailingExecutor(poisonous("r1"))
    rig = Rig(executor=executor)

    def why(plan: StepPlan) -> Exception | None:
        rig.inbox.put(Abort("r1"))
        return poisonous("r1")(plan)

    executor.why = why
    for handle in range(4):
        rig.add(handle, max_tokens=6)
    rig.start()
    rig.frontend.read_until_ended(4)
    rig.stop()
    assert dict(rig.frontend.ends)[1] is FinishReason.ABORT
    assert {reason for handle, reason in rig.frontend.ends if handle != 1} == {FinishReason.LENGTH}


def test_a_step_too_large_for_the_device_is_run_again_with_half_of_its_tokens():
    totals: list[int] = []

    def why(plan: StepPlan) -> Exception | None:
        totals.append(plan.total_num_tokens)
        return DeviceFull("out of memory") if plan.total_num_tokens > 30 else None

    rig = Rig(executor=FailingExecutor(why))
    for handle in range(8):
        rig.add(handle, max_tokens=8)
    rig.start()
    rig.frontend.read_until_ended(8)
    rig.stop()
    assert_others_are_exact(rig, range(8), set(), 8)
    assert totals[:2] == [48, 24]


def test_whoever_is_too_large_alone_ends_and_the_engine_does_not():
    def why(plan: StepPlan) -> Exception | None:
        return DeviceFull("out of memory") if "r5" in plan.request_ids else None

    rig = Rig(executor=FailingExecutor(why), max_in_flight=2)
    for handle in range(8):
        rig.add(handle, max_tokens=8)
    rig.start()
    rig.frontend.read_until_ended(8)
    rig.stop()
    assert_others_are_exact(rig, range(8), {5}, 8)


@pytest.mark.parametrize("num_requests", [1, 6])
def test_a_lost_device_ends_the_loop_at_once_and_no_request(num_requests):
    executor = FailingExecutor(lambda plan: DeviceLost("CUDA error") if plan.step_number == 3 else None)
    rig = Rig(executor=executor, max_in_flight=2)
    for handle in range(num_requests):
        rig.add(handle, max_tokens=9)
    rig.start()
    rig.join()
    assert isinstance(rig.error, DeviceLost)
    assert executor.num_failures == 1
    assert rig.executor.is_shut_down
    rig.frontend.read()
    assert rig.frontend.ends == []


def test_a_device_that_runs_nothing_any_more_ends_the_loop_and_no_request():
    executor = FailingExecutor(lambda plan: RuntimeError("strange") if plan.step_number >= 5 else None)
    rig = Rig(executor=executor, max_in_flight=2)
    for handle in range(16):
        rig.add(handle, max_tokens=50)
    rig.start()
    rig.join()
    assert str(rig.error) == "strange"
    rig.frontend.read()
    assert rig.frontend.ends == []


class SpoiltExecutor(FakeExecutor):
    """From a step on, the logits of every row are not finite, or of one row alone."""

    def __init__(self, from_step: int, *, one_row: bool) -> None:
        super().__init__()
        self._from_step = from_step
        self._one_row = one_row

    def launch(self, plan: StepPlan) -> FakePendingStep:
        pending = super().launch(plan)
        result = pending.result()
        if plan.step_number >= self._from_step:
            result.non_finite = [0] if self._one_row else [*range(len(plan.request_ids))]
            for row in result.non_finite:
                result.sampled[row] = []
        return pending


def test_broken_logits_of_every_row_in_two_steps_end_the_loop():
    rig = Rig(executor=SpoiltExecutor(2, one_row=False))
    # Twelve enter with the first step, the others with later ones.
    for handle in range(24):
        rig.add(handle, max_tokens=20)
    rig.start()
    rig.join()
    assert "finite" in str(rig.error)


def test_broken_logits_of_one_row_end_that_request_alone_and_say_why():
    rig = Rig(executor=SpoiltExecutor(3, one_row=True))
    steps: list[StepOutput] = []
    rig.frontend.on_step = steps.append
    for handle in range(2):
        rig.add(handle, max_tokens=4)
    rig.start()
    rig.frontend.read_until_ended(2)
    rig.stop()
    assert rig.error is None
    messages = [row.message for step in steps for row in step.finished if row.reason is FinishReason.ERROR]
    assert set(messages) == {"the model yielded logits that are not finite"}


def test_the_end_of_an_offender_says_so():
    rig = Rig(executor=FailingExecutor(poisonous("r1")))
    steps: list[StepOutput] = []
    rig.frontend.on_step = steps.append
    rig.add(1)
    rig.start()
    rig.frontend.read_until_ended(1)
    # A request later is served as ever.
    rig.add(2, max_tokens=3)
    rig.frontend.read_until_ended(2)
    rig.stop()
    assert [row.message for step in steps for row in step.finished] == [
        "every step that computes this request fails", "",
    ]  # fmt: skip
    assert rig.frontend.tokens[2] == expected_tokens(prompt_of(2), 2, 3)


def test_a_failure_is_logged_by_ids_and_counts_and_never_by_content(caplog):
    caplog.set_level(logging.DEBUG)
    rig = Rig(executor=FailingExecutor(lambda plan: DeviceLost("gone")))
    canary = [987_001, 987_002, 987_003]
    sampling = SamplingParams(max_tokens=5, stop_token_ids=frozenset({987_004}), bad_words=((987_005,),))
    rig.inbox.put(Add(Request("the-request", canary, 3, sampling), rig.frontend.outbox, 1))
    rig.start()
    rig.join()
    text = "\n".join(str(vars(record)) for record in caplog.records)
    assert "the-request" in text
    assert "'num_tokens': [3]" in text
    assert "num_used_blocks" in text
    assert "98700" not in text


def test_what_cannot_be_described_does_not_hide_the_error(caplog):
    def no_figures() -> SchedulerStats:
        raise ZeroDivisionError

    log_failure([StepPlan(1, request_ids=["a"])], no_figures)
    assert [record.getMessage() for record in caplog.records] == [
        "step at the time of the error", "what failed cannot be described",
    ]  # fmt: skip


def test_a_request_that_cannot_be_prepared_ends_without_a_token_and_the_next_is_served():
    class Chooser:
        """Fails to look at prompts that begin with 333."""

        def on_add(self, request: Request) -> None:
            if request.token_ids[0] == 333:
                raise ValueError("cannot be prepared")

        def on_plan(self, plan: StepPlan) -> None:
            pass

        def on_update(self, plan: StepPlan, result: StepResult) -> None:
            pass

        def on_withdraw(self) -> None:
            pass

        def on_finish(self, request: Request) -> None:
            pass

    rig = Rig(hooks=(Chooser(),))
    rig.inbox.put(Add(Request("bad", [333, 1, 2], 3, SamplingParams(max_tokens=4)), rig.frontend.outbox, 7))
    rig.add(1, max_tokens=4)
    rig.start()
    rig.frontend.read_until_ended(2)
    rig.stop()
    assert dict(rig.frontend.ends) == {7: FinishReason.ERROR, 1: FinishReason.LENGTH}
    assert rig.frontend.tokens == {7: [], 1: expected_tokens(prompt_of(1), 1, 4)}
    assert rig.scheduler.num_unfinished == 0
