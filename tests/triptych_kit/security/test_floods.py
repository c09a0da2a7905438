"""Calls that are reset before they are served take a limited memory, and others are served."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from triptych_kit import limits
from triptych_kit.addresses import split_address
from triptych_kit.channel import open_channel
from triptych_kit.server import ADMIN, Server

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADERS, _RESET, _SETTINGS = 1, 3, 4
_CALL = {
    ":method": "POST",
    ":scheme": "http",
    ":path": "/grpc.health.v1.Health/Check",
    ":authority": "localhost",
    "content-type": "application/grpc",
    "te": "trailers",
}


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _resets(first: int, count: int) -> bytes:
    """Calls that are reset at once."""
    block = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in _CALL.items()
    )
    return b"".join(
        _frame(_HEADERS, 4, stream, block) + _frame(_RESET, 0, stream, struct.pack(">I", 8))
        for stream in range(first, first + 2 * count, 2)
    )


@pytest.mark.parametrize("sent", [b"", _PREFACE[:8], _PREFACE])
async def test_a_connection_that_does_not_begin_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "_HANDSHAKE_MS", 300)
    server = Server(listen="127.0.0.1:0", registrations=[], profile=ADMIN, service="x")
    reader, writer = await asyncio.open_connection(*split_address(await server.start()))
    writer.write(sent)
    try:
        async with asyncio.timeout(30):
            while await reader.read(4096):
                pass
    finally:
        writer.close()
        await server.stop(0)


def _rss_mb() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) // 1024


async def test_resets_of_a_connection_take_a_limited_memory():
    server = Server(listen="127.0.0.1:0", registrations=[], profile=ADMIN, service="x")
    address = await server.start()
    before_mb = _rss_mb()
    _, writer = await asyncio.open_connection(*split_address(address))
    writer.write(_PREFACE + _frame(_SETTINGS, 0, 0))
    try:
        for first in range(1, 80_001, 200):
            writer.write(_resets(first, 100))
            await writer.drain()
        async with open_channel(address) as channel:
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            answer = await check(health_pb2.HealthCheckRequest(), timeout=30)
    finally:
        writer.close()
        await server.stop(0)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert _rss_mb() - before_mb < 100
