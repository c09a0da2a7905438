"""A TCP proxy that stands between two services and cuts, holds or delays what passes. Knows no gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType

from benchmarks.rig.processes import LOOPBACK
from triptych_conformance.wire import close_soon
from triptych_kit.addresses import join_address, split_address

_CHUNK_BYTES = 65536
# On, with no time to linger: the close that follows sends RST instead of FIN.
_LINGER_NOT = struct.pack("ii", 1, 0)


class Direction(Enum):
    """Where bytes go: to the service behind the proxy, or to its client."""

    IN = "in"
    OUT = "out"


@dataclass(slots=True, eq=False)
class _Connection:
    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    pumps: list[asyncio.Task[None]] = field(default_factory=list)


class TcpProxy:
    """Forwards connections to `target`, and does to them what a test asks for.

    What is held is not lost: it passes when the hold ends, as after a partition TCP sends it again, unless
    the connection was given up meanwhile. Neither do ends of connections pass a hold.
    """

    def __init__(self, target: str) -> None:
        self.address = ""
        self.num_accepted = 0
        self.num_cut = 0
        self.num_bytes = {Direction.IN: 0, Direction.OUT: 0}
        self.num_held_bytes = {Direction.IN: 0, Direction.OUT: 0}
        self.delay_s = 0.0
        self.lead_to(target)
        self._open = {direction: asyncio.Event() for direction in Direction}
        for event in self._open.values():
            event.set()
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._serve, LOOPBACK, 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = join_address(host, port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            close_soon(self._server)
        pumps = [pump for connection in self._connections for pump in connection.pumps]
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for connection in list(self._connections):
            connection.client.transport.abort()
            connection.server.transport.abort()

    @property
    def num_open(self) -> int:
        return len(self._connections)

    def cut(self) -> int:
        """End every connection with RST to both sides; how many there were."""
        connections, self._connections = self._connections, set()
        for connection in connections:
            for writer in (connection.client, connection.server):
                _reset(writer)
        self.num_cut += len(connections)
        return len(connections)

    def lead_to(self, target: str) -> None:
        """Forward connections that come from now on to another service."""
        self._host, self._port = split_address(target)

    def hold(self, *directions: Direction) -> None:
        """Let nothing pass in these directions any more."""
        for direction in directions:
            self._open[direction].clear()

    def release(self) -> None:
        """Let everything pass again, what was held first."""
        for event in self._open.values():
            event.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        try:
            server_reader, server_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            # Nothing listens there: the client's connection is reset, too.
            _reset(writer)
            return
        connection = _Connection(writer, server_writer)
        connection.pumps = [
            asyncio.ensure_future(self._pump(reader, server_writer, Direction.IN)),
            asyncio.ensure_future(self._pump(server_reader, writer, Direction.OUT)),
        ]
        self._connections.add(connection)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(connection.pumps)
        self._connections.discard(connection)
        for each in (writer, server_writer):
            each.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                await self._pass(direction, len(data))
                writer.write(data)
                await writer.drain()
        await self._pass(direction, 0)
        with contextlib.suppress(OSError):
            writer.close()

    async def _pass(self, direction: Direction, num_bytes: int) -> None:
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if not self._open[direction].is_set():
            self.num_held_bytes[direction] += num_bytes
            await self._open[direction].wait()
        self.num_bytes[direction] += num_bytes


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
    writer.transport.abort()
