"""What happens to a stack while it answers. Each returns when it has struck."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from benchmarks.rig import faults
from tests.chaos.stacks import Stack
from triptych.api.v1 import generate_pb2, inference_pb2, inference_pb2_grpc

_CALL_LIMIT_S = 120.0
# In messages of all clients together, of which a seed has about a hundred.
_LAST_MOMENT = 20
_MAX_TURNS, _TURN_INPUT, _TURN_OUTPUT = 3, 24, 12

_Message, _Answer = inference_pb2.GenerateSessionRequest, inference_pb2.GenerateSessionResponse


@dataclass(slots=True)
class Progress:
    """How many messages the clients of a seed have seen, and events that wait for so many."""

    num_messages: int = 0
    _waiting: list[tuple[int, asyncio.Event]] = field(default_factory=list)

    def note(self, num_messages: int = 1) -> None:
        self.num_messages += num_messages
        for least, event in self._waiting:
            if self.num_messages >= least:
                event.set()

    def end(self) -> None:
        """No message follows: what waits for one goes on."""
        self.note(_LAST_MOMENT)

    async def until(self, num_messages: int) -> None:
        event = asyncio.Event()
        self._waiting.append((num_messages, event))
        self.note(0)
        await event.wait()


@dataclass(slots=True)
class Scene:
    """A seed under way."""

    stack: Stack
    requests: list[generate_pb2.GenerateRequest]
    rng: random.Random
    progress: Progress = field(default_factory=Progress)


async def kill_engine(scene: Scene) -> None:
    await scene.progress.until(scene.rng.randint(0, _LAST_MOMENT))
    await faults.kill(scene.rng.choice(scene.stack.engines))


async def cancel_stream(scene: Scene) -> None:
    """One more client asks for the same as another, and goes away in the middle."""
    await scene.progress.until(scene.rng.randint(0, _LAST_MOMENT))
    stub = inference_pb2_grpc.InferenceServiceStub(scene.stack.channel())
    request = generate_pb2.GenerateRequest(token_ids=scene.rng.choice(scene.requests).token_ids)
    request.token_ids.ids.extend((20, 21, 22))
    request.sampling.ignore_eos = True
    call = stub.Generate(request, timeout=_CALL_LIMIT_S)
    for _ in range(scene.rng.randint(1, 6)):
        await call.read()
    call.cancel()


async def cancel_turns(scene: Scene) -> None:
    """One more client has a session that begins like another request, cancels its turns, and goes away."""
    await scene.progress.until(scene.rng.randint(0, _LAST_MOMENT))
    stub = inference_pb2_grpc.InferenceServiceStub(scene.stack.channel())
    call = stub.GenerateSession(timeout=_CALL_LIMIT_S)
    start = generate_pb2.GenerateRequest(sampling={"max_tokens": _TURN_OUTPUT, "ignore_eos": True})
    start.token_ids.ids.extend([*scene.rng.choice(scene.requests).token_ids.ids[:_TURN_INPUT], 23, 24])
    await call.write(_Message(start=start))
    for _ in range(scene.rng.randint(1, _MAX_TURNS)):
        num_messages, message = scene.rng.randint(0, 4), _Answer()
        while not message.turn_ended:
            if num_messages == 0:
                await call.write(_Message(cancel_turn={}))
            message, num_messages = await call.read(), num_messages - 1
        await call.write(_Message(append={"token_ids": {"ids": [25, 26]}}))
    call.cancel()
