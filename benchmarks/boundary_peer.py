"""The boundary as the peer has it: ZeroMQ, MessagePack, a struct for each request of a step. Knows no gRPC.

In the engine one thread reads and decodes, one encodes and writes, beside that of the loop; the
frontend reads with `zmq.asyncio` and hands rows on in pieces, one for each turn. Of the peer's structs
only the fields that are filled in a plain decode step are here. The loop, the tokens and the receivers are
those of the other side of the comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from benchmarks.boundary_control import Line, answer_lines, say
from benchmarks.boundary_frontend import PROMPT, CountingReceiver
from benchmarks.boundary_loop import SyntheticLoop
from engine_svc.core.request import Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.loop.mailbox import Abort, Add, Inbox, Outbox
from engine_svc.loop.step_output import StepOutput

# As many rows as the peer handles before it lets others run.
_MAX_ROWS_A_TURN = 128
_ADD, _ABORT = b"\x00", b"\x01"
_LENGTH = 1


class Sampling(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What is asked of a request."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 16
    ignore_eos: bool = False
    seed: int = 0


class AddRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A request on its way to the engine."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: Sampling
    arrival_time: float = 0.0


class RowOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What a step gave one request."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: None = None
    finish_reason: int | None = None


class StepOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What a step gave all requests."""

    engine_index: int = 0
    outputs: list[RowOutput] = []
    scheduler_stats: dict[str, int] | None = None
    timestamp: float = 0.0


class _QueueOutbox(Outbox):
    """Makes the structs of a step in the loop's thread, for the thread that writes."""

    def __init__(self) -> None:
        super().__init__(max_bytes=0, wake=lambda: None)
        self.steps: queue.SimpleQueue[StepOutputs] = queue.SimpleQueue()

    def publish(self, output: StepOutput) -> None:
        """Leave a step for the writer. Its handles are the request ids."""
        if not output.token_ids:
            # The peer's frontend forgets what it aborts, and is not answered.
            return
        rows = [
            RowOutput(name, [token]) for name, token in zip(output.handles, output.token_ids, strict=True)
        ]
        for finished in output.finished:
            rows[finished.row].finish_reason = _LENGTH
        self.steps.put(StepOutputs(0, rows, None, time.monotonic()))


def _read_requests(socket: Any, inbox: Inbox, outbox: _QueueOutbox) -> None:
    decode_add = msgspec.msgpack.Decoder(AddRequest).decode
    decode_abort = msgspec.msgpack.Decoder(list[str]).decode
    while True:
        kind, frame = socket.recv_multipart(copy=False)
        if kind.bytes == _ADD:
            entry = decode_add(frame.buffer)
            sampling = SamplingParams(
                entry.sampling.max_tokens,
                entry.sampling.temperature,
                seed=entry.sampling.seed,
                ignore_eos=True,
            )
            prompt = entry.prompt_token_ids
            request = Request(entry.request_id, prompt, len(prompt), sampling, arrival_at=entry.arrival_time)
            inbox.put(Add(request, outbox, entry.request_id))
        else:
            for request_id in decode_abort(frame.buffer):
                inbox.put(Abort(request_id))


def _write_steps(socket: Any, outbox: _QueueOutbox) -> None:
    encode = msgspec.msgpack.Encoder().encode
    while True:
        socket.send(encode(outbox.steps.get()), copy=False)


async def _serve(loop: SyntheticLoop) -> None:
    event_loop = asyncio.get_running_loop()

    async def answer(command: Line) -> Line:
        done: asyncio.Future[float] = event_loop.create_future()
        loop.begin_steps(
            command["num_steps"],
            command["interval_s"],
            lambda cpu_s: event_loop.call_soon_threadsafe(done.set_result, cpu_s),
        )
        return {"cpu_s": await done}

    await answer_lines(answer)


def main() -> None:
    """Be the peer's engine until the standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", required=True, help="tcp://127.0.0.1:* or ipc://PATH")
    listen = parser.parse_args().listen
    context = zmq.Context(1)
    requests, steps = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    addresses = []
    for name, socket in (("requests", requests), ("steps", steps)):
        socket.set_hwm(0)
        socket.bind(f"{listen}-{name}" if listen.startswith("ipc:") else listen)
        addresses.append(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    inbox, outbox = Inbox(8192), _QueueOutbox()
    loop = SyntheticLoop(inbox)

    from engine_svc.process.run import calm_collector

    calm_collector()
    for work in ((_read_requests, requests, inbox, outbox), (_write_steps, steps, outbox)):
        threading.Thread(target=work[0], args=work[1:], daemon=True).start()
    threading.Thread(target=loop.run, name="engine", daemon=True).start()
    say({"address": " ".join(addresses)})
    asyncio.run(_serve(loop))
    # The threads wait in sockets, which nobody else may close.
    os._exit(0)


class PeerConnection:
    """The peer's client."""

    def __init__(self, address: str) -> None:
        self.num_messages = 0
        self.num_bytes = 0
        context = zmq.asyncio.Context()
        requests_address, steps_address = address.split()
        self._requests, self._steps = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        for socket, target in ((self._requests, requests_address), (self._steps, steps_address)):
            socket.set_hwm(0)
            socket.connect(target)
        self._receivers: dict[str, CountingReceiver] = {}
        self._outputs: asyncio.Queue[StepOutputs] = asyncio.Queue()
        self._encode = msgspec.msgpack.Encoder().encode
        self._names = itertools.count()
        self._sends: set[asyncio.Future[Any]] = set()

    async def open(self) -> None:
        """Begin to read."""
        self._tasks = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._handle())]

    def add(self, max_tokens: int, receivers: Sequence[CountingReceiver]) -> list[str]:
        """Send requests one by one, as the peer does; returns their ids."""
        names = []
        for receiver in receivers:
            name = f"cmpl-{next(self._names):032x}"
            names.append(name)
            self._receivers[name] = receiver
            sampling = Sampling(0.0, 1.0, 0, max_tokens, True, 7)
            entry = AddRequest(name, PROMPT, sampling, time.monotonic())
            self._send(_ADD, self._encode(entry))
        return names

    def abort(self, names: Sequence[str]) -> None:
        """End requests."""
        for name in names:
            del self._receivers[name]
        if names:
            self._send(_ABORT, self._encode(list(names)))

    def rows_s(self, num_rows: int, num_repeats: int) -> float:
        """Seconds of CPU to hand the rows of one step, decoded, to their receivers."""
        rows = [RowOutput(f"cmpl-{row:032x}", [row]) for row in range(num_rows)]
        kept = self._receivers
        self._receivers = {row.request_id: CountingReceiver(lambda: None) for row in rows}
        began_at_s = time.process_time()
        for _ in range(num_repeats):
            self._hand_out(rows)
        cpu_s = time.process_time() - began_at_s
        self._receivers = kept
        return cpu_s / num_repeats

    def _send(self, kind: bytes, body: bytes) -> None:
        sent = asyncio.ensure_future(self._requests.send_multipart((kind, body), copy=False))
        if not sent.done():
            self._sends.add(sent)
            sent.add_done_callback(self._sends.discard)

    async def _read(self) -> None:
        decode = msgspec.msgpack.Decoder(StepOutputs).decode
        while True:
            frame = await self._steps.recv(copy=False)
            self.num_messages += 1
            self.num_bytes += len(frame.buffer)
            self._outputs.put_nowait(decode(frame.buffer))

    async def _handle(self) -> None:
        while True:
            outputs = (await self._outputs.get()).outputs
            for start in range(0, len(outputs), _MAX_ROWS_A_TURN):
                self._hand_out(outputs[start : start + _MAX_ROWS_A_TURN])
                if start + _MAX_ROWS_A_TURN < len(outputs):
                    await asyncio.sleep(0)

    def _hand_out(self, outputs: Sequence[RowOutput]) -> None:
        receivers = self._receivers
        for output in outputs:
            receiver = receivers.get(output.request_id)
            if receiver is not None:
                receiver.advance(output.new_token_ids, output.finish_reason)
                if output.finish_reason is not None:
                    del receivers[output.request_id]


if __name__ == "__main__":
    main()
