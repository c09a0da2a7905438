"""One frontend's session: its handles, its numbered messages, its way into and out of the loop.

Belongs to the event loop. Knows no gRPC call: `servicer.py` moves the messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass

from engine_svc import announce, convert
from engine_svc.lifecycle import EngineState
from engine_svc.mailbox import Abort, Add, Outbox
from engine_svc.served_engine import LoadedCore, ServedEngine
from service_kit.errors import (
    AlreadyExists,
    InvalidArgument,
    ResourceExhausted,
    ServiceError,
    Unavailable,
    Unimplemented,
)
from triptych.engine.v1 import add_pb2, engine_pb2, session_pb2, utility_pb2

logger = logging.getLogger(__name__)

MAX_INFLIGHT_ADDS = 4096
MAX_OUTBOX_BYTES = 8 * 1024 * 1024
# Heartbeats that a stream may take to send its last messages: 2 s.
_MAX_ENDING_BEATS = 4
# A frontend that causes more answers than it reads is cut off.
_MAX_UNSENT_MESSAGES = 8192
_MAX_ADDS_AT_ONCE = 64
_MAX_REMEMBERED_HANDLES = 8192
_RETRY_AFTER_MS = 1000


@dataclass(slots=True)
class _InFlight:
    request_id: str
    attempt: int
    stop_token_ids: frozenset[int]
    is_aborted: bool = False


class Session:
    """The requests of one frontend, from ADD to finished row. Each handle gets exactly one end."""

    def __init__(
        self,
        engine: ServedEngine,
        hello: session_pb2.Hello,
        *,
        number: int,
        on_finished: Callable[[], None],
        abandon: Callable[[], object],
        max_outbox_bytes: int = MAX_OUTBOX_BYTES,
    ) -> None:
        self.frontend_id = hello.frontend_id
        self.frontend_epoch = hello.frontend_epoch
        self.session_id = hello.session_id
        self._engine = engine
        self._number = number
        self._on_finished = on_finished
        self._seq = 0
        self._in_flight: dict[int, _InFlight] = {}
        self._finished_handles: dict[int, None] = {}  # the latest, in order: a bounded memory
        self._unsent: deque[engine_pb2.ConnectResponse] = deque()
        self._sent_stats = session_pb2.Stats()
        self._changed = asyncio.Event()
        self._abandon = abandon
        self._is_beat_due = False
        self._num_ending_beats = 0
        self._is_over = False
        self._error: ServiceError | None = None
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox(max_bytes=max_outbox_bytes, wake=self._wake)
        if engine.core is not None:
            self.on_state(EngineState.READY)
        if engine.lifecycle.state is not EngineState.READY:
            self.on_state(engine.lifecycle.state)

    @property
    def num_in_flight(self) -> int:
        """Requests whose end has not been written yet."""
        return len(self._in_flight)

    async def take(self, message: engine_pb2.ConnectRequest) -> None:
        """Act on one message of the frontend. What is not known is ignored."""
        match message.WhichOneof("message"):
            case "add":
                for index, entry in enumerate(message.add.entries, start=1):
                    self._add(entry)
                    if index % _MAX_ADDS_AT_ONCE == 0:
                        # Very many prompts in one message are no reason to let other sessions wait.
                        await asyncio.sleep(0)
            case "abort":
                self._abort(message.abort)
            case "utility":
                self._refuse_utility(message.utility)
            case "goodbye":
                logger.info("frontend says goodbye", extra={"frontend_id": self.frontend_id})
                self.end()
            case "ack":
                # There is no replay yet, so nothing is kept that an ack could release.
                return
            case "hello":
                self.end(
                    InvalidArgument("hello is the first message of a session and comes once", field="hello")
                )
            case unknown:
                logger.info(
                    "unknown message ignored", extra={"frontend_id": self.frontend_id, "kind": str(unknown)}
                )

    def beat(self) -> None:
        """Have the next heartbeat sent. One that was not sent yet is not sent twice."""
        if self._is_over or self._outbox.has_overflowed:
            self._num_ending_beats += 1
            if self._num_ending_beats > _MAX_ENDING_BEATS:
                # The writer waits for a frontend that lives and does not read: nothing else wakes it.
                self._abandon()
            return
        self._is_beat_due = True
        self._changed.set()

    def on_state(self, state: EngineState) -> None:
        """Tell the frontend what becomes of the engine."""
        core, failure = self._engine.core, self._engine.failure
        if state is EngineState.READY and core is not None:
            self._send(engine_pb2.ConnectResponse(ready=announce.ready(self._engine, core.facts)))
        elif state is EngineState.DRAINING:
            deadline_ms = int(self._engine.drain_deadline_s * 1000)
            self._send(engine_pb2.ConnectResponse(draining=engine_pb2.Draining(deadline_ms=deadline_ms)))
        elif state is EngineState.FAILED and failure is not None:
            self.end(Unavailable(f"engine failed: {failure.reason}", reason="ENGINE_DEAD"))
        elif state is EngineState.STOPPED:
            self.end()

    def end(self, error: ServiceError | None = None) -> None:
        """Let `responses` send what waits and return, or raise `error`. The first end counts."""
        if not self._is_over:
            self._is_over, self._error = True, error
            self._changed.set()

    def close(self) -> None:
        """Abort what still runs; nothing is sent any more."""
        self._outbox.close()
        for entry in self._in_flight.values():
            self._engine.inbox.put(Abort(entry.request_id, "session_lost"))
        self._in_flight.clear()

    async def responses(self) -> AsyncGenerator[engine_pb2.ConnectResponse, None]:
        """hello_ack, then everything for this frontend, numbered without gaps, until the session ends."""
        yield engine_pb2.ConnectResponse(hello_ack=announce.hello_ack(self._engine, MAX_INFLIGHT_ADDS))
        while True:
            self._changed.clear()
            is_over = self._is_over
            # Before the steps: whoever adds early must hear that the engine is ready before any output.
            while self._unsent:
                yield self._numbered(self._unsent.popleft())
            step = self._outbox.take()
            if step is not None:
                ended = [step.handles[finished.row] for finished in step.finished]
                stop_token_ids = {handle: self._in_flight[handle].stop_token_ids for handle in ended}
                yield self._numbered(engine_pb2.ConnectResponse(step=convert.to_step(step, stop_token_ids)))
                self._forget(ended)
            if self._is_beat_due:
                self._is_beat_due = False
                for message in self._signs_of_life():
                    yield self._numbered(message)
            if self._outbox.has_overflowed:
                raise ResourceExhausted("frontend leaves its steps unread", reason="SLOW_READER")
            if is_over:
                break
            await self._changed.wait()
        failure = self._engine.failure
        if failure is not None:
            dead = engine_pb2.Dead(
                reason=failure.reason, exit_code=failure.exit_code, handles=self._in_flight
            )
            yield self._numbered(engine_pb2.ConnectResponse(dead=dead))
        if self._error is not None:
            raise self._error

    def _signs_of_life(self) -> Iterator[engine_pb2.ConnectResponse]:
        """How the loop gets on, whether or not it can say so itself; and the load, where it has changed."""
        figures = self._engine.board.read()
        heartbeat = announce.heartbeat(self._engine, figures)
        heartbeat.last_seq = self._seq
        yield engine_pb2.ConnectResponse(heartbeat=heartbeat)
        stats = announce.stats(figures)
        if stats != self._sent_stats:
            self._sent_stats = stats
            yield engine_pb2.ConnectResponse(stats=stats)

    def _add(self, entry: add_pb2.AddEntry) -> None:
        try:
            self._accept(entry)
        except ServiceError as error:
            rejected = engine_pb2.AddRejected(
                handle=entry.handle,
                attempt=entry.attempt,
                status=convert.to_error_status(error),
                retry_after_ms=error.retry_after_ms or 0,
            )
            self._send(engine_pb2.ConnectResponse(add_rejected=rejected))

    def _accept(self, entry: add_pb2.AddEntry) -> None:
        core = self._admitting_core()
        if entry.handle in self._in_flight:
            raise AlreadyExists(f"handle {entry.handle} is in use", reason="HANDLE_IN_USE")
        if len(self._in_flight) >= MAX_INFLIGHT_ADDS:
            raise ResourceExhausted(
                f"session has {len(self._in_flight)} requests in flight, the limit is {MAX_INFLIGHT_ADDS}",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        now = self._engine.clock.now()
        request = convert.to_request(entry, session_number=self._number, facts=core.facts, now=now)
        refusal = core.refusal(request)
        if refusal is not None:
            raise InvalidArgument(refusal, reason="NEVER_FITS")
        core.prepare(request)
        deadline_at = convert.to_deadline(entry, now)
        if not self._engine.inbox.put(Add(request, self._outbox, entry.handle, deadline_at)):
            raise ResourceExhausted("engine's inbox is full", retry_after_ms=_RETRY_AFTER_MS)
        stop_token_ids = frozenset(entry.sampling.stop_token_ids)
        self._in_flight[entry.handle] = _InFlight(request.request_id, entry.attempt, stop_token_ids)

    def _admitting_core(self) -> LoadedCore:
        state, core = self._engine.lifecycle.state, self._engine.core
        if state is EngineState.READY and core is not None:
            return core
        raise Unavailable(
            f"engine is {state.value}", reason=f"ENGINE_{state.name}", retry_after_ms=_RETRY_AFTER_MS
        )

    def _abort(self, abort: engine_pb2.Abort) -> None:
        late, cause = [], convert.to_abort_cause(abort.reason)
        for index, handle in enumerate(abort.handles):
            entry = self._in_flight.get(handle)
            if entry is None:
                if handle in self._finished_handles:
                    late.append(handle)
            elif not entry.is_aborted and (
                index >= len(abort.attempts) or abort.attempts[index] == entry.attempt
            ):
                entry.is_aborted = True
                self._engine.inbox.put(Abort(entry.request_id, cause))
        if late:
            self._send(engine_pb2.ConnectResponse(already_finished=engine_pb2.AlreadyFinished(handles=late)))

    def _refuse_utility(self, call: utility_pb2.UtilityCall) -> None:
        error = Unimplemented(f"call {call.WhichOneof('call') or 'unknown'} is not served by this engine")
        result = utility_pb2.UtilityResult(call_id=call.call_id, failure=convert.to_error_status(error))
        self._send(engine_pb2.ConnectResponse(utility_result=result))

    def _send(self, message: engine_pb2.ConnectResponse) -> None:
        if len(self._unsent) >= _MAX_UNSENT_MESSAGES:
            self._unsent.clear()
            self.end(
                ResourceExhausted(
                    f"frontend left {_MAX_UNSENT_MESSAGES} messages unread", reason="SLOW_READER"
                )
            )
        elif not self._is_over:
            self._unsent.append(message)
            self._changed.set()

    def _numbered(self, message: engine_pb2.ConnectResponse) -> engine_pb2.ConnectResponse:
        self._seq += 1
        message.seq = self._seq
        return message

    def _wake(self) -> None:
        """Called in the engine thread, until the outbox is closed."""
        self._loop.call_soon_threadsafe(self._changed.set)

    def _forget(self, handles: list[int]) -> None:
        for handle in handles:
            del self._in_flight[handle]
            self._finished_handles[handle] = None
        while len(self._finished_handles) > _MAX_REMEMBERED_HANDLES:
            del self._finished_handles[next(iter(self._finished_handles))]
        if handles:
            self._on_finished()
