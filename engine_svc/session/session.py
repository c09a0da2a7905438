"""Server side of one frontend's connection: receives its messages and streams numbered step messages.

A session outlives its stream if the frontend can resume it. Runs on the event loop. Knows no gRPC call and no
time: `servicer.py` moves the messages and decides how long a session may be without a stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from engine_svc.admin import announce
from engine_svc.admin.calls import SessionCalls
from engine_svc.admin.lifecycle import EngineState
from engine_svc.admin.served_engine import ServedEngine
from engine_svc.adoption.orphaned_requests import OrphanedRequests
from engine_svc.convert import messages
from engine_svc.loop.mailbox import Outbox
from engine_svc.loop.step_output import StepOutput
from engine_svc.session.requests import MAX_INFLIGHT_ADDS, SessionRequests
from triptych.engine.v1 import engine_pb2, session_pb2, utility_pb2
from triptych_kit.eager_writer import EagerWriter
from triptych_kit.errors import (
    Aborted,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    ServiceError,
    Unavailable,
)
from triptych_kit.resumable_stream import Link, ReplayLog, ResumableStream
from triptych_kit.security.identity import current_identity

logger = logging.getLogger(__name__)

MAX_OUTBOX_BYTES = 8 * 1024 * 1024
# Heartbeats that an ending stream may take to send its last messages: 2 s.
_MAX_ENDING_BEATS = 4
# Heartbeats sent while the replay buffer is full and the frontend acknowledges nothing: 2 s.
_MAX_UNACKNOWLEDGED_BEATS = 4
# A frontend that causes more replies than it reads is cut off.
_MAX_UNSENT_MESSAGES = 8192
_MAX_ADDS_AT_ONCE = 64
# How long a replaced stream may take to end by itself.
_MAX_TAKEOVER_S = 1.0


class SessionLink(Link):
    """One Connect stream of a session.

    abandon: ends the call, also while it is blocked in a write.  write: the call's write function.
    after: the last message that the frontend has received.
    """

    def __init__(
        self,
        abandon: Callable[[], object],
        write: Callable[[bytes], Coroutine[Any, Any, object]],
        *,
        after: int = 0,
    ) -> None:
        super().__init__(after=after)
        self.abandon = abandon
        self.writer = EagerWriter(write)
        # `write_messages` has nothing to write: a step is then written at once, without a task switch.
        self.is_idle = False
        self.is_beat_due = False
        self.num_ending_beats = 0
        self.num_unacknowledged_beats = 0  # heartbeats since the last acknowledgement, with a full replay log


class Session:
    """One frontend's messages in both directions.

    on_finished: called when requests have finished.  on_end: called when the session itself ends.
    """

    def __init__(
        self,
        engine: ServedEngine,
        orphaned_requests: OrphanedRequests,
        hello: session_pb2.Hello,
        *,
        number: int,
        on_finished: Callable[[], None],
        on_end: Callable[[Session], None] = lambda session: None,
        max_outbox_bytes: int = MAX_OUTBOX_BYTES,
        max_replay_bytes: int = announce.MAX_REPLAY_BYTES,
    ) -> None:
        self.hello = hello
        self.owner = current_identity()
        self.number = number
        self.features = announce.common_features(hello)
        self.num_sent_bytes = 0
        self.leaves_orphans = False  # whether other sessions may adopt its requests after its end
        self.stream: ResumableStream[bytes, SessionLink] = ResumableStream(
            ReplayLog(max_bytes=max_replay_bytes), is_resumable=announce.RESUME in self.features
        )
        self._engine = engine
        self._on_finished = on_finished
        self._on_end = on_end
        self._tensors = engine.tensors.source(hello.frontend_id, hello.session_id)
        self._last_end_seq = 0  # seq of the newest message with a final output
        self._unsent: deque[engine_pb2.ConnectResponse] = deque()
        self._sent_stats = session_pb2.Stats()
        loop = asyncio.get_running_loop()

        def wake() -> None:
            """Called on the engine thread, until the outbox is closed."""
            loop.call_soon_threadsafe(self._on_output)

        self._outbox = Outbox(max_bytes=max_outbox_bytes, wake=wake)
        self._requests = SessionRequests(
            engine,
            orphaned_requests,
            number=number,
            fleet=self.owner.tenant,
            is_resumable=self.stream.is_resumable,
            takes_segments=announce.INPUT_SEGMENTS in self.features,
            outbox=self._outbox,
            tensors=self._tensors,
            send=self._send,
        )
        self._calls = SessionCalls(engine, self._send_result)
        if engine.core is not None:
            self.on_state(EngineState.READY)
        if engine.lifecycle.state is not EngineState.READY:
            self.on_state(engine.lifecycle.state)

    @property
    def num_in_flight(self) -> int:
        """Requests whose final output has not been written yet."""
        return self._requests.num_in_flight

    @property
    def num_unread_bytes(self) -> int:
        """Outputs that no message has taken yet."""
        return self._outbox.num_unread_bytes

    @property
    def is_parked(self) -> bool:
        """Whether it has no stream."""
        return self.stream.link is None

    @property
    def is_open(self) -> bool:
        """Whether a final output is still to come, or may have to be sent again."""
        is_end_unacknowledged = self.stream.log.first_seq <= self._last_end_seq
        return self.num_in_flight > 0 or (self.is_parked and is_end_unacknowledged)

    def refusal_to_resume(self, last_seq: int) -> session_pb2.ResumeRefusal:
        """Why it cannot be continued after `last_seq`; UNSPECIFIED if it can."""
        stream = self.stream
        if stream.is_over or not stream.is_resumable:
            return session_pb2.RESUME_REFUSAL_NO_SESSION
        if stream.log.can_resume(last_seq):
            return session_pb2.RESUME_REFUSAL_UNSPECIFIED
        if last_seq > stream.log.last_seq:
            return session_pb2.RESUME_REFUSAL_NEVER_SENT
        return session_pb2.RESUME_REFUSAL_NOT_KEPT

    def attach(self, link: SessionLink) -> None:
        """Continue over `link`. A replaced one ends by itself unless it is blocked in a write."""
        replaced = self.stream.attach(link)
        if replaced is not None:
            asyncio.get_running_loop().call_later(_MAX_TAKEOVER_S, replaced.abandon)
        self.stream.acknowledge(link.seq)

    async def take(self, message: engine_pb2.ConnectRequest) -> None:
        """Handle one message of the frontend. Ignores unknown messages, and all messages after the end."""
        if self.stream.is_over:
            return
        match message.WhichOneof("message"):
            case "add":
                for index, entry in enumerate(message.add.entries, start=1):
                    self._requests.add(entry)
                    if index % _MAX_ADDS_AT_ONCE == 0 or self._tensors.has_taken:
                        # Other sessions must not wait for a message with many or very large prompts.
                        await asyncio.sleep(0)
                self._tensors.release()
            case "host_proof":
                if not self._tensors.verify_host(message.host_proof.digest):
                    self.end(PermissionDenied("host_proof does not match", reason="HOST_NOT_PROVEN"))
            case "abort":
                await self._requests.abort(message.abort)
            case "cancel_turn":
                self._requests.cancel_turn(message.cancel_turn)
            case "adopt":
                for wanted in message.adopt.entries:
                    self._requests.adopt(wanted)
            case "utility":
                self._calls.begin(message.utility)
            case "goodbye":
                logger.info("goodbye received", extra={"frontend_id": self.hello.frontend_id})
                self.leaves_orphans = message.goodbye.leaves_adoptable
                self.end()
            case "ack":
                self._acknowledge(message.ack.last_seq)
            case "hello":
                self.end(
                    InvalidArgument("hello is the first message of a session and comes once", field="hello")
                )
            case kind:
                self._take_note(message, str(kind))

    def _take_note(self, message: engine_pb2.ConnectRequest, kind: str) -> None:
        """A message that a feature may read. As it has no answer, one that is invalid is ignored."""
        try:
            note = self._engine.features.read(message)
        except InvalidArgument as error:
            logger.info("invalid message ignored", extra={"kind": kind, "reason": error.message})
            return
        if note is not None:
            self._requests.note(*note)
            return
        frontend_id = self.hello.frontend_id
        logger.info("unknown message ignored", extra={"frontend_id": frontend_id, "kind": kind})

    def beat(self) -> None:
        """Send a heartbeat; at most one is pending at a time."""
        link = self.stream.link
        if link is None:
            return
        if self.stream.is_over or self._outbox.has_overflowed:
            link.num_ending_beats += 1
            if link.num_ending_beats > _MAX_ENDING_BEATS:
                # The writer is blocked by a frontend that is connected but does not read.
                link.abandon()
            return
        link.is_beat_due = True
        self.stream.wake()

    def on_state(self, state: EngineState) -> None:
        """Send the frontend the engine's new state."""
        core, failure = self._engine.core, self._engine.failure
        if state is EngineState.READY and core is not None:
            self._send(engine_pb2.ConnectResponse(ready=announce.ready(self._engine, core.facts)))
        elif state is EngineState.DRAINING:
            self._requests.take_no_segments()
            deadline_ms = int(self._engine.drain_deadline_s * 1000)
            self._send(engine_pb2.ConnectResponse(draining=engine_pb2.Draining(deadline_ms=deadline_ms)))
        elif state is EngineState.FAILED and failure is not None:
            self.end(Unavailable(f"engine failed: {failure.reason}", reason="ENGINE_DEAD"))
        elif state is EngineState.STOPPED:
            num_left = self.num_in_flight
            left = Unavailable(f"engine stops, {num_left} requests are left", reason="ENGINE_DRAINED")
            self.end(left if num_left else None)

    def end(self, error: ServiceError | None = None) -> None:
        """Have `write_messages` write what is pending, then return or raise `error`. The first end counts."""
        if self.stream.end(error):
            self._on_end(self)

    def close(self) -> int:
        """Abort the requests in flight that no session may adopt, and return how many. Sends nothing more."""
        self._outbox.close()
        self._calls.close()
        num_aborted = self._requests.close()
        self._tensors.close()
        return num_aborted

    async def write_messages(
        self,
        link: SessionLink,
        *,
        is_resumed: bool = False,
        refusal: session_pb2.ResumeRefusal = session_pb2.RESUME_REFUSAL_UNSPECIFIED,
    ) -> None:
        """Write hello_ack, the messages that the frontend has missed, then all further ones.

        refusal: why this is not the session that the frontend wanted to resume.

        Returns when the session is over or has left `link`; raises the error it was ended with.
        """
        stream, writer = self.stream, link.writer
        hello_ack = announce.hello_ack(
            self._engine,
            MAX_INFLIGHT_ADDS,
            features=self.features,
            is_resumed=is_resumed,
            refusal=refusal,
            host_probe=self._tensors.probe_name,
        )
        writer.start(engine_pb2.ConnectResponse(hello_ack=hello_ack).SerializeToString())
        await writer.finish()
        await self._write_appended(link)
        while stream.link is link:
            is_over = stream.is_over
            for _ in self._append_pending(link):
                await self._write_appended(link)
                if stream.link is not link:
                    return
            if is_over:
                break
            self._end_if_unread(link)
            if not stream.is_over:
                link.is_idle = True
                await stream.changed()
                link.is_idle = False
                await writer.finish()
        if stream.link is not link:
            return
        failure = self._engine.failure
        if failure is not None:
            handles = self._requests.handles()
            dead = engine_pb2.Dead(reason=failure.reason, exit_code=failure.exit_code, handles=handles)
            self._append(engine_pb2.ConnectResponse(dead=dead))
            await self._write_appended(link)
        error, stream.error = stream.error, None
        if error is not None:
            try:
                raise error
            finally:
                # The error's traceback refers to this frame: the cycle would keep the session alive.
                del error

    async def _write_appended(self, link: SessionLink) -> None:
        while self.stream.link is link and (message := self.stream.take(link)) is not None:
            link.writer.start(message)
            await link.writer.finish()

    def _append_pending(self, link: SessionLink) -> Iterator[None]:
        """Append the messages to send now, one before each `yield`: what is not sent yet may change."""
        # READY is sent before any output; but no step waits for messages that are queued after it.
        has_step, unsent = self._outbox.has_unread or self.stream.is_over, self._unsent
        for _ in range(len(unsent)):
            if unsent:
                self._append(unsent.popleft())
                yield
        try:
            # One step, in as many messages as it takes. The log may be full after each of them.
            while has_step and not self._holds_back and (step := self._outbox.take()) is not None:
                self._append_step(step)
                yield
                if not self._outbox.has_rest:
                    break
        except Exception as error:  # noqa: BLE001  Any error loses the step.
            self._break_off(error)
        if link.is_beat_due:
            link.is_beat_due = False
            link.num_unacknowledged_beats += self._holds_back
            for message in self._heartbeat_messages():
                self._append(message)
                yield

    def _append_step(self, step: StepOutput) -> None:
        ends = [(step.handles[finished.row], finished.turn_ended) for finished in step.finished]
        ended = [handle for handle, turn_ended in ends if not turn_ended]
        stop_token_ids = self._requests.stop_token_ids(handle for handle, _ in ends)
        now = self._engine.clock.now()
        self._append(
            engine_pb2.ConnectResponse(
                step=messages.to_step(step, stop_token_ids, self._engine.features, now)
            )
        )
        # The log holds their final outputs now, even if the stream breaks.
        self._requests.end(ended)
        self._requests.end_turns(handle for handle, turn_ended in ends if turn_ended)
        if ended:
            self._last_end_seq = self.stream.log.last_seq
            self._on_finished()

    @property
    def _holds_back(self) -> bool:
        """Whether steps wait in the outbox, which has its own limit, until more messages are acknowledged."""
        return self.stream.log.is_full and not self.stream.is_over

    def _acknowledge(self, last_seq: int) -> None:
        log, link = self.stream.log, self.stream.link
        was_full, before = log.is_full, log.first_seq
        self.stream.acknowledge(last_seq)
        if link is not None and log.first_seq > before:
            link.num_unacknowledged_beats = 0
        if was_full:
            self.stream.wake()

    def _end_if_unread(self, link: SessionLink) -> None:
        if self._outbox.has_overflowed:
            self.end(
                ResourceExhausted("slow consumer: frontend does not read its steps", reason="SLOW_READER")
            )
        elif link.num_unacknowledged_beats > _MAX_UNACKNOWLEDGED_BEATS:
            size_bytes = self.stream.log.size_bytes
            unread = f"slow consumer: frontend has {size_bytes} bytes of unacknowledged messages"
            self.end(ResourceExhausted(unread, reason="SLOW_READER"))

    def _heartbeat_messages(self) -> Iterator[engine_pb2.ConnectResponse]:
        """A heartbeat with the loop's progress, even if the loop is blocked; the load if it has changed."""
        loop_stats = self._engine.stats_snapshot.read()
        heartbeat = announce.heartbeat(self._engine, loop_stats)
        heartbeat.last_seq = self.stream.log.last_seq
        yield engine_pb2.ConnectResponse(heartbeat=heartbeat)
        stats = announce.stats(loop_stats)
        self._engine.features.report(stats)
        if stats != self._sent_stats:
            self._sent_stats = stats
            yield engine_pb2.ConnectResponse(stats=stats)

    def _send_result(self, result: utility_pb2.UtilityResult) -> None:
        self._send(engine_pb2.ConnectResponse(utility_result=result))

    def _send(self, message: engine_pb2.ConnectResponse) -> None:
        if len(self._unsent) >= _MAX_UNSENT_MESSAGES:
            self._unsent.clear()
            unread = f"slow consumer: frontend left {_MAX_UNSENT_MESSAGES} messages unread"
            self.end(ResourceExhausted(unread, reason="SLOW_READER"))
        elif not self.stream.is_over:
            self._unsent.append(message)
            self.stream.wake()

    def _append(self, message: engine_pb2.ConnectResponse) -> None:
        """Number and serialize `message`, and append it to the stream."""
        log = self.stream.log
        message.seq = log.last_seq + 1
        serialized = message.SerializeToString()
        log.append(serialized, len(serialized))
        self.num_sent_bytes += len(serialized)

    def _on_output(self) -> None:
        """The outbox has output, or has overflowed."""
        try:
            is_written = self._write_step()
        except Exception as error:  # noqa: BLE001  The event loop would log it and continue without the step.
            self._break_off(error)
            return
        if not is_written:
            self.stream.wake()
        if self.stream.link is None and self._outbox.has_overflowed:
            self.end(Aborted("the outbox of a session without a stream is full", reason="REPLAY_OVERFLOW"))

    def _write_step(self) -> bool:
        """Write the pending step if nothing else is pending; False if `write_messages` has to do it."""
        stream, link = self.stream, self.stream.link
        if link is None or not link.is_idle or stream.has_news or not link.writer.is_free():
            return False
        if self._holds_back or self._outbox.has_overflowed:
            return False
        step = self._outbox.take()
        if step is None:
            return True
        self._append_step(step)
        message = stream.take(link)
        return message is not None and link.writer.start(message) and not self._outbox.has_rest

    def _break_off(self, error: Exception) -> None:
        """End the session because a bug lost a step. With the next step sent, the loss would go unnoticed."""
        frontend_id = self.hello.frontend_id
        logger.error("step could not be encoded", exc_info=error, extra={"frontend_id": frontend_id})
        self._outbox.close()
        self.end(Aborted("a step could not be encoded: internal error", reason="STEP_LOST"))
