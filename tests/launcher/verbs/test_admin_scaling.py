"""The verbs of `triptych admin` that change how many engines there are."""

from __future__ import annotations

import asyncio

import pytest

from coordinator_svc.membership.registry import MemberState
from coordinator_svc.scaling.group import GroupEngine
from tests.coordinator_svc.scaling.scaling_fakes import asking, dense, scaling_service
from tests.launcher.fakes import triptych
from triptych.coordinator.v1 import scaling_pb2


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
                ["drain-engine", "nobody"],
                ["evict-engine", "nobody"],
            )
        ]
    assert [outcome.exit_code for outcome in outcomes] == [1, 1, 1, 1]
    assert outcomes[0].err.startswith("INVALID_ARGUMENT: dp_group is '', must be one of: 'a', 'b'\n")
    assert outcomes[2].err == "NOT_FOUND: engine 'nobody' is no member\n"


async def test_single_engines_are_drained_and_evicted() -> None:
    async with scaling_service(dense("", 0, 1)) as served:
        drained = await triptych("admin", served.address, "drain-engine", "e0", "--deadline-s", "2")
        soon = await triptych("admin", served.address, "drain-engine", "e0", "--deadline-s", "0.0001")
        evicted = await triptych("admin", served.address, "evict-engine", "e1", "--reason", "it hangs")
    assert drained.out == "engine e0 drains, 7 requests are in flight\n"
    assert evicted.out == "engine e1 is gone, the topology has version 42\n"
    assert soon.exit_code == 0
    assert served.engines.told == [("e0", 2.0), ("e0", 0.001)]
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
async def test_what_cannot_be_meant_is_refused_before_anybody_is_asked(arguments: list[str]) -> None:
    outcome = await triptych("admin", "127.0.0.1:1", *arguments)
    assert outcome.exit_code == 2


async def test_nobody_waits_for_an_answer_without_an_end() -> None:
    outcome = await triptych("admin", "--timeout-s", "inf", "127.0.0.1:1", "operations")
    assert outcome.exit_code == 2
    assert "--timeout-s" in outcome.err
