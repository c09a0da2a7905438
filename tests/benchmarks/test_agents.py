"""Jobs of agents in virtual time, and what is promised of them."""

from __future__ import annotations

import pytest

from benchmarks.report import Row
from benchmarks.scenarios.agents import CONTESTANTS, M2_STEP_COST, Load, compare, promises, shortfalls
from benchmarks.scenarios.agents.real_time import is_offered
from benchmarks.scenarios.agents.virtual_time import BLOCK_SIZE, Outcome, VirtualEngine
from benchmarks.scenarios.agents.workload import SHAPES, Job, draw_jobs

JOBS = draw_jobs(SHAPES["BFCL"], num_jobs=6, max_context=4096, seed=1)
FCFS = CONTESTANTS[0]


def serve(jobs: list[Job], num_blocks: int) -> Outcome:
    return VirtualEngine(FCFS, M2_STEP_COST, num_blocks, 4096).run(jobs, num_open=3, spread_s=1.0)


def test_jobs_are_a_function_of_the_seed_and_end_before_their_context_is_too_long():
    assert draw_jobs(SHAPES["BFCL"], 6, 4096, 1) == JOBS
    assert draw_jobs(SHAPES["BFCL"], 6, 4096, 2) != JOBS
    assert max(job.contexts[-1] for job in JOBS) <= 4096


def test_a_cache_for_all_jobs_leaves_the_ends_of_blocks_to_compute_again():
    outcome = serve(JOBS, num_blocks=2000)
    num_turns = sum(len(job.turns) for job in JOBS)
    assert len(outcome.completions_s) == len(JOBS)
    assert len(outcome.waits_s) == num_turns
    assert 0 <= outcome.num_tokens - outcome.num_needed_tokens < num_turns * BLOCK_SIZE


def test_a_job_alone_takes_its_steps_and_its_tools():
    (completion_s,) = serve(JOBS[:1], num_blocks=2000).completions_s
    turns = JOBS[0].turns
    num_tokens, num_steps = JOBS[0].contexts[-1], sum(turn.num_output_tokens for turn in turns)
    least_s = sum(turn.gap_s for turn in turns[:-1])
    least_s += num_steps * M2_STEP_COST.base_s + (num_tokens - 1) * M2_STEP_COST.token_s
    num_blocks_again = len(turns) * BLOCK_SIZE
    most_s = least_s + num_blocks_again * M2_STEP_COST.token_s + num_steps * num_tokens * M2_STEP_COST.read_s
    assert least_s <= completion_s <= most_s


def test_pins_leave_fewer_tokens_to_compute_again_than_order_alone():
    load = Load([JOBS], num_open=4, times=2.0, max_context=4096)
    compared = compare(load, M2_STEP_COST, num_processes=1)
    rows = {str(row["contestant"]): row for row in compared}
    assert rows["fcfs"]["recomputed_ratio"] == 1.0
    assert rows["utility"]["recomputed"] < rows["no pins"]["recomputed"]  # type: ignore[operator]


def cell(prompt_speed: float = 1.0, times: float = 2.0, **changes: float) -> list[Row]:
    """A cell in which all is kept, with changes of the rows of `utility`."""
    ratios = {"fcfs": 1.0, "turns, fixed 10 s": 0.8, "turns, lognormal 2 s": 0.75}
    rows: list[Row] = []
    for contestant in CONTESTANTS:
        ratio = ratios.get(contestant.name, 0.4)
        figures = {"recomputed_ratio": ratio, "mean_s_ratio": ratio, "p95_s_ratio": ratio}
        figures |= {"p95_s": 100.0 * ratio, "longest_wait_s": 50.0}
        figures |= changes if contestant.name == "utility" else {}
        cell = {"prompt_speed": prompt_speed, "times": times}
        rows.append({"panel": "x", "contestant": contestant.name, **cell, **figures})
    return rows


@pytest.mark.parametrize(
    ("column", "value"),
    [("recomputed_ratio", 0.51), ("mean_s_ratio", 0.43), ("p95_s_ratio", 0.43), ("longest_wait_s", 101.0)],
)
def test_a_figure_above_its_limit_breaks_a_promise(column: str, value: float):
    assert shortfalls(cell()) == []
    (broken,) = shortfalls(cell(**{column: value}))
    assert broken.startswith(f"x, 2 times the cache, utility: {column} is {value:.3f}, at most ")


def test_a_mean_above_four_fifths_is_promised_only_at_four_times_the_cache():
    broken = [shortfalls(cell(times=times, mean_s_ratio=0.85)) for times in (2.0, 4.0)]
    assert [any("0.800 is promised, 0.8 times" in line for line in lines) for lines in broken] == [
        True,
        False,
    ]


@pytest.mark.parametrize(("mean", "num_broken"), [(1.05, 0), (1.06, 1)])
def test_of_fast_prompts_the_mean_alone_is_promised(mean: float, num_broken: int):
    assert len(shortfalls(cell(10.0, recomputed_ratio=2.0, mean_s_ratio=mean))) == num_broken


def test_each_promise_is_counted_over_the_cells_and_the_one_nearest_to_its_limit_is_shown():
    rows = [*cell(times=2.0, recomputed_ratio=0.6), *cell(times=4.0)]
    first = promises(rows)[0]
    assert (first["contestant"], first["kept"]) == ("utility", "1 of 2")
    assert first["worst"] == "0.600 of 0.500, x, 2 times the cache"


def test_an_engine_is_measured_without_the_pins_that_it_does_not_offer():
    offered = [contestant for contestant in CONTESTANTS if is_offered(contestant)]
    assert [one.name for one in CONTESTANTS if one not in offered] == [
        "turns, lognormal 2 s",
        "turns, fixed 10 s",
    ]
    rows = [row for row in cell(mean_s_ratio=0.43) if row["contestant"] in {one.name for one in offered}]
    assert len(shortfalls(rows)) == 1
