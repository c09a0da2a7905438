"""A minimal frontend: one Connect stream, with control over each message, number and acknowledgement."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import grpc.aio

from triptych.engine.v1 import add_pb2, engine_pb2, session_pb2
from triptych_conformance.cases import Finding, expect, fail
from triptych_conformance.record import Record
from triptych_kit.eager_writer import EagerWriter
from triptych_kit.errors import ServiceError, from_rpc_error

CONNECT = "/triptych.engine.v1.EngineCoreService/Connect"
# How long a stream that is not needed any more may take to end by itself.
_LEAVE_S = 1.0


class EngineStream:
    """One stream of a session. Reads by itself, acknowledges nothing, and keeps what came in `record`.

    hello: the fields of its hello.  record: that of the session, if it may be resumed.  A rule that a message
    breaks is a Finding in the next call that waits.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        hello: dict[str, Any],
        *,
        patience_s: float,
        record: Record | None = None,
    ) -> None:
        self.hello_fields = hello
        self.record = record or Record()
        self.hello_ack: session_pb2.HelloAck | None = None
        self.is_over = False
        self.error: ServiceError | None = None  # what it ended with; None: OK
        self.patience_s = patience_s
        self._next_seq = 1
        self._finding: Finding | None = None
        self._changed = asyncio.Event()
        self._may_read = asyncio.Event()
        self._may_read.set()
        # Bytes in both directions, as no message has to be one of this contract's.
        self._call: Any = channel.stream_stream(CONNECT, None, None)(None)
        # After a failed write of the call itself, the engine's messages and its status could not be read.
        self._writer: EagerWriter[bytes] = EagerWriter(self._call.write)
        self._reader = asyncio.create_task(self._read())

    @property
    def last_received(self) -> int:
        """The number of the last message that came over this stream."""
        return self._next_seq - 1

    async def say_hello(self, **fields: Any) -> None:
        """Send hello, with `fields` instead of the session's own."""
        self.hello_fields = {**self.hello_fields, **fields}
        await self.send(hello=session_pb2.Hello(**self.hello_fields))

    async def open(self, **fields: Any) -> None:
        """Send hello, and wait for hello_ack and ready."""
        await self.say_hello(**fields)
        await self.until(lambda: self.hello_ack is not None, "hello_ack")
        await self.until(lambda: self.record.ready is not None, "ready")

    async def is_greeted(self) -> bool:
        """Send hello; whether hello_ack comes, and not the end of the stream."""
        await self.say_hello()
        await self.until(lambda: self.hello_ack is not None or self.is_over, "hello_ack")
        return self.hello_ack is not None

    async def send(self, **message: Any) -> None:
        await self.send_bytes(engine_pb2.ConnectRequest(**message).SerializeToString())

    async def send_bytes(self, serialized: bytes) -> None:
        """Write a message. A failed write is no error: the status of the stream is what counts."""
        with contextlib.suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            await self._writer.finish()
            self._writer.start(serialized)
            await self._writer.finish()

    async def add(self, *entries: add_pb2.AddEntry) -> None:
        """Send entries in one message, each for a handle that is not in flight."""
        for entry in entries:
            self.record.begin(entry.handle)
        await self.send(add=add_pb2.Add(entries=entries))

    async def abort(self, handles: Sequence[int], **fields: Any) -> None:
        await self.send(abort=engine_pb2.Abort(handles=handles, **fields))

    async def adopt(self, handle: int, request_id: str) -> None:
        entry = engine_pb2.AdoptEntry(handle=handle, request_id=request_id)
        await self.send(adopt=engine_pb2.Adopt(entries=[entry]))

    async def ack(self, last_seq: int | None = None) -> None:
        """Acknowledge what was received, or the messages up to `last_seq`."""
        last_seq = self.record.last_seq if last_seq is None else last_seq
        await self.send(ack=engine_pb2.Ack(last_seq=last_seq))

    async def goodbye(self, **fields: Any) -> None:
        await self.send(goodbye=engine_pb2.Goodbye(**fields))
        await self.half_close()

    async def half_close(self) -> None:
        with contextlib.suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            await self._call.done_writing()

    async def cut(self) -> None:
        """Break the stream, as a lost connection does."""
        self._writer.close()
        self._call.cancel()
        self._may_read.set()
        await asyncio.wait([self._reader])

    async def leave(self) -> None:
        """End the session, or at least the stream."""
        if not self.is_over:
            await self.goodbye()
            self.continue_reading()
            await asyncio.wait([self._reader], timeout=_LEAVE_S)
        await self.cut()

    def stop_reading(self) -> None:
        self._may_read.clear()

    def continue_reading(self) -> None:
        self._may_read.set()

    async def until(self, condition: Callable[[], object], expected: str) -> None:
        """Wait until what was received makes `condition` true. A Finding if it does not come."""
        try:
            async with asyncio.timeout(self.patience_s):
                while not condition():
                    self.check()
                    expect(not self.is_over, expected, f"the stream ended with {self.end}")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            fail(expected, f"nothing of it in {self.patience_s:g} s")
        self.check()

    async def until_finished(self, *handles: int) -> None:
        record = self.record
        ended = f"the end of handle {', '.join(map(str, handles))}"
        await self.until(lambda: record.has_ended(*handles) or record.rejected.keys() & {*handles}, ended)
        for handle in handles:
            expect(handle not in record.rejected, ended, f"rejected: {record.rejected.get(handle)!r}")

    async def until_tokens(self, handle: int, num_tokens: int = 1) -> None:
        """Wait until the request has that number of tokens, or has ended."""
        record = self.record
        await self.until(
            lambda: len(record.tokens[handle]) >= num_tokens or record.has_ended(handle),
            f"{num_tokens} tokens of handle {handle}",
        )

    async def rejection_of(self, handle: int) -> ServiceError:
        """The error that the ADD or the adoption of `handle` was rejected with."""
        record, expected = self.record, f"add_rejected of handle {handle}"
        accepted = (record.first, record.finished, record.adopted)
        await self.until(
            lambda: handle in record.rejected or any(handle in some for some in accepted), expected
        )
        expect(handle in record.rejected, expected, "it was accepted")
        return record.rejected[handle]

    async def must_break(self) -> None:
        """Wait for the end of the stream, which must be an error."""
        await self.until(lambda: self.is_over, "the end of the stream")
        expect(self.error is not None, "an end of the stream with an error", self.end)

    async def must_end(self, code: grpc.StatusCode, reason: str = "") -> None:
        """Wait for the end of the stream; it must have this status."""
        expected = f"the end of the stream with {code.name} {reason}".rstrip()
        try:
            async with asyncio.timeout(self.patience_s):
                await asyncio.wait([self._reader])
        except TimeoutError:
            fail(expected, f"no end in {self.patience_s:g} s")
        self.check()
        seen_code = grpc.StatusCode.OK if self.error is None else self.error.code
        expect(seen_code is code and (not reason or self.reason == reason), expected, self.end)

    def check(self) -> None:
        """Raise the Finding about a message that was received, if there is one."""
        if self._finding is not None:
            raise self._finding

    @property
    def reason(self) -> str:
        return "" if self.error is None else self.error.reason

    @property
    def end(self) -> str:
        """The status that the stream ended with, in words."""
        if not self.is_over:
            return "no end"
        return "OK" if self.error is None else f"{self.error.code.name} {self.reason}: {self.error.message}"

    async def _read(self) -> None:
        try:
            while True:
                await self._may_read.wait()
                serialized = await self._call.read()
                if not isinstance(serialized, bytes):
                    break
                self._take(serialized)
                self._changed.set()
            # Raises the status, if it is not OK.
            await self._raise_status()
        except grpc.RpcError as error:
            self.error = from_rpc_error(error)
        except asyncio.CancelledError:
            pass
        except Finding as finding:
            self._finding = finding
            self._call.cancel()
        self.is_over = True
        self._changed.set()

    async def _raise_status(self) -> None:
        code = await self._call.code()
        if code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(
                code,
                await self._call.initial_metadata(),
                await self._call.trailing_metadata(),
                details=await self._call.details(),
                debug_error_string=None,
            )

    def _take(self, serialized: bytes) -> None:
        message = engine_pb2.ConnectResponse.FromString(serialized)
        if self.hello_ack is None:
            kind = message.WhichOneof("message")
            expect(kind == "hello_ack", "hello_ack as the first message", kind)
            expect(message.seq == 0, "hello_ack without seq", f"seq {message.seq}")
            self.hello_ack = message.hello_ack
            if self.hello_ack.resume_ok:
                expect(
                    "resume" in self.hello_fields,
                    "resume_ok for a resume alone",
                    "resume_ok for a new session",
                )
                self._next_seq = self.hello_fields["resume"].last_seq + 1
            else:
                self.record = Record()
            return
        expect(message.seq == self._next_seq, f"message {self._next_seq}", f"message {message.seq}")
        self._next_seq += 1
        self.record.take(serialized)
