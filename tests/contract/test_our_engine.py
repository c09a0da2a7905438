"""Our engine, a process with the embedded model, with frontends that are not ours."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import grpc.aio
import pytest
import pytest_asyncio

from tests.contract import scripted_frontend
from tests.contract.conftest import StartFrontend
from tests.contract.our_engine import (
    SCHEMA,
    OurEngine,
    check_language,
    prompts_of,
    start_engine,
    until_both_used,
)
from tests.contract.scripted_engine import ScriptedEngine
from tests.contract.scripted_frontend import ScriptedFrontend
from tests.system.generation import Answer, collect, request_of
from tests.system.otlp import OtlpReceiver, collecting
from tests.system.stack import WAIT_LIMIT_S, Stack
from tests.system.wire_proxy import proxied
from triptych.api.v1 import inference_pb2_grpc
from triptych.common.v1 import output_pb2
from triptych.engine.v1 import add_pb2
from triptych_kit.telemetry import conventions as names

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_STREAMS = 8
NUM_TOKENS = 200
NUM_CUTS = 6


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def collector() -> AsyncIterator[tuple[OtlpReceiver, dict[str, str]]]:
    async with collecting() as collected:
        yield collected


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(collector: tuple[OtlpReceiver, dict[str, str]]) -> AsyncIterator[OurEngine]:
    async with Stack(collector[1]) as stack:
        yield await start_engine(stack)


@pytest.fixture(autouse=True)
def any_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast the machine is does not matter: no limit of time ends a session or a request."""
    for name in ("_SILENCE_S", "_RESUME_ATTEMPT_S", "_RECONNECT_LIMIT_S"):
        monkeypatch.setattr(scripted_frontend, name, WAIT_LIMIT_S)
    monkeypatch.setattr(scripted_frontend.EngineLink, "resume_limit_s", WAIT_LIMIT_S)


@pytest.fixture(params=["python", pytest.param("javascript", marks=pytest.mark.network)])
def second_frontend(request: pytest.FixtureRequest) -> StartFrontend:
    """Starts a frontend that is not ours."""
    return python_frontend if request.param == "python" else request.getfixturevalue("javascript_frontend")


@asynccontextmanager
async def python_frontend(engines: Sequence[str]) -> AsyncIterator[str]:
    frontend = ScriptedFrontend(engines)
    try:
        yield await frontend.start()
    finally:
        await frontend.stop()


@asynccontextmanager
async def client_of(
    frontend: AbstractAsyncContextManager[str],
) -> AsyncIterator[inference_pb2_grpc.InferenceServiceStub]:
    async with frontend as address, grpc.aio.insecure_channel(address) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


async def test_another_frontend_streams_what_our_engine_generates(
    engine: OurEngine, second_frontend: StartFrontend
) -> None:
    (prompt,) = prompts_of(1, 1)
    async with client_of(second_frontend([engine.address])) as stub:
        answer = await collect(stub, request_of(prompt, NUM_TOKENS))
    _check([answer], await engine.greedy([prompt], NUM_TOKENS))
    assert answer.text == "".join(f"w{token_id} " for token_id in answer.token_ids)


async def test_an_engine_alone_makes_a_span_of_each_sampled_request(
    engine: OurEngine, collector: tuple[OtlpReceiver, dict[str, str]]
) -> None:
    trace_id, parent_id = "5b8aa5a2d2c872e8321cf37308d69df1", "051581bf3cb55c13"
    for is_sampled in (False, True):
        parent = add_pb2.TraceContext(traceparent=f"00-{trace_id}-{parent_id}-{is_sampled:02x}")
        await engine.greedy(prompts_of(3, 1), 4 + is_sampled, trace_context=parent)
    (span,) = await collector[0].trace(trace_id, bool)
    assert (span.name, span.kind, span.service, span.parent_span_id) == (
        "llm_request", "server", "engine", parent_id
    )  # fmt: skip
    assert span.attributes[names.USAGE_OUTPUT_TOKENS] == 5


async def test_another_frontend_has_every_keyword_of_a_schema(
    engine: OurEngine, second_frontend: StartFrontend
) -> None:
    requests = [request_of(prompts_of(seed, 1)[0], 200, ignore_eos=False) for seed in range(4)]
    for request in requests:
        request.sampling.structured_output.json_schema = json.dumps(SCHEMA)
        request.sampling.structured_output.disable_any_whitespace = True
    refused = request_of(prompts_of(4, 1)[0], 5)
    refused.sampling.structured_output.json_schema = '{"minProperties": 3}'
    async with client_of(second_frontend([engine.address])) as stub:
        answers = [await collect(stub, request) for request in requests]
        with pytest.raises(grpc.aio.AioRpcError, match="no backend enforces minProperties at #") as caught:
            await collect(stub, refused)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    check_language([answer.token_ids for answer in answers if answer.reason == output_pb2.FINISH_REASON_STOP])


async def test_a_client_of_another_frontend_that_cancels_frees_our_engine_of_its_request(
    engine: OurEngine, second_frontend: StartFrontend
) -> None:
    num_before = (await engine.view.stats()).num_generated_tokens
    async with client_of(second_frontend([engine.address])) as stub:
        call = stub.Generate(request_of(prompts_of(2, 1)[0], 1900))
        while not (await call.read()).HasField("delta"):
            pass
        call.cancel()
        stats = await engine.view.until_idle()
    assert stats.num_used_blocks == 0
    assert stats.num_generated_tokens < num_before + 1900


async def test_another_frontend_resumes_at_our_engine_wherever_the_stream_is_cut(
    engine: OurEngine, second_frontend: StartFrontend
) -> None:
    rng, prompts = random.Random(3), prompts_of(3, NUM_STREAMS)
    expected = await engine.greedy(prompts, NUM_TOKENS)
    num_before = (await engine.view.stats()).num_generated_tokens
    cuts = [rng.randrange(400, 3000) for _ in range(NUM_CUTS)]
    async with (
        proxied(engine.address, next_cut=lambda: cuts.pop() if cuts else None) as proxy,
        client_of(second_frontend([proxy.address])) as stub,
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
        leaving = await start_engine(stack, "--drain-deadline-s=60")
        try:
            async with client_of(second_frontend([leaving.address, await other.start()])) as stub:
                await until_both_used(stub, leaving, other)
                # Each gets every second request.
                calls = [asyncio.create_task(collect(stub, request_of(one, 600))) for one in prompts_of(4, 2)]
                await leaving.view.until(lambda stats: stats.num_running == 1)
                leaving.child.terminate()
                for prompt in prompts_of(5, 4):
                    assert len((await collect(stub, request_of(prompt, 5))).token_ids) == 5
                for answer in await asyncio.gather(*calls):
                    assert (len(answer.token_ids), answer.reason) == (600, output_pb2.FINISH_REASON_LENGTH)
                await asyncio.wait_for(leaving.child.wait(), WAIT_LIMIT_S)
        finally:
            await other.stop()
        assert leaving.child.exit_code == 0


def _check(answers: Sequence[Answer], expected: Sequence[list[int]]) -> None:
    """Every token came once, in order, and the end once."""
    assert [answer.token_ids for answer in answers] == list(expected)
    assert {(answer.num_finished, answer.reason) for answer in answers} == {
        (1, output_pb2.FINISH_REASON_LENGTH)
    }
