"""Several engines: which are used, which are listed, which are forgotten."""

from __future__ import annotations

import asyncio
from collections import Counter

import grpc
import pytest

from tests.frontend_svc.fakes import WAIT_S, FakeEngine, answer, read_all, serving
from triptych.api.v1 import model_pb2
from triptych.engine.v1 import session_pb2


async def test_reported_load_decides():
    busy, idle = FakeEngine(answer("busy")), FakeEngine(answer("idle"), dp_rank=1)
    async with serving(busy, idle) as (client, frontend):
        await client.until_engines_are_ready(2)
        busy.sessions[0].send(stats=session_pb2.Stats(num_running=8, num_waiting=2))
        async with asyncio.timeout(WAIT_S):
            while not any(
                one.requests.account.info().num_running for one in frontend.engines.directory.clients()
            ):
                await client.model.ListModels(model_pb2.ListModelsRequest())
        texts = [(await read_all(client.generate()))[1] for _ in range(3)]
    assert texts == ["idle"] * 3


async def test_a_paused_engine_is_used_only_where_no_other_is_ready():
    paused, running = FakeEngine(answer("paused")), FakeEngine(answer("running"), dp_rank=1)
    paused.heartbeat = session_pb2.Heartbeat(state=session_pb2.ENGINE_STATE_PAUSED)
    async with serving(paused, running) as (client, frontend):
        await client.until_engines_are_ready(2)
        async with asyncio.timeout(WAIT_S):
            while not any(
                one.requests.account.info().is_held for one in frontend.engines.directory.clients()
            ):
                await client.model.ListModels(model_pb2.ListModelsRequest())
        texts = [(await read_all(client.generate()))[1] for _ in range(4)]
        await running.kill()
        texts.append((await read_all(client.generate()))[1])
    assert texts == ["running"] * 4 + ["paused"]


async def test_an_engine_counts_as_recent_for_the_reconnect_window():
    first, second = FakeEngine(), FakeEngine(dp_rank=1)
    async with serving(first, second, reconnect_window_s=0.2) as (client, frontend):
        await client.until_engines_are_ready(2)
        directory = frontend.engines.directory
        model = directory.model("")
        await first.kill()
        async with asyncio.timeout(WAIT_S):
            while len(directory.ready_for(model)) > 1:
                await client.model.ListModels(model_pb2.ListModelsRequest())
            assert directory.num_recent(model) == 2
            while directory.num_recent(model) > 1:
                await client.model.ListModels(model_pb2.ListModelsRequest())
        assert directory.num_recent(model) == 1


async def test_the_outputs_of_one_request_go_to_one_engine_and_count_as_many():
    engines = [FakeEngine(), FakeEngine(dp_rank=1)]
    async with serving(*engines) as (client, _):
        await client.until_engines_are_ready(2)
        several = client.generate(n=3, temperature=1.0)
        await asyncio.wait_for(_first_of(engines, 3), WAIT_S)
        single = [client.generate() for _ in range(3)]
        for engine in engines:
            await engine.wait_for_requests(3)
        assert [len(engine.requests) for engine in engines] == [3, 3]
        for call in (several, *single):
            call.cancel()
        for engine in engines:
            await engine.wait(lambda engine=engine: all(request.abort_reason for request in engine.requests))


async def _first_of(engines: list[FakeEngine], num_requests: int) -> None:
    """Wait until one of them has so many requests."""
    waits = [asyncio.ensure_future(engine.wait_for_requests(num_requests)) for engine in engines]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)


async def test_the_death_of_one_engine_leaves_the_others_streams_alone():
    engines = [FakeEngine(), FakeEngine(dp_rank=1)]
    # A request for a rank is not moved to another one.
    async with serving(*engines) as (client, _):
        await client.until_engines_are_ready(2)
        calls = {rank: client.generate(data_parallel_rank=rank) for rank in (0, 1)}
        for engine in engines:
            await engine.wait_for_requests(1)
        await engines[0].kill()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(calls[0])
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        answer("alive")(engines[1], engines[1].requests[0])
        assert (await read_all(calls[1]))[1] == "alive"
        # New requests go to the engine that is there.
        engines[1].script = answer("next")
        assert [(await read_all(client.generate()))[1] for _ in range(2)] == ["next"] * 2


async def test_two_models_are_distinguished_and_an_empty_name_is_then_refused():
    engines = [
        FakeEngine(answer("small"), model="small"),
        FakeEngine(answer("large"), model="large", dp_rank=1),
    ]
    async with serving(*engines) as (client, _):
        await client.until_engines_are_ready(2)
        texts = [(await read_all(client.generate(model=name)))[1] for name in ("small", "large", "small")]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(client.generate())
    assert texts == ["small", "large", "small"]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "large, small" in (caught.value.details() or "")


async def test_a_model_answers_to_its_aliases_by_its_own_name():
    engines = [
        FakeEngine(answer("small"), model="small"),
        FakeEngine(answer("large"), model="large", dp_rank=1),
    ]
    aliases = ("gpt-4o=large", "tiny=small", "large=small", "none=absent", "only")
    async with serving(*engines, model_alias=aliases) as (client, _):
        await client.until_engines_are_ready(2)
        answers = [await read_all(client.generate(model=name)) for name in ("gpt-4o", "tiny", "large")]
        listed = (await client.model.ListModels(model_pb2.ListModelsRequest())).models
        card = (await client.model.GetModel(model_pb2.GetModelRequest(model="gpt-4o"))).model
        codes = []
        for name in ("none", "only"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_all(client.generate(model=name))
            codes.append(caught.value.code())
    assert [(started.model, text) for started, text, _, _ in answers] == [
        ("large", "large"),
        ("small", "small"),
        ("large", "large"),
    ]
    assert [model.name for model in listed] == ["gpt-4o", "large", "small", "tiny"]
    assert (card.name, card.num_engines) == ("gpt-4o", 1)
    assert codes == [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT]


async def test_an_alias_without_a_model_is_of_the_only_one():
    async with serving(FakeEngine(answer("text"), model="tiny"), model_alias=("gpt-4o",)) as (client, _):
        started, text, _, _ = await read_all(client.generate(model="gpt-4o"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(client.generate(model="gpt-5"))
    assert (started.model, text) == ("tiny", "text")
    assert "served: gpt-4o, tiny" in (caught.value.details() or "")


async def test_an_engine_that_is_full_is_not_picked():
    full, other = FakeEngine(max_inflight_adds=1), FakeEngine(dp_rank=1, max_inflight_adds=2)
    async with serving(full, other) as (client, _):
        await client.until_engines_are_ready(2)
        calls = [client.generate() for _ in range(3)]
        await full.wait_for_requests(1)
        await other.wait_for_requests(2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(client.generate())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in calls:
            call.cancel()
        for engine in (full, other):
            await engine.wait(lambda engine=engine: all(request.abort_reason for request in engine.requests))


async def test_an_engine_that_is_no_longer_listed_stays_while_its_stream_is_up():
    listed, kept = FakeEngine(answer("listed")), FakeEngine(answer("kept"), dp_rank=1)
    await kept.start()
    async with serving(listed) as (client, frontend):
        frontend.engines.directory.set_addresses("coordinator", [kept.address, "not an address"])
        await client.until_engines_are_ready(2)
        frontend.engines.directory.set_addresses("coordinator", [])
        texts = Counter([(await read_all(client.generate()))[1] for _ in range(4)])
        assert set(texts) == {"listed", "kept"}
        await kept.kill()
        async with asyncio.timeout(WAIT_S):
            while len(frontend.engines.directory.clients()) > 1:
                await client.model.ListModels(model_pb2.ListModelsRequest())
