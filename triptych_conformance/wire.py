"""The TCP side of an engine that the kit plays: connections that can be cut, and a process that hangs."""

from __future__ import annotations

import asyncio

from triptych_kit.addresses import join_address, split_address

_CHUNK_BYTES = 65_536


def close_soon(server: asyncio.Server) -> None:
    """Take no more connections, and close the server when those just taken have a transport.

    A closed server of asyncio loses a connection without one, and leaves its socket open.
    """
    loop = server.get_loop()
    for listener in server.sockets:
        loop.remove_reader(listener.fileno())
    loop.call_soon(server.close)


class Wire:
    """Passes connections to `listen` on to `target`, both host:port, until they are cut."""

    def __init__(self, listen: str, target: str) -> None:
        self._listen = listen
        self._target = target
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        host, port = split_address(self._listen)
        self._is_refusing = False
        self._server = await asyncio.start_server(self._take, host, port)
        self._listen = join_address(host, self._server.sockets[0].getsockname()[1])
        return self._listen

    def cut(self) -> None:
        """Break every connection, with a reset on both sides."""
        for connection in self._connections:
            connection.cancel()

    def refuse(self) -> None:
        """Break every connection and refuse others until `start`, as the host of a dead process does."""
        self._is_refusing = True
        close_soon(self._server)
        self.cut()

    def freeze(self) -> None:
        """Take connections and let nothing through, as a process does that is stopped."""
        self._is_open.clear()

    def thaw(self) -> None:
        self._is_open.set()

    async def stop(self) -> None:
        self.refuse()
        await asyncio.sleep(0)
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_refusing:
            # It was taken just before.
            writer.transport.abort()
            return
        task = asyncio.ensure_future(self._connect(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        # Not in the task: it may be cancelled before it begins.
        task.add_done_callback(lambda _: writer.transport.abort())

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_connection(*split_address(self._target))
        except OSError:
            return
        pumps = [
            asyncio.create_task(self._pump(reader, inner_writer, is_up=True)),
            asyncio.create_task(self._pump(inner_reader, writer, is_up=False)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            inner_writer.transport.abort()
            await asyncio.gather(*pumps, return_exceptions=True)

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
