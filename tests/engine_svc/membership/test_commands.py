"""What the coordinator tells an engine: waves, generations, leaving, draining; done once, or refused."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace

import grpc
import pytest

from engine_svc.admin import announce
from engine_svc.admin.lifecycle import EngineState, Lifecycle
from engine_svc.admin.served_engine import Failure, LoadedCore, ServedEngine
from engine_svc.core.facts import EngineIdentity
from engine_svc.data_parallel.group import Meeting
from engine_svc.loop.mailbox import Stop
from engine_svc.loop.pause import StandstillState
from engine_svc.membership.commands import EXIT_MISMATCH, CommandDesk
from engine_svc.membership.departure import Departure
from service_kit.clock import MonotonicClock
from tests.engine_svc.data_parallel.lockstep_rig import PATIENCE_S, Meetings, Rank
from tests.engine_svc.session.service_rig import make_facts
from triptych.coordinator.v1 import command_pb2

FAILED, UNIMPLEMENTED = grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED


class Desk:
    """A command desk, the engine behind it, and who notes what becomes of the process."""

    def __init__(self, *, steps_alone: bool = False) -> None:
        self.rank = Rank(Meetings())
        self.rank.thread.start()
        self.engine = ServedEngine(
            identity=EngineIdentity("engine-a", 7, "test", dp_rank=0, dp_size=1),
            artifacts=(),
            lifecycle=Lifecycle(),
            inbox=self.rank.inbox,
            board=self.rank.board,
            clock=MonotonicClock(),
        )
        loop = asyncio.get_running_loop()
        self.rank.driver.subscribe(
            lambda standing: loop.call_soon_threadsafe(lambda: self.engine.note_standing(standing))
        )
        core = LoadedCore(make_facts(), refusal=lambda request: None, prepare=lambda request: None)
        lockstep = None if steps_alone else self.rank.driver
        self.engine.become_ready(replace(core, lockstep=lockstep, controls=self.rank.controls))
        self._changed = asyncio.Event()
        self.engine.lifecycle.subscribe(lambda state: self._changed.set())
        self.engine.on_standing.append(lambda standing: self._changed.set())
        self.is_dry = asyncio.Event()
        self.is_dry.set()
        self.num_stops = 0
        self.interval_s = 0.0
        departure = Departure(self.engine, until_dry=self._until_dry, stop_process=self._stop)
        self.desk = CommandDesk(self.engine, departure, self)
        self._ids: Iterator[int] = itertools.count(1)

    def set_interval(self, interval_s: float) -> None:
        self.interval_s = interval_s

    def tell(self, command_id: int = 0, **command: object) -> asyncio.Task[command_pb2.CommandResult]:
        number = command_id or next(self._ids)
        return self.desk.take(command_pb2.Command(command_id=number, **command), 1)

    async def do(self, **command: object) -> command_pb2.CommandResult:
        async with asyncio.timeout(PATIENCE_S):
            return await self.tell(**command)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def form(self, generation: int) -> None:
        """Make this engine the only one of a generation."""
        assert (await self.do(prepare_scale=prepare(generation))).HasField("ack")
        commit = command_pb2.CommitScale(generation=generation)
        assert (await self.do(commit_scale=commit)).HasField("ack")

    async def _until_dry(self) -> None:
        await self.is_dry.wait()

    def _stop(self) -> None:
        self.num_stops += 1
        self._changed.set()


@contextlib.asynccontextmanager
async def a_desk(*, steps_alone: bool = False) -> AsyncIterator[Desk]:
    desk = Desk(steps_alone=steps_alone)
    try:
        yield desk
    finally:
        desk.rank.inbox.put(Stop())
        await asyncio.to_thread(desk.rank.thread.join, PATIENCE_S)
        assert desk.rank.error is None


def prepare(generation: int, *, size: int = 1, **place: object) -> command_pb2.PrepareScale:
    meeting = command_pb2.Rendezvous(master_address="10.0.0.1", store_port=7000)
    return command_pb2.PrepareScale(
        generation=generation, new_size=size, rendezvous=meeting, **(place or {"rank": 0})
    )


def code_of(result: command_pb2.CommandResult) -> int:
    return int(result.nack.code)


async def test_an_engine_is_ready_when_its_first_generation_is_formed():
    async with a_desk() as desk:
        assert desk.engine.lifecycle.state is EngineState.LOADING
        await desk.form(3)
        await desk.until(lambda: desk.engine.lifecycle.state is EngineState.READY)
        assert desk.rank.driver.standing.generation == 3
        assert desk.rank.shards.asked == [(0, 1), "adopt"]


async def test_an_engine_that_steps_alone_refuses_what_is_for_groups():
    async with a_desk(steps_alone=True) as desk:
        assert desk.engine.lifecycle.state is EngineState.READY
        for command in (
            {"start_wave": command_pb2.StartWave(wave=1)},
            {"prepare_scale": prepare(1)},
            {"commit_scale": command_pb2.CommitScale(generation=1)},
            {"abort_scale": command_pb2.AbortScale(generation=1)},
        ):
            result = await desk.do(**command)
            assert code_of(result) == UNIMPLEMENTED.value[0]
            assert next(iter(command)) in result.nack.message


async def test_a_wave_is_taken_or_refused_and_not_begun_by_who_runs_it():
    async with a_desk() as desk:
        early = await desk.do(start_wave=command_pb2.StartWave(wave=1))
        assert (code_of(early), "apart" in early.nack.message) == (FAILED.value[0], True)
        await desk.form(1)
        excluded = command_pb2.StartWave(wave=1, exclude=["engine-a"])
        assert (await desk.do(start_wave=excluded)).HasField("ack")
        assert desk.rank.executor.num_launched == 0
        assert (await desk.do(start_wave=command_pb2.StartWave(wave=1))).HasField("ack")
        desk.rank.executor.wait_for_launches(32)
        stale = await desk.do(start_wave=command_pb2.StartWave(wave=0))
        assert code_of(stale) == FAILED.value[0]


async def test_a_command_is_done_once_however_often_it_is_told():
    async with a_desk() as desk:
        tasks = [desk.tell(5, prepare_scale=prepare(1)) for _ in range(3)]
        results = await asyncio.gather(*tasks)
        assert all(result.HasField("ack") for result in results)
        assert desk.rank.shards.asked == [(0, 1)]


async def test_generations_that_are_old_or_not_prepared_are_refused():
    async with a_desk() as desk:
        await desk.form(4)
        for command in (
            {"prepare_scale": prepare(3)},
            {"commit_scale": command_pb2.CommitScale(generation=3)},
            {"commit_scale": command_pb2.CommitScale(generation=5)},
            {"abort_scale": command_pb2.AbortScale(generation=4)},
        ):
            assert code_of(await desk.do(**command)) == FAILED.value[0]
        again = await desk.do(commit_scale=command_pb2.CommitScale(generation=4))
        assert again.HasField("ack")
        assert desk.rank.driver.standing.generation == 4


async def test_what_was_given_up_is_forgotten_and_cannot_be_committed():
    async with a_desk() as desk:
        await desk.form(1)
        await desk.do(prepare_scale=prepare(2))
        assert (await desk.do(abort_scale=command_pb2.AbortScale(generation=2))).HasField("ack")
        assert code_of(await desk.do(commit_scale=command_pb2.CommitScale(generation=2))) == FAILED.value[0]
        await desk.form(3)
        assert desk.rank.shards.asked == [(0, 1), "adopt", (0, 1), "forget", (0, 1), "adopt"]


async def test_another_coordinator_voids_what_was_only_prepared():
    async with a_desk() as desk:
        await desk.form(1)
        desk.desk.forget_prepared()
        await desk.do(prepare_scale=prepare(2))
        desk.desk.forget_prepared()
        assert code_of(await desk.do(commit_scale=command_pb2.CommitScale(generation=2))) == FAILED.value[0]
        assert desk.rank.driver.standing.generation == 1


async def test_who_leaves_runs_dry_first_and_ends_after_the_commit():
    async with a_desk() as desk:
        await desk.form(1)
        desk.is_dry.clear()
        leaving = desk.tell(prepare_scale=command_pb2.PrepareScale(generation=2, new_size=1, leave=True))
        await desk.until(lambda: desk.engine.lifecycle.state is EngineState.DRAINING)
        assert not leaving.done()
        desk.is_dry.set()
        assert (await leaving).HasField("ack")
        assert (desk.num_stops, desk.rank.driver.standing.generation) == (0, 1)
        assert (await desk.do(commit_scale=command_pb2.CommitScale(generation=2))).HasField("ack")
        assert desk.rank.driver.meeting is None
        assert desk.num_stops == 1


async def test_who_was_to_leave_and_is_kept_takes_requests_again():
    async with a_desk() as desk:
        await desk.form(1)
        desk.is_dry.clear()
        leaving = desk.tell(prepare_scale=command_pb2.PrepareScale(generation=2, new_size=1, leave=True))
        await desk.until(lambda: desk.engine.lifecycle.state is EngineState.DRAINING)
        assert (await desk.do(abort_scale=command_pb2.AbortScale(generation=2))).HasField("ack")
        assert desk.engine.lifecycle.state is EngineState.READY
        desk.is_dry.set()
        assert code_of(await leaving) == FAILED.value[0]
        assert desk.num_stops == 0


async def test_experts_that_cannot_be_loaded_are_the_reason_of_a_refusal():
    async with a_desk() as desk:

        def fail(rank: int, size: int, *, may_release: bool) -> None:
            raise OSError("no such shard")

        desk.rank.shards.prepare = fail
        result = await desk.do(prepare_scale=prepare(1))
        assert code_of(result) == FAILED.value[0]
        assert "no such shard" in result.nack.message


async def test_ranks_of_another_configuration_are_not_met():
    async with a_desk() as desk:
        order = prepare(1)
        order.rendezvous.parallel_config_hash = "cd34"
        result = await desk.do(prepare_scale=order)
        assert (code_of(result), "'cd34'" in result.nack.message) == (FAILED.value[0], True)


@pytest.mark.parametrize("serves", [False, True])
async def test_a_rank_with_other_weights_ends_with_both_digests(serves):
    async with a_desk() as desk:
        if serves:
            await desk.form(1)
            await desk.until(lambda: desk.engine.lifecycle.state is EngineState.READY)
            desk.rank.ask(lambda: desk.rank.driver.lose(ValueError("left")))
        meetings = desk.rank.meetings.shared(Meeting(2, 0, 2, "10.0.0.1", 7000))
        await desk.do(prepare_scale=prepare(2, size=2, rank=1))
        for point, said in (("form", None), ("numbers", [1, 7, 1])):
            meetings.come((point, 0), 0, said)
        result = await desk.do(commit_scale=command_pb2.CommitScale(generation=2))
        assert code_of(result) == FAILED.value[0]
        both = "has weights 0000000000000000, and rank 0 has 0000000000000007"
        assert both in result.nack.message
        assert desk.engine.failure == Failure(result.nack.message, EXIT_MISMATCH)


async def test_nobody_is_prepared_asleep():
    async with a_desk() as desk:
        await desk.form(1)
        paused: Future[None] = desk.rank.pause()
        await asyncio.wrap_future(paused)
        await desk.until(lambda: desk.rank.driver.is_quiet)
        await asyncio.wrap_future(desk.rank.sleep(1))
        assert desk.engine.standstill is StandstillState.ASLEEP
        result = await desk.do(prepare_scale=prepare(2))
        assert "asleep" in result.nack.message


@pytest.mark.parametrize(
    "order",
    [
        command_pb2.PrepareScale(generation=1, new_size=1, rank=0),
        command_pb2.PrepareScale(generation=1, new_size=1, rendezvous=command_pb2.Rendezvous()),
        prepare(1, size=2, rank=2),
        prepare(1, size=5000, rank=1),
    ],
    ids=["no rendezvous", "no place", "rank beyond size", "too many ranks"],
)
async def test_places_that_cannot_be_are_refused(order):
    async with a_desk() as desk:
        result = await desk.do(prepare_scale=order)
        assert code_of(result) == grpc.StatusCode.INVALID_ARGUMENT.value[0]


@pytest.mark.parametrize(
    ("field", "command"),
    [
        ("start_wave.wave", {"start_wave": command_pb2.StartWave(wave=2**62 + 1)}),
        ("prepare_scale.generation", {"prepare_scale": prepare(2**62 + 1)}),
    ],
)
async def test_numbers_that_ranks_cannot_tell_each_other_are_refused(field, command):
    async with a_desk() as desk:
        await desk.form(1)
        result = await desk.do(**command)
        assert code_of(result) == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert result.nack.message == f"{field} is {2**62 + 1}, the limit is {2**62}"
        # The engine goes on.
        await desk.form(2**62)


async def test_a_command_that_runs_is_remembered_however_many_come_after_it():
    async with a_desk() as desk:
        await desk.form(1)
        desk.is_dry.clear()
        leaving = command_pb2.PrepareScale(generation=2, new_size=1, leave=True)
        running = desk.tell(1000, prepare_scale=leaving)
        await desk.until(lambda: desk.engine.lifecycle.state is EngineState.DRAINING)
        for _ in range(300):
            await desk.do(update_interval=command_pb2.UpdateInterval(interval_ms=700))
        assert desk.tell(1000, prepare_scale=leaving) is running
        desk.is_dry.set()
        assert (await running).HasField("ack")


async def test_nobody_changes_over_asleep():
    async with a_desk() as desk:
        await desk.form(1)
        await desk.do(prepare_scale=prepare(2))
        await asyncio.wrap_future(desk.rank.pause())
        await desk.until(lambda: desk.rank.driver.is_quiet)
        await asyncio.wrap_future(desk.rank.sleep(1))
        result = await desk.do(commit_scale=command_pb2.CommitScale(generation=2))
        assert "asleep" in result.nack.message
        desk.rank.post(desk.rank.controls.standstill.wake)
        desk.rank.resume()
        await desk.until(lambda: not desk.rank.driver.is_quiet)
        assert (await desk.do(commit_scale=command_pb2.CommitScale(generation=2))).HasField("ack")


async def test_only_a_rank_with_which_nothing_can_run_may_give_up_what_it_holds():
    async with a_desk() as desk:
        for generation, may_release in ((1, True), (2, False)):
            await desk.form(generation)
            assert desk.rank.shards.may_release is may_release


async def test_a_drain_ends_the_process_when_nothing_runs_any_more():
    async with a_desk(steps_alone=True) as desk:
        desk.is_dry.clear()
        assert (await desk.do(drain=command_pb2.DrainCommand())).HasField("ack")
        await desk.until(lambda: desk.engine.lifecycle.state is EngineState.DRAINING)
        assert desk.num_stops == 0
        desk.is_dry.set()
        await desk.until(lambda: desk.num_stops == 1)
        assert desk.engine.lifecycle.state is EngineState.DRAINING


async def test_a_drain_that_takes_too_long_ends_what_runs():
    async with a_desk(steps_alone=True) as desk:
        desk.is_dry.clear()
        await desk.do(drain=command_pb2.DrainCommand(deadline_ms=20))
        await desk.do(drain=command_pb2.DrainCommand())
        await desk.until(lambda: desk.num_stops == 1)
        assert desk.engine.lifecycle.state is EngineState.STOPPED


async def test_of_several_deadlines_of_a_drain_the_latest_holds():
    async with a_desk(steps_alone=True) as desk:
        desk.is_dry.clear()
        await desk.do(drain=command_pb2.DrainCommand())
        await desk.until(lambda: desk.engine.lifecycle.state is EngineState.DRAINING)
        await desk.do(drain=command_pb2.DrainCommand(deadline_ms=20))
        await desk.do(drain=command_pb2.DrainCommand())
        await desk.until(lambda: desk.num_stops == 1)
        assert desk.engine.lifecycle.state is EngineState.STOPPED


async def test_operators_are_told_where_a_rank_stands():
    async with a_desk() as desk:
        await desk.form(2)
        values = announce.status(desk.engine, 0)
        told = {key: value for key, value in values.items() if key.startswith("lockstep.")}
        assert told == {
            "lockstep.state": "paused",
            "lockstep.wave": 1,
            "lockstep.generation": 2,
            "lockstep.num_votes": 0,
            "lockstep.num_idle_steps": 0,
        }
    async with a_desk(steps_alone=True) as desk:
        assert not [key for key in announce.status(desk.engine, 0) if key.startswith("lockstep")]


async def test_reports_come_as_often_as_they_are_wanted():
    async with a_desk() as desk:
        for _ in range(2):
            desk.interval_s = 0.1  # by another session, which is told again what has no answer yet
            await desk.do(command_id=1, update_interval=command_pb2.UpdateInterval(interval_ms=700))
            assert desk.interval_s == 0.7
