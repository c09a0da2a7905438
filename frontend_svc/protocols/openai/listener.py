"""Serves an ASGI application on the event loop of the frontend, with limits. Knows no route."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import logging
import math
import resource
import socket
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import uvicorn

from frontend_svc.protocols.openai.connection import ConnectionLimits, Connections, LimitedConnection
from triptych_kit.addresses import AddressError, bind_socket, check_address, join_address, split_address
from triptych_kit.security.listeners import OPEN_LISTENERS, ListenerSecurity
from triptych_kit.security.refusals import Refusals

logger = logging.getLogger(__name__)

_BACKLOG = 2048
# libuv accepts one connection of a handle in an iteration of the loop, which takes 10 ms with a thousand open
# requests: the socket has so many handles.
_NUM_ACCEPTED_AT_ONCE = 4
_POLL_S = 0.01
_SWEEP_S = 0.5


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, handshake_s: float) -> None:
        super().__init__(config)
        self._handshake_s = handshake_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, which gives a client a minute for a handshake, before which nothing is counted."""
        config = self.config
        make_protocol: Any = config.http_protocol_class
        make = functools.partial(make_protocol, config=config, server_state=self.server_state, app_state={})
        loop = asyncio.get_running_loop()
        limit_s = None if config.ssl is None else self._handshake_s
        self.servers = [
            await loop.create_server(
                make, sock=bound, ssl=config.ssl, backlog=config.backlog, ssl_handshake_timeout=limit_s
            )
            for bound in sockets or ()
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield


class HTTPListener:
    """A `Listener`, as `run_server` calls it.

    forwarded_allow_ips: addresses and networks of proxies, whose X-Forwarded-For and -Proto count.
    """

    def __init__(
        self,
        listen: str,
        app: Any,
        *,
        shares_port: bool = False,
        limits: ConnectionLimits | None = None,
        always_served: Collection[str] = (),
        forwarded_allow_ips: Sequence[str] = (),
        security: ListenerSecurity = OPEN_LISTENERS,
    ) -> None:
        self._listen, self._shares_port = listen, shares_port
        self.address = ""  # where it is bound, from `start` on
        self._connections = _connections(
            limits or ConnectionLimits(), always_served, security.authenticator.refusals
        )
        config = uvicorn.Config(
            app,
            loop="none",
            http=functools.partial(LimitedConnection, all_connections=self._connections),  # type: ignore[arg-type]  # called like a class
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=math.ceil(self._connections.limits.idle_s),
            proxy_headers=bool(forwarded_allow_ips),
            forwarded_allow_ips=list(forwarded_allow_ips),
        )
        config.load()
        # Its own would never read the certificates again.
        config.ssl = None if security.tls is None else security.tls.context()
        self._server = _Server(config, self._connections.limits.handshake_s)
        self._serving: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None

    @property
    def num_connections(self) -> int:
        return len(self._connections.opened)

    async def start(self) -> str:
        """Bind and serve. Returns the bound `host:port`; raises AddressError if it cannot be bound."""
        check_address(self._listen, shares_port=self._shares_port)
        bound = bind_socket(self._listen, shares_port=self._shares_port, backlog=_BACKLOG)
        bound.setblocking(False)
        handles = _handles_of(bound, self._listen)
        self._serving = asyncio.ensure_future(self._server.serve(sockets=handles))
        while not self._server.started:
            if self._serving.done():
                await self._serving
            await asyncio.sleep(_POLL_S)
        self._sweeping = asyncio.ensure_future(self._sweep())
        self.address = join_address(split_address(self._listen)[0], bound.getsockname()[1])
        return self.address

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
        tasks = [task for task in (self._serving, self._sweeping) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SWEEP_S)
            self._connections.sweep(loop.time())


def _handles_of(bound: socket.socket, listen: str) -> list[socket.socket]:
    """A listening socket and its duplicates. AddressError, and all are closed, if too many files are open."""
    try:
        with contextlib.ExitStack() as opened:
            opened.enter_context(bound)
            duplicates = [opened.enter_context(bound.dup()) for _ in range(_NUM_ACCEPTED_AT_ONCE - 1)]
            opened.pop_all()
    except OSError as error:
        raise AddressError(
            error.errno or errno.EINVAL, f"address {listen} cannot be listened on: {error.strerror or error}"
        ) from error
    return [bound, *duplicates]


def _connections(limits: ConnectionLimits, always_served: Collection[str], refusals: Refusals) -> Connections:
    """Fewer connections where the process may open few files: engines and gRPC need some, too."""
    num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    max_connections = max(1, num_files // 2)
    if limits.max_connections > max_connections:
        extra = {"wanted": limits.max_connections, "limit": max_connections}
        logger.warning("fewer HTTP connections: the limit of open files (ulimit -n) is low", extra=extra)
        limits = dataclasses.replace(limits, max_connections=max_connections)
    max_total = min(2 * limits.max_connections, max(limits.max_connections, num_files * 3 // 4))
    return Connections(limits, max_total, always_served, refusals)
