"""A frontend has one connection to an engine, whatever became of the ones before it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from tests.connections import until_connections, without_collections
from tests.frontend_svc.fakes import FakeEngine, serving
from triptych.engine.v1 import session_pb2, step_pb2


async def _restart(engine: FakeEngine) -> None:
    await engine.kill()
    await engine.start(engine.address)


async def _fall_silent(engine: FakeEngine) -> None:
    session = engine.sessions[0]
    engine.has_heartbeat = False
    await engine.wait(lambda: session not in engine.sessions)
    engine.has_heartbeat = True


async def _lose_a_message(engine: FakeEngine) -> None:
    engine.sessions[0].skip()


async def _say_nonsense(engine: FakeEngine) -> None:
    engine.sessions[0].send(step=step_pb2.Step(handles=b"xyz"))


async def _offer_other_files(engine: FakeEngine) -> None:
    artifact = session_pb2.Artifact(kind=session_pb2.ARTIFACT_KIND_TOKENIZER, sha256="0" * 64)
    engine.sessions[0].send(ready=session_pb2.Ready(artifacts=[artifact]))


async def _leave(engine: FakeEngine) -> None:
    engine.leave()


async def _die(engine: FakeEngine) -> None:
    engine.die()


@pytest.mark.parametrize(
    "end",
    [_restart, _fall_silent, _lose_a_message, _say_nonsense, _offer_other_files, _leave, _die],
    ids=lambda end: end.__name__,
)
async def test_a_lost_stream_leaves_no_connection_behind(end):
    engine = FakeEngine()
    with without_collections():
        await _lose_streams(engine, end)


async def _lose_streams(engine: FakeEngine, end: Callable[[FakeEngine], Awaitable[None]]) -> None:
    async with serving(engine) as (client, frontend):
        for _ in range(3):
            num_connects = engine.num_connects
            await end(engine)
            await engine.wait(lambda: engine.num_connects > num_connects)  # noqa: B023
            await client.wait_ready()
            await until_connections(engine.address, 1)
        for one in frontend.directory.clients():
            await one.close()
        await until_connections(engine.address, 0)
