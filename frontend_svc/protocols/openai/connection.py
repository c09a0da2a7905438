"""One HTTP/1.1 connection, with limits on what a client sends and on what it leaves unread. Knows no route.

uvicorn and h11 read and write HTTP. What they leave open is limited here: the time for a request to arrive,
headers, chunks, messages that a proxy may read in another way, answers that a client does not read, and the
number of connections, which accounts and addresses share.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import json
import logging
import sys
import termios
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from frontend_svc.protocols.openai.authorization import CERTIFICATE_NAMES, HOLD_CONNECTION
from frontend_svc.protocols.openai.errors import error_body, error_headers
from frontend_svc.protocols.openai.websocket import (
    SWITCHING_PROTOCOLS,
    UPGRADED,
    WebSocket,
    WebSocketLimits,
)
from triptych_kit.errors import ServiceError, Unavailable
from triptych_kit.http.targets import in_origin_form
from triptych_kit.security.refusals import NO_REQUEST, TOO_MANY_CONNECTIONS, Refusals
from triptych_kit.security.tls import names_in_certificate
from triptych_kit.shares import SharedLimit

logger = logging.getLogger(__name__)
# uvicorn warns of every malformed request and of every upgrade that is not served.
_uvicorn_logger = logging.getLogger(f"{__name__}.uvicorn")
_uvicorn_logger.setLevel(logging.ERROR)

_MAX_HEAD_BYTES = 32 * 1024
_MAX_HEADERS = 128
# A chunk costs as much time as half a kilobyte. Number of chunks that may be smaller.
_MAX_SMALL_CHUNKS = 512
_BYTES_PER_CHUNK = 512
# h11 checks its limit between two calls, and a read of uvloop has up to 256 KiB.
_SLICE_BYTES = 16 * 1024
# Connections beyond all others, for what is always served.
_NUM_RESERVED = 64
_MIN_IDLE_S = 0.1
_MAX_TRIED = 16  # connections, to find one that can be closed for another
_RETRY_AFTER_MS = 1000
_CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    max_connections: int = 1024
    handshake_s: float = 5.0  # of TLS
    request_s: float = 19.0  # for a whole request to arrive; a new connection has no more for its first one
    idle_s: float = 75.0  # longer than the usual proxies keep a connection, so that these close it first
    slow_reader_s: float = 30.0  # for a client to read what exceeds the buffers
    linger_s: float = 5.0  # for a client to read the rest of a connection that is closed
    websocket: WebSocketLimits = field(default_factory=WebSocketLimits)


@dataclass(slots=True)
class Connections:
    """The open connections of a listener.

    Beyond `max_connections` a new one replaces one without a request, or may have a request of an account
    that has less than its share of all connections with requests, see `SharedLimit`.

    max_total: with those of accounts below their shares.  always_served: the paths that are served beyond it.
    """

    limits: ConnectionLimits
    max_total: int
    always_served: Collection[str] = ()
    refusals: Refusals = field(default_factory=Refusals)
    opened: set[LimitedConnection] = field(default_factory=set)
    num_of: Counter[str] = field(default_factory=Counter)  # open ones, by address
    with_requests: SharedLimit = field(init=False)
    # Those without a request, the one that has waited longest first.
    idle: dict[LimitedConnection, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.with_requests = SharedLimit(self.limits.max_connections)

    def sweep(self, now: float) -> None:
        """Close or abort the connections that have exceeded a time limit."""
        for connection in list(self.opened):
            connection.check_times(now)


class StrictConnection(h11.Connection):
    """Refuses messages that a proxy may read in another way, and those that take too long to parse."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, _MAX_HEAD_BYTES)
        self._num_chunks = self._num_bytes = 0
        self._sends_chunks = False

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        """h11's, but a chunk of an answer does not pass its state machine, which no chunk changes."""
        if (
            self._sends_chunks
            and isinstance(event, h11.Data)
            and event.data
            and self.our_state is h11.SEND_BODY
        ):
            return [b"%x\r\n" % len(event.data), event.data, b"\r\n"]
        parts = super().send_with_data_passthrough(event)
        if isinstance(event, h11.Response):
            self._sends_chunks = _CHUNKED in b"".join(parts or ()).lower()
        return parts

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            self._num_chunks = self._num_bytes = 0
            _check_head(self.trailing_data[0])
        event = super().next_event()
        if isinstance(event, h11.Request):
            _check_framing(event)
            event = in_origin_form(event)
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_end
            self._num_bytes += len(event.data)
            max_chunks = _MAX_SMALL_CHUNKS + self._num_bytes // _BYTES_PER_CHUNK
            if self._num_chunks > max_chunks:
                raise h11.RemoteProtocolError(
                    f"the body has more than {max_chunks} chunks: send larger ones", 413
                )
        return event


def _check_head(received: bytes) -> None:
    """Check what has arrived of a request's head. Raises RemoteProtocolError."""
    head = received.partition(b"\r\n\r\n")[0]
    if len(head) > _MAX_HEAD_BYTES:
        raise h11.RemoteProtocolError(f"the head has more than {_MAX_HEAD_BYTES} bytes", 431)
    num_lines = head.count(b"\n")
    if num_lines > _MAX_HEADERS:
        raise h11.RemoteProtocolError(f"the head has more than {_MAX_HEADERS} headers", 431)
    if num_lines != head.count(b"\r\n"):
        raise h11.RemoteProtocolError("a line of the head ends in LF alone, must end in CR LF")
    if b"\n " in head or b"\n\t" in head:
        raise h11.RemoteProtocolError("a header has several lines, must have one")


def _check_framing(request: h11.Request) -> None:
    names = {name for name, _ in request.headers}
    if request.http_version not in (b"1.0", b"1.1"):
        version = request.http_version.decode("ascii")
        raise h11.RemoteProtocolError(f"HTTP/{version} is not served, HTTP/1.1 is", 505)
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version == b"1.0"):
        raise h11.RemoteProtocolError(
            "transfer-encoding is given beside content-length or with HTTP/1.0: where it ends is unclear"
        )


class LimitedConnection(H11Protocol):
    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        all_connections: Connections,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = StrictConnection()
        self.logger = _uvicorn_logger
        self._all = all_connections
        # The limit for what is awaited from the client since then; None: nothing is.
        self._wait_s: float | None = None
        self._waits_since = 0.0
        self._stalled_since: float | None = None
        self._closes_since: float | None = None
        self._address = ""  # of the client or its proxy
        self._account: str | None = None  # whose request it has
        self._websocket: WebSocket | None = None  # from its upgrade on, as long as the connection is open

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._extend_scope(transport)
        limits, opened = self._all.limits, self._all.opened
        opened.add(self)
        self._address = self.client[0] if self.client else ""
        self._all.num_of[self._address] += 1
        if len(opened) > limits.max_connections:
            self._make_room()
        if not transport.is_closing():
            self._all.idle[self] = None
            self._wait(limits.request_s)

    def _extend_scope(self, transport: asyncio.Transport) -> None:
        """Give the application the names of the certificate that the client has proved, `_hold`, and the
        WebSocket of an answer that upgrades the connection."""
        tls = transport.get_extra_info("ssl_object")
        names = [] if tls is None else names_in_certificate(tls.getpeercert())
        extensions = {
            HOLD_CONNECTION: self._hold,
            UPGRADED: lambda: self._websocket,
            **({CERTIFICATE_NAMES: names} if names else {}),
        }
        app = self.app

        async def extended(scope: Any, receive: Any, send: Any) -> None:
            async def send_or_upgrade(message: Any) -> None:
                if message.get("status") == SWITCHING_PROTOCOLS:
                    self._upgrade(message["headers"])
                else:
                    await send(message)

            scope["extensions"] = {**scope.get("extensions", {}), **extensions}
            await app(scope, receive, send_or_upgrade)

        self.app = extended

    def _hold(self, account: str, weight: int) -> None:
        """Count the connection as one with a request of `account` until that has been answered.

        Raises Unavailable where there are too many and the account has its share of them.
        """
        held = self._all.with_requests
        if self._account is not None or self.transport.is_closing():
            return
        if not held.has_room(account, weight):
            raise Unavailable(
                f"{held.total} connections have requests, the limit is {self._all.limits.max_connections}"
                f"{held.words(account, weight)}",
                reason="TOO_MANY_CONNECTIONS",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        held.take(account, weight)
        self._account = account

    def _release(self) -> None:
        if self._account is not None:
            self._all.with_requests.give_back(self._account)
            self._account = None

    def _upgrade(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Answer the request with 101. From then on the connection is that of a WebSocket."""
        # uvicorn writes nothing more.
        self.cycle.disconnected = True
        self._websocket = WebSocket(self.transport, self._all.limits.websocket)
        if self.transport.is_closing():
            self._websocket.lose()
            return
        answer = h11.InformationalResponse(
            status_code=SWITCHING_PROTOCOLS, headers=headers, reason="Switching Protocols"
        )
        self.transport.write(self.conn.send(answer) or b"")
        self._websocket.feed(self.conn.trailing_data[0])
        self.flow.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._websocket is not None:
            self._websocket.feed(data)
            return
        for start in range(0, len(data), _SLICE_BYTES):
            if self.transport.is_closing():
                return
            super().data_received(data[start : start + _SLICE_BYTES])
        self._note_state()
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) < _MAX_HEAD_BYTES:
            # uvicorn does not read while a next request waits, but so it would not notice the client's end.
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        self._release()
        super().on_response_complete()
        self._note_state()

    def pause_writing(self) -> None:
        self._stalled_since = self.loop.time()
        super().pause_writing()
        if self._websocket is not None:
            self._websocket.pause_writing()

    def resume_writing(self) -> None:
        self._stalled_since = None
        super().resume_writing()
        if self._websocket is not None:
            self._websocket.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._release()
        self._all.opened.discard(self)
        self._all.num_of[self._address] -= 1
        if not self._all.num_of[self._address]:
            del self._all.num_of[self._address]
        self._all.idle.pop(self, None)
        if self._websocket is not None:
            self._websocket.lose()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if self._websocket is not None:
            self._websocket.leave()
            return
        # h11 refuses to close a connection whose request is half here.
        with contextlib.suppress(h11.LocalProtocolError):
            super().shutdown()
            return
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse what h11 cannot read, in OpenAI's shape, and close the connection."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        # h11 appends what it could not read, which may be a secret.
        what = str(error or msg).partition(": bytearray(")[0]
        message = f"the request is not valid HTTP/1.1: {what}"
        content = {"message": message, "type": "invalid_request_error", "param": None, "code": "bad_request"}
        logger.info("call refused", extra={"code": str(status), "reason": "BAD_REQUEST"})
        self._refuse(status, {"error": content}, {})

    def is_about_to_ask(self, *, has_reserve: bool) -> bool:
        """Whether the client has sent something that was not read yet, or may do so in a moment."""
        num_bytes = bytearray(4)
        fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.FIONREAD, num_bytes)
        return any(num_bytes) or (has_reserve and self.loop.time() - self._waits_since < _MIN_IDLE_S)

    def check_times(self, now: float) -> None:
        """Close the connection if its client has exceeded a limit at `now`."""
        limits = self._all.limits
        if self.transport.is_closing():
            if self._closes_since is None:
                self._closes_since = now
            elif now - self._closes_since > limits.linger_s:
                # Closing waits for the client to read what was written.
                self.transport.abort()
        elif self._stalled_since is not None and now - self._stalled_since > limits.slow_reader_s:
            logger.info("slow consumer", extra={"limit_s": limits.slow_reader_s})
            self.transport.abort()
        elif self._wait_s is not None and now - self._waits_since > self._wait_s:
            if self._wait_s == limits.request_s:
                self._all.refusals.note_closed(self._address, NO_REQUEST)
            self.transport.close()

    def _make_room(self) -> None:
        """Close the connection that has waited longest for a request.

        Without one, serve on this one what accounts below their shares send; beyond those, little.
        """
        num_opened, max_total = len(self._all.opened), self._all.max_total
        has_reserve = num_opened <= max_total + _NUM_RESERVED
        for longest in list(itertools.islice(self._replaceable(), _MAX_TRIED)):
            if longest.transport.is_closing():
                self._all.idle.pop(longest)
            elif not longest.is_about_to_ask(has_reserve=has_reserve):
                self._all.idle.pop(longest)
                self._all.refusals.note_closed(longest._address, TOO_MANY_CONNECTIONS)
                longest.transport.close()
                return
        if num_opened <= max_total:
            return
        if has_reserve:
            self.app = _Overloaded(self.app, self._all)
        else:
            self._all.refusals.note_closed(self._address, TOO_MANY_CONNECTIONS)
            error = _too_many(self._all)
            self._refuse(503, error_body(error), error_headers(error))

    def _replaceable(self) -> Iterator[LimitedConnection]:
        """Connections without a request; of its own address alone where that has more than half of all."""
        has_most = 2 * self._all.num_of[self._address] > self._all.limits.max_connections
        return (each for each in self._all.idle if not has_most or each._address == self._address)

    def _note_state(self) -> None:
        """Start the limit of what is awaited now."""
        if self.transport.is_closing():
            return
        state, limits = self.conn.their_state, self._all.limits
        if state is h11.IDLE:
            self._all.idle.setdefault(self)
        else:
            self._all.idle.pop(self, None)
        if state is h11.SEND_BODY or (state is h11.IDLE and self.conn.trailing_data[0]):
            if self._wait_s != limits.request_s:
                self._wait(limits.request_s)
        elif state is h11.IDLE:
            self._wait(limits.idle_s)
        else:
            self._wait_s = None

    def _wait(self, limit_s: float) -> None:
        self._wait_s, self._waits_since = limit_s, self.loop.time()

    def _refuse(self, status: int, content: dict[str, Any], headers: dict[str, str]) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # Its task must not write any more.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        body = json.dumps(content).encode()
        lines = [
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        # Not by h11, which refuses an answer to a request that it has not read.
        self.transport.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        self.transport.close()


class _Overloaded:
    """Serves the routes that are always served, and 503 to all else; then closes the connection."""

    def __init__(self, app: Any, connections: Connections) -> None:
        self._app, self._connections = app, connections

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_and_close(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        if scope["path"] in self._connections.always_served:
            await self._app(scope, receive, send_and_close)
            return
        error = _too_many(self._connections)
        logger.info("call refused", extra={"code": "503", "reason": error.reason})
        headers = [(b"content-type", b"application/json")]
        headers += [(name.encode(), value.encode()) for name, value in error_headers(error).items()]
        await send_and_close({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(error_body(error)).encode()})


def _too_many(connections: Connections) -> ServiceError:
    return Unavailable(
        f"there are {len(connections.opened)} connections, the limit is {connections.max_total} with those "
        f"of accounts below their shares",
        reason="TOO_MANY_CONNECTIONS",
        retry_after_ms=_RETRY_AFTER_MS,
    )
