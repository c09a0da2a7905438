"""One stream to an engine: messages are handed over one at a time, and none after its end."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from grpc.aio import EOF  # type: ignore[attr-defined]  # its stubs leave it out

from frontend_svc.engines.connection.stream import EngineStream, StreamEnd, StreamLost
from service_kit.channel import open_channel
from service_kit.clock import FakeClock, MonotonicClock
from service_kit.errors import (
    Aborted,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    ServiceError,
    Unavailable,
    to_parts,
    to_status,
)
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc, session_pb2


class FakeCall:
    """The call of a stream: what the engine sends is put into `incoming`, EOF ends it."""

    def __init__(self, error: ServiceError | None = None) -> None:
        self.error = error
        self.acks_told: asyncio.Queue[int] = asyncio.Queue()
        self.incoming: asyncio.Queue[object] = asyncio.Queue()
        self.num_reads = 0
        self.is_broken = asyncio.Event()

    async def write(self, message: engine_pb2.ConnectRequest) -> None:
        if self.is_broken.is_set():
            raise asyncio.InvalidStateError("the call is over")
        if message.HasField("ack"):
            self.acks_told.put_nowait(message.ack.last_seq)

    async def read(self) -> object:
        self.num_reads += 1
        return await self.incoming.get()

    async def initial_metadata(self) -> tuple[()]:
        return ()

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE if self.error is None else self.error.code

    async def details(self) -> str:
        return "gone"

    async def trailing_metadata(self) -> list[tuple[str, bytes]]:
        return [] if self.error is None else [("grpc-status-details-bin", to_parts(self.error)[2])]

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


async def opened_stream(call: FakeCall, **ack: int) -> EngineStream:
    stream = EngineStream(FakeStub(call), FakeClock(), heartbeat_s=3600.0)  # type: ignore[arg-type]
    call.incoming.put_nowait(engine_pb2.ConnectResponse(hello_ack=session_pb2.HelloAck(**ack)))
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


async def test_a_message_is_taken_to_its_end_though_the_stream_is_left_meanwhile_and_none_after_it():
    call, taker = FakeCall(), Taker()
    stream = await opened_stream(call)
    running = asyncio.ensure_future(stream.run(taker.take))
    await taker.has_begun.wait()
    running.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not running.done()
    taker.may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert taker.told == ["1 begins", "1 ends"]
    # Another stream goes on behind it: no more and no less than this was handled.
    assert stream.last_seq == 1


async def test_what_the_engine_has_said_is_heard_though_nothing_can_be_written_any_more():
    call, taker = FakeCall(Unavailable("left", reason="ENGINE_DRAINED")), Taker()
    stream = await opened_stream(call)
    running = asyncio.ensure_future(stream.run(taker.take))
    await taker.has_begun.wait()
    call.is_broken.set()
    stream.send(engine_pb2.ConnectRequest())
    for _ in range(10):
        await asyncio.sleep(0)
    taker.may_go_on.set()
    call.incoming.put_nowait(EOF)
    with pytest.raises(StreamLost) as caught:
        await running
    assert taker.told == ["1 begins", "1 ends", "2 begins", "2 ends"]
    assert (caught.value.end, stream.last_seq) == (StreamEnd.LEFT, 2)


async def test_only_what_was_handled_whole_is_acknowledged():
    call, taker = FakeCall(), Taker()
    stream = await opened_stream(call, ack_interval_messages=1)
    running = asyncio.ensure_future(stream.run(taker.take))
    await taker.has_begun.wait()
    assert call.acks_told.empty()
    taker.may_go_on.set()
    async with asyncio.timeout(10):
        assert [await call.acks_told.get(), await call.acks_told.get()] == [1, 2]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_much_is_acknowledged_at_once_however_few_messages_it_came_in():
    call, taker = FakeCall(), Taker()
    taker.may_go_on.set()
    stream = await opened_stream(call, ack_interval_messages=1000, ack_interval_ms=3_600_000)
    half = "x" * (512 * 1024)
    for seq in (3, 4, 5, 6):
        dead = engine_pb2.Dead(reason=half)
        call.incoming.put_nowait(engine_pb2.ConnectResponse(seq=seq, dead=dead))
    running = asyncio.ensure_future(stream.run(taker.take))
    async with asyncio.timeout(10):
        assert [await call.acks_told.get(), await call.acks_told.get()] == [4, 6]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_stream_of_a_resumed_session_goes_on_behind_what_was_handled():
    call, taker = FakeCall(), Taker()
    taker.may_go_on.set()
    stream = EngineStream(FakeStub(call), FakeClock(), heartbeat_s=3600.0, last_seq=7)  # type: ignore[arg-type]
    ack = session_pb2.HelloAck(resume_ok=True)
    for message in (engine_pb2.ConnectResponse(hello_ack=ack), engine_pb2.ConnectResponse(seq=8), EOF):
        call.incoming.put_nowait(message)
    await stream.open(session_pb2.Hello())
    with pytest.raises(StreamLost, match="gone"):
        await stream.run(taker.take)
    assert (taker.told, stream.last_seq) == (["8 begins", "8 ends"], 8)


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (None, StreamEnd.BROKEN),
        (Unavailable("left", reason="ENGINE_DRAINED"), StreamEnd.LEFT),
        (Unavailable("dead", reason="ENGINE_DEAD"), StreamEnd.FAILED),
        (FailedPrecondition("old", reason="REVISION_TOO_OLD"), StreamEnd.INCOMPATIBLE),
        (ResourceExhausted("slow", reason="SLOW_READER"), StreamEnd.DISMISSED),
        (Aborted("too much", reason="REPLAY_OVERFLOW"), StreamEnd.DISMISSED),
        (InvalidArgument("hello again", reason="WRONG"), StreamEnd.VOID),
    ],
    ids=["wire", "drained", "dead", "revision", "slow reader", "overflow", "contract"],
)
async def test_how_a_stream_ends_says_what_becomes_of_its_requests(error, end):
    call = FakeCall(error)
    stream = await opened_stream(call)
    call.incoming.put_nowait(EOF)
    taker = Taker()
    taker.may_go_on.set()
    with pytest.raises(StreamLost) as caught:
        await stream.run(taker.take)
    assert caught.value.end is end


async def test_who_does_not_answer_a_hello_in_time_is_silent():
    stream = EngineStream(FakeStub(FakeCall()), FakeClock(), waits=False)  # type: ignore[arg-type]
    with pytest.raises(StreamLost, match=r"no hello_ack within 0\.01 s") as caught:
        await stream.open(session_pb2.Hello(), limit_s=0.01)
    assert caught.value.end is StreamEnd.SILENT


class PartingServicer(engine_pb2_grpc.EngineCoreServiceServicer):
    """Says all that it has to say and drains at once, as an engine whose frontend is slow to read."""

    async def Connect(self, requests, context):
        await anext(aiter(requests))
        yield engine_pb2.ConnectResponse(hello_ack=session_pb2.HelloAck())
        for seq in range(1, 11):
            yield engine_pb2.ConnectResponse(seq=seq)
        status = to_status(Unavailable("left", reason="ENGINE_DRAINED"))
        await context.abort_with_status(status)

    async def GetEngineInfo(self, request, context):
        return engine_pb2.GetEngineInfoResponse()


async def test_writes_that_come_too_late_cost_nothing_of_what_a_real_call_has_still_to_be_read():
    server = grpc.aio.server()
    engine_pb2_grpc.add_EngineCoreServiceServicer_to_server(PartingServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    told = []
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = engine_pb2_grpc.EngineCoreServiceStub(channel)
        stream = EngineStream(stub, MonotonicClock())
        await stream.open(session_pb2.Hello())

        async def take(message: engine_pb2.ConnectResponse) -> None:
            # Its answer comes behind all of the stream, over the same connection: the call is over by then,
            # and so is what was written before this.
            for _ in range(2):
                await stub.GetEngineInfo(engine_pb2.GetEngineInfoRequest())
            told.append(message.seq)
            stream.send(engine_pb2.ConnectRequest(ack=engine_pb2.Ack(last_seq=message.seq)))

        with pytest.raises(StreamLost, match="left") as caught:
            await stream.run(take)
    await server.stop(None)
    assert told == list(range(1, 11))
    assert caught.value.end is StreamEnd.LEFT
