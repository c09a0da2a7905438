"""How long requests are kept for another session, and which session may have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from engine_svc.adoption.orphaned_requests import OrphanedRequest, OrphanedRequests
from triptych.engine.v1 import add_pb2
from triptych_kit.errors import FailedPrecondition, NotFound


@dataclass
class PendingCall:
    due_at: float
    call: Callable[[], None]
    is_over: bool = False

    def cancel(self) -> None:
        self.is_over = True


class World:
    """Orphaned requests over a clock that is moved by hand."""

    def __init__(self, *, max_requests: int = 8) -> None:
        self.now = 0.0
        self.given_up: list[str] = []
        self._calls: list[PendingCall] = []
        self.kept = OrphanedRequests(
            give_up=self.given_up.append, call_later=self._call_later, max_requests=max_requests
        )

    def add(
        self, wire_id: str, *, owner: int = 1, group_id: str = "", grace_s: float = 5.0, fleet: str = ""
    ) -> OrphanedRequest | None:
        entry = add_pb2.AddEntry(
            request_id=wire_id, group_id=group_id, resume_state=b"state", orphan_grace_ms=int(grace_s * 1000)
        )
        if not self.kept.can_keep(entry):
            return None
        return self.kept.keep(entry, f"{wire_id}/1", owner=owner, default_grace_s=9.0, fleet=fleet)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for pending in self._calls:
            if not pending.is_over and pending.due_at <= self.now:
                pending.is_over = True
                pending.call()

    def _call_later(self, delay_s: float, call: Callable[[], None]) -> PendingCall:
        self._calls.append(PendingCall(self.now + delay_s, call))
        return self._calls[-1]


def test_a_lost_request_is_given_up_after_its_own_grace():
    world = World()
    world.add("a", grace_s=1.0)
    world.add("b", grace_s=5.0)
    world.add("other", owner=2)
    world.kept.mark_lost(1)
    world.pass_time(1.0)
    assert world.given_up == ["a/1"]
    world.pass_time(60.0)
    assert (world.given_up, len(world.kept)) == (["a/1", "b/1"], 1)


def test_a_lost_request_is_kept_for_as_long_as_its_session_may_come_back():
    world = World()
    world.add("a", grace_s=1.0)
    world.kept.mark_lost(1, at_least_s=5.0)
    world.pass_time(4.0)
    world.kept.mark_found(1)
    world.pass_time(60.0)
    assert world.given_up == []


def test_a_session_that_comes_back_keeps_its_requests():
    world = World()
    world.add("a")
    world.kept.mark_lost(1)
    world.kept.mark_found(1)
    world.pass_time(60.0)
    assert world.given_up == []
    with pytest.raises(FailedPrecondition, match="lives"):
        world.kept.adopt("a", owner=2)


def test_an_adopted_request_stays_and_can_be_lost_again():
    world = World()
    world.add("a")
    with pytest.raises(FailedPrecondition, match="lives"):
        world.kept.adopt("a", owner=2)
    world.kept.mark_lost(1)
    adopted = world.kept.adopt("a", owner=2)
    assert (adopted.request_id, adopted.adopted(7).resume_state) == ("a/1", b"state")
    world.pass_time(60.0)
    assert world.given_up == []
    world.kept.mark_lost(2)
    world.pass_time(5.0)
    assert world.given_up == ["a/1"]


def test_the_end_of_a_group_begins_the_grace_of_all_of_it():
    world = World()
    first, second = (world.add(wire_id, group_id="g") for wire_id in ("a", "b"))
    world.kept.end(first)
    world.pass_time(60.0)
    assert world.given_up == []
    world.kept.end(second)
    world.kept.mark_lost(1)
    assert world.kept.adopt("a", owner=2) is first
    world.pass_time(5.0)
    assert world.given_up == ["a/1", "b/1"]
    assert len(world.kept) == 0


def test_a_session_that_is_over_for_good_leaves_nothing():
    world = World()
    world.add("a")
    other = world.add("b", owner=2)
    world.kept.mark_lost(1)
    world.kept.drop(1)
    world.pass_time(60.0)
    assert world.given_up == ["a/1"]
    assert other in world.kept


def test_too_many_are_not_kept_and_none_twice():
    world = World(max_requests=1)
    assert world.add("a")
    assert not world.add("a")
    assert not world.add("b")
    assert len(world.kept) == 1


def test_what_is_left_of_a_group_whose_last_running_request_moved_is_given_up_after_its_grace():
    world = World()
    first, second = (world.add(wire_id, group_id="both") for wire_id in ("a", "b"))
    world.kept.end(first)
    world.pass_time(60.0)
    assert world.given_up == []
    world.kept.discard(second)
    assert world.given_up == ["b/1"]
    world.pass_time(5.0)
    assert (world.given_up, len(world.kept)) == (["b/1", "a/1"], 0)


def test_what_is_left_of_a_group_that_was_adopted_in_part_is_given_up_after_its_grace():
    world = World()
    world.add("a", group_id="both")
    second = world.add("b", group_id="both")
    world.kept.end(second)
    world.kept.mark_lost(1)
    world.kept.adopt("b", owner=2)
    world.pass_time(5.0)
    assert world.given_up == ["a/1"]
    world.pass_time(5.0)
    assert (world.given_up, len(world.kept)) == (["a/1", "b/1"], 0)


def test_a_discarded_request_leaves_alone_another_one_with_its_id():
    world = World()
    first = world.add("a")
    world.kept.discard(first)
    second = world.add("a")
    world.kept.end(first)
    world.kept.discard(first)
    world.pass_time(60.0)
    assert first not in world.kept and second in world.kept


def test_the_grace_is_what_the_request_says_or_else_that_of_the_engine_within_the_limit():
    world = World()
    own = world.add("a", grace_s=1.0)
    entry = add_pb2.AddEntry(request_id="b", resume_state=b"state")
    default = world.kept.keep(entry, "b/1", owner=1, default_grace_s=9.0)
    assert (own.grace_s, default.grace_s, world.add("c", grace_s=100.0).grace_s) == (1.0, 9.0, 60.0)


def test_a_frontend_of_another_fleet_does_not_find_a_request():
    world = World()
    world.add("a", fleet="blue")
    world.kept.mark_lost(1)
    for fleet in ("", "red"):
        with pytest.raises(NotFound):
            world.kept.adopt("a", owner=2, fleet=fleet)
    assert world.kept.adopt("a", owner=2, fleet="blue").owner == 2
