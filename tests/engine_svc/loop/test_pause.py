"""The machine of pauses and sleeps: what each call does in each state, and that nothing wedges it."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import Future

import grpc
import pytest
from google.rpc import status_pb2
from grpc_status import rpc_status

from engine_svc.admin.lifecycle import EngineState
from engine_svc.core.control import RanksDisagree, Refused, WakeTag
from engine_svc.loop.answer import give
from engine_svc.loop.controls import EngineControls
from engine_svc.loop.pause import PauseMode, RunState
from engine_svc.scheduler.config import PauseState
from tests.engine_svc.fakes import LIMIT_S
from tests.engine_svc.loop.controlled_rig import KEEP, WAIT, Controlled, controlled, running, tokens_of
from tests.engine_svc.loop.pause_rig import ALL, ASLEEP, PAUSED, PAUSING, RUNNING, FakeLoop, Rig, in_state
from tests.engine_svc.session.service_rig import LENGTH, make_entry
from triptych.engine.v1 import utility_pb2
from triptych_kit.clock import FakeClock
from triptych_kit.errors import Aborted, FailedPrecondition, Internal, InvalidArgument, ServiceError


@pytest.mark.parametrize(
    ("before", "call", "after"),
    [
        (RUNNING, lambda rig: rig.pause(PauseMode.ABORT), PAUSED),
        (RUNNING, lambda rig: rig.pause(PauseMode.WAIT), PAUSING),
        (RUNNING, lambda rig: rig.pause(PauseMode.KEEP), PAUSED),
        (RUNNING, lambda rig: rig.machine.resume(), RUNNING),
        (RUNNING, lambda rig: rig.sleep(0), ASLEEP),
        (RUNNING, lambda rig: rig.sleep(2, PauseMode.WAIT), PAUSING),
        (RUNNING, lambda rig: rig.machine.wake(), RUNNING),
        (PAUSING, lambda rig: rig.pause(PauseMode.ABORT), PAUSED),
        (PAUSING, lambda rig: rig.pause(PauseMode.WAIT), PAUSING),
        (PAUSING, lambda rig: rig.pause(PauseMode.KEEP), PAUSED),
        (PAUSING, lambda rig: rig.machine.resume(), RUNNING),
        (PAUSING, lambda rig: rig.sleep(1, PauseMode.ABORT), ASLEEP),
        (PAUSING, lambda rig: rig.machine.wake(), PAUSING),
        (PAUSED, lambda rig: rig.pause(PauseMode.ABORT), PAUSED),
        (PAUSED, lambda rig: rig.pause(PauseMode.WAIT), PAUSING),
        (PAUSED, lambda rig: rig.pause(PauseMode.KEEP), PAUSED),
        (PAUSED, lambda rig: rig.machine.resume(), RUNNING),
        (PAUSED, lambda rig: rig.sleep(1), ASLEEP),
        (PAUSED, lambda rig: rig.machine.wake(), PAUSED),
        (ASLEEP, lambda rig: rig.sleep(1), ASLEEP),
        (ASLEEP, lambda rig: rig.machine.wake([WakeTag.WEIGHTS]), ASLEEP),
        (ASLEEP, lambda rig: rig.machine.wake(), RUNNING),
    ],
)
def test_every_call_in_every_state(before, call, after):
    rig = in_state(before)
    call(rig)
    assert rig.machine.state is after


@pytest.mark.parametrize("mode", PauseMode)
def test_who_sleeps_is_not_paused(mode: PauseMode) -> None:
    rig = in_state(ASLEEP)
    assert isinstance(rig.pause(mode).exception(), FailedPrecondition)
    with pytest.raises(FailedPrecondition, match="wake it first"):
        rig.machine.resume()
    assert rig.machine.state is ASLEEP


def test_a_pause_that_waits_is_answered_when_the_last_running_request_has_ended() -> None:
    rig = Rig(num_running=2)
    answer = rig.pause(PauseMode.WAIT)
    rig.loop.turn()
    assert (rig.loop.held, answer.done()) == (PauseState.NEW, False)
    rig.loop.turn()
    assert (rig.loop.held, answer.done()) == (PauseState.ALL, True)
    assert answer.result() is None


def test_a_pause_that_keeps_is_answered_at_once_and_ends_nothing() -> None:
    rig = Rig(num_running=2)
    assert rig.pause(PauseMode.KEEP).done()
    assert (rig.loop.num_running, rig.loop.num_aborted) == (2, 0)


def test_a_pause_that_aborts_ends_all_and_answers_those_that_waited_for_it() -> None:
    rig = Rig(num_running=2)
    waits = rig.pause(PauseMode.WAIT)
    assert rig.pause(PauseMode.ABORT).done()
    assert waits.result(0) is None
    assert rig.loop.num_aborted == 2


def test_who_waits_hears_that_another_ended_the_pause_or_holds_what_runs() -> None:
    rig = Rig(num_running=1)
    first = rig.pause(PauseMode.WAIT)
    rig.machine.resume()
    second = rig.pause(PauseMode.WAIT)
    rig.pause(PauseMode.KEEP)
    assert isinstance(first.exception(0), Aborted)
    assert isinstance(second.exception(0), Aborted)
    assert rig.machine.state is PAUSED


def test_a_pause_whose_caller_gave_up_is_taken_back() -> None:
    rig = Rig(num_running=1)
    assert rig.pause(PauseMode.WAIT).cancel()
    rig.machine.drop_cancelled()
    assert rig.machine.state is RUNNING
    rig.loop.turn()
    rig.loop.turn()
    assert rig.machine.state is RUNNING


def test_a_caller_that_gave_up_in_the_last_moment_leaves_nothing_behind_either() -> None:
    rig = Rig(num_running=1)
    answer = rig.sleep(2, PauseMode.WAIT)
    assert answer.cancel()
    rig.loop.turn()
    assert rig.machine.state is RUNNING
    assert rig.runner.levels == []


def test_what_was_held_when_a_wait_is_given_up_is_held_again() -> None:
    rig = in_state(PAUSED)
    assert rig.pause(PauseMode.WAIT).cancel()
    rig.machine.drop_cancelled()
    assert rig.machine.state is PAUSED
    assert rig.loop.num_running == 2


def test_callers_that_come_and_go_leave_one_call_behind() -> None:
    rig = Rig(num_running=1)
    for _ in range(100):
        rig.pause(PauseMode.WAIT).cancel()
        rig.machine.drop_cancelled()
    assert len(rig.loop.idle_calls) == 1


def test_the_cache_is_forgotten_once_paused_where_asked() -> None:
    rig = Rig(num_running=1)
    rig.pause(PauseMode.WAIT, clear_cache=True)
    assert rig.loop.num_resets == 0
    rig.loop.turn()
    assert rig.loop.num_resets == 1


def test_sleep_forgets_the_cache_before_memory_goes_but_level_0_keeps_it() -> None:
    rig = Rig()
    rig.sleep(0)
    assert (rig.loop.num_resets, rig.runner.levels) == (0, [])
    assert rig.machine.asleep == {WakeTag.SCHEDULING}
    rig.sleep(1)
    assert (rig.loop.num_resets, rig.runner.levels) == (1, [1])
    assert rig.machine.asleep == ALL


def test_all_parts_have_to_be_awake_before_anything_runs() -> None:
    rig = in_state(ASLEEP)
    for part in (WakeTag.SCHEDULING, WakeTag.WEIGHTS):
        rig.machine.wake([part])
        assert rig.loop.held is PauseState.ALL
    rig.machine.wake([WakeTag.KV_CACHE])
    assert rig.loop.held is PauseState.NONE
    assert rig.runner.away == frozenset()


def test_waking_leads_back_into_the_pause_that_was_there_before() -> None:
    rig = in_state(PAUSED)
    rig.sleep(1)
    assert rig.machine.is_paused
    rig.machine.wake()
    assert rig.machine.state is PAUSED


@pytest.mark.parametrize("before", [RUNNING, PAUSED])
def test_a_sleep_that_is_refused_leaves_the_state_it_found(before: RunState) -> None:
    rig = in_state(before)
    rig.runner.error = Refused("no folder to load weights from again")
    error = rig.sleep(2).exception(0)
    assert isinstance(error, FailedPrecondition)
    assert "no folder" in error.message
    assert rig.machine.state is before
    assert rig.machine.asleep == frozenset()


def test_a_sleep_that_finds_blocks_in_use_leaves_the_state_it_found() -> None:
    rig = Rig(num_running=1)
    rig.loop.gives_blocks = False
    assert isinstance(rig.sleep(1).exception(0), FailedPrecondition)
    assert rig.machine.state is RUNNING


def test_a_wake_that_is_refused_can_be_tried_again() -> None:
    rig = in_state(ASLEEP)
    rig.runner.error = Refused("the folder has other weights")
    with pytest.raises(Refused):
        rig.machine.wake()
    assert rig.machine.state is ASLEEP
    rig.machine.wake()
    assert rig.machine.state is RUNNING


def test_after_an_unexpected_error_nothing_runs_before_a_wake() -> None:
    rig = Rig(num_running=1)
    rig.runner.error = RuntimeError("device error")
    assert isinstance(rig.sleep(2).exception(0), RuntimeError)
    assert rig.loop.held is PauseState.ALL
    rig.machine.wake()
    assert rig.machine.state is RUNNING


@pytest.mark.parametrize(("before", "after"), [(RUNNING, RUNNING), (PAUSING, RUNNING), (PAUSED, PAUSED)])
def test_what_is_lost_sends_it_to_sleep_and_waking_it_leads_back(before, after):
    rig = in_state(before)
    rig.loop.num_running = 0
    rig.machine.note_away([WakeTag.WEIGHTS])
    assert (rig.machine.state, rig.machine.asleep) == (ASLEEP, frozenset({WakeTag.WEIGHTS}))
    rig.loop.turn()
    assert rig.loop.held is PauseState.ALL
    rig.machine.wake()
    assert rig.machine.state is after


def test_what_is_lost_while_it_sleeps_has_to_be_woken_too() -> None:
    rig = Rig()
    rig.sleep(0)
    rig.machine.note_away([WakeTag.WEIGHTS])
    rig.machine.wake([WakeTag.SCHEDULING])
    assert (rig.machine.state, rig.machine.asleep) == (ASLEEP, frozenset({WakeTag.WEIGHTS}))
    rig.machine.wake([WakeTag.WEIGHTS])
    assert rig.machine.state is RUNNING


def test_who_waits_for_a_pause_hears_that_it_fell_asleep_instead() -> None:
    rig = Rig(num_running=1)
    waits = rig.pause(PauseMode.WAIT)
    rig.loop.num_running = 0
    rig.machine.note_away([WakeTag.WEIGHTS])
    assert isinstance(waits.exception(0), Aborted)


@pytest.mark.parametrize("level", [-1, 3, 1 << 31])
def test_a_level_that_is_none_changes_nothing(level: int) -> None:
    rig = Rig(num_running=1)
    assert isinstance(rig.sleep(level, PauseMode.ABORT).exception(0), InvalidArgument)
    assert rig.machine.state is RUNNING
    assert rig.loop.num_aborted == 0


def test_nothing_is_given_up_where_other_ranks_step_again_until_all_requests_have_ended():
    rig = Rig(num_running=1)
    answer = rig.sleep(1, PauseMode.WAIT)
    rig.loop.is_wanted = True
    rig.loop.turn()
    with pytest.raises(FailedPrecondition, match="another rank steps"):
        answer.result(0)
    assert (rig.machine.state, rig.runner.levels, rig.runner.away) == (RUNNING, [], frozenset())


@pytest.mark.parametrize("seed", range(500))
def test_no_sequence_of_calls_and_failures_wedges_it(seed: int) -> None:
    rng = random.Random(seed)
    rig = Rig(num_running=rng.randrange(4))
    answers: list[Future[None]] = []
    for _ in range(rng.randrange(5, 60)):
        if rng.random() < 0.3:
            rig.runner.error = rng.choice([Refused("no"), RuntimeError("fault")])
        rig.loop.gives_blocks = rng.random() < 0.9
        step(rig, rng, answers)
        check(rig, answers)
    rig.runner.error, rig.loop.gives_blocks = None, True
    rig.machine.wake()
    rig.machine.resume()
    assert rig.machine.state is RUNNING
    assert rig.loop.held is PauseState.NONE
    assert rig.runner.away == frozenset()
    assert all(answer.done() for answer in answers)
    last = rig.pause(PauseMode.WAIT)
    for _ in range(rig.loop.num_running + 1):
        rig.loop.turn()
    assert last.result(0) is None


def step(rig: Rig, rng: random.Random, answers: list[Future[None]]) -> None:
    """One call, or something that happens between two."""
    mode = rng.choice(list(PauseMode))
    parts = rng.sample(list(WakeTag), rng.randrange(4))
    try:
        match rng.randrange(9):
            case 0:
                answers.append(rig.pause(mode, clear_cache=rng.random() < 0.3))
            case 1:
                answers.append(rig.sleep(rng.randrange(4), mode))
            case 2:
                rig.machine.wake(parts)
            case 3:
                rig.machine.resume()
            case 4 if answers:
                rng.choice(answers).cancel()
                rig.machine.drop_cancelled()
            case 5:
                rig.loop.num_running += rig.loop.held is PauseState.NONE
            case 6 if not rig.loop.num_running or rig.loop.held is PauseState.ALL:
                rig.runner.away |= {WakeTag.WEIGHTS}
                rig.machine.note_away([WakeTag.WEIGHTS])
            case _:
                rig.loop.turn()
    except (ServiceError, Refused, RuntimeError):
        pass


def check(rig: Rig, answers: list[Future[None]]) -> None:
    """What holds after every call, failed or not."""
    state = rig.machine.state
    assert (state is ASLEEP) == bool(rig.machine.asleep)
    assert rig.loop.held is {RUNNING: PauseState.NONE, PAUSING: PauseState.NEW}.get(state, PauseState.ALL)
    assert rig.runner.away <= rig.machine.asleep, "a step would find memory missing"
    assert state is PAUSING or all(answer.done() for answer in answers)


class DifferentWeights:
    """Two ranks that have read different weights."""

    def call_all(self, name: str, arguments: object) -> list[dict[str, str]]:
        return [{"digest": "first"}, {"digest": "second"}]


def test_ranks_with_different_weights_end_the_engine() -> None:
    loop, answer = FakeLoop(), Future[None]()
    controls = EngineControls(
        loop=loop, scheduler=loop, lockstep=loop, ranks=DifferentWeights(), clock=FakeClock()
    )
    with pytest.raises(RanksDisagree, match="changed while they were read"):
        give(answer, lambda: controls.update_weights(None, ""))
    assert isinstance(answer.exception(0), Internal)


# The end of an engine that an operator has paused or put to sleep: what is held moves at once.


async def check_drained(engine: Controlled) -> None:
    """The session is over, and its frontend knows that the engine has left with requests of its own."""
    frontend = engine.frontend
    await frontend.until(lambda: frontend.is_over)
    assert frontend.error is not None
    assert frontend.error.code() is grpc.StatusCode.UNAVAILABLE
    status: status_pb2.Status = rpc_status.from_call(frontend.error)
    assert b"ENGINE_DRAINED" in b"".join(detail.value for detail in status.details)
    assert engine.rig.engine.lifecycle.state is EngineState.STOPPED


@pytest.mark.parametrize("call", [{"pause": {"mode": KEEP}}, {"sleep": {"level": 1, "mode": KEEP}}])
async def test_what_is_held_is_not_waited_for(call):
    async with controlled() as engine:
        await engine.call(**call)
        await engine.frontend.add(make_entry(1))
        await engine.pass_by()
        async with asyncio.timeout(LIMIT_S):
            await engine.rig.servicer.drain()
        await check_drained(engine)
        assert engine.frontend.tokens == {}


async def test_a_pause_that_lets_the_running_finish_is_waited_for_and_no_longer():
    async with controlled() as engine:
        await running(engine, 1, num_tokens=30)
        pause = utility_pb2.PauseCall(mode=WAIT)
        pausing = asyncio.create_task(engine.call(pause=pause))
        await engine.let_calls_begin()
        await engine.frontend.add(make_entry(2))
        await engine.frontend.flush()
        drain = asyncio.create_task(engine.rig.servicer.drain())
        await engine.frontend.until(lambda: "draining" in engine.frontend.kinds())
        assert not drain.done()
        engine.rig.executor.gate.set()
        await pausing
        async with asyncio.timeout(LIMIT_S):
            await drain
        await check_drained(engine)
        assert engine.frontend.finished == {1: [LENGTH]}
        assert engine.frontend.tokens == {1: tokens_of(1, 30)}
