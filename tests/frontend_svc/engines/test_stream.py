"""One stream to an engine: messages are handed over one at a time, and none after its end."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc.aio import EOF  # type: ignore[attr-defined]  # its stubs leave it out

from frontend_svc.engines.stream import EngineStream, StreamLost
from service_kit.clock import FakeClock
from triptych.engine.v1 import engine_pb2, session_pb2


class FakeCall:
    """The call of a stream: what the engine sends is put into `incoming`, EOF ends it."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[object] = asyncio.Queue()
        self.num_reads = 0
        self.is_broken = asyncio.Event()

    async def write(self, message: engine_pb2.ConnectRequest) -> None:
        if self.is_broken.is_set():
            raise asyncio.InvalidStateError("the call is over")

    async def read(self) -> object:
        self.num_reads += 1
        return await self.incoming.get()

    async def initial_metadata(self) -> tuple[()]:
        return ()

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    async def details(self) -> str:
        return "gone"

    def cancel(self) -> bool:
        return True


class FakeStub:
    """Gives every stream the same call."""

    def __init__(self, call: FakeCall) -> None:
        self._call = call

    def Connect(self, *, wait_for_ready: bool) -> FakeCall:
        return self._call


class Taker:
    """Takes messages in two turns, of which the second waits for `may_go_on`."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.may_go_on = asyncio.Event()
        self.has_begun = asyncio.Event()

    async def take(self, message: engine_pb2.ConnectResponse) -> None:
        self.told.append(f"{message.seq} begins")
        self.has_begun.set()
        await self.may_go_on.wait()
        self.told.append(f"{message.seq} ends")


async def opened_stream(call: FakeCall) -> EngineStream:
    stream = EngineStream(FakeStub(call), FakeClock(), heartbeat_s=3600.0)  # type: ignore[arg-type]
    call.incoming.put_nowait(engine_pb2.ConnectResponse(hello_ack=session_pb2.HelloAck()))
    await stream.open(session_pb2.Hello())
    for seq in (1, 2):
        call.incoming.put_nowait(engine_pb2.ConnectResponse(seq=seq))
    return stream


async def test_the_next_message_waits_until_one_is_taken_whole():
    call, taker = FakeCall(), Taker()
    stream = await opened_stream(call)
    call.incoming.put_nowait(EOF)
    running = asyncio.ensure_future(stream.run(taker.take))
    await taker.has_begun.wait()
    num_reads = call.num_reads
    for _ in range(10):
        await asyncio.sleep(0)
    assert (call.num_reads, taker.told) == (num_reads, ["1 begins"])
    taker.may_go_on.set()
    with pytest.raises(StreamLost, match="UNAVAILABLE: gone"):
        await running
    assert taker.told == ["1 begins", "1 ends", "2 begins", "2 ends"]


async def test_a_stream_that_is_lost_while_a_message_is_taken_leaves_the_rest_of_it():
    call, taker = FakeCall(), Taker()
    stream = await opened_stream(call)
    running = asyncio.ensure_future(stream.run(taker.take))
    await taker.has_begun.wait()
    call.is_broken.set()
    stream.send(engine_pb2.ConnectRequest())
    with pytest.raises(StreamLost, match="UNAVAILABLE: gone"):
        await running
    taker.may_go_on.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert taker.told == ["1 begins"]
