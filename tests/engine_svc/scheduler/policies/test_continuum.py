"""Jobs run by their first request, those with retained blocks first; and who is preempted."""

from __future__ import annotations

from engine_svc.core.request import Request
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.scheduler.policies.continuum import Continuum
from tests.engine_svc.scheduler.fakes import Stage, ids_of, request


def turn(request_id: str, job: str, num_tokens: int = 8) -> Request:
    made = request(request_id, num_tokens)
    made.job = job
    return made


def retain(stage: Stage, job: str) -> None:
    """A block is retained for a job."""
    block_ids = stage.pool.allocate(1)
    stage.cache.retained.add(job, block_ids)
    stage.pool.release(block_ids)


def admitted(stage: Stage) -> list[str]:
    return [one.request_id for one in stage.step().admitted]


def test_jobs_run_in_the_order_of_their_first_requests_and_others_in_that_of_their_own():
    stage = Stage(policy="continuum", max_num_seqs=1)
    stage.add(turn("a1", "a"), turn("plain", ""), turn("b1", "b"))
    stage.add(turn("a2", "a"), turn("late", ""), turn("b2", "b"))
    order = [plan.admitted[0].request_id for plan in stage.step_until_idle() if plan.admitted]
    assert order == ["a1", "a2", "plain", "b1", "b2", "late"]


# Row 279.
def test_a_turn_whose_blocks_are_retained_overtakes_those_without():
    stage = Stage(policy="continuum", max_num_seqs=1)
    retain(stage, "b")
    stage.add(turn("a1", "a"), turn("b1", "b"))
    assert admitted(stage) == ["b1"]


def test_what_is_retained_or_released_after_the_arrival_counts_as_well():
    stage = Stage(policy="continuum", max_num_seqs=1)
    retain(stage, "b")
    stage.add(turn("a1", "a"), turn("b1", "b"), turn("c1", "c"), turn("d1", "d"))
    stage.cache.retained.release("b")
    retain(stage, "c")
    retain(stage, "d")
    order = [plan.admitted[0].request_id for plan in stage.step_until_idle() if plan.admitted]
    assert order == ["c1", "d1", "a1", "b1"]


def test_a_waiting_turn_ends_in_either_part_of_the_queue():
    stage = Stage(policy="continuum", max_num_seqs=1)
    retain(stage, "b")
    stage.add(turn("a1", "a"), turn("b1", "b"))
    stage.cache.retained.release("b")
    stage.scheduler.abort(["b1", "a1"], now=1.0)
    assert not stage.scheduler.has_work


# Row 280.
def test_the_last_whose_job_retains_no_blocks_is_preempted_else_the_last():
    stage = Stage(policy="continuum")
    policy = Continuum(SchedulerConfig(max_model_len=64))
    running = [turn("a1", "a"), turn("b1", "b"), turn("c1", "c")]
    victims = [policy.pick_victim(running, stage.cache)]
    for job in ("c", "b", "a"):
        retain(stage, job)
        victims.append(policy.pick_victim(running, stage.cache))
    assert ids_of(victims) == ["c1", "b1", "a1", "c1"]


def test_a_preempted_turn_keeps_its_position():
    stage = Stage(policy="continuum", max_num_seqs=2)
    stage.add(turn("a1", "a"), turn("b1", "b"), turn("c1", "c"))
    stage.step()
    stage.preempt_running()
    assert stage.scheduler.waiting_ids == ["a1", "b1", "c1"]
