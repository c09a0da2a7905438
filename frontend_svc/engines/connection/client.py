"""Client of one engine: keeps it connected, tracks its state, and passes its outputs to open requests."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Sequence

from frontend_svc.engines.adoption.orphaned_requests import EngineAdoptions
from frontend_svc.engines.artifacts import ArtifactError, ArtifactStore
from frontend_svc.engines.connection.columns import MalformedStep, read_step
from frontend_svc.engines.connection.connection import (
    SCHEMA_REVISION,
    EngineConnection,
    FrontendIdentity,
    ReconnectBackoff,
)
from frontend_svc.engines.connection.health import (
    HELD_STATES,
    IN_USE_STATES,
    TRANSITIONS,
    EngineState,
    StepWatch,
)
from frontend_svc.engines.connection.stream import HEARTBEAT_S, StreamEnd, StreamLost
from frontend_svc.engines.connection.transport import EngineTransport, open_transport
from frontend_svc.engines.load_messages import load_report
from frontend_svc.engines.routing.account import EngineAccount
from frontend_svc.engines.routing.engine_info import EngineInfo
from frontend_svc.output.collector import Ending, EndReason
from frontend_svc.output.loss import Loss
from frontend_svc.output.processor import OutputProcessor, Receiver
from frontend_svc.tensors.sender import TensorSender
from frontend_svc.tensors.wire_tensor import WireTensor
from frontend_svc.text.model import ServedModel
from frontend_svc.text.tokenize.id_column import ID_BYTES
from service_kit.clock import Clock
from service_kit.errors import InvalidTransition, from_status
from triptych.engine.v1 import add_pb2, engine_pb2, engine_pb2_grpc, session_pb2, step_pb2

__all__ = ["SCHEMA_REVISION", "EngineClient", "EngineState", "FrontendIdentity"]

logger = logging.getLogger(__name__)

_CLOSE_DEADLINE_S = 1.0
# For so long this frontend tries to reach an engine that is no longer listed, to abort the requests that were
# moved to other engines.
_MAX_OWED_S = 30.0
# Each row has a reader that writes to its client in the same turn of the event loop, which takes about 50 us.
_MAX_ROWS_A_TURN = 64


class EngineClient:
    """Keeps a connection to one engine open until `close`, and the state of each request sent over it.

    `start`, then `add` and `abort` requests while `state` is READY, then `close`.
    A stream that breaks is reopened, and its requests continue. If that fails, their receivers get a `Loss`;
    later outputs of the engine for them are dropped and counted. `on_change` is called after each change of
    state, `on_add` after each `add`.
    """

    def __init__(
        self,
        address: str,
        identity: FrontendIdentity,
        artifacts: ArtifactStore,
        clock: Clock,
        *,
        on_change: Callable[[EngineClient], None],
        on_add: Callable[[EngineClient], None] = lambda client: None,
        heartbeat_s: float = HEARTBEAT_S,
        connect: Callable[[str], EngineTransport] = open_transport,
    ) -> None:
        self.address = address
        self.account = EngineAccount(address)
        self.state = EngineState.CONNECTING
        self.model: ServedModel | None = None
        self.engine_id = ""
        self.down_reason = ""  # of the last time it went down
        self.stale_outputs = 0  # rows of requests that had moved to other engines
        self._artifacts = artifacts
        self._clock = clock
        self._on_change = on_change
        self._on_add = on_add
        self._processor = OutputProcessor(on_end=self._on_request_end)
        self._tensors = TensorSender(identity.frontend_id, send=self._send_adds, fail=self._processor.fail)
        self._connection = EngineConnection(
            address, identity, clock, heartbeat_s=heartbeat_s, connect=connect, greet=self._tensors.greet
        )
        self._handles = itertools.count(1)
        self.adoptions = EngineAdoptions(self._connection, self._processor, self._handles, self.abort)
        self._steps = StepWatch()
        self._backoff = ReconnectBackoff(clock)
        self._ready_mailbox = ReadyMailbox()
        self._is_loaded = False
        self._lost_at = 0.0
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None

    @property
    def num_in_flight(self) -> int:
        """Requests of this frontend that the engine has not ended."""
        return len(self._processor)

    def has_room(self, num_requests: int) -> bool:
        """False if the engine would reject so many more requests of this session."""
        limit = self._connection.ack.max_inflight_adds
        return limit <= 0 or len(self._processor) + num_requests <= limit

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks in this engine's group."""
        return max(1, self._connection.ack.dp_size)

    @property
    def step_age_s(self) -> float:
        """Age of the engine's running step at its last heartbeat; 0 without one."""
        return self._steps.age_s

    @property
    def owed_s(self) -> float:
        """Seconds to keep this client although the engine is not listed, so that it aborts moved requests."""
        if not self._connection.session.num_moved:
            return 0.0
        return max(0.0, self._lost_at + _MAX_OWED_S - self._clock.now())

    def info(self) -> EngineInfo:
        return self.account.info()

    def start(self) -> None:
        """Connect in the background, and again whenever the engine is lost."""
        self._task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        """Send goodbye, end the requests in flight, and stop."""
        if self._task is None:
            return
        self._is_closing = True
        if self._connection.has_stream:
            goodbye = engine_pb2.Goodbye(
                reason="the frontend stops", leaves_adoptable=self.adoptions.are_left
            )
            self._connection.close_stream(goodbye)
            await asyncio.wait({self._task}, timeout=_CLOSE_DEADLINE_S)
        self._task.cancel()
        await asyncio.wait({self._task})

    def add(
        self,
        entries: Sequence[add_pb2.AddEntry],
        states: Sequence[Receiver],
        tensors: Collection[WireTensor] = (),
    ) -> list[int]:
        """Send requests together, with the `tensors` that they refer to by digest; returns their handles.

        The states are registered before anything is sent, so no output arrives without a receiver. Requests
        added when the stream has just ended are sent on the next one, or are lost with the engine's others.
        """
        is_ready = self._connection.has_stream and self.state is EngineState.READY
        assert is_ready, "only ready engines are picked"
        handles: list[int] = []
        for entry, state in zip(entries, states, strict=True):
            handle = next(self._handles) & 0xFFFFFFFF
            self._processor.register(handle, state)
            # They have the same prompt, which is computed for the first of them only.
            self.account.send(handle, 0 if handles else _num_pending_tokens(entry))
            entry.handle = handle
            handles.append(handle)
        self._tensors.send(entries, tensors, self._connection.stub)
        self._on_add(self)
        return handles

    def abort(self, handles: Iterable[int], reason: engine_pb2.AbortReason) -> None:
        """Abort requests in the engine and forget them here; those that have ended are skipped."""
        running = [handle for handle in handles if self._processor.forget(handle)]
        if running:
            self._send_abort(running, reason)

    def leave(self, handles: Iterable[int]) -> None:
        """Forget requests here only: the engine continues them, and another frontend may adopt them."""
        for handle in handles:
            self._processor.forget(handle)

    def end(self, handles: Iterable[int]) -> None:
        """Abort requests in the engine and end them for their readers; those that have ended are skipped."""
        running = [handle for handle in handles if self._processor.end(handle, Ending(EndReason.ABORT))]
        if running:
            self._send_abort(running, engine_pb2.ABORT_REASON_CLIENT)

    async def _run(self) -> None:
        try:
            while True:
                lost = await self._use_until_lost()
                # In this order: while the state is READY there are a stream and a channel.
                self._lose(lost)
                await self._connection.close()
                if self._is_closing:
                    return
                await asyncio.sleep(self._backoff.after(lost.end))
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
        self.engine_id = ack.engine_id
        self.account.meet(ack.engine_epoch)
        self.account.set_facts(dp_rank=ack.dp_rank)
        if not is_resumed:
            self._ready_mailbox.clear()
            self._is_loaded = False
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
        self._tensors.go_on(self._connection.stub)
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
        while True:
            ready = await self._ready_mailbox.get()
            self.model = await self._artifacts.model_of(ready, stub)
            self._ready_mailbox.note_read(ready)
            self.account.set_facts(block_size=ready.block_size)
            self._is_loaded = True
            self._become_ready()

    def _become_ready(self) -> None:
        if self.state is EngineState.LOADING and self._is_loaded and self._steps.hung_step is None:
            self._move_to(EngineState.READY)

    async def _dispatch(self, message: engine_pb2.ConnectResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "step":
            await self._take_step(message.step)
        elif kind == "stats":
            load = load_report(message.stats, self._connection.ack.engine_epoch)
            self.account.report(load, is_direct=True)
        elif kind == "add_rejected":
            rejected = message.add_rejected
            status = rejected.status
            error = from_status(status.code, status.message, status.details, rejected.retry_after_ms or None)
            self._connection.session.on_finished([rejected.handle])
            self._processor.fail(rejected.handle, error)
            self.adoptions.on_rejected(rejected.handle, error)
        elif kind == "heartbeat":
            self._take_heartbeat(message.heartbeat)
        elif kind == "already_finished":
            self._connection.session.on_finished(message.already_finished.handles)
        elif kind == "adopted":
            self.account.send(message.adopted.handle, 0)
            self.adoptions.on_adopted(message.adopted)
        elif kind == "ready":
            self._ready_mailbox.put(message.ready)
            if self.state is EngineState.DRAINING:
                self._move_to(EngineState.LOADING)
                self._become_ready()
        elif kind == "draining" and self.state in (EngineState.LOADING, EngineState.READY):
            self._move_to(EngineState.DRAINING)
        elif kind == "dead":
            raise StreamLost(f"the engine failed: {message.dead.reason}", StreamEnd.FAILED)

    async def _take_step(self, step: step_pb2.Step) -> None:
        """Pass a step to its readers, a few at a time: all of them at once would block the event loop."""
        columns = read_step(step)
        self.stale_outputs += self._connection.session.on_step(columns)
        for row in columns.cached:
            self.account.begin(columns.handles[row])
        for index, rows in enumerate(columns.slices(_MAX_ROWS_A_TURN)):
            if index:
                await asyncio.sleep(0)
            finished_here = self._processor.process(rows)
            if finished_here:
                self._send_abort(finished_here, engine_pb2.ABORT_REASON_STOP_STRING)
        self._steps.on_step(step.step_number, self._clock.now(), has_more=len(self._processor) > 0)

    def _take_heartbeat(self, heartbeat: session_pb2.Heartbeat) -> None:
        self.account.hold(heartbeat.state in HELD_STATES)
        hung_for_s = self._steps.on_heartbeat(heartbeat)
        if hung_for_s is not None:
            raise StreamLost(
                f"the engine's loop hangs: step {heartbeat.step_number} has run for {hung_for_s:.1f} s",
                StreamEnd.HUNG,
            )
        self._become_ready()

    def _send_adds(self, entries: Sequence[add_pb2.AddEntry]) -> None:
        if entries:
            self._connection.session.add(entries)
            message = engine_pb2.ConnectRequest()
            message.add.entries.extend(entries)
            self._connection.send(message)

    def _send_abort(self, handles: list[int], reason: engine_pb2.AbortReason) -> None:
        # Without a stream only the session records it, and the next stream sends it.
        abort = self._connection.session.abort(handles, reason)
        if abort is not None:
            self._connection.send(engine_pb2.ConnectRequest(abort=abort))

    def _on_request_end(self, handle: int) -> None:
        self.account.end(handle)
        self._tensors.forget(handle)

    def _lose(self, lost: StreamLost) -> None:
        """The engine is lost, and with it the requests it has of this frontend."""
        was_in_use = self.state in IN_USE_STATES
        is_news = was_in_use or (self.state is not EngineState.DOWN and self.down_reason != str(lost))
        if is_news and not self._is_closing:
            logger.warning("engine lost", extra={"engine": self.address, "reason": str(lost)})
        self.down_reason = str(lost)
        self.account.reset()
        self._steps.reset()
        loss = self._connection.lose(lost)
        if was_in_use:
            self._lost_at = self._clock.now()
        self._tensors.stop()
        self.adoptions.lose(str(lost))
        if self.state is not EngineState.DOWN:
            self._move_to(EngineState.DOWN)
        self._lose_all(loss)

    def _lose_all(self, loss: Loss) -> None:
        while len(self._processor):
            try:
                self._processor.lose_all(loss)
            except Exception:
                # A bug in this frontend that concerns one request. It is forgotten; the others get the loss.
                logger.exception("a request failed to handle a lost engine", extra={"engine": self.address})

    def _move_to(self, state: EngineState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise InvalidTransition(f"an engine cannot go from {self.state.value} to {state.value}")
        level = logging.DEBUG if state in (EngineState.CONNECTING, EngineState.LOADING) else logging.INFO
        logger.log(level, "engine state", extra={"engine": self.address, "state": state.value})
        self.state = state
        if state is EngineState.READY:
            self._backoff.note_ready()
        try:
            self._on_change(self)
        except Exception:
            # A bug in a listener in this frontend: the engine stays in use.
            logger.exception("handling an engine's state change failed", extra={"engine": self.address})


def _num_pending_tokens(entry: add_pb2.AddEntry) -> int:
    """Prompt and output tokens that the engine has to compute before the request's next token."""
    return (len(entry.prompt_token_ids) + len(entry.output_token_ids)) // ID_BYTES


class ReadyMailbox:
    """Holds the newest `ready` of a session until it is read.

    An engine sends it once per session, and reading it may take longer than one stream lasts.
    """

    def __init__(self) -> None:
        self._ready: session_pb2.Ready | None = None
        self._has_arrived = asyncio.Event()

    def put(self, ready: session_pb2.Ready) -> None:
        """Replace the message."""
        self._ready = ready
        self._has_arrived.set()

    async def get(self) -> session_pb2.Ready:
        """Wait for a message and return it. It stays in the mailbox until `note_read`."""
        while self._ready is None:
            self._has_arrived.clear()
            await self._has_arrived.wait()
        return self._ready

    def note_read(self, ready: session_pb2.Ready) -> None:
        """Remove `ready`, unless a newer one has replaced it."""
        if self._ready is ready:
            self._ready = None

    def clear(self) -> None:
        """Remove the message of a session that is over; the engine sends another in the next one."""
        self._ready = None
