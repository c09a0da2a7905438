"""The end of an engine that an operator has paused or put to sleep: what is held moves at once."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.rpc import status_pb2
from grpc_status import rpc_status

from engine_svc.admin.lifecycle import EngineState
from tests.engine_svc.fakes import LIMIT_S
from tests.engine_svc.loop.controlled_rig import KEEP, WAIT, Controlled, controlled, running, tokens_of
from tests.engine_svc.session.service_rig import LENGTH, make_entry
from triptych.engine.v1 import utility_pb2


async def check_drained(engine: Controlled) -> None:
    """The session is over, and its frontend knows that the engine has left with requests of its own."""
    frontend = engine.frontend
    await frontend.until(lambda: frontend.is_over)
    assert frontend.error is not None
    assert frontend.error.code() is grpc.StatusCode.UNAVAILABLE
    status: status_pb2.Status = rpc_status.from_call(frontend.error)
    assert b"ENGINE_DRAINED" in b"".join(detail.value for detail in status.details)
    assert engine.rig.engine.lifecycle.state is EngineState.STOPPED


@pytest.mark.parametrize("call", [{"pause": {"mode": KEEP}}, {"sleep": {"level": 1, "mode": KEEP}}])
async def test_what_is_held_is_not_waited_for(call):
    async with controlled() as engine:
        await engine.call(**call)
        await engine.frontend.add(make_entry(1))
        await engine.pass_by()
        async with asyncio.timeout(LIMIT_S):
            await engine.rig.servicer.drain()
        await check_drained(engine)
        assert engine.frontend.tokens == {}


async def test_a_pause_that_lets_the_running_finish_is_waited_for_and_no_longer():
    async with controlled() as engine:
        await running(engine, 1, num_tokens=30)
        pause = utility_pb2.PauseCall(mode=WAIT)
        pausing = asyncio.create_task(engine.call(pause=pause))
        await engine.let_calls_begin()
        await engine.frontend.add(make_entry(2))
        await engine.frontend.flush()
        drain = asyncio.create_task(engine.rig.servicer.drain())
        await engine.frontend.until(lambda: "draining" in engine.frontend.kinds())
        assert not drain.done()
        engine.rig.executor.gate.set()
        await pausing
        async with asyncio.timeout(LIMIT_S):
            await drain
        await check_drained(engine)
        assert engine.frontend.finished == {1: [LENGTH]}
        assert engine.frontend.tokens == {1: tokens_of(1, 30)}
