"""What the stream between engine and frontend costs, in each arrangement, beside the peer's ZeroMQ.

    python -m benchmarks.boundary --json benchmarks/results/boundary.json --plot boundary.png

Two processes: the real servicer over a loop without a model, and the real client with receivers that only
count. A token a request a step, at a set pace, as a decode has it; and one request at a time that joins a
step of all, timed from `add` to its first output. All arrangements take turns in each round. The CPU of an
engine is less what keeping the pace costs; that of a frontend is less what it takes to hand a step's rows to
their receivers, which is stated beside it.

Without a pause (`--interval-ms 0`) steps come as fast as the loop makes them: ours merge where nobody has
read them yet, and `messages_a_step` says how many were sent. With `--pin` each process has one core for all
its threads, which then wait for each other. The peer's side needs pyzmq and msgspec; where one of the
arrangements does not run, there are no figures at all.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# So that it runs as a file, too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.boundary_control import ContestantProcess, Line
from benchmarks.boundary_figures import Arrangement, Round, shortfalls, summary
from benchmarks.boundary_plot import plot
from benchmarks.report import Report, print_table

OURS = Arrangement("thread", "aio", "tcp", "ours")
PEER = Arrangement("thread", "zmq", "unix", "default")
ARRANGEMENTS = (
    OURS,
    Arrangement("thread", "aio", "unix", "ours"),
    Arrangement("thread", "aio", "tcp", "default"),
    Arrangement("thread", "sync", "tcp", "ours"),
    Arrangement("thread", "sync", "unix", "ours"),
    Arrangement("child", "aio", "tcp", "ours"),
    Arrangement("child", "aio", "unix", "ours"),
    Arrangement("child", "sync", "tcp", "ours"),
    Arrangement("thread", "bare", "tcp", "ours"),
    Arrangement("thread", "bare", "unix", "ours"),
    PEER,
    Arrangement("thread", "zmq", "tcp", "default"),
)
_NUM_REQUESTS = (1, 16, 64, 256, 1024)
_NUM_ROW_REPEATS = 50
_MAX_LOOKS = 100
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Shape:
    """How long each takes its turn."""

    num_lead_in: int  # steps before those that count: others have used the core's caches
    num_steps: int
    interval_s: float
    num_first_outputs: int


class Pair:
    """An engine and a frontend in one arrangement."""

    def __init__(self, engine: ContestantProcess, frontend: ContestantProcess) -> None:
        self._engine = engine
        self._frontend = frontend

    def measure(self, num_requests: int, shape: Shape) -> Round:
        """One turn. Raises RuntimeError where tokens are missing."""
        self._frontend.ask(do="fill", num_requests=0)
        pace_cpu_s = self._run_steps(shape, shape.num_steps)
        # Of the requests in flight, one is that whose first output is timed.
        self._frontend.ask(do="fill", num_requests=num_requests - 1)
        timed = self._frontend.ask(do="first_outputs", num_samples=shape.num_first_outputs)
        self._frontend.ask(do="fill", num_requests=num_requests)
        idle = self._frontend.ask(do="count")
        self._run_steps(shape, shape.num_lead_in)
        before = self._count(num_requests * shape.num_lead_in, since=idle)
        engine_cpu_s = self._run_steps(shape, shape.num_steps)
        after = self._count(num_requests * shape.num_steps, since=before)
        rows = self._frontend.ask(do="rows", num_rows=num_requests, num_repeats=_NUM_ROW_REPEATS)
        return Round(
            engine_cpu_s=engine_cpu_s,
            pace_cpu_s=pace_cpu_s,
            frontend_cpu_s=after["cpu_s"] - before["cpu_s"],
            rows_cpu_s=rows["rows_s"],
            num_steps=shape.num_steps,
            num_messages=after["num_messages"] - before["num_messages"],
            num_bytes=after["num_bytes"] - before["num_bytes"],
            first_output_s=timed["first_output_s"],
        )

    def _run_steps(self, shape: Shape, num_steps: int) -> float:
        answer = self._engine.ask(num_steps=num_steps, interval_s=shape.interval_s)
        return float(answer["cpu_s"])

    def _count(self, num_tokens: int, since: Line) -> Line:
        """The frontend's counters once so many tokens have come."""
        for _ in range(_MAX_LOOKS):
            counters = self._frontend.ask(do="count")
            num_come = counters["num_tokens"] - since["num_tokens"]
            if num_come == num_tokens:
                return counters
            time.sleep(_LOOK_S)
        raise RuntimeError(f"{num_come} tokens came where {num_tokens} were due")


def start(
    arrangement: Arrangement, stack: contextlib.ExitStack, folder: Path, cores: Sequence[set[int]]
) -> Pair:
    """Start both processes of an arrangement; `cores` are the engine's and the frontend's."""
    path = folder / arrangement.name.replace(" ", "-")
    if arrangement.server == "zmq":
        listen = f"ipc://{path}" if arrangement.transport == "unix" else "tcp://127.0.0.1:*"
        engine = ContestantProcess("benchmarks.boundary_peer", [f"--listen={listen}"], cores[0])
        flags = ["--side=peer"]
    else:
        listen = f"unix:{path}" if arrangement.transport == "unix" else "127.0.0.1:0"
        experiments = f"--experiments={arrangement.experiments}"
        words = [
            f"--listen={listen}",
            f"--server={arrangement.server}",
            f"--loop={arrangement.loop}",
            experiments,
        ]
        engine = ContestantProcess("benchmarks.boundary_engine", words, cores[0])
        side = "bare" if arrangement.server == "bare" else "ours"
        flags = [f"--side={side}", experiments]
    stack.enter_context(engine)
    address = f"--address={engine.facts['address']}"
    frontend = ContestantProcess("benchmarks.boundary_frontend", [address, *flags], cores[1])
    stack.enter_context(frontend)
    return Pair(engine, frontend)


def measure(
    arrangements: Sequence[Arrangement],
    numbers: Sequence[int],
    shape: Shape,
    num_rounds: int,
    cores: Sequence[set[int]],
) -> list[dict[str, str | int | float]]:
    """The rows of the report, by requests in flight and then by arrangement."""
    rounds: dict[tuple[int, Arrangement], list[Round]] = {
        (number, arrangement): [] for number in numbers for arrangement in arrangements
    }
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        pairs = {each: start(each, stack, Path(folder), cores) for each in arrangements}
        for _ in range(num_rounds):
            for number, arrangement in rounds:
                rounds[number, arrangement].append(pairs[arrangement].measure(number, shape))
    return [summary(arrangement, number, found) for (number, arrangement), found in rounds.items()]


def main() -> int:
    """Measure, print, write, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, nargs="+", default=list(_NUM_REQUESTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100, help="of a round")
    parser.add_argument("--lead-in", type=int, default=40, help="steps of a round that do not count")
    parser.add_argument("--interval-ms", type=float, default=1.0, help="between steps; 0: none")
    parser.add_argument("--first-outputs", type=int, default=300, help="timed in a round")
    names = [each.name for each in ARRANGEMENTS]
    parser.add_argument("--pin", action="store_true", help="bind each process to a core of its own")
    parser.add_argument("--only", nargs="+", choices=names, help="arrangements; all are measured otherwise")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="a PNG; needs matplotlib")
    arguments = parser.parse_args()
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        parser.error("needs two cores: both sides work at the same time")
    first, second, *_ = sorted(cores)
    arrangements = [each for each in ARRANGEMENTS if not arguments.only or each.name in arguments.only]
    shape = Shape(arguments.lead_in, arguments.steps, arguments.interval_ms / 1000, arguments.first_outputs)
    bound = ({first}, {second}) if arguments.pin else (cores, cores)
    rows = measure(arrangements, arguments.requests, shape, arguments.rounds, bound)
    print_table(rows)
    if arguments.json is not None:
        settings = {
            "rounds": arguments.rounds,
            "lead_in": shape.num_lead_in,
            "steps": shape.num_steps,
            "interval_s": shape.interval_s,
            "first_outputs": shape.num_first_outputs,
            "is_pinned": arguments.pin,
        }
        Report("boundary", settings, rows).write(arguments.json)
    if arguments.plot is not None:
        plot(rows, arguments.plot)
    if 256 not in arguments.requests or not {OURS, PEER} <= set(arrangements):
        return 0
    found = shortfalls(rows, OURS, PEER)
    for words in found:
        print(words, file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
