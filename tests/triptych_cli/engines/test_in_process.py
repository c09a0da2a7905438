from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from engine_svc.config import EngineConfig
from engine_svc.core.artifacts import read_artifacts
from engine_svc.loop.mailbox import Fail
from engine_svc.model.errors import CheckpointError
from frontend_svc.engines.connection.client import EngineClient, EngineState, FrontendIdentity
from frontend_svc.engines.connection.stream import StreamEnd, StreamLost
from tests.engine_svc.fakes import expected_tokens
from tests.engine_svc.session.service_rig import ServiceRig, make_entry, prompt_of
from tests.system.test_resume import NoFiles, Taker
from triptych.engine.v1 import add_pb2, engine_pb2, session_pb2
from triptych_cli.engines.in_process import InProcessEngine, InProcessStream, InProcessTransport
from triptych_cli.services import embedded_model
from triptych_kit.clock import MonotonicClock
from triptych_kit.errors import InvalidArgument

WAIT_S = 30.0
HELLO = session_pb2.Hello(
    frontend_id="f",
    session_id="s" * 16,
    frontend_epoch=1,
    schema_revision=1,
    min_peer_revision=1,
    features=["adopt", "resume"],
)


class Rig:
    """A frontend's client of an engine with a fake model, in one event loop."""

    def __init__(self, engine: ServiceRig) -> None:
        self.engine = engine
        self._changed = asyncio.Event()
        self.client = EngineClient(
            "in-process:1",
            FrontendIdentity("f", 1),
            NoFiles(),  # type: ignore[arg-type]
            MonotonicClock(),
            on_change=lambda client: self._changed.set(),
            connect=lambda address: InProcessTransport(engine.servicer, engine.engine),
        )

    def add(self, *entries: add_pb2.AddEntry) -> list[Taker]:
        takers = [Taker(self._changed.set) for _ in entries]
        self.client.requests.add(entries, takers)
        return takers

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def loaded(engine: ServiceRig) -> AsyncIterator[ServiceRig]:
    """The engine without a server."""
    await engine.load()
    try:
        yield engine
    finally:
        engine.executor.gate.set()
        assert await engine.thread.stop(WAIT_S)


@asynccontextmanager
async def connected() -> AsyncIterator[Rig]:
    async with loaded(ServiceRig()) as engine:
        rig = Rig(engine)
        rig.client.start()
        await rig.until(lambda: rig.client.state is EngineState.READY)
        try:
            yield rig
        finally:
            await rig.client.close()


async def opened(engine: ServiceRig) -> InProcessStream:
    hello = session_pb2.Hello()
    hello.CopyFrom(HELLO)
    stream = InProcessStream(engine.servicer)
    await stream.open(hello)
    return stream


async def ignore(message: engine_pb2.ConnectResponse) -> None:
    """Not of interest."""


async def test_a_thousand_requests_at_once_all_get_their_own_answer() -> None:
    async with connected() as rig:
        takers = rig.add(*(make_entry(number) for number in range(1000)))
        await rig.until(lambda: all(taker.is_over for taker in takers))
        answers = [expected_tokens(prompt_of(number), number, 5) for number in range(1000)]
        assert [taker.token_ids for taker in takers] == answers


async def test_a_refused_request_fails_with_its_error() -> None:
    async with connected() as rig:
        [taker] = rig.add(make_entry(1, prompt=[5] * 500))
        await rig.until(lambda: taker.is_over)
        assert isinstance(taker.errors[0], InvalidArgument)


async def test_the_end_of_the_loop_loses_the_requests_with_its_reason() -> None:
    async with connected() as rig:
        rig.engine.executor.gate.clear()
        [taker] = rig.add(make_entry(1))
        rig.engine.engine.inbox.put(Fail(ZeroDivisionError("in a step")))
        rig.engine.executor.gate.set()
        await rig.until(lambda: taker.is_over)
        assert "ZeroDivisionError" in str(taker.losses[0])


async def test_closing_the_client_ends_the_session() -> None:
    async with connected() as rig:
        assert rig.engine.servicer.num_sessions == 1
        await rig.client.close()
        assert rig.engine.servicer.num_sessions == rig.engine.servicer.num_parked_sessions == 0


async def test_a_session_is_not_resumable() -> None:
    async with loaded(ServiceRig()) as engine:
        stream = await opened(engine)
        stream.cancel()
        with pytest.raises(StreamLost) as lost:
            await stream.receive(ignore)
        assert lost.value.end is StreamEnd.BROKEN
        assert engine.servicer.num_parked_sessions == 0


async def test_a_goodbye_ends_the_stream_as_left() -> None:
    async with loaded(ServiceRig()) as engine:
        stream = await opened(engine)
        stream.close(engine_pb2.Goodbye(reason="done"))
        with pytest.raises(StreamLost) as lost:
            await stream.receive(ignore)
        assert lost.value.end is StreamEnd.LEFT


async def test_a_refused_hello_raises_its_reason() -> None:
    async with loaded(ServiceRig()) as engine:
        stream = InProcessStream(engine.servicer)
        with pytest.raises(StreamLost, match="frontend_id"):
            await stream.open(session_pb2.Hello(schema_revision=1))


async def test_a_frontend_that_is_behind_gets_merged_steps() -> None:
    async with loaded(ServiceRig()) as engine:
        stream = await opened(engine)
        steps: list[int] = []

        async def take(message: engine_pb2.ConnectResponse) -> None:
            if message.WhichOneof("message") == "step":
                if not steps:
                    await asyncio.to_thread(engine.executor.wait_for_launches, 100)
                steps.append(sum(message.step.num_tokens))
                if message.step.finished:
                    stream.close(engine_pb2.Goodbye())

        stream.send(engine_pb2.ConnectRequest(add=add_pb2.Add(entries=[make_entry(1, max_tokens=100)])))
        with pytest.raises(StreamLost):
            await asyncio.wait_for(stream.receive(take), WAIT_S)
        assert sum(steps) == 100
        assert len(steps) < 50


async def test_files_are_read_without_a_call(tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    async with loaded(ServiceRig(artifacts=read_artifacts(tmp_path))) as engine:
        transport = InProcessTransport(engine.servicer, engine.engine)
        responses = transport.stub.GetArtifacts(engine_pb2.GetArtifactsRequest(), timeout=WAIT_S)
        assert [response.chunk async for response in responses] == [b"{}"]


async def test_a_folder_without_a_model_is_a_readable_error(tmp_path) -> None:
    engine = InProcessEngine(EngineConfig(model=str(tmp_path), device="cpu"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        await engine.start()
    await engine.close()


async def test_an_engine_that_ends_by_itself_reports_its_death() -> None:
    config = EngineConfig(model=str(embedded_model()), num_threads=1, num_kv_blocks=64, device="cpu")
    engine = InProcessEngine(config)
    await engine.start()
    engine.served.inbox.put(Fail(ZeroDivisionError("in a step")))
    assert "ZeroDivisionError" in await asyncio.wait_for(engine.death, WAIT_S)
    # Full collections do not visit what lives as long as the engine.
    assert gc.get_freeze_count() > 0
    await engine.close()
    assert gc.get_freeze_count() == 0
