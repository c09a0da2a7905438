"""Sessions of engines and frontends with a coordinator, over real gRPC."""

from __future__ import annotations

import asyncio
import itertools

import grpc
import pytest

from coordinator_svc.membership.servicer import MAX_MESSAGES_PER_S, RateLimit
from coordinator_svc.wire.convert import check_frontend, to_registration
from coordinator_svc.wire.number_limits import MAX_NUMBER, check_hint, check_report
from tests.coordinator_svc.fakes import Coordinator, EnginePeer, coordinator, registration
from triptych.coordinator.v1 import command_pb2, coordinator_pb2, coordinator_pb2_grpc, member_pb2
from triptych_kit.clock import FakeClock
from triptych_kit.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, from_rpc_error

_LIMIT_S = 60.0
# Short enough to be waited for, and long enough to be looked into on a machine that is busy.
_SHORT_LEASE_S = 3.0


async def refused(one: Coordinator, message: coordinator_pb2.EngineSessionRequest) -> grpc.aio.AioRpcError:
    """The error a first message of an engine session is answered with."""
    peer = EnginePeer(one.stub)
    await peer.call.write(message)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await peer.call.read()
    return failed.value


async def state_of(one: Coordinator, *, until: int | None) -> list[member_pb2.EngineMember]:
    """The members, once the first has the state `until`, or once there is none."""
    async with asyncio.timeout(_LIMIT_S):
        while True:
            engines = list((await one.topology()).engines)
            if (engines[0].state if engines else None) == until:
                return engines


async def test_an_engine_registers_and_gets_its_lease() -> None:
    async with coordinator(lease_s=3.0, epoch=5) as one:
        registered = await EnginePeer(one.stub).register(registration())
        assert (registered.lease_ms, registered.renew_after_ms) == (3000, 1000)
        assert registered.coordinator_epoch == 5


async def test_facts_of_an_engine_reach_frontends_unchanged() -> None:
    facts = registration(
        dp_size=2,
        dp_rank=1,
        fingerprint="abc",
        model_name="tiny",
        capacity=member_pb2.EngineCapacity(num_kv_blocks=9, block_size=16, max_num_seqs=4, max_model_len=64),
        labels=[member_pb2.Label(key="zone", value="a")],
    )
    async with coordinator() as one:
        await EnginePeer(one.stub).register(facts)
        [engine] = (await one.topology()).engines
        assert engine.registration == facts


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"engine_id": ""}, "engine_id"),
        ({"engine_id": "x" * 129}, "engine_id"),
        ({"engine_epoch": 0}, "engine_epoch"),
        ({"endpoint": "0.0.0.0:7000"}, "endpoint"),
        ({"endpoint": "[::]:7000"}, "endpoint"),
        ({"endpoint": "*:7000"}, "endpoint"),
        ({"endpoint": "169.254.169.254:80"}, "endpoint"),
        ({"endpoint": "engine-0"}, "endpoint"),
        ({"endpoint": "engine-0:0"}, "endpoint"),
        ({"endpoint": "0:7000"}, "endpoint"),
        ({"endpoint": "00.0.0.0:7000"}, "endpoint"),
        ({"endpoint": "[::ffff:0.0.0.0]:7000"}, "endpoint"),
        ({"endpoint": "grpc://engine-0:7000"}, "endpoint"),
        ({"endpoint": "engine 0:7000"}, "endpoint"),
        ({"endpoint": "::1:7000"}, "endpoint"),
        ({"endpoint": f"{'x' * 300}:7000"}, "endpoint"),
        ({"labels": [member_pb2.Label(key="note", value="x" * 20_000)]}, "labels"),
        ({"dp_size": 1_000_000}, "dp_size"),
        ({"dp_size": 2, "dp_rank": 2}, "dp_rank"),
        ({"capacity": member_pb2.EngineCapacity(block_size=16)}, "capacity"),
        ({"host": "0.0.0.0"}, "host"),
        ({"host": "a b"}, "host"),
        ({"host": "::"}, "host"),
        ({"store_port": 65536}, "store_port"),
    ],
)
async def test_a_registration_that_cannot_be_is_refused_by_field(fields, field):
    async with coordinator() as one:
        failure = await refused(one, coordinator_pb2.EngineSessionRequest(register=registration(**fields)))
        error = from_rpc_error(failure)
        assert isinstance(error, InvalidArgument)
        assert [name for name, _ in error.violations] == [f"register.{field}"]
        assert not (await one.topology()).engines


@pytest.mark.parametrize(
    "endpoint", ["localhost:7000", "engine-0.engines.svc:7000", "[::1]:7000", "10.0.0.7:7000", "node_1:7000"]
)
async def test_an_address_that_frontends_can_dial_is_taken(endpoint: str) -> None:
    async with coordinator() as one:
        await one.engine(endpoint=endpoint)
        [engine] = (await one.topology()).engines
        assert engine.registration.endpoint == endpoint


async def test_a_restarted_engine_does_not_inherit_the_load_of_the_one_before() -> None:
    async with coordinator() as one:
        before = await one.engine(engine_epoch=11)
        await before.report(load={"step_number": 9, "num_running": 3})
        before.call.cancel()
        await state_of(one, until=member_pb2.MEMBER_STATE_UNREPORTED)
        await one.engine(engine_epoch=12)
        [engine] = (await one.topology()).engines
        assert not engine.HasField("load")


async def test_a_frontend_without_a_usable_id_is_refused() -> None:
    async with coordinator() as one:
        for frontend_id in ("", "x" * 129):
            peer = await one.frontend(frontend_id=frontend_id)
            with pytest.raises(grpc.aio.AioRpcError, match="frontend_id") as failed:
                await peer.call.read()
            assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_session_that_does_not_begin_with_register_is_refused() -> None:
    async with coordinator() as one:
        message = coordinator_pb2.EngineSessionRequest(report=coordinator_pb2.EngineReport(seq=1))
        assert (await refused(one, message)).code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_live_rank_taken_twice_is_refused_and_the_holder_stays() -> None:
    async with coordinator() as one:
        await one.engine(engine_id="a", engine_epoch=1, dp_size=2, dp_rank=1)
        intruder = registration(engine_id="b", engine_epoch=2, dp_size=2, dp_rank=1)
        failure = await refused(one, coordinator_pb2.EngineSessionRequest(register=intruder))
        assert failure.code() is grpc.StatusCode.ALREADY_EXISTS
        assert [engine.registration.engine_id for engine in (await one.topology()).engines] == ["a"]


async def test_reports_move_an_engine_and_set_its_load() -> None:
    async with coordinator() as one:
        peer = await one.engine()
        await peer.report(state=member_pb2.MEMBER_STATE_READY, load={"step_number": 3, "num_running": 2})
        [engine] = await state_of(one, until=member_pb2.MEMBER_STATE_READY)
        assert (engine.load.engine_id, engine.load.num_running) == ("engine-0", 2)


async def test_a_lost_session_is_unreported_and_the_lease_end_is_gone() -> None:
    async with coordinator(lease_s=_SHORT_LEASE_S) as one:
        peer = await one.engine()
        peer.call.cancel()
        await state_of(one, until=member_pb2.MEMBER_STATE_UNREPORTED)
        assert await state_of(one, until=None) == []


async def test_goodbye_is_gone_at_once() -> None:
    async with coordinator(lease_s=3600.0) as one:
        peer = await one.engine()
        await peer.goodbye()
        assert await state_of(one, until=None) == []


async def test_a_failed_engine_is_gone_and_its_session_ends() -> None:
    async with coordinator(lease_s=3600.0) as one:
        peer = await one.engine()
        await peer.report(state=member_pb2.MEMBER_STATE_FAILED)
        with pytest.raises(grpc.aio.AioRpcError, match="FAILED"):
            await peer.call.read()
        assert await state_of(one, until=None) == []


async def test_an_engine_whose_lease_ended_is_asked_to_register_again() -> None:
    async with coordinator(lease_s=0.6) as one:
        peer = await one.engine()
        await peer.report(state=member_pb2.MEMBER_STATE_READY)
        await state_of(one, until=member_pb2.MEMBER_STATE_READY)
        await state_of(one, until=None)
        await peer.report(state=member_pb2.MEMBER_STATE_READY)
        with pytest.raises(grpc.aio.AioRpcError, match="register again"):
            await peer.call.read()


async def test_new_facts_may_come_within_a_session_and_another_engine_may_not() -> None:
    async with coordinator() as one:
        peer = await one.engine()
        await peer.register(registration(fingerprint="loaded"))
        [engine] = (await one.topology()).engines
        assert engine.registration.fingerprint == "loaded"
        other = coordinator_pb2.EngineSessionRequest(register=registration(engine_id="other"))
        await peer.call.write(other)
        with pytest.raises(grpc.aio.AioRpcError, match="must stay the same"):
            await peer.call.read()


async def test_a_frontend_gets_a_snapshot_then_members_at_once() -> None:
    async with coordinator() as one:
        await one.engine(engine_id="a")
        frontend = await one.frontend()
        first = await frontend.read()
        assert [engine.registration.engine_id for engine in first.snapshot.engines] == ["a"]
        assert first.snapshot.version == first.version
        await one.engine(engine_id="b")
        second = await frontend.read()
        assert [engine.registration.engine_id for engine in second.delta.added] == ["b"]
        assert second.version > first.version
        assert second.nonce > first.nonce


async def test_state_loads_and_removal_come_as_deltas() -> None:
    async with coordinator() as one:
        peer = await one.engine()
        frontend = await one.frontend()
        await frontend.read()
        await peer.report(state=member_pb2.MEMBER_STATE_READY)
        ready = (await frontend.read()).delta
        assert [engine.state for engine in ready.updated] == [member_pb2.MEMBER_STATE_READY]
        await peer.report(load={"step_number": 1, "num_waiting": 4})
        loaded = (await frontend.read()).delta
        assert not loaded.updated
        assert [load.num_waiting for load in loaded.loads] == [4]
        await peer.goodbye()
        assert list((await frontend.read()).delta.removed_engine_ids) == ["engine-0"]


async def test_a_frontend_that_does_not_ack_gets_the_newest_and_not_every_step() -> None:
    async with coordinator() as one:
        peer = await one.engine()
        frontend = await one.frontend()
        snapshot = await frontend.read(ack=False)
        for step_number in range(1, 51):
            await peer.report(load={"step_number": step_number, "num_running": step_number})
        # Every report is in before the frontend says that it is ready for more.
        await peer.register(registration())
        await frontend.ack(snapshot.nonce)
        delta = (await frontend.read()).delta
        assert [load.num_running for load in delta.loads] == [50]


async def test_a_stale_or_foreign_load_is_dropped() -> None:
    async with coordinator() as one:
        peer = await one.engine()
        await peer.report(load={"step_number": 9, "num_running": 3})
        await peer.report(load={"step_number": 8, "num_running": 99})
        await peer.report(load={"step_number": 10, "num_running": 99, "engine_epoch": 12})
        await peer.register(registration())
        [engine] = (await one.topology()).engines
        assert engine.load.num_running == 3


async def test_frontends_are_known_while_they_listen() -> None:
    async with coordinator() as one:
        frontend = await one.frontend(endpoint="127.0.0.1:9")
        await frontend.read()
        in_flight = coordinator_pb2.FrontendInFlight(num_requests=3)
        await frontend.call.write(coordinator_pb2.FrontendSessionRequest(in_flight=in_flight))
        while (await one.topology()).frontends[0].num_in_flight != 3:
            pass
        frontend.call.cancel()
        while (await one.topology()).frontends:
            pass


async def test_a_restarted_coordinator_reports_nothing_of_engines_that_have_not_registered() -> None:
    """A frontend that knew the coordinator before keeps its engines meanwhile."""
    async with coordinator(lease_s=_SHORT_LEASE_S, epoch=6) as one:
        newcomer = await one.frontend(frontend_id="new")
        assert not (await newcomer.read()).snapshot.engines
        returning = await one.frontend(known_version=40, known_coordinator_epoch=5)
        await one.engine(engine_id="a")
        first = await returning.read()
        assert [engine.registration.engine_id for engine in first.snapshot.engines] == ["a"]
        assert first.snapshot.coordinator_epoch == 6


async def test_closing_ends_every_session_with_unavailable() -> None:
    async with coordinator() as one:
        peer = await one.engine()
        frontend = await one.frontend()
        await frontend.read()
        await one.servicer.close()
        for call in (peer.call, frontend.call):
            with pytest.raises(grpc.aio.AioRpcError, match="the coordinator stops") as failed:
                await call.read()
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_closing_also_ends_a_session_that_has_not_registered() -> None:
    async with coordinator() as one:
        silent = [one.stub.EngineSession(timeout=60), one.stub.FrontendSession(timeout=60)]
        # An answer to a later call: the sessions have reached the coordinator.
        await one.topology()
        await one.servicer.close()
        for call in silent:
            with pytest.raises(grpc.aio.AioRpcError, match="the coordinator stops"):
                await call.read()


async def test_hundreds_of_engines_reach_a_frontend() -> None:
    async with coordinator() as one:
        frontend = await one.frontend()
        await frontend.read()
        for index in range(300):
            await one.engine(engine_id=f"e{index}", endpoint=f"127.0.0.1:{10_000 + index}")
        added: list[str] = []
        while len(added) < 300:
            delta = (await frontend.read()).delta
            added += [engine.registration.engine_id for engine in delta.added]
        assert sorted(added) == sorted(f"e{index}" for index in range(300))
        assert len((await one.topology()).engines) == 300


async def test_many_engines_are_asked_to_report_less_often_and_later_ones_at_once() -> None:
    async with coordinator() as one:
        peers = [
            await one.engine(engine_id=f"e{index}", endpoint=f"127.0.0.1:{10_000 + index}")
            for index in range(252)
        ]
        # Those that were there get a message at 201 engines, which leaves room for 251, and again at 252.
        for peer, intervals in ((peers[0], [126, 158]), (peers[201], [126, 158]), (peers[251], [158])):
            received = [(await peer.read_command()).update_interval.interval_ms for _ in intervals]
            assert received == intervals


async def test_a_returning_engine_is_sent_the_interval_again_and_few_engines_are_sent_none() -> None:
    async with coordinator() as one:
        first = await one.engine(engine_id="first", endpoint="127.0.0.1:9999")
        for index in range(200):
            await one.engine(engine_id=f"e{index}", endpoint=f"127.0.0.1:{10_000 + index}")
        command = await first.read_command()
        await first.answer(command)
        again = await one.engine(engine_id="first", endpoint="127.0.0.1:9999")
        assert (await again.read_command()).update_interval == command.update_interval


# Engines of lockstep groups, fencing and limits, over real gRPC.

READY, LOADING = member_pb2.MEMBER_STATE_READY, member_pb2.MEMBER_STATE_LOADING
LOADED = command_pb2.ScalingNotice(kind=command_pb2.SCALING_NOTICE_KIND_WEIGHTS_READY)


def rank(index: int, **fields: object) -> dict[str, object]:
    """What rank `index` of a lockstep group of two registers with."""
    facts = {"dp_group": "g", "dp_size": 2, "lockstep": True, "parallel_config_hash": "h"}
    return {"engine_id": f"e{index}", "dp_rank": index, "store_port": 7000 + index, **facts, **fields}


async def formed(one: Coordinator) -> list[EnginePeer]:
    """Two engines that have formed a generation, as the coordinator has announced."""
    peers = [await one.engine(**rank(index)) for index in range(2)]
    for peer in peers:
        await peer.report(state=LOADING, wave=1, wave_complete=True, scaling_notice=LOADED)
    for step in ("prepare_scale", "commit_scale"):
        commands = [await peer.read_command() for peer in peers]
        assert [command.WhichOneof("command") for command in commands] == [step, step]
        for peer, command in zip(peers, commands, strict=True):
            await peer.answer(command)
    for peer in peers:
        generation = commands[0].commit_scale.generation
        await peer.report(state=READY, wave=1, wave_complete=True, generation=generation)
    return peers


async def refusal(peer_call: grpc.aio.StreamStreamCall[object, object]) -> Exception:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await peer_call.read()
    return from_rpc_error(failed.value)


async def test_two_engines_form_a_group_and_frontends_are_notified() -> None:
    async with coordinator(epoch=9_000_000_000) as one:
        frontend = await one.frontend()
        await frontend.read()
        await formed(one)
        while not (waves := (await frontend.read()).delta.waves) or not waves[0].generation:
            pass
        assert (waves[0].dp_group, waves[0].wave, waves[0].generation) == ("g", 1, 9000)
        assert [state.generation for state in (await one.topology()).waves] == [9000]


async def test_a_hint_of_a_frontend_starts_the_other_ranks_and_a_refused_start_is_no_end() -> None:
    async with coordinator() as one:
        peers = await formed(one)
        frontend = await one.frontend()
        while not (await one.topology()).waves[0].generation:
            pass
        hint = coordinator_pb2.FirstRequestWhilePaused(dp_group="g", engine_id="e0", wave=1)
        await frontend.call.write(coordinator_pb2.FrontendSessionRequest(first_request_while_paused=hint))
        command = await peers[1].read_command()
        assert command.start_wave.wave == 1
        await peers[1].answer(command, refusal="not yet")
        await peers[0].report(wave=1, generation=1, start_wave_needed=True)
        again = await peers[1].read_command()
        assert (again.start_wave.wave, list(again.start_wave.exclude)) == (1, ["e0"])
        assert again.command_id > command.command_id


async def test_a_command_without_an_answer_is_sent_again_to_the_next_session() -> None:
    async with coordinator() as one:
        peers = [await one.engine(**rank(index)) for index in range(2)]
        for peer in peers:
            await peer.report(state=LOADING, scaling_notice=LOADED)
        command = await peers[0].read_command()
        back = await one.engine(**rank(0))
        assert await back.read_command() == command


async def test_dense_engines_are_in_no_group_and_are_sent_nothing() -> None:
    async with coordinator() as one:
        peers = [await one.engine(**rank(index, lockstep=False)) for index in range(2)]
        for peer in peers:
            await peer.report(state=READY, wave=1, start_wave_needed=True, scaling_notice=LOADED)
            # The answer to this comes after anything that the report could have led to.
            await peer.register(registration(**rank(0 if peer is peers[0] else 1, lockstep=False)))
        assert not (await one.topology()).waves


async def test_an_engine_that_would_compute_something_else_is_refused_with_both_hashes() -> None:
    async with coordinator() as one:
        await one.engine(**rank(0))
        peer = EnginePeer(one.stub)
        other = registration(**rank(1, parallel_config_hash="other"))
        await peer.call.write(coordinator_pb2.EngineSessionRequest(register=other))
        error = await refusal(peer.call)
        assert isinstance(error, FailedPrecondition)
        assert error.reason == "PARALLEL_CONFIG_MISMATCH"
        assert "'other'" in error.message
        assert "'h'" in error.message
        assert len((await one.topology()).engines) == 1


async def test_an_engine_that_says_nonsense_loses_its_session_and_the_others_go_on() -> None:
    async with coordinator() as one:
        peers = await formed(one)
        await peers[0].report(state=READY, wave=1, wave_complete=True, generation=2**64 - 1)
        error = await refusal(peers[0].call)
        assert isinstance(error, InvalidArgument)
        assert [name for name, _ in error.violations] == ["report.generation"]
        frontend = await one.frontend()
        hint = coordinator_pb2.FirstRequestWhilePaused(dp_group="g", engine_id="e1", wave=2**63)
        await frontend.call.write(coordinator_pb2.FrontendSessionRequest(first_request_while_paused=hint))
        while (await one.topology()).frontends:
            pass
        assert [state.generation for state in (await one.topology()).waves] == [1]


async def test_an_engine_that_knows_a_newer_coordinator_leaves_an_older_one() -> None:
    async with coordinator(epoch=5) as one:
        engine = EnginePeer(one.stub)
        message = registration(highest_coordinator_epoch=6)
        await engine.call.write(coordinator_pb2.EngineSessionRequest(register=message))
        frontend = await one.frontend(known_coordinator_epoch=6)
        for call in (engine.call, frontend.call):
            error = await refusal(call)
            assert isinstance(error, FailedPrecondition)
            assert error.reason == "STALE_COORDINATOR"
        known = await one.engine(highest_coordinator_epoch=5)
        [member] = (await one.topology()).engines
        assert member.registration.highest_coordinator_epoch == 0
        await known.goodbye()


async def test_an_evicted_process_is_refused_and_its_successor_is_not() -> None:
    async with coordinator() as one:
        peer = await one.engine()
        one.known.evict_engine("engine-0", "it is slow")
        assert not (await one.topology()).engines
        await peer.report(state=READY)
        await refusal(peer.call)
        again = EnginePeer(one.stub)
        await again.call.write(coordinator_pb2.EngineSessionRequest(register=registration()))
        error = await refusal(again.call)
        assert isinstance(error, FailedPrecondition)
        assert (error.reason, "it is slow" in error.message) == ("EVICTED", True)
        await one.engine(engine_epoch=12)
        assert len((await one.topology()).engines) == 1


async def test_a_frontend_that_refuses_a_delta_is_sent_everything() -> None:
    clock = FakeClock()
    async with coordinator(clock=clock) as one:
        frontend = await one.frontend()
        await frontend.read()
        clock.advance(1.0)
        await one.engine()
        delta = await frontend.read(ack=False)
        await frontend.ack(delta.nonce, refusal="what is this")
        again = await frontend.read()
        assert [engine.registration.engine_id for engine in again.snapshot.engines] == ["engine-0"]


async def test_frontends_are_limited() -> None:
    async with coordinator(max_frontends=3) as one:
        peers = [await one.frontend(frontend_id=f"f{index}") for index in range(3)]
        for peer in peers:
            await peer.read()
        error = await refusal((await one.frontend()).call)
        assert isinstance(error, ResourceExhausted)
        peers[0].call.cancel()
        while len((await one.topology()).frontends) == 3:
            pass
        await (await one.frontend()).read()


@pytest.mark.parametrize(
    "message",
    [
        coordinator_pb2.EngineSessionRequest(report=coordinator_pb2.EngineReport(seq=1)),
        coordinator_pb2.EngineSessionRequest(register=registration()),
    ],
    ids=["reports", "registers"],
)
async def test_a_flood_is_ended_and_others_are_served_meanwhile(
    message: coordinator_pb2.EngineSessionRequest,
) -> None:
    # The clock stands still, so that any speed is more than a session may have.
    async with coordinator(clock=FakeClock()) as one:
        flooding, other = await one.engine(), await one.engine(engine_id="other")
        frontend = await one.frontend()
        await frontend.read()
        for _ in range(2 * MAX_MESSAGES_PER_S):
            await flooding.call.write(message)
        await other.report(state=READY)
        [updated] = (await frontend.read()).delta.updated
        assert (updated.registration.engine_id, updated.state) == ("other", READY)
        await flooding.call.write(message)
        while (answer := await _next_or_error(flooding)) is None:
            pass
        assert isinstance(answer, ResourceExhausted)
        assert sorted(engine.registration.engine_id for engine in (await one.topology()).engines) == [
            "engine-0",
            "other",
        ]
        await other.register(registration(engine_id="other"))


async def _next_or_error(peer: EnginePeer) -> Exception | None:
    try:
        await peer.read()
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    return None


async def test_a_peer_that_still_floods_after_the_session_has_ended_gets_the_reason() -> None:
    async with coordinator(clock=FakeClock()) as one:
        statuses = [await asyncio.to_thread(_status_of_a_flood, one.address) for _ in range(4)]
        assert statuses == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 4


def _status_of_a_flood(address: str) -> grpc.StatusCode | None:
    # In asyncio a write that fails at the end replaces the status that was sent:
    # https://github.com/grpc/grpc/issues/36066
    register = coordinator_pb2.EngineSessionRequest(register=registration())
    report = coordinator_pb2.EngineSessionRequest(report=coordinator_pb2.EngineReport(seq=1))
    with grpc.insecure_channel(address) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        try:
            for _ in stub.EngineSession(itertools.chain([register], itertools.repeat(report)), timeout=60):
                pass
        except grpc.RpcError as error:
            return error.code()  # type: ignore[no-any-return]
    return None


# Numbers that others send leave room to count on from them.


@pytest.mark.parametrize("field", ["seq", "wave", "generation", "step_number"])
def test_a_number_of_a_report_that_leaves_no_room_to_count_on_is_refused(field: str) -> None:
    check_report(coordinator_pb2.EngineReport(**{field: MAX_NUMBER}))
    for value in (MAX_NUMBER + 1, 2**64 - 1):
        with pytest.raises(InvalidArgument, match=f"{field} is {value}, the limit is {2**62}") as refused:
            check_report(coordinator_pb2.EngineReport(**{field: value}))
        assert [name for name, _ in refused.value.violations] == [f"report.{field}"]


def test_the_step_number_of_a_load_is_bounded_too() -> None:
    report = coordinator_pb2.EngineReport(load=member_pb2.EngineLoad(step_number=2**63))
    with pytest.raises(InvalidArgument, match=f"load.step_number is {2**63}") as refused:
        check_report(report)
    assert [name for name, _ in refused.value.violations] == ["report.load.step_number"]


def test_the_wave_of_a_registration_and_of_a_hint_is_bounded() -> None:
    with pytest.raises(InvalidArgument, match=f"wave is {2**63}, the limit is {2**62}"):
        to_registration(registration(wave=2**63))
    assert to_registration(registration(wave=MAX_NUMBER)).engine_id == "engine-0"
    with pytest.raises(InvalidArgument, match=f"wave is {2**63}, the limit is {2**62}"):
        check_hint(coordinator_pb2.FirstRequestWhilePaused(wave=2**63))
    check_hint(coordinator_pb2.FirstRequestWhilePaused(wave=MAX_NUMBER))


# The limit on the messages of one session.


def test_a_steady_session_is_never_ended() -> None:
    clock = FakeClock()
    limit = RateLimit(clock)
    for _ in range(10 * MAX_MESSAGES_PER_S):
        clock.advance(1 / MAX_MESSAGES_PER_S)
        limit.take()


def test_a_flood_is_ended_after_its_burst() -> None:
    limit = RateLimit(FakeClock())
    for _ in range(2 * MAX_MESSAGES_PER_S):
        limit.take()
    with pytest.raises(ResourceExhausted, match="messages a second"):
        limit.take()


# What engines send is checked before anything is made of it.


def test_no_label_of_a_name_is_longer_than_resolvers_take() -> None:
    longest = "a" * 63
    for name in (longest, f"{longest}.{longest}.example"):
        to_registration(registration(endpoint=f"{name}:7000", host=name))
    for name in (longest + "a", f"node.{longest}a.example"):
        with pytest.raises(InvalidArgument, match="endpoint"):
            to_registration(registration(endpoint=f"{name}:7000"))
        with pytest.raises(InvalidArgument, match="host"):
            to_registration(registration(host=name))


@pytest.mark.parametrize("field", ["engine_id", "dp_group", "parallel_config_hash"])
@pytest.mark.parametrize("text", ["a" * 129, "two\nlines", "\x1b[2J"], ids=["long", "lines", "escape"])
def test_names_are_short_and_can_be_printed(field: str, text: str) -> None:
    """They are in logs, and in what is sent to every frontend."""
    to_registration(registration(**{field: "a" * 128}))
    with pytest.raises(InvalidArgument, match=f"{field} has "):
        to_registration(registration(**{field: text}))


def test_a_frontend_is_known_by_a_name_that_can_be_printed() -> None:
    check_frontend(coordinator_pb2.FrontendRegistration(frontend_id="frontend 0"))
    for name in ("", "two\nlines", "a" * 129):
        with pytest.raises(InvalidArgument, match="frontend_id has "):
            check_frontend(coordinator_pb2.FrontendRegistration(frontend_id=name))
    # All frontends are in the snapshot that each of them gets.
    with pytest.raises(InvalidArgument, match="endpoint has 100000 characters"):
        check_frontend(coordinator_pb2.FrontendRegistration(frontend_id="a", endpoint="a" * 100_000))
