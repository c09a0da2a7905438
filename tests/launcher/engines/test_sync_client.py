from __future__ import annotations

import asyncio
import threading

import pytest

from launcher.engines.core_client import EngineDead
from launcher.engines.sync_client import SyncEngineClient
from tests.engine_svc.session.service_rig import ServiceRig, make_entry, serving
from tests.launcher.engines.rig import Gathered, answer_of
from triptych.engine.v1 import engine_pb2

CLIENT = engine_pb2.ABORT_REASON_CLIENT


def _gather(client: SyncEngineClient, handles: dict[int, int]) -> Gathered:
    gathered = Gathered()
    while len(gathered.ended) < len(handles):
        gathered.take(client.get_output(timeout_s=20.0).columns)
    return gathered


async def test_get_output_blocks_until_something_comes() -> None:
    rig = ServiceRig()
    rig.executor.gate.clear()
    async with serving(rig):
        client = await asyncio.to_thread(SyncEngineClient, [rig.address])
        handles = {await asyncio.to_thread(client.add, make_entry(number)): number for number in (1, 2, 3)}
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(client.get_output, 0.05)
        rig.executor.gate.set()
        gathered = await asyncio.to_thread(_gather, client, handles)
        await asyncio.to_thread(client.close)
    assert gathered.tokens == {handle: answer_of(number) for handle, number in handles.items()}


async def test_the_end_of_the_engine_is_raised_in_the_caller_that_waits_and_in_later_ones() -> None:
    rig = ServiceRig()
    rig.executor.gate.clear()
    async with serving(rig):
        client = await asyncio.to_thread(SyncEngineClient, [rig.address])
        await asyncio.to_thread(client.add, make_entry(1))
        waiting = asyncio.ensure_future(asyncio.to_thread(client.get_output, 20.0))
        await rig.server.stop(0)
        with pytest.raises(EngineDead):
            await waiting
        for call in (lambda: client.add(make_entry(2)), lambda: client.abort([1], CLIENT), client.get_output):
            with pytest.raises(EngineDead):
                await asyncio.to_thread(call)
        await asyncio.to_thread(client.close)


async def test_an_aborted_request_ends() -> None:
    rig = ServiceRig()
    rig.executor.gate.clear()
    async with serving(rig):
        client = await asyncio.to_thread(SyncEngineClient, [rig.address])
        handle = await asyncio.to_thread(client.add, make_entry(1, max_tokens=50))
        await asyncio.to_thread(rig.executor.wait_for_launches, 1)
        await asyncio.to_thread(client.abort, [handle], CLIENT)
        # The loop waits for a result and reads nothing, so what comes into its inbox is the abort.
        await asyncio.to_thread(rig.engine.inbox.wait, 10.0)
        rig.executor.gate.set()
        gathered = await asyncio.to_thread(_gather, client, {handle: 1})
        await asyncio.to_thread(client.close)
    assert len(gathered.tokens.get(handle, [])) < 50


async def test_closing_twice_leaves_no_thread() -> None:
    rig = ServiceRig()
    async with serving(rig):
        threads = {thread.name for thread in threading.enumerate()}
        client = await asyncio.to_thread(SyncEngineClient, [rig.address])
        assert "engine-client" in {thread.name for thread in threading.enumerate()}
        await asyncio.to_thread(client.close)
        await asyncio.to_thread(client.close)
        left = {thread.name for thread in threading.enumerate()} - threads
    assert "engine-client" not in left
