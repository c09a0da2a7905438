"""The verbs of `triptych admin`: what they ask, what they print, how they end."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from coordinator_svc.membership.registry import MemberState
from coordinator_svc.scaling.group_snapshot import GroupEngine
from tests.coordinator_svc.scaling.scaling_fakes import asking, dense, scaling_service
from tests.triptych_cli.conftest import RunHere
from tests.triptych_cli.fakes import triptych
from triptych.admin.v1 import admin_pb2
from triptych.coordinator.v1 import scaling_pb2
from triptych.engine.v1 import utility_pb2
from triptych_kit.admin import AdminServicer
from triptych_kit.errors import FailedPrecondition
from triptych_kit.server import ADMIN, Lifecycle, Server, ServiceState


@dataclass
class Listener:
    """An admin listener that does what it is asked, but for resuming."""

    address: str = ""
    calls: list[utility_pb2.UtilityCall] = field(default_factory=list)
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    adapters: list[utility_pb2.LoadedAdapter] = field(default_factory=list)

    async def serve(self, request: admin_pb2.UtilityRequest) -> admin_pb2.UtilityResponse:
        self.calls.append(request.call)
        if request.call.HasField("resume"):
            raise FailedPrecondition("call to resume failed: the engine is asleep")
        result = utility_pb2.UtilityResult(done=utility_pb2.UtilityDone())
        if request.call.HasField("get_config"):
            option = utility_pb2.EngineOption(name="revision", origin="default")
            result = utility_pb2.UtilityResult(config=utility_pb2.EngineOptions(options=[option]))
        if request.call.HasField("list_adapters"):
            result = utility_pb2.UtilityResult(adapters=utility_pb2.LoadedAdapters(adapters=self.adapters))
        return admin_pb2.UtilityResponse(result=result)


@asynccontextmanager
async def serving_admin(servicer: AdminServicer) -> AsyncIterator[str]:
    server = Server(
        listen="127.0.0.1:0", registrations=[servicer.registration()], profile=ADMIN, service="engine"
    )
    try:
        yield await server.start()
    finally:
        await server.stop(0)


@asynccontextmanager
async def listening() -> AsyncIterator[Listener]:
    listener = Listener()
    facts: dict[str, str | int | float] = {
        "running": 3,
        "run_state": "paused",
        "version": 1_795_312_479_662,
        "share": 0.25,
    }
    servicer = AdminServicer(
        "engine", "engine-7", lambda: facts, lifecycle=listener.lifecycle, utility=listener.serve
    )
    async with serving_admin(servicer) as listener.address:
        yield listener


@pytest.mark.parametrize(
    ("arguments", "call"),
    [
        (["pause"], {"pause": {"mode": 3, "clear_cache": False}}),
        (["pause", "--mode", "abort", "--clear-cache"], {"pause": {"mode": 1, "clear_cache": True}}),
        (["sleep", "--level", "2", "--mode", "wait"], {"sleep": {"level": 2, "mode": 2}}),
        (["wake", "--tag", "weights", "--tag", "kv_cache"], {"wake": {"tags": ["weights", "kv_cache"]}}),
        (["reset-prefix-cache", "--reset-running"], {"reset_prefix_cache": {"reset_running": True}}),
        (["profile", "start", "--prefix", "mine"], {"profile": {"start": True, "prefix": "mine"}}),
        (["profile", "stop"], {"profile": {}}),
        (["load-adapter", "cook", "/a"], {"add_adapter": {"name": "cook", "path": "/a"}}),
        (
            ["load-adapter", "--replace", "c", "/a"],
            {"add_adapter": {"name": "c", "path": "/a", "replace": True}},
        ),
        (["unload-adapter", "cook"], {"remove_adapter": {"name": "cook"}}),
        (["pin-adapter", "cook"], {"pin_adapter": {"name": "cook"}}),
        (["unpin-adapter", "cook"], {"unpin_adapter": {"name": "cook"}}),
        (["pins"], {"list_pins": {}}),
        (["release", "pin-1"], {"release_pins": {"pin_id": "pin-1"}}),
        (["release", "--job", "a"], {"release_pins": {"job_id": "a"}}),
        (["release", "--all"], {"flush_pins": {}}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
async def test_a_verb_is_a_call(arguments: list[str], call: dict[str, object]) -> None:
    async with listening() as listener:
        outcome = await triptych("admin", "--timeout-s", "7", listener.address, *arguments)
    assert (outcome.exit_code, outcome.out) == (0, "done\n")
    assert listener.calls == [utility_pb2.UtilityCall(timeout_ms=7000, **call)]


async def test_adapters_are_listed_one_a_line() -> None:
    async with listening() as listener:
        none = await triptych("admin", listener.address, "adapters")
        listener.adapters = [
            utility_pb2.LoadedAdapter(name="chef", rank=64, digest="ab" * 32),
            utility_pb2.LoadedAdapter(name="cook", rank=8, digest="cd" * 32, in_slot=True, pinned=True),
        ]
        listed = await triptych("admin", listener.address, "adapters")
        as_json = await triptych("admin", listener.address, "adapters", "--json")
    assert none.out == "no adapters\n"
    assert listed.out == (
        "chef rank 64, digest abababababab\ncook rank 8, digest cdcdcdcdcdcd, used lately, pinned\n"
    )
    assert [one["name"] for one in json.loads(as_json.out)["adapters"]["adapters"]] == ["chef", "cook"]


@dataclass
class Recorded:
    incident_id: str = "0a1b"
    account: str = "team-a"
    model: str = "m"
    num_tokens: int = 64
    left_s: float = 580.5


class FakeQuarantine:
    def __init__(self) -> None:
        self.recorded = [Recorded(), Recorded("2c3d", account="")]

    def entries(self) -> list[Recorded]:
        return self.recorded

    def clear(self, incident_id: str) -> int:
        before = self.recorded
        self.recorded = [one for one in before if incident_id not in ("", one.incident_id)]
        return len(before) - len(self.recorded)


async def test_a_frontends_quarantine_is_listed_and_cleared() -> None:
    servicer = AdminServicer(
        "frontend", "frontend-0", lambda: {}, lifecycle=Lifecycle(), quarantine=FakeQuarantine()
    )
    async with serving_admin(servicer) as address:
        listed = await triptych("admin", address, "quarantine")
        unknown = await triptych("admin", address, "quarantine", "--clear", "none")
        first = await triptych("admin", address, "quarantine", "--clear", "0a1b")
        rest = await triptych("admin", address, "quarantine", "--clear-all", "--json")
    assert listed.out == ("0a1b m, team-a: 64 tokens, 580 s left\n2c3d m, no key: 64 tokens, 580 s left\n")
    assert (unknown.exit_code, unknown.err) == (1, "NOT_FOUND: there is no incident 'none'\n")
    assert (first.out, rest.out) == ("1 cleared\n", '{"num_cleared": 1}\n')


async def test_a_service_without_a_quarantine_is_named() -> None:
    async with listening() as listener:
        outcome = await triptych("admin", listener.address, "quarantine")
    assert outcome.exit_code == 1
    assert "is an engine" in outcome.err


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
    assert {"running 3", "run_state paused", "version 1795312479662", "share 0.25"} <= lines
    assert config.out == "revision unset (default)\n"


async def test_a_drain_shows_its_progress_to_its_end() -> None:
    async with listening() as listener:
        listener.lifecycle.move_to(ServiceState.SERVING)
        listener.lifecycle.move_to(ServiceState.DRAINING)
        draining = asyncio.ensure_future(triptych("admin", listener.address, "drain", "--keep-running"))
        await listener.lifecycle.until_ordered()
        listener.lifecycle.note_drained()
        outcome = await draining
    assert (outcome.exit_code, outcome.out) == (0, "draining, 0 requests in flight\n")
    assert (listener.lifecycle.drain_deadline_s, listener.lifecycle.keeps_running) == (None, True)


async def test_answers_as_json_are_one_object() -> None:
    async with listening() as listener:
        status = json.loads((await triptych("admin", listener.address, "status", "--json")).out)
        config = json.loads((await triptych("admin", "--json", listener.address, "config")).out)
    assert (status["service"], status["state"], status["values"]["running"]) == ("engine", "serving", 3)
    assert config["config"]["options"][0]["name"] == "revision"


async def test_a_call_to_a_service_of_another_kind_is_explained() -> None:
    async with listening() as listener:
        outcome = await triptych("admin", listener.address, "scale", "2")
    assert outcome.exit_code == 1
    address = listener.address
    assert outcome.err == (
        f"{address} is an engine: this call takes the admin address of a coordinator, or its name,"
        " such as coordinator-0\n"
    )


async def test_a_service_of_a_running_serve_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "triptych"
    folder.mkdir()
    async with listening() as listener:
        process = {"service": "engine", "index": 0, "admin_address": listener.address}
        down = {"engine-1": {"num_deaths": 4, "last_cause": "was killed by SIGKILL"}}
        record = {"processes": [process], "given_up": down}
        (folder / f"serve-{os.getpid()}.json").write_text(json.dumps(record))
        environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
        status = await triptych("admin", "engine-0", "status", environment=environment)
        given_up = await triptych("admin", "engine-1", "status", environment=environment)
        unknown = await triptych("admin", "engine-2", "status", environment=environment)
    assert (status.exit_code, status.out[:14]) == (0, "engine-7 (pid ")
    assert "given_up.engine-1 4 deaths, the last: was killed by SIGKILL\n" in status.out
    assert given_up.exit_code == 1
    assert given_up.err == "engine-1 stays down: 4 deaths, the last: was killed by SIGKILL\n"
    assert unknown.exit_code == 2
    assert "engine-2 is no address and no service of a running serve: engine-0" in unknown.err


async def test_a_name_that_two_running_serve_have_is_refused_with_the_address_of_each(tmp_path: Path) -> None:
    folder = tmp_path / "triptych"
    folder.mkdir()
    for pid, address in ((os.getpid(), "127.0.0.1:1"), (os.getppid(), "127.0.0.1:2")):
        process = {"service": "engine", "index": 0, "admin_address": address}
        (folder / f"serve-{pid}.json").write_text(json.dumps({"processes": [process]}))
    outcome = await triptych("admin", "engine-0", "status", environment={"XDG_RUNTIME_DIR": str(tmp_path)})
    assert outcome.exit_code == 2
    assert "2 running `triptych serve` have engine-0: give the admin address of one, 127.0" in outcome.err


def test_a_command_without_an_address_is_refused_with_an_example(run_here: RunHere) -> None:
    outcome = run_here("admin", "status")
    assert outcome.exit_code == 2
    assert "status without a command: write `triptych admin engine-0 status`" in outcome.err


@pytest.mark.parametrize(
    "arguments", [["pause", "--mode", "freeze"], ["profile", "run"], ["sleep", "--level", "3"]]
)
def test_what_cannot_be_meant_is_refused_before_anybody_is_asked(
    run_here: RunHere, arguments: list[str]
) -> None:
    outcome = run_here("admin", "127.0.0.1:1", *arguments)
    assert outcome.exit_code == 2


# The verbs of `triptych admin` that change how many engines there are.


async def test_scale_shows_every_step_and_exits_0_when_it_is_done() -> None:
    async with scaling_service(dense("", 0)) as served:
        running = asyncio.ensure_future(triptych("admin", served.address, "scale", "2"))
        async with asking(served) as stub:
            async for message in stub.WatchGroups(scaling_pb2.WatchGroupsRequest(), timeout=60):
                if message.groups[0].wanted_size == 2:
                    break
        served.engines.join("", GroupEngine("e1", 1, 1, MemberState.READY))
        outcome = await running
        listed = await triptych("admin", served.address, "operations")
    assert outcome.exit_code == 0
    lines = outcome.out.splitlines()
    assert (lines[0], lines[-1]) == ("scale-1: 1 -> 2 PREPARING, 1 of 2", "scale-1: 1 -> 2 DONE")
    assert listed.out == "0 s ago: scale-1: 1 -> 2 DONE\n"


async def test_scale_exits_1_where_it_fails_and_says_why() -> None:
    async with scaling_service(dense("", 0, 1)) as served:
        served.engines.refusals["e1"] = "no"
        outcome = await triptych("admin", served.address, "scale", "1", "--timeout", "9")
    assert outcome.exit_code == 1
    assert outcome.out.splitlines()[-1] == "scale-1: 2 -> 1 FAILED, engine e1 refuses to drain: no"


async def test_what_the_coordinator_refuses_is_said_and_exits_1() -> None:
    async with scaling_service(dense("a", 0), dense("b", 0)) as served:
        outcomes = [
            await triptych("admin", served.address, *arguments)
            for arguments in (
                ["scale", "1"],
                ["cancel-operation", "scale-7"],
                ["drain-engine", "unknown"],
                ["evict-engine", "unknown"],
            )
        ]
    assert [outcome.exit_code for outcome in outcomes] == [1, 1, 1, 1]
    assert outcomes[0].err.startswith("INVALID_ARGUMENT: --group is '', must be one of: 'a', 'b'\n")
    assert outcomes[2].err == "NOT_FOUND: engine 'unknown' is not a member\n"


async def test_single_engines_are_drained_and_evicted() -> None:
    async with scaling_service(dense("", 0, 1)) as served:
        drained = await triptych("admin", served.address, "drain-engine", "e0", "--deadline-s", "2")
        soon = await triptych("admin", served.address, "drain-engine", "e0", "--deadline-s", "0.0001")
        evicted = await triptych("admin", served.address, "evict-engine", "e1", "--reason", "it hangs")
    assert drained.out == "engine e0 drains, 7 requests are in flight\n"
    assert evicted.out == "engine e1 is gone, the topology has version 42\n"
    assert soon.exit_code == 0
    assert served.engines.drained == [("e0", 2.0), ("e0", 0.001)]
    assert served.engines.evicted == [("e1", "it hangs")]


@pytest.mark.parametrize(
    "arguments",
    [
        ["scale", "0"],
        ["scale", "1025"],
        ["scale"],
        ["scale", "2", "--timeout", "inf"],
        ["drain-engine", "e0", "--deadline-s", "-1"],
        ["drain-engine", "e0", "--deadline-s", "86401"],
    ],
    ids=" ".join,
)
def test_a_size_that_cannot_be_meant_is_refused_before_anybody_is_asked(
    run_here: RunHere, arguments: list[str]
) -> None:
    outcome = run_here("admin", "127.0.0.1:1", *arguments)
    assert outcome.exit_code == 2


def test_every_wait_for_an_answer_is_bounded(run_here: RunHere) -> None:
    outcome = run_here("admin", "--timeout-s", "inf", "127.0.0.1:1", "operations")
    assert outcome.exit_code == 2
    assert "--timeout-s" in outcome.err
