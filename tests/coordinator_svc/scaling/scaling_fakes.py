"""A scaling service over members that a test moves by hand, on a port of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from coordinator_svc.membership.publisher import ChangeSignal
from coordinator_svc.membership.registry import MemberState
from coordinator_svc.scaling.group_snapshot import Formed, Group, GroupEngine
from coordinator_svc.scaling.scaling import Scaling
from coordinator_svc.scaling.servicer import ScalingServicer
from triptych.coordinator.v1 import scaling_pb2_grpc
from triptych_kit.channel import open_channel
from triptych_kit.clock import FakeClock
from triptych_kit.errors import Unavailable
from triptych_kit.server import ADMIN, Registration, Server

NAME = "triptych.coordinator.v1.ScalingService"


class FakeEngines:
    """Members by name. One that is asked to drain does so, but for those that refuse or cannot be reached."""

    def __init__(self, *groups: Group) -> None:
        self.members = {group.name: group for group in groups}
        self.signal = ChangeSignal()
        self.refusals: dict[str, str] = {}
        self.unreachable: set[str] = set()
        self.drained: list[tuple[str, float]] = []
        self.evicted: list[tuple[str, str]] = []
        self.membership: dict[str, tuple[int, frozenset[str]]] = {}

    def groups(self) -> Mapping[str, Group]:
        return dict(self.members)

    def find(self, engine_id: str) -> GroupEngine | None:
        engines = (engine for group in self.members.values() for engine in group.engines)
        return next((engine for engine in engines if engine.engine_id == engine_id), None)

    def num_in_flight(self, engine_id: str) -> int:
        return 7

    def want_members(self, group: str, size: int, leaving: frozenset[str]) -> None:
        self.membership[group] = (size, leaving)

    async def drain(self, engine_id: str, deadline_s: float) -> str:
        self.drained.append((engine_id, deadline_s))
        if engine_id in self.unreachable:
            raise Unavailable(f"engine {engine_id} has no session")
        if engine_id not in self.refusals:
            self.move(engine_id, MemberState.DRAINING)
        return self.refusals.get(engine_id, "")

    def evict(self, engine_id: str, reason: str) -> int:
        self.evicted.append((engine_id, reason))
        self.move(engine_id, MemberState.GONE)
        return 42

    def move(self, engine_id: str, state: MemberState) -> None:
        """An engine is in another state now; GONE: it is not there."""
        for name, group in self.members.items():
            moved = [replace(e, state=state) if e.engine_id == engine_id else e for e in group.engines]
            present = tuple(engine for engine in moved if engine.state is not MemberState.GONE)
            self.members[name] = Group(name, present, group.formed)
        self.signal.notify()

    def join(self, group: str, engine: GroupEngine) -> None:
        held = self.members[group]
        self.members[group] = Group(group, (*held.engines, engine), held.formed)
        self.signal.notify()


def dense(name: str, *ranks: int, formed: Formed | None = None, num_kv_blocks: int = 0) -> Group:
    """A group of READY engines `<name>e<rank>`."""
    engines = (GroupEngine(f"{name}e{rank}", 1, rank, MemberState.READY, num_kv_blocks) for rank in ranks)
    return Group(name, tuple(engines), formed)


class Served:
    """A scaling service that runs for the length of a test."""

    def __init__(
        self, engines: FakeEngines, clock: FakeClock, address: str, servicer: ScalingServicer
    ) -> None:
        self.engines = engines
        self.end = servicer.close
        self.clock = clock
        self.address = address


@asynccontextmanager
async def scaling_service(*groups: Group, rebuilt_at: float = 0.0) -> AsyncIterator[Served]:
    """A scaling service over such groups, whose clock stands still."""
    engines, clock = FakeEngines(*groups), FakeClock()
    servicer = ScalingServicer(Scaling(), engines, engines.signal, clock, epoch=9, rebuilt_at=rebuilt_at)
    add = partial(scaling_pb2_grpc.add_ScalingServiceServicer_to_server, servicer)
    server = Server(
        listen="127.0.0.1:0", registrations=[Registration(NAME, add)], profile=ADMIN, service="coordinator"
    )
    address = await server.start()
    running = asyncio.ensure_future(servicer.run())
    try:
        yield Served(engines, clock, address, servicer)
    finally:
        servicer.close()
        running.cancel()
        await server.stop(0)


@asynccontextmanager
async def asking(served: Served) -> AsyncIterator[scaling_pb2_grpc.ScalingServiceStub]:
    async with open_channel(served.address) as channel:
        yield scaling_pb2_grpc.ScalingServiceStub(channel)
