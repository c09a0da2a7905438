"""The admin HTTP listener of a service: /metrics, and whatever else a service adds as a page.

h11 reads and writes HTTP/1.1; all runs in the service's event loop, which owns what the pages show. On
loopback /metrics is for everyone, and at a unix socket all is.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Mapping

import h11

from triptych_kit.addresses import (
    AddressError,
    bind_socket,
    check_address,
    is_loopback,
    join_address,
    private_files,
    remove_socket,
    split_address,
    unix_path,
)
from triptych_kit.channel import NO_CREDENTIALS, ChannelCredentials
from triptych_kit.http.pages import MAX_BODY_BYTES, METRICS_PATH, MakePage, Page, Pages, TakeBody
from triptych_kit.http.targets import in_origin_form
from triptych_kit.security.listeners import OPEN_LISTENERS, ListenerSecurity
from triptych_kit.security.refusals import TOO_MANY_CONNECTIONS
from triptych_kit.security.tls import names_in_certificate

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 64
_MAX_HEAD_BYTES = 16 * 1024
_MAX_PAGE_BYTES = 64 * 1024 * 1024  # of another process
_IDLE_S = 60.0  # between two requests of a connection, and for one to arrive
_WRITE_S = 10.0
_HANDSHAKE_S = 10.0
_READ_BYTES = 64 * 1024


class AdminHTTP:
    """Serves pages by path to GET and HEAD, and `posts` to POST. A `Listener`, as `run_server` calls it."""

    def __init__(
        self,
        listen: str,
        pages: Mapping[str, MakePage],
        posts: Mapping[str, TakeBody] | None = None,
        *,
        security: ListenerSecurity = OPEN_LISTENERS,
    ) -> None:
        self._listen = listen
        self._security = security
        self._path = unix_path(listen)
        on_loopback = self._path is not None or is_loopback(split_address(listen)[0])
        open_paths = {METRICS_PATH} if on_loopback else set()
        self._pages = Pages(
            pages,
            posts or {},
            security.authenticator,
            on_loopback=on_loopback,
            # The file system protects a unix socket.
            open_paths=open_paths if self._path is None else {*pages, *(posts or {})},
        )
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Bind and serve. Returns the bound address; raises AddressError if it cannot be bound."""
        check_address(self._listen)
        try:
            if self._path is not None:
                with private_files():
                    self._server = await asyncio.start_unix_server(self._accept, self._path)
                return self._listen
            tls = None if self._security.tls is None else self._security.tls.context()
            self._server = await asyncio.start_server(
                self._accept,
                sock=bind_socket(self._listen),
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else _HANDSHAKE_S,
            )
        except AddressError:
            raise
        except OSError as error:
            raise AddressError(
                error.errno or errno.EADDRINUSE, f"address {self._listen} cannot be bound"
            ) from error
        listening: socket.socket = self._server.sockets[0]
        return join_address(split_address(self._listen)[0], listening.getsockname()[1])

    def drain(self) -> None:
        """Do nothing: pages are served until the end."""

    async def stop(self, grace_s: float) -> None:
        """Accept no more connections, and end the open ones."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        if self._server is not None and self._path is not None:
            remove_socket(self._path)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # One that was taken just before the end is as little served as one too many.
        if (
            self._server is None
            or not self._server.is_serving()
            or len(self._connections) >= _MAX_CONNECTIONS
        ):
            self._security.authenticator.refusals.note_closed(_client_of(writer), TOO_MANY_CONNECTIONS)
            writer.transport.abort()
            return
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        # Not in the task: it may be cancelled before it begins.
        task.add_done_callback(lambda _: writer.close())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD_BYTES)
        with_body = True
        try:
            while True:
                async with asyncio.timeout(_IDLE_S):
                    request = await _read_head(connection, reader)
                    if request is None:
                        break
                    with_body = request.method != b"HEAD"
                    body = await _read_body(connection, reader, writer)
                page = await self._pages.answer(
                    request.method.decode("ascii"),
                    request.target.decode("ascii"),
                    {name.decode("ascii"): value.decode("latin-1") for name, value in request.headers},
                    body,
                    _certificate_names(writer),
                    _client_of(writer),
                )
                if isinstance(page.body, bytes):
                    await _write(connection, writer, page, with_body=with_body)
                else:
                    await _write_parts_unless_closed(connection, reader, writer, page)
                if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                    break
                connection.start_next_cycle()
        except h11.RemoteProtocolError as error:
            if connection.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                page = Page(f"{error}\n".encode(), status=error.error_status_hint)
                await _write(connection, writer, page, with_body=with_body)
        except (TimeoutError, ConnectionError, ssl.SSLError):
            pass  # the client is gone, or ended the handshake with an alert


def _client_of(writer: asyncio.StreamWriter) -> str:
    peer = writer.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) else ""


def _certificate_names(writer: asyncio.StreamWriter) -> list[str]:
    tls = writer.get_extra_info("ssl_object")
    return [] if tls is None else names_in_certificate(tls.getpeercert())


async def read_page(
    address: str,
    target: str,
    *,
    limit_s: float,
    credentials: ChannelCredentials = NO_CREDENTIALS,
    has_tls: bool = False,
) -> bytes:
    """The body of a page of another process. Raises OSError if it is not served within the limits.

    has_tls: whether it has TLS also where the credentials have no files for that.
    """
    has_tls = has_tls or credentials.has_tls
    path, connection = unix_path(address), h11.Connection(h11.CLIENT)
    headers = [("host", "localhost" if path is not None else address), ("connection", "close")]
    key = "" if path is not None else credentials.read_key()
    if key:
        headers.append(("authorization", f"Bearer {key}"))
    request = h11.Request(method="GET", target=target, headers=headers)
    body = bytearray()
    async with asyncio.timeout(limit_s):
        if path is not None:
            reader, writer = await asyncio.open_unix_connection(path)
        else:
            reader, writer = await asyncio.open_connection(
                *split_address(address),
                ssl=credentials.context() if has_tls else None,
                server_hostname=credentials.server_name if has_tls else None,
            )
        try:
            writer.write((connection.send(request) or b"") + (connection.send(h11.EndOfMessage()) or b""))
            while True:
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    connection.receive_data(await reader.read(_READ_BYTES))
                elif isinstance(event, h11.Response) and event.status_code != 200:
                    raise ConnectionError(f"{address} answered {event.status_code} to {target}")
                elif isinstance(event, h11.Data):
                    body += event.data
                    if len(body) > _MAX_PAGE_BYTES:
                        raise ConnectionError(
                            f"{address} answered more than {_MAX_PAGE_BYTES} bytes to {target}"
                        )
                elif isinstance(event, h11.EndOfMessage):
                    return bytes(body)
        except h11.RemoteProtocolError as error:
            raise ConnectionError(f"{address} speaks no HTTP: {error}") from error
        finally:
            writer.close()


async def _read_head(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Request | None:
    """The next request, whose body has yet to be read; None at the end of the connection."""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(_READ_BYTES))
        else:
            return in_origin_form(event) if isinstance(event, h11.Request) else None


async def _read_body(
    connection: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bytes:
    body = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            if connection.they_are_waiting_for_100_continue:
                await _send(connection, writer, h11.InformationalResponse(status_code=100, headers=[]))
            connection.receive_data(await reader.read(_READ_BYTES))
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > MAX_BODY_BYTES:
                raise h11.RemoteProtocolError(f"the body exceeds {MAX_BODY_BYTES} bytes", 413)
        else:
            return bytes(body)


async def _write(
    connection: h11.Connection, writer: asyncio.StreamWriter, page: Page, *, with_body: bool
) -> None:
    assert isinstance(page.body, bytes), "a body in parts is written by another function"
    headers = [*page.headers, ("content-length", str(len(page.body)))]
    events: list[h11.Event] = [h11.Response(status_code=page.status, headers=headers)]
    if with_body:
        events.append(h11.Data(data=page.body))
    events.append(h11.EndOfMessage())
    await _send(connection, writer, *events)


async def _send(connection: h11.Connection, writer: asyncio.StreamWriter, *events: h11.Event) -> None:
    if writer.transport.is_closing():
        # Reset by the client. uvloop's transport raises RuntimeError then.
        raise ConnectionResetError("the client went away")
    writer.write(b"".join(connection.send(event) or b"" for event in events))
    try:
        async with asyncio.timeout(_WRITE_S):
            await writer.drain()
    except TimeoutError:
        # Closed otherwise, it would stay open until the client has read all that was written.
        writer.transport.abort()
        raise


async def _write_parts_unless_closed(
    connection: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, page: Page
) -> None:
    """Write a body in parts; it is cancelled, and ConnectionError raised, if the client closes meanwhile."""
    writing = asyncio.ensure_future(_write_parts(connection, writer, page))
    closing = asyncio.ensure_future(_until_closed(reader))
    closing.add_done_callback(lambda _: writing.cancel())
    try:
        await writing
    except asyncio.CancelledError:
        if closing.done():
            raise ConnectionResetError("the client went away") from None
        raise
    finally:
        closing.cancel()


async def _until_closed(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        while await reader.read(_READ_BYTES):
            pass


async def _write_parts(connection: h11.Connection, writer: asyncio.StreamWriter, page: Page) -> None:
    assert not isinstance(page.body, bytes), "a whole body is written by another function"
    # What the client sends meanwhile is dropped, hence the connection is not used again.
    headers = [*page.headers, ("transfer-encoding", "chunked"), ("connection", "close")]
    await _send(connection, writer, h11.Response(status_code=page.status, headers=headers))
    async with contextlib.aclosing(page.body) as parts:
        try:
            async for part in parts:
                await _send(connection, writer, h11.Data(data=part))
        except (TimeoutError, ConnectionError):
            raise
        except Exception as error:
            logger.exception("page failed")
            # Closed without the last chunk, so that the client sees that the body is not whole.
            raise ConnectionAbortedError("the page failed") from error
    await _send(connection, writer, h11.EndOfMessage())
