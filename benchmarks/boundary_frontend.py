"""A frontend process without clients: requests, receivers that count, and how long first outputs took.

Started by `benchmarks.boundary`, which asks it by lines of JSON. Either side of the comparison brings a
connection: ours is the real `EngineClient` with its `OutputProcessor`, the peer's is in `boundary_peer`, and
in `boundary_bare` is one of nothing but gRPC.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from benchmarks.boundary_control import Line, answer_lines, say
from service_kit.process import prepare_process

PROMPT = [place * 7919 % 128_000 for place in range(128)]
_PATIENCE_S = 10.0
# Between two requests whose first output is timed: what follows an answer is not the next one's delay.
_GAP_S = 0.0003
_SETTLE_S = 0.02
_ENDLESS_TOKENS = 500_000


class CountingReceiver:
    """A request whose outputs are only counted: what a row costs at the least."""

    __slots__ = ("first_at", "has_begun", "num_tokens", "on_first")
    wants_logprobs = False

    def __init__(self, on_first: Callable[[], None]) -> None:
        self.has_begun = False
        self.num_tokens = 0
        self.first_at = 0.0
        self.on_first = on_first

    def advance(self, token_ids: list[int], ending: Any, columns: object = None) -> Any:
        """Count a step's tokens; an ending is passed back, as the processor expects."""
        if not self.has_begun:
            self.has_begun = True
            self.first_at = time.perf_counter()
            self.on_first()
        self.num_tokens += len(token_ids)
        return ending

    def note_cached(self, num_cached_tokens: int) -> None:
        """Pass over what came from the prefix cache."""

    def fail(self, error: Exception) -> None:
        """No request of a measurement may fail."""
        raise SystemExit(f"a request failed: {error}")

    def lose(self, loss: object) -> None:
        """Nor may its engine be lost; at the end of the measurement it is, and nobody looks any more."""


class Connection(Protocol):
    """A way to an engine."""

    num_messages: int
    num_bytes: int

    def add(self, max_tokens: int, receivers: Sequence[CountingReceiver]) -> list[Any]:
        """Send requests together; returns what they are called."""
        ...

    def abort(self, names: Sequence[Any]) -> None:
        """End requests."""
        ...

    def rows_s(self, num_rows: int, num_repeats: int) -> float:
        """Seconds of CPU to hand the rows of one step to their receivers, columns or structs at hand."""
        ...


class Load:
    """Requests in flight, as many as are asked for."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._names: list[Any] = []
        self._receivers: list[CountingReceiver] = []
        self._num_waiting = 0
        self._all_began = asyncio.Event()

    async def answer(self, command: Line) -> Line:
        """Do one thing that the benchmark asks for."""
        match command["do"]:
            case "fill":
                await self._fill(command["num_requests"])
                return {}
            case "first_outputs":
                return {"first_output_s": await self._time_first_outputs(command["num_samples"])}
            case "rows":
                return {"rows_s": self._connection.rows_s(command["num_rows"], command["num_repeats"])}
            case _:
                return self._counters()

    def _counters(self) -> Line:
        return {
            "cpu_s": time.process_time(),
            "num_tokens": sum(receiver.num_tokens for receiver in self._receivers),
            "num_messages": self._connection.num_messages,
            "num_bytes": self._connection.num_bytes,
        }

    async def _fill(self, num_requests: int) -> None:
        self._connection.abort(self._names[num_requests:])
        del self._names[num_requests:], self._receivers[num_requests:]
        num_new = num_requests - len(self._names)
        if num_new <= 0:
            await asyncio.sleep(_SETTLE_S)
            return
        self._num_waiting = num_new
        self._all_began.clear()
        receivers = [CountingReceiver(self._note_begin) for _ in range(num_new)]
        self._names += self._connection.add(_ENDLESS_TOKENS, receivers)
        self._receivers += receivers
        async with asyncio.timeout(_PATIENCE_S):
            await self._all_began.wait()
        # What else came with the last first output is still on its way to its receivers.
        await asyncio.sleep(_SETTLE_S)

    def _note_begin(self) -> None:
        self._num_waiting -= 1
        if not self._num_waiting:
            self._all_began.set()

    async def _time_first_outputs(self, num_samples: int) -> list[float]:
        times = []
        for _ in range(num_samples):
            await asyncio.sleep(_GAP_S)
            begun = asyncio.Event()
            receiver = CountingReceiver(begun.set)
            sent_at = time.perf_counter()
            self._connection.add(1, [receiver])
            async with asyncio.timeout(_PATIENCE_S):
                await begun.wait()
            times.append(receiver.first_at - sent_at)
        return times


class _NoModels:
    """In place of the store of artifacts: nothing is tokenized here."""

    async def model_of(self, ready: Any, stub: object) -> Any:
        from frontend_svc.text.model import GenerationDefaults, ServedModel

        return ServedModel(
            name=ready.model_name,
            text_key="",
            fingerprint="",
            tokenizer=None,
            defaults=GenerationDefaults(),
            max_model_len=ready.max_model_len,
            vocab_size=ready.vocab_size,
            eos_token_ids=tuple(ready.eos_token_ids),
        )


class _CountingChannel:
    """A channel that counts the messages of streams that it reads."""

    def __init__(self, channel: Any, connection: ClientConnection) -> None:
        self._channel = channel
        self._connection = connection
        self.unary_unary = channel.unary_unary
        self.unary_stream = channel.unary_stream
        self.stream_unary = channel.stream_unary
        self.close = channel.close
        self.channel_ready = channel.channel_ready

    def stream_stream(
        self, method: str, request_serializer: Any, response_deserializer: Any, **options: Any
    ) -> Any:
        """As the channel's; each response is counted before it is parsed."""
        connection = self._connection

        def count(data: bytes) -> Any:
            connection.num_messages += 1
            connection.num_bytes += len(data)
            return response_deserializer(data)

        return self._channel.stream_stream(method, request_serializer, count, **options)


class ClientConnection:
    """The real client of one engine."""

    def __init__(self, address: str) -> None:
        from frontend_svc.engines.connection.client import EngineClient, FrontendIdentity
        from service_kit.clock import MonotonicClock

        self.num_messages = 0
        self.num_bytes = 0
        self._changed = asyncio.Event()
        self._client = EngineClient(
            address,
            FrontendIdentity("boundary", 1),
            _NoModels(),
            MonotonicClock(),
            on_change=lambda client: self._changed.set(),
            connect=self._open,
        )

    async def open(self) -> None:
        """Connect, and wait until the engine is ready."""
        from frontend_svc.engines.connection.client import EngineState

        self._client.start()
        async with asyncio.timeout(_PATIENCE_S):
            while self._client.state is not EngineState.READY:
                self._changed.clear()
                await self._changed.wait()

    def add(self, max_tokens: int, receivers: Sequence[CountingReceiver]) -> list[int]:
        """Send requests together; returns their handles."""
        return self._client.add([_entry(max_tokens) for _ in receivers], receivers)

    def abort(self, names: Sequence[int]) -> None:
        """End requests."""
        from triptych.engine.v1 import engine_pb2

        self._client.abort(names, engine_pb2.ABORT_REASON_CLIENT)

    def rows_s(self, num_rows: int, num_repeats: int) -> float:
        """Seconds of CPU of `OutputProcessor.process` for a step, in pieces as the client has them."""
        from frontend_svc.output.processor import OutputProcessor, StepColumns

        processor = OutputProcessor(on_end=lambda handle: None)
        for handle in range(num_rows):
            processor.register(handle, CountingReceiver(lambda: None))
        step = StepColumns(range(num_rows), bytes([1] * num_rows), list(range(num_rows)), {}, {})
        pieces = list(step.slices(64))
        began_at_s = time.process_time()
        for _ in range(num_repeats):
            for piece in pieces:
                processor.process(piece)
        return (time.process_time() - began_at_s) / num_repeats

    def _open(self, address: str) -> Any:
        import grpc.aio

        from service_kit.channel import CHANNEL_OPTIONS, open_channel

        if address.startswith("unix:"):
            channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS["internal"])
        else:
            channel = open_channel(address)
        return _CountingChannel(channel, self)


_numbers = itertools.count()


def _entry(max_tokens: int) -> Any:
    from array import array

    from triptych.common.v1 import sampling_pb2
    from triptych.engine.v1 import add_pb2

    return add_pb2.AddEntry(
        request_id=f"{next(_numbers):032x}",
        prompt_token_ids=array("I", PROMPT).tobytes(),
        sampling=sampling_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        request_seed=7,
    )


async def _run(arguments: argparse.Namespace) -> None:
    if arguments.side == "ours":
        connection: Any = ClientConnection(arguments.address)
    elif arguments.side == "bare":
        from benchmarks.boundary_bare import BareConnection

        connection = BareConnection(arguments.address)
    else:
        from benchmarks.boundary_peer import PeerConnection

        connection = PeerConnection(arguments.address)
    await connection.open()
    gc.collect()
    gc.freeze()
    say({})
    await answer_lines(Load(connection).answer)


def main() -> None:
    """Hold requests in flight until the standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--side", choices=("ours", "bare", "peer"), required=True)
    parser.add_argument("--experiments", choices=("ours", "default"), default="ours")
    arguments = parser.parse_args()
    if arguments.experiments == "ours":
        prepare_process("frontend")

    import uvloop

    uvloop.run(_run(arguments))


if __name__ == "__main__":
    main()
