"""Sessions of engines and frontends with a coordinator, over real gRPC."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from service_kit.errors import InvalidArgument, from_rpc_error
from tests.coordinator_svc.fakes import Coordinator, EnginePeer, coordinator, registration
from triptych.coordinator.v1 import coordinator_pb2, member_pb2

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
async def test_a_registration_that_cannot_be_is_refused_by_field(
    fields: dict[str, object], field: str
) -> None:
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


async def test_an_engine_whose_lease_ended_is_told_to_register_again() -> None:
    async with coordinator(lease_s=0.6) as one:
        peer = await one.engine()
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


async def test_a_restarted_coordinator_says_nothing_of_engines_it_has_not_heard_yet() -> None:
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


async def test_closing_also_ends_a_session_that_has_not_said_who_it_is() -> None:
    async with coordinator() as one:
        silent = [one.stub.EngineSession(timeout=60), one.stub.FrontendSession(timeout=60)]
        # An answer to a later call: the sessions have reached the coordinator.
        await one.topology()
        await one.servicer.close()
        for call in silent:
            with pytest.raises(grpc.aio.AioRpcError, match="the coordinator stops"):
                await call.read()


async def test_a_thousand_engines_reach_a_frontend_in_few_messages() -> None:
    async with coordinator() as one:
        frontend = await one.frontend()
        await frontend.read()
        for index in range(1000):
            await one.engine(engine_id=f"e{index}", endpoint=f"127.0.0.1:{10_000 + index}")
        added: list[str] = []
        num_messages = 0
        while len(added) < 1000:
            delta = (await frontend.read()).delta
            added += [engine.registration.engine_id for engine in delta.added]
            num_messages += 1
        assert sorted(added) == sorted(f"e{index}" for index in range(1000))
        assert len((await one.topology()).engines) == 1000


async def test_many_engines_are_told_to_report_less_often_and_later_ones_at_once() -> None:
    async with coordinator() as one:
        peers = [
            await one.engine(engine_id=f"e{index}", endpoint=f"127.0.0.1:{10_000 + index}")
            for index in range(252)
        ]
        # Those who were there are told at 201 engines, which leaves room for 251, and again at 252.
        for peer, intervals in ((peers[0], [126, 158]), (peers[201], [126, 158]), (peers[251], [158])):
            told = [(await peer.read_command()).update_interval.interval_ms for _ in intervals]
            assert told == intervals


async def test_an_engine_that_comes_back_is_told_the_interval_again_and_few_are_told_none() -> None:
    async with coordinator() as one:
        first = await one.engine(engine_id="first", endpoint="127.0.0.1:9999")
        for index in range(200):
            await one.engine(engine_id=f"e{index}", endpoint=f"127.0.0.1:{10_000 + index}")
        command = await first.read_command()
        await first.answer(command)
        again = await one.engine(engine_id="first", endpoint="127.0.0.1:9999")
        assert (await again.read_command()).update_interval == command.update_interval
