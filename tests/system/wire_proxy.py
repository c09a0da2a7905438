"""A TCP proxy that breaks connections after so many bytes, or lets nothing through for a while."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

_CHUNK_BYTES = 65_536


class WireProxy:
    """Between a client and `target`, host:port. `next_cut` says after how many bytes down each breaks.

    While `gate` is closed, connections are taken and nothing passes, as with a process that is stopped.
    """

    def __init__(self, target: str, *, next_cut: Callable[[], int | None] = lambda: None) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_connections = 0
        self.num_cuts = 0  # by `cut_after`
        self.address = ""
        self._num_bytes_left: dict[bool, int | None] = {True: None, False: None}  # until such a cut, by is_up
        self._target = target
        self._next_cut = next_cut
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def num_open(self) -> int:
        return len(self._connections)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def refuse(self) -> None:
        """Listen no more: connections from now on are refused."""
        assert self._server is not None, "the proxy is started first"
        self._server.close()

    def cut(self) -> None:
        """Break every connection, with a reset on both sides."""
        for connection in self._connections:
            connection.cancel()

    def cut_after(self, num_bytes: int | None, *, is_up: bool) -> None:
        """Break the connection when more bytes than these are sent to the target or from it; None: do not."""
        self._num_bytes_left[is_up] = num_bytes

    async def stop(self) -> None:
        self.refuse()
        self.cut()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a connection has a task"
        self._connections.add(task)
        self.num_connections += 1
        writers = [writer]
        try:
            host, _, port = self._target.rpartition(":")
            engine_reader, engine_writer = await asyncio.open_connection(host, int(port))
            writers.append(engine_writer)
            pumps = [
                asyncio.ensure_future(self._pump(reader, engine_writer, None, is_up=True)),
                asyncio.ensure_future(self._pump(engine_reader, writer, self._next_cut(), is_up=False)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except asyncio.CancelledError:
            pass
        finally:
            for each in writers:
                each.transport.abort()
            self._connections.discard(task)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        num_bytes_left: int | None,
        *,
        is_up: bool,
    ) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            await self.gate.wait()
            if (limit := self._num_bytes_left[is_up]) is not None:
                if len(data) > limit:
                    writer.write(data[:limit])
                    self._num_bytes_left[is_up] = None
                    self.num_cuts += 1
                    return
                self._num_bytes_left[is_up] = limit - len(data)
            if num_bytes_left is not None and len(data) >= num_bytes_left:
                writer.write(data[:num_bytes_left])
                return
            if num_bytes_left is not None:
                num_bytes_left -= len(data)
            writer.write(data)
            await writer.drain()


@contextlib.asynccontextmanager
async def proxied(
    target: str, *, next_cut: Callable[[], int | None] = lambda: None
) -> AsyncIterator[WireProxy]:
    """A proxy in front of `target`, ended with the block."""
    proxy = WireProxy(target, next_cut=next_cut)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
