"""The coordinator's own servicer, between streams in virtual time. Counts what it hears and what it tells."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from benchmarks.cluster_sim_time import Agenda
from coordinator_svc.membership.registry import EngineRegistry
from coordinator_svc.membership.servicer import CoordinatorServicer
from coordinator_svc.membership.topology import Topology
from service_kit.errors import ServiceError
from triptych.coordinator.v1 import coordinator_pb2

LEASE_S = 3.0

Message = TypeVar("Message")


class Inbox(Generic[Message]):
    """The requests of one stream, as a servicer reads them: bytes are parsed as they are read."""

    def __init__(self, parse: Callable[[bytes], Message]) -> None:
        self._parse = parse
        self._messages: deque[bytes | Message] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_over = False

    def put(self, message: bytes | Message) -> None:
        """A message arrives."""
        self._messages.append(message)
        self._wake()

    def end(self) -> None:
        """The stream ends."""
        self._is_over = True
        self._wake()

    def __aiter__(self) -> Inbox[Message]:
        """Itself."""
        return self

    async def __anext__(self) -> Message:
        """The next message."""
        while not self._messages:
            if self._is_over:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        message = self._messages.popleft()
        return self._parse(message) if isinstance(message, bytes) else message

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Context:
    """What a servicer writes to. The write of a message is over at once."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send

    async def write(self, message: Any) -> None:
        """Send a message."""
        self._send(message)


class SimulatedCoordinator:
    """One life of a coordinator: the real servicer, topology, registry and publishers.

    With `on_wire` messages are parsed and serialized as gRPC would do it, and their bytes are counted.
    """

    def __init__(self, agenda: Agenda, *, epoch: int, on_wire: bool) -> None:
        self.num_published = 0
        self.published_bytes = 0
        self.num_loads = 0
        self.num_reports = 0
        self.reported_bytes = 0
        self._on_wire = on_wire
        self.topology = Topology(EngineRegistry(agenda, lease_s=LEASE_S), coordinator_epoch=epoch)
        self._servicer = CoordinatorServicer(self.topology, agenda, lease_s=LEASE_S)
        self._tasks: set[asyncio.Task[None]] = set()
        self._start(self._servicer.expire_leases())
        self._start(self._servicer.step_groups())

    def engine_session(
        self, send: Callable[[coordinator_pb2.EngineSessionResponse], None]
    ) -> Inbox[coordinator_pb2.EngineSessionRequest]:
        """Open an engine's stream; what is put into the inbox arrives at once."""
        inbox = Inbox(coordinator_pb2.EngineSessionRequest.FromString)
        self._start(self._servicer.EngineSession(inbox, Context(send)))
        return inbox

    def frontend_session(
        self, send: Callable[[coordinator_pb2.FrontendSessionResponse], None]
    ) -> Inbox[coordinator_pb2.FrontendSessionRequest]:
        """Open a frontend's stream."""
        inbox = Inbox(coordinator_pb2.FrontendSessionRequest.FromString)
        self._start(
            self._servicer.FrontendSession(inbox, Context(lambda message: self._publish(message, send)))
        )
        return inbox

    def note_report(self, data: bytes) -> None:
        """Count a report that was put into an inbox."""
        self.num_reports += 1
        self.reported_bytes += len(data)

    def stop(self) -> None:
        """It is gone, and all of its streams with it."""
        for task in list(self._tasks):
            task.cancel()

    async def close(self) -> None:
        """Stop, and wait until nothing of it runs."""
        self.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _publish(
        self,
        message: coordinator_pb2.FrontendSessionResponse,
        send: Callable[[coordinator_pb2.FrontendSessionResponse], None],
    ) -> None:
        self.num_published += 1
        self.num_loads += len(message.delta.loads)
        if self._on_wire:
            self.published_bytes += len(message.SerializeToString())
        send(message)

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(_ended_well(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _ended_well(work: Any) -> None:
    try:
        await work
    except ServiceError:
        # Its interceptor tells the other side, which here knows already why it was refused.
        return
