"""A client that sends any bytes to an HTTP listener and reads what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from tests.frontend_svc.fakes import WAIT_S
from triptych_kit.addresses import split_address


@dataclass
class RawReply:
    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.content)["error"]
        return error


class RawConnection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, content: bytes) -> None:
        self.writer.write(content)
        # The other end may refuse a request before it is sent.
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()

    async def reply(self) -> RawReply | None:
        """The next answer; None at the end of the connection."""
        async with asyncio.timeout(WAIT_S):
            try:
                head = await self.reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                return None
            first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
            headers = {
                name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
            }
            status = int(first.split()[1])
            if status < 200:
                return RawReply(status, headers, b"")
            return RawReply(status, headers, await self._body(headers))

    async def _body(self, headers: dict[str, str]) -> bytes:
        if "content-length" in headers:
            return await self.reader.readexactly(int(headers["content-length"]))
        content = b""
        while size := int(await self.reader.readline(), 16):
            content += await self.reader.readexactly(size)
            await self.reader.readline()
        await self.reader.readline()
        return content

    async def is_closed(self) -> bool:
        """Wait until the other end closes; False if it sends something instead."""
        async with asyncio.timeout(WAIT_S):
            try:
                return not await self.reader.read(1)
            except ConnectionError:
                return True


@contextlib.asynccontextmanager
async def connected(
    address: str, *, limit: int = 2**26, source: str = ""
) -> AsyncGenerator[RawConnection, None]:
    """source: the address to connect from."""
    host, port = split_address(address)
    local = (source, 0) if source else None
    reader, writer = await asyncio.open_connection(host, port, limit=limit, local_addr=local)
    try:
        yield RawConnection(reader, writer)
    finally:
        writer.transport.abort()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what nothing announces."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def post(body: bytes, *headers: str, path: str = "/v1/completions") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", *headers]
    if not any(line.lower().startswith(("content-length:", "transfer-encoding:")) for line in headers):
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


async def exchange(address: str, content: bytes) -> RawReply | None:
    """The final answer to `content` on a connection of its own; None if it is closed without one."""
    async with connected(address) as connection:
        await connection.send(content)
        reply = await connection.reply()
        while reply is not None and reply.status < 200:
            reply = await connection.reply()
        return reply
