"""Operations that change a group's size, step by step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from coordinator_svc.membership.publisher import ChangeSignal
from coordinator_svc.membership.registry import EngineRegistry, MemberState
from coordinator_svc.membership.topology import Topology
from coordinator_svc.scaling.engines import MemberEngines
from coordinator_svc.scaling.group_snapshot import Formed, Group, GroupEngine
from coordinator_svc.scaling.operation import Operation, OperationState
from coordinator_svc.scaling.scaling import DRAIN_RETRY_S, MAX_FAILURES, MAX_GROUPS, MAX_SIZE, Scaling
from coordinator_svc.scaling.servicer import ScalingServicer
from tests.coordinator_svc.fakes import registration
from tests.coordinator_svc.scaling.scaling_fakes import FakeEngines, asking, dense, scaling_service
from triptych.common.v1 import error_pb2
from triptych.coordinator.v1 import command_pb2, coordinator_pb2, member_pb2, scaling_pb2
from triptych_kit.clock import FakeClock
from triptych_kit.errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    InvalidTransition,
    NotFound,
    ResourceExhausted,
    ServiceError,
    Unavailable,
    from_rpc_error,
)
from triptych_kit.telemetry import conventions as names
from triptych_kit.telemetry.traces import recent_spans

READY, JOINING, DRAINING = MemberState.READY, MemberState.JOINING, MemberState.DRAINING
_ENDS = {OperationState.DONE, OperationState.FAILED, OperationState.CANCELLED}


def engine(rank: int, state: MemberState = READY, epoch: int = 1, name: str = "") -> GroupEngine:
    return GroupEngine(name or f"e{rank}", epoch, rank, state)


def group(*engines: GroupEngine | int, name: str = "") -> Group:
    """A group of these engines; a number is a READY engine of that rank."""
    return Group(name, tuple(engine(one) if isinstance(one, int) else one for one in engines))


def look(scaling: Scaling, present: Group, now: float = 1.0) -> list[str]:
    return scaling.look({present.name: present}, now)


def wanted(scaling: Scaling, name: str = "") -> int:
    return scaling.wanted()[name].size


def test_a_group_that_grows_is_done_when_so_many_engines_are_ready() -> None:
    scaling = Scaling()
    operation = scaling.begin(group(0, 1), 4, now=0.0)
    assert (operation.state, operation.old_size, operation.num_ready) == (OperationState.PREPARING, 2, 2)
    assert wanted(scaling) == 4
    look(scaling, group(0, 1, engine(2, JOINING), engine(3, JOINING)))
    assert scaling.find(operation.operation_id).num_ready == 2
    look(scaling, group(0, 1, 2, engine(3, JOINING)))
    assert scaling.find(operation.operation_id).num_ready == 3
    assert look(scaling, group(0, 1, 2, 3)) == []
    assert scaling.find(operation.operation_id).state is OperationState.DONE


def test_a_group_that_shrinks_has_its_highest_ranks_drain_and_is_done_when_they_are_gone() -> None:
    scaling = Scaling()
    operation = scaling.begin(group(2, 0, 3, 1), 2, now=0.0)
    assert (operation.state, operation.num_needed) == (OperationState.COMMITTING, 2)
    assert sorted(look(scaling, group(2, 0, 3, 1))) == ["e2", "e3"]
    assert look(scaling, group(0, 1, engine(2, DRAINING), engine(3, DRAINING))) == []
    assert scaling.find(operation.operation_id).num_ready == 0
    look(scaling, group(0, 1, engine(3, DRAINING)))
    assert scaling.find(operation.operation_id).num_ready == 1
    look(scaling, group(0, 1))
    assert scaling.find(operation.operation_id).state is OperationState.DONE
    assert wanted(scaling) == 2


def test_no_engine_is_asked_to_leave_before_the_ranks_that_stay_are_ready() -> None:
    scaling = Scaling()
    operation = scaling.begin(group(1, 2, 3), 2, now=0.0)
    assert look(scaling, group(1, 2, 3)) == []
    assert sorted(look(scaling, group(engine(0, epoch=2), 1, 2, 3))) == ["e2", "e3"]
    assert scaling.find(operation.operation_id).state is OperationState.COMMITTING


def test_a_size_that_is_so_already_is_done_at_once() -> None:
    scaling = Scaling()
    for _ in range(2):
        assert scaling.begin(group(0, 1), 2, now=0.0).state is OperationState.DONE
    assert look(scaling, group(0, 1)) == []


def test_engines_that_all_report_rank_0_have_indexes_in_order_of_registration() -> None:
    scaling = Scaling()
    engines = [engine(0, name=name) for name in ("a", "b", "c")]
    scaling.begin(group(*engines), 1, now=0.0)
    assert look(scaling, group(*engines)) == ["b", "c"]


def test_a_second_operation_of_a_group_is_refused_and_names_the_first() -> None:
    scaling = Scaling()
    first = scaling.begin(group(0), 2, now=0.0)
    with pytest.raises(Aborted, match=first.operation_id) as refused:
        scaling.begin(group(0), 3, now=0.0)
    assert (refused.value.reason, wanted(scaling)) == ("OPERATION_RUNS", 2)
    assert scaling.begin(group(0, name="other"), 2, now=0.0).group == "other"


@pytest.mark.parametrize(("size", "timeout_s"), [(0, 0.0), (MAX_SIZE + 1, 0.0), (2, -1.0), (2, 1e9)])
def test_what_cannot_be_meant_is_refused_by_field(size: int, timeout_s: float) -> None:
    scaling = Scaling()
    with pytest.raises(InvalidArgument) as refused:
        scaling.begin(group(0), size, 0.0, timeout_s)
    assert refused.value.violations[0][0] == ("timeout_ms" if size == 2 else "new_size")
    assert scaling.operations() == []


def test_a_growth_that_takes_too_long_is_rolled_back_and_its_new_engines_leave() -> None:
    scaling = Scaling()
    operation = scaling.begin(group(0, 1), 4, now=0.0, timeout_s=5.0)
    assert scaling.next_at() == 5.0
    present = group(0, 1, 2)
    assert look(scaling, present, now=4.9) == []
    assert look(scaling, present, now=5.0) == ["e2"]
    failed = scaling.find(operation.operation_id)
    assert (failed.state, wanted(scaling)) == (OperationState.FAILED, 2)
    assert isinstance(failed.error, DeadlineExceeded)
    assert "3 of 4 engines were ready for size 4" in str(failed.error)


def test_a_growth_that_is_cancelled_is_taken_back_and_can_be_begun_again() -> None:
    scaling = Scaling()
    operation = scaling.begin(group(0, 1), 4, now=0.0)
    present = group(0, 1, engine(2, JOINING))
    for _ in range(2):
        cancelled = scaling.cancel(operation.operation_id, present, now=1.0)
        assert cancelled.state is OperationState.CANCELLED
        assert isinstance(cancelled.error, Cancelled)
    assert look(scaling, present) == ["e2"]
    assert wanted(scaling) == 2
    assert scaling.begin(group(0, 1), 3, now=2.0).old_size == 2


def test_engines_that_were_there_before_stay_when_a_growth_is_taken_back() -> None:
    scaling = Scaling()
    scaling.begin(group(0, 1), 2, now=0.0)
    present = group(0, 1, 5)
    operation = scaling.begin(present, 7, now=0.0)
    scaling.cancel(operation.operation_id, present, now=1.0)
    assert look(scaling, present) == []


def test_a_shrink_can_be_cancelled_until_an_engine_was_sent_a_drain() -> None:
    scaling = Scaling()
    waits = scaling.begin(group(engine(0, JOINING), 1, 2), 2, now=0.0)
    assert scaling.cancel(waits.operation_id, group(1, 2), now=0.0).state is OperationState.CANCELLED
    drains = scaling.begin(group(0, 1, 2), 2, now=0.0)
    with pytest.raises(FailedPrecondition, match="COMMITTING"):
        scaling.cancel(drains.operation_id, group(0, 1, 2), now=0.0)


def test_a_shrink_that_takes_too_long_names_the_remaining_engines_and_its_size_holds() -> None:
    scaling = Scaling()
    operation = scaling.begin(group(0, 1, 2), 1, now=0.0, timeout_s=5.0)
    assert look(scaling, group(0, engine(2, DRAINING)), now=5.0) == []
    failed = scaling.find(operation.operation_id)
    assert (failed.state, wanted(scaling)) == (OperationState.FAILED, 1)
    assert str(failed.error).endswith("still there are e2")


def test_an_engine_that_does_not_report_draining_is_asked_again() -> None:
    scaling = Scaling()
    scaling.begin(group(0, 1), 1, now=0.0)
    assert look(scaling, group(0, 1), now=0.0) == ["e1"]
    assert look(scaling, group(0, 1), now=0.1) == []
    assert scaling.next_at() == DRAIN_RETRY_S
    assert look(scaling, group(0, 1), now=DRAIN_RETRY_S) == ["e1"]


def test_an_engine_that_has_accepted_the_drain_is_not_asked_again() -> None:
    scaling = Scaling()
    operation = scaling.begin(group(0, 1), 1, now=0.0)
    look(scaling, group(0, 1), now=0.0)
    scaling.acknowledge("e1")
    assert look(scaling, group(0, 1), now=DRAIN_RETRY_S) == []
    assert scaling.next_at() == operation.ends_by


def test_an_engine_that_will_not_drain_fails_its_operation() -> None:
    scaling = Scaling()
    operation = scaling.begin(group(0, 1), 1, now=0.0)
    look(scaling, group(0, 1))
    scaling.refuse("e1", "unknown command")
    failed = scaling.find(operation.operation_id)
    assert failed.state is OperationState.FAILED
    assert str(failed.error) == "engine e1 refuses to drain: unknown command"
    assert look(scaling, group(0, 1), now=9.0) == []


def test_an_engine_that_returns_as_another_process_counts_as_gone_and_is_not_drained() -> None:
    scaling = Scaling()
    operation = scaling.begin(group(0, 1), 1, now=0.0)
    assert look(scaling, group(0, engine(1, epoch=2))) == []
    assert scaling.find(operation.operation_id).state is OperationState.DONE


def lockstep(*engines: GroupEngine | int, **formed: object) -> Group:
    """A lockstep group whose ranks are all in one generation, but for what `formed` says."""
    members = group(*engines)
    formation = Formed(**{"generation": 1, "size": len(engines), "is_settled": True, **formed})  # type: ignore[arg-type]
    return Group(members.name, members.engines, formation)


def test_a_lockstep_group_grows_when_its_ranks_have_changed_over() -> None:
    scaling = Scaling()
    begun = scaling.begin(lockstep(0, 1), 4, now=0.0)
    assert (begun.state, begun.num_ready, begun.num_needed) == (OperationState.PREPARING, 2, 4)
    assert scaling.members_wanted(lockstep(0, 1)) == (4, frozenset())
    joining = (0, 1, engine(2, JOINING), engine(3, JOINING))
    look(scaling, lockstep(*joining, size=2, is_settled=False, num_answered=1, num_asked=4, generation=2))
    prepared = scaling.find(begun.operation_id)
    assert (prepared.state, prepared.num_ready, prepared.generation) == (OperationState.PREPARING, 1, 2)
    changing = {"size": 2, "is_settled": False, "is_changing_over": True, "num_answered": 3, "num_asked": 4}
    look(scaling, lockstep(*joining, **changing))
    assert scaling.find(begun.operation_id).state is OperationState.COMMITTING
    look(scaling, lockstep(0, 1, 2, 3, generation=2))
    assert scaling.find(begun.operation_id).state is OperationState.DONE


def test_a_change_over_without_all_of_the_new_ranks_does_not_commit_the_operation() -> None:
    scaling = Scaling()
    begun = scaling.begin(lockstep(0, 1), 4, now=0.0)
    look(scaling, lockstep(0, 1, engine(2, JOINING), size=2, is_settled=False, is_changing_over=True))
    look(scaling, lockstep(0, 1, 2, is_settled=False))
    assert scaling.find(begun.operation_id).state is OperationState.PREPARING


def test_a_lockstep_group_that_shrinks_is_done_when_the_ranks_that_left_are_gone() -> None:
    scaling = Scaling()
    begun = scaling.begin(lockstep(0, 1, 2), 2, now=0.0)
    assert scaling.members_wanted(lockstep(0, 1, 2)) == (2, frozenset({"e2"}))
    assert look(scaling, lockstep(0, 1, 2, is_settled=False), now=0.5) == []
    assert look(scaling, lockstep(0, 1, 2, size=2), now=1.0) == []
    assert scaling.find(begun.operation_id).state is OperationState.PREPARING
    assert look(scaling, lockstep(0, 1, 2, size=2), now=1.0 + DRAIN_RETRY_S) == ["e2"]
    look(scaling, lockstep(0, 1), now=3.0)
    assert scaling.find(begun.operation_id).state is OperationState.DONE


def test_a_lockstep_shrink_is_not_taken_back_once_a_rank_is_leaving() -> None:
    scaling = Scaling()
    begun = scaling.begin(lockstep(0, 1), 1, now=0.0, timeout_s=5.0)
    leaving = lockstep(0, engine(1, DRAINING), is_settled=False)
    with pytest.raises(FailedPrecondition, match="cannot be cancelled"):
        scaling.cancel(begun.operation_id, leaving, now=1.0)
    look(scaling, leaving, now=5.0)
    assert scaling.find(begun.operation_id).state is OperationState.FAILED
    assert wanted(scaling) == 1


def test_a_lockstep_shrink_is_taken_back_while_every_rank_stays() -> None:
    scaling = Scaling()
    begun = scaling.begin(lockstep(0, 1), 1, now=0.0)
    state = scaling.cancel(begun.operation_id, lockstep(0, 1, is_settled=False), now=1.0).state
    assert state is OperationState.CANCELLED
    assert scaling.members_wanted(lockstep(0, 1)) == (2, frozenset())


def test_a_lockstep_group_that_keeps_failing_to_change_over_takes_its_operation_back() -> None:
    scaling = Scaling()
    begun = scaling.begin(lockstep(0), 2, now=0.0)
    present = (0, engine(1, JOINING))
    failing = {"size": 1, "is_settled": False, "last_failure": "engine e1 refuses: no memory"}
    look(scaling, lockstep(*present, **failing, num_failures=MAX_FAILURES - 1))
    assert not scaling.find(begun.operation_id).has_ended
    assert look(scaling, lockstep(*present, **failing, num_failures=MAX_FAILURES)) == ["e1"]
    failed = scaling.find(begun.operation_id)
    assert (failed.state, wanted(scaling)) == (OperationState.FAILED, 1)
    assert str(failed.error).endswith("no memory")


def test_a_bounded_number_of_operations_is_remembered_the_newest_first() -> None:
    scaling = Scaling(max_history=2)
    done = [scaling.begin(group(0), 1, now=float(second)) for second in range(3)]
    runs = scaling.begin(group(0), 2, now=3.0)
    ids = [operation.operation_id for operation in scaling.operations()]
    assert ids == [runs.operation_id, done[2].operation_id, done[1].operation_id]
    with pytest.raises(NotFound, match="the last 2 are remembered"):
        scaling.find(done[0].operation_id)


def test_a_bounded_number_of_groups_has_a_wanted_size() -> None:
    scaling = Scaling()
    for number in range(MAX_GROUPS):
        scaling.begin(group(0, name=str(number)), 1, now=0.0)
    with pytest.raises(ResourceExhausted):
        scaling.begin(group(0, name="one more"), 1, now=0.0)
    scaling.begin(group(0, name="0"), 1, now=0.0)


def test_an_operation_moves_as_its_table_says() -> None:
    allowed: Mapping[OperationState, set[OperationState]] = {
        OperationState.PREPARING: {OperationState.COMMITTING, *_ENDS},
        OperationState.COMMITTING: {OperationState.DONE, OperationState.FAILED},
    }
    for before in OperationState:
        operation = Operation("scale-1", "", 1, 2, 0.0, 1.0, state=before)
        assert operation.has_ended == (before in _ENDS)
        for after in OperationState:
            if after in allowed.get(before, set()):
                assert operation.move_to(after).state is after
            else:
                with pytest.raises(InvalidTransition):
                    operation.move_to(after)


# The scaling service over real gRPC, with members that the test moves.

_S = 60.0


async def refused(call: Any) -> ServiceError:
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


async def test_the_group_watcher_receives_every_change_of_the_sizes() -> None:
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


async def test_members_of_a_lockstep_group_are_listed_until_it_has_changed_over() -> None:
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
            "group 'c' has no engine; groups: 'a', 'b'",
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


async def test_one_engine_is_drained_and_again_where_it_gets_a_deadline() -> None:
    async with scaling_service(dense("", 0, 1)) as served, asking(served) as stub:
        for deadline_ms in (0, 0, 1500):
            request = scaling_pb2.DrainEngineRequest(engine_id="e1", deadline_ms=deadline_ms)
            assert (await stub.DrainEngine(request, timeout=_S)).num_in_flight == 7
        assert served.engines.drained == [("e1", 0.0), ("e1", 1.5)]


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


async def test_operations_are_traces_with_a_span_for_each_state() -> None:
    traceparent = f"00-{'c' * 32}-{'d' * 16}-01"
    async with scaling_service(dense("", 0, 1)) as served, asking(served) as stub:
        metadata = (("traceparent", traceparent),)
        scale = scaling_pb2.ScaleRequest(new_size=1)
        begun = (await stub.Scale(scale, timeout=_S, metadata=metadata)).operation
        served.engines.members[""] = dense("", 0)
        served.engines.signal.notify()
        await ended(stub, begun.operation_id)
        evict = scaling_pb2.EvictEngineRequest(engine_id="e0", reason="it hangs")
        await stub.EvictEngine(evict, timeout=_S, metadata=metadata)
    spans = recent_spans("c" * 32)
    assert [span.name for span in spans] == [
        "drain engine",
        "scale",
        "preparing",
        "committing",
        "evict engine",
    ]
    drain, scale_span, *states, evicted = spans
    assert (drain.attributes[names.ENGINE], evicted.attributes[names.CAUSE]) == ("e1", "it hangs")
    assert scale_span.attributes == {
        names.OPERATION_ID: begun.operation_id,
        names.GROUP: "",
        names.OLD_SIZE: 2,
        names.NEW_SIZE: 1,
        names.STATE: "done",
    }
    assert {span.parent_span_id for span in states} == {scale_span.span_id}
    assert scale_span.error is None


async def test_an_operation_that_is_not_known_is_named() -> None:
    async with scaling_service() as served, asking(served) as stub:
        request = scaling_pb2.GetOperationRequest(operation_id="scale-8")
        assert (await refused(stub.GetOperation(request, timeout=_S))).code.name == "NOT_FOUND"
        with pytest.raises(grpc.aio.AioRpcError, match="scale-8"):
            await ended(stub, "scale-8")


class CountingSignal(ChangeSignal):
    """Counts how often a wait was woken."""

    num_woken = 0

    async def wait(self, timeout_s: float, *, loads_too: bool = True) -> None:
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


# Scaling over the real membership: members, commands to engines and their answers, evictions.


class Members:
    """A topology whose engines have sessions that a test plays."""

    def __init__(self) -> None:
        registry = EngineRegistry(FakeClock(), lease_s=30.0)
        self.topology = Topology(registry, coordinator_epoch=5)
        self.engines = MemberEngines(registry, self.topology)
        self.sent = asyncio.Event()

    def join(self, engine_id: str, **fields: object) -> None:
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
    """An engine that is asked to drain within so long."""
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


async def test_an_engine_is_sent_a_drain_with_its_deadline_and_answers() -> None:
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


async def test_two_callers_that_drain_one_engine_both_get_its_answer() -> None:
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
    # Nothing is left over that it would be sent when it comes back.
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
    assert members.engines.find("unknown") is None


async def test_requests_of_an_engine_are_those_that_run_and_those_that_wait() -> None:
    members = Members()
    members.join("a")
    report = coordinator_pb2.EngineReport(seq=1)
    report.load.engine_epoch, report.load.num_running, report.load.num_waiting = 11, 3, 2
    members.topology.take_report("a", 1, report)
    assert members.engines.num_in_flight("a") == 5
    assert members.engines.num_in_flight("unknown") == 0


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
