"""Scaling over the real membership: who is there, commands to engines and their answers, evictions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from coordinator_svc.membership.registry import EngineRegistry, MemberState
from coordinator_svc.membership.topology import Topology
from coordinator_svc.scaling.engines import MemberEngines
from service_kit.clock import FakeClock
from service_kit.errors import FailedPrecondition, Unavailable
from tests.coordinator_svc.fakes import registration
from triptych.common.v1 import error_pb2
from triptych.coordinator.v1 import command_pb2, coordinator_pb2, member_pb2


class Members:
    """A topology whose engines have sessions that a test plays."""

    def __init__(self) -> None:
        registry = EngineRegistry(FakeClock(), lease_s=30.0)
        self.topology = Topology(registry, coordinator_epoch=5)
        self.engines = MemberEngines(registry, self.topology)
        self.sent = asyncio.Event()

    def join(self, engine_id: str, **fields: object) -> None:
        """An engine registers under session 1."""
        message = registration(engine_id=engine_id, **fields)
        self.topology.register_engine(message, 1)
        self.topology.commands.open(engine_id, 1, self.sent.set)
        self.topology.join_group(message)

    async def command(self, engine_id: str) -> command_pb2.Command:
        """The next command that the engine is sent."""
        await asyncio.wait_for(self.sent.wait(), 10)
        (command,) = self.topology.commands.take_unsent(engine_id, 1)
        return command

    def answer(self, engine_id: str, command: command_pb2.Command, refusal: str = "") -> None:
        """The engine answers a command."""
        result = command_pb2.CommandResult(command_id=command.command_id)
        if refusal:
            result.nack.CopyFrom(error_pb2.ErrorStatus(code=9, message=refusal))
        else:
            result.ack.SetInParent()
        self.topology.take_result(engine_id, result)


@asynccontextmanager
async def draining(
    members: Members, engine_id: str, deadline_s: float = 2.0
) -> AsyncIterator[asyncio.Future[str]]:
    """An engine that is being told to drain within so long."""
    task = asyncio.ensure_future(members.engines.drain(engine_id, deadline_s))
    try:
        yield task
    finally:
        task.cancel()


async def test_engines_are_grouped_by_the_name_of_their_group() -> None:
    members = Members()
    members.join("a", dp_group="one", dp_size=2, dp_rank=1)
    members.join("b", dp_group="one", dp_size=2)
    members.join("c")
    groups = members.engines.groups()
    assert {name: [engine.engine_id for engine in group.engines] for name, group in groups.items()} == {
        "one": ["a", "b"],
        "": ["c"],
    }
    assert [engine.dp_rank for engine in groups["one"].engines] == [1, 0]
    assert groups["one"].engines[0].state is MemberState.JOINING
    assert groups["one"].formed is None


async def test_a_group_has_the_least_cache_of_its_engines_that_serve() -> None:
    members = Members()
    for engine_id, num_kv_blocks in (("a", 700), ("b", 640), ("c", 9)):
        capacity = member_pb2.EngineCapacity(
            num_kv_blocks=num_kv_blocks, block_size=16, max_num_seqs=8, max_model_len=64
        )
        members.join(engine_id, capacity=capacity)
    members.join("d")
    assert members.engines.groups()[""].num_kv_blocks == 0
    ready = coordinator_pb2.EngineReport(state=member_pb2.MEMBER_STATE_READY)
    for engine_id in ("a", "b", "d"):
        members.topology.take_report(engine_id, 1, ready)
    assert members.engines.groups()[""].num_kv_blocks == 640


async def test_a_lockstep_group_says_how_far_its_ranks_are_and_takes_another_size() -> None:
    members = Members()
    members.join("a", dp_group="moe", dp_size=2, lockstep=True)
    formed = members.engines.groups()["moe"].formed
    assert formed is not None
    assert (formed.generation, formed.size, formed.is_settled) == (0, 0, False)
    members.engines.want_members("moe", 1, frozenset())
    assert members.topology.groups.formations()["moe"].target_size == 1


async def test_an_engine_is_told_to_drain_with_its_deadline_and_answers() -> None:
    members = Members()
    members.join("a")
    async with draining(members, "a") as drained:
        command = await members.command("a")
        assert command.drain.deadline_ms == 2000
        members.answer("a", command)
        assert await drained == ""


async def test_the_reason_of_a_refusal_is_handed_on() -> None:
    members = Members()
    members.join("a")
    async with draining(members, "a") as drained:
        members.answer("a", await members.command("a"), refusal="not now")
        assert await drained == "not now"


async def test_two_who_have_one_engine_drained_both_get_its_answer() -> None:
    members = Members()
    members.join("a")
    async with draining(members, "a") as first:
        await members.command("a")
        members.sent.clear()
        async with draining(members, "a", 5.0) as second:
            command = await members.command("a")
            assert command.drain.deadline_ms == 5000
            members.answer("a", command, refusal="not now")
            assert (await first, await second) == ("not now", "not now")


async def test_an_engine_without_a_session_is_not_waited_for() -> None:
    members = Members()
    with pytest.raises(Unavailable, match="engine a has no session"):
        await members.engines.drain("a", 0.0)
    members.join("a")
    members.topology.commands.close("a", 1)
    with pytest.raises(Unavailable, match="engine a has no session"):
        await members.engines.drain("a", 0.0)
    # Nothing is left over that it would be told when it comes back.
    members.topology.commands.open("a", 2, members.sent.set)
    assert members.topology.commands.take_unsent("a", 2) == []


async def test_an_engine_that_stands_alone_is_no_rank_of_a_lockstep_group_without_a_name() -> None:
    members = Members()
    members.join("alone")
    members.join("a", dp_size=2, lockstep=True)
    members.join("b", dp_size=2, dp_rank=1, lockstep=True)
    (group,) = members.engines.groups().values()
    assert [engine.engine_id for engine in group.engines] == ["a", "b"]
    alone = members.engines.find("alone")
    assert alone is not None and alone.engine_id == "alone"
    assert members.engines.find("nobody") is None


async def test_requests_of_an_engine_are_those_that_run_and_those_that_wait() -> None:
    members = Members()
    members.join("a")
    report = coordinator_pb2.EngineReport(seq=1)
    report.load.engine_epoch, report.load.num_running, report.load.num_waiting = 11, 3, 2
    members.topology.take_report("a", 1, report)
    assert members.engines.num_in_flight("a") == 5
    assert members.engines.num_in_flight("nobody") == 0


async def test_an_evicted_process_is_gone_and_does_not_come_back_but_its_successor_may() -> None:
    members = Members()
    members.join("a", engine_epoch=11)
    version = members.topology.version
    assert members.engines.evict("a", "it hangs") > version
    assert members.engines.groups() == {}
    with pytest.raises(FailedPrecondition, match="it hangs") as refused:
        members.join("a", engine_epoch=11)
    assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
    members.join("a", engine_epoch=12)
    assert list(members.engines.groups()) == [""]
