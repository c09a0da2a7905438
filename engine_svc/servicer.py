"""EngineCoreService: moves messages between gRPC streams and sessions. Knows no request and no tensor."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import grpc.aio

from engine_svc import announce
from engine_svc.facts import SCHEMA_REVISION
from engine_svc.kv_subscription import KVSubscription
from engine_svc.lifecycle import EngineState
from engine_svc.served_engine import ServedEngine
from engine_svc.session import MAX_OUTBOX_BYTES, Session
from service_kit.errors import (
    Aborted,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
)
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc, session_pb2

logger = logging.getLogger(__name__)

FULL_NAME: str = engine_pb2.DESCRIPTOR.services_by_name["EngineCoreService"].full_name

_HEARTBEAT_S = 0.5
_HANDSHAKE_S = 10.0
_MAX_ID_CHARACTERS = 128
_MAX_KV_SUBSCRIPTIONS = 16


class EngineCoreServicer(engine_pb2_grpc.EngineCoreServiceServicer):
    """One engine, any number of frontends. RPCs that are not here answer UNIMPLEMENTED."""

    def __init__(self, engine: ServedEngine, *, max_outbox_bytes: int = MAX_OUTBOX_BYTES) -> None:
        self._engine = engine
        self._max_outbox_bytes = max_outbox_bytes
        self._sessions: set[Session] = set()
        self._kv_subscriptions: set[KVSubscription] = set()
        self._numbers = itertools.count(1)
        self._progressed = asyncio.Event()  # a request, a session or a subscription has ended
        engine.lifecycle.subscribe(self._on_state)

    @property
    def num_sessions(self) -> int:
        """Frontends with a stream now."""
        return len(self._sessions)

    @property
    def num_kv_subscriptions(self) -> int:
        """Who follows the prefix cache now."""
        return len(self._kv_subscriptions)

    async def Connect(
        self,
        request_iterator: AsyncIterator[engine_pb2.ConnectRequest],
        context: grpc.aio.ServicerContext[engine_pb2.ConnectRequest, engine_pb2.ConnectResponse],
    ) -> AsyncGenerator[engine_pb2.ConnectResponse, None]:
        """A frontend's session, until one side ends it; then its requests are aborted at once."""
        requests = aiter(request_iterator)
        call = asyncio.current_task()
        assert call is not None, "a handler runs in a task"
        session = self._open(await _read_hello(requests), abandon=call.cancel)
        reader = asyncio.create_task(_feed(session, requests))
        reader.add_done_callback(_look_at_error)
        try:
            async for response in session.responses():
                yield response
            if reader.done():
                # An error of the stream, e.g. a message that cannot be parsed, is this call's error.
                reader.result()
        finally:
            reader.cancel()
            self._close(session)

    async def GetArtifacts(
        self,
        request: engine_pb2.GetArtifactsRequest,
        context: grpc.aio.ServicerContext[engine_pb2.GetArtifactsRequest, engine_pb2.GetArtifactsResponse],
    ) -> AsyncGenerator[engine_pb2.GetArtifactsResponse, None]:
        """The files asked for that the caller does not hold yet, in chunks."""
        for artifact in self._engine.artifacts:
            record = announce.artifact_record(artifact)
            if (request.kinds and record.kind not in request.kinds) or record.sha256 in request.known_sha256:
                continue
            for offset, chunk in artifact.chunks():
                yield engine_pb2.GetArtifactsResponse(artifact=record, offset=offset, chunk=chunk)

    async def GetEngineInfo(
        self,
        request: engine_pb2.GetEngineInfoRequest,
        context: grpc.aio.ServicerContext[engine_pb2.GetEngineInfoRequest, engine_pb2.GetEngineInfoResponse],
    ) -> engine_pb2.GetEngineInfoResponse:
        """What the engine is, as far as that is known yet."""
        return announce.engine_info(self._engine)

    async def GetLoad(
        self,
        request: engine_pb2.GetLoadRequest,
        context: grpc.aio.ServicerContext[engine_pb2.GetLoadRequest, engine_pb2.GetLoadResponse],
    ) -> engine_pb2.GetLoadResponse:
        """How loaded it is now."""
        return engine_pb2.GetLoadResponse(
            state=announce.STATES[self._engine.lifecycle.state],
            stats=announce.stats(self._engine.board.read()),
            num_sessions=self.num_sessions,
        )

    async def SubscribeKvEvents(
        self,
        request: engine_pb2.SubscribeKvEventsRequest,
        context: grpc.aio.ServicerContext[
            engine_pb2.SubscribeKvEventsRequest, engine_pb2.SubscribeKvEventsResponse
        ],
    ) -> AsyncGenerator[engine_pb2.SubscribeKvEventsResponse, None]:
        """What the prefix cache holds, then how that changes, until one side ends it."""
        log = self._engine.kv_event_log
        if log is None:
            raise FailedPrecondition(
                "this engine tells nobody of its cache: start it with --enable-kv-events",
                reason="KV_EVENTS_DISABLED",
            )
        if len(self._kv_subscriptions) >= _MAX_KV_SUBSCRIPTIONS:
            raise ResourceExhausted(
                f"engine has {_MAX_KV_SUBSCRIPTIONS} subscribers of its cache, the limit is "
                f"{_MAX_KV_SUBSCRIPTIONS}"
            )
        call = asyncio.current_task()
        assert call is not None, "a handler runs in a task"
        subscription = KVSubscription(self._engine, log, request, abandon=call.cancel)
        self._kv_subscriptions.add(subscription)
        try:
            async for response in subscription.responses():
                yield response
        finally:
            subscription.close()
            self._kv_subscriptions.discard(subscription)
            self._progressed.set()

    async def beat_forever(self) -> None:
        """Send every session its heartbeats, whatever the loop does."""
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            self.beat()

    def beat(self) -> None:
        """Send every session one heartbeat, and look after subscribers that have to be cut off."""
        for session in self._sessions:
            session.beat()
        for subscription in self._kv_subscriptions:
            subscription.beat()

    async def drain(self) -> None:
        """Refuse new requests, wait for the end of the running ones, then end all sessions."""
        lifecycle = self._engine.lifecycle
        if lifecycle.state is EngineState.READY:
            lifecycle.move_to(EngineState.DRAINING)
        while not lifecycle.has_ended and any(session.num_in_flight for session in self._sessions):
            self._progressed.clear()
            await self._progressed.wait()
        if not lifecycle.has_ended:
            lifecycle.move_to(EngineState.STOPPED)
        while self._sessions or self._kv_subscriptions:
            self._progressed.clear()
            await self._progressed.wait()

    def _open(self, hello: session_pb2.Hello, *, abandon: Callable[[], object]) -> Session:
        for session in self._sessions:
            is_older = (
                session.frontend_id == hello.frontend_id and session.frontend_epoch != hello.frontend_epoch
            )
            if is_older or session.session_id == hello.session_id:
                session.end(Aborted("a newer session of this frontend has begun", reason="SUPERSEDED"))
        session = Session(
            self._engine,
            hello,
            number=next(self._numbers),
            on_finished=self._progressed.set,
            abandon=abandon,
            max_outbox_bytes=self._max_outbox_bytes,
        )
        self._sessions.add(session)
        logger.info(
            "session opened", extra={"frontend_id": hello.frontend_id, "session_id": hello.session_id}
        )
        return session

    def _close(self, session: Session) -> None:
        num_aborted = session.num_in_flight
        session.close()
        self._sessions.discard(session)
        self._progressed.set()
        logger.info("session closed", extra={"frontend_id": session.frontend_id, "num_aborted": num_aborted})

    def _on_state(self, state: EngineState) -> None:
        for session in self._sessions:
            session.on_state(state)
        for subscription in self._kv_subscriptions:
            subscription.on_state()
        self._progressed.set()


async def _read_hello(requests: AsyncIterator[engine_pb2.ConnectRequest]) -> session_pb2.Hello:
    try:
        async with asyncio.timeout(_HANDSHAKE_S):
            first = await anext(requests, None)
    except TimeoutError as error:
        raise DeadlineExceeded(f"no hello within {_HANDSHAKE_S:g} s") from error
    if first is None or first.WhichOneof("message") != "hello":
        raise InvalidArgument("the first message of a session is hello", field="hello")
    hello = first.hello
    for name in ("frontend_id", "session_id"):
        if not 0 < len(getattr(hello, name)) <= _MAX_ID_CHARACTERS:
            raise InvalidArgument(
                f"hello.{name} takes 1 to {_MAX_ID_CHARACTERS} characters", field=f"hello.{name}"
            )
    if hello.min_peer_revision > SCHEMA_REVISION:
        raise FailedPrecondition(
            f"frontend needs contract revision {hello.min_peer_revision}, this engine has {SCHEMA_REVISION}",
            reason="REVISION_TOO_OLD",
        )
    return hello


async def _feed(session: Session, requests: AsyncIterator[engine_pb2.ConnectRequest]) -> None:
    try:
        async for message in requests:
            await session.take(message)
    finally:
        session.end()


def _look_at_error(reader: asyncio.Task[None]) -> None:
    # Where the call has ended by something else first, this error has no listener left.
    if not reader.cancelled():
        reader.exception()
