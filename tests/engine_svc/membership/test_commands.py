"""The coordinator's commands to an engine: waves, generations, leaving, draining; done once, or refused."""

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
from engine_svc.loop.pause import RunState
from engine_svc.membership.commands import EXIT_MISMATCH, CommandHandler
from engine_svc.membership.departure import Departure
from tests.engine_svc.data_parallel.lockstep_rig import PATIENCE_S, Meetings, Rank
from tests.engine_svc.session.service_rig import make_facts
from triptych.coordinator.v1 import command_pb2
from triptych_kit.clock import MonotonicClock

FAILED, UNIMPLEMENTED = grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED


class CommandRig:
    """Commands, the engine behind them, and a record of what becomes of the process."""

    def __init__(self, *, steps_alone: bool = False) -> None:
        self.rank = Rank(Meetings())
        self.rank.thread.start()
        self.engine = ServedEngine(
            identity=EngineIdentity("engine-a", 7, "test", dp_rank=0, dp_size=1),
            artifacts=(),
            lifecycle=Lifecycle(),
            inbox=self.rank.inbox,
            stats_snapshot=self.rank.stats_snapshot,
            clock=MonotonicClock(),
        )
        loop = asyncio.get_running_loop()
        self.rank.driver.subscribe(
            lambda rank_status: loop.call_soon_threadsafe(lambda: self.engine.note_rank_status(rank_status))
        )
        core = LoadedCore(make_facts(), refusal=lambda request: None, prepare=lambda request: None)
        lockstep = None if steps_alone else self.rank.driver
        self.engine.become_ready(replace(core, lockstep=lockstep, controls=self.rank.controls))
        self._changed = asyncio.Event()
        self.engine.lifecycle.subscribe(lambda state: self._changed.set())
        self.engine.on_rank_status.append(lambda rank_status: self._changed.set())
        self.is_dry = asyncio.Event()
        self.is_dry.set()
        self.num_stops = 0
        self.interval_s = 0.0
        departure = Departure(self.engine, until_dry=self._until_dry, stop_process=self._stop)
        self.handler = CommandHandler(self.engine, departure, self)
        self._ids: Iterator[int] = itertools.count(1)

    def set_interval(self, interval_s: float) -> None:
        self.interval_s = interval_s

    def send_command(self, command_id: int = 0, **command: object) -> asyncio.Task[command_pb2.CommandResult]:
        number = command_id or next(self._ids)
        return self.handler.take(command_pb2.Command(command_id=number, **command), 1)

    async def do(self, **command: object) -> command_pb2.CommandResult:
        async with asyncio.timeout(PATIENCE_S):
            return await self.send_command(**command)

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
async def command_rig(*, steps_alone: bool = False) -> AsyncIterator[CommandRig]:
    rig = CommandRig(steps_alone=steps_alone)
    try:
        yield rig
    finally:
        rig.rank.inbox.put(Stop())
        await asyncio.to_thread(rig.rank.thread.join, PATIENCE_S)
        assert rig.rank.error is None


def prepare(generation: int, *, size: int = 1, **place: object) -> command_pb2.PrepareScale:
    meeting = command_pb2.Rendezvous(master_address="10.0.0.1", store_port=7000)
    return command_pb2.PrepareScale(
        generation=generation, new_size=size, rendezvous=meeting, **(place or {"rank": 0})
    )


def code_of(result: command_pb2.CommandResult) -> int:
    return int(result.nack.code)


async def test_an_engine_is_ready_when_its_first_generation_is_formed():
    async with command_rig() as rig:
        assert rig.engine.lifecycle.state is EngineState.LOADING
        await rig.form(3)
        await rig.until(lambda: rig.engine.lifecycle.state is EngineState.READY)
        assert rig.rank.driver.rank_status.generation == 3
        assert rig.rank.shards.asked == [(0, 1), "adopt"]


async def test_an_engine_that_steps_alone_refuses_what_is_for_groups():
    async with command_rig(steps_alone=True) as rig:
        assert rig.engine.lifecycle.state is EngineState.READY
        for command in (
            {"start_wave": command_pb2.StartWave(wave=1)},
            {"prepare_scale": prepare(1)},
            {"commit_scale": command_pb2.CommitScale(generation=1)},
            {"abort_scale": command_pb2.AbortScale(generation=1)},
        ):
            result = await rig.do(**command)
            assert code_of(result) == UNIMPLEMENTED.value[0]
            assert next(iter(command)) in result.nack.message


async def test_a_wave_is_taken_or_refused_and_not_begun_by_who_runs_it():
    async with command_rig() as rig:
        early = await rig.do(start_wave=command_pb2.StartWave(wave=1))
        assert (code_of(early), "apart" in early.nack.message) == (FAILED.value[0], True)
        await rig.form(1)
        excluded = command_pb2.StartWave(wave=1, exclude=["engine-a"])
        assert (await rig.do(start_wave=excluded)).HasField("ack")
        assert rig.rank.executor.num_launched == 0
        assert (await rig.do(start_wave=command_pb2.StartWave(wave=1))).HasField("ack")
        rig.rank.executor.wait_for_launches(32)
        stale = await rig.do(start_wave=command_pb2.StartWave(wave=0))
        assert code_of(stale) == FAILED.value[0]


async def test_a_repeated_command_is_executed_once():
    async with command_rig() as rig:
        tasks = [rig.send_command(5, prepare_scale=prepare(1)) for _ in range(3)]
        results = await asyncio.gather(*tasks)
        assert all(result.HasField("ack") for result in results)
        assert rig.rank.shards.asked == [(0, 1)]


async def test_generations_that_are_old_or_not_prepared_are_refused():
    async with command_rig() as rig:
        await rig.form(4)
        for command in (
            {"prepare_scale": prepare(3)},
            {"commit_scale": command_pb2.CommitScale(generation=3)},
            {"commit_scale": command_pb2.CommitScale(generation=5)},
            {"abort_scale": command_pb2.AbortScale(generation=4)},
        ):
            assert code_of(await rig.do(**command)) == FAILED.value[0]
        again = await rig.do(commit_scale=command_pb2.CommitScale(generation=4))
        assert again.HasField("ack")
        assert rig.rank.driver.rank_status.generation == 4


async def test_what_was_given_up_is_forgotten_and_cannot_be_committed():
    async with command_rig() as rig:
        await rig.form(1)
        await rig.do(prepare_scale=prepare(2))
        assert (await rig.do(abort_scale=command_pb2.AbortScale(generation=2))).HasField("ack")
        assert code_of(await rig.do(commit_scale=command_pb2.CommitScale(generation=2))) == FAILED.value[0]
        await rig.form(3)
        assert rig.rank.shards.asked == [(0, 1), "adopt", (0, 1), "forget", (0, 1), "adopt"]


async def test_another_coordinator_voids_what_was_only_prepared():
    async with command_rig() as rig:
        await rig.form(1)
        rig.handler.forget_prepared()
        await rig.do(prepare_scale=prepare(2))
        rig.handler.forget_prepared()
        assert code_of(await rig.do(commit_scale=command_pb2.CommitScale(generation=2))) == FAILED.value[0]
        assert rig.rank.driver.rank_status.generation == 1


async def test_who_leaves_runs_dry_first_and_ends_after_the_commit():
    async with command_rig() as rig:
        await rig.form(1)
        rig.is_dry.clear()
        leaving = rig.send_command(
            prepare_scale=command_pb2.PrepareScale(generation=2, new_size=1, leave=True)
        )
        await rig.until(lambda: rig.engine.lifecycle.state is EngineState.DRAINING)
        assert not leaving.done()
        rig.is_dry.set()
        assert (await leaving).HasField("ack")
        assert (rig.num_stops, rig.rank.driver.rank_status.generation) == (0, 1)
        assert (await rig.do(commit_scale=command_pb2.CommitScale(generation=2))).HasField("ack")
        assert rig.rank.driver.meeting is None
        assert rig.num_stops == 1


async def test_who_was_to_leave_and_is_kept_takes_requests_again():
    async with command_rig() as rig:
        await rig.form(1)
        rig.is_dry.clear()
        leaving = rig.send_command(
            prepare_scale=command_pb2.PrepareScale(generation=2, new_size=1, leave=True)
        )
        await rig.until(lambda: rig.engine.lifecycle.state is EngineState.DRAINING)
        assert (await rig.do(abort_scale=command_pb2.AbortScale(generation=2))).HasField("ack")
        assert rig.engine.lifecycle.state is EngineState.READY
        rig.is_dry.set()
        assert code_of(await leaving) == FAILED.value[0]
        assert rig.num_stops == 0


async def test_experts_that_cannot_be_loaded_are_the_reason_of_a_refusal():
    async with command_rig() as rig:

        def fail(rank: int, size: int, *, may_release: bool) -> None:
            raise OSError("no such shard")

        rig.rank.shards.prepare = fail
        result = await rig.do(prepare_scale=prepare(1))
        assert code_of(result) == FAILED.value[0]
        assert "no such shard" in result.nack.message


async def test_ranks_of_another_configuration_are_not_met():
    async with command_rig() as rig:
        order = prepare(1)
        order.rendezvous.parallel_config_hash = "cd34"
        result = await rig.do(prepare_scale=order)
        assert (code_of(result), "'cd34'" in result.nack.message) == (FAILED.value[0], True)


@pytest.mark.parametrize("serves", [False, True])
async def test_a_rank_with_other_weights_ends_with_both_digests(serves):
    async with command_rig() as rig:
        if serves:
            await rig.form(1)
            await rig.until(lambda: rig.engine.lifecycle.state is EngineState.READY)
            rig.rank.ask(lambda: rig.rank.driver.leave_group(ValueError("left")))
        meetings = rig.rank.meetings.shared(Meeting(2, 0, 2, "10.0.0.1", 7000))
        await rig.do(prepare_scale=prepare(2, size=2, rank=1))
        for point, numbers in (("form", None), ("numbers", [1, 7, 1])):
            meetings.come((point, 0), 0, numbers)
        result = await rig.do(commit_scale=command_pb2.CommitScale(generation=2))
        assert code_of(result) == FAILED.value[0]
        both = "has weights 0000000000000000, and rank 0 has 0000000000000007"
        assert both in result.nack.message
        assert rig.engine.failure == Failure(result.nack.message, EXIT_MISMATCH)


async def test_a_sleeping_engine_does_not_prepare():
    async with command_rig() as rig:
        await rig.form(1)
        paused: Future[None] = rig.rank.pause()
        await asyncio.wrap_future(paused)
        await rig.until(lambda: rig.rank.driver.is_quiet)
        await asyncio.wrap_future(rig.rank.sleep(1))
        assert rig.engine.run_state is RunState.ASLEEP
        result = await rig.do(prepare_scale=prepare(2))
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
    async with command_rig() as rig:
        result = await rig.do(prepare_scale=order)
        assert code_of(result) == grpc.StatusCode.INVALID_ARGUMENT.value[0]


@pytest.mark.parametrize(
    ("field", "command"),
    [
        ("start_wave.wave", {"start_wave": command_pb2.StartWave(wave=2**62 + 1)}),
        ("prepare_scale.generation", {"prepare_scale": prepare(2**62 + 1)}),
    ],
)
async def test_numbers_that_ranks_cannot_tell_each_other_are_refused(field, command):
    async with command_rig() as rig:
        await rig.form(1)
        result = await rig.do(**command)
        assert code_of(result) == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert result.nack.message == f"{field} is {2**62 + 1}, the limit is {2**62}"
        # The engine goes on.
        await rig.form(2**62)


async def test_a_command_that_runs_is_remembered_however_many_come_after_it():
    async with command_rig() as rig:
        await rig.form(1)
        rig.is_dry.clear()
        leaving = command_pb2.PrepareScale(generation=2, new_size=1, leave=True)
        running = rig.send_command(1000, prepare_scale=leaving)
        await rig.until(lambda: rig.engine.lifecycle.state is EngineState.DRAINING)
        for _ in range(300):
            await rig.do(update_interval=command_pb2.UpdateInterval(interval_ms=700))
        assert rig.send_command(1000, prepare_scale=leaving) is running
        rig.is_dry.set()
        assert (await running).HasField("ack")


async def test_a_sleeping_engine_does_not_commit():
    async with command_rig() as rig:
        await rig.form(1)
        await rig.do(prepare_scale=prepare(2))
        await asyncio.wrap_future(rig.rank.pause())
        await rig.until(lambda: rig.rank.driver.is_quiet)
        await asyncio.wrap_future(rig.rank.sleep(1))
        result = await rig.do(commit_scale=command_pb2.CommitScale(generation=2))
        assert "asleep" in result.nack.message
        rig.rank.post(rig.rank.controls.pause_controller.wake)
        rig.rank.resume()
        await rig.until(lambda: not rig.rank.driver.is_quiet)
        assert (await rig.do(commit_scale=command_pb2.CommitScale(generation=2))).HasField("ack")


async def test_only_a_rank_with_which_nothing_can_run_may_give_up_what_it_holds():
    async with command_rig() as rig:
        for generation, may_release in ((1, True), (2, False)):
            await rig.form(generation)
            assert rig.rank.shards.may_release is may_release


async def test_a_drain_ends_the_process_when_nothing_runs_any_more():
    async with command_rig(steps_alone=True) as rig:
        rig.is_dry.clear()
        assert (await rig.do(drain=command_pb2.DrainCommand())).HasField("ack")
        await rig.until(lambda: rig.engine.lifecycle.state is EngineState.DRAINING)
        assert rig.num_stops == 0
        rig.is_dry.set()
        await rig.until(lambda: rig.num_stops == 1)
        assert rig.engine.lifecycle.state is EngineState.DRAINING


async def test_a_drain_that_takes_too_long_ends_what_runs():
    async with command_rig(steps_alone=True) as rig:
        rig.is_dry.clear()
        await rig.do(drain=command_pb2.DrainCommand(deadline_ms=20))
        await rig.do(drain=command_pb2.DrainCommand())
        await rig.until(lambda: rig.num_stops == 1)
        assert rig.engine.lifecycle.state is EngineState.STOPPED


async def test_of_several_deadlines_of_a_drain_the_latest_holds():
    async with command_rig(steps_alone=True) as rig:
        rig.is_dry.clear()
        await rig.do(drain=command_pb2.DrainCommand())
        await rig.until(lambda: rig.engine.lifecycle.state is EngineState.DRAINING)
        await rig.do(drain=command_pb2.DrainCommand(deadline_ms=20))
        await rig.do(drain=command_pb2.DrainCommand())
        await rig.until(lambda: rig.num_stops == 1)
        assert rig.engine.lifecycle.state is EngineState.STOPPED


async def test_the_admin_status_shows_the_rank_status():
    async with command_rig() as rig:
        await rig.form(2)
        values = announce.status(rig.engine, 0)
        lockstep_values = {key: value for key, value in values.items() if key.startswith("lockstep.")}
        assert lockstep_values == {
            "lockstep.state": "paused",
            "lockstep.wave": 1,
            "lockstep.generation": 2,
            "lockstep.num_votes": 0,
            "lockstep.num_idle_steps": 0,
        }
    async with command_rig(steps_alone=True) as rig:
        assert not [key for key in announce.status(rig.engine, 0) if key.startswith("lockstep")]


async def test_reports_come_as_often_as_they_are_wanted():
    async with command_rig() as rig:
        for _ in range(2):
            rig.interval_s = 0.1  # by another session, which gets again what has no answer yet
            await rig.do(command_id=1, update_interval=command_pb2.UpdateInterval(interval_ms=700))
            assert rig.interval_s == 0.7
