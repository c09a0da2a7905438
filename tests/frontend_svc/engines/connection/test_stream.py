"""One stream to an engine: messages are handed over one at a time, and none after its end."""

from __future__ import annotations

import asyncio
import itertools

import grpc
import grpc.aio
import pytest
from grpc.aio import EOF  # type: ignore[attr-defined]  # its stubs leave it out

from frontend_svc.engines.connection.client import ReadyMailbox
from frontend_svc.engines.connection.health import StepWatch
from frontend_svc.engines.connection.session import EngineSession
from frontend_svc.engines.connection.stream import EngineStream, StreamEnd, StreamLost
from frontend_svc.engines.connection.transport import open_transport
from frontend_svc.output.collector import Ending, EndReason
from frontend_svc.output.processor import StepColumns
from triptych.engine.v1 import add_pb2, engine_pb2, engine_pb2_grpc, session_pb2, step_pb2, utility_pb2
from triptych_kit.channel import open_channel
from triptych_kit.clock import FakeClock, MonotonicClock
from triptych_kit.errors import (
    Aborted,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    ServiceError,
    Unavailable,
    to_parts,
    to_status,
)


class FakeCall:
    """The call of a stream: what the engine sends is put into `incoming`, EOF ends it."""

    def __init__(self, error: ServiceError | None = None) -> None:
        self.error = error
        self.received_acks: asyncio.Queue[int] = asyncio.Queue()
        self.incoming: asyncio.Queue[object] = asyncio.Queue()
        self.num_reads = 0
        self.is_broken = asyncio.Event()
        self.written: list[engine_pb2.ConnectRequest] = []
        self.is_done = asyncio.Event()
        self.accepted: asyncio.Future[None] | None = None  # what writes wait for

    async def write(self, message: engine_pb2.ConnectRequest) -> None:
        if self.is_broken.is_set():
            raise asyncio.InvalidStateError("the call is over")
        written = engine_pb2.ConnectRequest()
        written.CopyFrom(message)
        self.written.append(written)
        if self.accepted is not None:
            await asyncio.shield(self.accepted)
        if message.HasField("ack"):
            self.received_acks.put_nowait(message.ack.last_seq)

    async def read(self) -> object:
        self.num_reads += 1
        return await self.incoming.get()

    async def done_writing(self) -> None:
        self.is_done.set()

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
        self.events: list[str] = []
        self.may_go_on = asyncio.Event()
        self.has_begun = asyncio.Event()

    async def take(self, message: engine_pb2.ConnectResponse) -> None:
        self.events.append(f"{message.seq} begins")
        self.has_begun.set()
        await self.may_go_on.wait()
        self.events.append(f"{message.seq} ends")


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
    running = asyncio.ensure_future(stream.receive(taker.take))
    await taker.has_begun.wait()
    num_reads = call.num_reads
    for _ in range(10):
        await asyncio.sleep(0)
    assert (call.num_reads, taker.events) == (num_reads, ["1 begins"])
    taker.may_go_on.set()
    with pytest.raises(StreamLost, match="UNAVAILABLE: gone"):
        await running
    assert taker.events == ["1 begins", "1 ends", "2 begins", "2 ends"]


async def test_a_message_is_taken_to_its_end_though_the_stream_is_left_meanwhile_and_none_after_it():
    call, taker = FakeCall(), Taker()
    stream = await opened_stream(call)
    running = asyncio.ensure_future(stream.receive(taker.take))
    await taker.has_begun.wait()
    running.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not running.done()
    taker.may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert taker.events == ["1 begins", "1 ends"]
    # Another stream goes on behind it: no more and no less than this was handled.
    assert stream.last_seq == 1


async def test_messages_of_the_engine_are_received_though_nothing_can_be_written_any_more():
    call, taker = FakeCall(Unavailable("left", reason="ENGINE_DRAINED")), Taker()
    stream = await opened_stream(call)
    running = asyncio.ensure_future(stream.receive(taker.take))
    await taker.has_begun.wait()
    call.is_broken.set()
    stream.send(engine_pb2.ConnectRequest())
    for _ in range(10):
        await asyncio.sleep(0)
    taker.may_go_on.set()
    call.incoming.put_nowait(EOF)
    with pytest.raises(StreamLost) as caught:
        await running
    assert taker.events == ["1 begins", "1 ends", "2 begins", "2 ends"]
    assert (caught.value.end, stream.last_seq) == (StreamEnd.LEFT, 2)


def add(handle: int, num_tokens: int = 1) -> engine_pb2.ConnectRequest:
    entry = add_pb2.AddEntry(handle=handle, prompt_token_ids=bytes(4 * num_tokens))
    return engine_pb2.ConnectRequest(add=add_pb2.Add(entries=[entry]))


def abort(handle: int, reason: engine_pb2.AbortReason) -> engine_pb2.ConnectRequest:
    return engine_pb2.ConnectRequest(abort=engine_pb2.Abort(handles=[handle], attempts=[0], reason=reason))


async def written_of(*messages: engine_pb2.ConnectRequest, **ack: int) -> list[engine_pb2.ConnectRequest]:
    """What the stream writes of messages that wait for one which it has not accepted."""
    call = FakeCall()
    stream, taker = await opened_stream(call, **ack), Taker()
    taker.may_go_on.set()
    running = asyncio.ensure_future(stream.receive(taker.take))
    call.accepted = accepted = asyncio.get_running_loop().create_future()
    for message in (add(0), *messages):
        stream.send(message)
    stream.close(engine_pb2.Goodbye())
    await asyncio.sleep(0)
    call.accepted = None
    accepted.set_result(None)
    await call.is_done.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    hello, first, *rest, goodbye = call.written
    assert (hello.HasField("hello"), first, goodbye.HasField("goodbye")) == (True, add(0), True)
    return rest


async def test_adds_that_wait_go_together_and_aborts_behind_them():
    client, stop = engine_pb2.ABORT_REASON_CLIENT, engine_pb2.ABORT_REASON_STOP_STRING
    written = await written_of(
        abort(0, client), add(1), abort(1, client), add(2), abort(2, client), abort(3, stop), abort(4, client)
    )
    adds = add_pb2.Add(entries=[*add(1).add.entries, *add(2).add.entries])
    aborts = engine_pb2.Abort(handles=[1, 2, 4], attempts=[0, 0, 0], reason=client)
    assert written == [
        abort(0, client),
        engine_pb2.ConnectRequest(add=adds),
        engine_pb2.ConnectRequest(abort=aborts),
        abort(3, stop),
    ]


async def test_of_acks_that_wait_the_last_is_sent():
    acks = [engine_pb2.ConnectRequest(ack=engine_pb2.Ack(last_seq=seq)) for seq in (3, 4, 5)]
    assert await written_of(acks[0], add(1), *acks[1:]) == [acks[2], add(1)]


async def test_adds_behind_another_message_stay_behind_it():
    call = engine_pb2.ConnectRequest(utility=utility_pb2.UtilityCall(call_id=1))
    assert await written_of(add(1), call, add(2)) == [add(1), call, add(2)]


async def test_adds_go_together_as_far_as_the_engine_takes_them():
    adds = [add(handle, num_tokens=100) for handle in range(1, 6)]
    written = await written_of(*adds, max_frame_bytes=1000)
    assert [len(message.add.entries) for message in written] == [2, 2, 1]


async def test_only_what_was_handled_whole_is_acknowledged():
    call, taker = FakeCall(), Taker()
    stream = await opened_stream(call, ack_interval_messages=1)
    running = asyncio.ensure_future(stream.receive(taker.take))
    await taker.has_begun.wait()
    assert call.received_acks.empty()
    taker.may_go_on.set()
    async with asyncio.timeout(10):
        assert [await call.received_acks.get(), await call.received_acks.get()] == [1, 2]
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
        await stream.receive(taker.take)
    assert (taker.events, stream.last_seq) == (["8 begins", "8 ends"], 8)


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
        await stream.receive(taker.take)
    assert caught.value.end is end


async def test_an_engine_that_does_not_answer_a_hello_in_time_is_silent():
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
    events = []
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = engine_pb2_grpc.EngineCoreServiceStub(channel)
        stream = EngineStream(stub, MonotonicClock())
        await stream.open(session_pb2.Hello())

        async def take(message: engine_pb2.ConnectResponse) -> None:
            # Its answer comes behind all of the stream, over the same connection: the call is over by then,
            # and so is what was written before this.
            for _ in range(2):
                await stub.GetEngineInfo(engine_pb2.GetEngineInfoRequest())
            events.append(message.seq)
            stream.send(engine_pb2.ConnectRequest(ack=engine_pb2.Ack(last_seq=message.seq)))

        with pytest.raises(StreamLost, match="left") as caught:
            await stream.receive(take)
    await server.stop(None)
    assert events == list(range(1, 11))
    assert caught.value.end is StreamEnd.LEFT


class _TakesNoMore(Exception):
    pass


class EagerServicer(engine_pb2_grpc.EngineCoreServiceServicer):
    """Sends steps as fast as its frontend takes them."""

    num_sent_bytes = 0

    async def Connect(self, requests, context):
        await anext(aiter(requests))
        yield engine_pb2.ConnectResponse(hello_ack=session_pb2.HelloAck())
        for seq in itertools.count(1):
            message = engine_pb2.ConnectResponse(seq=seq, step=step_pb2.Step(token_ids=bytes(1024)))
            self.num_sent_bytes += message.ByteSize()
            yield message

    async def GetEngineInfo(self, request, context):
        return engine_pb2.GetEngineInfoResponse()


async def test_of_the_steps_that_a_frontend_does_not_read_all_but_a_few_stay_in_the_engine():
    server, servicer = grpc.aio.server(), EagerServicer()
    engine_pb2_grpc.add_EngineCoreServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    transport = open_transport(f"127.0.0.1:{port}")
    stream = transport.open_stream(MonotonicClock(), heartbeat_s=3600.0, last_seq=0)
    await stream.open(session_pb2.Hello())

    async def take(message: engine_pb2.ConnectResponse) -> None:
        # Over the same connection: meanwhile the engine sends what fits into the window.
        for _ in range(100):
            await transport.stub.GetEngineInfo(engine_pb2.GetEngineInfoRequest())
        raise _TakesNoMore

    with pytest.raises(_TakesNoMore):
        await stream.receive(take)
    await transport.close()
    await server.stop(None)
    # The window, the message that waits for it, and those that were read.
    assert servicer.num_sent_bytes <= 8192 + 4 * 1024


# What a frontend remembers of a session while its streams come and go.


def entry(handle: int, *, num_bytes: int = 4, attempt: int = 0) -> add_pb2.AddEntry:
    return add_pb2.AddEntry(handle=handle, attempt=attempt, prompt_token_ids=bytes(num_bytes))


def begun(*entries: add_pb2.AddEntry, max_frame_bytes: int = 0) -> EngineSession:
    session = EngineSession()
    session.open(7, is_resumable=True, max_frame_bytes=max_frame_bytes)
    session.add(entries)
    return session


def test_what_has_no_answer_is_sent_again_in_frames_of_a_limited_size():
    large = 7 * 1024 * 1024
    session = begun(*(entry(handle, num_bytes=large) for handle in range(5)), entry(9))
    frames = [[one.handle for one in message.add.entries] for message in session.unanswered()]
    assert frames == [[0, 1], [2, 3], [4, 9]]


def test_no_message_is_larger_than_the_engine_takes():
    entries = [entry(handle, num_bytes=1000) for handle in range(5)]
    session = begun(max_frame_bytes=2100)
    for messages in (list(session.add(entries)), list(session.unanswered())):
        assert [len(message.add.entries) for message in messages] == [2, 2, 1]
        assert max(message.ByteSize() for message in messages) <= 2100


def ended(handle: int, *, turn_ended: bool) -> StepColumns:
    return StepColumns([handle], [0], [], {0: Ending(EndReason.LENGTH, turn_ended=turn_ended)}, {})


def test_turns_that_have_not_ended_are_sent_again_and_cancelled_again():
    session = begun(entry(1), entry(2))
    session.on_step(ended(1, turn_ended=True))
    session.on_step(ended(2, turn_ended=True))
    assert list(session.unanswered()) == []
    session.add([add_pb2.AddEntry(handle=1, segment=1, resumable=True)])
    session.cancel_turn(1, 1)
    added, cancelled = session.unanswered()
    assert added.add.entries[0].segment == 1
    assert cancelled.cancel_turn == engine_pb2.CancelTurn(handle=1, segment=1)
    session.on_step(ended(1, turn_ended=True))
    session.add([add_pb2.AddEntry(handle=1, segment=2)])
    (closing,) = session.unanswered()
    assert closing.add.entries[0].segment == 2
    session.on_step(ended(1, turn_ended=False))
    assert list(session.unanswered()) == []
    # What is between two turns is still open, and ends with the session.
    session.mark_moved()
    assert session.num_moved == 1


def test_moved_requests_are_counted_until_the_engine_has_ended_them():
    session = begun(entry(1), entry(2, attempt=3))
    assert session.num_moved == 0
    session.mark_moved()
    assert session.num_moved == 2
    *_, abort = session.unanswered()
    assert (list(abort.abort.handles), list(abort.abort.attempts)) == ([1, 2], [0, 3])
    assert abort.abort.reason == engine_pb2.ABORT_REASON_MIGRATED
    session.on_finished([1, 2])
    assert session.num_moved == 0


# What an engine said of itself: the newest counts, and none is lost by a reader that is stopped.

OLD, NEW = session_pb2.Ready(model_name="old"), session_pb2.Ready(model_name="new")


async def test_it_is_there_until_it_was_read():
    mailbox = ReadyMailbox()
    mailbox.put(OLD)
    assert [await mailbox.get(), await mailbox.get()] == [OLD, OLD]
    mailbox.note_read(OLD)
    waiting = asyncio.ensure_future(mailbox.get())
    await asyncio.sleep(0)
    assert not waiting.done()
    mailbox.put(NEW)
    assert await waiting is NEW


async def test_what_comes_while_another_is_read_is_read_next():
    mailbox = ReadyMailbox()
    mailbox.put(OLD)
    mailbox.put(NEW)
    mailbox.note_read(OLD)
    assert await mailbox.get() is NEW


async def test_the_end_of_a_session_takes_it_away():
    mailbox = ReadyMailbox()
    mailbox.put(OLD)
    mailbox.clear(is_loading=False)
    waiting = asyncio.ensure_future(mailbox.get())
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()


# When an engine's loop is taken to hang.


def heartbeat(age_s: float, **fields: object) -> session_pb2.Heartbeat:
    return session_pb2.Heartbeat(**{"has_work": True, "step_started_age_ms": int(age_s * 1000), **fields})


def test_a_step_hangs_when_its_announced_budget_is_exceeded():
    watch = StepWatch()
    assert watch.on_heartbeat(heartbeat(50.0, step_budget_ms=60_000)) is None
    assert watch.on_heartbeat(heartbeat(61.0, step_budget_ms=60_000)) == 61.0


def test_an_engine_that_announces_no_budget_has_five_seconds():
    watch = StepWatch()
    assert watch.on_heartbeat(heartbeat(4.9)) is None
    assert watch.on_heartbeat(heartbeat(5.1)) == 5.1


def test_an_engine_without_work_or_without_a_step_does_not_hang():
    watch = StepWatch()
    assert watch.on_heartbeat(heartbeat(60.0, has_work=False)) is None
    assert watch.on_heartbeat(session_pb2.Heartbeat(has_work=True)) is None
    assert watch.age_s == 0.0


def test_a_hang_is_reported_once_and_ends_with_the_step():
    watch = StepWatch()
    assert watch.on_heartbeat(heartbeat(6.0, step_number=7)) == 6.0
    assert watch.on_heartbeat(heartbeat(6.5, step_number=7)) is None
    assert watch.hung_step == 7
    assert watch.on_heartbeat(heartbeat(0.1, step_number=8)) is None
    assert watch.hung_step is None


def test_the_budget_of_steps_is_the_newest_within_a_minute():
    watch = StepWatch()
    budgets = [watch.budget_s]
    for budget_ms in (20_000, 600_000, 0):
        watch.on_heartbeat(heartbeat(0.0, step_budget_ms=budget_ms))
        budgets.append(watch.budget_s)
    assert budgets == [5.0, 20.0, 60.0, 5.0]
