"""Serves an ASGI application on the event loop of the frontend, with limits. Knows no route."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from frontend_svc.protocols.openai.authorization import CERTIFICATE_NAMES
from service_kit.addresses import AddressError, check_address
from service_kit.security.listeners import OPEN_LISTENERS, ListenerSecurity
from service_kit.security.tls import names_in_certificate

_MAX_CONNECTIONS = 4096
_MAX_HEAD_BYTES = 64 * 1024
_IDLE_S = 75  # longer than the usual proxies keep a connection, so that these close it first
_BACKLOG = 2048
_POLL_S = 0.01


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield


class _Protocol(H11Protocol):
    """Shows the application the names of a verified certificate."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        tls = transport.get_extra_info("ssl_object")
        names = [] if tls is None else names_in_certificate(tls.getpeercert())
        if not names:
            return
        app = self.app

        async def with_names(scope: Any, receive: Any, send: Any) -> None:
            scope.setdefault("extensions", {})[CERTIFICATE_NAMES] = names
            await app(scope, receive, send)

        self.app = with_names


class HTTPListener:
    """A `Listener`, as `run_server` calls it."""

    def __init__(
        self,
        listen: str,
        app: Any,
        *,
        shares_port: bool = False,
        security: ListenerSecurity = OPEN_LISTENERS,
    ) -> None:
        self._listen, self._shares_port = listen, shares_port
        config = uvicorn.Config(
            app,
            loop="none",
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=_MAX_CONNECTIONS,
            h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
            timeout_keep_alive=_IDLE_S,
        )
        config.load()
        # Its own would never read the certificates again.
        config.ssl = None if security.tls is None else security.tls.context()
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Bind and serve. Returns the bound `host:port`; raises AddressError if it cannot be bound."""
        check_address(self._listen, shares_port=self._shares_port)
        host, _, port = self._listen.rpartition(":")
        try:
            bound = self._bind(host.strip("[]"), int(port))
        except OSError as error:
            raise AddressError(
                error.errno or errno.EADDRINUSE, f"address {self._listen} cannot be bound"
            ) from error
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[bound]))
        while not self._server.started:
            if self._serving.done():
                await self._serving
            await asyncio.sleep(_POLL_S)
        return f"{host}:{bound.getsockname()[1]}"

    def drain(self) -> None:
        """Without effect: requests are refused by the services while they drain."""

    async def stop(self, grace_s: float) -> None:
        """Accept no more connections; running calls get `grace_s` to end."""
        if self._serving is None:
            return
        self._server.should_exit = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s + 1.0):
                await asyncio.shield(self._serving)
        self._server.force_exit = True
        self._serving.cancel()
        await asyncio.wait((self._serving,))

    def _bind(self, host: str, port: int) -> socket.socket:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if self._shares_port:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind((host, port))
            bound.listen(_BACKLOG)
            bound.setblocking(False)
        except OSError:
            bound.close()
            raise
        return bound
