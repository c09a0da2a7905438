"""Requests over a Connect stream, with real gRPC, the real scheduler and a fake model."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random

import grpc.aio
from google.rpc import status_pb2

from engine_svc.request import Request
from engine_svc.session import Session
from tests.engine_svc.fakes import LIMIT_S, expected_tokens, make_scheduler
from tests.engine_svc.service_rig import (
    ABORT,
    LENGTH,
    STOP,
    ServiceRig,
    StreamClient,
    added,
    make_entry,
    prompt_of,
    serving,
    until_finished,
)
from triptych.engine.v1 import add_pb2, engine_pb2, engine_pb2_grpc, session_pb2, utility_pb2


async def test_ten_requests_of_twenty_tokens_make_the_round_trip():
    rig = ServiceRig()
    async with serving(rig) as stub:
        client = StreamClient(stub, "f")
        await client.open()
        await client.add(*(make_entry(handle, max_tokens=20) for handle in range(10)))
        await client.until_ended(*range(10))
        assert client.tokens == {
            handle: expected_tokens(prompt_of(handle), handle, 20) for handle in range(10)
        }
        assert client.finished == {handle: [LENGTH] for handle in range(10)}
        assert client.kinds()[:2] == ["hello_ack", "ready"]


async def test_two_frontends_see_only_their_own_requests():
    rig = ServiceRig()
    async with serving(rig) as stub:
        one, two = StreamClient(stub, "one"), StreamClient(stub, "two")
        await one.open()
        await two.open()
        await one.add(make_entry(1, max_tokens=8), make_entry(2, max_tokens=8))
        await two.add(make_entry(1, prompt=[9, 9, 9], max_tokens=8))
        await one.until_ended(1, 2)
        await two.until_ended(1)
        assert set(one.tokens) == {1, 2}
        assert two.tokens == {1: expected_tokens([9, 9, 9], 1, 8)}


async def test_an_abort_in_a_run_ends_it_at_once_and_frees_its_blocks():
    rig = ServiceRig()
    async with serving(rig) as stub:
        client = StreamClient(stub, "f")
        await client.open()
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


async def test_aborting_every_even_request_leaves_the_odd_ones_whole():
    rig = ServiceRig()
    async with serving(rig) as stub:
        client = StreamClient(stub, "f")
        await client.open()
        await added(rig, client, *(make_entry(handle, max_tokens=100) for handle in range(10)), hold_at=20)
        await client.until(lambda: all(len(client.tokens.get(handle, [])) >= 15 for handle in range(10)))
        await client.abort(*range(0, 10, 2))
        await client.flush()
        rig.executor.gate.set()
        await client.until_ended(*range(10))
        await client.abort(*range(10))
        await client.until(lambda: "already_finished" in client.kinds())
        for handle in range(10):
            tokens = expected_tokens(prompt_of(handle), handle, 100)
            assert client.tokens[handle] == tokens[: len(client.tokens[handle])]
            assert client.finished[handle] == [ABORT if handle % 2 == 0 else LENGTH]
        assert list(client.last("already_finished").already_finished.handles) == list(range(10))


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


async def test_an_abort_of_another_attempt_is_not_meant_for_this_one():
    rig = ServiceRig()
    async with serving(rig) as stub:
        client = StreamClient(stub, "f")
        await client.open()
        rig.executor.gate.clear()
        await client.add(make_entry(1, attempt=3, max_tokens=30))
        await client.abort(1, attempts=[2])
        await client.flush()
        rig.executor.gate.set()
        await client.until_ended(1)
        assert client.finished == {1: [LENGTH]}


async def test_an_abort_of_very_many_is_acted_on_in_pieces():
    async with serving(ServiceRig()) as stub:
        client = StreamClient(stub, "f")
        await client.open()
        await client.add(make_entry(1))
        await client.until_ended(1)
        await client.abort(*[1] * 10_000)
        await client.flush()
        answers = [
            message.already_finished for message in client.heard if message.HasField("already_finished")
        ]
        assert [len(answer.handles) for answer in answers] == [4096, 4096, 1808]


async def test_a_lost_stream_aborts_its_requests_and_no_others():
    rig = ServiceRig()
    async with serving(rig) as stub:
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
    rig = ServiceRig()
    async with serving(rig) as stub:
        client = StreamClient(stub, "f")
        await client.open()
        rig.executor.hold_at = 5
        await client.add(make_entry(1, max_tokens=100))
        await client.until(lambda: 1 in client.tokens)
        await client.send(engine_pb2.ConnectRequest(goodbye=engine_pb2.Goodbye()))
        await client.until(lambda: client.is_over)
        assert client.error is None
        rig.executor.gate.set()
        await _until(stub, lambda load: load.stats.num_finished == 1 and load.stats.num_used_blocks == 0)


async def test_a_bad_add_is_answered_alone_with_field_and_limit():
    rig = ServiceRig()
    async with serving(rig) as stub:
        client = StreamClient(stub, "f")
        await client.open()
        await client.add(
            make_entry(1),
            make_entry(2, temperature=float("nan")),
            make_entry(3, prompt=[5, 4000]),
            make_entry(4),
        )
        await client.until_ended(1, 4)
        assert set(client.rejected) == {2, 3}
        status = client.rejected[3].status
        assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert "4000" in status.message
        assert "1000" in status.message
        rich = status_pb2.Status.FromString(status.details)
        assert b"prompt_token_ids" in b"".join(detail.value for detail in rich.details)


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
    rig = ServiceRig()
    async with serving(rig) as stub:
        client = StreamClient(stub, "f")
        await client.open()
        await client.add(make_entry(1, prompt=[1] * 128), make_entry(2, prompt=[1] * 100, max_tokens=29))
        await client.until(lambda: set(client.rejected) == {1, 2})
        assert "127" in client.rejected[1].status.message
        assert "1 to 28" in client.rejected[2].status.message


async def test_a_handle_in_use_is_refused_and_its_request_goes_on():
    rig = ServiceRig()
    async with serving(rig) as stub:
        client = StreamClient(stub, "f")
        await client.open()
        rig.executor.gate.clear()
        await client.add(make_entry(1, max_tokens=20), make_entry(1, attempt=1))
        await client.until(lambda: 1 in client.rejected)
        rig.executor.gate.set()
        await client.until_ended(1)
        assert client.rejected[1].attempt == 1
        assert client.rejected[1].status.code == grpc.StatusCode.ALREADY_EXISTS.value[0]
        assert len(client.tokens[1]) == 20


async def test_messages_nobody_knows_are_ignored():
    rig = ServiceRig()
    async with serving(rig) as stub:
        client = StreamClient(stub, "f")
        await client.open()
        # Field 99 of a newer contract, length-delimited.
        await client.send(engine_pb2.ConnectRequest.FromString(b"\x9a\x06\x02hi"))
        await client.send(engine_pb2.ConnectRequest(ack=engine_pb2.Ack(last_seq=1)))
        await client.add(make_entry(1))
        await client.until_ended(1)


async def test_utility_calls_are_refused_by_name():
    rig = ServiceRig()
    async with serving(rig) as stub:
        client = StreamClient(stub, "f")
        await client.open()
        call = utility_pb2.UtilityCall(call_id=3, is_paused=utility_pb2.IsPausedCall())
        await client.send(engine_pb2.ConnectRequest(utility=call))
        await client.until(lambda: "utility_result" in client.kinds())
        result = client.last("utility_result").utility_result
        assert (result.call_id, result.failure.code) == (3, grpc.StatusCode.UNIMPLEMENTED.value[0])
        assert "is_paused" in result.failure.message


async def test_a_deadline_ends_a_request_with_abort():
    rig = ServiceRig()
    async with serving(rig) as stub:
        client = StreamClient(stub, "f")
        await client.open()
        late = make_entry(1, max_tokens=100)
        late.remaining_ms = 0
        await client.add(late, make_entry(2))
        await client.until_ended(1, 2)
        assert client.finished == {1: [ABORT], 2: [LENGTH]}


async def test_stop_rows_tell_end_of_sequence_from_stop_tokens():
    rig = ServiceRig()
    async with serving(rig) as stub:
        client = StreamClient(stub, "f")
        await client.open()
        third = expected_tokens(prompt_of(1), 1, 3)[-1]
        await client.add(make_entry(1, max_tokens=9, stop_token_ids=[third]))
        await client.until_ended(1)
        assert client.finished == {1: [STOP]}
        assert client.last("step").step.finished[0].stop_token_id == third
        assert len(client.tokens[1]) == 3


async def test_a_frontend_that_does_not_read_is_cut_off_and_its_requests_end(caplog):
    caplog.set_level(logging.INFO)
    scheduler = make_scheduler(num_blocks=10_000, max_num_seqs=256, max_num_batched_tokens=2048)
    rig = ServiceRig(scheduler=scheduler, max_outbox_bytes=200_000)
    # A window that does not grow is full after 64 KiB.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    async with serving(rig) as stub, grpc.aio.insecure_channel(rig.address, options=options) as channel:
        deaf = StreamClient(engine_pb2_grpc.EngineCoreServiceStub(channel), "deaf")
        other = StreamClient(stub, "other")
        await deaf.say_hello()
        await other.open()
        for first in range(0, 900, 100):
            await deaf.add(*(make_entry(handle, max_tokens=120) for handle in range(first, first + 100)))
        await other.add(make_entry(1, max_tokens=20))
        await other.until_ended(1)
        await _until(stub, lambda load: load.num_sessions == 1 or rig.servicer.beat())
        await _until(stub, lambda load: load.stats.num_running == load.stats.num_waiting == 0)
        assert other.tokens == {1: expected_tokens(prompt_of(1), 1, 20)}
        assert (await stub.GetLoad(engine_pb2.GetLoadRequest())).stats.num_used_blocks == 0
        # Its handler waited in a write that nobody took, so it was cancelled.
        codes = [vars(record)["code"] for record in caplog.records if record.message == "call"]
        assert "CANCELLED" in codes
        assert "RESOURCE_EXHAUSTED" not in codes


async def _until(stub, condition) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition(await stub.GetLoad(engine_pb2.GetLoadRequest())):
            pass


async def test_a_step_that_waits_goes_before_answers_to_what_is_asked_later():
    rig, heard = ServiceRig(), list[str]()
    async with serving(rig) as stub:
        hello = session_pb2.Hello(frontend_id="f", session_id="ab" * 16)
        session = Session(rig.engine, hello, number=99, on_finished=lambda: None)
        await session.take(engine_pb2.ConnectRequest(add=add_pb2.Add(entries=[make_entry(1, max_tokens=2)])))
        await until_finished(stub, 1)

        async def ask() -> None:
            call = utility_pb2.UtilityCall(call_id=1 + len(heard))
            await session.take(engine_pb2.ConnectRequest(utility=call))

        await ask()
        # As the stream writes them, with a client that asks again as soon as it is answered.
        for message in session._waiting():
            heard.append(str(engine_pb2.ConnectResponse.FromString(message).WhichOneof("message")))
            if heard[-1] == "utility_result" and len(heard) < 20:
                await ask()
        session.end()
    assert heard.index("step") - heard.index("utility_result") == 1
