"""GenerateSession on real engines: turns have the ids of Generate of the same tokens, and leave nothing."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import pytest

from tests.system.checkpoints import VOCAB_SIZE
from tests.system.generation import random_prompt, read_to_end
from tests.system.sessions import Session, Stub, differences
from tests.system.stack import EngineView, Stack, address_of
from triptych.common.v1 import output_pb2, sampling_pb2
from triptych_kit.process.child import Child

WORDS = ("the quick brown fox", " river bank", " jumps over the lazy dog")
NUM_TURNS = 5
ENGINE_FLAGS = ("--deterministic=on", "--num-threads=1", "--num-kv-blocks=256", "--device=cpu")


def sampling_of(number: int) -> sampling_pb2.SamplingParams:
    if number % 2:
        return sampling_pb2.SamplingParams(temperature=1.0, seed=number, ignore_eos=True)
    return sampling_pb2.SamplingParams(temperature=0.0, ignore_eos=True)


async def converse(stub: Stub, number: int) -> Session:
    """Turns of texts and ids, of which one is cancelled; the input ends while the last one runs."""
    rng = random.Random(number)
    session = Session(stub, sampling_of(number))
    for index in range(NUM_TURNS):
        prompt = WORDS[index % 3] if index % 2 else random_prompt(rng, rng.randrange(1, 40), VOCAB_SIZE)
        turn = await session.add(prompt, 200 if index == 2 else rng.randrange(1, 20))
        if index == 2:
            await session.read(turn, num_tokens=3)
            await session.cancel_turn()
        if index == NUM_TURNS - 1:
            await session.send_end()
        await session.read(turn)
        assert turn.has_next == (index < NUM_TURNS - 1)
    assert session.turns[2].reason == output_pb2.FINISH_REASON_ABORT
    await read_to_end(session.call)
    return session


async def test_turns_have_the_ids_of_whole_requests_and_leave_nothing(llama: str) -> None:
    async with Stack() as stack:
        trio = await stack.start_all(llama, *ENGINE_FLAGS)
        stub, view = stack.inference(trio.frontend), stack.engine(trio.engine)
        sessions = await asyncio.gather(*(converse(stub, number) for number in range(3)))
        # Clients that go away in a turn, and between two.
        left = [Session(stub, sampling_of(0)) for _ in range(2)]
        for session, max_tokens in zip(left, (400, 3), strict=True):
            turn = await session.add("river", max_tokens)
            await session.read(turn, num_tokens=None if max_tokens == 3 else 1)
            session.call.cancel()
        await view.until(lambda stats: stats.num_used_blocks == stats.num_running == stats.num_waiting == 0)
        assert await differences(stub, sessions) == []
    for session in sessions:
        for before, turn in pairwise(session.turns):
            # All but the token sampled last was computed, and is kept to the token.
            assert turn.num_cached_tokens == len(before.prompt) + len(before.token_ids) - 1


@pytest.mark.chaos
async def test_sessions_go_on_where_engines_are_killed_between_and_within_turns(slow_llama: str) -> None:
    async with Stack() as stack:
        engines = await stack.start_several("engine", slow_llama, "--port=0", *ENGINE_FLAGS, count=3)
        known = [f"--engine={address_of(engine)}" for engine in engines]
        frontend = await stack.start("frontend", "--port=0", *known)
        for engine in engines:
            await stack.ready("engine", engine)
        await stack.ready("frontend", frontend)
        stub = stack.inference(frontend)
        views = {engine: stack.engine(engine) for engine in engines}
        session = Session(stub, sampling_of(1))
        turn = await session.add([5, 6, 7], 6)
        await session.read(turn, num_tokens=1)
        used = await in_use(views)
        await session.read(turn)
        used.kill()
        del views[used]
        # Its stream may break before or in this turn.
        turn = await session.add([8, 9], 30)
        await session.read(turn, num_tokens=3)
        used = await in_use(views)
        used.kill()
        del views[used]
        await session.read(turn)
        turn = await session.add("river bank", 5)
        await session.read(turn)
        await session.end()
        (left,) = views.values()
        await left.until(lambda stats: stats.num_used_blocks == 0)
        assert await differences(stub, [session]) == []


async def in_use(views: dict[Child, EngineView]) -> Child:
    """The engine that runs the only request."""
    while True:
        for engine, view in views.items():
            if (await view.stats()).num_running:
                return engine
