"""Our frontend, a process, with two engines of the second implementation behind wires that can be cut."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from tests.contract.our_engine import prompts_of
from tests.contract.scripted_engine import ScriptedEngine, pack, token_at
from tests.system.generation import Answer, collect, request_of
from tests.system.stack import WAIT_LIMIT_S, Stack
from tests.system.wire_proxy import WireProxy, proxied
from triptych.api.v1 import inference_pb2_grpc
from triptych.common.v1 import output_pb2
from triptych_cli.services import embedded_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_STREAMS = 16
NUM_TOKENS = 200
NUM_CUTS = 6
# A request of that many tokens does not end by itself meanwhile.
SLOW_STEP_S = 0.3


class WiredEngine(ScriptedEngine):
    """It has a wire of its own."""

    wire: WireProxy

    def __init__(self) -> None:
        super().__init__()
        self.cuts: list[int] = []  # the bytes after which connections are still to break

    def next_cut(self) -> int | None:
        return self.cuts.pop() if self.cuts else None


class Scene:
    """The frontend and its engines."""

    def __init__(self, engines: list[WiredEngine], stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        self.engines = engines
        self.stub = stub

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_LIMIT_S):
            # What an engine has is changed by messages, of which it reports none.
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def seed_of(self, prompt: list[int]) -> int:
        """The seed of a request, which one engine has accepted once."""
        entries = [entry for engine in self.engines for entry in engine.accepted]
        (entry,) = [one for one in entries if one.prompt_token_ids == pack(prompt)]
        return entry.request_seed

    def check(self, answer: Answer, prompt: list[int], num_tokens: int) -> None:
        """Every token came once, in order, and the end once."""
        seed = self.seed_of(prompt)
        assert answer.token_ids == [token_at(prompt, seed, position) for position in range(num_tokens)]
        assert (answer.num_finished, answer.reason) == (1, output_pb2.FINISH_REASON_LENGTH)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene() -> AsyncIterator[Scene]:
    async with AsyncExitStack() as exits:
        engines = [WiredEngine() for _ in range(2)]
        for engine in engines:
            engine.wire = await exits.enter_async_context(
                proxied(await engine.start(), next_cut=engine.next_cut)
            )
            exits.push_async_callback(engine.stop)
        stack = await exits.enter_async_context(Stack())
        known = [f"--engine={engine.wire.address}" for engine in engines]
        # These engines have no files of a model.
        flags = ("--port=0", f"--tokenizer={embedded_model()}", "--text-workers=1")
        frontend = await stack.start("frontend", *flags, *known, "--routing-policy=round-robin")
        await stack.ready("frontend", frontend)
        scene = Scene(engines, stack.inference(frontend))
        await scene.until(lambda: all(engine.sessions for engine in engines))
        yield scene


async def test_our_frontend_streams_what_another_engine_generates(scene: Scene) -> None:
    prompt = prompts_of(1, 1)[0]
    answer = await collect(scene.stub, request_of(prompt, NUM_TOKENS))
    scene.check(answer, prompt, NUM_TOKENS)
    tokenizer = Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))
    assert answer.text == tokenizer.decode(answer.token_ids)


async def test_a_client_that_cancels_frees_another_engine_of_its_request(scene: Scene) -> None:
    call = scene.stub.Generate(request_of(prompts_of(2, 1)[0], 1900))
    await call.read()
    assert sum(engine.num_running for engine in scene.engines) == 1
    call.cancel()
    await scene.until(lambda: not any(engine.num_running for engine in scene.engines))


async def test_our_frontend_resumes_at_another_engine_wherever_the_stream_is_cut(scene: Scene) -> None:
    rng, prompts = random.Random(3), prompts_of(3, NUM_STREAMS)
    sessions = [session for engine in scene.engines for session in engine.sessions]
    calls = [asyncio.create_task(collect(scene.stub, request_of(one, NUM_TOKENS))) for one in prompts]
    await scene.until(lambda: all(engine.num_running for engine in scene.engines))
    for engine in scene.engines:
        engine.cuts = [rng.randrange(400, 3000) for _ in range(NUM_CUTS)]
        # The connection in use is older than these.
        engine.wire.cut()
    for answer, prompt in zip(await asyncio.gather(*calls), prompts, strict=True):
        scene.check(answer, prompt, NUM_TOKENS)
    assert [engine.cuts for engine in scene.engines] == [[], []]
    assert [session for engine in scene.engines for session in engine.sessions] == sessions


async def test_our_frontend_follows_the_drain_of_another_engine(scene: Scene) -> None:
    prompts = prompts_of(4, 2)
    calls = [asyncio.create_task(collect(scene.stub, request_of(one, NUM_TOKENS))) for one in prompts]
    await scene.until(lambda: all(engine.num_running for engine in scene.engines))
    leaving, staying = scene.engines
    num_accepted = len(leaving.accepted)
    leaving.step_s = SLOW_STEP_S
    await leaving.drain()
    later = prompts_of(5, 4)
    for prompt in later:
        scene.check(await collect(scene.stub, request_of(prompt, 5)), prompt, 5)
    assert leaving.num_running == 1
    leaving.step_s = ScriptedEngine.step_s
    for answer, prompt in zip(await asyncio.gather(*calls), prompts, strict=True):
        scene.check(answer, prompt, NUM_TOKENS)
    assert len(leaving.accepted) == num_accepted
    assert [entry.prompt_token_ids for entry in staying.accepted[-4:]] == [pack(one) for one in later]
