"""What ends an attempt to form a generation, and what follows. No network, no real time."""

from __future__ import annotations

from coordinator_svc.data_parallel.formation import Phase
from coordinator_svc.data_parallel.orders import Abort, Prepare
from tests.coordinator_svc.data_parallel.formation_fakes import Group, formed


def test_a_refusal_ends_the_attempt_and_the_next_ones_come_later_and_later() -> None:
    group = Group(size=2)
    group.join("a", "b")
    group.load("a", "b")
    group.take("a")
    group.refuse("b", "no memory")
    assert group.formation.last_failure == "engine b refuses generation 1: no memory"
    assert group.formation.preparing == 2
    group.refuse("b")
    waits = []
    for generation in range(3, 12):
        next_at = group.formation.next_at()
        assert next_at is not None
        waits.append(next_at - group.now)
        assert group.formation.orders() == {"a": Abort(generation - 1), "b": Abort(generation - 1)}
        group.pass_time(next_at - group.now)
        assert group.formation.preparing == generation
        group.refuse("b")
    assert waits == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_a_phase_that_takes_too_long_is_given_up() -> None:
    group = Group(size=2)
    group.join("a", "b")
    group.load("a", "b")
    group.take("a")
    group.pass_time(600.0)
    assert group.formation.last_failure == "not ready within 600 s: b"
    assert group.formation.preparing == 2
    group.take("a", "b")
    group.take("a", "b")
    group.pass_time(60.0)
    assert group.formation.last_failure == "generation 2 not formed within 60 s: a, b"
    group.pass_time(0.25)
    assert group.formation.preparing == 3


def test_a_member_lost_while_preparing_is_waited_for_during_the_grace_only() -> None:
    group = formed("a", "b", "c")
    group.fall_apart("a", "b", "c")
    group.lose("c")
    group.pass_time(0.2)
    assert group.formation.preparing == 2
    group.pass_time(0.1)
    assert group.ranks() == {"a": 0, "b": 1}
    assert group.formation.preparing == 3


def test_a_member_that_restarts_while_preparing_ends_the_attempt() -> None:
    group = formed("a", "b")
    group.fall_apart("a", "b")
    group.join("b", epoch=2)
    assert group.formation.orders() == {"a": Prepare(3, 1, 0, "host-a", 7000)}


def test_a_member_lost_while_committing_ends_the_attempt() -> None:
    group = formed("a", "b", "c")
    group.fall_apart("a", "b", "c")
    group.take("a", "b", "c")
    group.take("a", "b")
    group.lose("c")
    group.pass_time(0.3)
    assert group.ranks() == {"a": 0, "b": 1}
    assert group.change_over("a", "b") == 3


def test_a_member_cut_off_while_committing_does_not_end_it_where_the_others_have_met() -> None:
    group = formed("a", "b", "c")
    group.fall_apart("a", "b", "c")
    group.take("a", "b", "c")
    group.take("a", "b", "c")
    group.stand(2, "a")
    group.lose("c")
    group.stand(2, "b")
    assert group.formation.phase is Phase.RESTING
    group.join("c")
    group.stand(2, "c")
    assert group.formation.is_settled


def test_a_generation_lost_before_all_have_confirmed_it_is_followed_by_another() -> None:
    group = Group(size=2)
    group.join("a", "b")
    group.load("a", "b")
    group.take("a", "b")
    group.take("a", "b")
    group.stand(1, "a")
    group.fall_apart("a")
    assert group.formation.last_failure == "engine a has lost generation 1 again"
    assert group.ranks() == {"a": 0, "b": 1}
