"""EngineCoreService: moves messages between gRPC streams and sessions. Knows no request and no tensor."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator

import grpc.aio

from engine_svc.admin import announce
from engine_svc.admin.lifecycle import EngineState
from engine_svc.admin.served_engine import ServedEngine
from engine_svc.core.facts import SCHEMA_REVISION
from engine_svc.loop.pause import RunState
from engine_svc.session.kv_subscription import KVSubscription
from engine_svc.session.session import MAX_OUTBOX_BYTES, Session
from engine_svc.session.stream import SessionStream
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
# Frontends whose stream broke; of more than these the one that lost it first is given up.
_MAX_PARKED_SESSIONS = 64
# What is held here never ends, and an engine that drains is not resumed: others have to run it.
_HELD = frozenset({RunState.PAUSED, RunState.ASLEEP})


class EngineCoreServicer(engine_pb2_grpc.EngineCoreServiceServicer):
    """One engine, any number of frontends. RPCs that are not here answer UNIMPLEMENTED."""

    def __init__(
        self,
        engine: ServedEngine,
        *,
        max_outbox_bytes: int = MAX_OUTBOX_BYTES,
        max_replay_bytes: int = announce.MAX_REPLAY_BYTES,
    ) -> None:
        self._engine = engine
        self._max_outbox_bytes = max_outbox_bytes
        self._max_replay_bytes = max_replay_bytes
        self._sessions: set[Session] = set()
        self._kv_subscriptions: set[KVSubscription] = set()
        self._windows: dict[Session, asyncio.TimerHandle] = {}  # of sessions that have no stream
        self._numbers = itertools.count(1)
        self._progressed = asyncio.Event()  # a request, a session or a subscription has ended
        engine.lifecycle.subscribe(self._on_state)

    @property
    def num_sessions(self) -> int:
        """Frontends with a stream now."""
        return len(self._sessions) - len(self._windows)

    @property
    def num_parked_sessions(self) -> int:
        """Frontends whose stream broke and who may come back."""
        return len(self._windows)

    @property
    def num_kv_subscriptions(self) -> int:
        """Who follows the prefix cache now."""
        return len(self._kv_subscriptions)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve this engine there. What `Connect` writes is serialized already, once for wire and replay."""
        connect = grpc.stream_stream_rpc_method_handler(
            self.Connect, request_deserializer=engine_pb2.ConnectRequest.FromString, response_serializer=None
        )
        # The first handler of a method is the one that is used.
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(FULL_NAME, {"Connect": connect}),)
        )
        engine_pb2_grpc.add_EngineCoreServiceServicer_to_server(self, server)

    async def Connect(
        self,
        request_iterator: AsyncIterator[engine_pb2.ConnectRequest],
        context: grpc.aio.ServicerContext[engine_pb2.ConnectRequest, bytes],
    ) -> None:
        """A frontend's session, until one side ends it. Where its stream breaks, it waits for another.

        Writes serialized responses: see `add_to`.
        """
        requests = aiter(request_iterator)
        call = asyncio.current_task()
        assert call is not None, "a handler runs in a task"
        hello = await _read_hello(requests)
        stream = SessionStream(call.cancel, context.write)
        session, is_resumed = self._enter(hello, stream)
        reader = asyncio.create_task(self._feed(session, stream, requests))
        reader.add_done_callback(_look_at_error)
        try:
            await session.write_messages(stream, is_resumed=is_resumed)
            if reader.done():
                # An error of the stream, e.g. a message that cannot be parsed, is this call's error.
                reader.result()
            if not session.is_over:
                raise (
                    Aborted("the stream was closed without goodbye", reason="NO_GOODBYE")
                    if session.is_parked
                    else Aborted("another stream carries the session now", reason="SUPERSEDED")
                )
        finally:
            reader.cancel()
            stream.writer.close()
            self._detach(session, stream)
            # Its error may be this call's, and then this frame is in the traceback.
            del reader

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

    async def UploadBlob(
        self,
        request_iterator: AsyncIterator[engine_pb2.UploadBlobRequest],
        context: grpc.aio.ServicerContext[engine_pb2.UploadBlobRequest, engine_pb2.UploadBlobResponse],
    ) -> engine_pb2.UploadBlobResponse:
        """Bytes that later ADDs refer to by their digest."""
        return await self._engine.tensors.upload(request_iterator)

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
            state=announce.state(self._engine),
            stats=announce.stats(self._engine.stats_snapshot.read()),
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
        self._engine.tensors.beat()
        # The engine may have come to a standstill since.
        self._progressed.set()

    async def drain(self) -> None:
        """Refuse new requests, wait for the end of the running ones, then end all sessions.

        A session that has lost its stream is waited for as long as it may come back. Nothing is waited for
        while the engine stands still.
        """
        lifecycle = self._engine.lifecycle
        if lifecycle.state is EngineState.READY:
            lifecycle.move_to(EngineState.DRAINING)
        await self.until_dry()
        if not lifecycle.has_ended:
            lifecycle.move_to(EngineState.STOPPED)
        while self._sessions or self._kv_subscriptions:
            self._progressed.clear()
            await self._progressed.wait()

    async def until_dry(self) -> None:
        """Wait until no request is left that can come to its end here, or until the engine drains no more."""
        while self._engine.lifecycle.state is EngineState.DRAINING and self._can_progress():
            self._progressed.clear()
            await self._progressed.wait()

    def _can_progress(self) -> bool:
        """Whether a request may still come to its end here, or its end to its frontend."""
        return self._engine.run_state not in _HELD and any(session.is_open for session in self._sessions)

    def _enter(self, hello: session_pb2.Hello, stream: SessionStream) -> tuple[Session, bool]:
        """The session that `hello` resumes, or a new one in place of what the frontend had before."""
        resumed = self._resumed_by(hello)
        for session in list(self._sessions):
            is_same_frontend = session.frontend_id == hello.frontend_id
            is_older = is_same_frontend and session.frontend_epoch != hello.frontend_epoch
            # Who names the session of another frontend ends nothing by it.
            is_left = is_same_frontend and (session.is_parked or session.session_id == hello.session_id)
            if session is not resumed and (is_older or is_left):
                self._engine.orphaned_requests.drop(session.number)
                session.end(Aborted("a newer session of this frontend has begun", reason="SUPERSEDED"))
                session.close()
        if resumed is not None:
            window = self._windows.pop(resumed, None)
            if window is not None:
                window.cancel()
            resumed.attach(stream, last_seq=hello.resume.last_seq)
            self._engine.orphaned_requests.mark_found(resumed.number)
            self._log(resumed, "session resumed")
            return resumed, True
        session = Session(
            self._engine,
            hello,
            number=next(self._numbers),
            on_finished=self._progressed.set,
            on_end=self._on_end,
            max_outbox_bytes=self._max_outbox_bytes,
            max_replay_bytes=self._max_replay_bytes,
        )
        session.attach(stream)
        self._sessions.add(session)
        self._log(session, "session opened")
        return session, False

    def _resumed_by(self, hello: session_pb2.Hello) -> Session | None:
        if not hello.HasField("resume") or hello.resume.engine_epoch != self._engine.identity.engine_epoch:
            return None
        wanted = (hello.frontend_id, hello.frontend_epoch, hello.session_id)
        for session in self._sessions:
            is_wanted = (session.frontend_id, session.frontend_epoch, session.session_id) == wanted
            if is_wanted and session.can_resume(hello.resume.last_seq):
                return session
        return None

    async def _feed(
        self, session: Session, stream: SessionStream, requests: AsyncIterator[engine_pb2.ConnectRequest]
    ) -> None:
        try:
            async for message in requests:
                if not session.is_attached_to(stream):
                    return
                await session.take(message)
        finally:
            # A session that is over still has something to say; one that is not has lost its stream.
            if not session.is_over:
                self._detach(session, stream)

    def _detach(self, session: Session, stream: SessionStream) -> None:
        """`stream` is gone: what it carried is over, or waits for another."""
        if not session.detach(stream):
            return
        window_s = self._engine.replay_window_s
        has_successor = any(
            other.frontend_id == session.frontend_id and other.number > session.number
            for other in self._sessions
        )
        if session.is_over or has_successor:
            # What is ended on purpose leaves behind what it says, and else nothing that anybody may come for.
            if session.leaves_orphans:
                self._engine.orphaned_requests.mark_lost(session.number)
            else:
                self._engine.orphaned_requests.drop(session.number)
            self._close(session)
            return
        if not session.is_resumable or window_s <= 0:
            self._engine.orphaned_requests.mark_lost(session.number)
            self._close(session)
            return
        if len(self._windows) >= _MAX_PARKED_SESSIONS:
            next(iter(self._windows)).end()
        loop = asyncio.get_running_loop()
        self._windows[session] = loop.call_later(window_s, session.end)
        # Behind it: nothing of a session ends before the session.
        self._engine.orphaned_requests.mark_lost(session.number, at_least_s=window_s)
        self._log(session, "session lost its stream")
        self._progressed.set()

    def _close(self, session: Session) -> None:
        num_aborted = session.close()
        self._sessions.discard(session)
        window = self._windows.pop(session, None)
        if window is not None:
            window.cancel()
        self._progressed.set()
        logger.info("session closed", extra={"frontend_id": session.frontend_id, "num_aborted": num_aborted})

    def _on_end(self, session: Session) -> None:
        """A session with a stream still says so there; one without has nobody to tell."""
        if session.is_parked and session in self._sessions:
            self._close(session)

    def _on_state(self, state: EngineState) -> None:
        for session in list(self._sessions):
            session.on_state(state)
        for subscription in self._kv_subscriptions:
            subscription.on_state()
        self._progressed.set()

    def _log(self, session: Session, event: str) -> None:
        logger.info(event, extra={"frontend_id": session.frontend_id, "session_id": session.session_id})


async def _read_hello(requests: AsyncIterator[engine_pb2.ConnectRequest]) -> session_pb2.Hello:
    try:
        async with asyncio.timeout(_HANDSHAKE_S):
            first = await anext(requests, None)
    except TimeoutError as error:
        raise DeadlineExceeded(f"no hello within {_HANDSHAKE_S:g} s") from error
    if first is None:
        raise FailedPrecondition("the stream ended before a hello", reason="NO_HELLO")
    if first.WhichOneof("message") != "hello":
        came = first.WhichOneof("message") or "a message of a newer contract"
        raise FailedPrecondition(
            f"the first message of a stream is hello, {came} came: the peer has told no contract revision, "
            f"this engine has {SCHEMA_REVISION}",
            reason="NO_HELLO",
        )
    hello = first.hello
    for name in ("frontend_id", "session_id"):
        if not 0 < len(getattr(hello, name)) <= _MAX_ID_CHARACTERS:
            raise InvalidArgument(
                f"hello.{name} takes 1 to {_MAX_ID_CHARACTERS} characters", field=f"hello.{name}"
            )
    revisions = f"frontend has contract revision {hello.schema_revision}, this engine {SCHEMA_REVISION}"
    if hello.min_peer_revision > SCHEMA_REVISION:
        raise FailedPrecondition(
            f"{revisions}: the frontend needs {hello.min_peer_revision} or newer", reason="REVISION_TOO_OLD"
        )
    if hello.schema_revision < announce.MIN_PEER_REVISION:
        raise FailedPrecondition(
            f"{revisions}: the engine needs {announce.MIN_PEER_REVISION} or newer", reason="REVISION_TOO_OLD"
        )
    return hello


def _look_at_error(reader: asyncio.Task[None]) -> None:
    # Where the call has ended by something else first, this error has no listener left.
    if not reader.cancelled():
        reader.exception()
