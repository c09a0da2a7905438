"""EngineCoreService: moves messages between gRPC streams and sessions. Knows no request and no tensor."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any

import grpc.aio

from engine_svc.admin import announce
from engine_svc.admin.lifecycle import EngineState
from engine_svc.admin.served_engine import HEARTBEAT_S, ServedEngine
from engine_svc.admin.watch import SchedulerWatchers
from engine_svc.adoption.orphaned_requests import OrphanedRequests
from engine_svc.core.facts import SCHEMA_REVISION
from engine_svc.loop.mailbox import GiveUp
from engine_svc.loop.pause import RunState
from engine_svc.session.kv_subscription import KVSubscription
from engine_svc.session.session import MAX_OUTBOX_BYTES, Session, SessionLink
from triptych.admin.v1 import admin_pb2
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc, session_pb2
from triptych_kit.errors import (
    Aborted,
    DeadlineExceeded,
    FailedPrecondition,
    ResourceExhausted,
)
from triptych_kit.field_checks import check_id
from triptych_kit.rules import rules_of
from triptych_kit.security.identity import check_owner

logger = logging.getLogger(__name__)

FULL_NAME: str = engine_pb2.DESCRIPTOR.services_by_name["EngineCoreService"].full_name
ADMIN_NAME: str = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name

_HANDSHAKE_S = 10.0
_MAX_KV_SUBSCRIPTIONS = 16
# Sessions without a stream. Beyond this limit the one that lost its stream first is ended.
_MAX_PARKED_SESSIONS = 64
# Requests held in these states never finish here, and a draining engine is not resumed.
_HELD = frozenset({RunState.PAUSED, RunState.ASLEEP})


class EngineCoreServicer(engine_pb2_grpc.EngineCoreServiceServicer):
    """One engine, any number of frontends. RPCs not defined here answer UNIMPLEMENTED."""

    def __init__(
        self,
        engine: ServedEngine,
        *,
        max_outbox_bytes: int = MAX_OUTBOX_BYTES,
        max_replay_bytes: int = announce.MAX_REPLAY_BYTES,
    ) -> None:
        self._engine = engine
        self.watchers = SchedulerWatchers(engine)
        self._max_outbox_bytes = max_outbox_bytes
        self._max_replay_bytes = max_replay_bytes
        self._orphaned_requests = OrphanedRequests(
            give_up=lambda request_id: engine.inbox.put(GiveUp(request_id))
        )
        self._sessions: set[Session] = set()
        self._kv_subscriptions: set[KVSubscription] = set()
        self._windows: dict[Session, asyncio.TimerHandle] = {}  # replay windows of sessions without a stream
        self._numbers = itertools.count(1)
        self._progressed = asyncio.Event()  # a request, a session or a subscription has ended
        self.num_resumed = 0
        self._num_closed_bytes = 0  # sent by sessions that are closed
        engine.lifecycle.subscribe(self._on_state)

    @property
    def num_sessions(self) -> int:
        """Sessions that have a stream."""
        return len(self._sessions) - len(self._windows)

    @property
    def num_parked_sessions(self) -> int:
        """Sessions whose stream broke and that may be resumed."""
        return len(self._windows)

    @property
    def num_orphaned_requests(self) -> int:
        """Requests that are kept for adoption, those of living sessions included."""
        return len(self._orphaned_requests)

    @property
    def num_kv_subscriptions(self) -> int:
        return len(self._kv_subscriptions)

    @property
    def num_unread_bytes(self) -> int:
        """Outputs that are not written to streams yet."""
        return sum(session.num_unread_bytes for session in self._sessions)

    @property
    def num_unacknowledged_bytes(self) -> int:
        """Messages that are kept until frontends acknowledge them."""
        return sum(session.stream.log.size_bytes for session in self._sessions)

    @property
    def num_sent_bytes(self) -> int:
        """Messages to frontends since the start."""
        return self._num_closed_bytes + sum(session.num_sent_bytes for session in self._sessions)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service. `Connect` writes messages that are serialized once, for wire and replay.

        Of AdminService a frontend gets WatchScheduler alone, which changes nothing.
        """
        connect = grpc.stream_stream_rpc_method_handler(
            self.Connect, request_deserializer=engine_pb2.ConnectRequest.FromString, response_serializer=None
        )
        watch = grpc.unary_stream_rpc_method_handler(
            self.WatchScheduler,
            request_deserializer=admin_pb2.WatchSchedulerRequest.FromString,
            response_serializer=admin_pb2.WatchSchedulerResponse.SerializeToString,
        )
        # gRPC uses the first handler registered for a method.
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(FULL_NAME, {"Connect": connect}),
                grpc.method_handlers_generic_handler(ADMIN_NAME, {"WatchScheduler": watch}),
            )
        )
        engine_pb2_grpc.add_EngineCoreServiceServicer_to_server(self, server)

    async def Connect(
        self,
        request_iterator: AsyncIterator[engine_pb2.ConnectRequest],
        context: grpc.aio.ServicerContext[engine_pb2.ConnectRequest, bytes],
    ) -> None:
        """A frontend's session, until one side ends it. If its stream breaks, it waits for another.

        Writes serialized responses, see `add_to`.
        """
        await self.connect(aiter(request_iterator), context.write)

    async def connect(
        self,
        requests: AsyncIterator[engine_pb2.ConnectRequest],
        write: Callable[[bytes], Coroutine[Any, Any, object]],
    ) -> None:
        """`Connect` without a call. Runs in a task of its own, which is cancelled if the stream must end."""
        call = asyncio.current_task()
        assert call is not None, "a session is served in a task"
        hello = await _read_hello(requests)
        session, refusal = self._enter(hello)
        is_resumed = hello.HasField("resume") and not refusal
        link = SessionLink(call.cancel, write, after=hello.resume.last_seq if is_resumed else 0)
        session.attach(link)
        reader = asyncio.create_task(self._feed(session, link, requests))
        reader.add_done_callback(_look_at_error)
        try:
            await session.write_messages(link, is_resumed=is_resumed, refusal=refusal)
            if reader.done():
                # An error of the stream, e.g. a message that cannot be parsed, ends this call.
                reader.result()
            if not session.stream.is_over:
                raise (
                    Aborted("the stream was closed without goodbye", reason="NO_GOODBYE")
                    if session.is_parked
                    else Aborted("the session has moved to another stream", reason="SUPERSEDED")
                )
        finally:
            reader.cancel()
            link.writer.close()
            self._detach(session, link)
            # The reader's error may be this call's, and its traceback would then keep this frame alive.
            del reader

    async def GetArtifacts(
        self,
        request: engine_pb2.GetArtifactsRequest,
        context: grpc.aio.ServicerContext[engine_pb2.GetArtifactsRequest, engine_pb2.GetArtifactsResponse],
    ) -> AsyncGenerator[engine_pb2.GetArtifactsResponse, None]:
        for response in announce.artifacts(self._engine, request):
            yield response

    async def UploadBlob(
        self,
        request_iterator: AsyncIterator[engine_pb2.UploadBlobRequest],
        context: grpc.aio.ServicerContext[engine_pb2.UploadBlobRequest, engine_pb2.UploadBlobResponse],
    ) -> engine_pb2.UploadBlobResponse:
        """Receive bytes that later ADDs refer to by their digest."""
        return await self._engine.tensors.upload(request_iterator)

    async def GetEngineInfo(
        self,
        request: engine_pb2.GetEngineInfoRequest,
        context: grpc.aio.ServicerContext[engine_pb2.GetEngineInfoRequest, engine_pb2.GetEngineInfoResponse],
    ) -> engine_pb2.GetEngineInfoResponse:
        """The engine's facts, as far as they are known yet."""
        return announce.engine_info(self._engine)

    async def GetLoad(
        self,
        request: engine_pb2.GetLoadRequest,
        context: grpc.aio.ServicerContext[engine_pb2.GetLoadRequest, engine_pb2.GetLoadResponse],
    ) -> engine_pb2.GetLoadResponse:
        """The engine's present load."""
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
        """The content of the prefix cache, then its changes, until one side ends the stream."""
        log = self._engine.kv_event_log
        if log is None:
            raise FailedPrecondition(
                "KV cache events are disabled: start the engine with --enable-kv-events",
                reason="KV_EVENTS_DISABLED",
            )
        if len(self._kv_subscriptions) >= _MAX_KV_SUBSCRIPTIONS:
            raise ResourceExhausted(
                f"engine has {_MAX_KV_SUBSCRIPTIONS} KV event subscribers, the limit is "
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

    async def WatchScheduler(
        self,
        request: admin_pb2.WatchSchedulerRequest,
        context: grpc.aio.ServicerContext[admin_pb2.WatchSchedulerRequest, admin_pb2.WatchSchedulerResponse],
    ) -> AsyncGenerator[admin_pb2.WatchSchedulerResponse, None]:
        """The state of the scheduler at intervals; of AdminService."""
        async for response in self.watchers.responses(request):
            yield response

    async def beat_forever(self) -> None:
        """Send heartbeats to every session, also while the engine loop is blocked."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self.beat()

    def beat(self) -> None:
        """Send every session one heartbeat, and cut off slow subscribers."""
        # Also while no session has a stream: the first one that does gets the whole age of the step.
        self._engine.step_age_s(self._engine.stats_snapshot.read())
        for session in self._sessions:
            session.beat()
        for subscription in self._kv_subscriptions:
            subscription.beat()
        self._engine.tensors.beat()
        # The engine may have been paused since the last heartbeat.
        self._progressed.set()

    async def drain(self) -> None:
        """Refuse new requests, wait for the running ones to finish, then end all sessions.

        A session without a stream is waited for until its replay window is over. A paused engine waits for
        no request.
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
        """Wait until no request is left that can finish here, or until the engine stops draining."""
        while self._engine.lifecycle.state is EngineState.DRAINING and self._can_progress():
            self._progressed.clear()
            await self._progressed.wait()

    def _can_progress(self) -> bool:
        """Whether a request may still finish here, or a final output still has to reach its frontend."""
        return self._engine.run_state not in _HELD and any(session.is_open for session in self._sessions)

    def _enter(self, hello: session_pb2.Hello) -> tuple[Session, session_pb2.ResumeRefusal]:
        """The session that `hello` resumes, or a new one that replaces the frontend's previous session.

        In a new one, also why the session that `hello` wants to resume is not continued. Raises
        PermissionDenied if the frontend_id is another identity's.
        """
        for session in self._sessions:
            if session.hello.frontend_id == hello.frontend_id:
                check_owner(session.owner, f"frontend_id {hello.frontend_id}")
        resumed, refusal = self._resumed_by(hello)
        for session in list(self._sessions):
            is_same_frontend = session.hello.frontend_id == hello.frontend_id
            is_older = is_same_frontend and session.hello.frontend_epoch != hello.frontend_epoch
            # A hello that names another frontend's session ends nothing.
            is_left = is_same_frontend and (session.is_parked or session.hello.session_id == hello.session_id)
            if session is not resumed and (is_older or is_left):
                self._orphaned_requests.drop(session.number)
                session.end(Aborted("a newer session of this frontend has begun", reason="SUPERSEDED"))
                session.close()
        if resumed is not None:
            window = self._windows.pop(resumed, None)
            if window is not None:
                window.cancel()
            self._orphaned_requests.mark_found(resumed.number)
            self.num_resumed += 1
            self._log(resumed, "session resumed")
            return resumed, refusal
        session = Session(
            self._engine,
            self._orphaned_requests,
            hello,
            number=next(self._numbers),
            on_finished=self._progressed.set,
            on_end=self._on_end,
            max_outbox_bytes=self._max_outbox_bytes,
            max_replay_bytes=self._max_replay_bytes,
        )
        self._sessions.add(session)
        self._log(session, "session opened")
        return session, refusal

    def _resumed_by(self, hello: session_pb2.Hello) -> tuple[Session | None, session_pb2.ResumeRefusal]:
        if not hello.HasField("resume"):
            return None, session_pb2.RESUME_REFUSAL_UNSPECIFIED
        if hello.resume.engine_epoch != self._engine.identity.engine_epoch:
            return None, session_pb2.RESUME_REFUSAL_OTHER_EPOCH
        refusal = session_pb2.RESUME_REFUSAL_NO_SESSION
        for session in self._sessions:
            if _identity_of(session.hello) == _identity_of(hello):
                refusal = session.refusal_to_resume(hello.resume.last_seq)
                if not refusal:
                    return session, refusal
        return None, refusal

    async def _feed(
        self, session: Session, link: SessionLink, requests: AsyncIterator[engine_pb2.ConnectRequest]
    ) -> None:
        try:
            async for message in requests:
                if session.stream.link is not link:
                    return
                await session.take(message)
        finally:
            # A session that is over still has messages to write; one that is not has lost its stream.
            if not session.stream.is_over:
                self._detach(session, link)

    def _detach(self, session: Session, link: SessionLink) -> None:
        """Handle the end of `link`: close its session, or park it until it is resumed."""
        if not session.stream.detach(link):
            return
        window_s = self._engine.replay_window_s
        has_successor = any(
            other.hello.frontend_id == session.hello.frontend_id and other.number > session.number
            for other in self._sessions
        )
        if session.stream.is_over or has_successor:
            # A session that ends on purpose leaves orphaned requests only if its goodbye says so.
            if session.leaves_orphans:
                self._orphaned_requests.mark_lost(session.number)
            else:
                self._orphaned_requests.drop(session.number)
            self._close(session)
            return
        if not session.stream.is_resumable or window_s <= 0:
            self._orphaned_requests.mark_lost(session.number)
            self._close(session)
            return
        if len(self._windows) >= _MAX_PARKED_SESSIONS:
            next(iter(self._windows)).end()
        loop = asyncio.get_running_loop()
        self._windows[session] = loop.call_later(window_s, session.end)
        # After the session's own timer: no request of a session ends before the session does.
        self._orphaned_requests.mark_lost(session.number, at_least_s=window_s)
        self._log(session, "session lost its stream")
        self._progressed.set()

    def _close(self, session: Session) -> None:
        num_aborted = session.close()
        if session in self._sessions:
            self._sessions.discard(session)
            self._num_closed_bytes += session.num_sent_bytes
        window = self._windows.pop(session, None)
        if window is not None:
            window.cancel()
        self._progressed.set()
        logger.info(
            "session closed", extra={"frontend_id": session.hello.frontend_id, "num_aborted": num_aborted}
        )

    def _on_end(self, session: Session) -> None:
        """Close a session that ends without a stream; one with a stream first writes its last messages."""
        if session.is_parked and session in self._sessions:
            self._close(session)

    def _on_state(self, state: EngineState) -> None:
        for session in list(self._sessions):
            session.on_state(state)
        for subscription in self._kv_subscriptions:
            subscription.on_state()
        self._progressed.set()

    def _log(self, session: Session, event: str) -> None:
        logger.info(
            event, extra={"frontend_id": session.hello.frontend_id, "session_id": session.hello.session_id}
        )


def _identity_of(hello: session_pb2.Hello) -> tuple[str, int, str]:
    return hello.frontend_id, hello.frontend_epoch, hello.session_id


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
            f"the first message of a stream is hello, {came} came: the peer sent no contract revision, "
            f"this engine has {SCHEMA_REVISION}",
            reason="NO_HELLO",
        )
    hello = first.hello
    for name in ("frontend_id", "session_id"):
        rules = rules_of(session_pb2.Hello, name)
        check_id(getattr(hello, name), f"hello.{name}", rules.min_chars, rules.max_chars)
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
    # Retrieves the error: if the call ended for another reason first, nothing else would.
    if not reader.cancelled():
        reader.exception()
