"""A coordinator's messages, and that its absence costs nothing."""

from __future__ import annotations

import asyncio
import logging

import grpc
import grpc.aio

from frontend_svc.engines.connection.connection import FrontendIdentity
from frontend_svc.engines.coordinator import CoordinatorSession
from frontend_svc.engines.routing.account import LoadReport
from frontend_svc.engines.topology import CoordinatorFence, Topology
from tests.frontend_svc.fakes import WAIT_S, FakeEngine, answer, read_all, serving
from triptych.coordinator.v1 import coordinator_pb2, coordinator_pb2_grpc, member_pb2
from triptych_kit.clock import FakeClock
from triptych_kit.limits import INTERNAL

LEASE_S = 3.0
READY, GONE = member_pb2.MEMBER_STATE_READY, member_pb2.MEMBER_STATE_GONE


def member(
    engine_id: str, endpoint: str, state: member_pb2.MemberState = READY, **facts
) -> member_pb2.EngineMember:
    registration = member_pb2.EngineRegistration(engine_id=engine_id, endpoint=endpoint, **facts)
    return member_pb2.EngineMember(registration=registration, state=state)


def snapshot(
    *members: member_pb2.EngineMember, version: int = 1, epoch: int = 9, waves=()
) -> coordinator_pb2.FrontendSessionResponse:
    topology = member_pb2.Topology(
        version=version,
        engines=members,
        coordinator_epoch=epoch,
        waves=waves,
        lease_ms=round(LEASE_S * 1000),
    )
    return coordinator_pb2.FrontendSessionResponse(version=version, nonce=version, snapshot=topology)


def delta(version: int, **content) -> coordinator_pb2.FrontendSessionResponse:
    changes = coordinator_pb2.TopologyDelta(**content)
    return coordinator_pb2.FrontendSessionResponse(version=version, nonce=version, delta=changes)


def session_of(address: str, clock: FakeClock, on_engines=lambda engines: None) -> CoordinatorSession:
    """A frontend's session without other listeners."""
    return CoordinatorSession(
        address,
        FrontendIdentity("frontend-0", 7),
        endpoint=lambda: "",
        on_engines=on_engines,
        on_loads=lambda loads: None,
        num_in_flight=lambda: 0,
        clock=clock,
    )


class FakeCoordinator(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Sends scripted messages, and records what it receives."""

    def __init__(self) -> None:
        self.to_send: asyncio.Queue[coordinator_pb2.FrontendSessionResponse] = asyncio.Queue()
        self.registrations: list[coordinator_pb2.FrontendRegistration] = []
        self.acks: asyncio.Queue[int] = asyncio.Queue()
        self.versions: list[int] = []  # that were acked
        self.refusals: list[str] = []  # of messages
        self.hints: asyncio.Queue[coordinator_pb2.FirstRequestWhilePaused] = asyncio.Queue()
        self.address = ""
        self.epoch = 0  # a frontend that knows a greater one is refused; 0: none is
        self.refused: asyncio.Queue[int] = asyncio.Queue()  # what they knew

    async def start(self, address: str = "127.0.0.1:0") -> grpc.aio.Server:
        server = grpc.aio.server(options=INTERNAL.options())
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(self, server)
        self.address = f"127.0.0.1:{server.add_insecure_port(address)}"
        await server.start()
        return server

    async def FrontendSession(self, request_iterator, context):
        """A session: messages as they are put, acks as they come."""

        async def listen() -> None:
            async for request in request_iterator:
                if request.HasField("register"):
                    self.registrations.append(request.register)
                    registered.set()
                if request.HasField("ack"):
                    self.versions.append(request.ack.version)
                    if request.ack.HasField("error"):
                        self.refusals.append(request.ack.error.message)
                    self.acks.put_nowait(request.ack.nonce)
                if request.HasField("first_request_while_paused"):
                    self.hints.put_nowait(request.first_request_while_paused)

        registered, to_send = asyncio.Event(), self.to_send
        listening = asyncio.ensure_future(listen())
        try:
            await registered.wait()
            known = self.registrations[-1].known_coordinator_epoch
            if self.epoch and known > self.epoch:
                self.refused.put_nowait(known)
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "a newer one is known")
            while True:
                yield await to_send.get()
        finally:
            listening.cancel()


async def test_engines_are_found_through_the_coordinator_and_its_loss_is_not_felt():
    engine, coordinator = FakeEngine(answer("found")), FakeCoordinator()
    await engine.start()
    server = await coordinator.start()
    coordinator.to_send.put_nowait(snapshot(member("a", engine.address)))
    async with serving(coordinator=coordinator.address) as (client, frontend):
        assert await asyncio.wait_for(coordinator.acks.get(), WAIT_S) == 1
        assert (await read_all(client.generate()))[1] == "found"
        assert coordinator.registrations[0].endpoint == frontend.address

        engine.script = None
        running = client.generate()
        requests = await engine.wait_for_requests(2)
        await server.stop(None)
        answer("still there")(engine, requests[1])
        assert (await read_all(running))[1] == "still there"
        engine.script = answer("found")
        assert (await read_all(client.generate()))[1] == "found"

        # It comes back and has forgotten everything; the engine is still in use.
        server = await coordinator.start(coordinator.address)
        coordinator.to_send.put_nowait(snapshot(version=1))
        assert await asyncio.wait_for(coordinator.acks.get(), WAIT_S) == 1
        assert coordinator.registrations[-1].known_version == 1
        assert coordinator.registrations[-1].known_coordinator_epoch == 9
        assert (await read_all(client.generate()))[1] == "found"
    await server.stop(None)
    await engine.kill()


async def test_engine_and_coordinator_may_start_after_the_frontend():
    engine, coordinator = FakeEngine(answer("late")), FakeCoordinator()
    server = await coordinator.start()
    await server.stop(None)
    async with serving(coordinator=coordinator.address, waits_ready=False) as (client, _):
        await engine.start()
        server = await coordinator.start(coordinator.address)
        coordinator.to_send.put_nowait(snapshot(member("a", engine.address)))
        await client.wait_ready()
        assert (await read_all(client.generate()))[1] == "late"
    await server.stop(None)
    await engine.kill()


async def test_the_first_request_to_a_paused_group_is_hinted_at_once_a_wave():
    engine, coordinator = FakeEngine(answer("woken")), FakeCoordinator()
    await engine.start()
    server = await coordinator.start()
    paused = member_pb2.WaveState(dp_group="g", wave=4)
    coordinator.to_send.put_nowait(
        snapshot(member("engine-0", engine.address, dp_group="g", lockstep=True), waves=[paused])
    )
    async with serving(coordinator=coordinator.address) as (client, _):
        for _ in range(2):
            await read_all(client.generate())
        hint = await asyncio.wait_for(coordinator.hints.get(), WAIT_S)
        assert (hint.dp_group, hint.engine_id, hint.wave) == ("g", "engine-0", 4)
        coordinator.to_send.put_nowait(delta(2, waves=[member_pb2.WaveState(dp_group="g", wave=5)]))
        for nonce in (1, 2):
            assert await asyncio.wait_for(coordinator.acks.get(), WAIT_S) == nonce
        await read_all(client.generate())
        hint = await asyncio.wait_for(coordinator.hints.get(), WAIT_S)
        assert (hint.wave, coordinator.hints.empty()) == (5, True)
    await server.stop(None)
    await engine.kill()


async def test_loads_and_their_absence_reach_the_engines_they_are_of():
    engine, coordinator = FakeEngine(answer("x")), FakeCoordinator()
    await engine.start()
    server = await coordinator.start()
    coordinator.to_send.put_nowait(snapshot(member("engine-0", engine.address)))
    async with serving(coordinator=coordinator.address) as (_, frontend):
        (one,) = frontend.engines.directory.clients()
        load = member_pb2.EngineLoad(
            engine_id="engine-0", engine_epoch=7, step_number=3, num_waiting_tokens=70
        )
        coordinator.to_send.put_nowait(delta(2, loads=[load]))
        unreported = member("engine-0", engine.address, member_pb2.MEMBER_STATE_UNREPORTED)
        for version, tokens in ((2, 70), (3, 0)):
            while await asyncio.wait_for(coordinator.acks.get(), WAIT_S) != version:
                pass
            assert one.requests.account.info().num_waiting_tokens == tokens
            coordinator.to_send.put_nowait(delta(3, updated=[unreported]))
    await server.stop(None)
    await engine.kill()


async def test_an_older_coordinator_is_refused_and_sent_the_version_that_is_held():
    engine, coordinator = FakeEngine(answer("still there")), FakeCoordinator()
    await engine.start()
    server = await coordinator.start()
    coordinator.to_send.put_nowait(snapshot(member("engine-0", engine.address), version=5, epoch=9))
    async with serving(coordinator=coordinator.address) as (client, _):
        assert await asyncio.wait_for(coordinator.acks.get(), WAIT_S) == 5
        coordinator.to_send.put_nowait(snapshot(version=6, epoch=8))
        assert await asyncio.wait_for(coordinator.acks.get(), WAIT_S) == 6
        assert coordinator.versions == [5, 5]
        assert coordinator.refusals == ["epoch 8 is older than 9, whose lease has not expired"]
        assert (await read_all(client.generate()))[1] == "still there"
        coordinator.to_send.put_nowait(snapshot(member("b", engine.address), version=1, epoch=10))
        assert await asyncio.wait_for(coordinator.acks.get(), WAIT_S) == 1
        assert (coordinator.versions[-1], coordinator.registrations[-1].known_version) == (1, 5)
    await server.stop(None)
    await engine.kill()


async def test_a_coordinator_with_an_open_session_counts_as_alive_and_its_claim_ends_a_lease_later():
    clock, coordinator = FakeClock(), FakeCoordinator()
    server = await coordinator.start()
    coordinator.to_send.put_nowait(snapshot(version=5, epoch=9))
    session = session_of(coordinator.address, clock)
    session.start()
    assert await asyncio.wait_for(coordinator.acks.get(), WAIT_S) == 5
    # Nothing changes for long, then it is gone; in its place an older one is found.
    clock.advance(100 * LEASE_S)
    await server.stop(None)
    coordinator.epoch = 8
    server = await coordinator.start(coordinator.address)
    for _ in range(2):
        assert await asyncio.wait_for(coordinator.refused.get(), WAIT_S) == 9
    clock.advance(LEASE_S)
    coordinator.to_send.put_nowait(snapshot(version=1, epoch=8))
    assert await asyncio.wait_for(coordinator.acks.get(), WAIT_S) == 1
    assert (coordinator.registrations[-1].known_coordinator_epoch, coordinator.versions[-1]) == (0, 1)
    assert coordinator.refusals == []
    await session.close()
    await server.stop(None)


async def test_an_error_in_a_callback_is_logged_and_the_session_begins_anew(caplog):
    coordinator, received, failures = FakeCoordinator(), asyncio.Queue(), [ValueError("a bug")]

    def on_engines(engines: list[str]) -> None:
        received.put_nowait(engines)
        if failures:
            # For the next session: the one that fails would take what it does not receive any more.
            coordinator.to_send = asyncio.Queue()
            coordinator.to_send.put_nowait(snapshot(member("a", "h:1")))
            raise failures.pop()

    server = await coordinator.start()
    session = session_of(coordinator.address, FakeClock(), on_engines)
    coordinator.to_send.put_nowait(snapshot(member("a", "h:1")))
    session.start()
    assert await asyncio.wait_for(coordinator.acks.get(), WAIT_S) == 1
    assert [received.get_nowait() for _ in range(received.qsize())] == [["h:1"], ["h:1"]]
    assert len(coordinator.registrations) == 2
    [line] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert line.message == "coordinator session failed" and isinstance(line.exc_info[1], ValueError)
    await session.close()
    await server.stop(None)


# What a frontend holds of a coordinator's messages, and which coordinator it believes.

UNREPORTED = member_pb2.MEMBER_STATE_UNREPORTED


def load(engine_id: str, step_number: int, num_running: int) -> member_pb2.EngineLoad:
    return member_pb2.EngineLoad(
        engine_id=engine_id, engine_epoch=7, step_number=step_number, num_running=num_running
    )


def wave(number: int, *, is_running: bool = False, group: str = "g") -> member_pb2.WaveState:
    return member_pb2.WaveState(dp_group=group, wave=number, engines_running=is_running)


def test_topology_follows_snapshots_and_deltas():
    topology = Topology()
    assert topology.apply(snapshot(member("a", "h:1"), member("b", "h:2")))
    assert topology.endpoints() == ["h:1", "h:2"]
    assert not topology.apply(delta(2))
    assert topology.apply(delta(3, added=[member("c", "h:3")], removed_engine_ids=["a"]))
    assert topology.apply(delta(4, updated=[member("b", "h:9"), member("c", "h:3", GONE)]))
    assert (topology.endpoints(), topology.version, topology.coordinator_epoch) == (["h:9"], 4, 9)


def test_engines_without_all_of_the_labels_are_not_there():
    label = member_pb2.Label(key="zone", value="a")
    everybody = snapshot(
        member("0", "n1:1", dp_rank=0, labels=[label]),
        member("1", "n1:2", dp_rank=1),
        member("2", "n2:1", dp_rank=2, host="other", labels=[label], dp_group="g"),
    )
    for wanted, endpoints in (
        ({}, ["n1:1", "n1:2", "n2:1"]),
        ({"dp_rank": "1"}, ["n1:2"]),
        ({"host": "n1"}, ["n1:1", "n1:2"]),
        ({"host": "other"}, ["n2:1"]),
        ({"zone": "a"}, ["n1:1", "n2:1"]),
        ({"zone": "a", "dp_group": "g"}, ["n2:1"]),
        ({"zone": "b"}, []),
    ):
        topology = Topology(wanted)
        topology.apply(everybody)
        assert topology.endpoints() == endpoints
    # A label that an engine has lost takes it away.
    topology = Topology({"zone": "a"})
    topology.apply(everybody)
    assert topology.apply(delta(2, updated=[member("0", "n1:1")]))
    assert topology.endpoints() == ["n2:1"]


def test_loads_are_reported_once_by_endpoint_and_none_of_an_unreported_engine():
    topology = Topology()
    loaded = member("a", "h:1")
    loaded.load.CopyFrom(load("a", 1, 5))
    topology.apply(snapshot(loaded, member("b", "h:2")))
    assert topology.take_loads() == {"h:1": LoadReport(7, 1, 5)}
    assert topology.take_loads() == {}
    topology.apply(delta(2, loads=[load("b", 9, 2), load("stranger", 1, 1)]))
    topology.apply(delta(3, updated=[member("a", "h:1", UNREPORTED)]))
    assert topology.take_loads() == {"h:2": LoadReport(7, 9, 2), "h:1": None}


def test_a_paused_lockstep_group_is_hinted_once_a_wave_and_others_never():
    topology = Topology()
    members = [member(str(rank), f"h:{rank}", dp_group="g", lockstep=True) for rank in range(2)]
    dense = member("dense", "h:9", dp_group="d")
    topology.apply(snapshot(*members, dense, waves=[wave(3), wave(3, group="d")]))
    assert topology.hint("dense") is None and topology.hint("stranger") is None
    first = topology.hint("1")
    assert first is not None and (first.dp_group, first.engine_id, first.wave) == ("g", "1", 3)
    assert topology.hint("1") is None and topology.hint("0") is None
    topology.apply(delta(2, waves=[wave(3, is_running=True)]))
    assert topology.hint("0") is None
    topology.apply(delta(3, waves=[wave(4)]))
    later = topology.hint("0")
    assert later is not None and later.wave == 4


def test_the_wave_of_an_engine_is_that_of_its_lockstep_group():
    topology = Topology()
    dense = member("2", "h:2", dp_group="d")
    lone = member("3", "h:3", dp_group="other", lockstep=True)
    topology.apply(
        snapshot(
            member("0", "h:0", dp_group="g", lockstep=True), dense, lone, waves=[wave(4), wave(5, group="d")]
        )
    )
    assert [topology.wave_of(engine_id) for engine_id in ("0", "2", "3", "unknown")] == [4, None, None, None]


def test_a_wave_never_goes_back():
    topology = Topology()
    topology.apply(snapshot(member("0", "h:0", dp_group="g", lockstep=True), waves=[wave(4)]))
    topology.apply(delta(2, waves=[wave(3, is_running=True)]))
    hint = topology.hint("0")
    assert hint is not None and hint.wave == 4


def test_a_coordinator_of_a_lower_epoch_is_believed_when_the_other_was_silent_for_a_lease():
    fence = CoordinatorFence()
    assert fence.admits(5, lease_s=2.0, now=0.0)
    fence.note_end(now=0.0)
    assert not fence.admits(4, lease_s=1.0, now=1.9)
    assert fence.admits(5, lease_s=2.0, now=1.95)
    fence.note_end(now=2.0)
    assert not fence.admits(4, lease_s=1.0, now=2.0)
    assert fence.admits(9, lease_s=2.0, now=2.0)
    fence.note_end(now=2.0)
    assert not fence.admits(5, lease_s=1.0, now=2.0)
    # The end of a session in which it sent nothing says nothing of it.
    fence.note_end(now=3.0)
    assert not fence.has_lapsed(now=3.9) and fence.has_lapsed(now=4.0)
    assert fence.admits(5, lease_s=1.0, now=4.0)


def test_the_lease_is_that_of_the_accepted_coordinator():
    fence = CoordinatorFence()
    assert fence.admits(5, lease_s=30.0, now=0.0)
    fence.note_end(now=0.0)
    assert not fence.has_lapsed(now=29.9) and fence.has_lapsed(now=30.0)
    assert fence.admits(6, lease_s=0.5, now=30.0)
    fence.note_end(now=30.0)
    assert not fence.admits(5, lease_s=30.0, now=30.4) and fence.has_lapsed(now=30.5)


def test_a_coordinator_is_accepted_for_as_long_as_its_session_is_open():
    fence = CoordinatorFence()
    assert fence.admits(5, lease_s=3.0, now=0.0)
    assert not fence.admits(4, lease_s=3.0, now=300.0)
    fence.note_end(now=300.0)
    assert not fence.has_lapsed(now=302.9) and fence.has_lapsed(now=303.0)
