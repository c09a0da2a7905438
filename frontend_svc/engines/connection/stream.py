"""One Connect stream: non-blocking writes, sequence check of reads, heartbeat timeout. Knows no requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from enum import Enum

import grpc
import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]  # its stubs leave it out

from service_kit.clock import Clock
from service_kit.eager_writer import EagerWriter
from service_kit.errors import from_status
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc, session_pb2

HEARTBEAT_S = 0.5
_MAX_MISSED_HEARTBEATS = 3
_HANDSHAKE_S = 10.0
# An engine keeps a few MiB of unacknowledged messages, and then waits.
_MAX_UNACKNOWLEDGED_BYTES = 1024 * 1024
# With these an engine ends a session that it gives up: it was read too slowly, or a newer one replaces it.
_DISMISSALS = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ABORTED)


class StreamEnd(Enum):
    """Why a stream ended, which decides what becomes of its session."""

    BROKEN = "broken"  # network failure as far as can be seen: another stream may resume the session
    SILENT = "silent"  # heartbeats stopped
    REFUSED = "refused"  # connection refused: no process listens there
    LEFT = "left"  # the engine ended it on purpose
    DISMISSED = "dismissed"  # the engine is alive and has given up the session
    FAILED = "failed"  # the engine failed, or another process has taken its address
    HUNG = "hung"  # the engine's loop makes no progress
    VOID = "void"  # one side violated the protocol: the session cannot be resumed
    INCOMPATIBLE = "incompatible"  # the versions of the two sides do not work together


class StreamLost(Exception):
    """The stream ended; the text is the reason."""

    def __init__(self, text: str, end: StreamEnd = StreamEnd.VOID) -> None:
        super().__init__(text)
        self.end = end


class EngineStream:
    """A session's stream from hello to its end, which is always a `StreamLost`.

    `open`, then `receive`; `send` and `close` at any time after `open`.
    With `waits` it waits for an engine that does not listen yet, else it fails at once.
    """

    def __init__(
        self,
        stub: engine_pb2_grpc.EngineCoreServiceStub,
        clock: Clock,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        last_seq: int = 0,
        waits: bool = True,
    ) -> None:
        # Waiting for the connection costs nothing and ends as soon as the engine listens.
        self._call = stub.Connect(wait_for_ready=waits)
        self._writer = EagerWriter(self._call.write)
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._is_closing = False
        self._outbox: deque[engine_pb2.ConnectRequest] = deque()
        self._has_outgoing = asyncio.Event()
        self._last_seq = self._acked_seq = last_seq
        self._num_unacknowledged_bytes = 0
        self._ack_interval_messages = 0
        self._ack_interval_s = heartbeat_s
        self._ack_timer: asyncio.TimerHandle | None = None
        self._last_received_at = 0.0
        self._is_handling = False
        self._is_over = False

    @property
    def last_seq(self) -> int:
        """The last message that was handled completely."""
        return self._last_seq

    async def open(self, hello: session_pb2.Hello, *, limit_s: float | None = None) -> session_pb2.HelloAck:
        """Send hello and wait for the answer: `limit_s`, or without it 10 s from the connection on."""
        try:
            async with asyncio.timeout(limit_s):
                return await self._shake_hands(hello)
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise await self._lost() from error
        except TimeoutError as error:
            raise StreamLost(
                f"no hello_ack within {limit_s or _HANDSHAKE_S:g} s", StreamEnd.SILENT
            ) from error
        except BaseException:
            self._call.cancel()
            raise

    def send(self, message: engine_pb2.ConnectRequest) -> None:
        """Send `message`, in order, as fast as the peer takes it. Never waits."""
        if not self._outbox and self._writer.is_free() and self._writer.start(message):
            return
        self._outbox.append(message)
        self._has_outgoing.set()

    async def receive(self, on_message: Callable[[engine_pb2.ConnectResponse], Awaitable[None]]) -> None:
        """Pass each message to `on_message` until the stream is lost, then raise StreamLost.

        The next message is read when `on_message` has returned. A started `on_message` is completed even if
        the stream is lost meanwhile; it is never called after this method has ended.
        """
        self._last_received_at = self._clock.now()
        raise await self._until_over(on_message)

    def close(self, goodbye: engine_pb2.Goodbye) -> None:
        """End the session on purpose: `receive` raises when the engine has read the goodbye."""
        self._is_closing = True
        self.send(engine_pb2.ConnectRequest(goodbye=goodbye))
        self._has_outgoing.set()

    def cancel(self) -> None:
        """End the call, opened or not."""
        self._call.cancel()

    async def _shake_hands(self, hello: session_pb2.Hello) -> session_pb2.HelloAck:
        await self._call.write(engine_pb2.ConnectRequest(hello=hello))
        await self._call.initial_metadata()
        async with asyncio.timeout(_HANDSHAKE_S):
            answer = await self._call.read()
        if answer is EOF:
            raise await self._lost()
        if answer.WhichOneof("message") != "hello_ack":
            raise StreamLost("the engine's first message is no hello_ack")
        ack: session_pb2.HelloAck = answer.hello_ack
        self._ack_interval_messages = ack.ack_interval_messages
        if ack.ack_interval_ms:
            self._ack_interval_s = ack.ack_interval_ms / 1000
        if not ack.resume_ok:
            self._last_seq = self._acked_seq = 0
        return ack

    async def _until_over(
        self, on_message: Callable[[engine_pb2.ConnectResponse], Awaitable[None]]
    ) -> BaseException:
        """The error that ended the stream, to be raised outside of the tasks: a task keeps its error, and the
        error keeps the call.
        """
        reader = asyncio.ensure_future(self._read(on_message))
        tasks = [reader, asyncio.ensure_future(self._write()), asyncio.ensure_future(self._watch())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # In this order: a reason that the engine sent takes precedence over a failed write.
            error = next(filter(None, (task.exception() for task in tasks if task.done())))
            is_of_call = isinstance(error, (grpc.RpcError, asyncio.InvalidStateError))
            return await self._lost() if is_of_call else error
        finally:
            self._is_over = True
            for task in tasks:
                if task is not reader or not self._is_handling:
                    task.cancel()
            self._writer.close()
            self._call.cancel()
            if self._ack_timer is not None:
                self._ack_timer.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, on_message: Callable[[engine_pb2.ConnectResponse], Awaitable[None]]) -> None:
        while not self._is_over:
            message = await self._call.read()
            if message is EOF:
                raise await self._lost()
            self._last_received_at = self._clock.now()
            if message.seq != self._last_seq + 1:
                raise StreamLost(f"message {message.seq} came after {self._last_seq}")
            self._is_handling = True
            try:
                await on_message(message)
            finally:
                self._is_handling = False
            self._last_seq = message.seq
            self._note_unacknowledged(message)
            # Nothing was read meanwhile, so this time does not count as silence of the peer.
            self._last_received_at = self._clock.now()

    async def _write(self) -> None:
        # A write fails when the call is over. The reader gets the reason, after the engine's last message.
        with contextlib.suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            await self._write_until_closing()
        # Ending the call here could overtake the goodbye; the engine ends the call when it has read it.
        await asyncio.Event().wait()

    async def _write_until_closing(self) -> None:
        while True:
            await self._has_outgoing.wait()
            self._has_outgoing.clear()
            await self._writer.finish()
            while self._outbox:
                self._writer.start(self._outbox.popleft())
                await self._writer.finish()
            if self._is_closing:
                await self._call.done_writing()
                return

    async def _watch(self) -> None:
        limit_s = self._heartbeat_s * _MAX_MISSED_HEARTBEATS
        while True:
            slept_from = self._clock.now()
            wait_s = min(self._heartbeat_s, max(0.0, self._last_received_at + limit_s - slept_from) + 0.001)
            await asyncio.sleep(wait_s)
            now = self._clock.now()
            if now - slept_from > wait_s + self._heartbeat_s:
                # This process was not running; messages that arrived meanwhile are still to be read.
                self._last_received_at = now
            if self._is_handling:
                self._last_received_at = now
            if now - self._last_received_at > limit_s:
                raise StreamLost(f"no heartbeat for {now - self._last_received_at:.1f} s", StreamEnd.SILENT)

    def _note_unacknowledged(self, message: engine_pb2.ConnectResponse) -> None:
        if not self._ack_interval_messages:
            return
        self._num_unacknowledged_bytes += message.ByteSize()
        if (
            self._last_seq - self._acked_seq >= self._ack_interval_messages
            or self._num_unacknowledged_bytes >= _MAX_UNACKNOWLEDGED_BYTES
        ):
            self._ack()
        elif self._ack_timer is None:
            loop = asyncio.get_running_loop()
            self._ack_timer = loop.call_later(self._ack_interval_s, self._ack_late)

    def _ack_late(self) -> None:
        self._ack_timer = None
        if self._acked_seq < self._last_seq:
            self._ack()

    def _ack(self) -> None:
        self._acked_seq, self._num_unacknowledged_bytes = self._last_seq, 0
        self.send(engine_pb2.ConnectRequest(ack=engine_pb2.Ack(last_seq=self._last_seq)))

    async def _lost(self) -> StreamLost:
        """How the call ended: the engine's reason if it sent one, else gRPC's."""
        code = await self._call.code()
        details = await self._call.details() or "the engine ended the stream"
        trailers = dict(await self._call.trailing_metadata() or ())
        packed = trailers.get("grpc-status-details-bin", b"")
        reason = from_status(code.value[0], details, packed).reason if isinstance(packed, bytes) else ""
        return StreamLost(f"{code.name}: {details}", end_of(code, details, reason if packed else ""))


def end_of(code: grpc.StatusCode, details: str, reason: str) -> StreamEnd:
    """Why a stream ended with this status; `reason` is empty if the engine sent none."""
    if code is grpc.StatusCode.OK or reason == "ENGINE_DRAINED":
        return StreamEnd.LEFT
    if reason == "ENGINE_DEAD":
        return StreamEnd.FAILED
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        return StreamEnd.INCOMPATIBLE
    if reason:
        return StreamEnd.DISMISSED if code in _DISMISSALS else StreamEnd.VOID
    # Only gRPC's message distinguishes a process that is gone from one that is cut off.
    if code is grpc.StatusCode.UNAVAILABLE and "refused" in details.lower():
        return StreamEnd.REFUSED
    return StreamEnd.BROKEN
