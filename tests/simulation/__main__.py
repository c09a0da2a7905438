"""The simulator by command: `python -m tests.simulation --seeds 20000 --json F`.

`--trace N` prints the last N things that happened before an invariant broke.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.simulation.campaign import FAILURES, MIN_SHARE, Report, run_campaign
from tests.simulation.simulation import Simulation


def main() -> int:
    """Run seeds, print what happened; 1 where an invariant broke or something hardly ever happened."""
    parser = argparse.ArgumentParser(prog="tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--requests", type=int, default=100, help="requests of each seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", type=Path, help="where to write the report")
    parser.add_argument(
        "--trace", type=int, default=0, help="run the first seed alone, tell the last so many events"
    )
    arguments = parser.parse_args()
    if arguments.trace:
        return _trace(arguments.first, arguments.requests, arguments.trace)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    report = run_campaign(seeds, arguments.requests, arguments.jobs, _print_progress)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report.as_json(), indent=1) + "\n")
    _print(report)
    return 1 if report.faults or report.too_rare else 0


def _print_progress(report: Report) -> None:
    if report.num_seeds % 1000 == 0:
        print(f"{report.num_seeds} seeds, {len(report.faults)} broken", file=sys.stderr, flush=True)


def _print(report: Report) -> None:
    summary = report.as_json()
    print(
        f"{report.num_seeds} seeds of {report.num_requests} requests in {summary['elapsed_s']} s, "
        f"{summary['cpu_ms_per_seed']} ms of a core each"
    )
    print(f"  no request was preempted more than {report.max_preemptions} times")
    for name, share in report.shares.items():
        print(f"  {name:24} in {100 * share:6.2f} % of the seeds, {report.totals[name]} in all")
    for fault in report.faults:
        print(f"seed {fault.seed}, step {fault.step}: {fault.detail}")
        if fault.invariant == "crash":
            print(fault.trace)
    for name in report.too_rare:
        print(f"{name} happens in less than {100 * MIN_SHARE:g} % of the seeds")
    print(f"{len(report.faults)} broken")


def _trace(seed: int, num_requests: int, num_events: int) -> int:
    simulation = Simulation(seed)
    journal: list[str] = []
    simulation.world.journal = journal
    print(simulation.setup)
    try:
        simulation.run(num_requests)
    except FAILURES as failure:
        print(*journal[-num_events:], repr(failure), sep="\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
