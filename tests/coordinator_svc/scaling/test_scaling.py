"""Operations that change a group's size, step by step."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from coordinator_svc.membership.registry import MemberState
from coordinator_svc.scaling.group import Formed, Group, GroupEngine
from coordinator_svc.scaling.operation import Operation, OperationState
from coordinator_svc.scaling.scaling import DRAIN_RETRY_S, MAX_FAILURES, MAX_GROUPS, MAX_SIZE, Scaling
from service_kit.errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    InvalidTransition,
    NotFound,
    ResourceExhausted,
)

READY, JOINING, DRAINING = MemberState.READY, MemberState.JOINING, MemberState.DRAINING
_ENDS = {OperationState.DONE, OperationState.FAILED, OperationState.CANCELLED}


def engine(rank: int, state: MemberState = READY, epoch: int = 1, name: str = "") -> GroupEngine:
    return GroupEngine(name or f"e{rank}", epoch, rank, state)


def group(*engines: GroupEngine | int, name: str = "") -> Group:
    """A group of these engines; a number is a READY engine of that rank."""
    return Group(name, tuple(engine(one) if isinstance(one, int) else one for one in engines))


def look(scaling: Scaling, present: Group, now: float = 1.0) -> list[str]:
    """Whom it tells to drain."""
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


def test_nobody_is_told_to_go_before_the_ranks_that_stay_are_ready() -> None:
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


def test_engines_that_all_say_rank_0_have_places_in_order_of_their_coming() -> None:
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


def test_a_growth_that_takes_too_long_is_taken_back_and_those_who_came_for_it_go() -> None:
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


def test_a_shrink_can_be_cancelled_until_somebody_was_told_to_go() -> None:
    scaling = Scaling()
    waits = scaling.begin(group(engine(0, JOINING), 1, 2), 2, now=0.0)
    assert scaling.cancel(waits.operation_id, group(1, 2), now=0.0).state is OperationState.CANCELLED
    drains = scaling.begin(group(0, 1, 2), 2, now=0.0)
    with pytest.raises(FailedPrecondition, match="COMMITTING"):
        scaling.cancel(drains.operation_id, group(0, 1, 2), now=0.0)


def test_a_shrink_that_takes_too_long_names_who_is_still_there_and_its_size_holds() -> None:
    scaling = Scaling()
    operation = scaling.begin(group(0, 1, 2), 1, now=0.0, timeout_s=5.0)
    assert look(scaling, group(0, engine(2, DRAINING)), now=5.0) == []
    failed = scaling.find(operation.operation_id)
    assert (failed.state, wanted(scaling)) == (OperationState.FAILED, 1)
    assert str(failed.error).endswith("still there are e2")


def test_an_engine_that_does_not_say_that_it_drains_is_told_again() -> None:
    scaling = Scaling()
    scaling.begin(group(0, 1), 1, now=0.0)
    assert look(scaling, group(0, 1), now=0.0) == ["e1"]
    assert look(scaling, group(0, 1), now=0.1) == []
    assert scaling.next_at() == DRAIN_RETRY_S
    assert look(scaling, group(0, 1), now=DRAIN_RETRY_S) == ["e1"]


def test_an_engine_that_has_taken_the_order_is_not_told_again() -> None:
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


def test_who_comes_back_as_another_process_has_gone_and_is_not_told_to_go() -> None:
    scaling = Scaling()
    operation = scaling.begin(group(0, 1), 1, now=0.0)
    assert look(scaling, group(0, engine(1, epoch=2))) == []
    assert scaling.find(operation.operation_id).state is OperationState.DONE


def lockstep(*engines: GroupEngine | int, **formed: object) -> Group:
    """A lockstep group whose ranks are all in one generation, but for what `formed` says."""
    members = group(*engines)
    told = Formed(**{"generation": 1, "size": len(engines), "is_settled": True, **formed})  # type: ignore[arg-type]
    return Group(members.name, members.engines, told)


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
    with pytest.raises(FailedPrecondition, match="cannot be taken back"):
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
