"""Sessions that outlive their streams: what goes on, what is sent again, and when it is over."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest
from google.rpc import status_pb2
from grpc_status import rpc_status

from engine_svc.admin.lifecycle import EngineState
from tests.engine_svc.fakes import LIMIT_S, expected_tokens
from tests.engine_svc.session.service_rig import (
    LENGTH,
    ServiceRig,
    StreamClient,
    added,
    lost,
    make_entry,
    parked,
    prompt_of,
    serving,
    until_finished,
)
from triptych.engine.v1 import engine_pb2, session_pb2

RESUME = {"features": ["resume"]}


def again(client: StreamClient, *, engine_epoch: int = 7, last_seq: int | None = None) -> dict[str, object]:
    """A hello that resumes the session of `client` behind what it has heard."""
    heard = max((message.seq for message in client.heard), default=0) if last_seq is None else last_seq
    return {**RESUME, "resume": session_pb2.ResumePoint(engine_epoch=engine_epoch, last_seq=heard)}


async def begun(stub, rig: ServiceRig, *handles: int, max_tokens: int = 20) -> StreamClient:
    """A client that can resume, with requests that the engine has and that now wait for the executor."""
    client = StreamClient(stub, "f")
    await client.open(**RESUME)
    await added(rig, client, *(make_entry(handle, max_tokens=max_tokens) for handle in handles), hold_at=3)
    await client.until(lambda: any(client.tokens.get(handle) for handle in handles))
    return client


async def test_a_session_whose_stream_breaks_goes_on_and_is_sent_what_it_missed():
    rig = ServiceRig()
    async with serving(rig) as stub:
        first = await begun(stub, rig, 1, 2)
        await first.close()
        await parked(rig, stub)
        rig.executor.gate.set()
        await until_finished(stub, 2)
        second = StreamClient(stub, "f")
        second.tokens = {handle: list(tokens) for handle, tokens in first.tokens.items()}
        await second.open(**again(first))
        await second.until_ended(1, 2)
        ack = second.heard[0].hello_ack
        assert (ack.resume_ok, list(ack.features), ack.replay_window_ms) == (True, ["resume"], 5000)
        assert [message.seq for message in second.heard[1:]] == [
            first.heard[-1].seq + index for index in range(1, len(second.heard))
        ]
        assert second.tokens == {handle: expected_tokens(prompt_of(handle), handle, 20) for handle in (1, 2)}
        assert second.finished == {1: [LENGTH], 2: [LENGTH]}
        stats = (await stub.GetLoad(engine_pb2.GetLoadRequest())).stats
        assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (10, 40)


async def test_what_was_not_heard_is_sent_again_with_its_old_numbers():
    rig = ServiceRig()
    async with serving(rig) as stub:
        first = await begun(stub, rig, 1)
        await first.close()
        await parked(rig, stub)
        second = StreamClient(stub, "f")
        await second.open(**again(first, last_seq=1))
        await second.until(lambda: len(second.heard) >= len(first.heard) - 1)
        repeated = {message.seq: message for message in second.heard[1:]}
        for message in first.heard[2:]:
            assert repeated[message.seq] == message


async def test_an_add_that_is_repeated_after_a_break_is_run_once():
    rig = ServiceRig()
    async with serving(rig) as stub:
        first = await begun(stub, rig, 1)
        await first.close()
        await parked(rig, stub)
        second = StreamClient(stub, "f")
        await second.open(**again(first))
        await second.add(make_entry(1, max_tokens=20), make_entry(2, max_tokens=20))
        await second.flush()
        rig.executor.gate.set()
        await second.until_ended(1, 2)
        await second.add(make_entry(1, max_tokens=20))
        await second.flush()
        assert second.rejected == {}
        assert (await until_finished(stub, 2)).num_prompt_tokens == 10


async def test_a_stream_that_looks_alive_is_taken_over():
    rig = ServiceRig()
    async with serving(rig) as stub:
        first = await begun(stub, rig, 1)
        second = StreamClient(stub, "f")
        await second.open(**again(first))
        await first.until(lambda: first.is_over)
        rig.executor.gate.set()
        await second.until_ended(1)
        assert second.heard[0].hello_ack.resume_ok
        assert rig.servicer.num_sessions == 1


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
        assert not late.heard[0].hello_ack.resume_ok


@pytest.mark.parametrize(
    "hello",
    [{"engine_epoch": 8}, {"last_seq": 10_000}, None],
    ids=["another engine", "a place that never was", "no wish to resume"],
)
async def test_what_cannot_be_resumed_is_aborted_and_begins_anew(hello):
    rig = ServiceRig()
    async with serving(rig) as stub:
        first = await begun(stub, rig, 1, max_tokens=100)
        await first.close()
        await parked(rig, stub)
        second = StreamClient(stub, "f")
        fields = {**RESUME, "session_id": "new"} if hello is None else again(first, **hello)
        await second.open(**fields)
        await second.until(lambda: "ready" in second.kinds())
        assert not second.heard[0].hello_ack.resume_ok
        assert second.heard[1].seq == 1
        rig.executor.gate.set()
        await until_finished(stub, 1)
        await second.add(make_entry(1, max_tokens=4))
        await second.until_ended(1)
        assert rig.servicer.num_parked_sessions == 0


async def test_another_process_of_a_frontend_ends_what_the_one_before_left():
    rig = ServiceRig()
    async with serving(rig) as stub:
        first = await begun(stub, rig, 1, max_tokens=100)
        await first.close()
        await parked(rig, stub)
        second = StreamClient(stub, "f")
        await second.open(**RESUME, session_id="new", frontend_epoch=2)
        await second.until(lambda: "ready" in second.kinds())
        rig.executor.gate.set()
        await until_finished(stub, 1)


async def test_who_names_the_session_of_another_frontend_gets_one_of_its_own():
    rig = ServiceRig()
    async with serving(rig) as stub:
        first = await begun(stub, rig, 1)
        stranger = StreamClient(stub, "another")
        await stranger.open(session_id="f" * 4, **again(first))
        await stranger.until(lambda: bool(stranger.heard))
        assert not stranger.heard[0].hello_ack.resume_ok
        rig.executor.gate.set()
        await first.until_ended(1)
        assert first.finished == {1: [LENGTH]}


async def test_closing_upstream_without_goodbye_is_a_break():
    rig = ServiceRig()
    async with serving(rig) as stub:
        first = await begun(stub, rig, 1)
        await first.call.done_writing()
        await first.until(lambda: first.is_over)
        assert first.error.code() is grpc.StatusCode.ABORTED
        assert rig.servicer.num_parked_sessions == 1
        rig.executor.gate.set()
        second = StreamClient(stub, "f")
        await second.open(**again(first))
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
    """Send so many heartbeats, each when the one before it has been heard."""
    for _ in range(num_beats):
        num_heard = client_beats(client)
        rig.servicer.beat()
        async with asyncio.timeout(LIMIT_S):
            while client_beats(client) == num_heard:
                await client.flush()


def client_beats(client: StreamClient) -> int:
    return sum(message.HasField("heartbeat") for message in client.heard)


async def test_who_acknowledges_too_little_gets_no_steps_until_it_does_and_then_all_as_one():
    rig = ServiceRig(max_replay_bytes=100)
    async with serving(rig) as stub:
        client = await unacknowledged(stub, rig)
        assert client.finished == {}
        assert "step" not in client.kinds()
        await acknowledge(client, client.heard[-1].seq)
        await client.until_ended(*range(8))
        assert client.kinds().count("step") == 1
        assert client.last("step").ByteSize() > 2000
        assert client.tokens == {
            handle: expected_tokens(prompt_of(handle), handle, 100) for handle in range(8)
        }
        assert client.finished == {handle: [LENGTH] for handle in range(8)}
        assert not client.is_over


async def test_who_reads_and_acknowledges_nothing_for_two_seconds_is_cut_off():
    rig = ServiceRig(max_replay_bytes=100)
    async with serving(rig) as stub:
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
    rig = ServiceRig(max_replay_bytes=100, max_outbox_bytes=1500)
    async with serving(rig) as stub:
        rig.stop_beating()
        client = StreamClient(stub, "f")
        await client.open(**RESUME)
        await client.add(*(make_entry(handle, max_tokens=100) for handle in range(8)))
        await client.until(lambda: client.is_over)
        assert client.error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await until_finished(stub, 8)).num_used_blocks == 0


async def test_what_is_computed_for_a_lost_stream_has_a_limit():
    rig = ServiceRig(max_outbox_bytes=500)
    async with serving(rig) as stub:
        first = await begun(stub, rig, *range(8), max_tokens=100)
        await first.close()
        await parked(rig, stub)
        rig.executor.gate.set()
        assert (await until_finished(stub, 8)).num_generated_tokens < 800
        await parked(rig, stub, 0)


async def test_a_drain_waits_for_a_frontend_that_may_come_back_and_its_end_says_what_is_left():
    rig = ServiceRig()
    async with serving(rig) as stub:
        first = await begun(stub, rig, 1, max_tokens=100)
        await first.close()
        await parked(rig, stub)
        drain = asyncio.create_task(rig.servicer.drain())
        second = StreamClient(stub, "f")
        await second.open(**again(first))
        await second.until(lambda: "draining" in second.kinds())
        assert not drain.done()
        rig.engine.lifecycle.move_to(EngineState.STOPPED)
        rig.executor.gate.set()
        await second.until(lambda: second.is_over)
        await drain
        assert second.error.code() is grpc.StatusCode.UNAVAILABLE
        status: status_pb2.Status = rpc_status.from_call(second.error)
        assert b"ENGINE_DRAINED" in b"".join(detail.value for detail in status.details)
