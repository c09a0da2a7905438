"""The loop: order of its verbs, coalescing, aborts, deadlines, parking, death."""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from engine_svc.core.errors import DeviceFull, DeviceLost
from engine_svc.core.extras import Extra
from engine_svc.core.request import FinishReason, Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import StepPlan, StepResult, TokenLogprobs
from engine_svc.loop.engine import Engine
from engine_svc.loop.mailbox import Abort, Add, Adopt, Call, Inbox, LoopStats, Outbox, StatsSnapshot, Stop
from engine_svc.loop.protocols import NoLockstep
from engine_svc.loop.recovery import log_failure
from engine_svc.loop.step_output import StepOutput
from engine_svc.scheduler.feature import SchedulerFeature
from engine_svc.scheduler.stats import SchedulerStats
from tests.engine_svc.core_state import num_unfinished
from tests.engine_svc.fakes import LIMIT_S, FakeExecutor, FakePendingStep, expected_tokens, make_scheduler
from tests.engine_svc.loop.frontend import Frontend
from triptych_kit.clock import FakeClock


class Rig:
    """An engine with a fake executor, in a thread between `start` and `stop`."""

    def __init__(
        self,
        *,
        on_launch: Callable[[StepPlan], None] = lambda plan: None,
        max_in_flight: int = 1,
        executor: FakeExecutor | None = None,
        features: Sequence[SchedulerFeature] = (),
        inbox: Inbox | None = None,
    ) -> None:
        self.clock = FakeClock()
        self.executor = executor or FakeExecutor(on_launch)
        self.scheduler = make_scheduler(features=features)
        self.inbox, self.stats_snapshot = inbox or Inbox(max_commands=1000), StatsSnapshot()
        self.frontend = Frontend()
        self.error: RuntimeError | None = None
        self.engine = Engine(
            scheduler=self.scheduler,
            executor=self.executor,
            inbox=self.inbox,
            stats_snapshot=self.stats_snapshot,
            clock=self.clock,
            lockstep=NoLockstep(),
            max_in_flight=max_in_flight,
        )
        self._thread = threading.Thread(target=self._run, daemon=True)

    def add(
        self,
        handle: int,
        *,
        max_tokens: int = 5,
        frontend: Frontend | None = None,
        deadline_at: float | None = None,
        keeps_outputs: bool = False,
    ) -> None:
        prompt = prompt_of(handle)
        request = Request(
            f"r{handle}", list(prompt), len(prompt), SamplingParams(max_tokens=max_tokens, seed=handle)
        )
        outbox = (frontend or self.frontend).outbox
        assert self.inbox.put(Add(request, outbox, handle, deadline_at, keeps_outputs))

    def start(self) -> None:
        self._thread.start()

    def serve(self, num_requests: int) -> None:
        """Run until so many requests have ended."""
        self.start()
        self.frontend.read_until_ended(num_requests)
        self.stop()

    def stop(self) -> None:
        self.inbox.put(Stop())
        self.join()

    def join(self) -> None:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.engine.run()
        except RuntimeError as error:
            self.error = error


def prompt_of(handle: int) -> list[int]:
    return [handle, handle + 1, handle + 2, 7, 8, 9]


def test_requests_get_the_tokens_of_their_own_prompts_and_seeds():
    rig = Rig()
    for handle in range(10):
        rig.add(handle, max_tokens=20)
    rig.serve(10)
    assert rig.frontend.tokens == {
        handle: expected_tokens(prompt_of(handle), handle, 20) for handle in range(10)
    }
    assert sorted(rig.frontend.ends) == [(handle, FinishReason.LENGTH) for handle in range(10)]
    assert rig.executor.is_shut_down


def test_adds_that_wait_together_join_one_step():
    plans: list[StepPlan] = []
    rig = Rig(on_launch=plans.append)
    for handle in range(10):
        rig.add(handle, max_tokens=1)
    rig.serve(10)
    assert [len(plan.admitted) for plan in plans] == [10]


def test_an_engine_without_work_neither_plans_nor_launches():
    rig = Rig()
    rig.start()
    rig.inbox.put(Abort("unknown"))
    rig.stop()
    assert rig.scheduler.stats().step_number == 0
    assert rig.executor.num_launched == 0


class DueTwice(SchedulerFeature):
    """Is due at once, and a second time."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.is_done = threading.Event()

    def on_step(self, now: float) -> float | None:
        self.num_calls += 1
        if self.num_calls < 3:
            return now
        self.is_done.set()
        return None


def test_an_idle_loop_wakes_when_a_feature_is_due_and_then_waits_for_commands():
    due = DueTwice()
    rig = Rig(features=[due])
    rig.start()
    assert due.is_done.wait(LIMIT_S)
    rig.stop()
    assert due.num_calls == 3
    assert rig.scheduler.stats().step_number == 0


def test_outputs_go_to_the_outbox_of_their_own_frontend():
    rig, other = Rig(), Frontend()
    rig.add(1)
    rig.add(2, frontend=other)
    rig.start()
    rig.frontend.read_until_ended(1)
    other.read_until_ended(1)
    rig.stop()
    assert (set(rig.frontend.tokens), set(other.tokens)) == ({1}, {2})


def test_an_abort_during_a_step_drops_that_steps_token_and_frees_the_blocks():
    rig = Rig()
    rig.executor.gate.clear()
    rig.add(1)
    rig.start()
    rig.executor.wait_for_launches(1)
    assert rig.stats_snapshot.read().scheduler.num_used_blocks == 2
    rig.inbox.put(Abort("r1"))
    rig.executor.gate.set()
    rig.frontend.read_until_ended(1)
    loop_stats = rig.stats_snapshot.read()
    rig.stop()
    assert rig.frontend.tokens == {1: []}
    assert rig.frontend.ends == [(1, FinishReason.ABORT)]
    assert (loop_stats.scheduler.num_used_blocks, loop_stats.step_number, loop_stats.has_work) == (
        0,
        1,
        False,
    )


def test_an_abort_does_not_overtake_its_add_and_a_second_one_is_harmless():
    rig = Rig()
    rig.add(1)
    rig.inbox.put(Abort("r1"))
    rig.inbox.put(Abort("r1"))
    rig.add(2, max_tokens=3)
    rig.serve(2)
    assert rig.frontend.ends == [(1, FinishReason.ABORT), (2, FinishReason.LENGTH)]


def test_an_id_can_be_used_again_after_its_end():
    rig = Rig()
    rig.add(1, max_tokens=50)
    rig.start()
    rig.executor.wait_for_launches(1)
    rig.inbox.put(Abort("r1"))
    rig.frontend.read_until_ended(1)
    rig.frontend.tokens.clear()
    rig.add(1, max_tokens=4)
    rig.frontend.read_until_ended(2)
    rig.stop()
    assert rig.frontend.tokens[1] == expected_tokens(prompt_of(1), 1, 4)


def test_a_request_past_its_deadline_is_aborted():
    rig = Rig()
    rig.executor.gate.clear()
    rig.add(1, deadline_at=5.0)
    rig.add(2, max_tokens=3)
    rig.start()
    rig.executor.wait_for_launches(1)
    rig.clock.advance(6.0)
    rig.executor.gate.set()
    rig.frontend.read_until_ended(2)
    rig.stop()
    assert dict(rig.frontend.ends) == {1: FinishReason.ABORT, 2: FinishReason.LENGTH}
    assert len(rig.frontend.tokens[1]) == 1


def test_an_id_used_again_does_not_inherit_the_deadline_of_its_first_life():
    rig = Rig()
    rig.add(1, deadline_at=5.0, max_tokens=2)
    rig.start()
    rig.frontend.read_until_ended(1)
    rig.executor.gate.clear()
    num_launched = rig.executor.num_launched
    rig.add(1, max_tokens=3)
    rig.executor.wait_for_launches(num_launched + 1)
    rig.clock.advance(6.0)
    rig.executor.gate.set()
    rig.frontend.read_until_ended(2)
    rig.stop()
    assert rig.frontend.ends == [(1, FinishReason.LENGTH), (1, FinishReason.LENGTH)]


def test_a_request_that_another_frontend_adopts_keeps_its_deadline():
    rig, other = Rig(), Frontend()
    rig.executor.gate.clear()
    rig.add(1, deadline_at=5.0, max_tokens=20, keeps_outputs=True)
    rig.start()
    rig.executor.wait_for_launches(1)
    assert rig.inbox.put(Adopt("r1", other.outbox, 9))
    rig.clock.advance(6.0)
    rig.executor.gate.set()
    for frontend in (rig.frontend, other):
        frontend.read_until_ended(1)
    rig.stop()
    assert (rig.frontend.ends, other.ends) == ([(1, FinishReason.ABORT)], [(9, FinishReason.ABORT)])


def test_figures_tell_of_a_step_in_flight():
    rig = Rig()
    rig.clock.advance(3.0)
    rig.executor.gate.clear()
    rig.add(1, max_tokens=2)
    rig.start()
    rig.executor.wait_for_launches(1)
    during = rig.stats_snapshot.read()
    rig.executor.gate.set()
    rig.frontend.read_until_ended(1)
    rig.stop()
    after = rig.stats_snapshot.read()
    assert (during.step_number, during.step_started_at, during.has_work) == (1, 3.0, True)
    assert (after.step_number, after.step_started_at, after.has_work) == (2, None, False)
    assert (after.num_prompt_tokens, after.num_generated_tokens, after.num_finished) == (6, 2, 1)


def test_two_steps_are_in_flight_where_the_depth_is_two():
    rig = Rig(max_in_flight=2)
    rig.executor.gate.clear()
    plans: list[int] = []
    rig.executor.on_launch = lambda plan: plans.append(plan.step_number)
    # Six prompt tokens each, sixty-four a step: twelve requests need two steps to enter.
    for handle in range(12):
        rig.add(handle, max_tokens=1)
    rig.start()
    rig.executor.wait_for_launches(2)
    assert rig.frontend.ends == []
    rig.executor.gate.set()
    rig.frontend.read_until_ended(12)
    rig.stop()
    assert plans == [1, 2]


def test_outputs_have_the_number_of_their_step_and_not_of_the_one_launched_last():
    numbers: list[int] = []

    class NumbersOutbox(Outbox):
        def publish(self, output: StepOutput) -> None:
            numbers.append(output.step_number)
            super().publish(output)

    rig = Rig(max_in_flight=2)
    rig.frontend.outbox = NumbersOutbox(max_bytes=1_000_000, wake=rig.frontend.woken.set)
    # As above, two steps are in flight before the first one is published.
    for handle in range(12):
        rig.add(handle, max_tokens=1)
    rig.serve(12)
    assert numbers == [1, 2]


def test_a_call_runs_between_steps_and_can_wait_for_those_in_flight():
    rig = Rig(max_in_flight=2)
    seen: list[tuple[str, int]] = []

    def call() -> None:
        rig.engine.settle()
        seen.append((threading.current_thread().name, rig.stats_snapshot.read().num_generated_tokens))

    rig.add(1, max_tokens=5)
    rig.inbox.put(Call(call))
    rig.start()
    rig.frontend.read_until_ended(1)
    rig.inbox.put(Call(call))
    rig.stop()
    assert [count for _, count in seen] == [0, 5]
    assert {name for name, _ in seen} != {threading.current_thread().name}


def test_an_idle_call_runs_once_when_the_last_request_has_ended():
    rig = Rig()
    calls: list[int] = []
    rig.engine.when_idle(lambda: calls.append(rig.stats_snapshot.read().num_finished))
    for handle in (1, 2, 3):
        rig.add(handle, max_tokens=2 + handle)
    rig.start()
    rig.frontend.read_until_ended(3)
    rig.add(4)
    rig.frontend.read_until_ended(4)
    rig.stop()
    assert calls == [3]


def test_a_lost_device_ends_the_loop_which_lets_go_of_it():
    def fail(plan: StepPlan) -> None:
        raise DeviceLost("device lost")

    rig = Rig(on_launch=fail)
    rig.add(1)
    rig.start()
    rig.join()
    assert str(rig.error) == "device lost"
    assert rig.executor.is_shut_down
    assert rig.frontend.ends == []


def test_cached_tokens_are_reported_with_the_first_token():
    rig = Rig()
    rig.start()
    for handle in (1, 2):
        prompt = list(range(9))
        request = Request(f"r{handle}", prompt, len(prompt), SamplingParams(max_tokens=3))
        rig.inbox.put(Add(request, rig.frontend.outbox, handle))
        rig.frontend.read_until_ended(handle)
    rig.stop()
    assert rig.frontend.cached == {1: 0, 2: 8}


@dataclass(frozen=True)
class Ban(Extra):
    token_id: int


class LogprobExecutor(FakeExecutor):
    """Reports every sampled token."""

    def launch(self, plan: StepPlan) -> FakePendingStep:
        pending = super().launch(plan)
        result = pending.result()
        for row, tokens in enumerate(result.sampled):
            # More than the tokens that count: a step may sample beyond the end.
            result.logprobs[row] = TokenLogprobs([-float(token) for token in tokens] + [-0.5], [*tokens, 1])
        return pending


def test_logprobs_reach_the_handles_they_belong_to():
    rig = Rig(executor=LogprobExecutor())
    steps: list[StepOutput] = []
    rig.frontend.on_step = steps.append
    prompt = [3] * 100  # two steps of 64 tokens
    rig.inbox.put(Add(Request("long", prompt, 100, SamplingParams(max_tokens=3)), rig.frontend.outbox, 9))
    for handle in (1, 2):
        rig.add(handle, max_tokens=4)
    rig.serve(3)
    token_logprobs: dict[int, list[float]] = {}
    for step in steps:
        for handle, part in step.token_logprobs.sampled.items():
            token_logprobs.setdefault(handle, []).extend(part.logprobs)
    assert token_logprobs == {
        handle: [-float(token) for token in tokens] for handle, tokens in rig.frontend.tokens.items()
    }


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_request_has_exactly_one_end(reason):
    rig = Rig()
    stop_at = expected_tokens(prompt_of(1), 1, 3)[-1]
    sampling = SamplingParams(
        max_tokens=5, seed=1, stop_token_ids=frozenset({stop_at} if reason == "stop" else ())
    )
    rig.inbox.put(Add(Request("r1", prompt_of(1), 6, sampling), rig.frontend.outbox, 1))
    rig.start()
    rig.frontend.read_until_ended(1)
    rig.inbox.put(Abort("r1"))
    rig.stop()
    rig.frontend.read()
    assert rig.frontend.ends == [(1, FinishReason(reason))]
    assert len(rig.frontend.tokens[1]) == (3 if reason == "stop" else 5)


# Calls into the engine thread between two steps: when they run, and what others see of them meanwhile.

CALL_BUDGET_S = 600.0


class WatchedStep(FakePendingStep):
    """A step that reads the statistics while its result is waited for."""

    def __init__(self, pending: FakePendingStep, executor: WatchedExecutor) -> None:
        self._pending = pending
        self._executor = executor

    def result(self) -> StepResult:
        assert self._executor.rig is not None
        self._executor.seen.append(self._executor.rig.stats_snapshot.read())
        return self._pending.result()


class WatchedExecutor(FakeExecutor):
    """Keeps the statistics that are read while results are waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.rig: Rig | None = None
        self.seen: list[LoopStats] = []

    def launch(self, plan: StepPlan) -> FakePendingStep:
        return WatchedStep(super().launch(plan), self)


def test_a_call_is_work_with_an_age_and_a_budget_until_it_is_done():
    rig = Rig()
    rig.clock.advance(3.0)
    seen: list[LoopStats] = []
    rig.inbox.put(Call(lambda: seen.append(rig.stats_snapshot.read())))
    rig.add(1, max_tokens=2)
    rig.serve(1)
    (during,) = seen
    assert (during.has_work, during.is_in_call) == (True, True)
    assert (during.step_started_at, during.step_budget_s) == (3.0, CALL_BUDGET_S)
    after = rig.stats_snapshot.read()
    assert (after.has_work, after.is_in_call, after.step_started_at) == (False, False, None)


def test_what_was_asked_for_when_idle_is_judged_as_well():
    rig = Rig()
    seen: list[LoopStats] = []
    rig.add(1, max_tokens=2)
    rig.engine.when_idle(lambda: seen.append(rig.stats_snapshot.read()))
    rig.serve(1)
    assert [(loop_stats.step_started_at, loop_stats.step_budget_s) for loop_stats in seen] == [
        (0.0, CALL_BUDGET_S)
    ]


def test_steps_that_a_call_waits_for_are_judged_as_steps_and_what_follows_as_the_call():
    executor = WatchedExecutor()
    rig = executor.rig = Rig(executor=executor, max_in_flight=2)
    seen: list[LoopStats] = []

    def call() -> None:
        seen.append(rig.stats_snapshot.read())
        rig.clock.advance(7.0)
        rig.engine.settle()
        seen.append(rig.stats_snapshot.read())

    def put_call(plan: StepPlan) -> None:
        # It is taken in with the first step's result, while the second is in flight.
        if plan.step_number == 2:
            rig.inbox.put(Call(call))

    executor.on_launch = put_call
    # Six prompt tokens each, sixty-four a step: they need two steps to enter.
    for handle in range(12):
        rig.add(handle, max_tokens=1)
    rig.serve(12)
    assert [(loop_stats.is_in_call, loop_stats.step_started_at) for loop_stats in seen] == [
        (True, 0.0),
        (True, 7.0),
    ]
    settled = [loop_stats for loop_stats in executor.seen if loop_stats.step_started_at == 7.0]
    assert settled
    assert not any(loop_stats.is_in_call for loop_stats in settled)


# What is counted of requests on their way through the loop, and what is not kept of those that were none.


def test_counts_follow_a_request_and_its_row_is_freed_with_the_next_step():
    plans: list[StepPlan] = []
    rig = Rig(on_launch=plans.append)
    counts: list[tuple[int, int, int]] = []

    def count() -> None:
        stats = rig.scheduler.stats()
        counts.append((stats.num_waiting, stats.num_running, num_unfinished(rig.scheduler)))

    request = Request("r1", [1, 2, 3], 3, SamplingParams(max_tokens=9))
    rig.inbox.put(Add(request, rig.frontend.outbox, 1))
    rig.engine.abort((), "no reason")
    rig.scheduler.add(Request("r2", [1], 1, SamplingParams(max_tokens=1)))
    count()
    rig.scheduler.abort(["r2"], 0.0)
    rig.engine.turn()
    count()
    rig.engine.abort(["r1"], "client")
    count()
    # Nothing is left to compute, so the row waits for a plan that has one.
    assert not rig.engine.turn()
    rig.add(1, max_tokens=1)
    rig.engine.turn()
    rig.engine.close()
    assert counts == [(1, 0, 1), (0, 1, 1), (0, 0, 0)]
    assert [plan.released for plan in plans] == [[], ["r1"]]
    step_tokens = rig.stats_snapshot.counts.step_tokens
    num_tokens = [plan.total_num_tokens for plan in plans]
    assert (step_tokens.sum, sum(step_tokens.counts)) == (sum(num_tokens), 2)
    assert [admitted.request_id for plan in plans for admitted in plan.admitted] == ["r1", "r1"]


def test_aborts_for_unknown_ids_leave_nothing_behind():
    rig = Rig()
    before = rig.scheduler.stats()
    for number in range(10_000):
        rig.inbox.put(Abort(f"unknown-{number}"))
    assert not rig.engine.turn()
    rig.engine.close()
    assert rig.inbox.take() == []
    assert rig.scheduler.stats() == before
    assert rig.executor.num_launched == 0


def test_89_prompts_are_counted_once_when_they_come_and_outputs_with_every_step():
    rig = Rig()

    def counted() -> tuple[int, int]:
        loop_stats = rig.stats_snapshot.read()
        return loop_stats.num_prompt_tokens, loop_stats.num_generated_tokens

    for handle in (1, 2):
        rig.add(handle)
    rig.engine.turn()
    after_prefill = counted()
    rig.engine.turn()
    after_decode = counted()
    rig.add(3)
    rig.engine.turn()
    rig.engine.close()
    prompts = [len(prompt_of(handle)) for handle in (1, 2, 3)]
    assert after_prefill == (sum(prompts[:2]), 2)
    assert after_decode == (sum(prompts[:2]), 4)
    assert counted() == (sum(prompts), 7)


# Steps that fail: the suspect request ends, all others have the tokens of an undisturbed run.


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


def assert_others_are_exact(rig: Rig, handles: range, culprits: set[int], max_tokens: int) -> None:
    for handle in handles:
        if handle not in culprits:
            assert rig.frontend.tokens[handle] == expected_tokens(prompt_of(handle), handle, max_tokens)
    assert dict(rig.frontend.ends) == {
        handle: FinishReason.ERROR if handle in culprits else FinishReason.LENGTH for handle in handles
    }
    assert len(rig.frontend.ends) == len(handles)


@pytest.mark.parametrize("moment", ["before", "middle", "result"])
@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("culprits", [{0}, {7}, {15}, {3, 4}, {2, 14}])
def test_culprits_end_with_an_error_and_the_others_get_their_tokens(moment, max_in_flight, culprits):
    executor = FailingExecutor(poisonous(*(f"r{handle}" for handle in culprits)), moment)
    rig = Rig(executor=executor, max_in_flight=max_in_flight)
    for handle in range(16):
        rig.add(handle, max_tokens=12)
    rig.serve(16)
    assert rig.error is None
    assert_others_are_exact(rig, range(16), culprits, 12)
    assert rig.stats_snapshot.read().scheduler.num_used_blocks == 0


@pytest.mark.parametrize("moment", ["before", "middle", "result"])
def test_a_culprit_that_fails_only_later_is_found_as_well(moment):
    def why(plan: StepPlan) -> Exception | None:
        rows = dict(
            zip(plan.request_ids, zip(plan.num_computed_tokens, plan.num_tokens, strict=True), strict=True)
        )
        return ValueError("too long") if sum(rows.get("r3", (0, 0))) >= 10 else None

    rig = Rig(executor=FailingExecutor(why, moment), max_in_flight=2)
    for handle in range(8):
        rig.add(handle, max_tokens=20)
    rig.serve(8)
    assert_others_are_exact(rig, range(8), {3}, 20)
    # What it had until then is right.
    assert rig.frontend.tokens[3] == expected_tokens(prompt_of(3), 3, 20)[: len(rig.frontend.tokens[3])]
    assert len(rig.frontend.tokens[3]) >= 1


@pytest.mark.parametrize("moment", ["before", "middle", "result"])
def test_a_transient_error_ends_no_request(moment):
    launches: list[int] = []

    def why(plan: StepPlan) -> Exception | None:
        launches.append(plan.step_number)
        return OSError("once") if len(launches) == 4 else None

    executor = FailingExecutor(why, moment)
    rig = Rig(executor=executor, max_in_flight=2)
    for handle in range(9):
        rig.add(handle, max_tokens=15)
    rig.serve(9)
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
    rig.serve(3)
    assert dict(rig.frontend.ends) == {1: FinishReason.LENGTH, 2: FinishReason.LENGTH, 9: FinishReason.ERROR}
    assert rig.frontend.tokens[1] == expected_tokens(prompt_of(1), 1, 10)


def test_blocks_of_a_failed_step_are_never_hit():
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
    rig.serve(2)
    # The newer is received alone first, and finds nothing; then the older finds what it has computed, and the
    # newer, which made room for it, all of its own.
    assert seen == [0, 4, 0, 4, 5]


def test_an_aborted_suspect_does_not_block_others():
    executor = FailingExecutor(poisonous("r1"))
    rig = Rig(executor=executor)

    def why(plan: StepPlan) -> Exception | None:
        rig.inbox.put(Abort("r1"))
        return poisonous("r1")(plan)

    executor.why = why
    for handle in range(4):
        rig.add(handle, max_tokens=6)
    rig.serve(4)
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
    rig.serve(8)
    assert_others_are_exact(rig, range(8), set(), 8)
    assert totals[:2] == [48, 24]


def test_a_request_too_large_alone_ends_and_the_engine_does_not():
    def why(plan: StepPlan) -> Exception | None:
        return DeviceFull("out of memory") if "r5" in plan.request_ids else None

    rig = Rig(executor=FailingExecutor(why), max_in_flight=2)
    for handle in range(8):
        rig.add(handle, max_tokens=8)
    rig.serve(8)
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
    rig.serve(2)
    assert rig.error is None
    messages = [row.message for step in steps for row in step.finished if row.reason is FinishReason.ERROR]
    assert set(messages) == {"the model produced logits that are not finite"}


def test_the_final_output_of_a_culprit_names_the_cause():
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
    sampling = SamplingParams(max_tokens=5, stop_token_ids=frozenset({987_004}))
    request = Request("the-request", canary, 3, sampling, extras={Ban: Ban(987_005)})
    rig.inbox.put(Add(request, rig.frontend.outbox, 1))
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
        "step at the time of the error", "the plans of failed steps cannot be logged",
    ]  # fmt: skip


def test_a_request_that_cannot_be_prepared_ends_without_a_token_and_the_next_is_served():
    class Chooser(SchedulerFeature):
        """Fails to look at prompts that begin with 333."""

        def on_add(self, request: Request) -> None:
            if request.token_ids[0] == 333:
                raise ValueError("cannot be prepared")

    rig = Rig(features=(Chooser(),))
    rig.inbox.put(Add(Request("bad", [333, 1, 2], 3, SamplingParams(max_tokens=4)), rig.frontend.outbox, 7))
    rig.add(1, max_tokens=4)
    rig.serve(2)
    assert dict(rig.frontend.ends) == {7: FinishReason.ERROR, 1: FinishReason.LENGTH}
    assert rig.frontend.tokens == {7: [], 1: expected_tokens(prompt_of(1), 1, 4)}
    assert num_unfinished(rig.scheduler) == 0


# Random worlds of steps that fail, now and then or by a request's fault: which may end with an error.

MAX_TURNS = 5000


class World:
    """Requests of which up to two fail from some length on, and steps of which some fail for no reason."""

    def __init__(self, seed: int) -> None:
        self._rng = rng = random.Random(seed)
        self.num_requests = rng.randint(1, 13)
        culprits = rng.sample(range(self.num_requests), rng.randint(0, min(2, self.num_requests - 1)))
        self.culprits = {handle: rng.randint(1, 17) for handle in culprits}
        self.max_tokens = [rng.randint(3, 13) for _ in range(self.num_requests)]
        self._error_rate = rng.choice([0.02, 0.1, 0.3])
        self.num_alone: Counter[str] = Counter()  # failures of steps that only this one was in, in a row
        self.rig = Rig(
            executor=FailingExecutor(self._why, rng.choice(["before", "middle", "result"])),
            max_in_flight=rng.choice([1, 2]),
        )

    def run(self) -> bool:
        """Serve all; False where the engine took it for the device's fault."""
        rig = self.rig
        for handle, max_tokens in enumerate(self.max_tokens):
            rig.add(handle, max_tokens=max_tokens)
        try:
            for _ in range(MAX_TURNS):
                rig.engine.turn()
                rig.frontend.read()
                if len(rig.frontend.ends) == self.num_requests:
                    return True
        except RuntimeError:
            return False
        raise AssertionError("somebody is never served")

    def _why(self, plan: StepPlan) -> Exception | None:
        rows = zip(plan.request_ids, plan.num_computed_tokens, plan.num_tokens, strict=True)
        lengths = {request_id: computed + count for request_id, computed, count in rows}
        is_poisoned = any(lengths.get(f"r{handle}", 0) >= length for handle, length in self.culprits.items())
        if not is_poisoned and self._rng.random() >= self._error_rate:
            for request_id, samples in zip(plan.request_ids, plan.samples, strict=True):
                if samples:
                    del self.num_alone[request_id]
            return None
        if len(lengths) == 1:
            self.num_alone.update(plan.request_ids)
        return RuntimeError("bad step")


@pytest.mark.parametrize("first_seed", range(0, 400, 50))
def test_no_innocent_ends_with_an_error_unless_it_fails_twice_alone(first_seed):
    num_served = 0
    for seed in range(first_seed, first_seed + 50):
        world = World(seed)
        is_served = world.run()
        num_served += is_served
        frontend = world.rig.frontend
        for handle, reason in frontend.ends:
            tokens = expected_tokens(prompt_of(handle), handle, world.max_tokens[handle])
            if reason is FinishReason.ERROR:
                assert world.num_alone[f"r{handle}"] >= 2, (seed, handle)
                tokens = tokens[: len(frontend.tokens[handle])]
            assert frontend.tokens[handle] == tokens, (seed, handle)
        if is_served:
            assert world.rig.stats_snapshot.read().scheduler.num_used_blocks == 0, seed
    # Most worlds are no reason for an engine to end.
    assert num_served > 30


class PacedInbox(Inbox):
    """Notes each wait and how many steps were planned before it; at wait `last` it calls `on_last`."""

    def __init__(self, last: int) -> None:
        super().__init__(max_commands=1000)
        self.last = last
        self.waits: list[tuple[int, float | None]] = []
        self.num_planned = 0
        self.on_last: Callable[[], None] = lambda: None

    def wait(self, timeout_s: float | None = None) -> None:
        self.waits.append((self.num_planned, timeout_s))
        if len(self.waits) == self.last:
            self.on_last()
        super().wait(timeout_s)


def test_while_no_request_can_run_the_loop_plans_once_a_millisecond(monkeypatch):
    inbox = PacedInbox(last=20)
    rig = Rig(inbox=inbox)
    schedule = rig.scheduler.schedule

    def blocked(now: float) -> StepPlan:
        inbox.num_planned += 1
        return StepPlan(0)

    monkeypatch.setattr(rig.scheduler, "schedule", blocked)
    inbox.on_last = lambda: monkeypatch.setattr(rig.scheduler, "schedule", schedule)
    rig.add(1)
    rig.serve(1)
    # One plan before each wait: the loop does not spin.
    assert inbox.waits[:20] == [(number, 0.001) for number in range(1, 21)]
    assert rig.frontend.tokens == {1: expected_tokens(prompt_of(1), 1, 5)}
