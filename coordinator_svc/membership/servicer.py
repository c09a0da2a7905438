"""Sessions of engines and frontends: reads their streams, writes commands and topology changes.

Knows no rule of membership.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import TypeAlias, TypeVar

import grpc.aio

from coordinator_svc.data_parallel.commands import Commands
from coordinator_svc.membership.publisher import ChangeSignal, Publisher
from coordinator_svc.membership.registry import MemberState
from coordinator_svc.membership.topology import Topology
from coordinator_svc.wire.convert import check_frontend
from coordinator_svc.wire.number_limits import check_hint
from triptych.coordinator.v1 import coordinator_pb2, coordinator_pb2_grpc, member_pb2
from triptych_kit.addresses import UNIX
from triptych_kit.clock import Clock
from triptych_kit.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from triptych_kit.security.identity import Identity, check_owner, current_identity

logger = logging.getLogger(__name__)

T = TypeVar("T")
EngineRequest: TypeAlias = coordinator_pb2.EngineSessionRequest
EngineResponse: TypeAlias = coordinator_pb2.EngineSessionResponse
EngineContext: TypeAlias = "grpc.aio.ServicerContext[EngineRequest, EngineResponse]"
FrontendRequest: TypeAlias = coordinator_pb2.FrontendSessionRequest
FrontendResponse: TypeAlias = coordinator_pb2.FrontendSessionResponse
FrontendContext: TypeAlias = "grpc.aio.ServicerContext[FrontendRequest, FrontendResponse]"
TopologyRequest: TypeAlias = coordinator_pb2.GetTopologyRequest
TopologyResponse: TypeAlias = coordinator_pb2.GetTopologyResponse

_HANDSHAKE_S = 10.0
MAX_FRONTENDS = 1024
# Groups are stepped at least this often, even if nothing is due.
_MAX_STEP_INTERVAL_S = 0.5
MAX_MESSAGES_PER_S = 1000
_BURST = 2 * MAX_MESSAGES_PER_S


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Applies engines' reports and publishes to frontends. All of its state lives in one event loop."""

    def __init__(
        self, topology: Topology, clock: Clock, *, lease_s: float, max_frontends: int = MAX_FRONTENDS
    ) -> None:
        self._topology = topology
        self._clock = clock
        self._lease_s = lease_s
        self._max_frontends = max_frontends
        self._rebuilt_at = clock.now() + lease_s
        self._session_ids = itertools.count(1)
        self._owners: dict[str, Identity] = {}  # of the engines that are members
        self.signal = ChangeSignal()
        self._timers = ChangeSignal()
        self._next_step_at: float | None = None
        self._closing = asyncio.Event()

    async def EngineSession(
        self, request_iterator: AsyncIterator[EngineRequest], context: EngineContext
    ) -> None:
        """One engine's membership, from its registration to the end of its stream."""
        await _first_to_end(self._serve_engine(request_iterator, context), self._until_closing())

    async def FrontendSession(
        self, request_iterator: AsyncIterator[FrontendRequest], context: FrontendContext
    ) -> None:
        """A frontend's view of the engines: a snapshot, then deltas."""
        await _first_to_end(self._serve_frontend(request_iterator, context), self._until_closing())

    async def GetTopology(
        self,
        request: TopologyRequest,
        context: grpc.aio.ServicerContext[TopologyRequest, TopologyResponse],
    ) -> TopologyResponse:
        return TopologyResponse(topology=self._topology.snapshot())

    async def expire_leases(self) -> None:
        """Forget engines whose lease has ended; checks several times a lease, until cancelled."""
        while True:
            await asyncio.sleep(self._lease_s / 6)
            for member in self._topology.expire():
                fields = {"engine_id": member.registration.engine_id, "cause": "lease expired"}
                logger.warning("engine gone", extra=fields)
                self.signal.notify()

    async def step_groups(self) -> None:
        """Step the lockstep groups when something is due, until cancelled."""
        while True:
            next_at = self._topology.groups.next_at()
            wait_s = _MAX_STEP_INTERVAL_S if next_at is None else next_at - self._clock.now()
            await self._timers.wait(min(max(wait_s, 0.0), _MAX_STEP_INTERVAL_S))
            version = self._topology.version
            self._topology.groups.step_all()
            self._publish_changes(version)

    async def close(self) -> None:
        """End all sessions, so that engines and frontends reconnect to the next coordinator."""
        self._closing.set()

    async def _serve_engine(self, requests: AsyncIterator[EngineRequest], context: EngineContext) -> None:
        first = await _first(requests)
        if first.WhichOneof("message") != "register":
            raise FailedPrecondition("the first message of a session must be register")
        session_id = next(self._session_ids)
        engine_id = first.register.engine_id
        writer = EngineWriter(self._topology.commands, engine_id, session_id)
        is_local = context.peer().startswith(UNIX)
        self._register_engine(first.register, session_id, writer, is_local=is_local)
        self._topology.greet(engine_id)
        try:
            await _first_to_end(
                self._read_engine(engine_id, session_id, requests, writer, is_local=is_local),
                writer.run(context.write),
            )
        finally:
            self._topology.commands.close(engine_id, session_id)
            self._topology.lose_engine(engine_id, session_id)
            self.signal.notify()

    async def _serve_frontend(
        self, requests: AsyncIterator[FrontendRequest], context: FrontendContext
    ) -> None:
        first = await _first(requests)
        register = first.register
        if first.WhichOneof("message") != "register":
            raise FailedPrecondition("the first message of a session must be register")
        check_frontend(register)
        self._topology.epoch_check.check(f"frontend {register.frontend_id}", register.known_coordinator_epoch)
        if len(self._topology.frontends) >= self._max_frontends:
            raise ResourceExhausted(f"{self._max_frontends} frontends have a session, which is the limit")
        session_id = next(self._session_ids)
        self._topology.frontends[session_id] = member_pb2.FrontendMember(
            frontend_id=register.frontend_id, endpoint=register.endpoint
        )
        logger.info("frontend joined", extra={"frontend_id": register.frontend_id})
        publisher = Publisher(self._topology, self.signal, self._clock)
        try:
            await _first_to_end(
                self._read_frontend(session_id, requests, publisher),
                publisher.run(context.write, delay_s=self._wait_before_snapshot_s(register)),
            )
        finally:
            del self._topology.frontends[session_id]
            logger.info("frontend left", extra={"frontend_id": register.frontend_id})

    async def _read_engine(
        self,
        engine_id: str,
        session_id: int,
        requests: AsyncIterator[EngineRequest],
        writer: EngineWriter,
        *,
        is_local: bool,
    ) -> None:
        limit = RateLimit(self._clock)
        async for request in requests:
            limit.take()
            match request.WhichOneof("message"):
                case "report":
                    self._take_report(engine_id, session_id, request.report)
                case "register":
                    if request.register.engine_id != engine_id:
                        raise InvalidArgument("engine_id must stay the same", field="register.engine_id")
                    self._register_engine(request.register, session_id, writer, is_local=is_local)
                case "command_result":
                    version = self._topology.version
                    self._topology.take_result(engine_id, request.command_result)
                    self._publish_changes(version)
                case "goodbye":
                    self._topology.leave_engine(engine_id, session_id)
                    fields = {"engine_id": engine_id, "cause": request.goodbye.reason or "goodbye"}
                    logger.info("engine gone", extra=fields)
                    return
                case kind:
                    _log_ignored(kind)

    def _register_engine(
        self,
        message: member_pb2.EngineRegistration,
        session_id: int,
        writer: EngineWriter,
        *,
        is_local: bool,
    ) -> None:
        if message.endpoint.startswith(UNIX) and not is_local:
            # Frontends would connect to a socket of their host that another host has chosen.
            raise InvalidArgument(
                f"endpoint {message.endpoint!r} is a unix socket: only an engine that is connected over one "
                "may register it",
                field="register.endpoint",
            )
        self._topology.epoch_check.check(f"engine {message.engine_id}", message.highest_coordinator_epoch)
        self._claim_engine(message.engine_id)
        version = self._topology.version
        member = self._topology.register_engine(message, session_id)
        fields = {"engine_id": message.engine_id, "endpoint": message.endpoint, "state": member.state.value}
        logger.info("engine registered", extra=fields)
        self._topology.commands.open(message.engine_id, session_id, writer.wake)
        self._topology.join_group(message)
        lease_ms = round(self._lease_s * 1000)
        writer.answer(
            coordinator_pb2.Registered(
                lease_ms=lease_ms,
                # Two renewals may be lost before the lease ends.
                renew_after_ms=lease_ms // 3,
                coordinator_epoch=self._topology.coordinator_epoch,
            )
        )
        self._publish_changes(version)

    def _claim_engine(self, engine_id: str) -> None:
        """Raise PermissionDenied for an engine_id that another identity has registered."""
        members = self._topology.engine_ids()
        self._owners = {known: owner for known, owner in self._owners.items() if known in members}
        if engine_id in self._owners:
            check_owner(self._owners[engine_id], f"engine_id {engine_id}")
        self._owners.setdefault(engine_id, current_identity())

    def _take_report(self, engine_id: str, session_id: int, report: coordinator_pb2.EngineReport) -> None:
        urgent, loads_version = self._topology.urgent_version, self._topology.loads_version
        member = self._topology.take_report(engine_id, session_id, report)
        if self._topology.urgent_version != urgent:
            self.signal.notify()
        elif self._topology.loads_version != loads_version:
            self.signal.notify_loads()
        self._set_timer()
        if member.state is MemberState.GONE:
            raise FailedPrecondition(f"engine {engine_id} has reported FAILED and is no member any more")

    def _publish_changes(self, version: int) -> None:
        """Wake the publishers if the topology has changed since `version`, and update the timer."""
        if self._topology.version != version:
            self.signal.notify()
        self._set_timer()

    def _set_timer(self) -> None:
        next_at = self._topology.groups.next_at()
        if next_at != self._next_step_at:
            self._next_step_at = next_at
            self._timers.notify()

    async def _read_frontend(
        self, session_id: int, requests: AsyncIterator[FrontendRequest], publisher: Publisher
    ) -> None:
        limit = RateLimit(self._clock)
        async for request in requests:
            limit.take()
            match request.WhichOneof("message"):
                case "ack":
                    self._take_ack(session_id, request.ack, publisher)
                case "in_flight":
                    frontend = self._topology.frontends[session_id]
                    frontend.num_in_flight = request.in_flight.num_requests
                case "first_request_while_paused":
                    version = self._topology.version
                    check_hint(request.first_request_while_paused)
                    self._topology.groups.hint(request.first_request_while_paused)
                    self._publish_changes(version)
                case kind:
                    _log_ignored(kind)

    def _take_ack(self, session_id: int, ack: coordinator_pb2.FrontendAck, publisher: Publisher) -> None:
        if not ack.HasField("error"):
            publisher.take_ack(ack.nonce)
            return
        frontend_id = self._topology.frontends[session_id].frontend_id
        logger.warning("message refused", extra={"frontend_id": frontend_id, "cause": ack.error.message})
        publisher.take_nack(ack.nonce)

    def _wait_before_snapshot_s(self, register: coordinator_pb2.FrontendRegistration) -> float:
        # A frontend that knew an earlier coordinator keeps its topology until the engines have had a lease to
        # register here: in a snapshot without them they would seem to be gone.
        if register.known_coordinator_epoch in (0, self._topology.coordinator_epoch):
            return 0.0
        return max(0.0, self._rebuilt_at - self._clock.now())

    async def _until_closing(self) -> None:
        await self._closing.wait()
        raise Unavailable("the coordinator stops")


class EngineWriter:
    """The only writer of an engine's session. Holds the latest answer; commands are queued in `Commands`."""

    def __init__(self, commands: Commands, engine_id: str, session_id: int) -> None:
        self._commands = commands
        self._engine_id = engine_id
        self._session_id = session_id
        self._registered: coordinator_pb2.Registered | None = None
        self._has_news = asyncio.Event()

    def answer(self, registered: coordinator_pb2.Registered) -> None:
        """Answer a registration; the answer is written before any command."""
        self._registered = registered
        self._has_news.set()

    def wake(self) -> None:
        self._has_news.set()

    async def run(self, write: Callable[[coordinator_pb2.EngineSessionResponse], Awaitable[None]]) -> None:
        """Write answers and commands until cancelled."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            registered, self._registered = self._registered, None
            if registered is not None:
                await write(coordinator_pb2.EngineSessionResponse(registered=registered))
            for command in self._commands.take_unsent(self._engine_id, self._session_id):
                await write(coordinator_pb2.EngineSessionResponse(command=command))


class RateLimit:
    """Ends a session that sends more than a thousand messages a second for longer than a burst."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._num_left = float(_BURST)
        self._taken_at = clock.now()

    def take(self) -> None:
        """Count one message; raises ResourceExhausted when there were too many."""
        now = self._clock.now()
        self._num_left = min(_BURST, self._num_left + (now - self._taken_at) * MAX_MESSAGES_PER_S)
        self._taken_at = now
        if self._num_left < 1:
            raise ResourceExhausted(
                f"a session may send {MAX_MESSAGES_PER_S} messages a second", retry_after_ms=1000
            )
        self._num_left -= 1


async def _first_to_end(*work: Coroutine[None, None, None]) -> None:
    """Run `work` concurrently until one part ends, then cancel the rest. Raises what that part raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await next(task for task in tasks if task.done())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _first(requests: AsyncIterator[T]) -> T:
    try:
        async with asyncio.timeout(_HANDSHAKE_S):
            return await anext(requests)
    except StopAsyncIteration as error:
        raise FailedPrecondition("the session ended before it registered") from error
    except TimeoutError as error:
        raise DeadlineExceeded(f"no register within {_HANDSHAKE_S:g} s") from error


def _log_ignored(kind: str | None) -> None:
    # A message of a newer protocol version.
    logger.info("message ignored", extra={"kind": kind or "unknown"})
