"""WebSockets (RFC 6455) with limits: texts alone, without extensions. Knows no route.

A request for one is a request of HTTP until it is answered with 101, so that all that is checked of a request
is checked of it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import IntEnum

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from triptych_kit.errors import InvalidArgument

# Where the listener puts the function that returns the WebSocket of a request that was answered with 101.
UPGRADED = "triptych.websocket"
SWITCHING_PROTOCOLS = 101
PROTOCOLS = "sec-websocket-protocol"
_VERSION = "13"
# RFC 6455, section 1.3.
_ACCEPT_SUFFIX = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_KEY_BYTES = 16
_MAX_CONTROL_BYTES = 125
_SIZE_BYTES = {126: 2, 127: 8}
_MASK_BYTES = 4


class CloseCode(IntEnum):
    """Of RFC 6455, section 7.4.1."""

    NORMAL = 1000
    GOING_AWAY = 1001
    PROTOCOL_ERROR = 1002
    UNSUPPORTED_DATA = 1003
    NO_STATUS = 1005
    ABNORMAL = 1006
    INVALID_TEXT = 1007
    POLICY = 1008
    TOO_LARGE = 1009
    INTERNAL = 1011


class _Opcode(IntEnum):
    CONTINUATION = 0x0
    TEXT = 0x1
    BINARY = 0x2
    CLOSE = 0x8
    PING = 0x9
    PONG = 0xA


_SERVED_OPCODES = frozenset(_Opcode)
# That a peer may send, in place of those that only say why there was no close: registered ones, and those of
# libraries and applications.
_SENT_CODES = frozenset((*range(1000, 1004), *range(1007, 1015), *range(3000, 5000)))


@dataclass(frozen=True, slots=True)
class WebSocketLimits:
    max_message_bytes: int = 1024 * 1024
    max_fragments: int = 1024  # of a message
    max_unread_bytes: int = 64 * 1024  # received and not read: beyond them the client waits
    close_s: float = 2.0  # for the client to answer a close


class WebSocketClosed(Exception):
    """The WebSocket has ended; either side may have ended it."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code} {reason}")
        self.code, self.reason = code, reason


@dataclass(frozen=True, slots=True)
class _Frame:
    opcode: int
    content: bytes
    is_last: bool


def upgrade_headers(request: Request, protocol: str) -> dict[str, str]:
    """Headers of the answer to a request for a WebSocket. Raises InvalidArgument for one that is none.

    protocol: of those that the client names, the one that is served.
    """
    headers = request.headers
    if not _asks_for_websocket(request):
        raise InvalidArgument(
            f"{request.url.path} is served by WebSockets alone: send a GET of HTTP/1.1 with "
            "connection: upgrade and upgrade: websocket",
            field="upgrade",
            reason="UPGRADE_REQUIRED",
        )
    version, key = headers.get("sec-websocket-version", ""), headers.get("sec-websocket-key", "")
    if version != _VERSION:
        field = "sec-websocket-version"
        raise InvalidArgument(
            f"{field} is {version!r:.20}, must be {_VERSION}", field=field, reason="UPGRADE_REQUIRED"
        )
    try:
        is_key = len(base64.b64decode(key, validate=True)) == _KEY_BYTES
    except binascii.Error:
        is_key = False
    if not is_key:
        field = "sec-websocket-key"
        raise InvalidArgument(f"{field} is not {_KEY_BYTES} bytes in base64", field=field)
    accepted = base64.b64encode(hashlib.sha1(key.encode() + _ACCEPT_SUFFIX, usedforsecurity=False).digest())
    return {
        "upgrade": "websocket",
        "connection": "upgrade",
        "sec-websocket-accept": accepted.decode(),
        # Browsers close a WebSocket whose answer names none of their protocols.
        **({PROTOCOLS: protocol} if protocol in values_of(headers, PROTOCOLS) else {}),
    }


def values_of(headers: Headers, name: str) -> list[str]:
    """The values of a header that is a list, which may have several lines."""
    return [value.strip() for line in headers.getlist(name) for value in line.split(",")]


def _asks_for_websocket(request: Request) -> bool:
    scope, headers = request.scope, request.headers
    tokens = {
        name: {value.lower() for value in values_of(headers, name)} for name in ("connection", "upgrade")
    }
    return (
        UPGRADED in scope["extensions"]
        and (scope["method"], scope["http_version"]) == ("GET", "1.1")
        and "upgrade" in tokens["connection"]
        and "websocket" in tokens["upgrade"]
        # Its bytes would be read as frames.
        and headers.get("content-length", "0") == "0"
        and "transfer-encoding" not in headers
    )


class WebSocketResponse(Response):
    """The answer 101, and `serve` with the WebSocket until it ends."""

    def __init__(self, headers: dict[str, str], serve: Callable[[WebSocket], Awaitable[None]]) -> None:
        super().__init__(status_code=SWITCHING_PROTOCOLS, headers=headers)
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        websocket: WebSocket = scope["extensions"][UPGRADED]()
        try:
            await self._serve(websocket)
        finally:
            await websocket.close(CloseCode.INTERNAL, "the service has failed")


class WebSocket:
    """Texts in both directions.

    `feed`, `pause_writing`, `resume_writing`, `leave` and `lose` are called by the connection.
    """

    def __init__(self, transport: asyncio.Transport, limits: WebSocketLimits) -> None:
        self._transport, self._limits = transport, limits
        self._frames = _FrameReader(limits.max_message_bytes)
        self._parts: list[bytes] = []  # of the message that is being received
        self._num_bytes = 0  # of these
        self._arrived, self._writable = asyncio.Event(), asyncio.Event()
        self._writable.set()
        self._is_paused = self._is_lost = self._is_leaving = False
        self._closed: WebSocketClosed | None = None

    def feed(self, data: bytes) -> None:
        self._frames.add(data)
        self._arrived.set()
        if not self._is_paused and self._frames.num_bytes > self._limits.max_unread_bytes:
            self._is_paused = True
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def leave(self) -> None:
        """End it because the service ends: `receive` closes it."""
        self._is_leaving = True
        self._arrived.set()

    def lose(self) -> None:
        """Note that the connection has ended."""
        self._is_lost = True
        self._arrived.set()
        self._writable.set()

    async def receive(self) -> str:
        """The next text. Raises WebSocketClosed at the end, and after closing it for a refused frame."""
        while True:
            if self._closed is not None:
                raise self._closed
            frame = await self._next_frame()
            if frame.opcode is _Opcode.PING:
                await self._write(_Opcode.PONG, frame.content)
            elif frame.opcode is _Opcode.CLOSE:
                raise await self._closed_by_client(frame.content)
            elif frame.opcode is not _Opcode.PONG:
                if (text := await self._add(frame)) is not None:
                    return text
                continue
            # A flood of these keeps nothing else waiting.
            await asyncio.sleep(0)

    async def send(self, text: str) -> None:
        """Send a text once the client has read all before it. Raises WebSocketClosed."""
        await self._write(_Opcode.TEXT, text.encode())

    async def ping(self) -> None:
        """Send something that a client answers by itself. Raises WebSocketClosed."""
        await self._write(_Opcode.PING, b"")

    async def close(self, code: int, reason: str) -> None:
        """Close it, and the connection once the client has answered. Without effect on one that is closed."""
        if self._closed is None:
            with contextlib.suppress(TimeoutError, WebSocketClosed):
                async with asyncio.timeout(self._limits.close_s):
                    await self._write(_Opcode.CLOSE, _close_content(code, reason))
                    self._closed = WebSocketClosed(code, reason)
                    # A connection that is closed with unread data is reset, and the client may lose the end.
                    while (await self._next_frame()).opcode is not _Opcode.CLOSE:
                        pass
            self._closed = self._closed or WebSocketClosed(code, reason)
        self._transport.close()

    async def _next_frame(self) -> _Frame:
        while True:
            if self._is_lost:
                self._closed = self._closed or WebSocketClosed(CloseCode.ABNORMAL, "the connection is lost")
                raise self._closed
            if self._is_leaving and self._closed is None:
                raise await self._failure(CloseCode.GOING_AWAY, "the service is shutting down")
            try:
                frame = self._frames.next(self._num_bytes)
            except _BrokenFrame as error:
                if self._closed is not None:
                    raise self._closed from error
                raise await self._failure(error.code, str(error)) from error
            if frame is None or self._frames.num_bytes <= self._limits.max_unread_bytes:
                self._read_on()
            if frame is not None:
                return frame
            self._arrived.clear()
            await self._arrived.wait()

    def _read_on(self) -> None:
        if self._is_paused and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    async def _add(self, frame: _Frame) -> str | None:
        """Add a part of a message. The text of a whole one."""
        if frame.opcode is _Opcode.BINARY:
            raise await self._failure(CloseCode.UNSUPPORTED_DATA, "a message is no text")
        if (frame.opcode is _Opcode.CONTINUATION) != bool(self._parts):
            raise await self._failure(CloseCode.PROTOCOL_ERROR, "a frame is not the next one of its message")
        self._parts.append(frame.content)
        self._num_bytes += len(frame.content)
        if len(self._parts) > self._limits.max_fragments:
            text = f"a message has more than {self._limits.max_fragments} frames"
            raise await self._failure(CloseCode.POLICY, text)
        if not frame.is_last:
            return None
        content = b"".join(self._parts)
        self._parts, self._num_bytes = [], 0
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise await self._failure(CloseCode.INVALID_TEXT, "a text is not UTF-8") from error

    async def _closed_by_client(self, content: bytes) -> WebSocketClosed:
        try:
            closed, answer = _read_close(content), content[:2]
        except _BrokenFrame as error:
            closed, answer = WebSocketClosed(error.code, str(error)), _close_content(error.code, str(error))
        with contextlib.suppress(WebSocketClosed):
            await self._write(_Opcode.CLOSE, answer)
        self._closed = closed
        return closed

    async def _failure(self, code: CloseCode, reason: str) -> WebSocketClosed:
        await self.close(code, reason)
        return WebSocketClosed(code, reason)

    async def _write(self, opcode: _Opcode, content: bytes) -> None:
        await self._writable.wait()
        if self._closed is not None:
            raise self._closed
        if self._is_lost:
            raise WebSocketClosed(CloseCode.ABNORMAL, "the connection is lost")
        self._transport.write(_head_of(opcode, len(content)) + content)


class _BrokenFrame(Exception):
    def __init__(self, code: CloseCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class _FrameReader:
    """Frames of a client. Raises _BrokenFrame for one that it must not send."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._received = bytearray()

    @property
    def num_bytes(self) -> int:
        return len(self._received)

    def add(self, data: bytes) -> None:
        self._received += data

    def next(self, num_bytes: int) -> _Frame | None:
        """The next frame that is whole. num_bytes: of the message that it may continue."""
        received = self._received
        if len(received) < 2:
            return None
        opcode, is_last = received[0] & 0x0F, bool(received[0] & 0x80)
        size, begin = received[1] & 0x7F, 2
        if received[0] & 0x70 or opcode not in _SERVED_OPCODES:
            raise _BrokenFrame(CloseCode.PROTOCOL_ERROR, f"a frame begins with {received[0]:#04x}")
        if not received[1] & 0x80:
            raise _BrokenFrame(CloseCode.PROTOCOL_ERROR, "a frame of a client is not masked")
        if opcode >= _Opcode.CLOSE:
            if size > _MAX_CONTROL_BYTES or not is_last:
                raise _BrokenFrame(CloseCode.PROTOCOL_ERROR, "a frame of control is too long or not whole")
        elif size in _SIZE_BYTES:
            begin += _SIZE_BYTES[size]
            if len(received) < begin:
                return None
            size = int.from_bytes(received[2:begin], "big")
        if opcode < _Opcode.CLOSE and num_bytes + size > self._max_message_bytes:
            raise _BrokenFrame(
                CloseCode.TOO_LARGE, f"a message has more than {self._max_message_bytes} bytes"
            )
        end = begin + _MASK_BYTES + size
        if len(received) < end:
            return None
        mask, masked = received[begin : begin + _MASK_BYTES], received[begin + _MASK_BYTES : end]
        del received[:end]
        return _Frame(_Opcode(opcode), _unmasked(masked, mask), is_last)


def _close_content(code: int, reason: str) -> bytes:
    """The content of a close, with as much of the reason as a frame of control may have."""
    room = _MAX_CONTROL_BYTES - 2
    return code.to_bytes(2, "big") + reason.encode()[:room].decode(errors="ignore").encode()


def _read_close(content: bytes) -> WebSocketClosed:
    """Code and reason of a client's close. Raises _BrokenFrame."""
    if not content:
        return WebSocketClosed(CloseCode.NO_STATUS, "")
    code = int.from_bytes(content[:2], "big")
    if len(content) < 2 or code not in _SENT_CODES:
        raise _BrokenFrame(CloseCode.PROTOCOL_ERROR, "a close has no code that may be sent")
    try:
        return WebSocketClosed(code, content[2:].decode())
    except UnicodeDecodeError as error:
        raise _BrokenFrame(CloseCode.INVALID_TEXT, "the reason of a close is not UTF-8") from error


def _unmasked(masked: bytes | bytearray, mask: bytes | bytearray) -> bytes:
    size = len(masked)
    repeated = (bytes(mask) * (size // _MASK_BYTES + 1))[:size]
    # Numbers of this length are the fastest way to combine all bytes.
    return (int.from_bytes(masked, "big") ^ int.from_bytes(repeated, "big")).to_bytes(size, "big")


def _head_of(opcode: _Opcode, size: int) -> bytes:
    first = bytes((0x80 | opcode,))
    if size <= _MAX_CONTROL_BYTES:
        return first + bytes((size,))
    marker = 126 if size < 1 << 16 else 127
    return first + bytes((marker,)) + size.to_bytes(_SIZE_BYTES[marker], "big")
