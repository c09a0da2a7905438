"""One frontend's session: its handles, its numbered messages, its way into and out of the loop.

Outlives the stream that carries it where the frontend can resume it. Belongs to the event loop. Knows no gRPC
call and no time: `servicer.py` moves the messages and decides how long a session may be without a stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator

from engine_svc.admin import announce
from engine_svc.admin.calls import SessionCalls
from engine_svc.admin.lifecycle import EngineState
from engine_svc.admin.served_engine import ServedEngine
from engine_svc.convert import messages
from engine_svc.loop.mailbox import Outbox
from engine_svc.loop.step_output import StepOutput
from engine_svc.session.replay import ReplayBuffer
from engine_svc.session.requests import MAX_INFLIGHT_ADDS, SessionRequests
from engine_svc.session.stream import SessionStream
from service_kit.errors import (
    Aborted,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    ServiceError,
    Unavailable,
)
from triptych.engine.v1 import engine_pb2, session_pb2, utility_pb2

logger = logging.getLogger(__name__)

MAX_OUTBOX_BYTES = 8 * 1024 * 1024
# Heartbeats that a stream may take to send its last messages: 2 s.
_MAX_ENDING_BEATS = 4
# Heartbeats that go out while a frontend acknowledges nothing and has too much to acknowledge: 2 s.
_MAX_UNACKNOWLEDGED_BEATS = 4
# A frontend that causes more answers than it reads is cut off.
_MAX_UNSENT_MESSAGES = 8192
_MAX_ADDS_AT_ONCE = 64


class Session:
    """One frontend's messages, both ways, and what they mean for its requests.

    `on_finished` hears of every request that has ended, `on_end` of the end of the session itself.
    """

    def __init__(
        self,
        engine: ServedEngine,
        hello: session_pb2.Hello,
        *,
        number: int,
        on_finished: Callable[[], None],
        on_end: Callable[[Session], None] = lambda session: None,
        max_outbox_bytes: int = MAX_OUTBOX_BYTES,
        max_replay_bytes: int = announce.MAX_REPLAY_BYTES,
    ) -> None:
        self.frontend_id = hello.frontend_id
        self.frontend_epoch = hello.frontend_epoch
        self.session_id = hello.session_id
        self.number = number
        self.features = announce.common_features(hello)
        self.leaves_orphans = False  # whether its end leaves behind what others may adopt
        self._engine = engine
        self._on_finished = on_finished
        self._on_end = on_end
        self._stream: SessionStream | None = None
        self._tensors = engine.tensors.source(hello.frontend_id, hello.session_id)
        self._seq = 0
        self._last_end_seq = 0  # of the newest message that told of an end
        self._replay = ReplayBuffer(max_bytes=max_replay_bytes) if self.is_resumable else None
        self._unsent: deque[engine_pb2.ConnectResponse] = deque()
        self._sent_stats = session_pb2.Stats()
        self._changed = asyncio.Event()
        self._is_beat_due = False
        self._num_ending_beats = 0
        self._num_unacknowledged_beats = 0
        self._is_over = False
        self._error: ServiceError | None = None
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox(max_bytes=max_outbox_bytes, wake=self._wake)
        self._requests = SessionRequests(
            engine,
            number=number,
            is_resumable=self.is_resumable,
            outbox=self._outbox,
            tensors=self._tensors,
            send=self._send,
        )
        self._handles = self._requests.handles
        self._calls = SessionCalls(engine, self._send_result)
        if engine.core is not None:
            self.on_state(EngineState.READY)
        if engine.lifecycle.state is not EngineState.READY:
            self.on_state(engine.lifecycle.state)

    @property
    def num_in_flight(self) -> int:
        """Requests whose end has not been written yet."""
        return len(self._handles)

    @property
    def is_resumable(self) -> bool:
        """Whether the frontend knows how to go on after its stream broke."""
        return announce.RESUME in self.features

    @property
    def is_over(self) -> bool:
        """Whether nothing new is said any more."""
        return self._is_over

    @property
    def is_parked(self) -> bool:
        """Whether no stream carries it."""
        return self._stream is None

    @property
    def is_open(self) -> bool:
        """Whether an end of a request is still to come, or may have to be sent again."""
        if self._handles or self._replay is None:
            return bool(self._handles)
        return self.is_parked and self._replay.acknowledged < self._last_end_seq

    def can_resume(self, last_seq: int) -> bool:
        """Whether everything behind `last_seq` can still be sent."""
        return not self._is_over and self._replay is not None and self._replay.covers(last_seq)

    def attach(self, stream: SessionStream, *, last_seq: int = 0) -> None:
        """Go on upon `stream`, behind `last_seq`; a stream that carried it before is ended."""
        if self._stream is not None:
            self._stream.replace()
            self._changed.set()
        self._stream = stream
        self._num_ending_beats = 0
        self._num_unacknowledged_beats = 0
        self._is_beat_due = False
        if self._replay is not None:
            self._replay.acknowledge(last_seq)

    def detach(self, stream: SessionStream) -> bool:
        """`stream` carries nothing any more; returns False where it did not anyway."""
        if self._stream is not stream:
            return False
        self._stream = None
        self._changed.set()
        return True

    def is_attached_to(self, stream: SessionStream) -> bool:
        """Whether what comes on `stream` is still meant for this session."""
        return self._stream is stream

    async def take(self, message: engine_pb2.ConnectRequest) -> None:
        """Act on one message of the frontend. What is not known is ignored, as is all after the end."""
        if self._is_over:
            return
        match message.WhichOneof("message"):
            case "add":
                for index, entry in enumerate(message.add.entries, start=1):
                    self._requests.add(entry)
                    if index % _MAX_ADDS_AT_ONCE == 0 or entry.HasField("prompt_embeds"):
                        # Very many or very large prompts in one message do not let other sessions wait.
                        await asyncio.sleep(0)
                self._tensors.release()
            case "host_proof":
                if not self._tensors.verify_host(message.host_proof.digest):
                    self.end(PermissionDenied("host_proof is no proof", reason="HOST_NOT_PROVEN"))
            case "abort":
                await self._requests.abort(message.abort)
            case "adopt":
                for wanted in message.adopt.entries:
                    self._requests.adopt(wanted)
            case "utility":
                self._calls.begin(message.utility)
            case "goodbye":
                logger.info("frontend says goodbye", extra={"frontend_id": self.frontend_id})
                self.leaves_orphans = message.goodbye.leaves_adoptable
                self.end()
            case "ack":
                self._acknowledge(message.ack.last_seq)
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
        if self._stream is None:
            return
        if self._is_over or self._outbox.has_overflowed:
            self._num_ending_beats += 1
            if self._num_ending_beats > _MAX_ENDING_BEATS:
                # The writer waits for a frontend that lives and does not read: nothing else wakes it.
                self._stream.abandon()
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
            num_left = len(self._handles)
            left = Unavailable(f"engine stops, {num_left} requests are left", reason="ENGINE_DRAINED")
            self.end(left if num_left else None)

    def end(self, error: ServiceError | None = None) -> None:
        """Let `write_messages` write what waits and return, or raise `error`. The first end counts."""
        if not self._is_over:
            self._is_over, self._error = True, error
            self._changed.set()
            self._on_end(self)

    def close(self) -> int:
        """Abort what still runs and nobody may adopt; nothing is sent any more. Returns how many."""
        self._outbox.close()
        self._calls.close()
        num_aborted = self._requests.close()
        self._tensors.close()
        return num_aborted

    async def write_messages(self, stream: SessionStream, *, is_resumed: bool = False) -> None:
        """Write hello_ack, what is to be sent again, then all for this frontend, numbered without gaps.

        Returns when the session is over or has left `stream`; raises what it was ended with.
        """
        hello_ack = announce.hello_ack(
            self._engine,
            MAX_INFLIGHT_ADDS,
            features=self.features,
            is_resumed=is_resumed,
            host_probe=self._tensors.probe_name,
        )
        writer = stream.writer
        writer.start(engine_pb2.ConnectResponse(hello_ack=hello_ack).SerializeToString())
        await writer.finish()
        for message in self._replay.messages() if self._replay is not None else ():
            writer.start(message)
            await writer.finish()
            if self._stream is not stream:
                return
        while self._stream is stream:
            self._changed.clear()
            is_over = self._is_over
            for message in self._waiting():
                writer.start(message)
                await writer.finish()
                if self._stream is not stream:
                    return
            if is_over:
                break
            self._end_if_unread()
            if not self._is_over:
                stream.is_idle = True
                await self._changed.wait()
                stream.is_idle = False
                await writer.finish()
        if self._stream is not stream:
            return
        failure = self._engine.failure
        if failure is not None:
            dead = engine_pb2.Dead(reason=failure.reason, exit_code=failure.exit_code, handles=self._handles)
            writer.start(self._numbered(engine_pb2.ConnectResponse(dead=dead)))
            await writer.finish()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                # This frame is in its traceback, and would keep it, and with it the session.
                del error

    def _waiting(self) -> Iterator[bytes]:
        """What there is to say now. A message that was handed out once is kept for a replay, not repeated."""
        # That an engine is ready is told before any output; but no step waits for what is asked after it.
        has_step, unsent = self._outbox.has_unread or self._is_over, self._unsent
        yield from (self._numbered(unsent.popleft()) for _ in range(len(unsent)) if unsent)
        try:
            # One step, in as many messages as it takes. Behind each of them the frontend may have enough.
            while has_step and not self._holds_back and (step := self._outbox.take()) is not None:
                yield self._step(step)
                if not self._outbox.has_rest:
                    break
        except Exception as error:  # noqa: BLE001  Whatever it is, the step is lost by it.
            self._break_off(error)
        if self._is_beat_due:
            self._is_beat_due = False
            self._num_unacknowledged_beats += self._holds_back
            for sign in self._signs_of_life():
                yield self._numbered(sign)

    def _step(self, step: StepOutput) -> bytes:
        ended = [step.handles[finished.row] for finished in step.finished]
        stop_token_ids = {handle: self._handles[handle].stop_token_ids for handle in ended}
        message = self._numbered(engine_pb2.ConnectResponse(step=messages.to_step(step, stop_token_ids)))
        # Whatever becomes of the stream: from here on, the replay answers for their ends.
        self._requests.end(ended)
        if ended:
            self._last_end_seq = self._seq
            self._on_finished()
        return message

    @property
    def _holds_back(self) -> bool:
        """Whether steps wait in the outbox, which has a limit of its own, for acknowledgements."""
        return self._replay is not None and self._replay.is_full and not self._is_over

    def _acknowledge(self, last_seq: int) -> None:
        if self._replay is None:
            return
        was_full, before = self._replay.is_full, self._replay.acknowledged
        self._replay.acknowledge(last_seq)
        if self._replay.acknowledged > before:
            self._num_unacknowledged_beats = 0
        if was_full:
            self._changed.set()

    def _end_if_unread(self) -> None:
        if self._outbox.has_overflowed:
            self.end(ResourceExhausted("frontend leaves its steps unread", reason="SLOW_READER"))
        elif self._replay is not None and self._num_unacknowledged_beats > _MAX_UNACKNOWLEDGED_BEATS:
            unread = f"frontend leaves {self._replay.size_bytes} bytes of messages unacknowledged"
            self.end(ResourceExhausted(unread, reason="SLOW_READER"))

    def _signs_of_life(self) -> Iterator[engine_pb2.ConnectResponse]:
        """How the loop gets on, whether or not it can say so itself; and the load, where it has changed."""
        loop_stats = self._engine.stats_snapshot.read()
        heartbeat = announce.heartbeat(self._engine, loop_stats)
        heartbeat.last_seq = self._seq
        yield engine_pb2.ConnectResponse(heartbeat=heartbeat)
        stats = announce.stats(loop_stats)
        if stats != self._sent_stats:
            self._sent_stats = stats
            yield engine_pb2.ConnectResponse(stats=stats)

    def _send_result(self, result: utility_pb2.UtilityResult) -> None:
        self._send(engine_pb2.ConnectResponse(utility_result=result))

    def _send(self, message: engine_pb2.ConnectResponse) -> None:
        if len(self._unsent) >= _MAX_UNSENT_MESSAGES:
            self._unsent.clear()
            unread = f"frontend left {_MAX_UNSENT_MESSAGES} messages unread"
            self.end(ResourceExhausted(unread, reason="SLOW_READER"))
        elif not self._is_over:
            self._unsent.append(message)
            self._changed.set()

    def _numbered(self, message: engine_pb2.ConnectResponse) -> bytes:
        """`message` as it goes over the wire, now and in a replay."""
        self._seq += 1
        message.seq = self._seq
        serialized = message.SerializeToString()
        if self._replay is not None:
            self._replay.keep(self._seq, serialized)
        return serialized

    def _wake(self) -> None:
        """Called in the engine thread, until the outbox is closed."""
        self._loop.call_soon_threadsafe(self._woken)

    def _woken(self) -> None:
        try:
            is_written = self._write_step()
        except Exception as error:  # noqa: BLE001  The loop of events would log it and go on without the step.
            self._break_off(error)
            return
        if not is_written:
            self._changed.set()
        if self._stream is None and self._outbox.has_overflowed:
            self.end(Aborted("more was computed than is kept for a lost stream", reason="REPLAY_OVERFLOW"))

    def _write_step(self) -> bool:
        """Write the waiting step if nothing else waits; False where `write_messages` has to do it."""
        stream = self._stream
        if stream is None or not stream.is_idle or self._changed.is_set() or not stream.writer.is_free():
            return False
        if self._holds_back or self._outbox.has_overflowed:
            return False
        step = self._outbox.take()
        return step is None or (stream.writer.start(self._step(step)) and not self._outbox.has_rest)

    def _break_off(self, error: Exception) -> None:
        """A step was taken and is lost by a bug of ours. Were the next one told, nobody would miss it."""
        logger.error("step could not be told", exc_info=error, extra={"frontend_id": self.frontend_id})
        self._outbox.close()
        self.end(Aborted("a step could not be told: internal error", reason="STEP_LOST"))
