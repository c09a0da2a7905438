"""The rules of one rank's part in the waves, one by one."""

from __future__ import annotations

import pytest

from engine_svc.core.errors import InvalidTransition
from engine_svc.data_parallel.wave import VOTE_INTERVAL, LockstepState, Vote, WaveMachine


def formed(*, interval: int = 1, wave: int = 1) -> WaveMachine:
    machine = WaveMachine(interval=interval)
    machine.form(1, wave)
    return machine


def step(machine: WaveMachine, *, has_work: bool = True) -> Vote:
    """Launch a step after which a vote is due, and take it back."""
    assert machine.may_step(has_work)
    vote = machine.on_step_launched(has_work)
    machine.on_step_done()
    assert vote is not None
    return vote


def verdict(wave: int = 1, *, has_work: bool = False, is_pausing: bool = False, generation: int = 1) -> Vote:
    return Vote(wave, has_work, is_pausing, generation)


def quiet() -> WaveMachine:
    machine = formed()
    machine.pause()
    machine.take(step(machine, has_work=False))
    assert machine.state is LockstepState.QUIET
    return machine


def test_a_rank_without_a_group_never_steps():
    machine = WaveMachine()
    assert not machine.may_step(True)
    assert not machine.wants_step(True)
    assert not machine.start(1)


def test_a_rank_begins_a_wave_where_it_has_work():
    machine = formed()
    assert not machine.may_step(False)
    assert machine.may_step(True)
    assert machine.state is LockstepState.RUNNING
    assert machine.needs_idle_step


def test_what_may_step_would_say_changes_nothing():
    machine = formed()
    assert machine.wants_step(True)
    assert machine.state is LockstepState.PAUSED
    assert not machine.asks


def test_a_rank_in_a_wave_steps_without_work():
    machine = formed()
    assert machine.start(1)
    assert machine.may_step(False)


def test_a_rank_that_has_begun_asks_until_all_have_taken_part_in_a_step():
    machine = formed(interval=8)
    machine.may_step(True)
    assert machine.asks
    machine.on_step_launched(True)
    assert machine.asks
    machine.on_step_done()
    assert not machine.asks


def test_a_rank_that_was_started_asks_as_well_for_the_one_that_began_may_be_none():
    machine = formed()
    machine.start(1)
    assert machine.asks


def test_a_step_of_the_wave_before_does_not_end_the_asking():
    machine = formed()
    assert machine.may_step(True)
    vote = machine.on_step_launched(False)
    assert vote is not None
    machine.take(vote)
    assert machine.may_step(True)
    machine.on_step_launched(False)
    machine.on_step_done()
    assert machine.asks
    machine.on_step_done()
    assert not machine.asks


def test_the_verdict_ends_the_asking():
    machine = formed()
    machine.may_step(True)
    machine.on_step_launched(True)
    machine.take(verdict(has_work=True))
    assert not machine.asks


def test_ranks_vote_every_32_steps_of_a_wave():
    machine = formed(interval=VOTE_INTERVAL)
    votes = []
    for _ in range(3 * VOTE_INTERVAL):
        machine.may_step(True)
        votes.append(machine.on_step_launched(True))
        machine.on_step_done()
        if votes[-1] is not None:
            machine.take(votes[-1])
    assert [number for number, vote in enumerate(votes, 1) if vote is not None] == [32, 64, 96]


def test_steps_are_counted_from_the_beginning_of_each_wave():
    machine = formed(interval=2)
    machine.may_step(True)
    assert machine.on_step_launched(True) is None
    machine.leave_group()
    machine.form(2, machine.wave)
    machine.may_step(True)
    assert machine.on_step_launched(True) is None
    assert machine.on_step_launched(True) is not None


def test_a_verdict_counts_all_votes():
    votes = [Vote(3, False, True, 2), Vote(5, True, True, 1), Vote(4, False, False, 3)]
    assert Vote.count(votes) == Vote(wave=5, has_work=True, is_pausing=False, generation=1)


def test_a_vote_says_what_this_rank_wants():
    machine = formed()
    machine.pause()
    machine.get_ready(4)
    assert step(machine, has_work=False) == Vote(1, has_work=False, is_pausing=True, generation=4)


def test_a_wave_goes_on_while_any_rank_has_work():
    machine = formed()
    machine.start(1)
    step(machine, has_work=False)
    machine.take(verdict(has_work=True, is_pausing=True))
    assert machine.state is LockstepState.RUNNING
    assert machine.wave == 1


def test_a_wave_ends_where_no_rank_has_work():
    machine = formed()
    machine.start(1)
    machine.take(step(machine, has_work=False))
    assert machine.state is LockstepState.PAUSED
    assert machine.wave == 2


def test_ranks_that_began_under_different_numbers_go_on_under_the_greatest():
    machine = formed()
    step(machine)
    machine.take(verdict(wave=7))
    assert machine.wave == 8


def test_a_stale_start_is_refused():
    machine = formed(wave=5)
    assert not machine.start(4)
    assert machine.state is LockstepState.PAUSED


def test_a_start_of_a_greater_wave_is_taken():
    machine = formed()
    assert machine.start(5)
    assert machine.wave == 5


def test_a_start_for_the_wave_that_runs_begins_no_other():
    machine = formed()
    machine.may_step(True)
    assert machine.start(1)
    machine.take(step(machine, has_work=False))
    assert machine.state is LockstepState.PAUSED


def test_a_start_for_the_next_wave_that_comes_early_is_kept_and_asks():
    machine = formed()
    vote = step(machine)
    assert machine.start(2)
    machine.take(verdict(wave=vote.wave))
    assert machine.state is LockstepState.RUNNING
    assert machine.wave == 2
    assert machine.asks


def test_one_rank_alone_cannot_make_the_group_stand_still():
    machine = formed()
    machine.pause()
    step(machine, has_work=False)
    machine.take(verdict(is_pausing=False))
    assert machine.state is LockstepState.PAUSED


def test_a_rank_that_wants_to_pause_still_takes_part_in_the_work_of_others():
    machine = formed()
    machine.pause()
    assert machine.start(1)
    assert machine.may_step(False)


def test_a_pause_calls_for_a_vote_once():
    machine = formed()
    machine.pause()
    step(machine, has_work=False)
    machine.take(verdict(is_pausing=False))
    machine.pause()
    assert not machine.may_step(False)


def test_all_ranks_together_become_quiet():
    machine = quiet()
    assert not machine.may_step(True)
    assert machine.wave == 2


@pytest.mark.parametrize("wave", [1, 2, 9])
def test_a_late_start_after_an_agreed_pause_does_nothing(wave: int):
    machine = quiet()
    assert not machine.start(wave)
    assert machine.state is LockstepState.QUIET
    assert not machine.may_step(True)


def test_no_rank_steps_before_all_have_resumed():
    machine = quiet()
    assert machine.resume()
    assert not machine.may_step(True)
    machine.all_resumed()
    assert machine.may_step(True)


def test_a_resume_without_an_agreement_does_not_wait():
    machine = formed()
    machine.pause()
    assert not machine.resume()
    assert machine.may_step(True)


def test_a_rank_that_pauses_again_while_it_waits_for_the_others_calls_for_a_vote():
    machine = quiet()
    machine.resume()
    machine.pause()
    machine.all_resumed()
    assert step(machine, has_work=False).is_pausing


def test_a_rank_tells_the_others_once_that_it_has_resumed():
    machine = quiet()
    assert machine.resume()
    machine.pause()
    assert not machine.resume()
    assert machine.state is LockstepState.QUIET
    machine.all_resumed()
    machine.pause()
    machine.take(step(machine, has_work=False))
    assert machine.resume()


def test_ranks_change_over_when_all_are_ready():
    machine = formed()
    machine.get_ready(3)
    vote = step(machine, has_work=False)
    machine.take(verdict(generation=1))
    assert machine.state is LockstepState.PAUSED
    assert machine.switch_to == 0
    assert vote.generation == 3
    machine.may_step(True)
    machine.take(verdict(machine.wave, has_work=True, generation=3))
    assert machine.state is LockstepState.APART
    assert machine.switch_to == 3
    assert machine.generation == 0


def test_a_rank_that_is_apart_changes_over_at_once():
    machine = WaveMachine()
    assert machine.switch_to == 0
    machine.get_ready(2)
    assert machine.switch_to == 2


def test_a_generation_that_was_lost_is_not_formed_again():
    machine = formed()
    machine.leave_group()
    assert machine.switch_to == 0
    machine.get_ready(2)
    assert machine.switch_to == 2


def test_a_rank_that_loses_its_group_leaves_the_wave():
    machine = formed()
    machine.may_step(True)
    machine.on_step_launched(True)
    machine.leave_group()
    assert machine.state is LockstepState.APART
    assert machine.generation == 0
    assert not machine.asks
    assert not machine.may_step(True)
    machine.leave_group()
    assert machine.wave == 2


def test_a_requested_pause_outlives_the_group():
    machine = formed()
    machine.pause()
    machine.leave_group()
    machine.form(2, machine.wave)
    assert step(machine, has_work=False).is_pausing


def test_a_group_begins_at_the_greatest_wave_of_its_ranks():
    machine = formed(wave=9)
    assert machine.wave == 9
    machine.leave_group()
    with pytest.raises(InvalidTransition, match="wave 3 cannot follow wave 10"):
        machine.form(2, 3)


def test_a_group_is_formed_only_by_who_is_apart():
    with pytest.raises(InvalidTransition, match="paused cannot become paused"):
        formed().form(2, 1)


def test_all_resumed_is_valid_only_after_an_agreed_pause():
    with pytest.raises(InvalidTransition, match="paused cannot become paused"):
        formed().all_resumed()
