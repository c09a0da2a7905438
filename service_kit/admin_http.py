"""The admin HTTP listener of a service: /metrics, and whatever else a service adds as a page.

h11 reads and writes HTTP/1.1; all runs in the service's event loop, which owns what the pages show.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

import h11
from prometheus_client.metrics_core import Metric

from service_kit.metrics import TEXT_FORMAT, to_text
from service_kit.server import AddressError, check_address

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 64
_MAX_HEAD_BYTES = 16 * 1024
_MAX_BODY_BYTES = 64 * 1024
_IDLE_S = 60.0  # between two requests of a connection, and for one to arrive
_WRITE_S = 10.0
_READ_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Page:
    """An answer."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200


# Called with the request's target, its query included.
MakePage = Callable[[str], Awaitable[Page]]


def metrics_page(collect: Callable[[], Iterable[Metric]]) -> MakePage:
    """The page /metrics."""

    async def make(target: str) -> Page:
        return Page(to_text(collect()), TEXT_FORMAT)

    return make


class AdminHTTP:
    """Serves pages by path to GET and HEAD. A `Listener`, as `run_server` calls it."""

    def __init__(self, listen: str, pages: Mapping[str, MakePage]) -> None:
        self._listen = listen
        self._pages = pages
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Bind and serve. Returns the bound `host:port`; raises AddressError if it cannot be bound."""
        check_address(self._listen)
        host, _, port = self._listen.rpartition(":")
        try:
            self._server = await asyncio.start_server(self._accept, host.strip("[]"), int(port))
        except OSError as error:
            raise AddressError(
                error.errno or errno.EADDRINUSE, f"address {self._listen} cannot be bound"
            ) from error
        listening: socket.socket = self._server.sockets[0]
        return f"{host}:{listening.getsockname()[1]}"

    def drain(self) -> None:
        """Without effect: pages are served until the end."""

    async def stop(self, grace_s: float) -> None:
        """Accept no more connections, and end the open ones."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= _MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD_BYTES)
        try:
            while True:
                async with asyncio.timeout(_IDLE_S):
                    request = await _read_request(connection, reader)
                if request is None:
                    break
                page = await self._page_of(request)
                await _write(connection, writer, page, with_body=request.method != b"HEAD")
                if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                    break
                connection.start_next_cycle()
        except h11.RemoteProtocolError as error:
            if connection.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                page = Page(f"{error}\n".encode(), status=error.error_status_hint)
                await _write(connection, writer, page, with_body=True)
        except (TimeoutError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _page_of(self, request: h11.Request) -> Page:
        if request.method not in (b"GET", b"HEAD"):
            return Page(b"only GET and HEAD are served\n", status=405)
        target = request.target.decode("ascii")
        path = target.partition("?")[0]
        make = self._pages.get(path)
        if make is None:
            return Page(f"not found; served: {' '.join(sorted(self._pages))}\n".encode(), status=404)
        try:
            return await make(target)
        except Exception:
            logger.exception("page failed", extra={"path": path})
            return Page(b"internal error\n", status=500)


async def read_page(address: str, target: str, *, limit_s: float) -> bytes:
    """The body of a page of another process. Raises OSError if it is not served within the limit."""
    host, _, port = address.rpartition(":")
    connection = h11.Connection(h11.CLIENT)
    request = h11.Request(method="GET", target=target, headers=[("host", address), ("connection", "close")])
    body = b""
    async with asyncio.timeout(limit_s):
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
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
                elif isinstance(event, h11.EndOfMessage):
                    return body
        except h11.RemoteProtocolError as error:
            raise ConnectionError(f"{address} speaks no HTTP: {error}") from error
        finally:
            writer.close()


async def _read_request(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Request | None:
    """The next request, of which the body is dropped; None at the end of the connection."""
    request: h11.Request | None = None
    num_bytes = 0
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(_READ_BYTES))
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            num_bytes += len(event.data)
            if num_bytes > _MAX_BODY_BYTES:
                raise h11.RemoteProtocolError(f"the body exceeds {_MAX_BODY_BYTES} bytes", 413)
        elif isinstance(event, h11.EndOfMessage):
            return request
        else:
            return None


async def _write(
    connection: h11.Connection, writer: asyncio.StreamWriter, page: Page, *, with_body: bool
) -> None:
    headers = [
        ("content-type", page.content_type),
        ("content-length", str(len(page.body))),
        ("cache-control", "no-store"),
        ("x-content-type-options", "nosniff"),
    ]
    events: list[h11.Event] = [h11.Response(status_code=page.status, headers=headers)]
    if with_body:
        events.append(h11.Data(data=page.body))
    events.append(h11.EndOfMessage())
    writer.write(b"".join(connection.send(event) or b"" for event in events))
    async with asyncio.timeout(_WRITE_S):
        await writer.drain()
