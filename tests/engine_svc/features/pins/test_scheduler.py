"""Pins of turns that end: whose blocks stay, how long, for whom, and what becomes of them.

The numbers are rows of the list of features.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from engine_svc.core.request import FinishReason
from engine_svc.features.pins.estimator import FixedTtl, LogNormalTtl, UtilityTtl
from engine_svc.features.pins.extras import JobTurn
from engine_svc.features.pins.scheduler import PROVISIONAL_S
from engine_svc.scheduler.config import PauseState
from tests.engine_svc.core_state import free_block_ids
from tests.engine_svc.features.pins.jobs import Jobs, made_for, prompt
from tests.engine_svc.scheduler.fakes import Stage, request, segment, session


# Row 281.
@pytest.mark.parametrize(
    ("serves_jobs", "job", "is_last", "ttl_s"),
    list(itertools.product((True, False), ("a", ""), (False, True), (10.0, 0.0))),
)
def test_281_a_pin_takes_the_policy_a_job_a_turn_that_is_not_the_last_and_a_time(
    serves_jobs: bool, job: str, is_last: bool, ttl_s: float
):
    jobs = Jobs(FixedTtl(ttl_s))
    stage = jobs.stage if serves_jobs else Stage()
    turn = request("a1", 40, max_tokens=2)
    turn.job = job
    if serves_jobs and job:
        turn.extras[JobTurn] = JobTurn(is_last, "tool")
    stage.add(turn)
    stage.step_until_idle()
    assert list(stage.cache.retained) == (["a"] if serves_jobs and job and not is_last and ttl_s else [])


@pytest.mark.parametrize("policy", ["fcfs", "fair", "priority", "prefill-first", "least-recompute"])
def test_272_other_policies_have_no_pins(policy: str):
    assert made_for(policy) is None


@pytest.mark.parametrize("rule", ["utility", "lognormal", "fixed"])
def test_the_policy_for_jobs_has_pins_of_every_rule(rule: str):
    assert made_for("continuum", pin_ttl_rule=rule) is not None


def test_273_the_last_turn_is_not_pinned_and_ends_the_pin_of_its_job():
    jobs = Jobs()
    jobs.add("a", prompt(40), max_tokens=2)
    jobs.add("a", prompt(40, 500), max_tokens=6, is_last=True)
    for _ in range(2):
        jobs.step()
    assert jobs.pinned == ["a"]
    jobs.stage.step_until_idle()
    assert (jobs.pinned, jobs.outcomes) == ([], {"released": 1})


def test_274_a_turn_keeps_its_full_blocks_until_the_time_and_the_next_one_hits_them():
    jobs = Jobs()
    turn = jobs.run("a", prompt(40), max_tokens=10)
    # 49 tokens are computed, which fill three blocks.
    assert jobs.cache.num_used_blocks == 3
    jobs.wait(9.0)
    assert jobs.cache.num_used_blocks == 3
    following = jobs.add("a", [*turn.token_ids, *prompt(30, 900)])
    jobs.stage.step()
    assert following.num_cached_tokens == 48
    assert jobs.outcomes == {"used": 1}
    assert jobs.pinned == []


def test_274_a_turn_that_is_pinned_frees_its_row():
    jobs = Jobs()
    turn = jobs.run("a", prompt(40))
    jobs.add("", prompt(8, 900))
    assert jobs.stage.schedule().released == [turn.request_id]


def test_275_a_job_has_one_pin():
    jobs = Jobs()
    jobs.add("a", prompt(40), max_tokens=2)
    jobs.add("a", prompt(70, 500), max_tokens=6)
    jobs.stage.step_until_idle()
    assert (jobs.pinned, jobs.cache.num_used_blocks) == (["a"], 4)
    assert jobs.outcomes == {"replaced": 1}


def test_276_an_expired_pin_is_released_before_the_step_is_planned():
    jobs = Jobs(num_blocks=7)
    jobs.run("a", prompt(50), max_tokens=2)
    running = jobs.add("", prompt(8, 500), max_tokens=30)
    waiting = jobs.add("", prompt(40, 900))
    while not waiting.num_computed_tokens:
        jobs.stage.step()
    # It needs 3 of 6 blocks, of which 2 are in use.
    assert not running.is_finished
    assert jobs.outcomes == {"expired": 1}
    # The turn ended at 2 s.
    assert (jobs.stage.now, waiting.timeline.scheduled_at) == (12.0, 12.0)


def test_276_a_pin_expires_in_an_idle_engine_which_knows_when():
    jobs = Jobs()
    jobs.run("a", prompt(40), max_tokens=2)
    jobs.stage.now += 1.0
    assert jobs.scheduler.on_idle(jobs.stage.now) == 12.0
    jobs.wait(9.0)
    assert (jobs.pinned, jobs.cache.num_used_blocks) == ([], 0)
    assert jobs.scheduler.on_idle(jobs.stage.now) is None


@pytest.mark.parametrize("tool", ["search", ""], ids=["by tool", "278 without names of tools"])
@pytest.mark.parametrize(("gap_s", "pinned"), [(1.0, ["a"]), (5.0, [])])
def test_277_gaps_of_a_second_pin_and_gaps_of_five_do_not(gap_s: float, pinned: list[str], tool: str):
    jobs = Jobs(LogNormalTtl(10.0, 2.0))
    for _ in range(4):
        jobs.stage.now += gap_s
        jobs.hint(jobs.run("a", prompt(40), tool=tool), tool or None)
    assert jobs.pinned == pinned


def test_279_a_turn_with_a_pin_overtakes_turns_without():
    jobs = Jobs(max_num_seqs=1)
    turn = jobs.run("b", prompt(40))
    jobs.add("a", prompt(40, 500))
    warm = jobs.add("b", [*turn.token_ids, 7])
    assert jobs.stage.step().request_ids == [warm.request_id]


def test_282_no_more_requests_are_in_a_step_than_run():
    jobs = Jobs(num_blocks=9)
    for number in range(30):
        jobs.add(f"j{number % 4}", prompt(20 + number, 1000 * (number % 4)), max_tokens=12)
    for _ in range(1000):
        plan = jobs.stage.schedule()
        assert set(plan.request_ids) <= set(jobs.scheduler.running_ids)
        jobs.stage.update(plan)
    assert not jobs.scheduler.has_work
    assert jobs.outcomes["used"] > 0


def test_a_pin_does_not_expire_while_a_turn_of_its_job_waits():
    jobs = Jobs(max_num_seqs=1)
    turn = jobs.run("b", prompt(40), max_tokens=2)
    jobs.add("", prompt(8, 500), max_tokens=20)
    jobs.stage.step()
    following = jobs.add("b", [*turn.token_ids, 7])
    jobs.stage.step_until_idle()
    assert following.timeline.scheduled_at == 23.0
    assert following.num_cached_tokens == 32
    assert jobs.outcomes == {"used": 1}


def test_a_pin_whose_waiting_turn_is_aborted_expires():
    jobs = Jobs(max_num_seqs=1)
    jobs.run("b", prompt(40))
    jobs.scheduler.set_pause(PauseState.ALL)
    following = jobs.add("b", prompt(50))
    jobs.wait(20.0)
    assert jobs.pinned == ["b"]
    jobs.scheduler.abort([following.request_id], jobs.stage.now)
    jobs.wait(0.0)
    assert jobs.outcomes == {"expired": 1}


def test_of_several_outputs_of_a_prompt_the_prompt_is_pinned():
    jobs = Jobs()
    jobs.run("a", prompt(40), max_tokens=30, has_siblings=True)
    assert jobs.cache.num_used_blocks == 2


@pytest.mark.parametrize(("cause", "pinned"), [("client", []), ("stop_string", ["a"])])
def test_a_turn_that_a_stop_string_ends_is_pinned_and_one_that_its_client_leaves_is_not(
    cause: str, pinned: list[str]
):
    jobs = Jobs()
    turn = jobs.add("a", prompt(40), max_tokens=20)
    jobs.stage.step()
    jobs.scheduler.abort([turn.request_id], jobs.stage.now, cause)
    assert jobs.pinned == pinned


def test_a_turn_that_fails_is_not_pinned():
    jobs = Jobs()
    turn = jobs.add("a", prompt(40))
    jobs.stage.update(jobs.stage.schedule(), non_finite=[0])
    assert (turn.finish_reason, jobs.pinned) == (FinishReason.ERROR, [])


def test_without_a_tool_a_pin_is_provisional_until_the_hint():
    jobs = Jobs()
    turn = jobs.run("a", prompt(40), tool="")
    assert jobs.scheduler.on_idle(jobs.stage.now) == jobs.stage.now + PROVISIONAL_S
    jobs.hint(turn, "search")
    jobs.wait(9.0)
    assert jobs.pinned == ["a"]
    jobs.wait(1.0)
    assert jobs.outcomes == {"expired": 1}


def test_a_provisional_pin_expires_without_a_hint_and_a_late_one_is_harmless():
    jobs = Jobs()
    turn = jobs.run("a", prompt(40), tool="")
    jobs.wait(PROVISIONAL_S)
    assert jobs.outcomes == {"expired": 1}
    jobs.hint(turn, "search")
    assert jobs.pinned == []


def test_a_turn_that_calls_no_tool_is_not_pinned_and_the_time_after_it_is_no_gap():
    jobs = Jobs(LogNormalTtl(10.0, 2.0))
    for _ in range(3):
        jobs.hint(jobs.run("a", prompt(40), tool=""), "")
        assert jobs.pinned == []
        jobs.stage.now += 60.0
    jobs.run("a", prompt(40))
    assert (jobs.pinned, jobs.outcomes) == (["a"], {"released": 3})


def test_the_gaps_of_the_tool_of_the_hint_count_for_other_jobs():
    jobs = Jobs(LogNormalTtl(10.0, 2.0))
    for number in range(3):
        jobs.hint(jobs.run(f"j{number}", prompt(40), tool=""), "slow")
        jobs.stage.now += 5.0
        jobs.run(f"j{number}", prompt(40), is_last=True)
    for tool, pinned in ("slow", []), ("other", ["a"]):
        jobs.hint(jobs.run("a", prompt(40), tool=""), tool)
        assert jobs.pinned == pinned


def test_the_time_before_a_further_input_of_a_session_is_no_gap():
    jobs = Jobs(LogNormalTtl(10.0, 2.0))
    turn = JobTurn(tool="tool")
    opened = session("a1", 40, max_tokens=2)
    opened.job, opened.extras[JobTurn] = "a", turn
    jobs.stage.add(opened)
    for _ in range(3):
        jobs.stage.step_until_idle()
        assert jobs.pinned == ["a"]
        jobs.stage.now += 60.0
        jobs.scheduler.extend("a1", replace(segment(7), extras={JobTurn: turn}), jobs.stage.now)
    jobs.stage.step_until_idle()
    assert (jobs.pinned, jobs.outcomes) == (["a"], {"used": 3})


def test_a_hint_of_an_earlier_turn_changes_nothing():
    jobs = Jobs()
    first = jobs.run("a", prompt(40), tool="")
    jobs.run("a", prompt(40))
    jobs.hint(first, "")
    assert jobs.pinned == ["a"]


def pinned_jobs(jobs: Jobs, *names: str) -> None:
    """Three blocks are pinned for each, in this order."""
    for number, name in enumerate(names):
        jobs.run(name, prompt(48, 1000 * number), max_tokens=1)


def test_the_pin_that_expires_first_is_given_up_where_nothing_else_could_be_computed():
    jobs = Jobs(num_blocks=10)
    pinned_jobs(jobs, "a", "b", "c")
    large = jobs.add("", prompt(70, 9000))
    assert jobs.stage.step().request_ids == [large.request_id]
    assert (jobs.pinned, jobs.outcomes) == (["c"], {"given_up": 2})


def test_the_pin_of_a_waiting_turn_is_given_up_last():
    jobs = Jobs(num_blocks=10)
    pinned_jobs(jobs, "a", "b", "c")
    jobs.add("a", prompt(60), blockers=["something"])
    jobs.add("", prompt(70, 9000))
    jobs.step()
    assert (jobs.pinned, jobs.outcomes) == (["a"], {"given_up": 2})


def test_running_requests_are_preempted_before_pins_are_given_up():
    jobs = Jobs(num_blocks=10)
    pinned_jobs(jobs, "a", "b")
    jobs.add("", prompt(30, 8000), max_tokens=8)
    jobs.add("", prompt(14, 9000), max_tokens=8)
    jobs.stage.step_until_idle()
    assert jobs.scheduler.stats().num_preemptions == 1
    assert jobs.outcomes.get("given_up", 0) == 0


def test_pins_are_given_up_before_running_requests_are_preempted_if_so_chosen():
    jobs = Jobs(num_blocks=10, gives_pins_first=True)
    pinned_jobs(jobs, "a", "b")
    jobs.add("", prompt(30, 8000), max_tokens=8)
    jobs.add("", prompt(14, 9000), max_tokens=8)
    jobs.stage.step_until_idle()
    assert jobs.scheduler.stats().num_preemptions == 0
    assert jobs.outcomes.get("given_up", 0) == 1


def test_no_pin_is_given_up_for_a_request_that_waits_while_others_run():
    jobs = Jobs(num_blocks=10, gives_pins_first=True)
    pinned_jobs(jobs, "a", "b")
    jobs.add("", prompt(30, 8000), max_tokens=2)
    waiting = jobs.add("", prompt(40, 9000))
    jobs.step()
    assert (jobs.pinned, waiting.num_computed_tokens) == (["a", "b"], 0)


def test_a_reset_releases_pins():
    jobs = Jobs()
    pinned_jobs(jobs, "a", "b")
    assert jobs.scheduler.reset_prefix_cache(jobs.stage.now)
    assert (jobs.pinned, jobs.outcomes) == ([], {"released": 2})
    assert jobs.scheduler.on_idle(jobs.stage.now) is None
    jobs.run("a", prompt(50))
    assert jobs.pinned == ["a"]


@pytest.mark.parametrize(("seconds_per_token", "pinned"), [(0.1, ["a"]), (0.0001, [])])
def test_while_blocks_are_short_slow_prompts_are_worth_a_pin_and_fast_ones_are_not(
    seconds_per_token: float, pinned: list[str]
):
    jobs = Jobs(UtilityTtl(), num_blocks=10, seconds_per_step=0.5, seconds_per_token=seconds_per_token)
    jobs.run("a", prompt(40))
    jobs.add("", prompt(8, 5000), max_tokens=100)
    waiting = jobs.add("", prompt(100, 9000))
    for _ in range(6):
        jobs.stage.now += 1.0
        jobs.run("a", prompt(40))
    assert (jobs.pinned, waiting.num_computed_tokens) == (pinned, 0)


def test_nothing_is_kept_of_what_has_ended():
    jobs = Jobs()
    for number in range(50):
        jobs.run(f"j{number}", prompt(20), is_last=True)
    kept = vars(jobs.pins)
    assert [len(kept[name]) for name in ("_turns", "_waiting", "_job_of")] == [0, 0, 0]
    assert len(free_block_ids(jobs.stage.pool)) == jobs.cache.num_total_blocks
