"""The verbs of `triptych admin`: what they ask, what they print, how they end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from service_kit.admin import AdminServicer
from service_kit.errors import FailedPrecondition
from service_kit.server import ADMIN, Server
from tests.launcher.fakes import triptych
from triptych.admin.v1 import admin_pb2
from triptych.engine.v1 import utility_pb2


@dataclass
class Listener:
    """An admin listener that does what it is asked, but for resuming."""

    address: str = ""
    calls: list[utility_pb2.UtilityCall] = field(default_factory=list)

    async def serve(self, request: admin_pb2.UtilityRequest) -> admin_pb2.UtilityResponse:
        self.calls.append(request.call)
        if request.call.HasField("resume"):
            raise FailedPrecondition("call to resume failed: the engine is asleep")
        result = utility_pb2.UtilityResult(done=utility_pb2.UtilityDone())
        if request.call.HasField("get_config"):
            option = utility_pb2.EngineOption(name="revision", origin="default")
            result = utility_pb2.UtilityResult(config=utility_pb2.EngineOptions(options=[option]))
        return admin_pb2.UtilityResponse(result=result)


@asynccontextmanager
async def listening() -> AsyncIterator[Listener]:
    """A listener for the length of a test."""
    listener = Listener()
    facts: dict[str, str | int | float] = {
        "running": 3,
        "standstill": "paused",
        "version": 1_795_312_479_662,
        "share": 0.25,
    }
    servicer = AdminServicer("engine", "engine-7", lambda: facts, listener.serve)
    server = Server(
        listen="127.0.0.1:0", registrations=[servicer.registration()], profile=ADMIN, service="engine"
    )
    listener.address = await server.start()
    try:
        yield listener
    finally:
        await server.stop(0)


@pytest.mark.parametrize(
    ("arguments", "call"),
    [
        (["pause"], {"pause": {"mode": 3}}),
        (["pause", "--mode", "abort", "--clear-cache"], {"pause": {"mode": 1, "clear_cache": True}}),
        (["sleep", "--level", "2", "--mode", "wait"], {"sleep": {"level": 2, "mode": 2}}),
        (["wake", "--tag", "weights", "--tag", "kv_cache"], {"wake": {"tags": ["weights", "kv_cache"]}}),
        (["reset-prefix-cache", "--reset-running"], {"reset_prefix_cache": {"reset_running": True}}),
        (["profile", "start", "--prefix", "mine"], {"profile": {"start": True, "prefix": "mine"}}),
        (["profile", "stop"], {"profile": {}}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
async def test_a_verb_is_a_call(arguments: list[str], call: dict[str, object]) -> None:
    async with listening() as listener:
        outcome = await triptych("admin", "--timeout-s", "7", listener.address, *arguments)
    assert (outcome.exit_code, outcome.out) == (0, "done\n")
    assert listener.calls == [utility_pb2.UtilityCall(timeout_ms=7000, **call)]


async def test_what_is_refused_is_said_and_exits_1() -> None:
    async with listening() as listener:
        outcome = await triptych("admin", listener.address, "resume")
    assert outcome.exit_code == 1
    assert outcome.err == "FAILED_PRECONDITION: call to resume failed: the engine is asleep\n"


async def test_status_and_options_are_lines() -> None:
    async with listening() as listener:
        status = await triptych("admin", listener.address, "status")
        config = await triptych("admin", listener.address, "config")
    assert status.out.startswith("engine-7 (pid ")
    lines = set(status.out.splitlines())
    assert {"running 3", "standstill paused", "version 1795312479662", "share 0.25"} <= lines
    assert config.out == "revision unset (default)\n"


@pytest.mark.parametrize(
    "arguments", [["pause", "--mode", "freeze"], ["profile", "run"], ["sleep", "--level", "3"]]
)
async def test_what_cannot_be_meant_is_refused_before_anybody_is_asked(arguments: list[str]) -> None:
    outcome = await triptych("admin", "127.0.0.1:1", *arguments)
    assert outcome.exit_code == 2
