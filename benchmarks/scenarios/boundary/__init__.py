"""CPU of the stream between engine and frontend, and time to the first output, beside a bare gRPC stream.

    python -m benchmarks boundary --json benchmarks/results/boundary.json

Two processes: the real servicer over a loop without a model, and the real client with receivers that only
count. Requests are added one at a time, each timed from ADD to its first output, which comes in a step of all
rows; then steps of a token a request come at a set pace. The bare stream is of `grpc.aio` alone: the same
loop, the same messages, which are serialized and parsed but not converted, numbered, kept or handed out. Both
take turns. The CPU of an engine is less what keeping the pace costs; that of a frontend is less what it takes
to hand a step's rows to their receivers, which is stated beside it.

Without a pause (`--interval-ms 0`) steps come as fast as the loop makes them: ours merge where they are still
unread, and `messages_a_step` states how many were sent. With `--pin` each process has one core for all its
threads. What other arrangements cost, and ZeroMQ, is recorded in docs/performance.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.report import Report, Row, percentile
from benchmarks.rig.lines import Line, LineProcess, module

OURS, BARE = "ours", "bare"
MAX_RATIO = 1.1
JUDGED_REQUESTS = 256
_NUM_ROW_REPEATS = 50
_MAX_LOOKS = 100
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Round:
    """One stream at one number of requests, once. Seconds; CPU of all threads of a side."""

    engine_cpu_s: float
    pace_cpu_s: float  # of the same steps in an engine without requests
    frontend_cpu_s: float
    rows_cpu_s: float  # of one step's rows, from columns to their receivers
    num_steps: int
    num_messages: int
    first_output_s: Sequence[float]

    @property
    def engine_us(self) -> float:
        """Microseconds of CPU a step, without keeping the pace."""
        return (self.engine_cpu_s - self.pace_cpu_s) / self.num_steps * 1e6

    @property
    def stream_us(self) -> float:
        """Microseconds of CPU a step on the frontend's side, rows left out."""
        return (self.frontend_cpu_s / self.num_steps - self.rows_cpu_s) * 1e6


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64, JUDGED_REQUESTS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300, help="of a round")
    parser.add_argument("--lead-in", type=int, default=40, help="steps of a round that do not count")
    parser.add_argument("--interval-ms", type=float, default=1.0, help="between steps; 0: none")
    parser.add_argument("--pin", action="store_true", help="bind each process to a core of its own")


def run(options: argparse.Namespace) -> Report:
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        raise SystemExit("needs two cores: both sides work at the same time")
    first, second, *_ = sorted(cores)
    bound = ({first}, {second}) if options.pin else (cores, cores)
    rounds: dict[tuple[int, str], list[Round]] = {
        (number, side): [] for number in options.requests for side in (OURS, BARE)
    }
    for _ in range(options.rounds):
        for (number, side), found in rounds.items():
            found.append(_measure(side, number, options, bound))
    rows = [summary(side, number, found) for (number, side), found in rounds.items()]
    names = ("rounds", "lead_in", "steps", "interval_ms", "pin")
    return Report("boundary", {name: getattr(options, name) for name in names}, rows, shortfalls(rows))


def _measure(side: str, num_requests: int, options: argparse.Namespace, cores: Sequence[set[int]]) -> Round:
    """One turn, in processes of its own. Raises RuntimeError where tokens are missing."""
    num_steps, interval_s = options.steps, options.interval_ms / 1000
    with contextlib.ExitStack() as stack:
        command = module(f"{__name__}.engine", side)
        engine = stack.enter_context(LineProcess(command, cores=cores[0], end_s=2.0))
        command = module(f"{__name__}.frontend", side, engine.facts["address"])
        frontend = stack.enter_context(LineProcess(command, cores=cores[1], end_s=2.0))
        pace_cpu_s = engine.ask(num_steps=num_steps, interval_s=interval_s)["cpu_s"]
        first_output_s = frontend.ask(do="fill", num_requests=num_requests)["first_output_s"]
        idle = frontend.ask(do="count")
        engine.ask(num_steps=options.lead_in, interval_s=interval_s)
        before = _count(frontend, num_requests * options.lead_in, since=idle)
        engine_cpu_s = engine.ask(num_steps=num_steps, interval_s=interval_s)["cpu_s"]
        after = _count(frontend, num_requests * num_steps, since=before)
        rows = frontend.ask(do="rows", num_rows=num_requests, num_repeats=_NUM_ROW_REPEATS)
    return Round(
        engine_cpu_s,
        pace_cpu_s,
        after["cpu_s"] - before["cpu_s"],
        rows["rows_s"],
        num_steps,
        after["num_messages"] - before["num_messages"],
        first_output_s,
    )


def _count(frontend: LineProcess, num_tokens: int, since: Line) -> Line:
    """The frontend's counters once that number of tokens has come."""
    for _ in range(_MAX_LOOKS):
        counters = frontend.ask(do="count")
        if (num_come := counters["num_tokens"] - since["num_tokens"]) == num_tokens:
            return counters
        time.sleep(_LOOK_S)
    raise RuntimeError(f"{num_come} tokens came where {num_tokens} were due")


def summary(side: str, num_requests: int, rounds: Sequence[Round]) -> Row:
    """Medians over the rounds, first outputs of all rounds together."""
    times_us = [seconds * 1e6 for each in rounds for seconds in each.first_output_s]
    return {
        "arrangement": side,
        "requests": num_requests,
        "engine_us": statistics.median(each.engine_us for each in rounds),
        "pace_us": statistics.median(each.pace_cpu_s / each.num_steps * 1e6 for each in rounds),
        "stream_us": statistics.median(each.stream_us for each in rounds),
        "rows_us": statistics.median(each.rows_cpu_s * 1e6 for each in rounds),
        "first_p50_us": percentile(times_us, 50),
        "first_p99_us": percentile(times_us, 99),
        "messages_a_step": sum(each.num_messages for each in rounds) / sum(each.num_steps for each in rounds),
    }


def shortfalls(rows: Sequence[Row]) -> list[str]:
    """Where ours costs more than the bare stream by more than is promised, at 256 requests."""
    by_side = {row["arrangement"]: row for row in rows if row["requests"] == JUDGED_REQUESTS}
    if len(by_side) < 2:
        return []
    found = []
    for column in ("engine_us", "stream_us", "first_p50_us"):
        ours, bare = (float(str(by_side[side][column])) for side in (OURS, BARE))
        if ours > MAX_RATIO * bare:
            found.append(f"{column} is {ours:.1f}, {ours / bare:.2f} times the bare {bare:.1f} ({MAX_RATIO})")
    return found
