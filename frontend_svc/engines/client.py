"""One engine as seen from here: its stream, its state, and the requests this frontend has there."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import grpc.aio

from frontend_svc.engines.artifacts import ArtifactError, ArtifactStore
from frontend_svc.engines.columns import MalformedStep, read_step
from frontend_svc.engines.loss import Loss, LossKind
from frontend_svc.engines.routing import EngineInfo
from frontend_svc.engines.stream import HEARTBEAT_S, EngineStream, StreamLost
from frontend_svc.output.collector import Ending, EndReason
from frontend_svc.output.processor import OutputProcessor, Receiver, TokenCounts
from frontend_svc.text.model import ServedModel
from service_kit.channel import open_channel
from service_kit.clock import Clock
from service_kit.errors import InvalidTransition, from_status
from triptych.engine.v1 import add_pb2, engine_pb2, engine_pb2_grpc, session_pb2, step_pb2

logger = logging.getLogger(__name__)

SCHEMA_REVISION = 1
_CLOSE_DEADLINE_S = 1.0
_MIN_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 1.0
# Each has a reader that writes to its client within the same turn of the loop, which takes 50 us or so.
_MAX_ROWS_A_TURN = 32


class EngineState(Enum):
    """What this frontend can do with an engine."""

    CONNECTING = "connecting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DOWN = "down"
    CLOSED = "closed"


_TRANSITIONS: dict[EngineState, frozenset[EngineState]] = {
    EngineState.CONNECTING: frozenset({EngineState.LOADING, EngineState.DOWN, EngineState.CLOSED}),
    EngineState.LOADING: frozenset(
        {EngineState.READY, EngineState.DRAINING, EngineState.DOWN, EngineState.CLOSED}
    ),
    EngineState.READY: frozenset({EngineState.DRAINING, EngineState.DOWN, EngineState.CLOSED}),
    EngineState.DRAINING: frozenset({EngineState.DOWN, EngineState.CLOSED}),
    EngineState.DOWN: frozenset({EngineState.CONNECTING, EngineState.CLOSED}),
    EngineState.CLOSED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class FrontendIdentity:
    """Who this frontend process is, as it tells engines and the coordinator."""

    frontend_id: str
    epoch: int


class EngineClient:
    """Keeps one Connect stream to one engine, for ever, and the state of each request that went down it.

    A lost stream ends its requests with UNAVAILABLE. `on_change` is called after each change of state.
    """

    def __init__(
        self,
        address: str,
        identity: FrontendIdentity,
        artifacts: ArtifactStore,
        clock: Clock,
        *,
        on_change: Callable[[EngineClient], None],
        heartbeat_s: float = HEARTBEAT_S,
        connect: Callable[[str], grpc.aio.Channel] = open_channel,
    ) -> None:
        self.address = address
        self.state = EngineState.CONNECTING
        self.model: ServedModel | None = None
        self.engine_id = ""
        self.down_reason = ""  # why it went down last
        self._identity = identity
        self._artifacts = artifacts
        self._clock = clock
        self._on_change = on_change
        self._heartbeat_s = heartbeat_s
        self._connect = connect
        self._unreported: set[int] = set()
        self._processor = OutputProcessor(on_end=self._unreported.discard)
        self._handles = itertools.count(1)
        self._stream: EngineStream | None = None
        self._ack = session_pb2.HelloAck()
        self._num_waiting = 0
        self._num_running = 0
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None

    @property
    def num_in_flight(self) -> int:
        """Requests of this frontend that the engine has not ended."""
        return len(self._processor)

    def has_room(self, num_requests: int) -> bool:
        """False when the engine would reject so many more requests of this session."""
        limit = self._ack.max_inflight_adds
        return limit <= 0 or len(self._processor) + num_requests <= limit

    @property
    def counts(self) -> TokenCounts:
        """Tokens of the requests that went there, since the start."""
        return self._processor.counts

    @property
    def dp_size(self) -> int:
        """How many data-parallel ranks there are beside this engine, itself included."""
        return max(1, self._ack.dp_size)

    def info(self) -> EngineInfo:
        """What routing needs to know."""
        return EngineInfo(
            address=self.address,
            dp_rank=self._ack.dp_rank,
            num_waiting=self._num_waiting,
            num_running=self._num_running,
            num_unreported=len(self._unreported),
            num_in_flight=len(self._processor),
        )

    def start(self) -> None:
        """Begin to connect, and do so again whenever the stream is lost."""
        self._task = asyncio.ensure_future(self._run(self._connect(self.address)))

    async def close(self) -> None:
        """Say goodbye, end what is in flight, stop for good."""
        if self._task is None:
            return
        self._is_closing = True
        if self._stream is not None:
            self._stream.close(engine_pb2.Goodbye(reason="the frontend stops"))
            await asyncio.wait({self._task}, timeout=_CLOSE_DEADLINE_S)
        self._task.cancel()
        await asyncio.wait({self._task})

    def add(self, entries: Sequence[add_pb2.AddEntry], states: Sequence[Receiver]) -> list[int]:
        """Send requests together; returns their handles.

        The states are registered first: no output can come too early.
        """
        assert self._stream is not None and self.state is EngineState.READY, "only ready engines are picked"
        handles = []
        for entry, state in zip(entries, states, strict=True):
            handle = next(self._handles) & 0xFFFFFFFF
            self._processor.register(handle, state)
            self._unreported.add(handle)
            entry.handle = handle
            handles.append(handle)
        self._stream.send(engine_pb2.ConnectRequest(add=add_pb2.Add(entries=entries)))
        return handles

    def abort(self, handles: Iterable[int], reason: engine_pb2.AbortReason) -> None:
        """End requests in the engine and forget them here; those that have ended are passed over."""
        running = [handle for handle in handles if self._processor.forget(handle)]
        if running:
            self._send_abort(running, reason)

    def end(self, handles: Iterable[int]) -> None:
        """Abort requests in the engine and tell their readers; those that have ended are passed over."""
        running = [handle for handle in handles if self._processor.end(handle, Ending(EndReason.ABORT))]
        if running:
            self._send_abort(running, engine_pb2.ABORT_REASON_CLIENT)

    async def _run(self, channel: grpc.aio.Channel) -> None:
        stub = engine_pb2_grpc.EngineCoreServiceStub(channel)
        backoff_s = _MIN_BACKOFF_S
        try:
            while True:
                was_ready = False
                try:
                    await self._session(stub)
                except (StreamLost, MalformedStep, ArtifactError) as error:
                    was_ready = self.state in (EngineState.READY, EngineState.DRAINING)
                    self._end_session(str(error))
                if self._is_closing:
                    return
                backoff_s = _MIN_BACKOFF_S if was_ready else min(2 * backoff_s, _MAX_BACKOFF_S)
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                self._move_to(EngineState.CONNECTING)
        finally:
            self._end_session("closed")
            self._move_to(EngineState.CLOSED)
            await channel.close(None)

    async def _session(self, stub: engine_pb2_grpc.EngineCoreServiceStub) -> None:
        stream = EngineStream(stub, self._clock, heartbeat_s=self._heartbeat_s)
        hello = session_pb2.Hello(
            frontend_id=self._identity.frontend_id,
            session_id=secrets.token_hex(16),
            frontend_epoch=self._identity.epoch,
            schema_revision=SCHEMA_REVISION,
            min_peer_revision=SCHEMA_REVISION,
            role=session_pb2.PEER_ROLE_FRONTEND,
        )
        self._ack = await stream.open(hello)
        self.engine_id = self._ack.engine_id
        self._stream = stream
        self._move_to(EngineState.LOADING)
        if self._ack.state == session_pb2.ENGINE_STATE_DRAINING:
            self._move_to(EngineState.DRAINING)
        readies: asyncio.Queue[session_pb2.Ready] = asyncio.Queue()
        messages = asyncio.ensure_future(stream.run(lambda message: self._dispatch(message, readies)))
        loading = asyncio.ensure_future(self._load(readies, stub))
        try:
            # Loading ends alone only by a fault; the stream never ends without one.
            done, _ = await asyncio.wait({messages, loading}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            messages.cancel()
            loading.cancel()
            await asyncio.gather(messages, loading, return_exceptions=True)

    async def _load(
        self, readies: asyncio.Queue[session_pb2.Ready], stub: engine_pb2_grpc.EngineCoreServiceStub
    ) -> None:
        while True:
            self.model = await self._artifacts.model_of(await readies.get(), stub)
            if self.state is EngineState.LOADING:
                self._move_to(EngineState.READY)

    async def _dispatch(
        self, message: engine_pb2.ConnectResponse, readies: asyncio.Queue[session_pb2.Ready]
    ) -> None:
        kind = message.WhichOneof("message")
        if kind == "step":
            await self._take_step(message.step)
        elif kind == "stats":
            self._num_waiting = message.stats.num_waiting
            self._num_running = message.stats.num_running
            self._unreported.clear()
        elif kind == "add_rejected":
            rejected = message.add_rejected
            status = rejected.status
            error = from_status(status.code, status.message, status.details, rejected.retry_after_ms or None)
            self._processor.fail(rejected.handle, error)
        elif kind == "ready":
            readies.put_nowait(message.ready)
        elif kind == "draining" and self.state in (EngineState.LOADING, EngineState.READY):
            self._move_to(EngineState.DRAINING)
        elif kind == "dead":
            raise StreamLost(f"the engine failed: {message.dead.reason}")

    async def _take_step(self, step: step_pb2.Step) -> None:
        """Hand a step to its readers, a few at a time: all of them at once would keep all else waiting."""
        for rows in read_step(step).slices(_MAX_ROWS_A_TURN):
            finished_here = self._processor.process(rows)
            if finished_here:
                self._send_abort(finished_here, engine_pb2.ABORT_REASON_STOP_STRING)
            await asyncio.sleep(0)

    def _send_abort(self, handles: list[int], reason: engine_pb2.AbortReason) -> None:
        if self._stream is not None:
            abort = engine_pb2.Abort(handles=handles, reason=reason)
            self._stream.send(engine_pb2.ConnectRequest(abort=abort))

    def _end_session(self, reason: str) -> None:
        if self._stream is not None and not self._is_closing:
            logger.warning("engine stream lost", extra={"engine": self.address, "reason": reason})
        self._stream = None
        self.down_reason = reason
        self._unreported.clear()
        self._num_waiting = self._num_running = 0
        if self.state is not EngineState.DOWN:
            self._move_to(EngineState.DOWN)
        self._processor.lose_all(Loss(self.address, LossKind.DEATH, reason))

    def _move_to(self, state: EngineState) -> None:
        if state not in _TRANSITIONS[self.state]:
            raise InvalidTransition(f"an engine cannot go from {self.state.value} to {state.value}")
        level = logging.DEBUG if state in (EngineState.CONNECTING, EngineState.LOADING) else logging.INFO
        logger.log(level, "engine state", extra={"engine": self.address, "state": state.value})
        self.state = state
        self._on_change(self)
