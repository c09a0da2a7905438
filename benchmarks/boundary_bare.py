"""The boundary with nothing but gRPC: as many bytes each way, which nobody makes, parses, numbers or keeps.

What is left is what `grpc.aio` costs by itself behind the same loop and the same hop from thread to thread:
no stream of ours can cost less where none of its messages are merged. Knows no message of ours.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from engine_svc.core.request import Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.loop.mailbox import Abort, Add, Inbox, Outbox
from engine_svc.loop.step_output import StepOutput

if TYPE_CHECKING:
    from benchmarks.boundary_frontend import CountingReceiver

_SERVICE, _METHOD = "triptych.benchmarks.Bare", "Connect"
# About as many as real messages have.
_ADD_BYTES, _STEP_BYTES, _ROW_BYTES = 600, 18, 9
# A request names its kind and most tokens, then handles; a step says how many rows it has.
_REQUEST, _STEP = struct.Struct("<III"), struct.Struct("<I")
_ADD, _ABORT = 0, 1
_TOKEN = [1]


class _Writer:
    """Writes each message in the turn that has it, or as soon as the stream takes it."""

    def __init__(self, write: Callable[[bytes], Any]) -> None:
        from service_kit.eager_writer import EagerWriter

        self._writer: EagerWriter[bytes] = EagerWriter(write)
        self._waiting: deque[bytes] = deque()
        self._has_waiting = asyncio.Event()
        self._task = asyncio.ensure_future(self._write_late())

    def send(self, message: bytes) -> None:
        """Write `message`, behind those before it."""
        if not self._waiting and self._writer.is_free():
            self._writer.start(message)
            return
        self._waiting.append(message)
        self._has_waiting.set()

    def close(self) -> None:
        """Write no more."""
        self._task.cancel()
        self._writer.close()

    async def _write_late(self) -> None:
        while True:
            await self._has_waiting.wait()
            self._has_waiting.clear()
            while self._waiting:
                await self._writer.finish()
                self._writer.start(self._waiting.popleft())


class _BytesOutbox(Outbox):
    """Steps as bytes, in the hands of the event loop."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        super().__init__(max_bytes=0, wake=lambda: None)
        self._send = send
        self._loop = asyncio.get_running_loop()

    def publish(self, output: StepOutput) -> None:
        """Have a step written. An abort has no answer here."""
        if output.token_ids:
            num_rows = len(output.handles)
            step = _STEP.pack(num_rows).ljust(_STEP_BYTES + _ROW_BYTES * num_rows)
            self._loop.call_soon_threadsafe(self._send, step)


async def start_bare(inbox: Inbox, listen: str) -> tuple[int, object]:
    """The engine's server, and its port."""
    import grpc.aio

    from service_kit.limits import INTERNAL

    async def connect(requests: AsyncIterator[bytes], context: Any) -> None:
        writer = _Writer(context.write)
        outbox = _BytesOutbox(writer.send)
        try:
            async for message in requests:
                _take(message, inbox, outbox)
        finally:
            writer.close()

    handler = grpc.stream_stream_rpc_method_handler(connect)  # type: ignore[arg-type]  # stubs know no aio
    server = grpc.aio.server(options=INTERNAL.options())
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))
    port = server.add_insecure_port(listen)
    await server.start()
    return port, server


def _take(message: bytes, inbox: Inbox, outbox: Outbox) -> None:
    kind, max_tokens, num_handles = _REQUEST.unpack_from(message)
    for handle in array("I", message[_REQUEST.size : _REQUEST.size + 4 * num_handles]):
        if kind == _ADD:
            inbox.put(Add(Request(str(handle), [1], 1, SamplingParams(max_tokens)), outbox, handle))
        else:
            inbox.put(Abort(str(handle)))


class BareConnection:
    """The frontend's side. Rows come in the order in which their requests were added."""

    def __init__(self, address: str) -> None:
        import grpc.aio

        from service_kit.channel import CHANNEL_OPTIONS

        self.num_messages = 0
        self.num_bytes = 0
        channel: Any = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS["internal"])
        self._call = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")(wait_for_ready=True)
        self._handles = itertools.count(1)
        self._receivers: dict[int, CountingReceiver] = {}
        self._short: set[int] = set()  # of one token

    async def open(self) -> None:
        """Connect and begin to read."""
        await self._call.write(_REQUEST.pack(_ABORT, 0, 0))
        self._writer = _Writer(self._call.write)
        self._reader = asyncio.ensure_future(self._read())

    def add(self, max_tokens: int, receivers: Sequence[CountingReceiver]) -> list[int]:
        """Send requests together; returns their handles."""
        handles = [next(self._handles) for _ in receivers]
        self._receivers.update(zip(handles, receivers, strict=True))
        if max_tokens == 1:
            self._short.update(handles)
        self._send(_ADD, max_tokens, handles, _ADD_BYTES * len(handles))
        return handles

    def abort(self, handles: Sequence[int]) -> None:
        """End requests."""
        for handle in handles:
            del self._receivers[handle]
        if handles:
            self._send(_ABORT, 0, handles, 0)

    def rows_s(self, num_rows: int, num_repeats: int) -> float:
        """Seconds of CPU to hand the rows of one step to their receivers."""
        from benchmarks.boundary_frontend import CountingReceiver

        kept = self._receivers
        self._receivers = {row: CountingReceiver(lambda: None) for row in range(num_rows)}
        began_at_s = time.process_time()
        for _ in range(num_repeats):
            self._hand_out(num_rows)
        cpu_s = time.process_time() - began_at_s
        self._receivers = kept
        return cpu_s / num_repeats

    def _send(self, kind: int, max_tokens: int, handles: Sequence[int], num_bytes: int) -> None:
        request = _REQUEST.pack(kind, max_tokens, len(handles)) + array("I", handles).tobytes()
        self._writer.send(request.ljust(num_bytes))

    async def _read(self) -> None:
        while True:
            message = await self._call.read()
            self.num_messages += 1
            self.num_bytes += len(message)
            self._hand_out(*_STEP.unpack_from(message))

    def _hand_out(self, num_rows: int) -> None:
        for receiver in itertools.islice(self._receivers.values(), num_rows):
            receiver.advance(_TOKEN, None)
        for handle in self._short:
            del self._receivers[handle]
        self._short.clear()
