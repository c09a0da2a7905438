"""The TCP side of an engine that the kit plays: connections that can be cut, and a process that hangs."""

from __future__ import annotations

import asyncio

_CHUNK_BYTES = 65_536


class Wire:
    """Passes connections to `listen` on to `target`, both host:port, until they are cut."""

    def __init__(self, listen: str, target: str) -> None:
        self._listen = listen
        self._target = target
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        host, _, port = self._listen.rpartition(":")
        self._server = await asyncio.start_server(self._take, host, int(port))
        self._listen = f"{host}:{self._server.sockets[0].getsockname()[1]}"
        return self._listen

    def cut(self) -> None:
        """Break every connection, with a reset on both sides."""
        for connection in self._connections:
            connection.cancel()

    def refuse(self) -> None:
        """Break every connection and refuse others until `start`, as the host of a dead process does."""
        self._server.close()
        self.cut()

    def freeze(self) -> None:
        """Take connections and let nothing through, as a process does that is stopped."""
        self._is_open.clear()

    def thaw(self) -> None:
        self._is_open.set()

    async def stop(self) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._server.is_serving():
            # It was taken just before.
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None, "a connection has a task"
        self._connections.add(task)
        writers = [writer]
        try:
            host, _, port = self._target.rpartition(":")
            inner_reader, inner_writer = await asyncio.open_connection(host, int(port))
            writers.append(inner_writer)
            pumps = [
                asyncio.create_task(self._pump(reader, inner_writer, is_up=True)),
                asyncio.create_task(self._pump(inner_reader, writer, is_up=False)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except (asyncio.CancelledError, OSError):
            pass
        finally:
            for each in writers:
                each.transport.abort()
            self._connections.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_up: bool) -> None:
        """Pass on what `reader` has, to the target or from it, until this end is closed."""
        while data := await reader.read(_CHUNK_BYTES):
            await self._is_open.wait()
            if (passed := self._passed(data, writer, is_up=is_up)) != data:
                writer.write(passed)
                return
            writer.write(data)
            await writer.drain()

    def _passed(self, data: bytes, writer: asyncio.StreamWriter, *, is_up: bool) -> bytes:
        """What of `data` gets through; less than all of it breaks the connection behind that."""
        return data
