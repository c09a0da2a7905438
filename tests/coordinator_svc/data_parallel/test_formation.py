"""Generations of a lockstep group: when one is made, of which engines, what invalidates it. No real time."""

from __future__ import annotations

import pytest

from coordinator_svc.data_parallel.formation import Abort, Commit, Phase, Prepare
from tests.coordinator_svc.data_parallel.formation_fakes import Group, formed
from tests.coordinator_svc.data_parallel.lockstep_world import World


def test_the_first_generation_waits_for_all_ranks_and_meets_at_rank_0() -> None:
    group = Group(size=2)
    group.join("b", "a")
    group.load("b")
    group.pass_time(1000.0)
    assert group.formation.orders() == {}
    group.load("a")
    assert group.formation.orders() == {
        "a": Prepare(1, 2, 0, "host-a", 7000),
        "b": Prepare(1, 2, 1, "host-a", 7000),
    }


def test_all_prepare_before_anyone_commits_and_reports_confirm() -> None:
    group = Group(size=2)
    group.join("a", "b")
    group.load("a", "b")
    group.take("a")
    assert (group.formation.num_answered, group.formation.num_asked) == (1, 2)
    assert isinstance(group.formation.orders()["b"], Prepare)
    group.take("b")
    assert group.formation.orders() == {"a": Commit(1), "b": Commit(1)}
    group.take("a", "b")
    group.stand(1, "a")
    assert not group.formation.is_settled
    group.stand(1, "b")
    assert group.formation.is_settled
    assert (group.formation.generation, group.formation.members) == (1, ("a", "b"))


def test_survivors_of_a_death_form_the_next_generation_after_the_grace() -> None:
    group = formed("a", "b", "c")
    group.lose("a")
    assert group.formation.orders() == {}
    group.fall_apart("b", "c")
    assert group.formation.orders() == {}
    assert group.formation.next_at() == group.now + 0.3
    group.pass_time(0.3)
    assert group.formation.orders() == {
        "b": Prepare(2, 2, 0, "host-b", 7001),
        "c": Prepare(2, 2, 1, "host-b", 7001),
    }
    assert group.change_over("b", "c") == 2


def test_ranks_that_have_all_come_apart_form_again_at_once() -> None:
    group = formed("a", "b")
    group.fall_apart("a")
    assert group.formation.orders() == {}
    group.fall_apart("b")
    assert group.ranks() == {"a": 0, "b": 1}
    assert group.change_over("a", "b") == 2


def test_a_session_that_comes_back_within_the_grace_is_in_the_next_generation() -> None:
    group = formed("a", "b")
    group.lose("b")
    group.fall_apart("a")
    group.pass_time(0.2)
    group.join("b")
    group.fall_apart("b")
    group.pass_time(0.1)
    assert group.ranks() == {"a": 0, "b": 1}


def test_a_lost_session_alone_changes_nothing() -> None:
    group = formed("a", "b")
    group.lose("b")
    group.pass_time(1000.0)
    assert group.formation.orders() == {}


def test_a_member_whose_lease_has_ended_is_excluded_later_even_if_no_rank_has_noticed() -> None:
    group = formed("a", "b", "c")
    group.lose("b")
    group.pass_time(3.0)
    group.end("b", has_ended=False)
    group.pass_time(1.9)
    assert group.formation.orders() == {}
    assert group.formation.next_at() == pytest.approx(group.now + 0.1)
    group.pass_time(0.2)
    assert group.ranks() == {"a": 0, "c": 1}
    assert group.change_over("a", "c") == 2
    group.pass_time(1000.0)
    assert group.formation.orders() == {}


def test_a_member_that_was_only_silent_comes_back_and_nothing_has_changed() -> None:
    for silent_s in (1.9, 2.1):
        group = formed("a", "b")
        group.end("b", has_ended=False)
        group.pass_time(silent_s)
        group.join("b")
        group.stand(1, "b")
        group.pass_time(1000.0)
        # Of what was being prepared meanwhile nothing is left.
        assert all(isinstance(order, Abort) for order in group.formation.orders().values())
        assert group.formation.phase is Phase.RESTING


def test_leases_that_all_end_say_nothing_of_the_engines() -> None:
    group = formed("a", "b", "c")
    for engine_id in "abc":
        group.end(engine_id, has_ended=False)
        group.pass_time(0.6)
    for engine_id in "bca":
        group.join(engine_id)
        group.stand(1, engine_id)
        group.pass_time(0.6)
    group.pass_time(1000.0)
    assert group.formation.orders() == {}


def test_another_process_of_the_same_name_says_that_the_silent_one_has_ended() -> None:
    group = formed("a", "b")
    group.end("b", has_ended=False)
    group.join("b", epoch=2)
    assert group.ranks() == {"a": 0}


def test_a_group_whose_sessions_are_all_lost_is_taken_to_stand() -> None:
    group = formed("a", "b")
    group.lose("a")
    group.lose("b")
    assert (group.formation.generation, group.formation.members) == (1, ("a", "b"))
    group.pass_time(1000.0)
    assert group.formation.orders() == {}


def test_a_member_that_says_goodbye_is_left_out_before_anybody_runs_into_it() -> None:
    group = formed("a", "b")
    group.end("b")
    assert group.ranks() == {"a": 0}


def test_a_restarted_member_joins_again_when_it_is_loaded() -> None:
    group = formed("a", "b")
    group.lose("b")
    group.fall_apart("a")
    group.pass_time(0.3)
    group.change_over("a")
    group.join("b", epoch=2)
    group.pass_time(100.0)
    assert group.formation.orders() == {}
    group.load("b")
    assert group.ranks() == {"a": 0, "b": 1}
    assert group.change_over("a", "b") == 3


def test_no_engine_forms_alone_when_all_have_restarted() -> None:
    group = formed("a", "b")
    group.join("a", "b", epoch=2)
    group.load("a")
    group.pass_time(1000.0)
    assert group.formation.orders() == {}


def test_growth_waits_a_while_for_all_that_were_asked_for() -> None:
    group = formed("a", "b")
    group.resize(4)
    group.join("c", "d", size=4)
    group.load("c")
    group.pass_time(9.0)
    assert group.formation.orders() == {}
    group.load("d")
    assert group.ranks() == {"a": 0, "b": 1, "c": 2, "d": 3}
    assert group.change_over("a", "b", "c", "d") == 2
    assert group.formation.is_settled


def test_growth_does_not_wait_for_ever() -> None:
    group = formed("a", "b")
    group.resize(4)
    group.join("c", size=4)
    group.load("c")
    group.pass_time(10.0)
    assert group.ranks() == {"a": 0, "b": 1, "c": 2}
    group.change_over("a", "b", "c")
    assert not group.formation.is_settled


def test_ranks_close_up_and_a_leaver_is_waited_for() -> None:
    group = formed("a", "b", "c")
    group.resize(2, "b")
    assert group.ranks() == {"a": 0, "c": 1, "b": None}
    group.take("a", "c")
    assert group.formation.phase is Phase.PREPARING
    group.take("b")
    assert group.formation.orders() == {id_: Commit(2) for id_ in "abc"}
    group.take("a", "b", "c")
    group.stand(2, "a", "c")
    assert group.formation.is_settled
    group.report("b", is_loaded=True, is_leaving=True)
    group.end("b")
    group.pass_time(1000.0)
    assert group.formation.is_settled


def test_a_rank_that_drains_leaves_the_group() -> None:
    group = formed("a", "b")
    group.report("a", generation=1, is_leaving=True)
    assert group.ranks() == {"b": 0, "a": None}
    group.end("a")
    assert group.formation.phase is Phase.PREPARING
    group.fall_apart("b")
    group.take("b")
    group.take("b")
    group.stand(2, "b")
    assert group.formation.members == ("b",)


def test_ranks_that_all_drain_leave_together_when_none_has_requests_any_more() -> None:
    group = formed("a", "b")
    group.report("a", generation=1, is_loaded=True, is_leaving=True)
    assert group.ranks() == {"a": None, "b": 0}
    group.take("a")
    group.report("b", generation=1, is_loaded=True, is_leaving=True)
    assert group.ranks() == {"a": None, "b": None}
    group.take("a")
    assert group.ranks() == {"b": None}
    group.take("b")
    assert group.formation.orders() == {"a": Commit(3), "b": Commit(3)}
    group.take("a", "b")
    group.report("a", is_loaded=True, is_leaving=True)
    assert group.formation.phase is Phase.COMMITTING
    group.report("b", is_loaded=True, is_leaving=True)
    assert (group.formation.phase, group.formation.orders()) == (Phase.RESTING, {})
    assert (group.formation.last_failure, group.formation.generation) == ("", 0)
    group.pass_time(60.0)
    assert group.formation.orders() == {}


def test_a_rank_that_drains_with_the_last_other_one_gone_is_let_go() -> None:
    group = formed("a", "b")
    group.end("b")
    group.report("a", generation=1, is_loaded=True, is_leaving=True)
    group.take("a")
    assert group.formation.orders() == {"a": Commit(3, lost_generation=1)}


def test_an_engine_that_is_to_change_over_is_notified_of_members_that_have_ended() -> None:
    group = formed("a", "b", "c")
    group.end("c")
    group.take("a", "b")
    assert group.formation.orders() == dict.fromkeys("ab", Commit(2, lost_generation=1))
    group.take("a", "b")
    group.stand(2, "a", "b")
    group.join("c", epoch=2)
    group.load("c")
    group.take("a", "b", "c")
    # No member of it has ended: all of its ranks can vote.
    assert group.formation.orders() == dict.fromkeys("abc", Commit(3, lost_generation=1))


def test_a_smaller_size_keeps_the_first_ranks_that_are_in_the_group() -> None:
    group = formed("a", "b", "c")
    group.resize(2)
    assert group.ranks() == {"a": 0, "b": 1, "c": None}


def test_a_scale_that_is_taken_back_is_aborted_and_the_group_stands() -> None:
    group = formed("a", "b")
    group.resize(1, "b")
    group.take("a")
    group.resize(2)
    assert group.formation.orders() == {"a": Abort(2), "b": Abort(2)}
    group.take("a", "b")
    assert group.formation.orders() == {}
    assert group.formation.is_settled


def test_a_size_asked_for_while_another_is_committed_comes_after_it() -> None:
    group = formed("a", "b")
    group.resize(1)
    group.take("a", "b")
    group.resize(2)
    assert group.formation.orders() == {"a": Commit(2), "b": Commit(2)}
    group.take("a", "b")
    group.stand(2, "a")
    # The leaver is apart and still there: it is wanted again.
    group.fall_apart("b")
    group.pass_time(0.3)
    assert group.ranks() == {"a": 0, "b": 1}


def test_growth_waits_for_a_member_that_is_cut_off() -> None:
    group = formed("a", "b")
    group.lose("b")
    group.join("c", size=3)
    group.load("c")
    group.pass_time(1000.0)
    assert group.formation.orders() == {}
    group.join("b")
    assert group.ranks() == {"a": 0, "b": 1, "c": 2}


def test_a_coordinator_that_starts_anew_takes_up_what_engines_report() -> None:
    group = Group(size=3, first_generation=50, settled_at=103.0)
    group.join("a", "b", "c")
    group.stand(7, "a", "b", "c")
    group.pass_time(100.0)
    assert group.formation.orders() == {}
    assert group.formation.is_settled
    assert group.formation.generation == 7
    group.fall_apart("a", "b", "c")
    assert group.formation.preparing == 50


def test_a_coordinator_that_starts_anew_gives_absent_members_the_time_to_come() -> None:
    group = Group(size=3, settled_at=103.0)
    group.join("a", "b")
    group.report("a", "b", is_loaded=True, was_formed=True)
    assert group.formation.orders() == {}
    group.pass_time(2.9)
    assert group.formation.orders() == {}
    group.pass_time(0.1)
    assert group.ranks() == {"a": 0, "b": 1}


def test_numbers_are_above_all_that_engines_report() -> None:
    group = Group(size=2)
    group.join("a", "b")
    group.stand(7, "a", "b")
    group.fall_apart("a", "b")
    assert group.formation.preparing == 8


def test_the_generation_most_report_stands_and_the_newest_of_equals() -> None:
    group = Group(size=3, settled_at=1000.0)
    group.join("a", "b", "c", size=4)
    group.stand(4, "a", "b")
    group.stand(5, "c")
    assert group.formation.members == ("a", "b")
    group.stand(5, "b")
    assert (group.formation.generation, group.formation.members) == (5, ("b", "c"))


def test_an_attempt_that_became_needless_is_aborted() -> None:
    group = formed("a", "b")
    group.fall_apart("a", "b")
    group.stand(1, "a", "b")
    assert group.formation.orders() == {"a": Abort(2), "b": Abort(2)}


def test_an_answer_to_an_order_that_holds_no_more_means_nothing() -> None:
    group = formed("a", "b")
    group.fall_apart("a", "b")
    old = group.formation.orders()["a"]
    group.join("b", epoch=2)
    group.formation.answer("a", old, group.now)
    group.formation.answer("b", old, group.now, refusal="late")
    group.step()
    assert group.formation.preparing == 3
    assert group.formation.num_answered == 0


def test_a_member_that_may_only_be_silent_is_not_reported_as_ended() -> None:
    group = formed("a", "b", "c")
    group.end("c", has_ended=False)
    group.pass_time(2.0)
    group.take("a", "b")
    assert group.formation.orders() == dict.fromkeys("ab", Commit(2))


# What ends an attempt to form a generation, and what follows. No network, no real time.


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


# Lockstep groups through crashes, restarts, cuts and scalings by chance, with books that no process has.

_NUM_TURNS = 600
_MAX_TURNS_TO_FORM = 6000


def _disturb(world: World) -> None:
    """Sometimes something goes wrong, or another size is wanted."""
    engine = world.random.choice(world.engines)
    choice = world.random.random()
    if choice < 0.010:
        world.kill(engine)
    elif choice < 0.040 and not engine.is_alive:
        engine.restart()
    elif choice < 0.050:
        world.disconnect(engine)
    elif choice < 0.055:
        world.restart_coordinator()
    elif choice < 0.060:
        size = world.random.randint(1, world.size)
        world.formation.resize(size, [one.engine_id for one in world.engines[size:]])


def _turn(world: World) -> None:
    engine = world.random.choice(world.engines)
    if engine.is_alive:
        world.move(engine)
    world.advance(world.random.choice((0.0, 0.01, 0.05, 0.2)))


def _is_one_group(world: World) -> bool:
    generations = {engine.generation for engine in world.engines}
    return len(generations) == 1 and 0 not in generations and world.formation.is_settled


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(25))
def test_whatever_happens_no_number_is_given_twice_and_all_end_in_one_group(seed: int, size: int) -> None:
    world = World(seed, size)
    for _ in range(_NUM_TURNS):
        _turn(world)
        _disturb(world)
    world.formation.resize(None)
    for engine in world.engines:
        if not engine.is_alive or engine.is_leaving:
            world.kill(engine)
            engine.restart()
    num_turns = 0
    while not _is_one_group(world) and num_turns < _MAX_TURNS_TO_FORM:
        _turn(world)
        num_turns += 1
    assert _is_one_group(world), f"{world.engines} {world.formation.last_failure}"
    assert world.formation.members == tuple(engine.engine_id for engine in world.engines)


def test_the_world_has_seen_what_it_is_there_for() -> None:
    num_generations = num_changed = 0
    for seed in range(20):
        world = World(seed, 3)
        for _ in range(_NUM_TURNS):
            _turn(world)
            _disturb(world)
        num_generations += len(world.met)
        num_changed += len({len(members) for members in world.met.values()}) > 1
    assert num_generations > 20
    assert num_changed > 5
