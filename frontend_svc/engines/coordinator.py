"""Session with the coordinator: receives the engines and their loads. The last state outlives the session."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import grpc
import grpc.aio

from frontend_svc.engines.connection.connection import FrontendIdentity
from frontend_svc.engines.routing.account import LoadReport
from frontend_svc.engines.topology import CoordinatorFence, Topology
from triptych.coordinator.v1 import coordinator_pb2, coordinator_pb2_grpc
from triptych_kit.backoff import Backoff
from triptych_kit.channel import NO_CREDENTIALS, ChannelCredentials, open_channel
from triptych_kit.clock import Clock
from triptych_kit.config import ConfigError

logger = logging.getLogger(__name__)

_IN_FLIGHT_INTERVAL_S = 1.0
_MAX_OUTGOING = 16

Outgoing: TypeAlias = "asyncio.Queue[coordinator_pb2.FrontendSessionRequest]"


class CoordinatorSession:
    """Keeps a session with the coordinator open, and passes on the engines' endpoints and loads.

    `wanted` are labels that an engine must have to be used.
    """

    def __init__(
        self,
        address: str,
        identity: FrontendIdentity,
        *,
        endpoint: Callable[[], str],
        on_engines: Callable[[list[str]], None],
        on_loads: Callable[[Mapping[str, LoadReport | None]], None],
        num_in_flight: Callable[[], int],
        clock: Clock,
        wanted: Mapping[str, str] = MappingProxyType({}),
        credentials: ChannelCredentials = NO_CREDENTIALS,
    ) -> None:
        self._credentials = credentials
        self._address = address
        self._identity = identity
        self._endpoint = endpoint
        self._on_engines = on_engines
        self._num_in_flight = num_in_flight
        self._on_loads = on_loads
        self._clock = clock
        self._fence = CoordinatorFence()
        self._topology = Topology(wanted)
        self._outgoing: Outgoing | None = None  # of the current session
        self._task: asyncio.Task[None] | None = None

    @property
    def is_connected(self) -> bool:
        """Whether there is a session over which the coordinator has announced its engines."""
        return self._outgoing is not None

    def wave_of(self, engine_id: str) -> int | None:
        """As the coordinator announced it last; see `Topology.wave_of`."""
        return self._topology.wave_of(engine_id)

    def start(self) -> None:
        """Connect in the background, and again whenever the session is lost."""
        self._task = asyncio.ensure_future(self._run())

    def note_request(self, engine_id: str) -> None:
        """Send a hint that a request was sent to an engine whose group is paused. Never waits.

        Without a session no hint is sent: the engine that gets the request asks for the wave itself.
        """
        if self._outgoing is None or self._outgoing.full():
            return
        hint = self._topology.hint(engine_id)
        if hint is not None:
            message = coordinator_pb2.FrontendSessionRequest(first_request_while_paused=hint)
            self._outgoing.put_nowait(message)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        backoff = Backoff(self._clock)
        while True:
            version = self._topology.version
            try:
                # A new channel each time: certificates may have been replaced.
                async with open_channel(self._address, credentials=self._credentials) as channel:
                    await self._session(coordinator_pb2_grpc.CoordinatorServiceStub(channel))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, ConfigError) as error:
                logger.warning(
                    "coordinator lost", extra={"coordinator": self._address, "reason": _shown(error)}
                )
                if _is_refusal(error) and self._fence.has_lapsed(self._clock.now()):
                    # This coordinator is older than the accepted one, whose lease has expired.
                    self._topology.forget_coordinator()
            except Exception as error:
                # A bug in the handling of a message must not end the updates about engines.
                logger.error(
                    "coordinator session failed", extra={"coordinator": self._address}, exc_info=error
                )
                version = self._topology.version
            if self._topology.version != version:
                backoff.note_connected()
            await asyncio.sleep(backoff.next_s())

    async def _session(self, stub: coordinator_pb2_grpc.CoordinatorServiceStub) -> None:
        call = stub.FrontendSession(wait_for_ready=True)
        registration = coordinator_pb2.FrontendRegistration(
            frontend_id=self._identity.frontend_id,
            frontend_epoch=self._identity.epoch,
            endpoint=self._endpoint(),
            known_version=self._topology.version,
            known_coordinator_epoch=self._topology.coordinator_epoch,
        )
        outgoing: Outgoing = asyncio.Queue(_MAX_OUTGOING)
        outgoing.put_nowait(coordinator_pb2.FrontendSessionRequest(register=registration))
        tasks = [
            asyncio.ensure_future(work)
            for work in (
                self._read(call, outgoing),
                _write(call, outgoing),
                self._report(outgoing),
                # A call that waits for a connection would wait with certificates that have expired.
                self._credentials.until_renewed(self._credentials.version),
            )
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._outgoing = None
            for task in tasks:
                task.cancel()
            call.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # An open session renews the lease even without messages.
            self._fence.note_end(self._clock.now())

    async def _read(
        self,
        call: grpc.aio.StreamStreamCall[
            coordinator_pb2.FrontendSessionRequest, coordinator_pb2.FrontendSessionResponse
        ],
        outgoing: Outgoing,
    ) -> None:
        epoch, lease_s = self._topology.coordinator_epoch, self._fence.lease_s
        # `read` returns something else at the end of the stream.
        while isinstance(message := await call.read(), coordinator_pb2.FrontendSessionResponse):
            if message.HasField("snapshot"):
                epoch, lease_s = message.snapshot.coordinator_epoch, message.snapshot.lease_ms / 1000
            if self._fence.admits(epoch, lease_s=lease_s, now=self._clock.now()):
                self._take(message)
                # Hints go to the coordinator that announced the waves.
                self._outgoing = outgoing
            else:
                logger.warning(
                    "message of an older coordinator rejected",
                    extra={"coordinator": self._address, "epoch": epoch, "believed": self._fence.epoch},
                )
            ack = coordinator_pb2.FrontendAck(nonce=message.nonce, version=self._topology.version)
            if epoch != self._fence.epoch:
                ack.error.code = grpc.StatusCode.FAILED_PRECONDITION.value[0]
                ack.error.message = (
                    f"epoch {epoch} is older than {self._fence.epoch}, whose lease has not expired"
                )
            await outgoing.put(coordinator_pb2.FrontendSessionRequest(ack=ack))
            if epoch != self._fence.epoch:
                # Deltas mean nothing without a snapshot: another session asks for it again.
                return

    def _take(self, message: coordinator_pb2.FrontendSessionResponse) -> None:
        has_moved = self._topology.apply(message)
        # The handling of an earlier message may have failed half-way: a snapshot is always passed on.
        if has_moved or message.HasField("snapshot"):
            self._on_engines(self._topology.endpoints())
        loads = self._topology.take_loads()
        if loads:
            self._on_loads(loads)

    async def _report(self, outgoing: Outgoing) -> None:
        reported = 0
        while True:
            await asyncio.sleep(_IN_FLIGHT_INTERVAL_S)
            num_requests = self._num_in_flight()
            if num_requests != reported:
                reported = num_requests
                in_flight = coordinator_pb2.FrontendInFlight(num_requests=num_requests)
                await outgoing.put(coordinator_pb2.FrontendSessionRequest(in_flight=in_flight))


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.FAILED_PRECONDITION


def _shown(error: Exception) -> str:
    return (
        f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)
    )


async def _write(
    call: grpc.aio.StreamStreamCall[
        coordinator_pb2.FrontendSessionRequest, coordinator_pb2.FrontendSessionResponse
    ],
    outgoing: Outgoing,
) -> None:
    while True:
        await call.write(await outgoing.get())
