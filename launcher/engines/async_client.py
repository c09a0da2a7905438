"""asyncio client of engines in other processes: a task per engine reads its stream into one bounded queue."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence

import grpc.aio

from frontend_svc.engines.connection.client import SCHEMA_REVISION
from frontend_svc.engines.connection.columns import MalformedStep, read_step
from frontend_svc.engines.connection.stream import EngineStream, StreamLost
from launcher.engines.core_client import CoreOutput, EngineDead, no_rows
from service_kit.channel import open_channel
from service_kit.clock import Clock, MonotonicClock
from service_kit.errors import from_status
from triptych.engine.v1 import add_pb2, engine_pb2, engine_pb2_grpc, session_pb2

_MAX_UNREAD = 4096
_GOODBYE_S = 1.0


class AsyncEngineClient:
    """Sends requests to one or several engines and returns raw outputs. Handles are unique over all engines.

    If one engine is lost, the client is dead: waiting and later calls raise EngineDead.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        connect: Callable[[str], grpc.aio.Channel] = open_channel,
        clock: Clock | None = None,
        max_unread: int = _MAX_UNREAD,
    ) -> None:
        self._links = [_EngineLink(address, connect, clock or MonotonicClock()) for address in addresses]
        self._max_unread = max_unread
        self._owners: dict[
            int, _EngineLink
        ] = {}  # by handle, of requests whose last output has not been read
        self._handles = itertools.count(1)
        self._unread: deque[CoreOutput] = deque()
        self._changed = asyncio.Event()
        self._cause_of_death = ""
        self._readers: list[asyncio.Task[None]] = []

    @property
    def num_in_flight(self) -> int:
        """The number of requests whose last output has not been read."""
        return len(self._owners)

    async def start(self, *, timeout_s: float = 600.0) -> None:
        """Connect to every engine and wait until all are ready. Raises EngineDead or TimeoutError."""
        for link in self._links:
            reader = asyncio.ensure_future(self._read(link))
            reader.add_done_callback(self._look_at_end)
            self._readers.append(reader)
        async with asyncio.timeout(timeout_s):
            while not all(link.is_ready for link in self._links):
                await self._wait()
                self._ensure_alive()

    def add(self, entry: add_pb2.AddEntry) -> int:
        """Send a request to the engine that runs the fewest; returns its handle."""
        self._ensure_alive()
        link = min(self._links, key=lambda link: link.num_running)
        entry.handle = next(self._handles)
        self._owners[entry.handle] = link
        link.num_running += 1
        link.send(engine_pb2.ConnectRequest(add=add_pb2.Add(entries=[entry])))
        return entry.handle

    def abort(self, handles: Iterable[int], reason: engine_pb2.AbortReason) -> None:
        """Abort requests: one message to each engine that has some of them."""
        self._ensure_alive()
        owned: defaultdict[_EngineLink, list[int]] = defaultdict(list)
        for handle in handles:
            if handle in self._owners:
                owned[self._owners[handle]].append(handle)
        for link, its_handles in owned.items():
            link.send(engine_pb2.ConnectRequest(abort=engine_pb2.Abort(handles=its_handles, reason=reason)))

    async def get_output(self) -> CoreOutput:
        """The next outputs. Any number of tasks may wait; a fatal error is raised in all of them."""
        while not self._unread:
            self._ensure_alive()
            await self._wait()
        output = self._unread.popleft()
        # Removed when it is read, not when it arrives: `num_unfinished` must count unread outputs.
        for handle in _ended(output):
            self._owners.pop(handle, None)
        return output

    def mark_dead(self, why: str) -> None:
        """Make waiting and later calls raise EngineDead, e.g. because the engine's process has ended."""
        self._die(why)

    async def close(self) -> None:
        """Close every session, and end waiting calls."""
        self._die("closed")
        for link in self._links:
            link.say_goodbye()
        if self._readers:
            await asyncio.wait(self._readers, timeout=_GOODBYE_S)
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def _read(self, link: _EngineLink) -> None:
        try:
            await link.run(lambda message: self._take(link, message))
        except (StreamLost, MalformedStep) as error:
            self._die(f"{link.address}: {error}")

    async def _take(self, link: _EngineLink, message: engine_pb2.ConnectResponse) -> None:
        match message.WhichOneof("message"):
            case "ready":
                link.is_ready = True
                self._wake()
            case "step":
                self._put(link, CoreOutput(read_step(message.step)))
            case "add_rejected":
                rejected = message.add_rejected
                status = rejected.status
                error = from_status(
                    status.code, status.message, status.details, rejected.retry_after_ms or None
                )
                self._put(link, CoreOutput(no_rows(), {rejected.handle: error}))
            case "dead":
                raise StreamLost(f"the engine failed: {message.dead.reason}")

    def _put(self, link: _EngineLink, output: CoreOutput) -> None:
        link.num_running -= sum(handle in self._owners for handle in _ended(output))
        if len(self._unread) >= self._max_unread:
            raise StreamLost(f"{len(self._unread)} outputs are unread, the limit is {self._max_unread}")
        self._unread.append(output)
        self._wake()

    def _look_at_end(self, reader: asyncio.Task[None]) -> None:
        error = None if reader.cancelled() else reader.exception()
        if error is not None:
            # An internal bug; no caller may wait for ever because of it.
            self._die(f"internal error ({type(error).__name__}: {error})")

    def _die(self, why: str) -> None:
        # The first cause is reported.
        self._cause_of_death = self._cause_of_death or why
        self._wake()

    async def _wait(self) -> None:
        await self._changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _ensure_alive(self) -> None:
        if self._cause_of_death:
            raise EngineDead(self._cause_of_death)


class _EngineLink:
    """One engine's stream, and how many requests it runs."""

    def __init__(self, address: str, connect: Callable[[str], grpc.aio.Channel], clock: Clock) -> None:
        self.address = address
        self.num_running = 0  # requests whose last output has not arrived
        self.is_ready = False
        self._connect = connect
        self._clock = clock
        self._stream: EngineStream | None = None

    async def run(self, on_message: Callable[[engine_pb2.ConnectResponse], Awaitable[None]]) -> None:
        """Pass on every message of one session; ends with StreamLost."""
        async with self._connect(self.address) as channel:
            stream = EngineStream(engine_pb2_grpc.EngineCoreServiceStub(channel), self._clock)
            await stream.open(_hello())
            self._stream = stream
            await stream.receive(on_message)

    def send(self, message: engine_pb2.ConnectRequest) -> None:
        assert self._stream is not None, "requests go to engines that are ready"
        self._stream.send(message)

    def say_goodbye(self) -> None:
        if self._stream is not None:
            self._stream.close(engine_pb2.Goodbye(reason="the client closes"))


def _ended(output: CoreOutput) -> list[int]:
    """Handles of the requests that have ended."""
    return [*(output.columns.handles[row] for row in output.columns.endings), *output.rejected]


def _hello() -> session_pb2.Hello:
    return session_pb2.Hello(
        frontend_id=f"core-client-{secrets.token_hex(4)}",
        session_id=secrets.token_hex(16),
        frontend_epoch=secrets.randbits(63) + 1,
        schema_revision=SCHEMA_REVISION,
        min_peer_revision=SCHEMA_REVISION,
        role=session_pb2.PEER_ROLE_FRONTEND,
    )
