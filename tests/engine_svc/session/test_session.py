"""Requests over a Connect stream, with real gRPC, the real scheduler and a fake model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import hashlib
import hmac
import logging
import random
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import status_pb2
from grpc_status import rpc_status

from engine_svc.admin.lifecycle import EngineState
from engine_svc.admin.utility import UtilityService
from engine_svc.adoption.orphaned_requests import OrphanedRequests
from engine_svc.core.request import Request
from engine_svc.core.step import TokenLogprobs
from engine_svc.loop.mailbox import KVEventLog
from engine_svc.loop.step_output import MAX_PIECE_BYTES
from engine_svc.session.kv_subscription import KVSubscription
from engine_svc.session.servicer import FULL_NAME
from engine_svc.session.session import Session, SessionLink
from engine_svc.tensors.source import TensorReceiver
from tests.connections import without_collections
from tests.engine_svc.fakes import LIMIT_S, expected_tokens, make_scheduler
from tests.engine_svc.loop.logprob_executor import emit_logprobs
from tests.engine_svc.session.service_rig import (
    ABORT,
    LENGTH,
    ServiceRig,
    StreamClient,
    added,
    connected,
    lost,
    make_entry,
    make_facts,
    parked,
    prompt_of,
    served,
    serving,
    session_id_of,
    until_finished,
)
from triptych.common.v1 import tensor_pb2
from triptych.engine.v1 import add_pb2, engine_pb2, engine_pb2_grpc, session_pb2, utility_pb2
from triptych_kit import shared_memory
from triptych_kit.channel import open_channel


async def test_an_abort_in_a_run_ends_it_at_once_and_frees_its_blocks():
    async with connected() as (rig, stub, client):
        rig.executor.gate.clear()
        await client.add(make_entry(1, max_tokens=100))
        await asyncio.to_thread(rig.executor.wait_for_launches, 1)
        await client.abort(1)
        # The abort is in the inbox before the step's result can be had: then nothing of it is kept.
        await client.abort(1, 1, 77)
        await client.flush()
        rig.executor.gate.set()
        await client.until_ended(1)
        load = await stub.GetLoad(engine_pb2.GetLoadRequest())
        assert client.finished == {1: [ABORT]}
        assert client.tokens == {1: []}
        assert (load.stats.num_used_blocks, load.stats.step_number, load.stats.num_running) == (0, 1, 0)


async def test_two_hundred_cancels_at_random_moments_end_each_request_once_and_leave_no_block():
    rig, rng = ServiceRig(), random.Random(4)
    async with serving(rig) as stub:
        client = StreamClient(stub, "f")
        await client.open()

        async def cancel_after(handle: int, num_tokens: int) -> None:
            await client.add(make_entry(handle, max_tokens=100))
            await client.until(
                lambda: len(client.tokens.get(handle, [])) >= num_tokens or handle in client.finished
            )
            await client.abort(handle)

        for first in range(0, 200, 20):
            await asyncio.gather(
                *(cancel_after(handle, rng.randrange(40)) for handle in range(first, first + 20))
            )
        await client.until_ended(*range(200))
        load = await stub.GetLoad(engine_pb2.GetLoadRequest())
        assert (load.stats.num_used_blocks, load.stats.num_finished) == (0, 200)
        assert all(len(reasons) == 1 for reasons in client.finished.values())
        for handle, tokens in client.tokens.items():
            assert tokens == expected_tokens(prompt_of(handle), handle, 100)[: len(tokens)]


async def test_an_abort_of_very_many_is_acted_on_in_pieces():
    async with connected() as (_, _, client):
        await client.add(make_entry(1))
        await client.until_ended(1)
        await client.abort(*[1] * 10_000)
        await client.flush()
        answers = [
            message.already_finished for message in client.received if message.HasField("already_finished")
        ]
        assert [len(answer.handles) for answer in answers] == [4096, 4096, 1808]


async def test_a_lost_stream_aborts_its_requests_and_no_others():
    async with served() as (rig, stub):
        lost, other = StreamClient(stub, "lost"), StreamClient(stub, "other")
        await lost.open()
        await other.open()
        rig.executor.gate.clear()
        await lost.add(*(make_entry(handle, max_tokens=100) for handle in range(5)))
        await asyncio.to_thread(rig.executor.wait_for_launches, 1)
        await other.add(make_entry(1, max_tokens=10))
        await lost.close()
        await _until(stub, lambda load: load.num_sessions == 1)
        rig.executor.gate.set()
        await other.until_ended(1)
        load = await stub.GetLoad(engine_pb2.GetLoadRequest())
        assert other.tokens == {1: expected_tokens(prompt_of(1), 1, 10)}
        assert (load.stats.num_finished, load.stats.num_used_blocks) == (6, 0)


async def test_goodbye_ends_the_stream_and_its_requests():
    async with connected() as (rig, stub, client):
        rig.executor.hold_at = 5
        await client.add(make_entry(1, max_tokens=100))
        await client.until(lambda: 1 in client.tokens)
        await client.send(engine_pb2.ConnectRequest(goodbye=engine_pb2.Goodbye()))
        await client.until(lambda: client.is_over)
        assert client.error is None
        rig.executor.gate.set()
        await _until(stub, lambda load: load.stats.num_finished == 1 and load.stats.num_used_blocks == 0)


async def test_an_add_that_a_bug_of_ours_stands_in_the_way_of_is_answered_alone(caplog):
    rig = ServiceRig()

    def prepare(request: Request) -> None:
        if len(request.token_ids) == 3:
            raise ZeroDivisionError("a secret of the house")

    async with serving(rig) as stub:
        assert rig.engine.core is not None
        rig.engine.core = dataclasses.replace(rig.engine.core, prepare=prepare)
        client = StreamClient(stub, "f")
        await client.open()
        await client.add(make_entry(1), make_entry(2, prompt=[1, 2, 3]), make_entry(3))
        await client.until_ended(1, 3)
        assert set(client.rejected) == {2}
        status = client.rejected[2].status
        assert status.code == grpc.StatusCode.INTERNAL.value[0]
        assert "secret" not in status.message
        # Its handle is free again.
        await client.add(make_entry(2, attempt=1))
        await client.until_ended(2)
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.exc_info is not None


async def test_a_request_that_can_never_fit_is_refused():
    async with connected() as (_, _, client):
        await client.add(make_entry(1, prompt=[1] * 128), make_entry(2, prompt=[1] * 100, max_tokens=29))
        await client.until(lambda: set(client.rejected) == {1, 2})
        assert "127" in client.rejected[1].status.message
        assert "1 to 28" in client.rejected[2].status.message


async def test_a_handle_in_use_is_refused_and_its_request_goes_on():
    async with connected() as (rig, _, client):
        rig.executor.gate.clear()
        await client.add(make_entry(1, max_tokens=20), make_entry(1, attempt=1))
        await client.until(lambda: 1 in client.rejected)
        rig.executor.gate.set()
        await client.until_ended(1)
        assert client.rejected[1].attempt == 1
        assert client.rejected[1].status.code == grpc.StatusCode.ALREADY_EXISTS.value[0]
        assert len(client.tokens[1]) == 20


async def test_a_request_id_is_in_use_until_its_request_ends_or_is_aborted():
    """Section 6, request_id."""
    async with connected() as (rig, _, client):
        await added(rig, client, make_entry(1, max_tokens=100), hold_at=2)

        def again(handle: int, attempt: int = 0) -> add_pb2.AddEntry:
            entry = make_entry(handle, attempt=attempt)
            entry.request_id = make_entry(1).request_id
            return entry

        await client.add(again(2), again(3, attempt=1))
        await client.flush()
        assert set(client.rejected) == {2}
        assert client.rejected[2].status.code == grpc.StatusCode.ALREADY_EXISTS.value[0]
        assert b"REQUEST_ID_IN_USE" in client.rejected[2].status.details
        await client.abort(1)
        await client.add(again(4))
        await client.flush()
        rig.executor.gate.set()
        await client.until_ended(1, 3, 4)
        assert set(client.rejected) == {2}


async def test_a_request_for_another_rank_is_refused():
    async with connected() as (_, _, client):
        entries = make_entry(1), make_entry(2)
        entries[0].data_parallel_rank, entries[1].data_parallel_rank = 0, 7
        await client.add(*entries)
        await client.until_ended(1)
        assert set(client.rejected) == {2}
        assert "data_parallel_rank is 7" in client.rejected[2].status.message


async def test_utility_calls_are_refused_by_name():
    async with connected() as (_, _, client):
        call = utility_pb2.UtilityCall(call_id=3, is_paused=utility_pb2.IsPausedCall())
        await client.send(engine_pb2.ConnectRequest(utility=call))
        await client.until(lambda: "utility_result" in client.kinds())
        result = client.last("utility_result").utility_result
        assert (result.call_id, result.failure.code) == (3, grpc.StatusCode.UNIMPLEMENTED.value[0])
        assert "is_paused" in result.failure.message


async def test_a_frontend_that_does_not_read_is_cut_off_and_its_requests_end(caplog):
    caplog.set_level(logging.INFO)
    scheduler = make_scheduler(num_blocks=10_000, max_num_seqs=256, max_num_batched_tokens=2048)
    rig = ServiceRig(scheduler=scheduler, max_outbox_bytes=200_000)
    # A window that does not grow is full after 64 KiB.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    async with serving(rig) as stub, grpc.aio.insecure_channel(rig.address, options=options) as channel:
        deaf = StreamClient(engine_pb2_grpc.EngineCoreServiceStub(channel), "deaf")
        other = StreamClient(stub, "other")
        await deaf.send_hello()
        await other.open()
        for first in range(0, 900, 100):
            await deaf.add(*(make_entry(handle, max_tokens=120) for handle in range(first, first + 100)))
        await other.add(make_entry(1, max_tokens=20))
        await other.until_ended(1)
        await _until(stub, lambda load: load.num_sessions == 1 or rig.servicer.beat())
        await _until(stub, lambda load: load.stats.num_running == load.stats.num_waiting == 0)
        assert other.tokens == {1: expected_tokens(prompt_of(1), 1, 20)}
        assert (await stub.GetLoad(engine_pb2.GetLoadRequest())).stats.num_used_blocks == 0
        # Its handler waited in a write that was not read, so it was cancelled.
        codes = [vars(record)["code"] for record in caplog.records if record.message == "call"]
        assert "CANCELLED" in codes
        assert "RESOURCE_EXHAUSTED" not in codes


async def _until(stub, condition) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition(await stub.GetLoad(engine_pb2.GetLoadRequest())):
            pass


def session_without_stream(rig: ServiceRig) -> Session:
    hello = session_pb2.Hello(frontend_id="f", session_id="ab" * 16)
    orphaned_requests = OrphanedRequests(give_up=lambda request_id: None)
    return Session(rig.engine, orphaned_requests, hello, number=99, on_finished=lambda: None)


async def write_nothing(message: bytes) -> None:
    """The write function of a call."""


async def test_a_step_that_waits_goes_before_answers_to_what_is_asked_later():
    rig, received = ServiceRig(), list[str]()
    async with serving(rig) as stub:
        session = session_without_stream(rig)
        await session.take(engine_pb2.ConnectRequest(add=add_pb2.Add(entries=[make_entry(1, max_tokens=2)])))
        await until_finished(stub, 1)

        async def ask() -> None:
            call = utility_pb2.UtilityCall(call_id=1 + len(received))
            await session.take(engine_pb2.ConnectRequest(utility=call))

        await ask()
        # As the stream writes them, with a client that asks again as soon as it is answered.
        link = SessionLink(lambda: None, write_nothing)
        for _ in session._append_pending(link):
            message = session.stream.take(link)
            assert message is not None
            received.append(str(engine_pb2.ConnectResponse.FromString(message).WhichOneof("message")))
            if received[-1] == "utility_result" and len(received) < 20:
                await ask()
        session.end()
    assert received.index("step") - received.index("utility_result") == 1


# Sessions that outlive their streams: what goes on, what is sent again, and when it is over.

RESUME = {"features": ["resume"]}


def again(
    client: StreamClient, *, engine_epoch: int = 7, last_seq: int | None = None, **hello: str
) -> dict[str, object]:
    """A hello that resumes the session of `client` behind what it has received."""
    received = max((message.seq for message in client.received), default=0) if last_seq is None else last_seq
    point = session_pb2.ResumePoint(engine_epoch=engine_epoch, last_seq=received)
    return {**RESUME, "resume": point, **hello}


async def begun(stub, rig: ServiceRig, *handles: int, max_tokens: int = 20) -> StreamClient:
    """A client that can resume, with requests that the engine has and that now wait for the executor."""
    client = StreamClient(stub, "f")
    await client.open(**RESUME)
    await added(rig, client, *(make_entry(handle, max_tokens=max_tokens) for handle in handles), hold_at=3)
    await client.until(lambda: any(client.tokens.get(handle) for handle in handles))
    return client


async def broken(stub, rig: ServiceRig, *handles: int, max_tokens: int = 20) -> StreamClient:
    """The same, with its stream broken, which the engine has noticed."""
    client = await begun(stub, rig, *handles, max_tokens=max_tokens)
    await client.close()
    await parked(rig, stub)
    return client


async def resumed(stub, first: StreamClient, **point: int) -> StreamClient:
    """Another stream of the session of `first`."""
    client = StreamClient(stub, "f")
    await client.open(**again(first, **point))
    return client


async def test_when_the_window_is_over_the_requests_end_and_their_blocks_are_free():
    rig = ServiceRig()
    rig.engine.replay_window_s = 0.02
    async with serving(rig) as stub:
        first = await begun(stub, rig, 1, 2, max_tokens=100)
        await first.close()
        await lost(rig, stub)
        await parked(rig, stub, 0)
        rig.executor.gate.set()
        stats = await until_finished(stub, 2)
        assert stats.num_used_blocks == 0
        assert stats.num_generated_tokens < 200
        late = StreamClient(stub, "f")
        await late.open(**again(first))
        await late.until(lambda: "ready" in late.kinds())
        assert not late.received[0].hello_ack.resume_ok


@pytest.mark.parametrize(
    ("hello", "refusal"),
    [
        ({"engine_epoch": 8}, session_pb2.RESUME_REFUSAL_OTHER_EPOCH),
        ({"last_seq": 10_000}, session_pb2.RESUME_REFUSAL_NEVER_SENT),
        ({"last_seq": 0}, session_pb2.RESUME_REFUSAL_NOT_KEPT),
        ({"session_id": session_id_of("another")}, session_pb2.RESUME_REFUSAL_NO_SESSION),
        (None, session_pb2.RESUME_REFUSAL_UNSPECIFIED),
    ],
    ids=["another engine", "a position that never was", "acknowledged", "another id", "no resumption"],
)
async def test_what_cannot_be_resumed_is_aborted_and_begins_anew(hello, refusal):
    """Section 5, rules 2 and 5."""
    async with served() as (rig, stub):
        first = await begun(stub, rig, 1, max_tokens=100)
        await first.send(engine_pb2.ConnectRequest(ack=engine_pb2.Ack(last_seq=1)))
        await first.flush()
        await first.close()
        await parked(rig, stub)
        second = StreamClient(stub, "f")
        fields = {**RESUME, "session_id": session_id_of("new")} if hello is None else again(first, **hello)
        await second.open(**fields)
        await second.until(lambda: "ready" in second.kinds())
        ack = second.received[0].hello_ack
        assert (ack.resume_ok, ack.resume_refusal) == (False, refusal)
        assert second.received[1].seq == 1
        rig.executor.gate.set()
        await until_finished(stub, 1)
        await second.add(make_entry(1, max_tokens=4))
        await second.until_ended(1)
        assert rig.servicer.num_parked_sessions == 0


async def test_another_process_of_a_frontend_ends_what_the_one_before_left():
    async with served() as (rig, stub):
        await broken(stub, rig, 1, max_tokens=100)
        second = StreamClient(stub, "f")
        await second.open(**RESUME, session_id=session_id_of("new"), frontend_epoch=2)
        await second.until(lambda: "ready" in second.kinds())
        rig.executor.gate.set()
        await until_finished(stub, 1)


async def test_closing_upstream_without_goodbye_is_a_break():
    async with served() as (rig, stub):
        first = await begun(stub, rig, 1)
        await first.call.done_writing()
        await first.until(lambda: first.is_over)
        assert first.error.code() is grpc.StatusCode.ABORTED
        assert rig.servicer.num_parked_sessions == 1
        rig.executor.gate.set()
        second = await resumed(stub, first)
        await second.until_ended(1)


async def unacknowledged(stub, rig: ServiceRig) -> StreamClient:
    """A client whose first message is more than is kept unacknowledged, and whose requests have ended."""
    rig.stop_beating()
    client = StreamClient(stub, "f")
    await client.open(**RESUME)
    await client.add(*(make_entry(handle, max_tokens=100) for handle in range(8)))
    await until_finished(stub, 8)
    await client.flush()
    return client


async def acknowledge(client: StreamClient, last_seq: int) -> None:
    await client.send(engine_pb2.ConnectRequest(ack=engine_pb2.Ack(last_seq=last_seq)))
    await client.flush()


async def beat(rig: ServiceRig, client: StreamClient, num_beats: int) -> None:
    """Send so many heartbeats, each when the one before it was received."""
    for _ in range(num_beats):
        num_received = client_beats(client)
        rig.servicer.beat()
        async with asyncio.timeout(LIMIT_S):
            while client_beats(client) == num_received:
                await client.flush()


def client_beats(client: StreamClient) -> int:
    return sum(message.HasField("heartbeat") for message in client.received)


async def test_who_acknowledges_too_little_gets_no_steps_until_it_does_and_then_all_as_one():
    async with served(max_replay_bytes=100) as (rig, stub):
        client = await unacknowledged(stub, rig)
        assert client.finished == {}
        assert "step" not in client.kinds()
        await acknowledge(client, client.received[-1].seq)
        await client.until_ended(*range(8))
        assert client.kinds().count("step") == 1
        assert client.last("step").ByteSize() > 2000
        assert client.tokens == {
            handle: expected_tokens(prompt_of(handle), handle, 100) for handle in range(8)
        }
        assert client.finished == {handle: [LENGTH] for handle in range(8)}
        assert not client.is_over


async def test_who_reads_and_acknowledges_nothing_for_two_seconds_is_cut_off():
    async with served(max_replay_bytes=100) as (rig, stub):
        client = await unacknowledged(stub, rig)
        await beat(rig, client, 4)
        # That is one message of many, and a sign of life.
        await acknowledge(client, 1)
        await beat(rig, client, 4)
        assert not client.is_over
        rig.servicer.beat()
        await client.until(lambda: client.is_over)
        assert client.error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert rig.servicer.num_parked_sessions == 0
        assert (await until_finished(stub, 8)).num_used_blocks == 0


async def test_what_waits_for_acknowledgements_has_a_limit():
    async with served(max_replay_bytes=100, max_outbox_bytes=1500) as (rig, stub):
        rig.stop_beating()
        client = StreamClient(stub, "f")
        await client.open(**RESUME)
        await client.add(*(make_entry(handle, max_tokens=100) for handle in range(8)))
        await client.until(lambda: client.is_over)
        assert client.error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await until_finished(stub, 8)).num_used_blocks == 0


async def test_what_is_computed_for_a_lost_stream_has_a_limit():
    async with served(max_outbox_bytes=500) as (rig, stub):
        await broken(stub, rig, *range(8), max_tokens=100)
        rig.executor.gate.set()
        assert (await until_finished(stub, 8)).num_generated_tokens < 800
        await parked(rig, stub, 0)


async def test_a_drain_waits_for_a_frontend_that_may_come_back_and_its_end_says_what_is_left():
    async with served() as (rig, stub):
        first = await broken(stub, rig, 1, max_tokens=100)
        drain = asyncio.create_task(rig.servicer.drain())
        second = await resumed(stub, first)
        await second.until(lambda: "draining" in second.kinds())
        assert not drain.done()
        rig.engine.lifecycle.move_to(EngineState.STOPPED)
        rig.executor.gate.set()
        await second.until(lambda: second.is_over)
        await drain
        assert second.error.code() is grpc.StatusCode.UNAVAILABLE
        status: status_pb2.Status = rpc_status.from_call(second.error)
        assert b"ENGINE_DRAINED" in b"".join(detail.value for detail in status.details)


# What has ended is freed at once: in an engine, a collection that would find it may never come.


class Population:
    """The objects of a type that have come since, without those that others left in this process before."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        # Held, so that no other gets the place of one of them, by which they are known.
        self._others = [one for one in gc.get_objects() if type(one) is kind]

    async def until_freed(self, num_left: int = 0) -> None:
        """Wait until no more are there; what a call does after its end has no event."""
        others = {id(one) for one in self._others}
        async with asyncio.timeout(LIMIT_S):
            while self._count(others) > num_left:  # noqa: ASYNC110
                await asyncio.sleep(0)

    def _count(self, others: set[int]) -> int:
        return sum(type(one) is self._kind and id(one) not in others for one in gc.get_objects())


async def used(stub: engine_pb2_grpc.EngineCoreServiceStub) -> StreamClient:
    """A client that can resume, one request of which has ended and one is refused."""
    client = StreamClient(stub, "f")
    await client.open(**RESUME)
    await client.add(make_entry(1, max_tokens=2), make_entry(2, max_tokens=0))
    await client.until_ended(1)
    await client.flush()
    return client


async def sends_goodbye(rig: ServiceRig, stub: engine_pb2_grpc.EngineCoreServiceStub) -> int:
    client = await used(stub)
    await client.send(engine_pb2.ConnectRequest(goodbye=engine_pb2.Goodbye()))
    await client.until(lambda: client.is_over)
    return 0


async def is_refused_a_message(rig: ServiceRig, stub: engine_pb2_grpc.EngineCoreServiceStub) -> int:
    client = await used(stub)
    await client.send_hello()
    await client.until(lambda: client.error is not None)
    return 0


async def does_not_come_back(rig: ServiceRig, stub: engine_pb2_grpc.EngineCoreServiceStub) -> int:
    rig.engine.replay_window_s = 0.02
    client = await used(stub)
    await client.close()
    return 0


async def cannot_come_back(rig: ServiceRig, stub: engine_pb2_grpc.EngineCoreServiceStub) -> int:
    rig.engine.replay_window_s = 0.0
    client = await used(stub)
    await client.close()
    return 0


async def is_superseded(rig: ServiceRig, stub: engine_pb2_grpc.EngineCoreServiceStub) -> int:
    first = await used(stub)
    await StreamClient(stub, "f").open(frontend_epoch=2)
    await first.until(lambda: first.error is not None)
    return 1


async def is_superseded_while_away(rig: ServiceRig, stub: engine_pb2_grpc.EngineCoreServiceStub) -> int:
    first = await used(stub)
    await first.close()
    await parked(rig, stub)
    second = StreamClient(stub, "f")
    await second.open(frontend_epoch=2)
    await second.flush()
    return 1


async def comes_back_and_says_goodbye(rig: ServiceRig, stub: engine_pb2_grpc.EngineCoreServiceStub) -> int:
    first = await used(stub)
    second = StreamClient(stub, "f")
    await second.open(**RESUME, resume=session_pb2.ResumePoint(engine_epoch=7))
    await first.until(lambda: first.error is not None)
    await second.send(engine_pb2.ConnectRequest(goodbye=engine_pb2.Goodbye()))
    await second.until(lambda: second.is_over)
    return 0


async def sends_an_unreadable_message(rig: ServiceRig, stub: engine_pb2_grpc.EngineCoreServiceStub) -> int:
    rig.engine.replay_window_s = 0.0
    async with open_channel(rig.address) as channel:
        # The stubs know neither a call without serializers nor one that is written to.
        connect: Any = channel.stream_stream
        call = connect(f"/{FULL_NAME}/Connect")()
        hello = session_pb2.Hello(
            frontend_id="f", session_id=session_id_of("f"), frontend_epoch=1, schema_revision=1
        )
        await call.write(engine_pb2.ConnectRequest(hello=hello).SerializeToString())
        await call.write(b"\xff")
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await call.read():
                pass
        assert await call.code() is not grpc.StatusCode.OK
    return 0


@pytest.mark.parametrize(
    "end",
    [
        sends_goodbye,
        is_refused_a_message,
        does_not_come_back,
        cannot_come_back,
        is_superseded,
        is_superseded_while_away,
        comes_back_and_says_goodbye,
        sends_an_unreadable_message,
    ],
)
async def test_a_session_that_has_ended_is_freed_without_a_collection(end):
    async with served() as (rig, stub):
        with without_collections():
            sessions, desks = Population(Session), Population(UtilityService)
            num_left = await end(rig, stub)
            await sessions.until_freed(num_left)
            await desks.until_freed(num_left)


async def test_a_subscription_that_has_ended_is_freed_without_a_collection():
    async with served(kv_event_log=KVEventLog(max_batches=8, max_blocks=8)) as (_, stub):
        with without_collections():
            subscriptions = Population(KVSubscription)
            call = stub.SubscribeKvEvents(engine_pb2.SubscribeKvEventsRequest())
            await call.read()
            call.cancel()
            await subscriptions.until_freed()


# A step that cannot be encoded, for a bug of ours: it ends its session, and nothing is left out silently.

UNTELLABLE = 2


def make_untellable_rig() -> ServiceRig:
    """An engine that reports fewer positions than the second request has tokens."""
    rig = ServiceRig()
    untellable_id = make_entry(UNTELLABLE).request_id
    nothing = TokenLogprobs([], [])
    emit_logprobs(rig.executor, lambda request_id: nothing if request_id.startswith(untellable_id) else None)
    return rig


async def learns_that_it_was_dropped(client: StreamClient) -> None:
    await client.until(lambda: client.is_over)
    assert client.error is not None
    status = rpc_status.from_call(client.error)
    assert status is not None
    assert status.code == grpc.StatusCode.ABORTED.value[0]
    assert b"STEP_LOST" in status.details[0].value


def sends_no_token_behind_a_gap(client: StreamClient) -> bool:
    tokens = client.tokens[1]
    return tokens == expected_tokens(prompt_of(1), 1, 50)[: len(tokens)] and not client.finished


async def test_a_step_that_cannot_be_encoded_ends_its_session_only(caplog):
    rig = make_untellable_rig()
    async with serving(rig) as stub:
        client, other = StreamClient(stub, "f"), StreamClient(stub, "other")
        await client.open(**RESUME)
        await other.open()
        await added(rig, client, make_entry(1, max_tokens=50), hold_at=5)
        await client.add(make_entry(UNTELLABLE, max_tokens=50))
        await client.flush()
        await other.add(make_entry(1, max_tokens=20))
        await other.flush()
        rig.executor.gate.set()
        await learns_that_it_was_dropped(client)
        assert sends_no_token_behind_a_gap(client)
        await other.until_ended(1)
        assert other.finished == {1: [LENGTH]}
        stats = await until_finished(stub, 3)
        assert (stats.num_running, stats.num_used_blocks) == (0, 0)
        assert rig.servicer.num_parked_sessions == 0
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.exc_info is not None


async def test_one_that_waited_for_a_stream_ends_the_session_that_comes_back():
    rig = make_untellable_rig()
    async with serving(rig) as stub:
        client = StreamClient(stub, "f")
        await client.open(**RESUME)
        await added(rig, client, make_entry(1, max_tokens=50), hold_at=5)
        await client.until(lambda: bool(client.tokens.get(1)))
        await client.add(make_entry(UNTELLABLE, max_tokens=50))
        await client.flush()
        await client.close()
        await parked(rig, stub)
        rig.executor.gate.set()
        await until_finished(stub, 2)
        second = StreamClient(stub, "f")
        second.tokens = client.tokens
        last_read = session_pb2.ResumePoint(engine_epoch=7, last_seq=client.received[-1].seq)
        await second.open(**RESUME, resume=last_read)
        await learns_that_it_was_dropped(second)
        assert sends_no_token_behind_a_gap(second)
        await lost(rig, stub)
        assert rig.servicer.num_parked_sessions == 0


# Steps too large for one message, over a real stream: every token comes, in messages a frontend takes.

HANDLES = range(1, 11)


def make_telling_rig(num_others: int, *, max_replay_bytes: int = 64 * MAX_PIECE_BYTES) -> ServiceRig:
    """An engine that reports to the first request so many others at each of its tokens."""
    rig = ServiceRig(max_outbox_bytes=10 * MAX_PIECE_BYTES, max_replay_bytes=max_replay_bytes)
    token_logprobs = TokenLogprobs([-1.0], [1], num_others, [7] * num_others, [-0.5] * num_others)
    chosen = make_entry(HANDLES[0]).request_id
    emit_logprobs(rig.executor, lambda request_id: token_logprobs if request_id.startswith(chosen) else None)
    return rig


def sizes(client: StreamClient) -> list[int]:
    return [message.ByteSize() for message in client.received if message.WhichOneof("message") == "step"]


def num_top_logprobs(client: StreamClient, handle: int) -> int:
    """Entries beside its tokens, of all messages."""
    steps = [message.step for message in client.received if message.WhichOneof("message") == "step"]
    return sum(len(step.top_logprobs.token_ids) // 4 for step in steps if handle in array("I", step.handles))


async def test_a_step_that_one_request_makes_too_large_comes_in_several_messages():
    rig = make_telling_rig(num_others=100_000)
    async with serving(rig) as stub:
        client = StreamClient(stub, "f")
        await client.open(**RESUME)
        await client.add(*(make_entry(handle, max_tokens=3) for handle in HANDLES))
        await client.until_ended(*HANDLES)
        assert max(sizes(client)) <= MAX_PIECE_BYTES
        assert client.finished == {handle: [LENGTH] for handle in HANDLES}
        assert client.tokens == {handle: expected_tokens(prompt_of(handle), handle, 3) for handle in HANDLES}
        assert num_top_logprobs(client, HANDLES[0]) >= 3 * 100_000


async def test_what_waited_for_a_stream_comes_in_several_messages_each_when_those_before_are_acknowledged():
    rig = make_telling_rig(num_others=20_000, max_replay_bytes=1000)
    async with serving(rig) as stub:
        first = StreamClient(stub, "f")
        await first.open(**RESUME)
        await added(rig, first, *(make_entry(handle, max_tokens=60) for handle in HANDLES), hold_at=5)
        await first.close()
        await parked(rig, stub)
        rig.executor.gate.set()
        await until_finished(stub, len(HANDLES))
        second = StreamClient(stub, "f")
        last_read = session_pb2.ResumePoint(engine_epoch=7, last_seq=0)
        await second.open(**RESUME, resume=last_read)
        while len(second.finished) < len(HANDLES):
            # What is answered here comes behind all that may be sent.
            await second.flush()
            num_steps = len(sizes(second))
            await second.send(engine_pb2.ConnectRequest(ack=engine_pb2.Ack(last_seq=second.received[-1].seq)))
            await second.until(lambda before=num_steps: len(sizes(second)) > before)
        assert max(sizes(second)) <= MAX_PIECE_BYTES
        assert len(sizes(second)) >= 4
        assert second.finished == {handle: [LENGTH] for handle in HANDLES}
        assert second.tokens == {handle: expected_tokens(prompt_of(handle), handle, 60) for handle in HANDLES}
        assert num_top_logprobs(second, HANDLES[0]) >= 60 * 20_000


# Tensors over a real stream: what identifies a host, what a reference without proof costs, what is announced.

HIDDEN = 4
DATA = bytes(2 * HIDDEN * 4)


def open_rig() -> ServiceRig:
    facts = replace(make_facts(), hidden_size=HIDDEN)
    return ServiceRig(facts=facts, tensors=TensorReceiver(is_open=True))


def entry_with(handle: int, **payload: object) -> add_pb2.AddEntry:
    entry = make_entry(handle)
    entry.ClearField("prompt_token_ids")
    tensor = tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_FP32, shape=[2, HIDDEN], **payload)
    entry.prompt_embeds.CopyFrom(tensor)
    return entry


def ack_of(client: StreamClient) -> session_pb2.HelloAck:
    return client.received[0].hello_ack


def proof(digest: bytes) -> engine_pb2.ConnectRequest:
    return engine_pb2.ConnectRequest(host_proof=session_pb2.HostProof(digest=digest))


async def opened(stub: object, name: str) -> StreamClient:
    client = StreamClient(stub, name)  # type: ignore[arg-type]
    await client.open()
    await client.until(lambda: bool(client.received))
    return client


async def test_a_proven_neighbour_sends_by_shared_memory_and_others_lose_that_request_alone():
    async with serving(open_rig()) as stub:
        near, far = await opened(stub, "near"), await opened(stub, "far")
        secret = shared_memory.read(ack_of(near).host_probe, 0, 32)
        await near.send(proof(hmac.digest(secret, session_id_of(near.frontend_id).encode(), "sha256")))
        for handle, client in ((1, near), (2, far)):
            segment = shared_memory.create(shared_memory.segment_name(client.frontend_id, handle), DATA)
            reference = tensor_pb2.SharedMemoryReference(name=segment.name, size=len(DATA))
            await client.add(entry_with(handle, shm=reference))
            await client.add(entry_with(handle + 10, inline=DATA))
            await client.until_ended(handle + 10)
            assert segment.is_taken == (client is near)
            segment.close()
        await near.until_ended(1)
        assert near.rejected == {}
        assert far.rejected[2].status.code == grpc.StatusCode.PERMISSION_DENIED.value[0]


async def test_a_wrong_proof_ends_the_session():
    async with serving(open_rig()) as stub:
        client = await opened(stub, "liar")
        await client.send(proof(bytes(32)))
        await client.until(lambda: client.is_over)
        assert client.error is not None
        assert client.error.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_an_uploaded_blob_is_a_prompt():
    digest = hashlib.sha256(DATA).hexdigest()

    async def upload() -> AsyncIterator[engine_pb2.UploadBlobRequest]:
        header = engine_pb2.UploadBlobHeader(sha256=digest, size_bytes=len(DATA))
        yield engine_pb2.UploadBlobRequest(header=header)
        yield engine_pb2.UploadBlobRequest(chunk=DATA)

    async with serving(open_rig()) as stub:
        assert (await stub.UploadBlob(upload(), timeout=10)).sha256 == digest
        client = await opened(stub, "uploader")
        blob = tensor_pb2.BlobReference(sha256=digest, size=len(DATA))
        await client.add(entry_with(1, blob=blob))
        await client.until_ended(1)
        assert client.rejected == {}


async def test_an_engine_without_tensors_sends_no_probe_and_refuses_uploads():
    async def upload() -> AsyncIterator[engine_pb2.UploadBlobRequest]:
        yield engine_pb2.UploadBlobRequest(header=engine_pb2.UploadBlobHeader())

    async with serving(ServiceRig()) as stub:
        client = await opened(stub, "any")
        assert ack_of(client).host_probe == ""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.UploadBlob(upload(), timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await client.add(entry_with(1, inline=DATA))
        await client.until(lambda: bool(client.rejected))
        assert client.rejected[1].status.code == grpc.StatusCode.UNIMPLEMENTED.value[0]


async def test_each_tensor_of_a_message_lets_others_have_the_loop():
    rig = open_rig()
    async with serving(rig):
        session = session_without_stream(rig)
        add = add_pb2.Add(entries=[entry_with(handle, inline=DATA) for handle in range(5)])
        num_turns = 0

        async def count_turns() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        other = asyncio.ensure_future(count_turns())
        await session.take(engine_pb2.ConnectRequest(add=add))
        other.cancel()
        assert num_turns >= 5
        session.end()


async def test_frontends_learn_the_width_of_embeddings_and_that_they_are_taken():
    async with serving(open_rig()) as stub:
        ready = (await stub.GetEngineInfo(engine_pb2.GetEngineInfoRequest(), timeout=10)).ready
        assert (ready.hidden_size, ready.takes_prompt_embeds) == (HIDDEN, True)


async def test_frontends_learn_where_the_model_is():
    rig = ServiceRig(facts=replace(make_facts(), model_folder="/models/fake"))
    async with serving(rig) as stub:
        ready = (await stub.GetEngineInfo(engine_pb2.GetEngineInfoRequest(), timeout=10)).ready
    assert ready.model_folder == "/models/fake"
