"""How long a request is kept for another frontend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine_svc.admin.orphaned_requests import Adoptable, Adoptables


@dataclass
class PendingCall:
    due_at: float
    call: Callable[[], None]
    is_over: bool = False

    def cancel(self) -> None:
        self.is_over = True


class World:
    """Adoptables over a clock that is moved by hand."""

    def __init__(self, *, max_requests: int = 8) -> None:
        self.now = 0.0
        self.given_up: list[str] = []
        self._calls: list[PendingCall] = []
        self.adoptables = Adoptables(
            give_up=self.given_up.append, call_later=self._call_later, max_requests=max_requests
        )

    def add(self, wire_id: str, *, owner: int = 1, group_id: str = "", grace_s: float = 5.0) -> bool:
        return self.adoptables.add(
            Adoptable(
                wire_id, f"{wire_id}/1", 0, group_id or wire_id, b"", b"state", frozenset(), grace_s, owner
            )
        )

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
    world.adoptables.lose(1)
    world.pass_time(1.0)
    assert world.given_up == ["a/1"]
    world.pass_time(60.0)
    assert (world.given_up, len(world.adoptables)) == (["a/1", "b/1"], 1)


def test_a_lost_request_is_kept_for_as_long_as_its_session_may_come_back():
    world = World()
    world.add("a", grace_s=1.0)
    world.adoptables.lose(1, at_least_s=5.0)
    world.pass_time(4.0)
    world.adoptables.find_again(1)
    world.pass_time(60.0)
    assert world.given_up == []


def test_a_session_that_comes_back_keeps_its_requests():
    world = World()
    world.add("a")
    world.adoptables.lose(1)
    world.adoptables.find_again(1)
    world.pass_time(60.0)
    assert world.given_up == []
    assert world.adoptables.adopt("a", owner=2) is None


def test_an_adopted_request_stays_and_can_be_lost_again():
    world = World()
    world.add("a")
    assert world.adoptables.adopt("a", owner=2) is None
    world.adoptables.lose(1)
    adopted = world.adoptables.adopt("a", owner=2)
    assert adopted is not None and (adopted.request_id, adopted.resume_state) == ("a/1", b"state")
    world.pass_time(60.0)
    assert world.given_up == []
    world.adoptables.lose(2)
    world.pass_time(5.0)
    assert world.given_up == ["a/1"]


def test_the_end_of_a_group_begins_the_grace_of_all_of_it():
    world = World()
    for wire_id in ("a", "b"):
        world.add(wire_id, group_id="g")
    world.adoptables.end("a")
    world.pass_time(60.0)
    assert world.given_up == []
    world.adoptables.end("b")
    world.adoptables.lose(1)
    assert world.adoptables.adopt("a", owner=2) is not None
    world.pass_time(5.0)
    assert world.given_up == ["a/1", "b/1"]
    assert len(world.adoptables) == 0


def test_a_session_that_is_over_for_good_leaves_nothing():
    world = World()
    world.add("a")
    world.add("b", owner=2)
    world.adoptables.lose(1)
    world.adoptables.drop(1)
    world.pass_time(60.0)
    assert world.given_up == ["a/1"]
    assert "b" in world.adoptables


def test_too_many_are_not_kept_and_none_twice():
    world = World(max_requests=1)
    assert world.add("a")
    assert not world.add("a")
    assert not world.add("b")
    world.adoptables.end("b")
    assert len(world.adoptables) == 1


def test_what_is_left_of_a_group_whose_last_running_request_moved_is_given_up_after_its_grace():
    world = World()
    world.add("a", group_id="both")
    world.add("b", group_id="both")
    world.adoptables.end("a")
    world.pass_time(60.0)
    assert world.given_up == []
    world.adoptables.discard("b")
    assert world.given_up == ["b/1"]
    world.pass_time(5.0)
    assert (world.given_up, len(world.adoptables)) == (["b/1", "a/1"], 0)
