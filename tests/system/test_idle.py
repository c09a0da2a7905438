"""A stack that has nothing to do uses next to no processor."""

from __future__ import annotations

import asyncio
import random

from tests.system.checkpoints import VOCAB_SIZE
from tests.system.generation import collect, random_prompt, request_of
from tests.system.slowness import slowness
from tests.system.stack import Stack, cpu_seconds

IDLE_S = 5.0


async def test_idle_processes_use_less_than_one_percent_after_a_hundred_requests(llama: str) -> None:
    rng = random.Random(13)
    scale = slowness()
    async with Stack() as stack:
        trio = await stack.start_all(llama)
        stub = stack.inference(trio.frontend)
        for _ in range(10):
            prompts = [random_prompt(rng, 16, VOCAB_SIZE) for _ in range(10)]
            await asyncio.gather(*(collect(stub, request_of(prompt, 16)) for prompt in prompts))
        await stack.engine(trio.engine).until_idle()
        before = [cpu_seconds(child.pid) for child in stack.children]
        # The one wait for time alone: a rate needs a span, long beside the ticks it is counted in.
        await asyncio.sleep(IDLE_S)
        used = [cpu_seconds(child.pid) - start for child, start in zip(stack.children, before, strict=True)]
    rates = {
        child.name: f"{seconds / IDLE_S:.2%}" for child, seconds in zip(stack.children, used, strict=True)
    }
    print(f"{rates}; limit times {scale:.2f}")
    assert max(used) < 0.01 * scale * IDLE_S
