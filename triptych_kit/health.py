"""The standard health service: "" reports that the process is alive, a full service name that it is ready.

The servicer that comes with grpcio holds a lock while it writes to a watcher, and forgets all watchers of a
name when one of them leaves: a slow or departing prober could keep others from learning about a drain. This
one does neither.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from triptych_kit.addresses import host_of_peer
from triptych_kit.errors import NotFound, ResourceExhausted

SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

Context = grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
# Watches need no key, have no end and take 40 kB each.
_MAX_WATCHES = 1024
_MAX_WATCHES_OF_ADDRESS = 256


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Serves Check and Watch. Watchers get each change; a slow one may miss intermediate changes."""

    def __init__(self, service_names: Iterable[str]) -> None:
        self._statuses: dict[str, int] = dict.fromkeys(service_names, _NOT_SERVING)
        self._statuses[""] = _SERVING
        self._is_draining = False
        self._is_closed = False
        self._changed = asyncio.Event()
        self._watches: Counter[str] = Counter()  # by address

    def set_ready(self, service_name: str, is_ready: bool) -> None:
        """Set whether a served name is ready. Without effect once draining."""
        if service_name not in self._statuses:
            raise ValueError(f"{service_name!r} is not served here")
        if not self._is_draining:
            self._statuses[service_name] = _SERVING if is_ready else _NOT_SERVING
            self._announce()

    def drain(self) -> None:
        """Report NOT_SERVING for every name from now on."""
        self._is_draining = True
        self._statuses = dict.fromkeys(self._statuses, _NOT_SERVING)
        self._announce()

    def close(self) -> None:
        """End all watches, so that they do not delay the end of the server."""
        self._is_closed = True
        self._announce()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        """The status of one name; NOT_FOUND for an unknown one."""
        if request.service not in self._statuses:
            raise NotFound(
                "service is not served here", resource_type="service", resource_name=request.service
            )
        return health_pb2.HealthCheckResponse(status=self._statuses[request.service])

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """The status of one name, then each change; SERVICE_UNKNOWN for an unknown one."""
        with self._watching(host_of_peer(context.peer())):
            await self._write_changes(request, context)

    @contextlib.contextmanager
    def _watching(self, address: str) -> Iterator[None]:
        for found, limit, of in (
            (self._watches[address], _MAX_WATCHES_OF_ADDRESS, f"of {address}"),
            (self._watches.total(), _MAX_WATCHES, "in all"),
        ):
            if found >= limit:
                text = f"{found} watches of the health are open {of}, the limit is {limit}"
                raise ResourceExhausted(text, reason="TOO_MANY_WATCHES")
        self._watches[address] += 1
        try:
            yield
        finally:
            self._watches[address] -= 1
            if not self._watches[address]:
                del self._watches[address]

    async def _write_changes(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        last_sent: int | None = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, _UNKNOWN)
            if status != last_sent:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last_sent = status
            elif self._is_closed:
                return
            else:
                await changed.wait()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
