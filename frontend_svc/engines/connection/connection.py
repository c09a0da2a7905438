"""Reconnecting connection to one engine: one stream at a time, and the session that is kept across streams.

Knows no engine states, no requests and no steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from frontend_svc.engines.connection.session import EngineSession
from frontend_svc.engines.connection.stream import StreamEnd, StreamLost
from frontend_svc.engines.connection.transport import EngineTransport, MessageStream
from frontend_svc.output.loss import Loss, LossKind
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc, session_pb2
from triptych_kit.clock import Clock

logger = logging.getLogger(__name__)

SCHEMA_REVISION = 1
# The oldest contract of an engine that this frontend works with.
MIN_ENGINE_REVISION = 1
# Behaviours that are part of a session only if both sides name them.
RESUME = "resume"
ADOPT = "adopt"
INPUT_SEGMENTS = "input_segments"
FEATURES = frozenset({RESUME, ADOPT, INPUT_SEGMENTS})

_HANDSHAKE_S = 10.0
# A lost stream is replaced at once or not at all: its requests make no progress until then.
_RESUME_S = 0.5
_RESUME_RETRY_S = 0.05
_MAX_REOPENING_S = 1.0
# Streams in a row that broke before delivering a message, after which their session is given up.
_MAX_EMPTY_STREAMS = 10
# Ends after which the engine may still run the requests of the session.
_KEEPING_ENDS = (StreamEnd.BROKEN, StreamEnd.SILENT, StreamEnd.HUNG)
_LOSS_KINDS = {
    # A stream that could not be reopened gives no more information about its engine than silence does.
    StreamEnd.BROKEN: LossKind.SILENCE,
    StreamEnd.SILENT: LossKind.SILENCE,
    StreamEnd.LEFT: LossKind.LEFT,
    StreamEnd.DISMISSED: LossKind.DISMISSAL,
}

# Makes the first message of a stream from the engine's hello_ack, the session id and whether it is resumed.
Greet = Callable[[session_pb2.HelloAck, str, bool], engine_pb2.ConnectRequest | None]


@dataclass(frozen=True, slots=True)
class FrontendIdentity:
    """How this frontend process identifies itself to engines and to the coordinator."""

    frontend_id: str
    epoch: int


class EngineConnection:
    """Opens streams to one engine, one after the other, and resumes the session on each if possible.

    `open`, then `receive` until it raises StreamLost, then `reopen` or `lose`; `send` at any time.
    """

    def __init__(
        self,
        address: str,
        identity: FrontendIdentity,
        clock: Clock,
        *,
        heartbeat_s: float,
        connect: Callable[[str], EngineTransport],
    ) -> None:
        self.ack = session_pb2.HelloAck()  # the engine's newest
        self.session = EngineSession()
        self.greet: Greet = lambda ack, session_id, is_resumed: None
        self._address = address
        self._identity = identity
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._connect = connect
        self._transport: EngineTransport | None = None
        self._stream: MessageStream | None = None
        self._num_empty_streams = 0
        self._reopened_at_seq = 0

    @property
    def stub(self) -> engine_pb2_grpc.EngineCoreServiceStub:
        """For calls beside the stream, over the same transport."""
        assert self._transport is not None, "there is a transport"
        return self._transport.stub

    @property
    def has_stream(self) -> bool:
        """True from a successful `open` or `reopen` on; also for a stream that has ended unnoticed."""
        return self._stream is not None

    @property
    def is_draining(self) -> bool:
        """Whether the engine was draining at the handshake."""
        return self.ack.state == session_pb2.ENGINE_STATE_DRAINING

    async def open(self) -> bool:
        """Open a stream as soon as the engine listens; returns whether it resumes the session."""
        transport = self._transport = self._connect(self._address)
        await transport.ready()
        stream, is_resumed = await self._shake_hands(transport, limit_s=_HANDSHAKE_S)
        if is_resumed:
            self._resend(stream)
        else:
            self.session = EngineSession(self.session.session_id)
            self.session.open(
                self.ack.engine_epoch,
                is_resumable=RESUME in self.ack.features,
                max_frame_bytes=self.ack.max_frame_bytes,
            )
        self._stream = stream
        return is_resumed

    async def reopen(self, lost: StreamLost) -> None:
        """Resume the session on another stream after one broke. Raises StreamLost if that is not possible."""
        logger.info("engine stream broke", extra={"engine": self._address, "reason": str(lost)})
        self._stream = None
        is_empty = self.session.last_seq == self._reopened_at_seq
        self._num_empty_streams = self._num_empty_streams + 1 if is_empty else 0
        self._reopened_at_seq = self.session.last_seq
        if self._num_empty_streams >= _MAX_EMPTY_STREAMS:
            # The engine answers, but its next message does not get through. It would be the first message of
            # every other stream of this session.
            reason = f"{lost}; {_MAX_EMPTY_STREAMS} streams in a row broke without a message"
            raise StreamLost(reason, StreamEnd.DISMISSED)
        give_up_at = self._clock.now() + _MAX_REOPENING_S
        while True:
            await self.close()
            # A new one each time: an older one may keep a dead connection, or wait for its own backoff.
            transport = self._transport = self._connect(self._address)
            try:
                stream, is_resumed = await self._shake_hands(transport, limit_s=_RESUME_S)
                break
            except StreamLost as again:
                if again.end is not StreamEnd.BROKEN or self._clock.now() + _RESUME_RETRY_S > give_up_at:
                    raise StreamLost(f"{lost}; {again}", again.end) from again
            await asyncio.sleep(_RESUME_RETRY_S)
        if not is_resumed:
            stream.cancel()
            reason = f"{lost}; the engine does not have the session any more{_refusal(self.ack)}"
            raise StreamLost(reason, self._end_of_unknown_session())
        self._resend(stream)
        self._stream = stream

    def send(self, message: engine_pb2.ConnectRequest) -> None:
        """Send `message` on the stream. Without a stream it is dropped: the session resends what matters."""
        if self._stream is not None:
            self._stream.send(message)

    async def receive(self, on_message: Callable[[engine_pb2.ConnectResponse], Awaitable[None]]) -> None:
        """Pass each message to `on_message` until the stream is lost, then raise StreamLost."""
        stream = self._stream
        assert stream is not None, "opened before"
        try:
            await stream.receive(on_message)
        finally:
            self.session.last_seq = stream.last_seq

    def lose(self, lost: StreamLost) -> Loss:
        """Give up the stream; returns what its end means for the requests of the session.

        They are sent to other engines. The session is kept if this engine may still run them.
        """
        kind = _LOSS_KINDS.get(lost.end, LossKind.DEATH)
        if lost.end is StreamEnd.BROKEN and not self.session.is_resumable:
            kind = LossKind.DEATH
        self._stream = None
        if self.session.is_resumable and lost.end in _KEEPING_ENDS:
            self.session.mark_moved()
        else:
            self.session, self._num_empty_streams = EngineSession(), 0
        return Loss(self._address, kind, str(lost))

    def close_stream(self, goodbye: engine_pb2.Goodbye) -> None:
        """End the session on purpose: `receive` raises when the engine has read the goodbye."""
        assert self._stream is not None, "opened before"
        self._stream.close(goodbye)

    async def close(self) -> None:
        """Close the transport; harmless without one."""
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()

    async def _shake_hands(self, transport: EngineTransport, *, limit_s: float) -> tuple[MessageStream, bool]:
        session = self.session
        stream = transport.open_stream(self._clock, heartbeat_s=self._heartbeat_s, last_seq=session.last_seq)
        ack = await stream.open(self._hello(), limit_s=limit_s)
        reason = _incompatibility(ack)
        if reason is not None:
            stream.cancel()
            raise StreamLost(reason, StreamEnd.INCOMPATIBLE)
        # An engine may name features, or set the typed fields.
        named = {name for name in FEATURES if name in ack.features or getattr(ack.feature_set, name)}
        ack.features[:] = sorted(named)
        self.ack = ack
        is_resumed = session.is_resumed_by(ack)
        greeting = self.greet(ack, session.session_id, is_resumed)
        if greeting is not None:
            stream.send(greeting)
        return stream, is_resumed

    def _hello(self) -> session_pb2.Hello:
        return session_pb2.Hello(
            frontend_id=self._identity.frontend_id,
            session_id=self.session.session_id,
            frontend_epoch=self._identity.epoch,
            schema_revision=SCHEMA_REVISION,
            min_peer_revision=MIN_ENGINE_REVISION,
            features=sorted(FEATURES),
            feature_set=session_pb2.FeatureSet(**dict.fromkeys(FEATURES, True)),
            role=session_pb2.PEER_ROLE_FRONTEND,
            resume=self.session.resume_point(),
        )

    def _resend(self, stream: MessageStream) -> None:
        logger.info("engine session resumed", extra={"engine": self._address})
        for message in self.session.unanswered():
            stream.send(message)

    def _end_of_unknown_session(self) -> StreamEnd:
        """The end of a stream whose engine answered and does not have the session."""
        if self.is_draining:
            return StreamEnd.LEFT
        # The same process may have given it up, for example because this frontend was stopped for too long.
        is_same = self.ack.engine_epoch == self.session.engine_epoch
        return StreamEnd.DISMISSED if is_same else StreamEnd.FAILED


def _refusal(ack: session_pb2.HelloAck) -> str:
    """Why the engine does not resume the session, as a part of a message; empty if it gives no reason."""
    if not ack.resume_refusal:
        return ""
    names = session_pb2.ResumeRefusal.values()
    if ack.resume_refusal not in names:
        return f" (reason {ack.resume_refusal})"
    return f" ({session_pb2.ResumeRefusal.Name(ack.resume_refusal).removeprefix('RESUME_REFUSAL_')})"


def _incompatibility(ack: session_pb2.HelloAck) -> str | None:
    """Why this frontend and the engine that sent `ack` cannot work together, or None."""
    revisions = f"engine has contract revision {ack.schema_revision}, this frontend {SCHEMA_REVISION}"
    if ack.min_peer_revision > SCHEMA_REVISION:
        return f"{revisions}: the engine needs {ack.min_peer_revision} or newer"
    if ack.schema_revision < MIN_ENGINE_REVISION:
        return f"{revisions}: the frontend needs {MIN_ENGINE_REVISION} or newer"
    return None
