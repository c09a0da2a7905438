"""The way to one engine: a channel and a stream at a time, and the session that outlives them.

Knows no states, no requests and no steps.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

import grpc.aio

from frontend_svc.engines.connection.session import EngineSession
from frontend_svc.engines.connection.stream import EngineStream, StreamEnd, StreamLost
from frontend_svc.output.loss import Loss, LossKind
from service_kit.clock import Clock
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc, session_pb2

SCHEMA_REVISION = 1
# The oldest contract of an engine that this frontend works with.
MIN_ENGINE_REVISION = 1
# Behaviours that take part in a session only where both sides name them.
RESUME = "resume"
ADOPT = "adopt"
FEATURES = frozenset({RESUME, ADOPT})


@dataclass(frozen=True, slots=True)
class FrontendIdentity:
    """Who this frontend process is, as it tells engines and the coordinator."""

    frontend_id: str
    epoch: int


def make_hello(
    identity: FrontendIdentity, session_id: str, resume: session_pb2.ResumePoint | None
) -> session_pb2.Hello:
    """The first message to an engine; with `resume`, to go on with the session of that id."""
    return session_pb2.Hello(
        frontend_id=identity.frontend_id,
        session_id=session_id,
        frontend_epoch=identity.epoch,
        schema_revision=SCHEMA_REVISION,
        min_peer_revision=MIN_ENGINE_REVISION,
        features=sorted(FEATURES),
        role=session_pb2.PEER_ROLE_FRONTEND,
        resume=resume,
    )


def refusal(ack: session_pb2.HelloAck) -> str | None:
    """Why this frontend and the engine that answered `ack` cannot work together, or None."""
    revisions = f"engine has contract revision {ack.schema_revision}, this frontend {SCHEMA_REVISION}"
    if ack.min_peer_revision > SCHEMA_REVISION:
        return f"{revisions}: the engine needs {ack.min_peer_revision} or newer"
    if ack.schema_revision < MIN_ENGINE_REVISION:
        return f"{revisions}: the frontend needs {MIN_ENGINE_REVISION} or newer"
    return None


logger = logging.getLogger(__name__)

_HANDSHAKE_S = 10.0
# A lost stream is replaced at once or not at all: until then its requests stand still.
_RESUME_S = 0.5
_RESUME_RETRY_S = 0.05
_MAX_REPLACING_S = 1.0
# So many streams in a row may break before they have brought anything; then their session is given up.
_MAX_BARREN_STREAMS = 10
# Ends after which the engine may still run what the session has.
_KEEPING_ENDS = (StreamEnd.BROKEN, StreamEnd.SILENT, StreamEnd.HUNG)

_LOSS_KINDS = {
    # A stream that could not be replaced says no more of its engine than silence does.
    StreamEnd.BROKEN: LossKind.SILENCE,
    StreamEnd.SILENT: LossKind.SILENCE,
    StreamEnd.LEFT: LossKind.LEFT,
    StreamEnd.DISMISSED: LossKind.DISMISSAL,
}

# What a stream begins with, for what the engine said, in which session, and whether that goes on.
Greet = Callable[[session_pb2.HelloAck, str, bool], engine_pb2.ConnectRequest | None]


class EngineConnection:
    """Opens streams to one engine, one after the other, each for the session before it where it can."""

    def __init__(
        self,
        address: str,
        identity: FrontendIdentity,
        clock: Clock,
        *,
        heartbeat_s: float,
        connect: Callable[[str], grpc.aio.Channel],
        greet: Greet,
    ) -> None:
        self.ack = session_pb2.HelloAck()  # what the engine has said last of itself
        self.session = EngineSession()
        self._address = address
        self._identity = identity
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._connect = connect
        self._greet = greet
        self._channel: grpc.aio.Channel | None = None
        self._stub: engine_pb2_grpc.EngineCoreServiceStub | None = None
        self._num_barren = 0
        self._replaced_at_seq = 0

    @property
    def stub(self) -> engine_pb2_grpc.EngineCoreServiceStub:
        """For calls beside the stream, over the same connection."""
        assert self._stub is not None, "there is a stream"
        return self._stub

    @property
    def is_draining(self) -> bool:
        """Whether the engine has begun its handshake by saying that it leaves."""
        return self.ack.state == session_pb2.ENGINE_STATE_DRAINING

    async def open(self) -> tuple[EngineStream, bool]:
        """A stream, as soon as the engine listens, and whether it goes on with the session or begins one."""
        await self._dial().channel_ready()
        stream, is_resumed = await self._shake_hands(limit_s=_HANDSHAKE_S)
        if is_resumed:
            self._go_on(stream)
        else:
            self.session = EngineSession(self.session.session_id)
            self.session.begin(self.ack.engine_epoch, is_resumable=RESUME in self.ack.features)
        return stream, is_resumed

    async def replace(self, lost: StreamLost) -> EngineStream:
        """Another stream for the same session in place of one that broke. StreamLost where that cannot be."""
        logger.info("engine stream broke", extra={"engine": self._address, "reason": str(lost)})
        self._num_barren = self._num_barren + 1 if self.session.last_seq == self._replaced_at_seq else 0
        self._replaced_at_seq = self.session.last_seq
        if self._num_barren >= _MAX_BARREN_STREAMS:
            # The engine answers, and what it has to say next does not come through. It would begin every
            # other stream of this session with the same.
            barren = f"{lost}; so did {_MAX_BARREN_STREAMS} that brought nothing"
            raise StreamLost(barren, StreamEnd.DISMISSED)
        give_up_at = self._clock.now() + _MAX_REPLACING_S
        while True:
            await self.hang_up()
            # A channel of its own each time: an older one may cling to its connection, or wait for its turn.
            self._dial()
            try:
                stream, is_resumed = await self._shake_hands(limit_s=_RESUME_S)
                break
            except StreamLost as again:
                if again.end is not StreamEnd.BROKEN or self._clock.now() + _RESUME_RETRY_S > give_up_at:
                    raise StreamLost(f"{lost}; {again}", again.end) from again
            await asyncio.sleep(_RESUME_RETRY_S)
        if not is_resumed:
            stream.cancel()
            raise StreamLost(f"{lost}; the engine does not have the session any more", self._end_without_it())
        self._go_on(stream)
        return stream

    def loss(self, lost: StreamLost) -> Loss:
        """What the end of a stream says of the engine, to those who have requests there."""
        kind = _LOSS_KINDS.get(lost.end, LossKind.DEATH)
        if lost.end is StreamEnd.BROKEN and not self.session.is_resumable:
            kind = LossKind.DEATH
        return Loss(self._address, kind, str(lost))

    def lose(self, lost: StreamLost) -> None:
        """What the session has goes on elsewhere. The session stays where the engine may still run it."""
        if self.session.is_resumable and lost.end in _KEEPING_ENDS:
            self.session.move_all()
        else:
            self.session, self._num_barren = EngineSession(), 0

    async def hang_up(self) -> None:
        """Close the connection."""
        channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            await channel.close(None)

    def _dial(self) -> grpc.aio.Channel:
        channel = self._channel = self._connect(self._address)
        # Made once: it costs as much as all else that sends an ADD.
        self._stub = engine_pb2_grpc.EngineCoreServiceStub(channel)
        return channel

    async def _shake_hands(self, *, limit_s: float) -> tuple[EngineStream, bool]:
        session = self.session
        stream = EngineStream(
            self.stub, self._clock, heartbeat_s=self._heartbeat_s, last_seq=session.last_seq, waits=False
        )
        hello = make_hello(self._identity, session.session_id, session.resume_point())
        ack = await stream.open(hello, limit_s=limit_s)
        reason = refusal(ack)
        if reason is not None:
            stream.cancel()
            raise StreamLost(reason, StreamEnd.INCOMPATIBLE)
        self.ack = ack
        is_resumed = session.is_resumed_by(ack)
        greeting = self._greet(ack, session.session_id, is_resumed)
        if greeting is not None:
            stream.send(greeting)
        return stream, is_resumed

    def _end_without_it(self) -> StreamEnd:
        """What it says of the engine that it answered, and does not have the session."""
        if self.is_draining:
            return StreamEnd.LEFT
        # The same process may have given it up, as that of a frontend which was stopped for too long.
        is_same = self.ack.engine_epoch == self.session.engine_epoch
        return StreamEnd.DISMISSED if is_same else StreamEnd.FAILED

    def _go_on(self, stream: EngineStream) -> None:
        logger.info("engine session resumed", extra={"engine": self._address})
        for message in self.session.unanswered():
            stream.send(message)


_MIN_S = 0.1
_MAX_S = 1.0
# An engine of another version is another one after an upgrade only.
_INCOMPATIBLE_S = 5.0
# Who breaks sooner than this after being ready is not dialled any faster for having been ready.
_STEADY_S = 1.0


class ReconnectBackoff:
    """Grows with each visit that came to nothing, up to a second; short again after one that lasted."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._delay_s = _MIN_S
        self._ready_at: float | None = None

    def note_ready(self) -> None:
        """The engine takes requests."""
        if self._ready_at is None:
            self._ready_at = self._clock.now()

    def after(self, end: StreamEnd) -> float:
        """Seconds to wait after a visit that ended so, with a share left to chance."""
        lasted = self._ready_at is not None and self._clock.now() - self._ready_at > _STEADY_S
        self._ready_at = None
        self._delay_s = _MIN_S if lasted else min(2 * self._delay_s, _MAX_S)
        delay_s = _INCOMPATIBLE_S if end is StreamEnd.INCOMPATIBLE else self._delay_s
        return delay_s * random.uniform(0.5, 1.0)
