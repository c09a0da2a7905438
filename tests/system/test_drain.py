"""A stop that was asked for: what runs is finished or handed on, and every service exits with 0."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator

import grpc
import pytest

from tests.engine_svc.session.service_rig import StreamClient, make_entry
from tests.system.generation import read_to_end, request_of
from tests.system.stack import WAIT_LIMIT_S, Stack, address_of
from triptych.engine.v1 import engine_pb2_grpc
from triptych_cli.serve.readiness import health_of
from triptych_cli.services import embedded_model
from triptych_kit.errors import from_rpc_error
from triptych_kit.process.child import Child

pytestmark = pytest.mark.chaos

MODEL = str(embedded_model())
# Far more tokens than are computed before a short deadline, or a second signal, has come.
MANY = 1900
NUM_REQUESTS = 16


@contextlib.asynccontextmanager
async def busy_engine(*flags: str) -> AsyncIterator[tuple[Child, StreamClient]]:
    """An engine, and a client whose requests run there."""
    async with Stack() as stack:
        engine = await stack.start("engine", MODEL, "--port=0", *flags)
        await stack.ready("engine", engine)
        client = StreamClient(engine_pb2_grpc.EngineCoreServiceStub(stack.channel(engine)), "f")
        await client.open()
        entries = [make_entry(handle, max_tokens=MANY, ignore_eos=True) for handle in range(NUM_REQUESTS)]
        await client.add(*entries)
        await client.until(lambda: len(client.tokens) == NUM_REQUESTS, patience_s=WAIT_LIMIT_S)
        yield engine, client


async def ending_of(child: Child) -> str:
    await asyncio.wait_for(child.wait(), WAIT_LIMIT_S)
    return child.ending.partition(") ")[2]


def check_handed_on(client: StreamClient) -> None:
    """The session ended in the engine's words, with requests left that another engine can take."""
    assert client.finished == {}
    assert client.kinds().index("draining") > 0
    assert client.error is not None
    error = from_rpc_error(client.error)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_DRAINED")


@pytest.mark.parametrize("deadline_s", [0.0, 0.3])
async def test_at_the_drain_timeout_sessions_are_asked_to_move_their_requests(deadline_s):
    async with busy_engine(f"--drain-deadline-s={deadline_s}") as (engine, client):
        engine.terminate()
        await client.until(lambda: client.is_over, patience_s=WAIT_LIMIT_S)
        check_handed_on(client)
        assert await ending_of(engine) == "exited with code 0"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_hands_on_at_once(number: signal.Signals) -> None:
    async with busy_engine("--drain-deadline-s=600") as (engine, client):
        engine.send_signal(number)
        await client.until(lambda: "draining" in client.kinds(), patience_s=WAIT_LIMIT_S)
        await client.add(make_entry(NUM_REQUESTS, max_tokens=1))
        await client.until(lambda: NUM_REQUESTS in client.rejected, patience_s=WAIT_LIMIT_S)
        assert "draining" in client.rejected[NUM_REQUESTS].status.message
        engine.send_signal(number)
        await client.until(lambda: client.is_over, patience_s=WAIT_LIMIT_S)
        check_handed_on(client)
        assert await ending_of(engine) == "exited with code 0"


async def test_an_engine_that_is_stopped_while_it_loads_exits_with_zero() -> None:
    async with Stack() as stack:
        engine = await stack.start("engine", MODEL, "--port=0")
        engine.terminate()
        assert await ending_of(engine) == "exited with code 0"


async def test_a_second_signal_ends_a_frontend_at_once() -> None:
    async with Stack() as stack:
        trio = await stack.start_all(MODEL, frontend_flags=("--drain-deadline-s=600",))
        call = stack.inference(trio.frontend).Generate(request_of("Once upon a time", MANY))
        await call.read()
        trio.frontend.terminate()
        async with asyncio.timeout(WAIT_LIMIT_S):
            # Two signals at once are one: the second is sent when the first has been noticed.
            while await health_of(address_of(trio.frontend), "", 10.0) == "SERVING":
                pass
        trio.frontend.terminate()
        assert await ending_of(trio.frontend) == "exited with code 0"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(read_to_end(call), WAIT_LIMIT_S)
        error = from_rpc_error(caught.value)
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


async def test_a_coordinator_with_members_exits_with_zero_without_affecting_them() -> None:
    async with Stack() as stack:
        trio = await stack.start_all(MODEL)
        responses = aiter(stack.inference(trio.frontend).Generate(request_of("Once upon a time", 200)))
        await anext(responses)
        trio.coordinator.terminate()
        assert await ending_of(trio.coordinator) == "exited with code 0"
        tokens = [token async for response in responses for token in response.delta.token_ids]
        assert len(tokens) == 200
        assert trio.engine.is_running and trio.frontend.is_running
