"""A client that opens a WebSocket and sends any frames."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

from tests.frontend_svc.fakes import WAIT_S
from tests.frontend_svc.protocols.raw_http import RawConnection, connected

KEY = "dGhlIHNhbXBsZSBub25jZQ=="  # of RFC 6455, section 1.3, with what is accepted for it
ACCEPTED = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
TEXT, CLOSE, PING, PONG = 0x1, 0x8, 0x9, 0xA
MASK = b"\x11\x22\x33\x44"


def upgrade(path: str = "/v1/realtime", *headers: str, version: str = "13", key: str = KEY) -> bytes:
    lines = [
        f"GET {path} HTTP/1.1", "host: 127.0.0.1", "connection: Upgrade", "upgrade: websocket",
        f"sec-websocket-version: {version}", f"sec-websocket-key: {key}", *headers,
    ]  # fmt: skip
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def frame(
    content: bytes, opcode: int = TEXT, *, is_last: bool = True, is_masked: bool = True, reserved: int = 0
) -> bytes:
    size, mask = len(content), 0x80 if is_masked else 0
    if size < 126:
        sizes = bytes((mask | size,))
    elif size < 1 << 16:
        sizes = bytes((mask | 126,)) + size.to_bytes(2, "big")
    else:
        sizes = bytes((mask | 127,)) + size.to_bytes(8, "big")
    head = bytes(((0x80 if is_last else 0) | reserved | opcode,)) + sizes
    if not is_masked:
        return head + content
    masks = (MASK * (size // 4 + 1))[:size]
    return head + MASK + (int.from_bytes(content) ^ int.from_bytes(masks)).to_bytes(size)


class WebSocketClient:
    def __init__(self, connection: RawConnection) -> None:
        self.connection = connection

    async def send(self, event: object) -> None:
        content = event if isinstance(event, bytes) else json.dumps(event).encode()
        await self.connection.send(frame(content))

    async def frame(self) -> tuple[int, bytes]:
        """The next frame of the server: opcode and content."""
        reader = self.connection.reader
        async with asyncio.timeout(WAIT_S):
            first, size = await reader.readexactly(2)
            assert first & 0xF0 == 0x80, "one whole frame, without extensions"
            assert size < 128, "frames of a server are not masked"
            if size > 125:
                size = int.from_bytes(await reader.readexactly(2 if size == 126 else 8), "big")
            return first & 0x0F, await reader.readexactly(size)

    async def event(self) -> dict[str, Any]:
        opcode, content = await self.frame()
        assert opcode == TEXT, (opcode, content)
        event: dict[str, Any] = json.loads(content)
        return event

    async def until(self, kind: str) -> list[dict[str, Any]]:
        """The events up to the first of this type."""
        events = [await self.event()]
        while events[-1]["type"] != kind:
            events.append(await self.event())
        return events

    async def close_code(self) -> int:
        """That of the server's close, which is the next frame."""
        opcode, content = await self.frame()
        assert opcode == CLOSE, (opcode, content)
        return int.from_bytes(content[:2], "big")


@contextlib.asynccontextmanager
async def opened(
    address: str, path: str = "/v1/realtime", *headers: str
) -> AsyncGenerator[WebSocketClient, None]:
    async with connected(address) as connection:
        await connection.send(upgrade(path, *headers))
        reply = await connection.reply()
        assert reply is not None
        assert (reply.status, reply.headers["sec-websocket-accept"]) == (101, ACCEPTED)
        yield WebSocketClient(connection)
