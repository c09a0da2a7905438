"""Jobs of agents whose contexts are larger than the cache, under `continuum` and `fcfs`, in virtual time.

    python -m benchmarks agents --json benchmarks/results/agents.json
    python -m benchmarks agents --shapes BFCL --times 2 --prompt-speeds 1 --seeds 7
    python -m benchmarks agents --real-time M2 --shapes BFCL --times 2 --prompt-speeds 1 --seeds 1 \
        --jobs 20 --open 8 --max-context 4096 --json benchmarks/results/agents_real_time.json

A real scheduler with its cache, policy and pins; in place of a model, each step takes the time that
`--step-cost` says. As many jobs are open at all times as have 1.5, 2 and 4 times the tokens of the cache: a
further one begins when one ends. Turns, tokens and the times of tools are drawn per job, from a seed. With
`--real-time MODEL` engine processes serve the same jobs as well, for one contestant after the other.

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
import asyncio
import itertools
import math
import multiprocessing
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.report import Report, Row, Value, percentile, print_table
from benchmarks.scenarios.agents import real_time
from benchmarks.scenarios.agents.virtual_time import BLOCK_SIZE, Contestant, Outcome, StepCost, VirtualEngine
from benchmarks.scenarios.agents.workload import SHAPES, Job, draw_jobs
from engine_svc.features.pins.estimator import FixedTtl, LogNormalTtl, UtilityTtl

# Of the 135 M Llama (M2) on two cores of Zen 5, bfloat16, by results/engine_M2.json (0e349af2): a step of one
# decode takes 8.0 ms and one of a prompt of 128 tokens 65.2 ms, which makes the first two. The KV of a token,
# 23,040 bytes, is read at 39 GB/s.
M2_STEP_COST = StepCost(base_s=0.0076, token_s=0.00045, read_s=0.00000059)
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
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(1, 13)))
    parser.add_argument("--jobs", type=int, default=48, help="of each seed")
    parser.add_argument("--open", type=int, default=16, help="jobs that are open at once")
    parser.add_argument("--max-context", type=int, default=8192, help="tokens of a job at its end")
    parser.add_argument("--processes", type=int, default=2, help="that compute; results do not depend on it")
    parser.add_argument(
        "--step-cost",
        type=_step_cost,
        default=M2_STEP_COST,
        metavar="STEP,TOKEN,READ",
        help="seconds of a step, of a token in it, and of each token of context that it reads; default: "
        "those of a Llama of 135 M on two cores",
    )
    parser.add_argument(
        "--real-time", type=Path, metavar="MODEL", help="folder of a model that serves the jobs as well"
    )


def run(options: argparse.Namespace) -> Report:
    cost: StepCost = options.step_cost
    rows: list[Row] = []
    for shape in options.shapes:
        jobs = [draw_jobs(SHAPES[shape], options.jobs, options.max_context, seed) for seed in options.seeds]
        for speed, times in itertools.product(options.prompt_speeds, options.times):
            load = Load(jobs, options.open, times, options.max_context)
            of_cell = compare(load, replace(cost, prompt_speed=speed), options.processes)
            panel = shape if speed == 1 else f"{shape}, prompts {speed:g} times as fast"
            rows += _in_cell(panel, speed, times, of_cell)
        for times in options.times if options.real_time else ():
            load = Load(jobs, options.open, times, options.max_context)
            rows += _in_cell(f"{shape}, real time", 1.0, times, compare_in_real_time(load, options.real_time))
    print_table(promises(rows))
    settings = {
        "jobs": options.jobs,
        "open": options.open,
        "seeds": [float(seed) for seed in options.seeds],
        "step_s": cost.base_s,
        "token_s": cost.token_s,
        "read_s": cost.read_s,
        "block_size": BLOCK_SIZE,
        "max_context": options.max_context,
        "model": options.real_time and options.real_time.name,
    }
    return Report("agents", settings, rows, shortfalls(rows))


@dataclass(frozen=True, slots=True)
class Load:
    """Jobs by seed, of which some are open at once, on a cache that is smaller than these by a factor."""

    jobs: Sequence[Sequence[Job]]
    num_open: int
    times: float
    max_context: int

    def num_blocks(self, jobs: Sequence[Job]) -> int:
        """Of the cache, for the jobs of one seed."""
        num_open_tokens = self.num_open * statistics.mean(context for job in jobs for context in job.contexts)
        return 1 + math.ceil(num_open_tokens / self.times / BLOCK_SIZE)


def compare(load: Load, cost: StepCost, num_processes: int) -> list[dict[str, Value]]:
    """A row for each contestant in virtual time, with ratios to the first."""
    runs = [
        (contestant, jobs, load.num_open, load.num_blocks(jobs), load.max_context, cost)
        for contestant in CONTESTANTS
        for jobs in load.jobs
    ]
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        outcomes = pool.starmap(_serve, runs, chunksize=1)
    num_seeds = len(load.jobs)
    of_contestants = [outcomes[first : first + num_seeds] for first in range(0, len(outcomes), num_seeds)]
    return _rows(CONTESTANTS, of_contestants)


def compare_in_real_time(load: Load, model: Path) -> list[dict[str, Value]]:
    """The same of an engine with a model, for those contestants that an engine can be."""
    offered = [contestant for contestant in CONTESTANTS if real_time.is_offered(contestant)]
    outcomes = [
        [
            asyncio.run(
                real_time.serve(
                    contestant, model, jobs, load.num_open, load.num_blocks(jobs), load.max_context, _SPREAD_S
                )
            )
            for jobs in load.jobs
        ]
        for contestant in offered
    ]
    return _rows(offered, outcomes)


def _serve(
    contestant: Contestant,
    jobs: Sequence[Job],
    num_open: int,
    num_blocks: int,
    max_context: int,
    cost: StepCost,
) -> Outcome:
    return VirtualEngine(contestant, cost, num_blocks, max_context).run(jobs, num_open, _SPREAD_S)


def _in_cell(panel: str, speed: float, times: float, rows: Sequence[Row]) -> list[Row]:
    print(f"{panel}, {times:g} times the cache: done", flush=True)
    return [{"panel": panel, "prompt_speed": speed, "times": times, **row} for row in rows]


def _rows(contestants: Sequence[Contestant], outcomes: Sequence[Sequence[Outcome]]) -> list[dict[str, Value]]:
    rows: list[dict[str, Value]] = [
        {"contestant": contestant.name, **_figures_of(of_seeds)}
        for contestant, of_seeds in zip(contestants, outcomes, strict=True)
    ]
    for row in rows:
        row |= {f"{name}_ratio": _number(row, name) / _number(rows[0], name) for name in _COMPARED}
    return rows


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


@dataclass(frozen=True, slots=True)
class _Check:
    """A promise in one cell for one contestant: a column of its row, and the most that it may be."""

    where: str
    contestant: str
    promise: str
    column: str
    value: float
    limit: float

    @property
    def is_kept(self) -> bool:
        return self.value <= self.limit


def promises(rows: Sequence[Row]) -> list[Row]:
    """How often each promise is kept by each contestant, and the cell that is nearest to its limit."""
    checks: dict[tuple[str, str, str], list[_Check]] = {}
    for check in _checks(rows):
        checks.setdefault((check.contestant, check.column, check.promise), []).append(check)
    table: list[Row] = []
    for (contestant, column, promise), group in checks.items():
        worst = max(group, key=lambda check: check.value / check.limit)
        table.append(
            {
                "contestant": contestant,
                "promise": f"{column}: at most {promise}",
                "kept": f"{sum(check.is_kept for check in group)} of {len(group)}",
                "worst": f"{worst.value:.3f} of {worst.limit:.3f}, {worst.where}",
            }
        )
    return table


def shortfalls(rows: Sequence[Row]) -> list[str]:
    """Promises that were not kept, in words."""
    return [
        f"{check.where}, {check.contestant}: {check.column} is {check.value:.3f}, "
        f"at most {check.limit:.3f} is promised, {check.promise}"
        for check in _checks(rows)
        if not check.is_kept
    ]


def _checks(rows: Sequence[Row]) -> Iterator[_Check]:
    cells: dict[tuple[str, float], dict[str, Row]] = {}
    for row in rows:
        cell = cells.setdefault((str(row["panel"]), _number(row, "times")), {})
        cell[str(row["contestant"])] = row
    for (panel, times), cell in cells.items():
        for name in _PROMISING:
            for promise, column, limit in _limits(cell, name, times):
                where = f"{panel}, {times:g} times the cache"
                yield _Check(where, name, promise, column, _number(cell[name], column), limit)


def _limits(cell: Mapping[str, Row], name: str, times: float) -> Iterator[tuple[str, str, float]]:
    """Promises of a contestant in a cell: in words, of which column, and the most that it may be."""
    fcfs = cell[_FCFS]
    if _number(fcfs, "prompt_speed") > 1:
        yield f"{_TOLERANCE:g} times fcfs's where prompts are fast", "mean_s_ratio", _TOLERANCE
        return
    yield f"{_MOST_RECOMPUTED:g} times fcfs's", "recomputed_ratio", _MOST_RECOMPUTED
    most_mean = _MOST_MEAN_AT_4 if times >= 4 else _MOST_MEAN
    yield f"{_MOST_MEAN:g} times fcfs's, at 4 times {_MOST_MEAN_AT_4:g}", "mean_s_ratio", most_mean
    for column in ("mean_s_ratio", "p95_s_ratio"):
        for other in (_FCFS, *_IN_ORDER_OF_TURNS):
            # An engine has no pins in the order of turns.
            if other in cell:
                yield f"that of {other}", column, _number(cell[other], column)
        best = min(_number(cell[other], column) for other in _IN_ORDER_OF_JOBS)
        yield f"{_TOLERANCE:g} times the best other in the order of jobs", column, _TOLERANCE * best
    yield "the 95th percentile under fcfs", "longest_wait_s", _number(fcfs, "p95_s")


def _number(row: Row, column: str) -> float:
    value = row[column]
    assert isinstance(value, float | int)
    return value


def _step_cost(text: str) -> StepCost:
    base_s, token_s, read_s = map(float, text.split(","))
    return StepCost(base_s, token_s, read_s)
