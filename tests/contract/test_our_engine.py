"""Our engine, a process with the embedded model, with frontends that are not ours."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import grpc.aio
import pytest
import pytest_asyncio

from launcher.services import embedded_model
from tests.contract import scripted_frontend
from tests.contract.scripted_engine import EOS_TOKEN_ID, ScriptedEngine
from tests.contract.scripted_frontend import ScriptedFrontend
from tests.engine_svc.session.service_rig import StreamClient, make_entry
from tests.system.generation import Answer, collect, request_of
from tests.system.stack import WAIT_LIMIT_S, EngineView, Stack, address_of
from tests.system.wire_proxy import proxied
from triptych.api.v1 import inference_pb2_grpc
from triptych.common.v1 import output_pb2
from triptych.engine.v1 import engine_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_STREAMS = 8
NUM_TOKENS = 200
NUM_CUTS = 6

# The public API of a frontend for engines at these addresses.
StartFrontend = Callable[
    [Sequence[str]], AbstractAsyncContextManager[inference_pb2_grpc.InferenceServiceStub]
]


class OurEngine:
    """A running engine, and what it generates for its own test client."""

    def __init__(self, address: str, channel: grpc.aio.Channel, view: EngineView) -> None:
        self.address = address
        self.view = view
        self._stub = engine_pb2_grpc.EngineCoreServiceStub(channel)

    async def greedy(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        client = StreamClient(self._stub, "reference")
        await client.open()
        options = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
        await client.add(*(make_entry(number, prompt=one, **options) for number, one in enumerate(prompts)))
        await client.until(lambda: len(client.finished) == len(prompts), patience_s=WAIT_LIMIT_S)
        client.call.cancel()
        return [client.tokens[number] for number in range(len(prompts))]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[OurEngine]:
    async with Stack() as stack:
        child = await stack.start("engine", str(embedded_model()), "--port=0")
        await stack.ready("engine", child)
        yield OurEngine(address_of(child), stack.channel(child), stack.engine(child))


@pytest.fixture(autouse=True)
def any_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast the machine is does not matter: no limit of time ends a session or a request."""
    for name in ("_SILENCE_S", "_RESUME_LIMIT_S", "_RESUME_ATTEMPT_S", "_RECONNECT_LIMIT_S"):
        monkeypatch.setattr(scripted_frontend, name, WAIT_LIMIT_S)


@pytest.fixture
def second_frontend() -> StartFrontend:
    return python_frontend


@asynccontextmanager
async def python_frontend(engines: Sequence[str]) -> AsyncIterator[inference_pb2_grpc.InferenceServiceStub]:
    frontend = ScriptedFrontend(engines)
    try:
        async with grpc.aio.insecure_channel(await frontend.start()) as channel:
            yield inference_pb2_grpc.InferenceServiceStub(channel)
    finally:
        await frontend.stop()


async def test_another_frontend_streams_what_our_engine_generates(
    engine: OurEngine, second_frontend: StartFrontend
) -> None:
    (prompt,) = _prompts(1, 1)
    async with second_frontend([engine.address]) as stub:
        answer = await collect(stub, request_of(prompt, NUM_TOKENS))
    _check([answer], await engine.greedy([prompt]))
    assert answer.text == "".join(f"w{token_id} " for token_id in answer.token_ids)


async def test_a_client_of_another_frontend_that_cancels_frees_our_engine_of_its_request(
    engine: OurEngine, second_frontend: StartFrontend
) -> None:
    num_before = (await engine.view.stats()).num_generated_tokens
    async with second_frontend([engine.address]) as stub:
        call = stub.Generate(request_of(_prompts(2, 1)[0], 1900))
        while not (await call.read()).HasField("delta"):
            pass
        call.cancel()
        stats = await engine.view.until_idle()
    assert stats.num_used_blocks == 0
    assert stats.num_generated_tokens < num_before + 1900


async def test_another_frontend_resumes_at_our_engine_wherever_the_stream_is_cut(
    engine: OurEngine, second_frontend: StartFrontend
) -> None:
    rng, prompts = random.Random(3), _prompts(3, NUM_STREAMS)
    expected = await engine.greedy(prompts)
    num_before = (await engine.view.stats()).num_generated_tokens
    cuts = [rng.randrange(400, 3000) for _ in range(NUM_CUTS)]
    async with (
        proxied(engine.address, next_cut=lambda: cuts.pop() if cuts else None) as proxy,
        second_frontend([proxy.address]) as stub,
    ):
        _check(
            await asyncio.gather(*(collect(stub, request_of(one, NUM_TOKENS)) for one in prompts)), expected
        )
        stats = await engine.view.stats()
    assert cuts == []
    assert stats.num_generated_tokens == num_before + NUM_STREAMS * NUM_TOKENS


async def test_another_frontend_follows_the_drain_of_our_engine(second_frontend: StartFrontend) -> None:
    other = ScriptedEngine()
    async with Stack() as stack:
        leaving = await stack.start("engine", str(embedded_model()), "--port=0", "--drain-deadline-s=60")
        await stack.ready("engine", leaving)
        view = stack.engine(leaving)
        try:
            async with second_frontend([address_of(leaving), await other.start()]) as stub:
                async with asyncio.timeout(WAIT_LIMIT_S):
                    # Until it uses both.
                    while (
                        not any(session.ended for session in other.sessions)
                        or not (await view.stats()).num_finished
                    ):
                        await collect(stub, request_of(_prompts(6, 1)[0], 1))
                # Each gets every second request.
                calls = [asyncio.create_task(collect(stub, request_of(one, 600))) for one in _prompts(4, 2)]
                await view.until(lambda stats: stats.num_running == 1)
                leaving.terminate()
                for prompt in _prompts(5, 4):
                    assert len((await collect(stub, request_of(prompt, 5))).token_ids) == 5
                for answer in await asyncio.gather(*calls):
                    assert (len(answer.token_ids), answer.reason) == (600, output_pb2.FINISH_REASON_LENGTH)
                await asyncio.wait_for(leaving.wait(), WAIT_LIMIT_S)
        finally:
            await other.stop()
        assert leaving.exit_code == 0


def _prompts(seed: int, num_prompts: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, EOS_TOKEN_ID) for _ in range(8)] for _ in range(num_prompts)]


def _check(answers: Sequence[Answer], expected: Sequence[list[int]]) -> None:
    """Every token came once, in order, and the end once."""
    assert [answer.token_ids for answer in answers] == list(expected)
    assert {(answer.num_finished, answer.reason) for answer in answers} == {
        (1, output_pb2.FINISH_REASON_LENGTH)
    }
