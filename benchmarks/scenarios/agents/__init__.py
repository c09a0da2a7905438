"""Jobs of agents whose contexts are larger than the cache, under `continuum` and `fcfs`, in virtual time.

    python -m benchmarks agents --json benchmarks/results/agents.json
    python -m benchmarks agents --shapes BFCL --times 2 --prompt-speeds 1 --seeds 7

A real scheduler with its cache, policy and pins; in place of a model, each step takes the time that
`--step-cost` says. As many jobs are open at all times as have 1.5, 2 and 4 times the tokens of the cache: a
further one begins when one ends. Turns, tokens and the times of tools are drawn per job, from a seed.

Compared are `fcfs`; `continuum` with each rule for the time of a pin, and without pins; and pins in the order
of turns (`fcfs` with the feature of pins, which no engine offers). Recomputed are tokens beyond one
computation of each; a job's completion is counted from its first turn's arrival, a turn's wait until its
first token. All figures are over the seeds together, and as ratios to those of `fcfs`. Promised of `utility`,
whatever gives way first (`--continuum-pressure`):

- recomputed tokens at most 0.5, mean completion at most 0.8, at 4 times 0.9;
- mean and 95th percentile of completions below those of `fcfs` and of pins in the order of turns, and at most
  1.05 times the best of the other rules and of no pins;
- no turn waits longer than the 95th percentile of completions under `fcfs`;
- where prompts are computed ten times as fast, so that pins save little: mean completion at most 1.05.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from benchmarks.report import Report, Row, Value, percentile
from benchmarks.scenarios.agents.virtual_time import BLOCK_SIZE, Contestant, Outcome, StepCost, VirtualEngine
from benchmarks.scenarios.agents.workload import SHAPES, Job, draw_jobs
from engine_svc.features.pins.estimator import FixedTtl, LogNormalTtl, UtilityTtl

# Of the 135 M Llama (M2) on two cores of Zen 5, bfloat16, by results/engine_M2.json (0e349af2): a step of one
# decode takes 8.0 ms and one of a prompt of 128 tokens 65.2 ms, which makes the first two. The KV of a token,
# 23,040 bytes, is read at 39 GB/s.
M2_STEP_COST = StepCost(base_s=0.0076, token_s=0.00045, read_s=0.00000059)
_MAX_CONTEXT = 8192
_SPREAD_S = 10.0  # in which the first jobs arrive
_FCFS = "fcfs"
CONTESTANTS = (
    Contestant(_FCFS, "fcfs"),
    Contestant("utility", "continuum", UtilityTtl()),
    Contestant("utility, pins-first", "continuum", UtilityTtl(), gives_pins_first=True),
    Contestant("lognormal 2 s", "continuum", LogNormalTtl(10.0, 2.0)),
    Contestant("fixed 10 s", "continuum", FixedTtl(10.0)),
    Contestant("no pins", "continuum", FixedTtl(0.0)),
    Contestant("turns, lognormal 2 s", "fcfs", LogNormalTtl(10.0, 2.0)),
    Contestant("turns, fixed 10 s", "fcfs", FixedTtl(10.0)),
)
_COMPARED = ("recomputed", "mean_s", "p95_s")
_PROMISING = ("utility", "utility, pins-first")
_IN_ORDER_OF_JOBS = ("lognormal 2 s", "fixed 10 s", "no pins")
_IN_ORDER_OF_TURNS = ("turns, lognormal 2 s", "turns, fixed 10 s")
_MOST_RECOMPUTED = 0.5
_MOST_MEAN, _MOST_MEAN_AT_4 = 0.8, 0.9
_TOLERANCE = 1.05


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES), metavar="SHAPE")
    parser.add_argument(
        "--times", nargs="+", type=float, default=[1.5, 2.0, 4.0], help="tokens of open jobs, in caches"
    )
    parser.add_argument("--prompt-speeds", nargs="+", type=float, default=[1.0, 10.0], metavar="FACTOR")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=48, help="of each seed")
    parser.add_argument("--open", type=int, default=16, help="jobs that are open at once")
    parser.add_argument("--processes", type=int, default=2, help="that compute; results do not depend on it")
    parser.add_argument(
        "--step-cost",
        type=_step_cost,
        default=M2_STEP_COST,
        metavar="STEP,TOKEN,READ",
        help="seconds of a step, of a token in it, and of each token of context that it reads; default: "
        "those of a Llama of 135 M on two cores",
    )


def run(options: argparse.Namespace) -> Report:
    cost: StepCost = options.step_cost
    rows: list[Row] = []
    for shape in options.shapes:
        jobs = [draw_jobs(SHAPES[shape], options.jobs, _MAX_CONTEXT, seed) for seed in options.seeds]
        for speed, times in itertools.product(options.prompt_speeds, options.times):
            of_cell = compare(jobs, options.open, times, replace(cost, prompt_speed=speed), options.processes)
            panel = shape if speed == 1 else f"{shape}, prompts {speed:g} times as fast"
            cell = {"panel": panel, "prompt_speed": speed, "times": times}
            rows += [{**cell, **row} for row in of_cell]
            print(f"{panel}, {times:g} times the cache: done", flush=True)
    settings = {
        "jobs": options.jobs,
        "open": options.open,
        "seeds": [float(seed) for seed in options.seeds],
        "step_s": cost.base_s,
        "token_s": cost.token_s,
        "read_s": cost.read_s,
        "block_size": BLOCK_SIZE,
        "max_context": _MAX_CONTEXT,
    }
    return Report("agents", settings, rows, shortfalls(rows))


def compare(
    jobs_of_seeds: Sequence[Sequence[Job]], num_open: int, times: float, cost: StepCost, num_processes: int
) -> list[dict[str, Value]]:
    """A row for each contestant, with ratios to the first."""
    runs = [(contestant, jobs, num_open, times, cost) for contestant in CONTESTANTS for jobs in jobs_of_seeds]
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        outcomes = pool.starmap(_serve, runs, chunksize=1)
    rows: list[dict[str, Value]] = []
    for index, contestant in enumerate(CONTESTANTS):
        first = index * len(jobs_of_seeds)
        figures = _figures_of(outcomes[first : first + len(jobs_of_seeds)])
        rows.append({"contestant": contestant.name, **figures})
    for row in rows:
        row |= {f"{name}_ratio": _number(row, name) / _number(rows[0], name) for name in _COMPARED}
    return rows


def _serve(
    contestant: Contestant, jobs: Sequence[Job], num_open: int, times: float, cost: StepCost
) -> Outcome:
    num_open_tokens = num_open * statistics.mean(context for job in jobs for context in job.contexts)
    num_blocks = 1 + math.ceil(num_open_tokens / times / BLOCK_SIZE)
    engine = VirtualEngine(contestant, cost, num_blocks, _MAX_CONTEXT)
    return engine.run(jobs, num_open, _SPREAD_S)


def _figures_of(outcomes: Sequence[Outcome]) -> dict[str, Value]:
    completions_s = [seconds for outcome in outcomes for seconds in outcome.completions_s]
    num_needed = sum(outcome.num_needed_tokens for outcome in outcomes)
    return {
        "recomputed": sum(outcome.num_tokens for outcome in outcomes) / num_needed - 1,
        "mean_s": statistics.mean(completions_s),
        "p95_s": percentile(completions_s, 95),
        "longest_wait_s": max(max(outcome.waits_s) for outcome in outcomes),
        "mean_s_by_seed": [statistics.mean(outcome.completions_s) for outcome in outcomes],
    }


def shortfalls(rows: Sequence[Row]) -> list[str]:
    """Promises that were not kept, in words."""
    cells: dict[tuple[str, float], dict[str, Row]] = {}
    for row in rows:
        cell = cells.setdefault((str(row["panel"]), _number(row, "times")), {})
        cell[str(row["contestant"])] = row
    return [
        f"{panel}, {times:g} times the cache, {name}: {broken}"
        for (panel, times), cell in cells.items()
        for name in _PROMISING
        for broken in _broken(cell, name, times)
    ]


def _broken(cell: Mapping[str, Row], name: str, times: float) -> Iterator[str]:
    row, fcfs = cell[name], cell[_FCFS]
    if _number(row, "prompt_speed") > 1:
        yield from _above(row, "mean_s_ratio", _TOLERANCE, "promised")
        return
    yield from _above(row, "recomputed_ratio", _MOST_RECOMPUTED, "promised")
    yield from _above(row, "mean_s_ratio", _MOST_MEAN_AT_4 if times >= 4 else _MOST_MEAN, "promised")
    for column in ("mean_s_ratio", "p95_s_ratio"):
        for other in (_FCFS, *_IN_ORDER_OF_TURNS):
            yield from _above(row, column, _number(cell[other], column), f"that of {other}")
        best = min(_number(cell[other], column) for other in _IN_ORDER_OF_JOBS)
        yield from _above(row, column, _TOLERANCE * best, f"{_TOLERANCE} times the best")
    yield from _above(row, "longest_wait_s", _number(fcfs, "p95_s"), "the 95th percentile under fcfs")


def _above(row: Row, column: str, limit: float, what: str) -> Iterator[str]:
    value = _number(row, column)
    if value > limit:
        yield f"{column} is {value:.3f}, at most {limit:.3f} is {what}"


def _number(row: Row, column: str) -> float:
    value = row[column]
    assert isinstance(value, float | int)
    return value


def _step_cost(text: str) -> StepCost:
    base_s, token_s, read_s = map(float, text.split(","))
    return StepCost(base_s, token_s, read_s)
