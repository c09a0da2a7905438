"""The engine at its coordinator: registration, reports, leases, commands, coming back."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest

from engine_svc.admin.lifecycle import EngineState, Lifecycle
from engine_svc.admin.served_engine import Failure, LoadedCore, ServedEngine
from engine_svc.core.facts import EngineIdentity
from engine_svc.data_parallel.driver import RankStatus
from engine_svc.loop.mailbox import Inbox, LoopStats, StatsSnapshot
from engine_svc.membership.commands import EXIT_MISMATCH
from engine_svc.membership.departure import Departure
from engine_svc.membership.membership import MISMATCH, Fence, Membership, ReportSchedule
from tests.connections import without_collections
from tests.engine_svc.data_parallel.lockstep_rig import Meetings, Rank
from tests.engine_svc.fakes import FakeCoordinator, make_scheduler
from tests.engine_svc.session.service_rig import make_facts
from triptych.coordinator.v1 import command_pb2, coordinator_pb2_grpc, member_pb2
from triptych_kit.clock import FakeClock, MonotonicClock
from triptych_kit.errors import FailedPrecondition, InvalidArgument
from triptych_kit.server import INTERNAL, Registration, Server

_NAME = "triptych.coordinator.v1.CoordinatorService"


def make_engine() -> ServedEngine:
    return ServedEngine(
        identity=EngineIdentity("engine-a", 7, "test", dp_rank=1, dp_size=2),
        artifacts=(),
        lifecycle=Lifecycle(),
        inbox=Inbox(10),
        stats_snapshot=StatsSnapshot(),
        clock=MonotonicClock(),
    )


def make_core() -> LoadedCore:
    return LoadedCore(make_facts(), refusal=lambda request: None, prepare=lambda request: None)


@contextlib.asynccontextmanager
async def serve(coordinator: FakeCoordinator, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    add = functools.partial(coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server, coordinator)
    server = Server(
        listen=address,
        registrations=[Registration(_NAME, add)],
        profile=INTERNAL,
        service="coordinator",
        reflection=False,
    )
    bound = await server.start()
    try:
        yield bound
    finally:
        await server.stop(0)


def make_membership(engine: ServedEngine, coordinator: str, stops: list[str]) -> Membership:
    async def until_dry() -> None:
        return None

    departure = Departure(engine, until_dry=until_dry, stop_process=lambda: stops.append("stop"))
    return Membership(engine, coordinator=coordinator, endpoint="10.0.0.1:50061", departure=departure)


@contextlib.asynccontextmanager
async def member(engine: ServedEngine, coordinator: str, stops: list[str]) -> AsyncIterator[Membership]:
    membership = make_membership(engine, coordinator, stops)
    task = asyncio.create_task(membership.run())
    try:
        yield membership
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_an_engine_registers_reports_and_says_more_when_it_is_loaded():
    engine, coordinator = make_engine(), FakeCoordinator()
    async with serve(coordinator) as address, member(engine, address, []):
        await coordinator.until(lambda: len(coordinator.reports) > 0)
        first = coordinator.registrations[0]
        assert (first.engine_id, first.engine_epoch, first.endpoint) == ("engine-a", 7, "10.0.0.1:50061")
        assert (first.dp_rank, first.dp_size, first.fingerprint) == (1, 2, "")
        assert coordinator.reports[0].state == member_pb2.MEMBER_STATE_LOADING
        engine.become_ready(make_core())
        await coordinator.until(lambda: len(coordinator.registrations) == 2)
        await coordinator.until(lambda: coordinator.reports[-1].state == member_pb2.MEMBER_STATE_READY)
        second = coordinator.registrations[1]
        assert (second.model_name, second.fingerprint) == ("fake", make_facts().fingerprint.digest)
        assert (second.capacity.num_kv_blocks, second.capacity.block_size) == (64, 4)


async def test_loads_are_reported_on_change_and_leases_renewed_without():
    engine, coordinator = make_engine(), FakeCoordinator(renew_after_ms=300)
    async with serve(coordinator) as address, member(engine, address, []):
        engine.stats_snapshot.post(LoopStats(step_number=5, scheduler=make_scheduler().stats()))
        await coordinator.until(lambda: any(report.step_number == 5 for report in coordinator.reports))
        load = coordinator.reports[-1].load
        assert (load.engine_id, load.engine_epoch, load.step_number) == ("engine-a", 7, 5)
        assert (load.num_used_blocks, load.num_total_blocks) == (0, 64)
        num_reports = len(coordinator.reports)
        await coordinator.until(lambda: len(coordinator.reports) >= num_reports + 2)
        assert [report.seq for report in coordinator.reports] == list(range(1, len(coordinator.reports) + 1))


async def test_an_engine_comes_before_its_coordinator_and_outlives_it():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    engine = make_engine()
    engine.become_ready(make_core())
    async with member(engine, address, []) as membership:
        for _ in range(2):
            coordinator = FakeCoordinator()
            async with serve(coordinator, address):
                await coordinator.until(lambda coordinator=coordinator: len(coordinator.reports) > 0)
                assert membership.is_member
                assert coordinator.registrations[0].model_name == "fake"


async def test_a_call_that_the_coordinator_has_ended_is_freed_without_a_collection():
    engine, coordinator = make_engine(), FakeCoordinator()
    coordinator.num_to_end = 3
    async with serve(coordinator) as address:
        with without_collections():
            num_before = _num_calls()
            async with member(engine, address, []):
                await coordinator.until(lambda: len(coordinator.reports) == 4)
                # Only that of the session that stands.
                assert _num_calls() - num_before == 1


def _num_calls() -> int:
    return sum(grpc.aio.StreamStreamCall in type(one).__mro__ for one in gc.get_objects())


async def test_commands_are_acknowledged_or_refused_by_name():
    engine, coordinator, stops = make_engine(), FakeCoordinator(), []
    async with serve(coordinator) as address, member(engine, address, stops):
        for command in (
            command_pb2.Command(command_id=1, drain=command_pb2.DrainCommand()),
            command_pb2.Command(command_id=2, start_wave=command_pb2.StartWave(wave=3)),
            command_pb2.Command(command_id=3, update_interval=command_pb2.UpdateInterval(interval_ms=200)),
        ):
            coordinator.commands.put_nowait(command)
        await coordinator.until(lambda: len(coordinator.results) == 3)
        kinds = {result.command_id: result.WhichOneof("result") for result in coordinator.results}
        assert kinds == {1: "ack", 2: "nack", 3: "ack"}
        nack = coordinator.results[1].nack
        assert nack.code == grpc.StatusCode.UNIMPLEMENTED.value[0]
        assert "start_wave" in nack.message
        assert stops == ["stop"]


async def test_a_drained_engine_says_goodbye_and_ends_its_membership():
    engine, coordinator = make_engine(), FakeCoordinator()
    engine.become_ready(make_core())
    async with serve(coordinator) as address:
        membership = asyncio.create_task(make_membership(engine, address, []).run())
        await coordinator.until(lambda: len(coordinator.reports) > 0)
        engine.lifecycle.move_to(EngineState.DRAINING)
        await coordinator.until(lambda: coordinator.reports[-1].state == member_pb2.MEMBER_STATE_DRAINING)
        engine.lifecycle.move_to(EngineState.STOPPED)
        await asyncio.wait_for(membership, 10)
        assert coordinator.goodbyes == 1


async def test_a_failed_engine_reports_it_and_leaves():
    engine, coordinator = make_engine(), FakeCoordinator()
    async with serve(coordinator) as address:
        membership = asyncio.create_task(make_membership(engine, address, []).run())
        await coordinator.until(lambda: len(coordinator.reports) > 0)
        engine.fail(Failure("broken", 70))
        await asyncio.wait_for(membership, 10)
        assert coordinator.reports[-1].state == member_pb2.MEMBER_STATE_FAILED
        assert coordinator.goodbyes == 0


class FailingClock(MonotonicClock):
    """Has a member fail as soon as it looks at the time: when its first report is made and not yet sent."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine

    def now(self) -> float:
        if self._engine.is_member and self._engine.failure is None:
            self._engine.fail(Failure("broken", 70))
        return super().now()


async def test_a_failure_while_a_report_is_sent_is_reported_too():
    engine, coordinator = make_engine(), FakeCoordinator()
    engine.clock = FailingClock(engine)
    async with serve(coordinator) as address:
        await asyncio.wait_for(make_membership(engine, address, []).run(), 60)
        states = [report.state for report in coordinator.reports]
        assert states == [member_pb2.MEMBER_STATE_LOADING, member_pb2.MEMBER_STATE_FAILED]


async def test_a_mismatch_of_the_parallel_configuration_ends_the_engine_with_both_hashes():
    engine, coordinator = make_engine(), FakeCoordinator()
    coordinator.refusal = FailedPrecondition("hash ab12 here, cd34 in the group", reason=MISMATCH)
    async with serve(coordinator) as address:
        await asyncio.wait_for(make_membership(engine, address, []).run(), 10)
    assert engine.failure == Failure("hash ab12 here, cd34 in the group", EXIT_MISMATCH)
    assert engine.lifecycle.state is EngineState.FAILED


async def test_a_registration_that_can_never_be_taken_ends_an_engine_that_loads_and_says_why():
    engine, coordinator = make_engine(), FakeCoordinator()
    coordinator.refusal = InvalidArgument("endpoint 'a b:1' is not host:port", field="register.endpoint")
    async with serve(coordinator) as address:
        await asyncio.wait_for(make_membership(engine, address, []).run(), 10)
    assert engine.failure == Failure("endpoint 'a b:1' is not host:port", EXIT_MISMATCH)


async def test_a_mismatch_does_not_end_an_engine_that_serves():
    engine, coordinator = make_engine(), FakeCoordinator()
    engine.become_ready(make_core())
    coordinator.refusal = FailedPrecondition("hash ab12 here, cd34 in the group", reason=MISMATCH)
    async with serve(coordinator) as address, member(engine, address, []):
        await coordinator.until(lambda: len(coordinator.registrations) == 2)
        coordinator.refusal = None
        await coordinator.until(lambda: len(coordinator.reports) > 0)
    assert (engine.failure, engine.lifecycle.state) == (None, EngineState.READY)


async def test_another_refusal_is_tried_again():
    engine, coordinator = make_engine(), FakeCoordinator()
    coordinator.refusal = FailedPrecondition("not now")
    async with serve(coordinator) as address, member(engine, address, []):
        await coordinator.until(lambda: len(coordinator.registrations) == 1)
        coordinator.refusal = None
        await coordinator.until(lambda: len(coordinator.reports) > 0)
    assert engine.failure is None


async def test_an_older_coordinator_is_not_obeyed_within_the_lease_of_a_newer_one():
    engine, stops = make_engine(), []
    newer = FakeCoordinator(epoch=7, lease_ms=60_000)
    async with serve(newer) as address, member(engine, address, stops):
        await newer.until(lambda: len(newer.reports) > 0)
        # The same address, another process, whose word is older.
        newer.epoch = 5
        newer.refusal = FailedPrecondition("over")
        engine.become_ready(make_core())
        await newer.until(lambda: newer.num_sessions == 0)
        newer.refusal = None
        newer.commands.put_nowait(command_pb2.Command(command_id=1, drain=command_pb2.DrainCommand()))
        await newer.until(lambda: len(newer.results) == 1)
    assert "newer coordinator" in newer.results[0].nack.message
    assert (stops, engine.num_fenced_commands) == ([], 1)


async def test_a_repeated_command_is_answered_again_and_done_once():
    engine, coordinator, stops = make_engine(), FakeCoordinator(), []
    async with serve(coordinator) as address, member(engine, address, stops):
        for _ in range(3):
            coordinator.commands.put_nowait(
                command_pb2.Command(command_id=4, drain=command_pb2.DrainCommand())
            )
        await coordinator.until(lambda: len(coordinator.results) == 3)
    assert [result.WhichOneof("result") for result in coordinator.results] == ["ack"] * 3
    assert stops == ["stop"]


async def test_the_interval_of_a_session_ends_with_it():
    engine, coordinator = make_engine(), FakeCoordinator(renew_after_ms=3_600_000)
    async with serve(coordinator) as address, member(engine, address, []):
        slow = command_pb2.Command(
            command_id=1, update_interval=command_pb2.UpdateInterval(interval_ms=3_600_000)
        )
        coordinator.commands.put_nowait(slow)
        await coordinator.until(lambda: len(coordinator.results) == 1)
        # Its facts change, and the coordinator ends the session for them.
        coordinator.refusal = FailedPrecondition("not now")
        engine.become_ready(make_core())
        await coordinator.until(lambda: coordinator.num_sessions == 0)
        coordinator.refusal = None
        num_reports = len(coordinator.reports)
        await coordinator.until(lambda: len(coordinator.reports) > num_reports)
        engine.stats_snapshot.post(LoopStats(step_number=8))
        await coordinator.until(lambda: coordinator.reports[-1].step_number == 8)


async def test_ranks_say_where_they_stand_and_where_others_meet_them():
    engine, coordinator, rank = make_engine(), FakeCoordinator(), Rank(Meetings())
    engine.shares_experts = True
    core = replace(make_core(), lockstep=rank.driver)
    rank.driver.parallel_config_hash = "ab12"
    async with serve(coordinator) as address, member(engine, address, []):
        await coordinator.until(lambda: len(coordinator.reports) > 0)
        first = coordinator.registrations[0]
        assert (first.lockstep, first.parallel_config_hash, first.store_port) == (True, "", 0)
        engine.become_ready(core)
        await coordinator.until(lambda: len(coordinator.registrations) == 2)
        registered = coordinator.registrations[1]
        assert (registered.lockstep, registered.parallel_config_hash, registered.wave) == (True, "ab12", 1)
        assert (registered.host, registered.store_port) == ("10.0.0.1", 7000)
        loaded = command_pb2.SCALING_NOTICE_KIND_WEIGHTS_READY
        await coordinator.until(lambda: coordinator.reports[-1].scaling_notice.kind == loaded)
        assert coordinator.reports[-1].state == member_pb2.MEMBER_STATE_LOADING
        assert (coordinator.reports[-1].wave, coordinator.reports[-1].wave_complete) == (1, True)


async def test_every_generation_is_reported_even_one_that_is_lost_at_once():
    engine, coordinator, rank = make_engine(), FakeCoordinator(), Rank(Meetings())
    engine.become_ready(replace(make_core(), lockstep=rank.driver))
    async with serve(coordinator) as address, member(engine, address, []):
        await coordinator.until(lambda: len(coordinator.reports) > 0)
        for generation in (1, 0, 2, 0):
            engine.note_rank_status(RankStatus(generation=generation, wave=3, asks=generation == 2))
        await coordinator.until(
            lambda: [report.generation for report in coordinator.reports if report.wave == 3] == [1, 0, 2, 0]
        )
        asked = [report.start_wave_needed for report in coordinator.reports if report.generation]
        assert asked == [False, True]
    assert engine.lifecycle.state is EngineState.READY


async def test_the_labels_of_an_engine_are_registered():
    engine, coordinator = make_engine(), FakeCoordinator()
    engine.identity = replace(engine.identity, labels=(("zone", "a"), ("rack", "7")))
    async with serve(coordinator) as address, member(engine, address, []):
        await coordinator.until(lambda: bool(coordinator.registrations))
        registered = {label.key: label.value for label in coordinator.registrations[0].labels}
        assert registered == {"zone": "a", "rack": "7"}


# How often an engine reports, and that no interval keeps it from renewing its lease in time.


def reported(at: float, *, renew_after_s: float | None = None) -> ReportSchedule:
    schedule = ReportSchedule()
    if renew_after_s is not None:
        schedule.set_renewal(renew_after_s)
    schedule.note_report(at)
    return schedule


def test_the_first_report_is_due_at_once():
    assert ReportSchedule().must_renew(0.0)


@pytest.mark.parametrize(("has_work", "wait_s"), [(True, 0.1), (False, 0.5)])
def test_an_engine_without_work_looks_less_often(has_work, wait_s):
    assert reported(7.0).wait_s(7.0, has_work=has_work) == wait_s


def test_no_interval_is_shorter_than_the_least():
    schedule = reported(7.0)
    schedule.set_interval(0.0)
    assert schedule.wait_s(7.0, has_work=True) == 0.1


@pytest.mark.parametrize("interval_s", [0.1, 0.7, 3600.0])
@pytest.mark.parametrize("renew_after_s", [0.2, 1.0])
@pytest.mark.parametrize("has_work", [True, False])
def test_a_lease_is_renewed_in_time_however_long_the_interval_is(interval_s, renew_after_s, has_work):
    schedule, now = reported(0.0, renew_after_s=renew_after_s), 0.0
    schedule.set_interval(interval_s)
    while not schedule.must_renew(now):
        now += schedule.wait_s(now, has_work=has_work)
    assert now == pytest.approx(renew_after_s)


def test_what_was_late_is_not_waited_for():
    assert reported(0.0, renew_after_s=1.0).wait_s(5.0, has_work=True) == 0.0


# Which of two coordinators is obeyed.


def test_only_the_highest_epoch_is_obeyed_within_its_lease():
    clock = FakeClock()
    fence = Fence(clock)
    assert fence.observe(5, 3.0)
    assert fence.observe(7, 3.0)
    clock.advance(2.9)
    assert not fence.observe(5, 3.0)
    assert fence.epoch == 7


def test_each_word_of_the_highest_renews_its_lease():
    clock = FakeClock()
    fence = Fence(clock)
    for _ in range(3):
        assert fence.observe(7, 3.0)
        clock.advance(2.0)
    assert not fence.observe(5, 3.0)


def test_a_lower_epoch_is_obeyed_after_a_lease_without_the_highest():
    clock = FakeClock()
    fence = Fence(clock)
    assert fence.observe(7, 3.0)
    assert fence.least == 7
    clock.advance(3.0)
    assert fence.least == 0
    assert fence.observe(5, 3.0)
    # What comes back then is newer again.
    assert fence.observe(7, 3.0)
    assert not fence.observe(5, 3.0)
