"""The loop: order of its verbs, coalescing, aborts, deadlines, parking, death."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from engine_svc.core.errors import DeviceLost
from engine_svc.core.request import FinishReason, Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import PromptPlaces, StepPlan, TokenLogprobs
from engine_svc.loop.engine import Engine
from engine_svc.loop.mailbox import Abort, Add, Adopt, Board, Call, Inbox, Outbox, Stop
from engine_svc.loop.protocols import NoLockstep
from engine_svc.loop.step_output import StepOutput
from engine_svc.scheduler.hook import SchedulerHook
from service_kit.clock import FakeClock
from tests.engine_svc.fakes import LIMIT_S, FakeExecutor, FakePendingStep, expected_tokens, make_scheduler


class Frontend:
    """Reads an outbox into tokens and ends per handle."""

    def __init__(self) -> None:
        self.woken = threading.Event()
        self.outbox = Outbox(max_bytes=1_000_000, wake=self.woken.set)
        self.tokens: dict[int, list[int]] = {}
        self.ends: list[tuple[int, FinishReason]] = []
        self.cached: dict[int, int] = {}
        self.on_step: Callable[[StepOutput], None] = lambda step: None

    def read(self) -> None:
        step = self.outbox.take()
        if step is None:
            return
        self.on_step(step)
        start = 0
        for handle, num_tokens in zip(step.handles, step.num_tokens, strict=True):
            self.tokens.setdefault(handle, []).extend(step.token_ids[start : start + num_tokens])
            start += num_tokens
        self.ends += [(step.handles[row.row], row.reason) for row in step.finished]
        self.cached |= {step.handles[row]: num_cached for row, num_cached in step.first}

    def read_until_ended(self, num_requests: int) -> None:
        while len(self.ends) < num_requests:
            assert self.woken.wait(LIMIT_S)
            self.woken.clear()
            self.read()


class Rig:
    """An engine with a fake executor, in a thread between `start` and `stop`."""

    def __init__(
        self,
        *,
        on_launch: Callable[[StepPlan], None] = lambda plan: None,
        max_in_flight: int = 1,
        runs_ahead: bool = False,  # a request may be in all of them
        executor: FakeExecutor | None = None,
        hooks: Sequence[SchedulerHook] = (),
        inbox: Inbox | None = None,
    ) -> None:
        self.clock = FakeClock()
        self.executor = executor or FakeExecutor(on_launch)
        self.scheduler = make_scheduler(hooks=hooks, max_steps_in_flight=max_in_flight if runs_ahead else 1)
        self.inbox, self.board = inbox or Inbox(max_commands=1000), Board()
        self.frontend = Frontend()
        self.error: RuntimeError | None = None
        self.engine = Engine(
            scheduler=self.scheduler,
            executor=self.executor,
            inbox=self.inbox,
            board=self.board,
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
        is_kept: bool = False,
        is_suspect: bool = False,
    ) -> None:
        prompt = prompt_of(handle)
        request = Request(
            f"r{handle}", list(prompt), len(prompt), SamplingParams(max_tokens=max_tokens, seed=handle)
        )
        outbox = (frontend or self.frontend).outbox
        assert self.inbox.put(Add(request, outbox, handle, deadline_at, is_kept, is_suspect))

    def start(self) -> None:
        self._thread.start()

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
    rig.start()
    rig.frontend.read_until_ended(10)
    rig.stop()
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
    rig.start()
    rig.frontend.read_until_ended(10)
    rig.stop()
    assert [len(plan.admitted) for plan in plans] == [10]


def test_an_engine_without_work_neither_plans_nor_launches():
    rig = Rig()
    rig.start()
    rig.inbox.put(Abort("nobody"))
    rig.stop()
    assert rig.scheduler.stats().step_number == 0
    assert rig.executor.num_launched == 0


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
    assert rig.board.read().scheduler.num_used_blocks == 2
    rig.inbox.put(Abort("r1"))
    rig.executor.gate.set()
    rig.frontend.read_until_ended(1)
    figures = rig.board.read()
    rig.stop()
    assert rig.frontend.tokens == {1: []}
    assert rig.frontend.ends == [(1, FinishReason.ABORT)]
    assert (figures.scheduler.num_used_blocks, figures.step_number, figures.has_work) == (0, 1, False)


def test_an_abort_does_not_overtake_its_add_and_a_second_one_is_harmless():
    rig = Rig()
    rig.add(1)
    rig.inbox.put(Abort("r1"))
    rig.inbox.put(Abort("r1"))
    rig.add(2, max_tokens=3)
    rig.start()
    rig.frontend.read_until_ended(2)
    rig.stop()
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
    rig.add(1, deadline_at=5.0, max_tokens=20, is_kept=True)
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
    during = rig.board.read()
    rig.executor.gate.set()
    rig.frontend.read_until_ended(1)
    rig.stop()
    after = rig.board.read()
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


def test_a_call_runs_between_steps_and_can_wait_for_those_in_flight():
    rig = Rig(max_in_flight=2)
    seen: list[tuple[str, int]] = []

    def call() -> None:
        rig.engine.settle()
        seen.append((threading.current_thread().name, rig.board.read().num_generated_tokens))

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
    rig.engine.when_idle(lambda: calls.append(rig.board.read().num_finished))
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


def test_cached_tokens_are_told_with_the_first_token():
    rig = Rig()
    rig.start()
    for handle in (1, 2):
        prompt = list(range(9))
        request = Request(f"r{handle}", prompt, len(prompt), SamplingParams(max_tokens=3))
        rig.inbox.put(Add(request, rig.frontend.outbox, handle))
        rig.frontend.read_until_ended(handle)
    rig.stop()
    assert rig.frontend.cached == {1: 0, 2: 8}


class TellingExecutor(FakeExecutor):
    """Tells of every sampled token, and of one place of each row's prompt per chunk, whoever asked."""

    def launch(self, plan: StepPlan) -> FakePendingStep:
        pending = super().launch(plan)
        result = pending.result()
        for row, tokens in enumerate(result.sampled):
            # More than the tokens that count: a step may sample beyond the end.
            result.logprobs[row] = TokenLogprobs([-float(token) for token in tokens] + [-0.5], [*tokens, 1])
            if not tokens:
                start = plan.num_computed_tokens[row] + 1
                result.prompt_logprobs[row] = PromptPlaces(start, TokenLogprobs([-1.0], [start]))
        return pending


def test_what_is_told_of_tokens_reaches_the_handles_they_belong_to():
    rig = Rig(executor=TellingExecutor())
    steps: list[StepOutput] = []
    rig.frontend.on_step = steps.append
    prompt = [3] * 100  # two steps of 64 tokens
    rig.inbox.put(Add(Request("long", prompt, 100, SamplingParams(max_tokens=3)), rig.frontend.outbox, 9))
    for handle in (1, 2):
        rig.add(handle, max_tokens=4)
    rig.start()
    rig.frontend.read_until_ended(3)
    rig.stop()
    told: dict[int, list[float]] = {}
    places: list[int] = []
    for step in steps:
        for handle, part in step.told.sampled.items():
            told.setdefault(handle, []).extend(part.logprobs)
        places += [part.first_position for part in step.told.prompts.get(9, [])]
    assert told == {
        handle: [-float(token) for token in tokens] for handle, tokens in rig.frontend.tokens.items()
    }
    assert places == [1]


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
