"""What the coordinator says of the engines. Its loss changes nothing: the last thing it said stays."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable

import grpc
import grpc.aio

from frontend_svc.engines.client import FrontendIdentity
from service_kit.channel import open_channel
from triptych.coordinator.v1 import coordinator_pb2, coordinator_pb2_grpc, member_pb2

logger = logging.getLogger(__name__)

_IN_FLIGHT_INTERVAL_S = 1.0
_MIN_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 1.0
_MAX_OUTGOING = 16


class Topology:
    """The engines as the coordinator last told: a snapshot, then deltas."""

    def __init__(self) -> None:
        self.version = 0
        self.coordinator_epoch = 0
        self._endpoints: dict[str, str] = {}

    def apply(self, message: coordinator_pb2.FrontendSessionResponse) -> bool:
        """Take a message in; returns whether engines came, went or moved."""
        before = dict(self._endpoints)
        kind = message.WhichOneof("message")
        if kind == "snapshot":
            self.coordinator_epoch = message.snapshot.coordinator_epoch
            self._endpoints = {}
            self._take(message.snapshot.engines)
        elif kind == "delta":
            self._take(message.delta.added)
            self._take(message.delta.updated)
            for engine_id in message.delta.removed_engine_ids:
                self._endpoints.pop(engine_id, None)
        self.version = message.version
        return self._endpoints != before

    def endpoints(self) -> list[str]:
        """Where the engines are."""
        return sorted(set(self._endpoints.values()))

    def _take(self, members: Iterable[member_pb2.EngineMember]) -> None:
        for member in members:
            if member.state == member_pb2.MEMBER_STATE_GONE:
                self._endpoints.pop(member.registration.engine_id, None)
            else:
                self._endpoints[member.registration.engine_id] = member.registration.endpoint


class CoordinatorSession:
    """Keeps a session with the coordinator, for ever, and hands on which engines there are.

    Loads are not taken from it: each engine tells its own on its stream, and sooner.
    """

    def __init__(
        self,
        address: str,
        identity: FrontendIdentity,
        *,
        endpoint: Callable[[], str],
        on_engines: Callable[[list[str]], None],
        num_in_flight: Callable[[], int],
    ) -> None:
        self._address = address
        self._identity = identity
        self._endpoint = endpoint
        self._on_engines = on_engines
        self._num_in_flight = num_in_flight
        self._topology = Topology()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to connect, and do so again whenever the session is lost."""
        self._task = asyncio.ensure_future(self._run(open_channel(self._address)))

    async def close(self) -> None:
        """Stop for good."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self, channel: grpc.aio.Channel) -> None:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        backoff_s = _MIN_BACKOFF_S
        async with channel:
            while True:
                version = self._topology.version
                try:
                    await self._session(stub)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
                    logger.warning(
                        "coordinator lost", extra={"coordinator": self._address, "reason": _shown(error)}
                    )
                backoff_s = (
                    _MIN_BACKOFF_S
                    if self._topology.version != version
                    else min(2 * backoff_s, _MAX_BACKOFF_S)
                )
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))

    async def _session(self, stub: coordinator_pb2_grpc.CoordinatorServiceStub) -> None:
        call = stub.FrontendSession(wait_for_ready=True)
        registration = coordinator_pb2.FrontendRegistration(
            frontend_id=self._identity.frontend_id,
            frontend_epoch=self._identity.epoch,
            endpoint=self._endpoint(),
            known_version=self._topology.version,
            known_coordinator_epoch=self._topology.coordinator_epoch,
        )
        outgoing: asyncio.Queue[coordinator_pb2.FrontendSessionRequest] = asyncio.Queue(_MAX_OUTGOING)
        outgoing.put_nowait(coordinator_pb2.FrontendSessionRequest(register=registration))
        tasks = [
            asyncio.ensure_future(work)
            for work in (self._read(call, outgoing), _write(call, outgoing), self._report(outgoing))
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            call.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(
        self,
        call: grpc.aio.StreamStreamCall[
            coordinator_pb2.FrontendSessionRequest, coordinator_pb2.FrontendSessionResponse
        ],
        outgoing: asyncio.Queue[coordinator_pb2.FrontendSessionRequest],
    ) -> None:
        # What is not a message is the end of the stream.
        while isinstance(message := await call.read(), coordinator_pb2.FrontendSessionResponse):
            if self._topology.apply(message):
                self._on_engines(self._topology.endpoints())
            ack = coordinator_pb2.FrontendAck(nonce=message.nonce, version=message.version)
            await outgoing.put(coordinator_pb2.FrontendSessionRequest(ack=ack))

    async def _report(self, outgoing: asyncio.Queue[coordinator_pb2.FrontendSessionRequest]) -> None:
        told = 0
        while True:
            await asyncio.sleep(_IN_FLIGHT_INTERVAL_S)
            num_requests = self._num_in_flight()
            if num_requests != told:
                told = num_requests
                in_flight = coordinator_pb2.FrontendInFlight(num_requests=num_requests)
                await outgoing.put(coordinator_pb2.FrontendSessionRequest(in_flight=in_flight))


def _shown(error: Exception) -> str:
    return (
        f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)
    )


async def _write(
    call: grpc.aio.StreamStreamCall[
        coordinator_pb2.FrontendSessionRequest, coordinator_pb2.FrontendSessionResponse
    ],
    outgoing: asyncio.Queue[coordinator_pb2.FrontendSessionRequest],
) -> None:
    while True:
        await call.write(await outgoing.get())
