"""One Connect stream: handshake, writes that never wait, and what its end means. Knows no requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from enum import Enum

import grpc
import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]  # its stubs leave it out

from triptych.engine.v1 import engine_pb2, engine_pb2_grpc, session_pb2
from triptych_kit.clock import Clock
from triptych_kit.eager_writer import EagerWriter
from triptych_kit.errors import from_status
from triptych_kit.resumable_stream import EndOfStream, MessageGap, PeerSilent, SilenceTimer, StreamReceiver

HEARTBEAT_S = 0.5
_HANDSHAKE_S = 10.0
# An engine keeps a few MiB of unacknowledged messages, and then waits.
_MAX_UNACKNOWLEDGED_BYTES = 1024 * 1024
# Of ADDs that go together. Others' do not wait for long behind it.
_MAX_TOGETHER_BYTES = 1024 * 1024
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
    With `waits` it waits for an engine that does not listen yet, else it fails at once. When `until_renewed`
    returns, the stream breaks, so that another one is opened with new credentials.
    """

    def __init__(
        self,
        stub: engine_pb2_grpc.EngineCoreServiceStub,
        clock: Clock,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        last_seq: int = 0,
        waits: bool = True,
        until_renewed: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._until_renewed = until_renewed
        # Waiting for the connection costs nothing and ends as soon as the engine listens.
        self._call = stub.Connect(wait_for_ready=waits)
        self._writer = EagerWriter(self._call.write)
        self._receiver: StreamReceiver[engine_pb2.ConnectResponse] = StreamReceiver(
            SilenceTimer(clock, heartbeat_s=heartbeat_s), last_seq=last_seq
        )
        self._heartbeat_s = heartbeat_s
        self._is_closing = False
        self._outbox = _Outbox()
        self._has_outgoing = asyncio.Event()

    @property
    def last_seq(self) -> int:
        """The last message that was handled completely."""
        return self._receiver.last_seq

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
        self._outbox.max_together_bytes = min(_MAX_TOGETHER_BYTES, ack.max_frame_bytes or _MAX_TOGETHER_BYTES)
        self._receiver.begin(
            is_resumed=ack.resume_ok,
            max_messages=ack.ack_interval_messages,
            max_bytes=_MAX_UNACKNOWLEDGED_BYTES,
            max_delay_s=ack.ack_interval_ms / 1000 or self._heartbeat_s,
        )
        return ack

    async def _until_over(
        self, on_message: Callable[[engine_pb2.ConnectResponse], Awaitable[None]]
    ) -> BaseException:
        """The error that ended the stream, to be raised outside of the tasks: a task keeps its error, and the
        error keeps the call.
        """
        receiver = self._receiver
        reader = asyncio.ensure_future(receiver.run(self._call.read, on_message, self._acknowledge, end=EOF))
        tasks = [
            reader,
            asyncio.ensure_future(self._write()),
            asyncio.ensure_future(receiver.silence.watch()),
            asyncio.ensure_future(self._break_when_renewed()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # In this order: a reason that the engine sent takes precedence over a failed write.
            error = next(filter(None, (task.exception() for task in tasks if task.done())))
            if isinstance(error, EndOfStream | grpc.RpcError | asyncio.InvalidStateError):
                return await self._lost()
            if isinstance(error, MessageGap | PeerSilent):
                end = StreamEnd.SILENT if isinstance(error, PeerSilent) else StreamEnd.VOID
                return StreamLost(str(error), end)
            return error
        finally:
            receiver.close()
            for task in tasks:
                if task is not reader or not receiver.silence.is_handling:
                    task.cancel()
            self._writer.close()
            self._call.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _break_when_renewed(self) -> None:
        if self._until_renewed is None:
            await asyncio.Event().wait()
        else:
            await self._until_renewed()
            raise StreamLost("the credentials were renewed", StreamEnd.BROKEN)

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
                self._writer.start(self._outbox.take())
                await self._writer.finish()
            if self._is_closing:
                await self._call.done_writing()
                return

    def _acknowledge(self, last_seq: int) -> None:
        self.send(engine_pb2.ConnectRequest(ack=engine_pb2.Ack(last_seq=last_seq)))

    async def _lost(self) -> StreamLost:
        """How the call ended: the engine's reason if it sent one, else gRPC's."""
        code = await self._call.code()
        details = await self._call.details() or "the engine ended the stream"
        trailers = dict(await self._call.trailing_metadata() or ())
        packed = trailers.get("grpc-status-details-bin", b"")
        reason = from_status(code.value[0], details, packed).reason if isinstance(packed, bytes) else ""
        return StreamLost(f"{code.name}: {details}", end_of(code, details, reason if packed else ""))


class _Outbox:
    """Messages that wait until the stream has accepted those before them.

    A stream accepts one in each iteration of the event loop, which takes long while many requests have
    outputs. So what waits goes together: ADDs, behind them aborts for one reason; of acks the last remains.
    """

    def __init__(self) -> None:
        self.max_together_bytes = _MAX_TOGETHER_BYTES
        self._messages: deque[engine_pb2.ConnectRequest] = deque()
        # Those of these messages that take more, and how many bytes are in them, by kind and reason.
        self._taking: dict[tuple[str | None, int], tuple[engine_pb2.ConnectRequest, int]] = {}

    def __len__(self) -> int:
        return len(self._messages)

    def append(self, message: engine_pb2.ConnectRequest) -> None:
        """Append a message, or the content of it to one that waits."""
        kind = message.WhichOneof("message")
        key = kind, message.abort.reason if kind == "abort" else 0
        into, num_taken = self._taking.get(key, (None, 0))
        num_bytes = message.ByteSize()
        if into is not None and num_taken + num_bytes <= self.max_together_bytes:
            into.MergeFrom(message)
            self._taking[key] = into, num_taken + num_bytes
            return
        if kind == "add":
            # An abort must not overtake the ADD of its request.
            self._taking = {key: taking for key, taking in self._taking.items() if key[0] != "abort"}
        elif kind not in ("abort", "ack"):
            self._taking = {}
        if kind in ("add", "abort", "ack"):
            self._taking[key] = message, num_bytes
        self._messages.append(message)

    def take(self) -> engine_pb2.ConnectRequest:
        """Remove and return the first message."""
        message = self._messages.popleft()
        self._taking = {key: taking for key, taking in self._taking.items() if taking[0] is not message}
        return message


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
