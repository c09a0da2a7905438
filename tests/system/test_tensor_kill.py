"""Tensors of 10 MB over real streams: each tier takes them, and a killed sender leaves no segment."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from engine_svc.tensors.source import TensorReceiver
from tests.engine_svc.session.service_rig import ServiceRig, make_facts
from tests.processes import running_async
from tests.system.tensor_frontend import HIDDEN, TensorFrontend, large_tensor
from triptych_kit import shared_memory

pytestmark = pytest.mark.chaos

ROUNDS, SENDERS = 10, 5


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[ServiceRig]:
    facts = replace(make_facts(), hidden_size=HIDDEN)
    rig = ServiceRig(facts=facts, tensors=TensorReceiver(is_open=True))
    await rig.start()
    try:
        await rig.load()
        yield rig
    finally:
        await rig.stop()


def left_of(frontend_ids: list[str]) -> list[str]:
    names = os.listdir(shared_memory.FOLDER)
    return [name for name in names for owner in frontend_ids if shared_memory.is_name_of(name, owner)]


async def kill_senders(address: str, frontend_ids: list[str], choose: random.Random) -> None:
    """Start senders and kill each at a point of its own."""

    async def strike(sender: asyncio.subprocess.Process) -> None:
        assert sender.stdout is not None
        for _ in range(choose.randint(1, 8)):
            assert await sender.stdout.readline()
        await asyncio.sleep(choose.random() * 0.01)
        sender.send_signal(signal.SIGKILL)
        await sender.wait()

    command = (sys.executable, "-m", "tests.system.tensor_frontend", address)
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(60):
        senders = [
            await stack.enter_async_context(
                running_async(*command, frontend_id, stdout=asyncio.subprocess.PIPE)
            )
            for frontend_id in frontend_ids
        ]
        await asyncio.gather(*map(strike, senders))


async def test_fifty_killed_senders_of_10_mb_leave_no_segment_and_the_engine_serves_on():
    choose, pid = random.Random(11), os.getpid()
    everybody = []
    async with serving() as rig:
        for index in range(ROUNDS):
            frontend_ids = [f"killed-{pid}-{index}-{sender}" for sender in range(SENDERS)]
            everybody += frontend_ids
            await kill_senders(rig.address, frontend_ids, choose)
        async with asyncio.timeout(30):
            # A file that is gone has no event; the engine looks once a second.
            while left_of(everybody):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        async with TensorFrontend(rig.address, f"alive-{pid}") as frontend:
            frontend.add([1], large_tensor(), max_tokens=3)
            await frontend.until_ended(1)
        assert (len(frontend.tokens[1]), frontend.rejected, frontend.failed) == (3, {}, {})
        assert left_of([f"alive-{pid}"]) == []
    # What the scheduler's latest plan had is released with the next one; of all others nothing is held.
    assert rig.engine.tensors.memory.used_bytes <= len(large_tensor().data)


async def test_fifty_tensors_by_shared_memory_are_taken_and_freed_at_once():
    async with serving() as rig, TensorFrontend(rig.address, f"shared-{os.getpid()}") as frontend:
        for handle in range(1, 51):
            frontend.add([handle], large_tensor(handle))
            await frontend.until_ended(handle)
        assert {entry.prompt_embeds.WhichOneof("payload") for entry in frontend.sent} == {"shm"}
        assert (frontend.rejected, left_of([frontend.frontend_id])) == ({}, [])
        assert len(rig.engine.tensors.blobs) == 0


async def test_a_frontend_without_a_host_proof_uploads_and_the_same_bytes_once():
    async with (
        serving() as rig,
        TensorFrontend(rig.address, f"remote-{os.getpid()}", has_host_proof=False) as frontend,
    ):
        frontend.add([1, 2], large_tensor(1))
        await frontend.until_ended(1, 2)
        frontend.add([3], large_tensor(1))
        frontend.add([4], large_tensor(2))
        await frontend.until_ended(3, 4)
        assert {entry.prompt_embeds.WhichOneof("payload") for entry in frontend.sent} == {"blob"}
        assert (frontend.rejected, frontend.failed) == ({}, {})
        assert len(rig.engine.tensors.blobs) == 2
        assert rig.engine.tensors.blobs.used_bytes == 2 * len(large_tensor().data)
