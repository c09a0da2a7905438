"""A client that goes away costs nothing from the next step on.

That the engine frees blocks within one step of an abort is exact in tests/engine_svc/session/test_session.py;
here the cancel travels from a client through real processes, and the steps that pass meanwhile belong to the
wire.
"""

from __future__ import annotations

import asyncio
import random

import grpc

from tests.system.checkpoints import VOCAB_SIZE
from tests.system.generation import collect, random_prompt, request_of
from tests.system.stack import Stack

NUM_CANCELS = 200
NUM_TOKENS = 200
# A cancel that is not acted on runs on for NUM_TOKENS steps; one that is needs two hops, also where starved.
MAX_STEPS = NUM_TOKENS // 4


async def test_cancelled_requests_give_their_blocks_back_long_before_their_end(slow_llama: str) -> None:
    rng = random.Random(3)
    async with Stack() as stack:
        trio = await stack.start_all(slow_llama, "--max-num-batched-tokens=64")
        stub, engine = stack.inference(trio.frontend), stack.engine(trio.engine)
        await collect(stub, request_of(random_prompt(rng, 8, VOCAB_SIZE), 4))
        baseline = (await engine.until_idle()).num_used_blocks
        for _ in range(NUM_CANCELS):
            call = stub.Generate(
                request_of(random_prompt(rng, rng.choice((4, 60, 200)), VOCAB_SIZE), NUM_TOKENS)
            )
            await _reach_a_random_phase(rng, call)
            # Asked at the moment of the cancel, not before it: both are on their way at once.
            asked = asyncio.ensure_future(engine.stats())
            call.cancel()
            before = await asked
            after = await engine.until(lambda stats: stats.num_running == stats.num_waiting == 0)
            assert after.num_used_blocks == baseline
            assert after.step_number - before.step_number < MAX_STEPS
        await collect(stub, request_of(random_prompt(rng, 8, VOCAB_SIZE), 4))
        assert (await engine.until_idle()).num_used_blocks == baseline


async def _reach_a_random_phase(rng: random.Random, call: grpc.aio.UnaryStreamCall) -> None:
    """Right after sending, after some turns of the loop, or after some messages."""
    phase = rng.randrange(3)
    if phase == 1:
        for _ in range(rng.randrange(50)):
            await asyncio.sleep(0)
    if phase == 2:
        for _ in range(rng.randrange(1, 5)):
            await call.read()
