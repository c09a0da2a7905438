"""Requests that move between our engine and one of the second implementation, with a frontend of ours."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest

from tests.contract.our_engine import OurEngine, prompts_of, start_engine, until_both_used
from tests.contract.scripted_engine import Running, ScriptedEngine, unpack
from tests.system.generation import request_of
from tests.system.stack import Stack
from tests.system.wire_proxy import WireProxy, proxied
from triptych.api.v1 import inference_pb2_grpc
from triptych.common.v1 import output_pb2

pytestmark = pytest.mark.chaos

# So many that none ends before what strikes has struck.
NUM_TOKENS = 600
NUM_TOKENS_BEFORE = 5
PROMPTS = prompts_of(1, 2)


class ReplayingEngine(ScriptedEngine):
    """Generates what another engine has generated, for prompts that are known."""

    answers: dict[tuple[int, ...], list[int]]

    def token(self, running: Running) -> int:
        answer = self.answers.get(running.prompt)
        return super().token(running) if answer is None else answer[running.num_tokens]


@dataclass
class Stream:
    """A client's call, and what it got so far."""

    prompt: list[int]
    call: Any
    token_ids: list[int] = field(default_factory=list)
    reasons: list[int] = field(default_factory=list)

    async def read(self, num_tokens: int = NUM_TOKENS + 1) -> None:
        """Until it has so many tokens, or to its end. Raises its status unless it is OK."""
        while len(self.token_ids) < num_tokens:
            response = await self.call.read()
            if response is grpc.aio.EOF:  # type: ignore[attr-defined]  # its stubs leave it out
                return
            self.token_ids += response.delta.token_ids
            if response.HasField("finished"):
                self.reasons.append(response.finished.reason)


@dataclass
class Scene:
    """A frontend of ours, both engines, and what each of two streams is to get."""

    stub: inference_pb2_grpc.InferenceServiceStub
    ours: OurEngine
    second: ReplayingEngine
    wire: WireProxy  # of the second engine

    async def start_streams(self) -> tuple[Stream, Stream]:
        """One at our engine and one at the second, each with tokens."""
        num_before = len(self.second.accepted)
        streams = [Stream(one, self.stub.Generate(request_of(one, NUM_TOKENS))) for one in PROMPTS]
        for stream in streams:
            await stream.read(NUM_TOKENS_BEFORE)
        (entry,) = self.second.accepted[num_before:]
        at_second = unpack(entry.prompt_token_ids)
        at_ours, other = sorted(streams, key=lambda stream: tuple(stream.prompt) == at_second)
        return at_ours, other

    async def must_be_whole(self, *streams: Stream) -> None:
        for stream in streams:
            await stream.read()
            assert stream.token_ids == self.second.answers[tuple(stream.prompt)]
            assert stream.reasons == [output_pb2.FINISH_REASON_LENGTH]


@asynccontextmanager
async def playing(
    *engine_flags: str, digest: str = "", frontend_flags: Sequence[str] = ()
) -> AsyncIterator[Scene]:
    """digest: of the second engine; by default that of ours."""
    async with Stack() as stack, AsyncExitStack() as exits:
        ours = await start_engine(stack, *engine_flags)
        ready, files = await ours.facts()
        ready.fingerprint.digest = digest or ready.fingerprint.digest
        second = ReplayingEngine(ready=ready, files=files)
        answers = await ours.greedy(PROMPTS, NUM_TOKENS)
        second.answers = dict(zip(map(tuple, PROMPTS), answers, strict=True))
        wire = await exits.enter_async_context(proxied(await second.start()))
        exits.push_async_callback(second.stop)
        known = [f"--engine={address}" for address in (ours.address, wire.address)]
        flags = ("--port=0", "--text-workers=1", "--routing-policy=round-robin", *frontend_flags)
        frontend = await stack.start("frontend", *flags, *known)
        await stack.ready("frontend", frontend)
        stub = stack.inference(frontend)
        await until_both_used(stub, ours, second)
        yield Scene(stub, ours, second, wire)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["death", "drain"])
async def test_a_stream_of_our_engine_goes_on_at_another_engine(number: signal.Signals) -> None:
    async with playing("--drain-deadline-s=0") as scene:
        moved, other = await scene.start_streams()
        scene.ours.child.send_signal(number)
        await scene.must_be_whole(moved, other)
        entry = scene.second.accepted[-1]
    received = unpack(entry.output_token_ids)
    assert (unpack(entry.prompt_token_ids), entry.attempt) == (tuple(moved.prompt), 1)
    assert NUM_TOKENS_BEFORE <= len(received) < NUM_TOKENS
    assert list(received) == moved.token_ids[: len(received)]


async def test_a_stream_of_another_engine_goes_on_at_ours_when_that_one_dies() -> None:
    async with playing() as scene:
        num_before = (await scene.ours.view.stats()).num_generated_tokens
        other, moved = await scene.start_streams()
        scene.wire.refuse()
        await scene.must_be_whole(moved, other)
        num_generated = (await scene.ours.view.stats()).num_generated_tokens - num_before
    # Its own stream, and what was left of the other one.
    assert NUM_TOKENS < num_generated <= 2 * NUM_TOKENS - NUM_TOKENS_BEFORE


async def test_a_stream_goes_on_at_no_engine_of_another_fingerprint() -> None:
    async with playing(digest="d" * 64, frontend_flags=["--reconnect-window-s=1"]) as scene:
        lost, other = await scene.start_streams()
        num_accepted = len(scene.second.accepted)
        scene.ours.child.send_signal(signal.SIGKILL)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await lost.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await scene.must_be_whole(other)
        assert len(scene.second.accepted) == num_accepted
