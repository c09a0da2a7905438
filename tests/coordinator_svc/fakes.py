"""A coordinator on a port of its own, and peers that speak to it over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from coordinator_svc.membership.registry import EngineRegistry
from coordinator_svc.membership.servicer import CoordinatorServicer
from coordinator_svc.membership.topology import Topology
from triptych.common.v1 import error_pb2
from triptych.coordinator.v1 import command_pb2, coordinator_pb2, coordinator_pb2_grpc, member_pb2
from triptych_kit.channel import open_channel
from triptych_kit.clock import Clock, MonotonicClock
from triptych_kit.server import INTERNAL, Registration, Server

NAME = "triptych.coordinator.v1.CoordinatorService"
# Longer than anything takes here, however busy the machine: a test that runs into it has failed.
_LIMIT_S = 300.0
_ENGINES_OF_CONNECTION = 100


class Coordinator:
    """A served coordinator: its address, its servicer, and ways to reach it."""

    def __init__(
        self, address: str, known: Topology, servicer: CoordinatorServicer, channels: AsyncExitStack
    ) -> None:
        self.address = address
        self._channels = channels
        self.known = known
        self.servicer = servicer
        self._peers: list[EnginePeer] = []

    async def connect(self) -> None:
        """Use another connection from now on: each has a limited number of calls."""
        channel = await self._channels.enter_async_context(open_channel(self.address))
        self.stub: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel)

    async def topology(self) -> member_pb2.Topology:
        answer: coordinator_pb2.GetTopologyResponse = await self.stub.GetTopology(
            coordinator_pb2.GetTopologyRequest(), timeout=_LIMIT_S
        )
        return answer.topology

    async def engine(self, **fields: Any) -> EnginePeer:
        if len(self._peers) % _ENGINES_OF_CONNECTION == _ENGINES_OF_CONNECTION - 1:
            await self.connect()
        peer = EnginePeer(self.stub)
        # A call without a reference is cancelled.
        self._peers.append(peer)
        await peer.register(registration(**fields))
        return peer

    async def frontend(self, **fields: Any) -> FrontendPeer:
        """A frontend that has sent its registration and has read nothing yet."""
        peer = FrontendPeer(self.stub)
        await peer.register(**{"frontend_id": "frontend-0", "frontend_epoch": 7, **fields})
        return peer


class EnginePeer:
    """The engine's side of a session."""

    def __init__(self, stub: Any) -> None:
        self.call: Any = stub.EngineSession(timeout=_LIMIT_S)
        self._seq = 0
        self.engine_epoch = 0

    async def register(self, message: member_pb2.EngineRegistration) -> coordinator_pb2.Registered:
        """Send a registration and return the answer."""
        self.engine_epoch = message.engine_epoch
        await self.call.write(coordinator_pb2.EngineSessionRequest(register=message))
        answer = await self.read()
        return answer.registered

    async def read(self) -> coordinator_pb2.EngineSessionResponse:
        """The next message; raises the RpcError the session ended with."""
        answer = await self.call.read()
        if not isinstance(answer, coordinator_pb2.EngineSessionResponse):
            raise AssertionError(f"the session ended with {await self.call.code()}")
        return answer

    async def report(self, **fields: Any) -> None:
        """Send a report with the next seq; `load` is a dict."""
        self._seq += 1
        if "load" in fields:
            fields["load"] = member_pb2.EngineLoad(**{"engine_epoch": self.engine_epoch, **fields["load"]})
        report = coordinator_pb2.EngineReport(**{"seq": self._seq, **fields})
        await self.call.write(coordinator_pb2.EngineSessionRequest(report=report))

    async def read_command(self) -> command_pb2.Command:
        answer = await self.read()
        assert answer.WhichOneof("message") == "command"
        return answer.command

    async def answer(self, command: command_pb2.Command, *, refusal: str = "") -> None:
        result = command_pb2.CommandResult(command_id=command.command_id, ack=command_pb2.CommandAck())
        if refusal:
            result.nack.CopyFrom(error_pb2.ErrorStatus(code=9, message=refusal))
        await self.call.write(coordinator_pb2.EngineSessionRequest(command_result=result))

    async def goodbye(self) -> None:
        await self.call.write(coordinator_pb2.EngineSessionRequest(goodbye=coordinator_pb2.EngineGoodbye()))


class FrontendPeer:
    """The frontend's side of a session."""

    def __init__(self, stub: Any) -> None:
        self.call: Any = stub.FrontendSession(timeout=_LIMIT_S)

    async def register(self, **fields: Any) -> None:
        message = coordinator_pb2.FrontendRegistration(**fields)
        await self.call.write(coordinator_pb2.FrontendSessionRequest(register=message))

    async def read(self, *, ack: bool = True) -> coordinator_pb2.FrontendSessionResponse:
        answer = await self.call.read()
        if not isinstance(answer, coordinator_pb2.FrontendSessionResponse):
            raise AssertionError(f"the session ended with {await self.call.code()}")
        if ack:
            await self.ack(answer.nonce)
        return answer

    async def ack(self, nonce: int, *, refusal: str = "") -> None:
        message = coordinator_pb2.FrontendAck(nonce=nonce)
        if refusal:
            message.error.CopyFrom(error_pb2.ErrorStatus(code=9, message=refusal))
        await self.call.write(coordinator_pb2.FrontendSessionRequest(ack=message))


def registration(**fields: Any) -> member_pb2.EngineRegistration:
    """A registration that is fine but for what `fields` say."""
    defaults = {"engine_id": "engine-0", "engine_epoch": 11, "endpoint": "127.0.0.1:7000", "dp_size": 1}
    return member_pb2.EngineRegistration(**{**defaults, **fields})


@asynccontextmanager
async def coordinator(
    *, lease_s: float = 3600.0, epoch: int = 5, max_frontends: int = 100, clock: Clock | None = None
) -> AsyncIterator[Coordinator]:
    """A coordinator that runs for the length of a test. No lease ends in one that does not ask for it."""
    clock = clock or MonotonicClock()
    topology = Topology(EngineRegistry(clock, lease_s=lease_s), coordinator_epoch=epoch)
    servicer = CoordinatorServicer(topology, clock, lease_s=lease_s, max_frontends=max_frontends)
    server = Server(
        listen="127.0.0.1:0",
        registrations=[
            Registration(
                NAME, partial(coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server, servicer)
            )
        ],
        profile=INTERNAL,
        service="coordinator",
    )
    address = await server.start()
    background = [
        asyncio.ensure_future(servicer.expire_leases()),
        asyncio.ensure_future(servicer.step_groups()),
    ]
    try:
        async with AsyncExitStack() as channels:
            served = Coordinator(address, topology, servicer, channels)
            await served.connect()
            yield served
    finally:
        for task in background:
            task.cancel()
        await server.stop(0)
