"""The synthetic loop in a process of its own, and its mailbox over a pair of sockets. Knows no gRPC.

Frames are a length, a kind and a body; columns travel as they are.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import struct
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterator

from benchmarks.boundary_loop import SyntheticLoop
from engine_svc.core.request import FinishReason, Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.loop.mailbox import Abort, Add, Command, Inbox, Outbox, Stop
from engine_svc.loop.step_output import FinishedRow, StepOutput
from engine_svc.process.run import calm_collector

_ADD, _ABORT, _RUN, _STEP, _DONE = range(1, 6)
_FRAME = struct.Struct("<IB")
_ADD_HEAD = struct.Struct("<III")
_STEP_HEAD = struct.Struct("<IIII")
_RUN_BODY = struct.Struct("<Id")
_DONE_BODY = struct.Struct("<d")
_READ_BYTES = 1 << 20
_REASONS = tuple(FinishReason)


class Frames:
    """Whole frames out of a stream of bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """The frames that end in `data`: kind and body."""
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _FRAME.size:
            size, kind = _FRAME.unpack_from(self._buffer, start)
            end = start + _FRAME.size + size
            if end > len(self._buffer):
                break
            yield kind, bytes(self._buffer[start + _FRAME.size : end])
            start = end
        del self._buffer[:start]


class BridgedInbox(Inbox):
    """The inbox of a loop that is elsewhere: commands leave through a socket."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        super().__init__(0)
        self._write = write
        self.outbox: Outbox | None = None

    def put(self, command: Command) -> bool:
        """Send an ADD or an abort."""
        match command:
            case Add(request, outbox, handle):
                self.outbox = outbox
                name, ids = request.request_id.encode(), array("I", request.token_ids).tobytes()
                head = _ADD_HEAD.pack(handle, request.sampling.max_tokens, len(name))
                self._write(frame(_ADD, head + name + ids))
            case Abort(request_id):
                self._write(frame(_ABORT, request_id.encode()))
        return True


class LoopProcess(asyncio.Protocol):
    """The other end of a loop's process, in the process of the server."""

    def __init__(self) -> None:
        self.inbox = BridgedInbox(self._send)
        self._frames = Frames()
        self._write: Callable[[bytes], object] = lambda data: None
        self._done: asyncio.Future[float] | None = None
        self._event_loop = asyncio.get_running_loop()

    @classmethod
    async def start(cls) -> LoopProcess:
        """Start the loop's process."""
        ours, theirs = socket.socketpair()
        # The start of a process may keep the event loop: nothing else runs yet.
        subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-m", "benchmarks.boundary_bridge", f"--fd={theirs.fileno()}"],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        transport, protocol = await asyncio.get_running_loop().create_connection(cls, sock=ours)
        protocol._write = transport.write
        return protocol

    def data_received(self, data: bytes) -> None:
        """Put steps into the session's outbox."""
        for kind, body in self._frames.feed(data):
            if kind == _STEP and self.inbox.outbox is not None:
                self.inbox.outbox.publish(read_step(body))
            elif kind == _DONE and self._done is not None:
                self._done.set_result(_DONE_BODY.unpack(body)[0])

    async def run_steps(self, num_steps: int, interval_s: float) -> float:
        """Have so many steps published; returns the seconds of CPU of the loop's process."""
        self._done = self._event_loop.create_future()
        self._send(frame(_RUN, _RUN_BODY.pack(num_steps, interval_s)))
        return await self._done

    def _send(self, data: bytes) -> None:
        # The server with threads adds from one of them.
        self._event_loop.call_soon_threadsafe(self._write, data)


class _BridgedOutbox(Outbox):
    """The outbox of a session that is elsewhere: steps leave through a socket."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(max_bytes=0, wake=lambda: None)
        self._connection = connection

    def publish(self, output: StepOutput) -> None:
        """Send a step."""
        self._connection.sendall(frame(_STEP, write_step(output)))


def frame(kind: int, body: bytes) -> bytes:
    """One frame."""
    return _FRAME.pack(len(body), kind) + body


def write_step(step: StepOutput) -> bytes:
    """The columns of a step whose rows have a token each, or, at an abort, none."""
    num_rows, num_finished, num_first = len(step.handles), len(step.finished), len(step.first)
    finished = [number for row in step.finished for number in (row.row, _REASONS.index(row.reason))]
    first = [number for pair in step.first for number in pair]
    columns = array("I", step.handles)
    columns.extend(step.num_tokens)
    columns.extend(finished)
    columns.extend(first)
    columns.extend(step.token_ids)
    return _STEP_HEAD.pack(step.step_number, num_rows, num_finished, num_first) + columns.tobytes()


def read_step(body: bytes) -> StepOutput:
    """The step that was written."""
    step_number, num_rows, num_finished, num_first = _STEP_HEAD.unpack_from(body)
    columns = array("I", body[_STEP_HEAD.size :]).tolist()
    at_finished = 2 * num_rows
    at_first = at_finished + 2 * num_finished
    at_tokens = at_first + 2 * num_first
    finished, first = columns[at_finished:at_first], columns[at_first:at_tokens]
    return StepOutput(
        step_number,
        columns[:num_rows],
        columns[num_rows:at_finished],
        columns[at_tokens:],
        [
            FinishedRow(row, _REASONS[reason])
            for row, reason in zip(finished[::2], finished[1::2], strict=True)
        ],
        list(zip(first[::2], first[1::2], strict=True)),
    )


def _read_commands(connection: socket.socket, inbox: Inbox, loop: SyntheticLoop) -> None:
    frames, outbox = Frames(), _BridgedOutbox(connection)

    def on_done(cpu_s: float) -> None:
        connection.sendall(frame(_DONE, _DONE_BODY.pack(cpu_s)))

    while data := connection.recv(_READ_BYTES):
        for kind, body in frames.feed(data):
            if kind == _RUN:
                num_steps, interval_s = _RUN_BODY.unpack(body)
                loop.begin_steps(num_steps, interval_s, on_done)
            elif kind == _ABORT:
                inbox.put(Abort(body.decode()))
            elif kind == _ADD:
                handle, max_tokens, size = _ADD_HEAD.unpack_from(body)
                at_ids = _ADD_HEAD.size + size
                ids = array("I", body[at_ids:]).tolist()
                name = body[_ADD_HEAD.size : at_ids].decode()
                inbox.put(Add(Request(name, ids, len(ids), SamplingParams(max_tokens)), outbox, handle))
    inbox.put(Stop())


def main() -> None:
    """Run a loop until the socket is closed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True)
    connection = socket.socket(fileno=parser.parse_args().fd)
    os.set_inheritable(connection.fileno(), False)
    inbox = Inbox(8192)
    loop = SyntheticLoop(inbox)
    calm_collector()
    threading.Thread(target=_read_commands, args=(connection, inbox, loop), daemon=True).start()
    loop.run()


if __name__ == "__main__":
    main()
