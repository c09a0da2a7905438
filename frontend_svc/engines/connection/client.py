"""Client of one engine: keeps it connected, and tracks its state."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from frontend_svc.engines.artifacts import ArtifactError, ArtifactStore
from frontend_svc.engines.connection.calls import EngineCalls
from frontend_svc.engines.connection.columns import MalformedStep
from frontend_svc.engines.connection.connection import (
    SCHEMA_REVISION,
    EngineConnection,
    FrontendIdentity,
)
from frontend_svc.engines.connection.health import (
    HELD_STATES,
    IN_USE_STATES,
    EngineState,
    StepWatch,
)
from frontend_svc.engines.connection.requests import EngineRequests
from frontend_svc.engines.connection.stream import HEARTBEAT_S, StreamEnd, StreamLost
from frontend_svc.engines.connection.transport import EngineTransport, open_transport
from frontend_svc.engines.load_messages import load_report
from frontend_svc.output.loss import Loss
from frontend_svc.output.pace import DeliveryPace
from frontend_svc.text.model import ServedModel
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc, session_pb2
from triptych_kit.backoff import Backoff
from triptych_kit.clock import Clock
from triptych_kit.errors import InvalidTransition

__all__ = ["SCHEMA_REVISION", "EngineClient", "EngineState", "FrontendIdentity"]

logger = logging.getLogger(__name__)

_TRANSITIONS: dict[EngineState, frozenset[EngineState]] = {
    EngineState.CONNECTING: frozenset({EngineState.LOADING, EngineState.DOWN, EngineState.CLOSED}),
    EngineState.LOADING: frozenset(
        {EngineState.READY, EngineState.DRAINING, EngineState.DOWN, EngineState.CLOSED}
    ),
    EngineState.READY: frozenset(
        {EngineState.DRAINING, EngineState.RECONNECTING, EngineState.DOWN, EngineState.CLOSED}
    ),
    # Back to LOADING, and from there to READY, when a drain is cancelled.
    EngineState.DRAINING: frozenset(
        {EngineState.LOADING, EngineState.RECONNECTING, EngineState.DOWN, EngineState.CLOSED}
    ),
    EngineState.RECONNECTING: frozenset(
        {EngineState.READY, EngineState.DRAINING, EngineState.DOWN, EngineState.CLOSED}
    ),
    EngineState.DOWN: frozenset({EngineState.CONNECTING, EngineState.CLOSED}),
    EngineState.CLOSED: frozenset(),
}

_CLOSE_DEADLINE_S = 1.0
# How long this frontend tries to reach an engine that is no longer listed, to abort the requests that were
# moved to other engines.
_MAX_OWED_S = 30.0
# An engine that is lost sooner than this after it was ready does not reset the backoff.
_STEADY_S = 1.0
# An engine of an incompatible version changes only by an upgrade.
_INCOMPATIBLE_RETRY_S = 5.0


class EngineClient:
    """Keeps a connection to one engine open until `close`.

    `start`, then add `requests` while `state` is READY, then `close`.
    A stream that breaks is reopened, and its requests continue; if that fails, they are lost. `on_change` is
    called after each change of state and of what the engine announces, `on_add` with the engine's id after
    each `add`, `on_loss` before its requests are lost. All clients of a process have one `pace`.
    """

    def __init__(
        self,
        address: str,
        identity: FrontendIdentity,
        artifacts: ArtifactStore,
        clock: Clock,
        *,
        on_change: Callable[[EngineClient], None],
        on_add: Callable[[str], None] = lambda engine_id: None,
        on_loss: Callable[[Loss], None] = lambda loss: None,
        heartbeat_s: float = HEARTBEAT_S,
        connect: Callable[[str], EngineTransport] = open_transport,
        pace: DeliveryPace | None = None,
    ) -> None:
        self.address = address
        self.state = EngineState.CONNECTING
        self.model: ServedModel | None = None
        self.down_reason = ""  # of the last time it went down
        self._artifacts = artifacts
        self._clock = clock
        self._on_change = on_change
        self._on_loss = on_loss
        self._connection = EngineConnection(
            address, identity, clock, heartbeat_s=heartbeat_s, connect=connect
        )
        self.requests = EngineRequests(
            address, identity.frontend_id, self._connection, on_add=on_add, pace=pace or DeliveryPace()
        )
        self.calls = EngineCalls(address, self._connection)
        self._steps = StepWatch()
        self._backoff = Backoff(clock, steady_s=_STEADY_S)
        self._ready_mailbox = ReadyMailbox()
        self._lost_at = 0.0
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None

    @property
    def engine_id(self) -> str:
        """As the engine gave it last; empty before the first connection."""
        return self._connection.ack.engine_id

    @property
    def engine_epoch(self) -> int:
        """Of the engine process that it was connected to last; 0 before the first connection."""
        return self._connection.ack.engine_epoch

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks in this engine's group."""
        return max(1, self._connection.ack.dp_size)

    @property
    def step_age_s(self) -> float:
        """Age of the engine's running step at its last heartbeat; 0 without one."""
        return self._steps.age_s

    @property
    def step_limit_s(self) -> float:
        """How soon this frontend knows that the engine hangs in a step that begins now."""
        return self._steps.budget_s + 2 * HEARTBEAT_S

    @property
    def num_heartbeats(self) -> int:
        """Heartbeats of the engine since this client was made."""
        return self._steps.num_heartbeats

    @property
    def owed_s(self) -> float:
        """Seconds to keep this client although the engine is not listed, so that it aborts moved requests."""
        if not self._connection.session.num_moved:
            return 0.0
        return max(0.0, self._lost_at + _MAX_OWED_S - self._clock.now())

    def start(self) -> None:
        """Connect in the background, and again whenever the engine is lost."""
        self._task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        """Send goodbye, end the requests in flight, and stop."""
        if self._task is None:
            return
        self._is_closing = True
        if self._connection.has_stream:
            adoptions = self.requests.adoptions
            leaves_adoptable = adoptions.are_left and adoptions.are_possible
            goodbye = engine_pb2.Goodbye(reason="the frontend stops", leaves_adoptable=leaves_adoptable)
            self._connection.close_stream(goodbye)
            await asyncio.wait({self._task}, timeout=_CLOSE_DEADLINE_S)
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        try:
            while True:
                lost = await self._use_until_lost()
                # In this order: while the state is READY there are a stream and a channel.
                self._lose(lost)
                await self._connection.close()
                if self._is_closing:
                    return
                is_incompatible = lost.end is StreamEnd.INCOMPATIBLE
                await asyncio.sleep(_INCOMPATIBLE_RETRY_S if is_incompatible else self._backoff.next_s())
                self._move_to(EngineState.CONNECTING)
        finally:
            self._lose(StreamLost("closed", StreamEnd.LEFT))
            self._move_to(EngineState.CLOSED)
            await self._connection.close()

    async def _use_until_lost(self) -> StreamLost:
        """Use the engine until it is lost, over any number of streams."""
        try:
            await self._open()
            while True:
                try:
                    raise await self._receive()
                except StreamLost as lost:
                    if not self._can_resume(lost):
                        raise
                    await self._reopen(lost)
        except StreamLost as lost:
            # A new one without a traceback, whose frames would keep the call and thus its channel alive.
            return StreamLost(str(lost), lost.end)
        except (MalformedStep, ArtifactError) as error:
            return StreamLost(str(error))
        except Exception as error:
            # A bug in this frontend. If it ended the client, the engine would stay unused.
            logger.exception("engine client failed", extra={"engine": self.address})
            return StreamLost(f"internal error ({type(error).__name__})")

    async def _open(self) -> None:
        epoch = self._connection.ack.engine_epoch
        is_resumed = await self._connection.open()
        ack = self._connection.ack
        self.requests.account.meet(ack.engine_epoch)
        self.requests.account.set_facts(dp_rank=ack.dp_rank)
        if not is_resumed:
            self._ready_mailbox.clear(is_loading=ack.state == session_pb2.ENGINE_STATE_LOADING)
        if ack.engine_epoch != epoch:
            self._steps.hung_step = None
        self._move_to(EngineState.LOADING)
        if self._connection.is_draining:
            self._move_to(EngineState.DRAINING)
        self._become_ready()

    def _can_resume(self, lost: StreamLost) -> bool:
        is_network = lost.end in (StreamEnd.BROKEN, StreamEnd.SILENT) and not self._is_closing
        return is_network and self.state in IN_USE_STATES and self._connection.session.is_resumable

    async def _reopen(self, lost: StreamLost) -> None:
        was_draining = self.state is EngineState.DRAINING
        self._move_to(EngineState.RECONNECTING)
        try:
            await self._connection.reopen(lost)
        except StreamLost as final:
            if was_draining and final.end is StreamEnd.REFUSED:
                # Its drain is complete and its process has exited.
                raise StreamLost(str(final), StreamEnd.LEFT) from final
            raise
        is_draining = was_draining or self._connection.is_draining
        self.requests.on_resumed()
        self._move_to(EngineState.DRAINING if is_draining else EngineState.READY)

    async def _receive(self) -> BaseException:
        """Receive from the stream until it is lost; returns the error, to be raised outside of the tasks."""
        messages = asyncio.ensure_future(self._connection.receive(self._dispatch))
        loading = asyncio.ensure_future(self._load(self._connection.stub))
        try:
            # Both end only with an error.
            tasks = (messages, loading)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(filter(None, (task.exception() for task in tasks if task.done())))
        finally:
            messages.cancel()
            loading.cancel()
            await asyncio.gather(messages, loading, return_exceptions=True)

    async def _load(self, stub: engine_pb2_grpc.EngineCoreServiceStub) -> None:
        if self._ready_mailbox.is_loading:
            await self._prepare(stub)
        while True:
            ready = await self._ready_mailbox.get()
            self.model = await self._artifacts.model_of(ready, stub)
            self._ready_mailbox.note_read(ready)
            self.requests.vocab_size = ready.vocab_size
            self.requests.account.set_facts(block_size=ready.block_size)
            if self.state is EngineState.READY:
                # It announces something else than before.
                self._notify()
            self._become_ready()
            # Its first requests wait for that as well. An engine whose texts would all fail is not used.
            await self._artifacts.until_loaded(self.model)

    async def _prepare(self, stub: engine_pb2_grpc.EngineCoreServiceStub) -> None:
        """Until the engine is ready: then it does not wait for what others of the store are waiting for."""
        preparing = asyncio.ensure_future(self._artifacts.prepare(stub))
        arriving = asyncio.ensure_future(self._ready_mailbox.get())
        try:
            await asyncio.wait((preparing, arriving), return_when=asyncio.FIRST_COMPLETED)
            if preparing.done():
                preparing.result()
        finally:
            preparing.cancel()
            arriving.cancel()
            await asyncio.gather(preparing, arriving, return_exceptions=True)

    def _become_ready(self) -> None:
        if (
            self.state is EngineState.LOADING
            and self._ready_mailbox.was_read
            and self._steps.hung_step is None
        ):
            self._move_to(EngineState.READY)

    async def _dispatch(self, message: engine_pb2.ConnectResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "step":
            await self.requests.on_step(message.step)
        elif kind == "stats":
            load = load_report(message.stats, self._connection.ack.engine_epoch)
            self.requests.account.report(load, is_direct=True)
            self.requests.account.note_slots(message.stats.slot_digests)
        elif kind == "add_rejected":
            self.requests.on_rejected(message.add_rejected)
        elif kind == "heartbeat":
            self._take_heartbeat(message.heartbeat)
        elif kind == "already_finished":
            self._connection.session.on_finished(message.already_finished.handles)
        elif kind == "utility_result":
            self.calls.on_result(message.utility_result)
        elif kind == "adopted":
            self.requests.on_adopted(message.adopted)
        elif kind == "ready":
            # The first one of a session that began in a drain does not cancel it.
            is_cancelled = self.state is EngineState.DRAINING and self._ready_mailbox.has_arrived
            self._ready_mailbox.put(message.ready)
            if is_cancelled:
                self._move_to(EngineState.LOADING)
                self._become_ready()
        elif kind == "draining" and self.state in (EngineState.LOADING, EngineState.READY):
            self._move_to(EngineState.DRAINING)
        elif kind == "dead":
            raise StreamLost(f"the engine failed: {message.dead.reason}", StreamEnd.FAILED)

    def _take_heartbeat(self, heartbeat: session_pb2.Heartbeat) -> None:
        self.requests.account.hold(heartbeat.state in HELD_STATES)
        hung_for_s = self._steps.on_heartbeat(heartbeat)
        if hung_for_s is not None:
            raise StreamLost(
                f"the engine's loop hangs: step {heartbeat.step_number} has run for {hung_for_s:.1f} s",
                StreamEnd.HUNG,
            )
        self._become_ready()

    def _lose(self, lost: StreamLost) -> None:
        """The engine is lost, and with it the requests it has of this frontend."""
        was_in_use = self.state in IN_USE_STATES
        is_news = was_in_use or (self.state is not EngineState.DOWN and self.down_reason != str(lost))
        if is_news and not self._is_closing:
            logger.warning("engine lost", extra={"engine": self.address, "reason": str(lost)})
        self.down_reason = str(lost)
        self._steps.reset()
        loss = self._connection.lose(lost)
        if was_in_use:
            self._lost_at = self._clock.now()
        if self.state is not EngineState.DOWN:
            self._move_to(EngineState.DOWN)
        self.calls.lose(str(lost))
        self._on_loss(loss)
        # Their receivers look for another engine.
        self.requests.lose(loss)

    def _move_to(self, state: EngineState) -> None:
        if state not in _TRANSITIONS[self.state]:
            raise InvalidTransition(f"an engine cannot go from {self.state.value} to {state.value}")
        level = logging.DEBUG if state in (EngineState.CONNECTING, EngineState.LOADING) else logging.INFO
        logger.log(level, "engine state", extra={"engine": self.address, "state": state.value})
        self.state = state
        if state is EngineState.READY:
            self._backoff.note_connected()
        self._notify()

    def _notify(self) -> None:
        try:
            self._on_change(self)
        except Exception:
            # A bug in a listener in this frontend: the engine stays in use.
            logger.exception("handling an engine's state change failed", extra={"engine": self.address})


class ReadyMailbox:
    """Holds the newest `ready` of a session until it is read.

    An engine sends it at the start of a session and after changes. Reading one may take longer than one
    stream lasts.
    """

    def __init__(self) -> None:
        self.was_read = False  # one of this session
        self.is_loading = False  # the engine, as this session began: the message takes some time
        self._ready: session_pb2.Ready | None = None
        self._arrival = asyncio.Event()

    @property
    def has_arrived(self) -> bool:
        """Whether there was one in this session."""
        return self.was_read or self._ready is not None

    def put(self, ready: session_pb2.Ready) -> None:
        """Replace the message."""
        self._ready = ready
        self._arrival.set()

    async def get(self) -> session_pb2.Ready:
        """Wait for a message and return it. It stays in the mailbox until `note_read`."""
        while self._ready is None:
            self._arrival.clear()
            await self._arrival.wait()
        return self._ready

    def note_read(self, ready: session_pb2.Ready) -> None:
        """Remove `ready`, unless a newer one has replaced it."""
        self.was_read = True
        if self._ready is ready:
            self._ready = None

    def clear(self, *, is_loading: bool) -> None:
        """Remove the message of a session that is over; the engine sends another in the next one."""
        self._ready, self.was_read, self.is_loading = None, False, is_loading
