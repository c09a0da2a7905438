"""The service as a whole over real gRPC: handshake, life signs, loading, draining, death, artefacts."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import replace

import grpc.aio

from engine_svc.admin import announce
from engine_svc.admin.lifecycle import EngineState
from engine_svc.admin.served_engine import Failure
from engine_svc.core.artifacts import read_artifacts
from engine_svc.loop.mailbox import Fail, LoopStats
from engine_svc.ranks.watch import RankLost
from tests.engine_svc.fakes import expected_tokens
from tests.engine_svc.session.service_rig import (
    LENGTH,
    ServiceRig,
    StreamClient,
    connected,
    make_entry,
    make_facts,
    prompt_of,
    served,
    serving,
    session_id_of,
)
from triptych.engine.v1 import engine_pb2, session_pb2
from triptych_kit.clock import FakeClock


async def test_heartbeats_come_while_the_executor_is_blocked():
    async with connected() as (rig, _, client):
        rig.executor.gate.clear()
        await client.add(make_entry(1))
        await asyncio.to_thread(rig.executor.wait_for_launches, 1)
        num_received = len(client.received)
        await client.until(
            lambda: any(
                message.heartbeat.step_started_age_ms >= 400 for message in client.received[num_received:]
            )
        )
        heartbeat = client.last("heartbeat").heartbeat
        assert (heartbeat.step_number, heartbeat.has_work) == (1, True)
        assert heartbeat.state == session_pb2.ENGINE_STATE_READY
        rig.executor.gate.set()
        await client.until_ended(1)


async def test_the_age_of_a_step_is_without_the_time_in_which_the_process_was_stopped():
    rig, clock = ServiceRig(), FakeClock()
    rig.engine.clock = clock

    def age_ms(passed_s: float, step_number: int, started_at: float | None) -> int:
        clock.advance(passed_s)
        rig.engine.stats_snapshot.post(
            LoopStats(step_number=step_number, step_started_at=started_at, step_budget_s=5.0, has_work=True)
        )
        rig.servicer.beat()
        return announce.heartbeat(rig.engine, rig.engine.stats_snapshot.read()).step_started_age_ms

    ages_ms = [age_ms(0.5, 0, None), age_ms(0.5, 1, 0.75), age_ms(0.5, 1, 0.75)]
    # It was stopped for an hour, in a step and just after the beginning of one.
    ages_ms += [
        age_ms(3600.0, 1, 0.75),
        age_ms(0.5, 1, 0.75),
        age_ms(3600.0, 2, 3602.25),
        age_ms(0.5, 2, 3602.25),
    ]
    assert ages_ms == [0, 250, 750, 1750, 2250, 1000, 1500]


async def test_a_loop_that_raises_says_dead_to_every_session_with_what_is_lost():
    async with served() as (rig, stub):
        one, two = StreamClient(stub, "one"), StreamClient(stub, "two")
        await one.open()
        await two.open()
        await one.until(lambda: "ready" in one.kinds())
        await two.until(lambda: "ready" in two.kinds())

        rig.executor.gate.clear()
        await one.add(make_entry(4, max_tokens=100))
        await asyncio.to_thread(rig.executor.wait_for_launches, 1)
        rig.engine.inbox.put(Fail(RuntimeError("secret path")))
        rig.executor.gate.set()
        for client, handles in ((one, [4]), (two, [])):
            await client.until(lambda client=client: client.is_over)
            dead = client.received[-1].dead
            assert (list(dead.handles), dead.exit_code) == (handles, 70)
            assert "secret" not in dead.reason
            assert client.error.code() is grpc.StatusCode.UNAVAILABLE
        assert rig.engine.lifecycle.state is EngineState.FAILED
        assert rig.engine.failure.exit_code == 70
        late = StreamClient(stub, "late")
        await late.open()
        await late.until(lambda: late.is_over)
        assert late.kinds()[-1] == "dead"


async def test_while_loading_the_engine_answers_and_refuses_adds():
    rig = ServiceRig()
    async with serving(rig, load=False) as stub:
        client = StreamClient(stub, "f")
        await client.open()
        await client.add(make_entry(1))
        await client.until(lambda: 1 in client.rejected)
        await client.until(lambda: any(message.HasField("heartbeat") for message in client.received))
        assert client.received[0].hello_ack.state == session_pb2.ENGINE_STATE_LOADING
        assert client.rejected[1].status.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert client.rejected[1].retry_after_ms > 0
        assert client.last("heartbeat").heartbeat.load_progress.phase == "start"
        info = await stub.GetEngineInfo(engine_pb2.GetEngineInfoRequest())
        assert (info.engine_id, info.engine_epoch, info.HasField("ready")) == ("engine-a", 7, False)
        await rig.load()
        await client.until(lambda: "ready" in client.kinds())
        await client.add(make_entry(1))
        await client.until_ended(1)
        info = await stub.GetEngineInfo(engine_pb2.GetEngineInfoRequest())
        assert info.ready == client.last("ready").ready
        assert info.ready.num_kv_blocks == 64


async def test_an_engine_tells_over_how_many_processes_its_model_is_divided():
    async with served(facts=replace(make_facts(), tensor_parallel_size=2, pipeline_parallel_size=3)) as (
        _,
        stub,
    ):
        ready = (await stub.GetEngineInfo(engine_pb2.GetEngineInfoRequest())).ready
        assert (ready.tensor_parallel_size, ready.pipeline_parallel_size, ready.world_size) == (2, 3, 6)


async def test_a_model_that_cannot_be_loaded_is_reported_and_exits_with_a_usage_error():
    rig = ServiceRig()
    rig.load_error = ValueError("folder has no config.json")
    async with serving(rig, load=False) as stub:
        client = StreamClient(stub, "f")
        await client.open()
        await rig.load()
        await client.until(lambda: client.is_over)
        assert client.received[-1].dead.reason == "folder has no config.json"
        assert rig.engine.failure.exit_code == 2


async def test_the_cause_of_a_lost_rank_is_reported_without_its_error_text():
    rig = ServiceRig()
    rig.load_error = RankLost(1, "raised ValueError", "what was in /a/folder")
    async with serving(rig, load=False):
        await rig.load()
        assert rig.engine.failure == Failure("rank 1 raised ValueError, see the engine's log", 70)


async def test_draining_refuses_new_requests_and_finishes_the_running_ones():
    async with served() as (rig, stub):
        client, idle = StreamClient(stub, "f"), StreamClient(stub, "idle")
        await client.open()
        await idle.open()
        rig.executor.gate.clear()
        await client.add(make_entry(1, max_tokens=20))
        await asyncio.to_thread(rig.executor.wait_for_launches, 1)
        drain = asyncio.create_task(rig.servicer.drain())
        await client.until(lambda: "draining" in client.kinds())
        await client.add(make_entry(2))
        await client.until(lambda: 2 in client.rejected)
        assert "draining" in client.rejected[2].status.message
        assert not drain.done()
        rig.executor.gate.set()
        await client.until(lambda: client.is_over)
        await idle.until(lambda: idle.is_over)
        await drain
        assert client.tokens[1] == expected_tokens(prompt_of(1), 1, 20)
        assert client.finished == {1: [LENGTH]}
        assert (client.error, idle.error) == (None, None)
        assert rig.engine.lifecycle.state is EngineState.STOPPED


async def test_ids_of_a_hello_can_be_printed():
    async with served() as (_, stub):
        client = StreamClient(stub, "f")
        await client.open(frontend_id="\x1b[31mf")
        await client.until(lambda: client.is_over)
        assert client.error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_stream_that_does_not_begin_with_hello_ends_and_says_what_came():
    async with served() as (_, stub):
        call = stub.Connect()
        await call.write(engine_pb2.ConnectRequest(ack=engine_pb2.Ack()))
        assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
        details = await call.details()
        assert "ack came" in details
        assert "this engine has 1" in details


async def test_a_newer_process_of_a_frontend_ends_the_older_session():
    async with served() as (_, stub):
        old, new = StreamClient(stub, "f"), StreamClient(stub, "f")
        await old.open(session_id=session_id_of("a"))
        await old.until(lambda: "ready" in old.kinds())
        await new.open(session_id=session_id_of("b"), frontend_epoch=2)
        await old.until(lambda: old.is_over)
        assert old.error.code() is grpc.StatusCode.ABORTED
        await new.add(make_entry(1))
        await new.until_ended(1)


async def test_artifacts_come_in_chunks_with_digests(tmp_path):
    tokenizer = json.dumps({"big": "x" * 2_500_000}).encode()
    (tmp_path / "tokenizer.json").write_bytes(tokenizer)
    (tmp_path / "config.json").write_bytes(b"")
    rig = ServiceRig(artifacts=read_artifacts(tmp_path))
    # What is served is what was announced, whatever becomes of the folder.
    (tmp_path / "tokenizer.json").write_bytes(b"another")
    (tmp_path / "config.json").unlink()
    async with serving(rig) as stub:
        chunks = [chunk async for chunk in stub.GetArtifacts(engine_pb2.GetArtifactsRequest())]
        received: dict[int, bytes] = {}
        for chunk in chunks:
            assert chunk.offset == len(received.get(chunk.artifact.kind, b""))
            received[chunk.artifact.kind] = received.get(chunk.artifact.kind, b"") + chunk.chunk
        assert received == {
            session_pb2.ARTIFACT_KIND_TOKENIZER: tokenizer,
            session_pb2.ARTIFACT_KIND_CONFIG: b"",
        }
        digest = hashlib.sha256(tokenizer).hexdigest()
        assert chunks[0].artifact.sha256 == digest
        request = engine_pb2.GetArtifactsRequest(known_sha256=[digest])
        rest = [chunk.artifact.kind async for chunk in stub.GetArtifacts(request)]
        assert rest == [session_pb2.ARTIFACT_KIND_CONFIG]
