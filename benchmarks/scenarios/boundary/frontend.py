"""A frontend process without clients: requests, receivers that count, and how long first outputs took."""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any, Protocol

from triptych_kit.process.setup import prepare_process

prepare_process("frontend")

import uvloop  # noqa: E402

from benchmarks.rig.lines import Line, answer_lines, send_line  # noqa: E402
from frontend_svc.engines.connection.client import EngineClient, EngineState, FrontendIdentity  # noqa: E402
from frontend_svc.engines.connection.transport import GrpcTransport, engine_channel  # noqa: E402
from frontend_svc.output.processor import OutputProcessor, StepColumns  # noqa: E402
from frontend_svc.text.model import GenerationDefaults, ServedModel  # noqa: E402
from triptych.common.v1 import sampling_pb2  # noqa: E402
from triptych.engine.v1 import add_pb2, engine_pb2, engine_pb2_grpc  # noqa: E402
from triptych_kit.channel import open_channel  # noqa: E402
from triptych_kit.clock import MonotonicClock  # noqa: E402

_PROMPT = array("I", [index * 7919 % 128_000 for index in range(128)]).tobytes()
_PATIENCE_S = 10.0
# Between two requests whose first output is timed: what follows an answer is not the next one's delay.
_GAP_S = 0.0003
_ENDLESS_TOKENS = 500_000
_ROWS_A_PIECE = 64  # as the client hands them out


class CountingReceiver:
    """A request whose outputs are only counted: what a row costs at the least."""

    __slots__ = ("first_at", "has_begun", "num_tokens", "on_first")
    wants_logprobs = False
    has_stop_strings = False

    def __init__(self, on_first: Callable[[], None]) -> None:
        self.has_begun = False
        self.num_tokens = 0
        self.first_at = 0.0
        self.on_first = on_first

    def advance(self, token_ids: list[int], ending: Any, columns: object = None) -> Any:
        if not self.has_begun:
            self.has_begun = True
            self.first_at = time.perf_counter()
            self.on_first()
        self.num_tokens += len(token_ids)
        return ending

    def note_cached(self, num_cached_tokens: int) -> None:
        pass

    def note_progress(self, progress: object) -> None:
        pass

    def fail(self, error: Exception) -> None:
        raise SystemExit(f"a request failed: {error}")

    def lose(self, loss: object) -> None:
        """At the end of the measurement the engine is lost."""


class Connection(Protocol):
    """A stream to an engine."""

    num_messages: int

    async def open(self) -> None: ...
    def add(self, receiver: CountingReceiver) -> None: ...
    def rows_s(self, num_rows: int, num_repeats: int) -> float: ...


class _NoModels:
    """In place of the store of artifacts: nothing is tokenized here."""

    async def model_of(self, ready: Any, stub: object) -> ServedModel:
        return ServedModel(
            name=ready.model_name,
            text_key="",
            fingerprint="",
            tokenizer=None,  # type: ignore[arg-type]
            defaults=GenerationDefaults(),
            max_model_len=ready.max_model_len,
            vocab_size=ready.vocab_size,
            eos_token_ids=tuple(ready.eos_token_ids),
        )

    async def until_loaded(self, model: ServedModel) -> None:
        """No worker has a tokenizer to load."""


class _CountingChannel:
    """A channel that counts the messages of streams that it reads."""

    def __init__(self, channel: Any, connection: ClientConnection) -> None:
        self._channel, self._connection = channel, connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def stream_stream(
        self, method: str, request_serializer: Any, response_deserializer: Any, **options: Any
    ) -> Any:
        def count(data: bytes) -> Any:
            self._connection.num_messages += 1
            return response_deserializer(data)

        return self._channel.stream_stream(method, request_serializer, count, **options)


class ClientConnection:
    """The real client of one engine."""

    def __init__(self, address: str) -> None:
        self.num_messages = 0
        self._changed = asyncio.Event()
        self._client = EngineClient(
            address,
            FrontendIdentity("boundary", 1),
            _NoModels(),  # type: ignore[arg-type]
            MonotonicClock(),
            on_change=lambda client: self._changed.set(),
            connect=lambda address: GrpcTransport(_CountingChannel(engine_channel(address), self)),  # type: ignore[arg-type]
        )

    async def open(self) -> None:
        self._client.start()
        async with asyncio.timeout(_PATIENCE_S):
            while self._client.state is not EngineState.READY:
                self._changed.clear()
                await self._changed.wait()

    def add(self, receiver: CountingReceiver) -> None:
        self._client.requests.add([_entry()], [receiver])  # type: ignore[list-item]

    def rows_s(self, num_rows: int, num_repeats: int) -> float:
        """Seconds of CPU of `OutputProcessor.process` for a step, in pieces as the client has them."""
        processor = OutputProcessor(on_end=lambda handle: None)
        for handle in range(num_rows):
            processor.register(handle, CountingReceiver(lambda: None))  # type: ignore[arg-type]
        step = StepColumns(range(num_rows), bytes([1] * num_rows), list(range(num_rows)), {}, {})
        pieces = list(step.slices(_ROWS_A_PIECE))
        began_at_s = time.process_time()
        for _ in range(num_repeats):
            for piece in pieces:
                processor.process(piece)
        return (time.process_time() - began_at_s) / num_repeats


class BareConnection:
    """The messages of the stream, read and counted. Rows have the order in which requests were added."""

    def __init__(self, address: str) -> None:
        self.num_messages = 0
        stub: Any = engine_pb2_grpc.EngineCoreServiceStub(open_channel(address))
        self._call = stub.Connect(wait_for_ready=True)
        self._receivers: list[CountingReceiver] = []
        self._requests: asyncio.Queue[engine_pb2.ConnectRequest] = asyncio.Queue()

    async def open(self) -> None:
        await self._call.write(engine_pb2.ConnectRequest())
        self._tasks = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._write())]

    def add(self, receiver: CountingReceiver) -> None:
        self._receivers.append(receiver)
        entry = _entry()
        entry.handle = len(self._receivers)
        self._requests.put_nowait(engine_pb2.ConnectRequest(add=add_pb2.Add(entries=[entry])))

    def rows_s(self, num_rows: int, num_repeats: int) -> float:
        receivers = [CountingReceiver(lambda: None) for _ in range(num_rows)]
        began_at_s = time.process_time()
        for _ in range(num_repeats):
            for receiver in receivers:
                receiver.advance([1], None)
        return (time.process_time() - began_at_s) / num_repeats

    async def _read(self) -> None:
        while True:
            message = await self._call.read()
            self.num_messages += 1
            for receiver in self._receivers[: len(message.step.num_tokens)]:
                receiver.advance([1], None)

    async def _write(self) -> None:
        while True:
            await self._call.write(await self._requests.get())


class Load:
    """Requests in flight, as many as are asked for."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._receivers: list[CountingReceiver] = []

    async def answer(self, command: Line) -> Line:
        match command["do"]:
            case "fill":
                return {"first_output_s": [await self._add() for _ in range(command["num_requests"])]}
            case "rows":
                return {"rows_s": self._connection.rows_s(command["num_rows"], command["num_repeats"])}
            case _:
                return {
                    "cpu_s": time.process_time(),
                    "num_tokens": sum(receiver.num_tokens for receiver in self._receivers),
                    "num_messages": self._connection.num_messages,
                }

    async def _add(self) -> float:
        """Add a request; the seconds to its first output."""
        await asyncio.sleep(_GAP_S)
        begun = asyncio.Event()
        receiver = CountingReceiver(begun.set)
        self._receivers.append(receiver)
        sent_at = time.perf_counter()
        self._connection.add(receiver)
        async with asyncio.timeout(_PATIENCE_S):
            await begun.wait()
        return receiver.first_at - sent_at


_numbers = itertools.count()


def _entry() -> add_pb2.AddEntry:
    return add_pb2.AddEntry(
        request_id=f"{next(_numbers):032x}",
        prompt_token_ids=_PROMPT,
        sampling=sampling_pb2.SamplingParams(temperature=0.0, max_tokens=_ENDLESS_TOKENS, ignore_eos=True),
        request_seed=7,
    )


async def _run(side: str, address: str) -> None:
    connection: Connection = ClientConnection(address) if side == "ours" else BareConnection(address)
    await connection.open()
    gc.collect()
    gc.freeze()
    send_line({})
    await answer_lines(Load(connection).answer)


if __name__ == "__main__":
    uvloop.run(_run(*sys.argv[1:3]))
