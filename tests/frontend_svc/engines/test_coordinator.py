"""What a coordinator tells, and that its absence costs nothing."""

from __future__ import annotations

import asyncio

import grpc.aio

from frontend_svc.engines.coordinator import Topology
from tests.frontend_svc.fakes import WAIT_S, FakeEngine, answer, read_all, serving
from triptych.coordinator.v1 import coordinator_pb2, coordinator_pb2_grpc, member_pb2

READY, GONE = member_pb2.MEMBER_STATE_READY, member_pb2.MEMBER_STATE_GONE


def member(engine_id: str, endpoint: str, state: member_pb2.MemberState = READY) -> member_pb2.EngineMember:
    registration = member_pb2.EngineRegistration(engine_id=engine_id, endpoint=endpoint)
    return member_pb2.EngineMember(registration=registration, state=state)


def snapshot(*members: member_pb2.EngineMember, version: int = 1) -> coordinator_pb2.FrontendSessionResponse:
    topology = member_pb2.Topology(version=version, engines=members, coordinator_epoch=9)
    return coordinator_pb2.FrontendSessionResponse(version=version, nonce=version, snapshot=topology)


def delta(version: int, **content) -> coordinator_pb2.FrontendSessionResponse:
    changes = coordinator_pb2.TopologyDelta(**content)
    return coordinator_pb2.FrontendSessionResponse(version=version, nonce=version, delta=changes)


class FakeCoordinator(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Says what it is told to say, and remembers what it hears."""

    def __init__(self) -> None:
        self.to_say: asyncio.Queue[coordinator_pb2.FrontendSessionResponse] = asyncio.Queue()
        self.registrations: list[coordinator_pb2.FrontendRegistration] = []
        self.acks: asyncio.Queue[int] = asyncio.Queue()
        self.address = ""

    async def start(self, address: str = "127.0.0.1:0") -> grpc.aio.Server:
        """Listen; the caller stops what it gets."""
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
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
                if request.HasField("ack"):
                    self.acks.put_nowait(request.ack.nonce)

        listening = asyncio.ensure_future(listen())
        try:
            while True:
                yield await self.to_say.get()
        finally:
            listening.cancel()


def test_topology_follows_snapshots_and_deltas():
    topology = Topology()
    assert topology.apply(snapshot(member("a", "h:1"), member("b", "h:2")))
    assert topology.endpoints() == ["h:1", "h:2"]
    assert not topology.apply(delta(2))
    assert topology.apply(delta(3, added=[member("c", "h:3")], removed_engine_ids=["a"]))
    assert topology.apply(delta(4, updated=[member("b", "h:9"), member("c", "h:3", GONE)]))
    assert (topology.endpoints(), topology.version, topology.coordinator_epoch) == (["h:9"], 4, 9)


async def test_engines_are_found_through_the_coordinator_and_its_loss_is_not_felt():
    engine, coordinator = FakeEngine(answer("found")), FakeCoordinator()
    await engine.start()
    server = await coordinator.start()
    coordinator.to_say.put_nowait(snapshot(member("a", engine.address)))
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
        coordinator.to_say.put_nowait(snapshot(version=1))
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
        coordinator.to_say.put_nowait(snapshot(member("a", engine.address)))
        await client.wait_ready()
        assert (await read_all(client.generate()))[1] == "late"
    await server.stop(None)
    await engine.kill()
