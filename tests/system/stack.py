"""The services as processes on loopback, started as an image starts them, and what their ports answer."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from types import TracebackType

import grpc

from triptych.api.v1 import inference_pb2_grpc
from triptych.coordinator.v1 import coordinator_pb2, coordinator_pb2_grpc
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc, session_pb2
from triptych_cli.serve.readiness import await_ready
from triptych_kit.channel import open_channel
from triptych_kit.process.child import Child, Output

START_LIMIT_S = 120.0
WAIT_LIMIT_S = 60.0


class Stack:
    """A set of service processes that end with the test, however it ends."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            # Only the test sends requests, and it knows when it stops a frontend.
            "TRIPTYCH_FRONTEND_DRAIN_LAG_S": "0",
            "TRIPTYCH_FRONTEND_TEXT_WORKERS": "1",
            **(environment or {}),
        }
        self.children: list[Child] = []
        self._channels: list[grpc.aio.Channel] = []

    async def __aenter__(self) -> Stack:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._channels:
            await channel.close(None)
        await asyncio.gather(*(child.stop(10.0) for child in self.children))

    async def start(self, service: str, *flags: str, index: int = 0) -> Child:
        """Start a service and wait until it says where it listens; not until it is ready."""
        command = (sys.executable, "-m", "triptych_cli.cli", service, *flags, f"--index={index}")
        child = Child(f"{service}-{index}", command, self._environment, announces=True, output=Output.KEPT)
        self.children.append(child)
        await asyncio.wait_for(child.announced(), START_LIMIT_S)
        return child

    async def start_several(self, service: str, *flags: str, count: int) -> list[Child]:
        """Start a service a number of times at once, each with an index of its own."""
        return await asyncio.gather(*(self.start(service, *flags, index=index) for index in range(count)))

    async def start_all(self, model: str, *engine_flags: str, frontend_flags: tuple[str, ...] = ()) -> Trio:
        """Coordinator, one engine on `model` and one frontend; returns once the frontend can serve."""
        coordinator = await self.start("coordinator", "--port=0")
        known = f"--coordinator={address_of(coordinator)}"
        engine, frontend = await asyncio.gather(
            self.start("engine", model, "--port=0", known, *engine_flags),
            self.start("frontend", "--port=0", known, *frontend_flags),
        )
        await self.ready("frontend", frontend)
        return Trio(coordinator, engine, frontend)

    async def ready(self, service: str, child: Child) -> None:
        """Wait until the service of `child` is SERVING."""
        await asyncio.wait_for(await_ready(service, address_of(child)), START_LIMIT_S)

    def channel(self, child: Child) -> grpc.aio.Channel:
        """A channel to `child`, closed with the stack."""
        channel = open_channel(address_of(child), profile="public")
        self._channels.append(channel)
        return channel

    def inference(self, frontend: Child) -> inference_pb2_grpc.InferenceServiceStub:
        """The public API of a frontend, over a connection of its own."""
        return inference_pb2_grpc.InferenceServiceStub(self.channel(frontend))

    async def engines_known(self, coordinator: Child, num_engines: int) -> None:
        """Wait until a coordinator knows so many engines."""
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(self.channel(coordinator))
        async with asyncio.timeout(WAIT_LIMIT_S):
            while True:
                answer = await stub.GetTopology(coordinator_pb2.GetTopologyRequest(), timeout=10)
                if len(answer.topology.engines) == num_engines:
                    return
                await asyncio.sleep(0.05)

    def engine(self, engine: Child) -> EngineView:
        return EngineView(engine_pb2_grpc.EngineCoreServiceStub(self.channel(engine)))


class Trio:
    """One coordinator, one engine, one frontend."""

    def __init__(self, coordinator: Child, engine: Child, frontend: Child) -> None:
        self.coordinator = coordinator
        self.engine = engine
        self.frontend = frontend


class EngineView:
    """An engine's own counters, asked over its port."""

    def __init__(self, stub: engine_pb2_grpc.EngineCoreServiceStub) -> None:
        self._stub = stub

    async def stats(self) -> session_pb2.Stats:
        answer = await self._stub.GetLoad(engine_pb2.GetLoadRequest(), timeout=10)
        return answer.stats

    async def until(self, holds: Callable[[session_pb2.Stats], bool]) -> session_pb2.Stats:
        """Ask until `holds`; TimeoutError after the limit."""
        async with asyncio.timeout(WAIT_LIMIT_S):
            # Another process has no event to wait for; its port is asked a thousand times a second at most.
            while not holds(stats := await self.stats()):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        return stats

    async def until_idle(self) -> session_pb2.Stats:
        return await self.until(lambda stats: stats.num_running == 0 and stats.num_waiting == 0)


def address_of(child: Child) -> str:
    return listeners_of(child)[0]


def listeners_of(child: Child) -> tuple[str, str]:
    """Where a child listens, for its peers and for its administrators."""
    if child.announcement is None:
        raise RuntimeError(f"{child.name} has not announced itself")
    return child.announcement.address, child.announcement.admin_address


def cpu_seconds(pid: int) -> float:
    """User and system time a process has used so far."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
