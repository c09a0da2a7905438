"""Watchers of a scheduler over real gRPC: what is refused, slow readers, the end of the engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from engine_svc.admin.lifecycle import EngineState
from engine_svc.admin.served_engine import Failure
from engine_svc.admin.watch import MAX_WATCHERS
from engine_svc.build.engine import build_core
from engine_svc.cache.attention import FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.core.step import StepPlan
from engine_svc.data_parallel.driver import RankStatus
from engine_svc.data_parallel.wave import LockstepState
from engine_svc.loop.mailbox import Call
from engine_svc.scheduler.config import PauseState, SchedulerConfig
from engine_svc.scheduler.watch import SchedulerWatch
from tests.engine_svc.fakes import LIMIT_S, MAX_MODEL_LEN
from tests.engine_svc.session.service_rig import ServiceRig, StreamClient, added, make_entry, serving
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych_kit.channel import open_channel
from triptych_kit.clock import MonotonicClock
from triptych_kit.errors import from_rpc_error

CODE = grpc.StatusCode


class Listener:
    """An engine, a frontend's session with it, and AdminService at the same listener."""

    def __init__(self, rig: ServiceRig, frontend: StreamClient, stub: admin_pb2_grpc.AdminServiceStub):
        self.rig = rig
        self.frontend = frontend
        self.stub = stub

    def watch(self, **fields: int) -> grpc.aio.UnaryStreamCall:
        return self.stub.WatchScheduler(admin_pb2.WatchSchedulerRequest(**fields))


@contextlib.asynccontextmanager
async def watched(*, load: bool = True, max_num_seqs: int = 2) -> AsyncIterator[Listener]:
    watch = SchedulerWatch(MonotonicClock())
    config = SchedulerConfig(
        max_model_len=MAX_MODEL_LEN, max_num_seqs=max_num_seqs, max_num_batched_tokens=64
    )
    core = build_core(config, CacheConfig(65, (FullAttention(4),)), features=[watch])
    watch.wrap(core.scheduler, core.kv_cache)
    rig = ServiceRig(scheduler=core.scheduler, watch=watch)
    async with serving(rig, load=load) as stub, open_channel(rig.address) as channel:
        frontend = StreamClient(stub, "f")
        await frontend.open()
        yield Listener(rig, frontend, admin_pb2_grpc.AdminServiceStub(channel))
        await frontend.close()


async def read(call: grpc.aio.UnaryStreamCall) -> admin_pb2.WatchSchedulerResponse:
    async with asyncio.timeout(LIMIT_S):
        message = await call.read()
    assert isinstance(message, admin_pb2.WatchSchedulerResponse)
    return message


async def refused(call: grpc.aio.UnaryStreamCall) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        async with asyncio.timeout(LIMIT_S):
            await call.read()
    return refusal.value.code(), from_rpc_error(refusal.value).message


async def has_watchers(engine: Listener, num_watchers: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while engine.rig.servicer.watchers.num_watchers != num_watchers:
            await engine.frontend.flush()


async def test_a_watcher_sees_requests_with_shared_blocks_and_what_they_wait_for():
    async with watched() as engine:
        rig = engine.rig
        call = engine.watch(interval_ms=100, max_requests=10, max_blocks=100)
        # Steps are recorded from here on.
        await read(call)

        def pause(plan: StepPlan) -> None:
            if plan.step_number == 5:
                rig.scheduler.set_pause(PauseState.ALL)

        rig.executor.on_launch = pause
        prompt = list(range(100, 117))
        await engine.frontend.add(*(make_entry(handle, prompt=prompt, max_tokens=50) for handle in (1, 2, 3)))
        message = await read(call)
        steps = list(message.steps)
        while not any(request.blockers for request in message.requests) or len(message.requests) < 3:
            message = await read(call)
            steps += message.steps
        first, second, third = message.requests
        assert [one.status for one in message.requests] == ["RUNNING", "RUNNING", "WAITING"]
        assert [one.blockers for one in message.requests] == [["paused"]] * 3
        # Four full blocks of the prompt are common, the rest is each one's own.
        assert first.block_ids[:4] == second.block_ids[:4]
        assert not set(first.block_ids[4:]) & set(second.block_ids[4:])
        assert first.num_blocks == len(first.block_ids)
        assert not third.block_ids
        assert (message.stats.num_running, message.stats.num_waiting) == (2, 1)
        assert steps[-1].num_requests == 2 and steps[-1].duration_ms > 0
        rig.engine.inbox.put(Call(lambda: rig.scheduler.set_pause(PauseState.NONE)))
        await engine.frontend.until_ended(1, 2, 3)
        while message.requests or not message.cached_block_ids:
            message = await read(call)
            steps += message.steps
        assert set(first.block_ids[:4]) < set(message.cached_block_ids)
        numbers = [step.step_number for step in steps]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        call.cancel()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"interval_ms": 99}, "interval_ms is 99, must be in 100..3600000"),
        ({"max_requests": 4097}, "max_requests is 4097, must be in 0..4096"),
        ({"max_blocks": 65_537}, "max_blocks is 65537, must be in 0..65536"),
    ],
)
async def test_a_field_beyond_its_limit_is_refused_by_name(fields: dict[str, int], text: str):
    async with watched() as engine:
        code, message = await refused(engine.watch(**fields))
        assert code is CODE.INVALID_ARGUMENT and text in message


async def test_watchers_are_limited_and_a_watcher_that_leaves_makes_room():
    async with watched() as engine:
        calls = [engine.watch() for _ in range(MAX_WATCHERS)]
        for call in calls:
            await read(call)
        code, message = await refused(engine.watch())
        assert code is CODE.RESOURCE_EXHAUSTED and f"the limit is {MAX_WATCHERS}" in message
        for call in calls:
            call.cancel()
        await has_watchers(engine, 0)
        await read(call := engine.watch())
        call.cancel()


async def test_an_engine_that_loads_cannot_be_watched():
    async with watched(load=False) as engine:
        code, message = await refused(engine.watch())
        assert (code, message) == (CODE.UNAVAILABLE, "engine is loading")
        await engine.rig.load()


async def test_requests_of_a_rank_that_is_in_no_wave_wait_for_one():
    async with watched() as engine:
        served = engine.rig.engine
        lockstep: Any = SimpleNamespace(rank_status=RankStatus(LockstepState.QUIET))
        served.core = replace(served.core, lockstep=lockstep)
        served.inbox.put(Call(lambda: engine.rig.scheduler.set_pause(PauseState.ALL)))
        await engine.frontend.add(make_entry(1))
        await engine.frontend.flush()
        call = engine.watch(max_requests=1)
        assert [one.blockers for one in (await read(call)).requests] == [["paused", "wave"]]
        call.cancel()


async def test_other_calls_of_the_admin_service_are_not_served_to_frontends():
    async with watched() as engine:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await engine.stub.GetStatus(admin_pb2.GetStatusRequest())
        assert refusal.value.code() is CODE.UNIMPLEMENTED


async def test_no_state_is_read_for_a_watcher_that_does_not_read():
    async with watched() as engine:
        responses = engine.rig.servicer.watchers.responses(admin_pb2.WatchSchedulerRequest(interval_ms=100))
        await anext(responses)
        fast = engine.watch(interval_ms=100)
        await engine.frontend.add(make_entry(1, max_tokens=20))
        await engine.frontend.until_ended(1)
        for _ in range(3):
            await read(fast)
        # The slow one gets the newest state, with all steps since its last.
        newest = await anext(responses)
        assert newest.stats.num_finished == 1 and len(newest.steps) == 20
        await responses.aclose()
        fast.cancel()


async def test_a_watch_ends_with_its_engine():
    async with watched() as engine:
        call = engine.watch(interval_ms=3_600_000)
        await read(call)
        engine.rig.engine.lifecycle.move_to(EngineState.DRAINING)
        engine.rig.engine.lifecycle.move_to(EngineState.STOPPED)
        async with asyncio.timeout(LIMIT_S):
            assert await call.read() is grpc.aio.EOF


async def test_a_watch_waits_while_a_step_runs_and_ends_with_an_engine_that_fails_in_it():
    async with watched() as engine:
        await added(engine.rig, engine.frontend, make_entry(1, max_tokens=20), hold_at=3)
        call = engine.watch()
        answer = asyncio.ensure_future(refused(call))
        await has_watchers(engine, 1)
        assert not answer.done()
        engine.rig.engine.fail(Failure("a step hangs", 70))
        assert await answer == (CODE.UNAVAILABLE, "engine failed: a step hangs")
