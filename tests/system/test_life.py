"""Services come and go in any order, and only those whose stream it was notice."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from pathlib import Path

import grpc
import pytest

from benchmarks.rig.processes import LOOPBACK, free_port
from tests.system.checkpoints import VOCAB_SIZE, Reference
from tests.system.generation import collect, random_prompt, read_to_end, request_of
from tests.system.slowed_engine import Brake
from tests.system.stack import Stack, address_of
from triptych_kit.addresses import join_address
from triptych_kit.process.child import Child

pytestmark = pytest.mark.chaos

ORDERS = list(itertools.permutations(("coordinator", "engine", "frontend")))


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "-".join(order))
async def test_any_start_order_works(order: tuple[str, ...], llama: str) -> None:
    port = free_port()
    flags = {
        "coordinator": (f"--port={port}",),
        "engine": (llama, "--port=0", f"--coordinator={join_address(LOOPBACK, port)}"),
        "frontend": ("--port=0", f"--coordinator={join_address(LOOPBACK, port)}"),
    }
    async with Stack() as stack:
        children: dict[str, Child] = {}
        for service in order:
            children[service] = await stack.start(service, *flags[service])
        await stack.ready("frontend", children["frontend"])
        answer = await collect(stack.inference(children["frontend"]), request_of("the quick brown fox", 8))
    assert len(answer.token_ids) == 8


async def test_a_frontend_with_a_configured_engine_needs_no_coordinator(llama: str) -> None:
    port = free_port()
    async with Stack() as stack:
        frontend = await stack.start("frontend", "--port=0", f"--engine={join_address(LOOPBACK, port)}")
        await stack.start("engine", llama, f"--port={port}")
        await stack.ready("frontend", frontend)
        answer = await collect(stack.inference(frontend), request_of("the quick brown fox", 8))
    assert len(answer.token_ids) == 8


async def test_a_killed_frontend_leaves_no_blocks_and_affects_no_other_request(
    llama: str, tmp_path: Path
) -> None:
    rng = random.Random(5)
    prompts = [random_prompt(rng, 20, VOCAB_SIZE) for _ in range(8)]
    brake = Brake(tmp_path)
    async with Stack(brake.environment) as stack:
        trio = await stack.start_all(llama, "--num-kv-blocks=600")
        other = await stack.start(
            "frontend", "--port=0", f"--coordinator={address_of(trio.coordinator)}", index=1
        )
        await stack.ready("frontend", other)
        engine = stack.engine(trio.engine)
        doomed_stub, other_stub = stack.inference(trio.frontend), stack.inference(other)
        brake.apply()
        doomed = [doomed_stub.Generate(request_of(prompt, 400)) for prompt in prompts]
        kept = [asyncio.ensure_future(collect(other_stub, request_of(prompt, 300))) for prompt in prompts]
        await engine.until(lambda stats: stats.num_running == 16)
        os.kill(trio.frontend.pid, signal.SIGKILL)
        brake.release()
        answers = await asyncio.gather(*kept)
        stats = await engine.until_idle()
    assert stats.num_used_blocks == 0
    reference = Reference(Path(llama))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert reference.generate(prompt, 300).first_real_difference(answer.token_ids) is None
    for call in doomed:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_end(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
