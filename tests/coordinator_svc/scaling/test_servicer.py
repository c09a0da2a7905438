"""The scaling service over real gRPC, with members that the test moves."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from coordinator_svc.membership.publisher import ChangeSignal
from coordinator_svc.membership.registry import MemberState
from coordinator_svc.scaling.group import Formed, GroupEngine
from coordinator_svc.scaling.scaling import Scaling
from coordinator_svc.scaling.servicer import LEAVE_DEADLINE_S, ScalingServicer
from service_kit.clock import FakeClock
from service_kit.errors import ServiceError, from_rpc_error
from tests.coordinator_svc.scaling.scaling_fakes import FakeEngines, asking, dense, scaling_service
from triptych.coordinator.v1 import scaling_pb2

_S = 60.0


async def refused(call: Any) -> ServiceError:
    """What a call was refused with."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return from_rpc_error(failed.value)


async def ended(stub: Any, operation_id: str) -> list[scaling_pb2.Operation]:
    """All that a watch of an operation shows until its end."""
    watch = stub.WatchOperation(scaling_pb2.WatchOperationRequest(operation_id=operation_id), timeout=_S)
    return [message.operation async for message in watch]


async def test_a_growth_is_watched_from_its_beginning_to_its_end() -> None:
    async with scaling_service(dense("", 0, 1)) as served, asking(served) as stub:
        begun = (await stub.Scale(scaling_pb2.ScaleRequest(new_size=3), timeout=_S)).operation
        assert (begun.state, begun.old_size, begun.num_engines_ready) == (1, 2, 2)
        watching = asyncio.ensure_future(ended(stub, begun.operation_id))
        served.engines.join("", GroupEngine("e2", 1, 2, MemberState.JOINING))
        served.engines.move("e2", MemberState.READY)
        shown = await watching
        assert shown[-1].state == scaling_pb2.OPERATION_STATE_DONE
        got = await stub.GetOperation(
            scaling_pb2.GetOperationRequest(operation_id=begun.operation_id), timeout=_S
        )
        assert got.operation == shown[-1]
        listed = await stub.ListOperations(scaling_pb2.ListOperationsRequest(), timeout=_S)
        assert list(listed.operations) == [got.operation]


async def test_a_shrink_tells_the_highest_ranks_to_drain_and_ends_when_they_are_gone() -> None:
    async with scaling_service(dense("", 0, 1, 2)) as served, asking(served) as stub:
        begun = (await stub.Scale(scaling_pb2.ScaleRequest(new_size=1), timeout=_S)).operation
        watching = asyncio.ensure_future(ended(stub, begun.operation_id))
        for engine_id in ("e1", "e2"):
            served.engines.move(engine_id, MemberState.GONE)
        assert (await watching)[-1].state == scaling_pb2.OPERATION_STATE_DONE
        assert sorted(served.engines.told) == [("e1", LEAVE_DEADLINE_S), ("e2", LEAVE_DEADLINE_S)]


async def test_an_engine_that_refuses_to_drain_fails_the_operation_with_its_reason() -> None:
    async with scaling_service(dense("", 0, 1)) as served, asking(served) as stub:
        served.engines.refusals["e1"] = "what is a drain?"
        begun = (await stub.Scale(scaling_pb2.ScaleRequest(new_size=1), timeout=_S)).operation
        [*_, last] = await ended(stub, begun.operation_id)
        assert last.state == scaling_pb2.OPERATION_STATE_FAILED
        assert last.error.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
        assert last.error.message == "engine e1 refuses to drain: what is a drain?"


async def test_a_second_operation_is_aborted_with_the_name_of_the_first() -> None:
    async with scaling_service(dense("", 0)) as served, asking(served) as stub:
        first = (await stub.Scale(scaling_pb2.ScaleRequest(new_size=2), timeout=_S)).operation
        error = await refused(stub.Scale(scaling_pb2.ScaleRequest(new_size=3), timeout=_S))
        assert error.code is grpc.StatusCode.ABORTED
        assert error.metadata["operation_id"] == first.operation_id


async def test_an_operation_that_is_cancelled_says_so_and_the_old_size_is_wanted() -> None:
    async with scaling_service(dense("", 0)) as served, asking(served) as stub:
        begun = (await stub.Scale(scaling_pb2.ScaleRequest(new_size=2), timeout=_S)).operation
        request = scaling_pb2.CancelOperationRequest(operation_id=begun.operation_id)
        cancelled = (await stub.CancelOperation(request, timeout=_S)).operation
        assert cancelled.state == scaling_pb2.OPERATION_STATE_CANCELLED
        assert cancelled.error.code == grpc.StatusCode.CANCELLED.value[0]


async def test_whoever_starts_engines_is_told_every_change_of_the_sizes() -> None:
    async with scaling_service(dense("", 0, 1)) as served, asking(served) as stub:
        watch = aiter(stub.WatchGroups(scaling_pb2.WatchGroupsRequest(), timeout=_S))
        first = await anext(watch)
        assert first.coordinator_epoch == 9
        assert list(first.groups) == [scaling_pb2.GroupState(size=2)]
        begun = (await stub.Scale(scaling_pb2.ScaleRequest(new_size=3), timeout=_S)).operation
        wanted = scaling_pb2.GroupState(size=2, wanted_size=3, operation_id=begun.operation_id)
        assert list((await anext(watch)).groups) == [wanted]
        served.engines.join("", GroupEngine("e2", 1, 2, MemberState.READY))
        assert list((await anext(watch)).groups) == [scaling_pb2.GroupState(size=3, wanted_size=3)]


async def test_a_lockstep_group_is_told_its_members_until_it_has_changed_over() -> None:
    formed = Formed(generation=1, size=2, is_settled=True)
    async with scaling_service(dense("moe", 0, 1, formed=formed)) as served, asking(served) as stub:
        begun = (await stub.Scale(scaling_pb2.ScaleRequest(new_size=1), timeout=_S)).operation
        assert served.engines.membership == {"moe": (1, frozenset({"moee1"}))}
        watching = asyncio.ensure_future(ended(stub, begun.operation_id))
        changed = Formed(generation=2, size=1, is_settled=True)
        served.engines.members["moe"] = dense("moe", 0, formed=changed)
        served.engines.signal.notify()
        [*_, last] = await watching
        assert (last.state, last.generation) == (scaling_pb2.OPERATION_STATE_DONE, 2)


async def test_the_group_may_be_left_out_where_it_is_the_only_one_or_has_no_name() -> None:
    async with scaling_service(dense("a", 0), dense("b", 0)) as served, asking(served) as stub:
        error = await refused(stub.Scale(scaling_pb2.ScaleRequest(new_size=1), timeout=_S))
        assert (error.code, error.message) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "dp_group is '', must be one of: 'a', 'b'",
        )
        error = await refused(stub.Scale(scaling_pb2.ScaleRequest(dp_group="c", new_size=1), timeout=_S))
        assert (error.code, error.message) == (
            grpc.StatusCode.NOT_FOUND,
            "no engine of group 'c' is there; groups: 'a', 'b'",
        )
        del served.engines.members["b"]
        assert (await stub.Scale(scaling_pb2.ScaleRequest(new_size=1), timeout=_S)).operation.dp_group == "a"


async def test_a_coordinator_that_has_just_started_changes_nothing() -> None:
    async with scaling_service(dense("", 0), rebuilt_at=3.0) as served, asking(served) as stub:
        error = await refused(stub.Scale(scaling_pb2.ScaleRequest(new_size=1), timeout=_S))
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "REBUILDING")
        assert error.retry_after_ms == 3001
        served.clock.advance(3.0)
        await stub.Scale(scaling_pb2.ScaleRequest(new_size=1), timeout=_S)


async def test_one_engine_is_drained_and_told_again_where_it_gets_a_deadline() -> None:
    async with scaling_service(dense("", 0, 1)) as served, asking(served) as stub:
        for deadline_ms in (0, 0, 1500):
            request = scaling_pb2.DrainEngineRequest(engine_id="e1", deadline_ms=deadline_ms)
            assert (await stub.DrainEngine(request, timeout=_S)).num_in_flight == 7
        assert served.engines.told == [("e1", 0.0), ("e1", 1.5)]


async def test_why_one_engine_is_not_drained_is_said() -> None:
    async with scaling_service(dense("", 0, 1)) as served, asking(served) as stub:
        served.engines.refusals["e0"] = "no"
        served.engines.unreachable.add("e1")
        codes = {}
        for engine_id in ("e0", "e1", "e2"):
            request = scaling_pb2.DrainEngineRequest(engine_id=engine_id)
            codes[engine_id] = (await refused(stub.DrainEngine(request, timeout=_S))).code.name
        assert codes == {"e0": "FAILED_PRECONDITION", "e1": "UNAVAILABLE", "e2": "NOT_FOUND"}
        endless = scaling_pb2.DrainEngineRequest(engine_id="e0", deadline_ms=2**63)
        assert (await refused(stub.DrainEngine(endless, timeout=_S))).code.name == "INVALID_ARGUMENT"


async def test_an_engine_is_evicted_once() -> None:
    async with scaling_service(dense("", 0, 1)) as served, asking(served) as stub:
        request = scaling_pb2.EvictEngineRequest(engine_id="e1", reason="it hangs")
        assert (await stub.EvictEngine(request, timeout=_S)).version == 42
        assert served.engines.evicted == [("e1", "it hangs")]
        assert (await refused(stub.EvictEngine(request, timeout=_S))).code.name == "NOT_FOUND"


async def test_an_operation_that_is_not_known_is_named() -> None:
    async with scaling_service() as served, asking(served) as stub:
        request = scaling_pb2.GetOperationRequest(operation_id="scale-8")
        assert (await refused(stub.GetOperation(request, timeout=_S))).code.name == "NOT_FOUND"
        with pytest.raises(grpc.aio.AioRpcError, match="scale-8"):
            await ended(stub, "scale-8")


class CountingSignal(ChangeSignal):
    """Counts how often somebody who waited was woken."""

    num_woken = 0

    async def wait(self, timeout_s: float, *, loads_too: bool = True) -> None:
        """Wait as any does."""
        await super().wait(timeout_s, loads_too=loads_too)
        self.num_woken += 1


async def test_loads_are_no_reason_to_look_at_operations() -> None:
    engines, signal = FakeEngines(dense("", 0)), CountingSignal()
    servicer = ScalingServicer(Scaling(), engines, signal, FakeClock(), epoch=9, rebuilt_at=0.0)
    running = asyncio.ensure_future(servicer.run())
    for notify, num_woken in ((signal.notify_loads, 0), (signal.notify, 1)):
        for _ in range(5):
            await asyncio.sleep(0)
        notify()
        for _ in range(5):
            await asyncio.sleep(0)
        assert signal.num_woken == num_woken
    running.cancel()
    await asyncio.wait((running,))
