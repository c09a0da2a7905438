"""GenerateSession on real engines: turns have the ids of Generate of the same tokens, and leave nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from tests.system.checkpoints import VOCAB_SIZE
from tests.system.generation import CALL_LIMIT_S, collect, random_prompt, read_to_end
from tests.system.stack import EngineView, Stack, address_of
from triptych.api.v1 import generate_pb2, inference_pb2, inference_pb2_grpc
from triptych.common.v1 import output_pb2, sampling_pb2
from triptych_kit.process.child import Child

Message = inference_pb2.GenerateSessionRequest
Stub = inference_pb2_grpc.InferenceServiceStub

WORDS = ("the quick brown fox", " river bank", " jumps over the lazy dog")
NUM_TURNS = 5
ENGINE_FLAGS = ("--deterministic=on", "--num-threads=1", "--num-kv-blocks=256", "--device=cpu")


@dataclass
class Turn:
    """What a session has answered to all tokens before."""

    sampling: sampling_pb2.SamplingParams
    prompt: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    reason: int = output_pb2.FINISH_REASON_UNSPECIFIED
    has_next: bool = True


class Session:
    """A call of GenerateSession, greedy or with one seed."""

    def __init__(self, stub: Stub, sampling: sampling_pb2.SamplingParams) -> None:
        self.sampling = sampling
        self.turns: list[Turn] = []
        self.call = stub.GenerateSession(timeout=CALL_LIMIT_S)

    async def add(self, prompt: str | Sequence[int], max_tokens: int) -> Turn:
        """Send an input; its turn is filled by `read`."""
        self.turns.append(Turn(sampling_pb2.SamplingParams()))
        sampling = self.turns[-1].sampling
        sampling.CopyFrom(self.sampling)
        sampling.max_tokens = max_tokens
        input_ = {"prompt": prompt} if isinstance(prompt, str) else {"token_ids": {"ids": prompt}}
        if len(self.turns) == 1:
            start = generate_pb2.GenerateRequest(sampling=sampling, return_prompt_token_ids=True, **input_)
            await self.call.write(Message(start=start))
        else:
            await self.call.write(Message(append={"sampling": sampling, **input_}))
        return self.turns[-1]

    async def read(self, turn: Turn, *, num_tokens: int | None = None) -> None:
        """Read to the end of a turn, or until it has some tokens."""
        while turn.reason == output_pb2.FINISH_REASON_UNSPECIFIED:
            if num_tokens is not None and len(turn.token_ids) >= num_tokens:
                return
            message = await self.call.read()
            response = message.response
            if response.HasField("started"):
                turn.prompt = list(response.started.prompt_token_ids)
                turn.num_cached_tokens = response.started.num_cached_tokens
            turn.token_ids += response.delta.token_ids
            if response.HasField("finished"):
                turn.reason, turn.has_next = response.finished.reason, message.turn_ended

    async def end(self) -> None:
        await self.call.write(Message(end={}))
        await read_to_end(self.call)


async def check(stub: Stub, sessions: Sequence[Session]) -> None:
    """The ids of each turn are those of Generate of the same tokens, and the context those of the turns."""
    for session in sessions:
        context: list[int] = []
        for turn in session.turns:
            assert turn.prompt[: len(context)] == context
            request = generate_pb2.GenerateRequest(token_ids={"ids": turn.prompt}, sampling=turn.sampling)
            whole = (await collect(stub, request)).token_ids
            is_cancelled = turn.reason == output_pb2.FINISH_REASON_ABORT
            assert turn.token_ids == (whole[: len(turn.token_ids)] if is_cancelled else whole)
            context = turn.prompt + turn.token_ids


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
            await session.call.write(Message(cancel_turn={}))
        if index == NUM_TURNS - 1:
            await session.call.write(Message(end={}))
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
        await check(stub, sessions)
    for session in sessions:
        for before, turn in pairwise(session.turns):
            # All but the token sampled last was computed, and is kept to the token.
            assert turn.num_cached_tokens == len(before.prompt) + len(before.token_ids) - 1


@pytest.mark.chaos
async def test_sessions_go_on_where_engines_are_killed_between_and_within_turns(slow_llama: str) -> None:
    async with Stack() as stack:
        engines = [
            await stack.start("engine", slow_llama, "--port=0", *ENGINE_FLAGS, index=index)
            for index in range(3)
        ]
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
        await check(stub, [session])


async def in_use(views: dict[Child, EngineView]) -> Child:
    """The engine that runs the only request."""
    while True:
        for engine, view in views.items():
            if (await view.stats()).num_running:
                return engine
