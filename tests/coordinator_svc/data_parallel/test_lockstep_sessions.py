"""Engines of lockstep groups, fencing and limits, over real gRPC."""

from __future__ import annotations

import asyncio
import itertools

import grpc
import pytest

from coordinator_svc.membership.servicer import MAX_MESSAGES_PER_S
from service_kit.clock import FakeClock
from service_kit.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, from_rpc_error
from tests.coordinator_svc.fakes import Coordinator, EnginePeer, coordinator, registration
from triptych.coordinator.v1 import command_pb2, coordinator_pb2, coordinator_pb2_grpc, member_pb2

READY, LOADING = member_pb2.MEMBER_STATE_READY, member_pb2.MEMBER_STATE_LOADING
LOADED = command_pb2.ScalingNotice(kind=command_pb2.SCALING_NOTICE_KIND_WEIGHTS_READY)


def rank(index: int, **fields: object) -> dict[str, object]:
    """What rank `index` of a lockstep group of two registers with."""
    facts = {"dp_group": "g", "dp_size": 2, "lockstep": True, "parallel_config_hash": "h"}
    return {"engine_id": f"e{index}", "dp_rank": index, "store_port": 7000 + index, **facts, **fields}


async def formed(one: Coordinator) -> list[EnginePeer]:
    """Two engines that have formed a generation, as the coordinator has told them."""
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
    """The error that a session ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await peer_call.read()
    return from_rpc_error(failed.value)


async def test_two_engines_form_a_group_and_frontends_hear_of_it() -> None:
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


async def test_dense_engines_are_in_no_group_and_are_told_nothing() -> None:
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


async def test_a_coordinator_is_left_by_whoever_knows_a_newer_one() -> None:
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


async def test_who_floods_on_when_the_session_has_ended_is_told_why() -> None:
    async with coordinator(clock=FakeClock()) as one:
        statuses = [await asyncio.to_thread(_status_of_a_flood, one.address) for _ in range(4)]
        assert statuses == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 4


def _status_of_a_flood(address: str) -> grpc.StatusCode | None:
    # In asyncio a write that fails at the end takes the place of the status that was told:
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
