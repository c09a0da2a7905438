"""Clients that go away at any moment leave nothing behind: no block, task, thread or descriptor."""

from __future__ import annotations

import asyncio
import contextlib
import random

import grpc.aio
import pytest

from benchmarks.rig.streams import FIRST_MARKER_ID, FIRST_PLAIN_ID, Load, engine_ids
from tests.chaos.scenarios import STANDARD
from tests.chaos.scene import NUM_STREAMS, NUM_TOKENS
from tests.chaos.stacks import Stack, Stacks, cases_with_marks
from triptych.api.v1 import generate_pb2, inference_pb2_grpc
from triptych.common.v1 import sampling_pb2

pytestmark = [pytest.mark.chaos, pytest.mark.asyncio(loop_scope="session")]

NUM_CANCELS = 1000
NUM_CANCELS_BESIDE_STREAMS = 100
_AT_ONCE = 16
_MAX_TOKENS = 48
_MAX_WAIT_S = 0.08


async def test_a_thousand_cancels_at_random_phases_leave_nothing(stacks: Stacks) -> None:
    stack = await stacks.get(STANDARD)
    phases = await _cancel_many(stack, random.Random(17), NUM_CANCELS)
    found = await stacks.leaks(spare_tasks=0)
    print(f"\n{NUM_CANCELS} cancels, by messages that were read: {phases}")
    assert found == []
    assert min(phases["none"], phases["some"], phases["all"]) > 0


async def test_streams_beside_a_hundred_cancels_are_clean(stacks: Stacks) -> None:
    stack = await stacks.get(STANDARD)
    cases = cases_with_marks(NUM_STREAMS, NUM_TOKENS)
    oracle = await stacks.oracle(stack, cases)
    load = Load(label=stacks.label())
    kept = load.send(stack.channel(), cases[: NUM_STREAMS // 2])
    assert await engine_ids(stack.channel(), kept)
    await _cancel_many(stack, random.Random(23), NUM_CANCELS_BESIDE_STREAMS)
    await load.finish()
    assert [str(violation) for violation in oracle.violations(kept)] == []
    assert await stacks.leaks() == []


async def _cancel_many(stack: Stack, rng: random.Random, count: int) -> dict[str, int]:
    """Begin and cancel so many streams, some at once; how many had read no message, some, or all."""
    stub = inference_pb2_grpc.InferenceServiceStub(stack.channel())
    gate = asyncio.Semaphore(_AT_ONCE)
    seen = {"none": 0, "some": 0, "all": 0}

    async def one(seed: int) -> None:
        async with gate:
            seen[await _cancel_one(stub, random.Random(seed))] += 1

    await asyncio.gather(*(one(rng.randrange(2**32)) for _ in range(count)))
    return seen


async def _cancel_one(stub: inference_pb2_grpc.InferenceServiceStub, rng: random.Random) -> str:
    call = stub.Generate(_request(rng))
    phase = rng.randrange(5)
    num_read, has_ended = 0, False
    if phase == 1:
        # Before the request is on the wire, or as its call is being made.
        for _ in range(rng.randrange(20)):
            await asyncio.sleep(0)
    elif phase == 2:
        # While it is tokenized, sent, queued or in prefill: wherever the moment falls.
        await asyncio.sleep(rng.uniform(0.0, _MAX_WAIT_S))
    elif phase == 3:
        num_read, has_ended = await _read(call, rng.randrange(1, _MAX_TOKENS))
    elif phase == 4:
        # Its last message may pass the cancel on the way.
        num_read, has_ended = await _read(call, _MAX_TOKENS + 3)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call.code()
    return "all" if has_ended else "some" if num_read else "none"


async def _read(call: grpc.aio.UnaryStreamCall, count: int) -> tuple[int, bool]:
    """Read so many messages, or until the end; how many, and whether that was it."""
    for number in range(count):
        message = await call.read()
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]
            return number, True
    return count, False


def _request(rng: random.Random) -> generate_pb2.GenerateRequest:
    length = rng.choice((4, 60, 300))
    prompt = [rng.randrange(FIRST_PLAIN_ID, FIRST_MARKER_ID) for _ in range(length)]
    sampling = sampling_pb2.SamplingParams(
        temperature=0.0, max_tokens=_MAX_TOKENS, ignore_eos=True, n=rng.choice((1, 1, 1, 3))
    )
    if sampling.n > 1:
        sampling.temperature, sampling.seed = 0.8, rng.randrange(2**32)
    return generate_pb2.GenerateRequest(token_ids=generate_pb2.TokenIds(ids=prompt), sampling=sampling)
